"""A small service as documents for tests: spec, plan, settings, endpoints, the prototype."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from hpctrain.records.service_layout import ReplicaName, ServiceLayout
from hpctrain.records.service_records import (
    Endpoint,
    RouterSettings,
    ScalingSettings,
    ServiceSettings,
)
from hpctrain.serve.plan.documents import ReplicaPlan, ServicePlan
from hpctrain.serve.service_job import ServiceInputs, replica_documents, write_prototype
from hpctrain.spec.loader import load_profile, load_service_spec, partition_profile

SERVED_NAME = "tiny"
SETTINGS = ServiceSettings(
    service_id="s",
    engine="vllm",
    router=RouterSettings(name="vllm-router", policy="least_loaded", place="job", processes=2),
    scaling=ScalingSettings(count=2, spare=0, least=1, most=4, capacity_rate=10.0),
    load_seconds=60.0,
    drain_seconds=20.0,
    poll_seconds=0.0,
)

_SPEC = """\
kind: service
name: chat
weights: {{path: {weights}, name: tiny}}
engine: {{name: vllm, python: {python}, tp: 1, pp: 1}}
traffic: {{rate: 5, prompt_tokens: 16, output_tokens: 16}}
objectives: {{ttft: {{p99: 2s}}}}
drain: {{longest: {longest}, notice: {notice}}}
resources: {{partition: {partition}, walltime: {walltime}}}
load_time: 30s
environment: {{variables: {{STAND_IN_ENGINE: {told}}}}}
"""


def service_spec_text(
    place: Path,
    *,
    partition: str = "train",
    walltime: str = "00:30:00",
    longest: str = "20s",
    notice: str = "3s",
) -> str:
    """A spec whose weights, engine and stand-in settings lie in `place`."""
    return _SPEC.format(
        weights=place / "weights",
        python=place / "engine-python",
        told=place / "stand-in.json",
        partition=partition,
        walltime=walltime,
        longest=longest,
        notice=notice,
    )


def service_plan(gpus: int = 1, nodes: int = 1) -> ServicePlan:
    """A plan of two replicas, as the planner would write it."""
    replica = ReplicaPlan(
        engine="vllm",
        gpu="a100",
        gpus=gpus,
        nodes=nodes,
        tp=1,
        pp=gpus,
        precision="fp32",
        kv_precision="fp32",
        max_sequences=64,
        batch_tokens=2048,
        max_length=1024,
        weight_bytes=1e9,
        activation_bytes=1e8,
        overhead_bytes=1e9,
        kv_bytes_per_token=1e5,
        kv_capacity_tokens=50_000,
    )
    return ServicePlan(
        replica=replica,
        replicas=1,
        spare=1,
        rate=5.0,
        capacity_rate=8.0,
        availability=0.99,
        promises=(),
        currency=None,
        cost_per_hour=None,
        cost_per_million_output_tokens=None,
        load_seconds=30.0,
        drain_seconds=20.0,
        lost_per_preemption=0.0,
    )


def write_service(
    directory: Path, spec: Path, profile: Path, plan: ServicePlan, python: str
) -> ServiceLayout:
    """Make a service directory with the prototype of its replicas."""
    loaded = load_service_spec(spec)
    site = partition_profile(load_profile(profile), loaded.document.resources.partition)
    weights = Path(loaded.document.weights.path or "")
    service = ServiceLayout(directory)
    service.create()
    inputs = ServiceInputs(loaded, site, plan, weights, python)
    write_prototype(service, replica_documents(service, inputs))
    return service


def endpoint_of(name: ReplicaName, **changes: Any) -> Endpoint:
    """The endpoint of a replica that is ready since now."""
    now = time.time()
    known: dict[str, Any] = {
        "replica": str(name),
        "epoch": 1,
        "job_id": 1,
        "node": "n1",
        "url": f"http://n1:{8000 + name.number}",
        "served_name": SERVED_NAME,
        "engine": "vllm",
        "weights_digest": "0",
        "ready_since": now,
        "load_seconds": 33.0,
        "lease_until": now + 600,
    }
    return Endpoint(**known | changes)
