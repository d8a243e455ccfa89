"""Processes, nodes and daemons die: the run finishes with the same losses, or names the cause."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from rehearsal import Rehearsal, Stage

from hpctrain.actions.runs import RunFiles
from hpctrain.actions.state import RunState
from hpctrain.actions.submit import resubmit
from hpctrain.checkpoints.discover import checkpoints
from hpctrain.sandbox import faults
from hpctrain.store.ledger import EventKind


def first_node_without_supervisor(rehearsal: Rehearsal) -> str:
    """The second of the two nodes that the job is on."""
    record = rehearsal.slurm.show_job(rehearsal.job_id)
    assert record is not None and record.node_list
    return rehearsal.slurm.hostnames(record.node_list)[1]


def batch_node(rehearsal: Rehearsal) -> str:
    record = rehearsal.slurm.show_job(rehearsal.job_id)
    assert record is not None and record.node_list
    return rehearsal.slurm.hostnames(record.node_list)[0]


def test_a_killed_rank_is_named_and_relaunched_in_place(stage: Stage, reference: RunFiles) -> None:
    rehearsal = stage.start("name=rank")
    rehearsal.wait_for_checkpoint(10)
    rehearsal.kill_rank(1)
    rehearsal.assert_done_exactly(reference)
    assert rehearsal.causes == ["crash", "done"], rehearsal.logs()
    ended = rehearsal.events(EventKind.LAUNCH_ENDED)[0]
    assert ended.rank == 1 and "Killed" in (ended.reason or ""), ended
    assert rehearsal.attempts == 1, "no queue for a crash"
    rehearsal.assert_resumed_from_verified()


def test_a_killed_srun_leaves_no_orphans_and_is_relaunched(
    stage: Stage, reference: RunFiles
) -> None:
    rehearsal = stage.start("name=srun")
    rehearsal.wait_for_checkpoint(10)
    rehearsal.kill_srun()
    rehearsal.assert_done_exactly(reference)
    assert rehearsal.causes[0] == "crash", rehearsal.logs()
    rehearsal.assert_resumed_from_verified()


def test_a_killed_supervisor_is_named_and_the_run_can_be_resubmitted(
    stage: Stage, reference: RunFiles
) -> None:
    rehearsal = stage.start("name=supervisor")
    rehearsal.wait_for_checkpoint(10)
    rehearsal.kill_supervisor()
    row = rehearsal.wait_till_over()
    assert row.state is RunState.FAILED, rehearsal.logs()
    assert "supervisor was killed by signal 9" in row.reason
    rehearsal.job_id = resubmit(rehearsal.run, rehearsal.slurm).job_id
    rehearsal.assert_done_exactly(reference)
    lost = rehearsal.events(EventKind.ATTEMPT_LOST)
    assert [event.cause for event in lost] == ["supervisor_lost"]


def test_a_frozen_rank_counts_as_a_hang(stage: Stage, reference: RunFiles) -> None:
    rehearsal = stage.start("name=hang", "supervise.stall=6s")
    rehearsal.wait_for_checkpoint(10)
    rehearsal.kill_rank(1, signal.SIGSTOP)
    rehearsal.assert_done_exactly(reference)
    assert rehearsal.causes == ["hang", "done"], rehearsal.logs()


def test_a_dead_slurmstepd_is_noticed(stage: Stage, reference: RunFiles) -> None:
    """Slurm notices nothing: srun would wait for ever for the tasks of that node."""
    rehearsal = stage.start("name=stepd")
    rehearsal.wait_for_checkpoint(10)
    faults.kill_stepd(stage.sandbox, first_node_without_supervisor(rehearsal))
    rehearsal.assert_done_exactly(reference)


def test_a_crashed_node_is_left_for_another_one(stage: Stage, reference: RunFiles) -> None:
    rehearsal = stage.start("name=node")
    rehearsal.wait_for_checkpoint(10)
    lost = first_node_without_supervisor(rehearsal)
    faults.crash_node(stage.sandbox, lost)
    rehearsal.assert_done_exactly(reference)
    rehearsal.assert_resumed_from_verified()


def test_a_crashed_batch_node_takes_the_supervisor_along(stage: Stage, reference: RunFiles) -> None:
    rehearsal = stage.start("name=batchnode")
    rehearsal.wait_for_checkpoint(10)
    faults.crash_node(stage.sandbox, batch_node(rehearsal))
    rehearsal.assert_done_exactly(reference)
    assert rehearsal.attempts == 2
    lost = rehearsal.events(EventKind.ATTEMPT_LOST)
    assert [event.cause for event in lost] == ["node_failure"], rehearsal.logs()


def test_a_dead_slurmd_with_living_ranks_cannot_publish(stage: Stage, reference: RunFiles) -> None:
    """The zombie: Slurm requeues the job while the ranks of the dead slurmd still run."""
    rehearsal = stage.start("name=zombie", "budget.steps=40")
    rehearsal.wait_for_checkpoint(10)
    faults.kill_slurmd(stage.sandbox, batch_node(rehearsal))
    rehearsal.assert_done_exactly(reference)
    found = checkpoints(rehearsal.run.layout.checkpoints, "sha256")
    assert all(checkpoint.good for checkpoint in found)


def test_a_controller_that_is_away_disturbs_nothing(stage: Stage, reference: RunFiles) -> None:
    rehearsal = stage.start("name=controller")
    rehearsal.wait_for_step(1)
    # slurmctld writes its state every 5 s; a job that is younger would be forgotten.
    started_at = rehearsal.events(EventKind.ATTEMPT_STARTED)[0].time
    time.sleep(max(0.0, started_at + 6 - time.time()))
    faults.kill_controller(stage.sandbox)
    rehearsal.kill_rank(0)
    time.sleep(5)
    faults.restart_controller(stage.sandbox)
    rehearsal.assert_done_exactly(reference)
    assert "crash" in rehearsal.causes


def test_a_flipped_byte_in_the_newest_checkpoint_is_found(
    stage: Stage, reference: RunFiles
) -> None:
    rehearsal = stage.start("name=flipped")
    rehearsal.wait_for_checkpoint(20)
    rehearsal.sandbox.command("scontrol", "requeue", str(rehearsal.job_id))
    rehearsal.wait_until(lambda row: row.state is RunState.PENDING, "pending")
    newest, older = checkpoints(rehearsal.run.layout.checkpoints)[:2]
    flip_a_byte(next(newest.directory.glob("__0_*.distcp")))
    rehearsal.assert_done_exactly(reference)
    rejected = rehearsal.events(EventKind.CHECKPOINT_REJECTED)
    assert [event.checkpoint_step for event in rejected] == [newest.step]
    assert "SHA-256" in (rejected[0].reason or "")
    assert rehearsal.events(EventKind.RESUME)[-1].resume_step == older.step


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


def test_crashes_without_progress_stop_with_the_reason(stage: Stage) -> None:
    rehearsal = stage.start("name=loop", "supervise.failures_without_progress=2")
    for launch in (1, 2):
        rehearsal.wait_until(
            lambda _, n=launch: len(rehearsal.events(EventKind.LAUNCH_STARTED)) == n, "launched"
        )
        rehearsal.wait_until(lambda _: bool(rehearsal.rank_processes(0)), "running")
        rehearsal.kill_rank(0)
    row = rehearsal.wait_till_over()
    assert row.state is RunState.FAILED, rehearsal.logs()
    assert "2 failed launches in a row without a new checkpoint" in row.reason


def test_a_mistake_of_the_user_stops_at_once(stage: Stage) -> None:
    """A vocabulary that the data does not fit is found by the trainer, and no retry helps."""
    rehearsal = stage.start("name=mistake", "engine.implementation=transformer_engine")
    row = rehearsal.wait_till_over()
    assert row.state is RunState.FAILED, rehearsal.logs()
    assert rehearsal.causes == ["config_error"], rehearsal.logs()
    assert rehearsal.attempts == 1
