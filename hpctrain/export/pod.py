"""Makes the Job of the nodes, its pods, and the ConfigMap that they read. Pure.

Belongs here: what JobSet and TrainJob share. Does not belong here: restarts of all pods together
(see `jobset`), resources of other kinds.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from hpctrain.base.errors import LimitError
from hpctrain.base.units import short_bytes
from hpctrain.export.exported_run import ExportedRun
from hpctrain.export.lost_settings import LostSetting
from hpctrain.export.pod_settings import RUNS_PATH, PodSettings
from hpctrain.spec.job_text import literal_text
from hpctrain.version import __version__

# The name of container and Job that Kubeflow's trainer looks for (pkg/constants, Node).
NODE = "node"
SETTINGS_PATH = "/etc/hpctrain"
CONFIG_ERROR_CODE = 78  # hpctrain.records.run_records.TrainerExit: another start would end so, too
# etcd holds it (kubernetes.io, ConfigMaps: the data cannot exceed 1 MiB); names need some bytes.
_MOST_SETTINGS_BYTES = 2**20 - 2**12
_RESTARTS_ALIKE = "PodFailurePolicy"  # batch/v1: the reason of a Job that its policy has failed


def metadata(settings: PodSettings, name: str, **labels: str) -> dict[str, Any]:
    """Name an object, with the labels that all objects of the run have."""
    own = {"app.kubernetes.io/name": "hpctrain", "app.kubernetes.io/instance": settings.name}
    place = {} if settings.namespace is None else {"namespace": settings.namespace}
    return {
        "name": name,
        **place,
        "labels": {**own, "app.kubernetes.io/version": __version__, **labels},
    }


def queue_labels(settings: PodSettings) -> dict[str, str]:
    """Return the label by which Kueue admits all pods together, if a queue was named."""
    return {} if settings.queue is None else {"kueue.x-k8s.io/queue-name": settings.queue}


def settings_map(run: ExportedRun, settings: PodSettings) -> dict[str, Any]:
    """Make the ConfigMap with train.json. Raises LimitError where it is too large for one."""
    size_bytes = len(run.train_json.encode())
    if size_bytes > _MOST_SETTINGS_BYTES:
        raise LimitError(
            f"train.json has {short_bytes(size_bytes)}, and a ConfigMap holds 1 MiB",
            hint="put it into the image or on the run's volume, and start the program by hand",
        )
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(settings, f"{settings.name}-settings"),
        "immutable": True,
        "data": {"train.json": run.train_json},
    }


def node_job(run: ExportedRun, settings: PodSettings, container: dict[str, Any]) -> dict[str, Any]:
    """Make the spec of an indexed Job: one pod per node, none of them ever alone.

    Launches need all nodes, so one failed pod fails the Job, and whoever owns it starts all again.
    """
    rule = {
        "action": "FailJob",
        "onExitCodes": {
            "containerName": NODE,
            "operator": "In",
            "values": [CONFIG_ERROR_CODE],
        },
    }
    return {
        "completionMode": "Indexed",
        "completions": run.nodes,
        "parallelism": run.nodes,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [rule]},
        "template": {"spec": _pod(run, settings, container)},
    }


def failure_policy(run: ExportedRun, settings: PodSettings) -> dict[str, Any]:
    """Make JobSet's policy: all pods anew, after the last old one is gone, so often in all."""
    most = run.restarts if settings.most_restarts is None else settings.most_restarts
    return {
        "maxRestarts": most,
        "restartStrategy": "BlockingRecreate",
        "rules": [
            {
                "name": "wrongSettings",
                "action": "FailJobSet",
                "onJobFailureReasons": [_RESTARTS_ALIKE],
            }
        ],
    }


def command(run: ExportedRun, settings: PodSettings) -> list[str]:
    """Write the command of each node; Kubernetes reads `$` in it."""
    words = (
        settings.python,
        *run.program(settings.run_directory, f"{SETTINGS_PATH}/train.json"),
    )
    return [_literal(word) for word in words]


def variables(run: ExportedRun, settings: PodSettings) -> list[dict[str, Any]]:
    """List the variables of the container: values of the plan, and names of a secret's keys."""
    listed: list[dict[str, Any]] = []
    for one in run.variables:
        value = literal_text(one.value)
        assert value is not None, "portable_variables carries no others into pods"
        listed.append({"name": one.name, "value": _literal(value)})
    if settings.secret is not None:
        listed += [
            {
                "name": name,
                "valueFrom": {"secretKeyRef": {"name": settings.secret, "key": name}},
            }
            for name in run.own_names
        ]
    return listed


def missing_in_pods(run: ExportedRun, settings: PodSettings) -> tuple[LostSetting, ...]:
    """List what pods will not find: variables without a secret, files that no volume has."""
    found = []
    if run.own_names and settings.secret is None:
        names = ", ".join(run.own_names)
        reason = "variables of the shell that submits, whose values are in no file"
        found.append(LostSetting(f"environment.inherit {names}", reason, "`--secret`"))
    places = (RUNS_PATH, *(volume.path for volume in settings.volumes))
    for path in run.inputs:
        if not any(path == place or path.startswith(f"{place}/") for place in places):
            reason = "no volume has this path, so the image must"
            found.append(
                LostSetting(path, reason, f"`--volume CLAIM:{PurePosixPath(path).parent}`")
            )
    if run.cpus is None:
        reason = "a whole node of the profile, of which Kubernetes keeps a part for itself"
        found.append(LostSetting("requests of CPUs", reason, "`resources.cpus_per_gpu`"))
    return tuple(found)


def resources(run: ExportedRun, settings: PodSettings) -> dict[str, Any]:
    """Ask for the GPUs of a node, and for CPUs and memory where the node is shared."""
    devices = dict(settings.resources)
    if run.accelerator == "cuda":
        devices = {settings.gpu_resource: str(run.ranks_per_node), **devices}
    host = {} if run.cpus is None else {"cpu": str(run.cpus)}
    memory = {} if run.memory_bytes is None else {"memory": f"{run.memory_bytes // 2**20}Mi"}
    # Both lists: Kubeflow's trainer takes a node without requests for one process (plugins/torch).
    asked = {"requests": {**host, **memory, **devices}, "limits": {**memory, **devices}}
    return {kind: amounts for kind, amounts in asked.items() if amounts}


def _pod(run: ExportedRun, settings: PodSettings, container: dict[str, Any]) -> dict[str, Any]:
    mounts = [
        {"name": "run", "mountPath": RUNS_PATH},
        {"name": "settings", "mountPath": SETTINGS_PATH, "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    volumes: list[dict[str, Any]] = [
        {"name": "run", "persistentVolumeClaim": {"claimName": settings.run_claim}},
        {"name": "settings", "configMap": {"name": f"{settings.name}-settings"}},
        # the default of 64 MiB is too small for NCCL and for loaders of data
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    for number, one in enumerate(settings.volumes):
        mounts.append({"name": f"volume-{number}", "mountPath": one.path})
        claim = {"claimName": one.claim}
        volumes.append({"name": f"volume-{number}", "persistentVolumeClaim": claim})
    # network cards register memory beyond the limit that containers have (ulimit -l)
    locked = {"securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}}
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": run.grace_seconds,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        **({"nodeSelector": dict(settings.node_labels)} if settings.node_labels else {}),
        **(
            {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
            if settings.host_network
            else {}
        ),
        "containers": [
            {
                "name": NODE,
                **container,
                "volumeMounts": mounts,
                **(locked if settings.resources else {}),
            }
        ],
        "volumes": volumes,
    }


def _literal(text: str) -> str:
    """Escape what Kubernetes would expand (core/v1, Container: `$$` is one dollar sign)."""
    return text.replace("$", "$$")
