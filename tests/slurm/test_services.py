"""A service on a real Slurm: its router, its controller and three replicas under a trickle of load.

The engines compute nothing and are otherwise real. What is a matter of one replica is in
`test_replicas`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from router_programs import haproxy, vllm_router
from service_rehearsal import service_on
from variants import varied

from hpctrain.base.errors import UsageError
from hpctrain.records.service_records import ServiceEventKind
from hpctrain.sandbox.sandbox import Sandbox
from hpctrain.serve.control import request_restart, request_scale
from hpctrain.serve.start_router import start_router_here


def router_text(name: str, *others: str) -> str:
    program, cpus = (haproxy(), 1) if name == "haproxy" else (vllm_router(), 2)
    words = (f"name: {name}, program: {program}, cpus: {cpus}, memory: 1GiB", *others)
    return f"{{{', '.join(words)}}}"


def enough(clients: object, count: int = 8) -> bool:
    return len(clients.replies) >= count  # type: ignore[attr-defined]


@pytest.mark.parametrize("router", varied(["haproxy", "vllm-router"], "haproxy"))
def test_a_service_grows_shrinks_and_restarts_without_losing_a_request(
    router: str, sandbox: Sandbox, tmp_path: Path
) -> None:
    """One service for all of it, because each replica costs seconds to start."""
    # Beside the engine's Python, where it is looked for.
    (tmp_path / "haproxy").symlink_to(haproxy())
    text = router_text(router, "rate_limit: 1000")
    with service_on(sandbox, tmp_path, text) as rehearsal:
        rehearsal.wait_ready("r001-g001", "r002-g001")
        with rehearsal.clients() as clients:
            request_scale(rehearsal.service, 3)
            rehearsal.wait_ready("r001-g001", "r002-g001", "r003-g001")
            request_scale(rehearsal.service, 2)
            rehearsal.wait(lambda: len(rehearsal.ready) == 2, "two replicas")
            left = rehearsal.ready
            request_restart(rehearsal.service, "a test")
            new = [name.replace("g001", "g002") for name in left]
            rehearsal.wait_ready(*new)
            rehearsal.wait(lambda: rehearsal.status.restart == "done", "the end of the restart")
        assert not clients.failed, f"{clients.failed}\n{rehearsal.story()}"
        assert len(clients.replies) > 20
        # each once, whoever a busy machine took for ill for a moment
        served = {event.replica for event in rehearsal.events(ServiceEventKind.REPLICA_READY)}
        assert len(served) == 5, "two, one more, and one for each that was restarted"
        rehearsal.service.down_request.touch()
        rehearsal.wait(lambda: rehearsal.status.state == "down", "down")
        rehearsal.wait(lambda: not rehearsal.router_processes(), "the end of the router's job")
        assert rehearsal.address is None


@pytest.mark.variant("test_a_service_grows_shrinks_and_restarts_without_losing_a_request")
def test_time_limits_are_outlived_by_successors(sandbox: Sandbox, tmp_path: Path) -> None:
    """Four minutes, of which Slurm's warning takes the last hundred seconds and a minute more.

    Replicas and router leave after 80 s at the latest, and their successors answer before.
    """
    with service_on(
        sandbox, tmp_path, router_text("vllm-router"), walltime="00:04:00"
    ) as rehearsal:
        rehearsal.wait_ready("r001-g001", "r002-g001")
        first = rehearsal.address
        assert first is not None
        with rehearsal.clients(per_second=2.0) as clients:
            rehearsal.wait_ready("r001-g002", "r002-g002")
            rehearsal.wait(lambda: rehearsal.address not in (None, first), "another address")
            rehearsal.wait(lambda: rehearsal.phases().get("r001-g001") == "ended", "the old one")
        assert not clients.failed, f"{clients.failed}\n{rehearsal.story()}"
        starts = {
            event.replica: event.instead_of
            for event in rehearsal.events(ServiceEventKind.START_REPLICA)
        }
        assert starts["r001-g002"] == "r001-g001"
        assert starts["r002-g002"] == "r002-g001"
        second = rehearsal.address
        assert second is not None and second.epoch > first.epoch
        assert second.job_id != first.job_id


@pytest.mark.variant("test_a_service_grows_shrinks_and_restarts_without_losing_a_request")
def test_a_router_that_is_killed_comes_back_and_replicas_know_nothing_of_it(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    with service_on(sandbox, tmp_path, router_text("haproxy")) as rehearsal:
        rehearsal.wait_ready("r001-g001", "r002-g001")
        before = rehearsal.address
        jobs = [(one.name, one.job_id) for one in rehearsal.status.replicas]
        assert before is not None
        rehearsal.kill_router()
        rehearsal.wait(lambda: rehearsal.address not in (None, before), "a new address")
        rehearsal.wait_ready("r001-g001", "r002-g001")
        after = rehearsal.address
        assert after is not None and after.epoch > before.epoch
        assert after.job_id == before.job_id, "it was started again in place"
        with rehearsal.clients() as clients:
            rehearsal.wait(lambda: len(clients.replies) > 4, "answers")
        assert not clients.failed, f"{clients.failed}\n{rehearsal.story()}"
        assert [(one.name, one.job_id) for one in rehearsal.status.replicas] == jobs
        assert len(rehearsal.events(ServiceEventKind.START_REPLICA)) == len(jobs)


@pytest.mark.variant("test_a_service_grows_shrinks_and_restarts_without_losing_a_request")
def test_of_two_controllers_one_gives_up(sandbox: Sandbox, tmp_path: Path) -> None:
    """A person starts a router on a login node beside the job, and scales the service."""
    with service_on(sandbox, tmp_path, router_text("haproxy"), replicas="{count: 1}") as rehearsal:
        rehearsal.wait_ready("r001-g001", "r002-g001")
        environment = {**os.environ, **sandbox.environment()}
        address = start_router_here(rehearsal.service, environment)
        try:
            assert address.job_id is None
            with pytest.raises(UsageError, match=r"runs on .* already"):
                start_router_here(rehearsal.service, environment)
            request_scale(rehearsal.service, 3)
            rehearsal.wait_ready("r001-g001", "r002-g001", "r003-g001")
            epochs = {one.epoch for one in rehearsal.events(ServiceEventKind.START_REPLICA)[2:]}
            assert epochs == {address.epoch}, rehearsal.story()
            log = rehearsal.service.router.logs
            said = "".join(path.read_text() for path in log.rglob("step*.log"))
            assert "gives up" in said
        finally:
            rehearsal.service.router.stop_request.touch()
            rehearsal.wait(lambda: rehearsal.address is None, "the end of the router")
