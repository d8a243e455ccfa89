"""Writes a run as a JobSet (jobset.x-k8s.io), with the ConfigMap that its pods read. Pure.

Belongs here: what only a JobSet without Kubeflow's trainer says, such as torchrun's variables. Does
not belong here: pods (see `pod`), the trainer's own kinds (see `trainjob`).
"""

from __future__ import annotations

from typing import Any

from hpctrain.export import pod
from hpctrain.export.exported_run import ExportedRun
from hpctrain.export.file_head import file_head
from hpctrain.export.pod_settings import PodSettings
from hpctrain.export.yaml_text import yaml_documents

_PORT = 29500
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def jobset_text(run: ExportedRun, settings: PodSettings) -> str:
    """Write ConfigMap and JobSet as one file. Raises LimitError for settings that are too large."""
    documents = (pod.settings_map(run, settings), _jobset(run, settings))
    lost = (*run.lost, *pod.missing_in_pods(run, settings))
    return yaml_documents(file_head(run, lost, _how_to(settings)), documents)


def _how_to(settings: PodSettings) -> tuple[str, ...]:
    name, place = settings.name, f" -n {settings.namespace}" if settings.namespace else ""
    return (
        f"Start     kubectl apply{place} -f FILE",
        f"Watch     kubectl get jobset{place} {name}; kubectl logs{place} -f job/{name}-node-0",
        f"Stop      kubectl delete{place} jobset {name}  (ranks save; apply goes on from there)",
    )


def _jobset(run: ExportedRun, settings: PodSettings) -> dict[str, Any]:
    name = settings.name
    container = {
        "image": settings.image,
        "command": pod.command(run, settings),
        # torchrun's variables: each node has its number, and all know the first
        "env": [
            {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}},
            {"name": "PET_MASTER_ADDR", "value": f"{name}-{pod.NODE}-0-0.{name}"},
            {"name": "PET_MASTER_PORT", "value": str(_PORT)},
            *pod.variables(run, settings),
        ],
        "ports": [{"containerPort": _PORT, "protocol": "TCP"}],
        "resources": pod.resources(run, settings),
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": pod.metadata(settings, name, **pod.queue_labels(settings)),
        "spec": {
            "failurePolicy": pod.failure_policy(run, settings),
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "replicatedJobs": [
                {
                    "name": pod.NODE,
                    "replicas": 1,
                    "template": {"spec": pod.node_job(run, settings, container)},
                }
            ],
        },
    }
