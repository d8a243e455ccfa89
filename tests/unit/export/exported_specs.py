"""Specs to export: planned as `submit` would, for tests of the files that they become."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from hpctrain.export.kubernetes import PodOptions, export_pods
from hpctrain.job.prepare import Prepared, prepare

ROOT = Path(__file__).resolve().parents[3]
PYTHON = "/opt/hpctrain/bin/python3"
IMAGE = "ghcr.io/example/train:1"
OPTIONS = PodOptions(image=IMAGE, run_claim="runs")


def planned(
    runs: Path, *overrides: str, profile: str = "h100x16", spec: str = "llama7b.yaml"
) -> Prepared:
    """Plan an example, with some fields of its spec changed."""
    return prepare(ROOT / "examples" / spec, profile, overrides, runs=runs, python=PYTHON)


def documents(prepared: Prepared, kind: str, options: PodOptions = OPTIONS) -> list[dict[str, Any]]:
    """Return the documents of an export, read by YAML 1.1 as Kubernetes reads them."""
    return list(yaml.safe_load_all(export_pods(prepared, kind, options).files[0].text))


def job_of(document: dict[str, Any]) -> dict[str, Any]:
    """Return the Job template of a JobSet or of a TrainingRuntime."""
    spec = document["spec"]
    jobs = spec["template"]["spec"] if document["kind"] == "TrainingRuntime" else spec
    (only,) = jobs["replicatedJobs"]
    template: dict[str, Any] = only["template"]
    return template
