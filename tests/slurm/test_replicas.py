"""Replicas of a service as real jobs: the supervisor of runs looks after them as after ranks.

The engine computes nothing and is otherwise real: processes, ports, signals, answers.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from replica_rehearsal import NAME, Clients, ReplicaRehearsal, engine_of, replica_on

from hpctrain.judge.causes import Cause
from hpctrain.judge.documents import ActionKind
from hpctrain.records.ledger import EventKind
from hpctrain.sandbox.faults import crash_node, restart_node
from hpctrain.sandbox.sandbox import Sandbox
from hpctrain.serve.replicas import drain_replica, start_replica
from hpctrain.slurm.states import JobState


def busy(replica: ReplicaRehearsal, clients: Clients, answers: int = 5) -> None:
    """Wait until the clients have got answers; they go on asking."""
    replica.wait(lambda: len(clients.codes) >= answers, "clients with answers")


def assert_nothing_was_lost(replica: ReplicaRehearsal, codes: list[int]) -> None:
    assert set(codes) == {200}, f"{codes}\n{replica.logs()}"
    drain = replica.drain
    assert drain is not None and drain.broken_off == 0, replica.logs()
    assert drain.router_left_at is not None and drain.ended_at is not None


def test_it_answers_and_leaves_without_losing_a_request(sandbox: Sandbox, tmp_path: Path) -> None:
    with replica_on(sandbox, tmp_path) as replica, replica.route():
        clients = Clients(replica)
        endpoint = replica.await_endpoint()
        assert endpoint.job_id == replica.job_id and endpoint.node in sandbox.shape.node_names
        replica.await_event(EventKind.SERVING)
        assert start_replica(replica.service, NAME, replica.slurm) == replica.job_id
        clients.start()
        busy(replica, clients)
        drain_replica(replica.service, NAME, replica.slurm, "a test")
        replica.wait_till_over()
        assert_nothing_was_lost(replica, clients.end())
        assert replica.causes == ["yielded"] and replica.endpoint is None, replica.logs()
        job = replica.slurm.show_job(replica.job_id)
        assert job is None or job.state is JobState.COMPLETED


def test_a_preempted_replica_ends_what_it_has_begun_and_comes_back(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    """Slurm's SIGTERM comes to the task and its engine at once, and the grace is 20 s."""
    with replica_on(sandbox, tmp_path) as replica, replica.route():
        replica.await_endpoint()
        clients = Clients(replica)
        clients.start()
        busy(replica, clients)
        replica.urgent_job(seconds=4)
        replica.await_event(EventKind.LAUNCH_ENDED, Cause.PREEMPTED)
        assert_nothing_was_lost(replica, clients.end())
        replica.await_endpoint(after_epoch=1)
        assert replica.attempts == 2, replica.logs()


@pytest.mark.variant("test_a_preempted_replica_ends_what_it_has_begun_and_comes_back")
def test_a_cancelled_replica_ends_what_it_has_begun(sandbox: Sandbox, tmp_path: Path) -> None:
    """By scancel, of which the ledger knows nothing before."""
    with replica_on(sandbox, tmp_path) as replica, replica.route():
        replica.await_endpoint()
        clients = Clients(replica, tokens=30)
        clients.start()
        busy(replica, clients)
        replica.slurm.cancel(replica.job_id)
        replica.await_event(EventKind.ACTION, Cause.CANCELLED)
        codes = clients.end()
        assert set(codes) == {200}, f"{codes}\n{replica.logs()}"
        assert replica.endpoint is None and replica.drain is not None
        assert replica.events(EventKind.ACTION)[-1].action == ActionKind.STOP


@pytest.mark.variant("test_an_engine_that_fails_once_is_started_again_with_its_cause")
def test_an_engine_that_is_killed_is_started_again_in_place(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    with replica_on(sandbox, tmp_path) as replica:
        replica.await_endpoint()
        replica.kill(engine_of(replica), signal.SIGKILL)
        again = replica.await_endpoint(after_epoch=1)
        assert (again.job_id, replica.attempts) == (replica.job_id, 1), replica.logs()
        end = replica.await_event(EventKind.LAUNCH_ENDED)
        assert end.cause == Cause.CRASH and "signal SIGKILL" in (end.reason or ""), end


@pytest.mark.parametrize(
    ("failure", "cause"),
    [
        ("exit", Cause.ENGINE_EXIT),
        pytest.param("no_weights", Cause.WEIGHTS, marks=pytest.mark.variant),
        pytest.param("gpu_fault", Cause.GPU_ERROR, marks=pytest.mark.variant),
    ],
)
def test_an_engine_that_fails_once_is_started_again_with_its_cause(
    sandbox: Sandbox, tmp_path: Path, failure: str, cause: Cause
) -> None:
    ticket = tmp_path / "ticket"
    ticket.touch()
    told = {"fails": failure, "tickets": [str(ticket)]}
    with replica_on(sandbox, tmp_path, told=told) as replica:
        replica.await_endpoint(after_epoch=1)
        assert replica.causes == [cause], replica.logs()


@pytest.mark.variant("test_an_engine_that_fails_once_is_started_again_with_its_cause")
def test_an_engine_that_never_fits_is_given_up(sandbox: Sandbox, tmp_path: Path) -> None:
    with replica_on(sandbox, tmp_path, told={"fails": "out_of_memory"}) as replica:
        replica.wait_till_over()
        assert replica.causes == [Cause.GPU_OOM], replica.logs()
        last = replica.events(EventKind.ACTION)[-1]
        assert last.action == ActionKind.STOP and "serve plan" in (last.reason or "")


@pytest.mark.variant("test_nodes_that_die_are_left_for_others")
def test_a_replica_whose_node_dies_comes_back_elsewhere(sandbox: Sandbox, tmp_path: Path) -> None:
    with replica_on(sandbox, tmp_path) as replica:
        first = replica.await_endpoint()
        crash_node(sandbox, first.node)
        try:
            second = replica.await_endpoint(after_epoch=first.epoch)
            assert second.node != first.node and second.job_id == replica.job_id, replica.logs()
        finally:
            restart_node(sandbox, first.node, rebooted=True)


@pytest.mark.variant("test_a_preempted_replica_ends_what_it_has_begun_and_comes_back")
def test_the_time_limit_is_left_in_order_too(sandbox: Sandbox, tmp_path: Path) -> None:
    """Two minutes are the least in which Slurm can warn before the end."""
    with replica_on(sandbox, tmp_path, walltime="00:02:00") as replica, replica.route():
        replica.await_endpoint()
        clients = Clients(replica)
        clients.start()
        replica.await_event(EventKind.LAUNCH_ENDED, Cause.TIME_LIMIT)
        assert_nothing_was_lost(replica, clients.end())
