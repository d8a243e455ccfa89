"""The cluster of the night: a Slurm of seven nodes, its profile, and a service of three replicas.

The router has a node and a partition of its own, from which nothing is preempted. Does not belong
here: what is done to the service (`events`).
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from bench.rehearsals import (
    ServiceRehearsal,
    haproxy,
    own_sandbox,
    patient_client,
    service_plan,
    vllm_router,
)
from hpctrain.records.service_layout import ServiceLayout
from hpctrain.sandbox.sandbox import Sandbox
from hpctrain.sandbox.shape import PartitionShape, SandboxShape, default_shape
from hpctrain.serve.control import stop_service
from hpctrain.serve.service_job import ServiceInputs
from hpctrain.serve.stand_in import write_engine_interpreter
from hpctrain.serve.tiny_llama import write_tiny_llama
from hpctrain.serve.up import service_weights, start_service
from hpctrain.spec.loader import load_profile, load_service_spec, partition_profile

REPLICAS = 3
# Three replicas, one more during a restart, one node that is lost and one that is taken away.
_REPLICA_NODES = "n[1-6]"
# 3 s for the router, 60 s for requests, 15 s for the engine's end: `_SPEC` and `leaving`.
GRACE_SECONDS = 100
_KILL_WAIT_SECONDS = 10
_PROFILE = f"""
name: night
nodes: {{count: 7, cpus: 8, memory: 15GiB}}
gpu: {{type: a100, per_node: 1, memory: 16GiB, reserved: 0B, peak: {{}}, emulated: true}}
nvlink: {{domain: 1, bandwidth: 10GB/s}}
network: {{fabric: ethernet, nics_per_node: 1, nic_bandwidth: 10Gb/s, interface: lo}}
filesystems:
  - {{name: disk, path: /tmp, kind: local, write_bandwidth: 1GB/s, read_bandwidth: 1GB/s}}
slurm:
  gpu_request: gres
  exclusive: false
  memory: none
  kill_wait: {_KILL_WAIT_SECONDS}s
  partitions:
    - {{name: train, default: true, preemption: {{mode: requeue, grace: {GRACE_SECONDS}s}}}}
    - {{name: service}}
software: {{python: {sys.executable}}}
continuation: requeue
limits: {{poll: 0.1s}}
metrics: {{address: 127.0.0.1}}
environment:
  - {{name: OMP_NUM_THREADS, value: "1", reason: engines share the cores of this machine}}
"""
_SPEC = """
kind: service
name: night
weights: {{path: {place}/weights, name: tiny}}
engine: {{name: vllm, python: {python}, tp: 1, pp: 1, arguments: [--enable-log-requests]}}
traffic: {{rate: 2, prompt_tokens: 16, output_tokens: 24}}
objectives: {{ttft: {{p99: 2s}}}}
replicas: {{count: {replicas}}}
router: {{name: {router}, program: {program}, partition: service, cpus: 2, memory: 1GiB}}
drain: {{longest: 60s, notice: 3s}}
resources: {{partition: train, walltime: 06:00:00}}
load_time: {load_time}
environment: {{variables: {{STAND_IN_ENGINE: {place}/stand-in.json}}}}
"""


def night_shape() -> SandboxShape:
    """`urgent` preempts `train` on six nodes with one GPU each; `service` is the seventh node."""
    shape = default_shape(nodes=7, gpus_per_node=1, grace_seconds=GRACE_SECONDS)
    on_six = tuple(replace(one, nodes=_REPLICA_NODES) for one in shape.partitions)
    return replace(
        shape,
        partitions=(*on_six, PartitionShape("service", nodes="n0")),
        kill_wait_seconds=_KILL_WAIT_SECONDS,
    )


@contextlib.contextmanager
def night_sandbox() -> Iterator[Sandbox]:
    """Such a Slurm, gone afterwards."""
    with own_sandbox(night_shape()) as sandbox:
        yield sandbox


@contextlib.contextmanager
def night_service(
    sandbox: Sandbox,
    place: Path,
    *,
    vllm_python: Path | None = None,
    router: str = "vllm-router",
    token_seconds: float = 0.02,
) -> Iterator[ServiceRehearsal]:
    """Start the service as `serve up` does; ended afterwards, whatever happens.

    Without `vllm_python` the engines compute nothing, and a token takes `token_seconds`. They write
    down which requests they begin.
    """
    write_tiny_llama(place / "weights")
    (place / "stand-in.json").write_text(json.dumps({"token_seconds": token_seconds}))
    program = vllm_router() if router == "vllm-router" else haproxy()
    python = vllm_python or write_engine_interpreter(place / "engine-python")
    spec, profile, runs = place / "service.yaml", place / "profile.yaml", place / "runs"
    load_time = "30s" if vllm_python is None else "100s"
    words = {"place": place, "python": python, "router": router, "program": program}
    spec.write_text(_SPEC.format(replicas=REPLICAS, load_time=load_time, **words))
    profile.write_text(_PROFILE)
    runs.mkdir()
    loaded = load_service_spec(spec)
    site = partition_profile(load_profile(profile), "train")
    plan = service_plan().model_copy(update={"replicas": REPLICAS - 1})
    inputs = ServiceInputs(loaded, site, plan, service_weights(loaded, runs))
    slurm = patient_client({**os.environ, **sandbox.environment()})
    started = start_service(inputs, runs, slurm)
    assert started.router_job is not None
    service = ServiceLayout(started.directory)
    try:
        yield ServiceRehearsal(sandbox, slurm, service, started.router_job)
    finally:
        with contextlib.suppress(Exception):
            stop_service(service, slurm)
            slurm.cancel_all(slurm.jobs_of_users([os.getuid()]))


def served_address(rehearsal: ServiceRehearsal) -> str:
    """Wait until all replicas are asked; return where clients send requests."""
    rehearsal.wait(lambda: len(rehearsal.ready) == REPLICAS, f"{REPLICAS} replicas", 1800.0)
    address = rehearsal.address
    assert address is not None
    return address.url
