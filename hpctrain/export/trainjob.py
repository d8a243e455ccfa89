"""Writes a run as a TrainJob of Kubeflow's trainer, with a runtime of its own. Pure.

A TrainJob alone has neither volumes nor a failure policy: its runtime has. With one beside it the
cluster needs no runtime of an administrator, and the fields that have changed between releases of
the trainer (`podTemplateOverrides`, `runtimePatches`) are not used. Belongs here: TrainingRuntime
and TrainJob. Does not belong here: pods (see `pod`).
"""

from __future__ import annotations

from typing import Any

from hpctrain.export import pod
from hpctrain.export.exported_run import ExportedRun
from hpctrain.export.file_head import file_head
from hpctrain.export.pod_settings import PodSettings
from hpctrain.export.yaml_text import yaml_documents

_API = "trainer.kubeflow.org/v1alpha1"


def trainjob_text(run: ExportedRun, settings: PodSettings) -> str:
    """Write ConfigMap, TrainingRuntime and TrainJob as one file.

    Raises LimitError for settings that are too large.
    """
    documents = (
        pod.settings_map(run, settings),
        _runtime(run, settings),
        _trainjob(run, settings),
    )
    lost = (*run.lost, *pod.missing_in_pods(run, settings))
    return yaml_documents(file_head(run, lost, _how_to(settings)), documents)


def _how_to(settings: PodSettings) -> tuple[str, ...]:
    name, place = settings.name, f" -n {settings.namespace}" if settings.namespace else ""
    return (
        f"Start     kubectl apply{place} -f FILE",
        f"Watch     kubectl get trainjob{place} {name}; kubectl logs{place} -f job/{name}-node-0",
        f"Stop      kubectl delete{place} trainjob {name}  (ranks save; apply goes on from there)",
    )


def _runtime(run: ExportedRun, settings: PodSettings) -> dict[str, Any]:
    """Make what the trainer turns into a JobSet; it fills in image, command and variables.

    Sources: kubeflow/trainer, pkg/runtime/framework/plugins/jobset (label of the Job, name of the
    container) and plugins/torch (variables PET_*, which torchrun's options read).
    """
    ancestor = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    job = {
        "name": pod.NODE,
        "template": {"metadata": {"labels": ancestor}, "spec": pod.node_job(run, settings, {})},
    }
    framework = {"trainer.kubeflow.org/framework": "torch"}
    return {
        "apiVersion": _API,
        "kind": "TrainingRuntime",
        "metadata": pod.metadata(settings, settings.name, **framework),
        "spec": {
            "mlPolicy": {"numNodes": run.nodes, "torch": {}},
            "template": {
                "spec": {
                    "failurePolicy": pod.failure_policy(run, settings),
                    "replicatedJobs": [job],
                }
            },
        },
    }


def _trainjob(run: ExportedRun, settings: PodSettings) -> dict[str, Any]:
    runtime = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime"}
    return {
        "apiVersion": _API,
        "kind": "TrainJob",
        "metadata": pod.metadata(settings, settings.name, **pod.queue_labels(settings)),
        "spec": {
            "runtimeRef": {**runtime, "name": settings.name},
            "trainer": {
                "image": settings.image,
                "command": pod.command(run, settings),
                "env": pod.variables(run, settings),
                "numNodes": run.nodes,
                "numProcPerNode": run.ranks_per_node,
                "resourcesPerNode": pod.resources(run, settings),
            },
        },
    }
