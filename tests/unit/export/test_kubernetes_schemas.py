"""What Kubernetes would say: the documents against the types of Kubeflow, JobSet and Kubernetes.

kubeflow-trainer-api has TrainJob, TrainingRuntime and JobSet (its models pass over unknown fields,
so each document has to come back whole); kubernetes-validate has the schemas of everything of
Kubernetes' own, in the strict form that refuses unknown fields.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_exported_pods import OPTIONS, documents, job_of, planned

api = pytest.importorskip("kubeflow_trainer_api.models", reason="needs kubeflow-trainer-api")
validator = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")

# The oldest release in which podFailurePolicy is stable, and the newest that the package knows.
RELEASES = ("1.31", validator.latest_version())
KINDS = {
    "JobSet": "JobsetV1alpha2JobSet",
    "TrainingRuntime": "TrainerV1alpha1TrainingRuntime",
    "TrainJob": "TrainerV1alpha1TrainJob",
}
EVERYTHING = replace(
    OPTIONS,
    namespace="ml",
    volumes=("data:/data",),
    secret="keys",
    queue="gpus",
    resources=("rdma/hca=8",),
    node_labels=("nvidia.com/gpu.product=NVIDIA-H100-80GB-HBM3",),
    host_network=True,
    most_restarts=7,
)


def refuse_unknown(document: dict[str, Any]) -> None:
    """Raise unless the types of Kubeflow and JobSet have every field of the document."""
    assert getattr(api, KINDS[document["kind"]]).from_dict(document).to_dict() == document


def refuse_wrong(document: dict[str, Any]) -> None:
    for release in RELEASES:
        validator.validate(document, release, strict=True)


def jobs(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the Jobs that the controllers would create."""
    made = [job_of(one) for one in found if one["kind"] in ("JobSet", "TrainingRuntime")]
    head = {"apiVersion": "batch/v1", "kind": "Job"}
    return [{**head, "metadata": {"name": "node"}, "spec": one["spec"]} for one in made]


@pytest.mark.parametrize("options", [OPTIONS, EVERYTHING], ids=["least", "everything"])
@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_documents_are_what_the_controllers_take(kind: str, options: Any, tmp_path: Path) -> None:
    inherited = ("resources.gpus=16", "environment.inherit=[WANDB_API_KEY]")
    found = documents(planned(tmp_path, *inherited), kind, options)
    first, *others = found
    assert first["kind"] == "ConfigMap" and others
    refuse_wrong(first)
    for document in others:
        refuse_unknown(document)
    for job in jobs(found):
        refuse_wrong(job)
    assert jobs(found), "no Job was looked at"


def test_container_of_a_trainjob_is_one_of_a_pod(tmp_path: Path) -> None:
    """The trainer puts its fields into the container of the runtime: together they are a Job."""
    _, runtime, trainjob = documents(planned(tmp_path), "trainjob", EVERYTHING)
    (job,) = jobs([runtime])
    (container,) = job["spec"]["template"]["spec"]["containers"]
    trainer = trainjob["spec"]["trainer"]
    container |= {name: trainer[name] for name in ("image", "command", "env")}
    container["resources"] = trainer["resourcesPerNode"]
    refuse_wrong(job)


@pytest.mark.parametrize("place", ["unknown field", "wrong type"])
def test_the_checks_can_fail(place: str, tmp_path: Path) -> None:
    _, jobset = documents(planned(tmp_path), "jobset")
    (job,) = jobs([jobset])
    if place == "unknown field":
        jobset["spec"]["maxRestarts"] = 3
        job["spec"]["template"]["spec"]["gpus"] = 8
    else:
        jobset["spec"]["failurePolicy"]["maxRestarts"] = "often"
        job["spec"]["template"]["spec"]["containers"][0]["env"][1]["value"] = 22
    with pytest.raises((AssertionError, ValueError)):
        refuse_unknown(jobset)
    with pytest.raises(validator.ValidationError):
        refuse_wrong(job)
