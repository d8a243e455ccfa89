"""Signals that Slurm has not sent, or has forgotten: saved, looked at, and gone on."""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path

import pytest
from rehearsal import Rehearsal, Stage, held, wait_till_remembered, waits_for
from slurm_settings import frozen_controller, grace, lost_nodes_unnoticed
from survival import BY_SLURM, Fault, Survival

from hpctrain.records.find import RunFiles
from hpctrain.records.ledger import EventKind
from hpctrain.runs.watch import watch
from hpctrain.runs.watch_rules import WatchRemedy
from hpctrain.sandbox import faults
from hpctrain.sandbox.repair import return_nodes
from hpctrain.sandbox.sandbox import Sandbox
from hpctrain.slurm.states import JobState

pytestmark = pytest.mark.stand_in


def test_signals_that_nobody_admits_to_end_nothing(
    stage: Stage, reference: RunFiles, survival: Survival
) -> None:
    """To one rank, to the supervisor, to srun; the nodes are well, so the run goes on in place."""
    planned = (
        *held(1, 13, do="await_warning"),
        *held(2, 23, do="await_warning"),
        *held(3, 33),
    )
    rehearsal = stage.start("name=signals", planned=planned)
    rehearsal.wait_for_step(12, 1)
    rehearsal.kill_rank(1, signal.SIGTERM)
    fault = Fault(51, "TERM to one rank, from nobody knows where")
    saved = survival.recovered(
        rehearsal, fault, cause="external_signal", action="relaunch", epoch=1
    )
    assert (saved.resumed_step, saved.lost_steps) == (13, 0), rehearsal.logs()
    assert f"rank 1 on {rehearsal.nodes()[1]} got a signal" in str(saved.end.reason)
    rehearsal.wait_for_step(22, 2)
    rehearsal.kill_supervisor(signal.SIGTERM)
    fault = Fault(51, "TERM to the supervisor alone")
    saved = survival.recovered(
        rehearsal, fault, cause="external_signal", action="relaunch", epoch=2
    )
    assert (saved.resumed_step, saved.lost_steps) == (23, 0), rehearsal.logs()
    rehearsal.wait_for_step(32, 3)
    rehearsal.kill_srun(signal.SIGTERM)
    fault = Fault(51, "TERM to srun, which kills the ranks at once")
    # Either srun says first that it was told to end the step, or that its tasks were killed.
    causes = ("external_signal", "crash")
    killed = survival.recovered(rehearsal, fault, cause=causes, action="relaunch", epoch=3)
    assert killed.resumed_step == 30, rehearsal.logs()
    rehearsal.assert_done_exactly(reference)
    assert rehearsal.attempts == 1, "no queue for a signal of nobody"
    assert rehearsal.events(EventKind.PROBED), "the nodes are asked"


@pytest.mark.variant("test_ranks_that_die_are_named_and_relaunched_in_place")
def test_nodes_that_reboot_in_good_order_are_node_failures(
    stage: Stage, reference: RunFiles, survival: Survival
) -> None:
    """First the node without the supervisor, whose rank saves; then the batch node, on which srun
    ends the step before anything can be saved.

    A job that is requeued while one of its nodes is dead starts without its GPUs (22.05.8), which
    costs one more requeue. Slurm finds the first node down when the test says so: not before the
    supervisor has decided.
    """
    with lost_nodes_unnoticed(stage.sandbox):
        reboot_both(stage, survival).assert_done_exactly(reference)


def reboot_both(stage: Stage, survival: Survival) -> Rehearsal:
    planned = (*waits_for("once", 13), *waits_for("twice", 23))
    rehearsal = stage.start("name=reboots", planned=planned)
    rehearsal.wait_for_step(12)
    epoch, other = rehearsal.epoch, rehearsal.nodes()[1]
    faults.shut_down_node(stage.sandbox, other)
    rehearsal.say("once")
    rehearsal.wait(lambda: bool(rehearsal.events(EventKind.ACTION)), "acted on the shutdown")
    down = ("State=DOWN", "Reason=Not responding")
    stage.sandbox.command("scontrol", "update", f"NodeName={other}", *down)
    fault = Fault(52, "a node without the batch script is shut down (TERM to all, slurmd too)")
    saved = survival.recovered(
        rehearsal, fault, cause="node_failure", action="requeue", epoch=epoch
    )
    assert saved.end.node == other and saved.lost_steps == 0, rehearsal.logs()
    boot(stage.sandbox, other)
    rehearsal.wait_for_step(22)
    epoch, batch = rehearsal.epoch, rehearsal.nodes()[0]
    faults.shut_down_node(stage.sandbox, batch)
    rehearsal.say("twice")
    boot(stage.sandbox, batch)
    fault = Fault(52, "the batch node is shut down, and with it supervisor and srun")
    survival.recovered(rehearsal, fault, cause="node_failure", action=BY_SLURM, epoch=epoch)
    return rehearsal


def boot(sandbox: Sandbox, node: str) -> None:
    """The node is off, comes back, and an administrator lets it work again: a Slurm that loses
    count of the GPUs of others (see `clean_slate`) needs it."""
    faults.crash_node(sandbox, node)
    faults.restart_node(sandbox, node, rebooted=True)
    return_nodes(sandbox, (node,))


@pytest.mark.variant("test_ranks_that_die_are_named_and_relaunched_in_place")
def test_a_preemption_that_the_controller_has_forgotten(
    stage: Stage, reference: RunFiles, survival: Survival
) -> None:
    """slurmctld saves its state every 5 s: what it did last is not in it.

    The supervisor stands still until it is away, or it could hear of the preemption. Where Slurm
    had been told that the step has ended, it has forgotten that, too: such a step remains until its
    job ends, so the job is requeued.
    """
    rehearsal = stage.start("name=forgotten", planned=held(1, 13, do="await_warning"))
    rehearsal.wait_for_step(12, 1)
    wait_till_remembered(stage.sandbox)
    with grace(stage.sandbox):
        with frozen_controller(stage.sandbox):
            kept = keep_state(stage.sandbox, stage.directory / "state")
        rehearsal.kill_supervisor(signal.SIGSTOP)
        rehearsal.urgent_job()
        rehearsal.wait(lambda: is_being_preempted(rehearsal), "preempted")
        rehearsal.wait_for_checkpoint(13)
        faults.kill_controller(stage.sandbox)
        rehearsal.kill_supervisor(signal.SIGCONT)
        restart_without_memory(stage.sandbox, kept)
    fault = Fault(53, "slurmctld dies after it has begun to preempt, and comes back without that")
    saved = survival.recovered(
        rehearsal, fault, cause="external_signal", action=("relaunch", "requeue"), epoch=1
    )
    assert (saved.resumed_step, saved.lost_steps) == (13, 0), rehearsal.logs()
    rehearsal.assert_done_exactly(reference)
    assert rehearsal.attempts == (1 if saved.action == "relaunch" else 2), rehearsal.logs()


def is_being_preempted(rehearsal: Rehearsal) -> bool:
    job = rehearsal.slurm.show_job(rehearsal.job_id)
    return job is not None and job.preempt_time is not None


def keep_state(sandbox: Sandbox, place: Path) -> Path:
    shutil.copytree(sandbox.paths.state, place)
    return place


def restart_without_memory(sandbox: Sandbox, kept: Path) -> None:
    """Of what was done since the state was kept."""
    shutil.rmtree(sandbox.paths.state)
    shutil.copytree(kept, sandbox.paths.state)
    faults.restart_controller(sandbox)


def test_a_deadline_is_no_cancel_and_no_reason_to_submit_again(
    tmp_path: Path, stage: Stage, reference: RunFiles, survival: Survival
) -> None:
    """Slurm 22.05.8 cuts the time limit of a job that runs, and ends one that waits: a requeued job
    has no supervisor that could say anything."""
    own = stage.at(tmp_path)
    rehearsal = own.start("name=deadline", planned=held(1, 13, do="await_warning"))
    rehearsal.wait_for_step(12)
    own.fill()  # preempts it, and keeps it in the queue
    rehearsal.wait(lambda: state_of(rehearsal) is JobState.PENDING, "in the queue again")
    # Before the end of its time limit: Slurm ends it when it next looks at the queue.
    deadline = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 120))
    rehearsal.sandbox.command(
        "scontrol", "update", f"JobId={rehearsal.job_id}", f"Deadline={deadline}"
    )
    rehearsal.wait(lambda: state_of(rehearsal) is JobState.DEADLINE, "ended by its deadline")
    (seen,) = watch(own.runs, rehearsal.slurm, act=True, grace_seconds=0).seen
    assert (seen.remedy, seen.outcome) == (WatchRemedy.TELL, "told"), seen
    assert "deadline" in seen.reason and "cancelled" not in seen.reason, seen
    assert rehearsal.events(EventKind.CANCEL_REQUESTED) == [], rehearsal.logs()
    assert rehearsal.attempts == 1
    survival.shown(
        Fault(75, "the requeued job reaches its deadline in the queue, and `watch --act` looks"),
        cause="deadline",
        action="none: told, neither cancelled nor submitted again",
        identical=rehearsal.assert_same_so_far(reference),
    )


def state_of(rehearsal: Rehearsal) -> JobState | None:
    job = rehearsal.slurm.show_job(rehearsal.job_id)
    return job.state if job is not None else None
