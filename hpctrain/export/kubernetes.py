"""Writes a run for Kubernetes: a JobSet, or a TrainJob of Kubeflow's trainer, with a ConfigMap.

A TrainJob alone has neither volumes nor a failure policy: its runtime has. With one beside it the
cluster needs no runtime of an administrator, and the fields that have changed between releases of
the trainer (`podTemplateOverrides`, `runtimePatches`) are not used. Belongs here: checks of options
that need no cluster, the documents, and their YAML. Does not belong here: what holds for hosts
without a scheduler, too (see `exported_run`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from hpctrain.base.errors import InvalidInputError, LimitError, Problem, UsageError
from hpctrain.base.units import short_bytes
from hpctrain.export.exported_run import Export, ExportedFile, ExportedRun, exported_run
from hpctrain.export.lost_settings import LostSetting
from hpctrain.job.prepare import Prepared
from hpctrain.job.render.containers import has_amd_gpus, run_container
from hpctrain.spec.job_text import literal_text
from hpctrain.spec.positions import scalar_text
from hpctrain.spec.profile.software import ContainerProfile
from hpctrain.version import __version__

# The name of container and Job that Kubeflow's trainer looks for (pkg/constants, Node).
_NODE = "node"
_RUNS_PATH, _SETTINGS_PATH = "/runs", "/etc/hpctrain"
_CONFIG_ERROR_CODE = 78  # TrainerExit.CONFIG_ERROR: another start would end so, too
# etcd holds it (kubernetes.io, ConfigMaps: the data cannot exceed 1 MiB); names need some bytes.
_MOST_SETTINGS_BYTES = 2**20 - 2**12
_RESTARTS_ALIKE = "PodFailurePolicy"  # batch/v1: the reason of a Job that its policy has failed
_PORT = 29500
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_TRAINER_API = "trainer.kubeflow.org/v1alpha1"
# RFC 1123, section 2.1, and RFC 1035 for the service of the pods, which begins with a letter.
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LONGEST_LABEL = 63
# A pod of an indexed Job is NAME-node-0-INDEX-SUFFIX, with five characters for the suffix.
_POD_SUFFIX = len("-node-0-") + len("-abcde")
_RESOURCE = re.compile(r"([a-z0-9.-]+/)?[A-Za-z0-9][A-Za-z0-9._-]*=[1-9][0-9]*")
_PAIR = re.compile(r"[A-Za-z0-9./_-]+=[A-Za-z0-9._-]+")


@dataclass(frozen=True)
class PodOptions:
    """Options of the command line about Kubernetes, as they were written.

    `run_claim` holds the run directory. `resources` are further ones of each node, such as
    `rdma/hca=8`. `secret` has the variables that a spec inherits, under their names.
    """

    name: str | None = None
    image: str | None = None
    run_claim: str | None = None
    volumes: tuple[str, ...] = ()
    secret: str | None = None
    namespace: str | None = None
    queue: str | None = None
    resources: tuple[str, ...] = ()
    node_labels: tuple[str, ...] = ()
    host_network: bool = False
    most_restarts: int | None = None


def export_pods(prepared: Prepared, kind: str, options: PodOptions) -> Export:
    """Write a run for Kubernetes, as a `jobset` or a `trainjob`.

    Raises UsageError for options that Kubernetes would refuse, InvalidInputError for a run without
    an image of a registry, LimitError for settings that are too large.
    """
    spec, profile, nodes = prepared.job.spec, prepared.job.profile, prepared.plan.nodes.nodes
    if options.run_claim is None:
        raise UsageError(
            "--run-claim is missing: checkpoints have to outlive the pods",
            hint="name a PersistentVolumeClaim with access mode ReadWriteMany",
        )
    for option in ("namespace", "secret", "queue"):
        given = getattr(options, option)
        if given is not None:
            _check_label(f"--{option}", given)
    if options.name is not None:
        _check_label("--name", options.name, nodes)
    container = run_container(spec.container, profile.software.container)
    image = options.image or _registry_image(container, profile.name)
    _check_label("--run-claim", options.run_claim)
    pods = _Pods(
        run=exported_run(prepared, "kubernetes", host_network=options.host_network),
        options=options,
        name=options.name or run_label(spec.name, nodes),
        image=image,
        python=literal_text(container.python if container is not None else "") or "python3",
        claims=tuple(map(_claim_mount, options.volumes)),
        resources=dict(map(_resource_count, options.resources)),
        node_labels=dict(map(_node_label, options.node_labels)),
        gpu_resource="amd.com/gpu" if has_amd_gpus(profile) else "nvidia.com/gpu",
    )
    place = f" -n {options.namespace}" if options.namespace else ""
    how_to = (
        f"Start     kubectl apply{place} -f FILE",
        f"Watch     kubectl get {kind}{place} {pods.name}; "
        f"kubectl logs{place} -f job/{pods.name}-node-0",
        f"Stop      kubectl delete{place} {kind} {pods.name}  "
        "(ranks save; apply goes on from there)",
    )
    documents = [pods.settings_map()]
    documents += [pods.jobset()] if kind == "jobset" else [pods.runtime(), pods.trainjob()]
    lost = (*pods.run.lost, *pods.missing())
    text = yaml_documents(pods.run.comment(lost, how_to), documents)
    return Export((ExportedFile(f"{pods.name}-{kind}.yaml", text),), lost)


@dataclass(frozen=True)
class _Pods:
    """A run in pods: one per node, none of them ever alone.

    `claims` are the paths of volumes, each with its claim.
    """

    run: ExportedRun
    options: PodOptions
    name: str
    image: str
    python: str
    claims: tuple[tuple[str, str], ...]
    resources: Mapping[str, str]
    node_labels: Mapping[str, str]
    gpu_resource: str

    def settings_map(self) -> dict[str, Any]:
        """Make the ConfigMap with train.json. Raises LimitError where it is too large for one."""
        size_bytes = len(self.run.train_json.encode())
        if size_bytes > _MOST_SETTINGS_BYTES:
            raise LimitError(
                f"train.json has {short_bytes(size_bytes)}, and a ConfigMap holds 1 MiB",
                hint="put it into the image or on the run's volume, and start the program by hand",
            )
        return {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": self._metadata(f"{self.name}-settings"),
            "immutable": True,
            "data": {"train.json": self.run.train_json},
        }

    def jobset(self) -> dict[str, Any]:
        container = {
            "image": self.image,
            "command": self._command(),
            # torchrun's variables: each node has its number, and all know the first
            "env": [
                {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}},
                {"name": "PET_MASTER_ADDR", "value": f"{self.name}-{_NODE}-0-0.{self.name}"},
                {"name": "PET_MASTER_PORT", "value": str(_PORT)},
                *self._variables(),
            ],
            "ports": [{"containerPort": _PORT, "protocol": "TCP"}],
            "resources": self._devices(),
        }
        job = {"name": _NODE, "replicas": 1, "template": {"spec": self._node_job(container)}}
        return {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": self._metadata(self.name, **self._queue_labels()),
            "spec": {
                "failurePolicy": self._failure_policy(),
                "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
                "replicatedJobs": [job],
            },
        }

    def runtime(self) -> dict[str, Any]:
        """Make what the trainer turns into a JobSet; it fills in image, command and variables.

        Sources: kubeflow/trainer, pkg/runtime/framework/plugins/jobset (label of the Job, name of
        the container) and plugins/torch (variables PET_*, which torchrun's options read).
        """
        ancestor = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
        job = {
            "name": _NODE,
            "template": {"metadata": {"labels": ancestor}, "spec": self._node_job({})},
        }
        framework = {"trainer.kubeflow.org/framework": "torch"}
        jobs = {"failurePolicy": self._failure_policy(), "replicatedJobs": [job]}
        return {
            "apiVersion": _TRAINER_API,
            "kind": "TrainingRuntime",
            "metadata": self._metadata(self.name, **framework),
            "spec": {
                "mlPolicy": {"numNodes": self.run.nodes, "torch": {}},
                "template": {"spec": jobs},
            },
        }

    def trainjob(self) -> dict[str, Any]:
        runtime = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime"}
        return {
            "apiVersion": _TRAINER_API,
            "kind": "TrainJob",
            "metadata": self._metadata(self.name, **self._queue_labels()),
            "spec": {
                "runtimeRef": {**runtime, "name": self.name},
                "trainer": {
                    "image": self.image,
                    "command": self._command(),
                    "env": self._variables(),
                    "numNodes": self.run.nodes,
                    "numProcPerNode": self.run.ranks_per_node,
                    "resourcesPerNode": self._devices(),
                },
            },
        }

    def missing(self) -> Iterator[LostSetting]:
        """List what pods will not find: variables without a secret, files that no volume has."""
        if self.run.own_names and self.options.secret is None:
            names = ", ".join(self.run.own_names)
            reason = "variables of the shell that submits, whose values are in no file"
            yield LostSetting(f"environment.inherit {names}", reason, "`--secret`")
        places = (_RUNS_PATH, *(path for path, _ in self.claims))
        for path in self.run.inputs:
            if not any(path == place or path.startswith(f"{place}/") for place in places):
                reason = "no volume has this path, so the image must"
                yield LostSetting(path, reason, f"`--volume CLAIM:{PurePosixPath(path).parent}`")
        if self.run.cpus is None:
            reason = "a whole node of the profile, of which Kubernetes keeps a part for itself"
            yield LostSetting("requests of CPUs", reason, "`resources.cpus_per_gpu`")

    def _metadata(self, name: str, **labels: str) -> dict[str, Any]:
        """Name an object, with the labels that all objects of the run have."""
        namespace = self.options.namespace
        own = {"app.kubernetes.io/name": "hpctrain", "app.kubernetes.io/instance": self.name}
        return {
            "name": name,
            **({} if namespace is None else {"namespace": namespace}),
            "labels": {**own, "app.kubernetes.io/version": __version__, **labels},
        }

    def _queue_labels(self) -> dict[str, str]:
        """Return the label by which Kueue admits all pods together, if a queue was named."""
        queue = self.options.queue
        return {} if queue is None else {"kueue.x-k8s.io/queue-name": queue}

    def _failure_policy(self) -> dict[str, Any]:
        """Make JobSet's policy: all pods anew, after the last old one is gone, so often in all."""
        most = self.options.most_restarts
        rule = {
            "name": "wrongSettings",
            "action": "FailJobSet",
            "onJobFailureReasons": [_RESTARTS_ALIKE],
        }
        return {
            "maxRestarts": self.run.restarts if most is None else most,
            "restartStrategy": "BlockingRecreate",
            "rules": [rule],
        }

    def _command(self) -> list[str]:
        directory = f"{_RUNS_PATH}/{self.name}"
        program = self.run.program(directory, f"{_SETTINGS_PATH}/train.json")
        return [_literal(word) for word in (self.python, *program)]

    def _variables(self) -> list[dict[str, Any]]:
        """List the variables of the container: values of the plan, and names of a secret's keys."""
        listed: list[dict[str, Any]] = []
        for one in self.run.variables:
            value = literal_text(one.value)
            assert value is not None, "no others are carried into pods"
            listed.append({"name": one.name, "value": _literal(value)})
        if self.options.secret is not None:
            for name in self.run.own_names:
                key = {"name": self.options.secret, "key": name}
                listed.append({"name": name, "valueFrom": {"secretKeyRef": key}})
        return listed

    def _devices(self) -> dict[str, Any]:
        """Ask for the GPUs of a node, and for CPUs and memory where the node is shared."""
        run, devices = self.run, dict(self.resources)
        if run.accelerator == "cuda":
            devices = {self.gpu_resource: str(run.ranks_per_node), **devices}
        host = {} if run.cpus is None else {"cpu": str(run.cpus)}
        memory = {} if run.memory_bytes is None else {"memory": f"{run.memory_bytes // 2**20}Mi"}
        # Both lists: Kubeflow's trainer takes a node without requests for one process
        # (plugins/torch).
        asked = {"requests": {**host, **memory, **devices}, "limits": {**memory, **devices}}
        return {kind: amounts for kind, amounts in asked.items() if amounts}

    def _node_job(self, container: dict[str, Any]) -> dict[str, Any]:
        """Make the spec of an indexed Job with one pod per node.

        Launches need all nodes, so one failed pod fails the Job, and whoever owns it starts all
        again.
        """
        mounts = [
            {"name": "run", "mountPath": _RUNS_PATH},
            {"name": "settings", "mountPath": _SETTINGS_PATH, "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
        ]
        volumes: list[dict[str, Any]] = [
            {"name": "run", "persistentVolumeClaim": {"claimName": self.options.run_claim}},
            {"name": "settings", "configMap": {"name": f"{self.name}-settings"}},
            # the default of 64 MiB is too small for NCCL and for loaders of data
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ]
        for number, (path, claim) in enumerate(self.claims):
            mounts.append({"name": f"volume-{number}", "mountPath": path})
            source = {"claimName": claim}
            volumes.append({"name": f"volume-{number}", "persistentVolumeClaim": source})
        container = {"name": _NODE, **container, "volumeMounts": mounts}
        if self.resources:
            # network cards register memory beyond the limit that containers have (ulimit -l)
            container["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}
        pod: dict[str, Any] = {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": self.run.grace_seconds,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
        }
        if self.node_labels:
            pod["nodeSelector"] = dict(self.node_labels)
        if self.options.host_network:
            pod |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
        pod |= {"containers": [container], "volumes": volumes}
        wrong_settings = {
            "containerName": _NODE,
            "operator": "In",
            "values": [_CONFIG_ERROR_CODE],
        }
        return {
            "completionMode": "Indexed",
            "completions": self.run.nodes,
            "parallelism": self.run.nodes,
            "backoffLimit": 0,
            "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": wrong_settings}]},
            "template": {"spec": pod},
        }


def _literal(text: str) -> str:
    """Escape what Kubernetes would expand (core/v1, Container: `$$` is one dollar sign)."""
    return text.replace("$", "$$")


# -- Options ------------------------------------------------------------------------------------


def run_label(name: str, nodes: int) -> str:
    """Make the name of a spec one that Kubernetes takes for a JobSet of so many nodes."""
    longest = _LONGEST_LABEL - _POD_SUFFIX - len(str(nodes - 1))
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    plain = plain if plain[:1].isalpha() else f"run-{plain}"
    return plain[:longest].rstrip("-")


def _check_label(option: str, name: str, nodes: int | None = None) -> None:
    """Raise UsageError unless `name` is a label; of a JobSet of so many nodes a shorter one."""
    suffix = 0 if nodes is None else _POD_SUFFIX + len(str(nodes - 1))
    if not _LABEL.fullmatch(name) or len(name) > _LONGEST_LABEL - suffix:
        raise UsageError(
            f"{option}: `{name}` is no name for Kubernetes",
            hint=f"small letters, digits and `-`, at most {_LONGEST_LABEL - suffix} characters",
        )


def _claim_mount(text: str) -> tuple[str, str]:
    """Read `CLAIM:/PATH` as path and claim."""
    claim, _, path = text.partition(":")
    whole = PurePosixPath(path)
    if not whole.is_absolute() or ":" in path or whole in (PurePosixPath("/"), PurePosixPath("//")):
        raise UsageError(f"--volume: `{text}`", hint="write CLAIM:/PATH, such as `data:/data`")
    if whole.is_relative_to(_RUNS_PATH):
        raise UsageError(f"--volume: {path} is the place of `--run-claim`")
    _check_label("--volume", claim)
    return str(whole), claim


def _resource_count(text: str) -> tuple[str, str]:
    if not _RESOURCE.fullmatch(text):
        raise UsageError(f"--resource: `{text}`", hint="write NAME=COUNT, such as `rdma/hca=8`")
    name, _, count = text.rpartition("=")
    return name, count


def _node_label(text: str) -> tuple[str, str]:
    if not _PAIR.fullmatch(text):
        hint = "write LABEL=VALUE, such as `nvidia.com/gpu.product=NVIDIA-H100-80GB-HBM3`"
        raise UsageError(f"--node-selector: `{text}`", hint=hint)
    label, _, value = text.partition("=")
    return label, value


def _registry_image(container: ContainerProfile | None, profile_name: str) -> str:
    """Return the image of the container of a run as Kubernetes names it.

    enroot writes `REGISTRY#IMAGE`, apptainer `docker://REGISTRY/IMAGE` (their manuals). Raises
    InvalidInputError where the run has no image of a registry.
    """
    hint = "name one by `--image`: with hpctrain, the engine, and what the profile's nodes have"
    if container is None:
        message = f"neither the spec nor profile {profile_name} has a container image"
        raise InvalidInputError([Problem(message, hint=hint)])
    image = literal_text(container.image) or ""
    plain = image.removeprefix("docker://")
    pulled = container.registry_image or image != plain
    if not pulled or not plain or container.launcher in ("edf", "uenv"):
        message = f"image {container.image} is no image of a registry, and pods pull theirs"
        raise InvalidInputError([Problem(message, hint=hint)])
    return plain.replace("#", "/", 1)


# -- YAML that every reader understands alike ---------------------------------------------------


def yaml_documents(head: str, documents: Sequence[Mapping[str, Any]]) -> str:
    """Write several documents into one file, below `head`, its comment.

    Kubernetes reads YAML 1.1 (`on` is true, `1:30` is 90), so every text that could be something
    else has quotes.
    """
    texts = ["\n".join([*_mapping(one), ""]) for one in documents]
    return head + "---\n" + "---\n".join(texts)


def _mapping(values: Mapping[str, Any]) -> Iterator[str]:
    for key, value in values.items():
        yield from _entry(f"{scalar_text(key)}:", value)


def _entry(head: str, value: Any) -> Iterator[str]:
    if isinstance(value, str) and "\n" in value:
        yield f"{head} |"
        assert value.endswith("\n") and not value.endswith("\n\n")
        yield from (f"  {line}" if line else "" for line in value.splitlines())
        return
    if not isinstance(value, dict | list) or not value:
        yield f"{head} {scalar_text(value)}"
        return
    if isinstance(value, dict):
        lines = [f"  {line}" for line in _mapping(value)]
    else:
        lines = [f"  {line}" for item in value for line in _entry("-", item)]
    if head == "-":  # the first key of an item stands behind the dash
        yield f"- {lines[0][2:]}"
        yield from lines[1:]
    else:
        yield head
        yield from lines
