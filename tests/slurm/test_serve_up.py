"""A service from its files to its end: `serve up` checks and starts, `serve down` ends it."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rehearsal import patient_client, profile_text
from router_programs import haproxy
from service_rehearsal import ServiceRehearsal
from serving_documents import service_plan, service_spec_text
from staged_weights import write_safetensors

from hpctrain.base.errors import InvalidInputError
from hpctrain.records.service_layout import ServiceLayout
from hpctrain.sandbox.sandbox import Sandbox
from hpctrain.serve.control import stop_service
from hpctrain.serve.service_job import ServiceInputs
from hpctrain.serve.stand_in import write_engine_interpreter
from hpctrain.serve.up import service_weights, start_service
from hpctrain.slurm.client import SlurmClient
from hpctrain.spec.loader import load_profile, load_service_spec, partition_profile


def inputs_in(place: Path, sandbox: Sandbox, **spec: str) -> ServiceInputs:
    """A service whose documents, weights and engine lie in `place`."""
    weights = place / "weights"
    weights.mkdir()
    (weights / "config.json").write_text('{"model_type": "llama"}')
    write_safetensors(weights / "model.safetensors")
    (place / "stand-in.json").write_text(json.dumps({"token_seconds": 0.02}))
    write_engine_interpreter(place / "engine-python")
    router = f"{{name: haproxy, program: {haproxy()}, cpus: 1, memory: 1GiB}}"
    text = f"{service_spec_text(place, **spec)}router: {router}\n"
    (place / "service.yaml").write_text(text)
    profile = profile_text(sandbox.shape, sys.executable) + "metrics: {address: 127.0.0.1}\n"
    (place / "profile.yaml").write_text(profile)
    loaded = load_service_spec(place / "service.yaml")
    site = partition_profile(load_profile(place / "profile.yaml"), "train")
    return ServiceInputs(loaded, site, service_plan(), service_weights(loaded, place / "runs"))


@pytest.fixture
def slurm(sandbox: Sandbox) -> Iterator[SlurmClient]:
    client = patient_client({**os.environ, **sandbox.environment()})
    yield client
    with contextlib.suppress(Exception):
        client.cancel_all(client.jobs_of_users([os.getuid()]))


def test_a_service_is_started_answers_and_ends(
    sandbox: Sandbox, slurm: SlurmClient, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    started = start_service(inputs_in(tmp_path, sandbox), runs, slurm)
    assert started.router_job is not None and len(started.replicas) == 2
    service = ServiceLayout(started.directory)
    rehearsal = ServiceRehearsal(sandbox, slurm, service, started.router_job)
    rehearsal.wait_ready("r001-g001", "r002-g001")
    jobs = {one.job_id for one in rehearsal.status.replicas}
    assert jobs == set(started.replicas), "the controller has started others"
    with rehearsal.clients() as clients:
        rehearsal.wait(lambda: len(clients.replies) >= 8, "answers")
    assert not clients.failed, rehearsal.story()
    assert stop_service(service, slurm).controller
    rehearsal.wait(lambda: rehearsal.status.state == "down", "down")
    rehearsal.wait(lambda: not rehearsal.router_processes(), "the end of the router's job")


def test_what_would_end_a_replica_is_found_before(
    sandbox: Sandbox, slurm: SlurmClient, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    inputs = inputs_in(tmp_path, sandbox, walltime="00:10:00")
    python = tmp_path / "engine-python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    with pytest.raises(InvalidInputError) as caught:
        start_service(inputs, runs, slurm)
    (problem,) = caught.value.problems
    assert "has no vllm" in problem.message and problem.file and problem.line
    assert not runs.exists() or not list(runs.iterdir())
    (tmp_path / "weights" / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(InvalidInputError) as caught:
        service_weights(inputs.spec, runs)
    assert "weights.path" in caught.value.problems[0].message
