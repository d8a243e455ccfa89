"""Losing nodes to other jobs, to time limits and to people: nothing lost, nothing run twice."""

from __future__ import annotations

from pathlib import Path

from rehearsal import STEPS, Stage, own_sandbox

from hpctrain.actions.cancel import cancel
from hpctrain.actions.runs import RunFiles
from hpctrain.actions.state import RunState
from hpctrain.sandbox.shape import default_shape
from hpctrain.store.ledger import EventKind


def test_preempted_with_grace_saves_and_resumes_at_that_step(
    stage: Stage, reference: RunFiles
) -> None:
    rehearsal = stage.start("name=grace")
    rehearsal.wait_for_step(13)
    rehearsal.urgent_job()
    result = rehearsal.assert_done_exactly(reference)
    assert rehearsal.causes == ["preempted", "done"], rehearsal.logs()
    assert result.steps_lost == 0
    assert rehearsal.attempts == 2
    rehearsal.assert_resumed_from_verified()


def test_preempted_without_grace_resumes_from_the_last_periodic_checkpoint(
    stage: Stage, reference: RunFiles
) -> None:
    rehearsal = stage.start("name=sudden", "resources.partition=sudden")
    rehearsal.wait_for_checkpoint(10)
    rehearsal.wait_for_step(13)
    rehearsal.urgent_job()
    rehearsal.assert_done_exactly(reference)
    assert rehearsal.attempts == 2, rehearsal.logs()
    assert rehearsal.events(EventKind.RESUME)[-1].resume_step >= 10
    ended = rehearsal.events(EventKind.LAUNCH_ENDED)[0]
    assert ended.cause == "preempted", rehearsal.logs()


def test_warned_by_slurm_saves_and_goes_on(stage: Stage, reference: RunFiles) -> None:
    """USR1 to the batch shell is what `--signal=B:USR1@N` sends before the time limit."""
    rehearsal = stage.start("name=warned")
    rehearsal.wait_for_step(11)
    rehearsal.sandbox.command("scancel", "--batch", "--signal=USR1", str(rehearsal.job_id))
    result = rehearsal.assert_done_exactly(reference)
    assert rehearsal.causes == ["time_limit", "done"], rehearsal.logs()
    assert result.steps_lost == 0
    rehearsal.assert_resumed_from_verified()


def test_the_real_time_limit_is_met_in_time(stage: Stage) -> None:
    """Two minutes are far too short for this run; Slurm may warn up to a minute early."""
    rehearsal = stage.start("name=limit", "budget.steps=100000", "resources.walltime=00:02:00")
    rehearsal.wait_until(
        lambda row: rehearsal.attempts >= 2 and len(rehearsal.events(EventKind.RESUME)) >= 2,
        "in its second attempt",
    )
    ended = rehearsal.events(EventKind.LAUNCH_ENDED)[0]
    assert ended.cause == "time_limit", rehearsal.logs()
    assert [event.signal for event in rehearsal.events(EventKind.SIGNAL)][:1] == ["USR1"]
    assert (ended.last_step or 0) > 0, "the warning came before the first step"
    assert ended.last_step == ended.checkpoint_step, "the last step was not saved"
    assert rehearsal.events(EventKind.RESUME)[1].resume_step == ended.checkpoint_step
    cancel(rehearsal.run, rehearsal.slurm)


def test_preempted_with_the_user_signal(tmp_path: Path, reference: RunFiles) -> None:
    """Where the site sends the user signal, the batch shell hears of it and the tasks do not."""
    with own_sandbox(default_shape(user_signal_on_preempt=True)) as sandbox:
        rehearsal = Stage(sandbox, tmp_path).start("name=usersignal")
        rehearsal.wait_for_step(11)
        rehearsal.urgent_job()
        result = rehearsal.assert_done_exactly(reference)
    assert rehearsal.causes == ["preempted", "done"], rehearsal.logs()
    assert [event.signal for event in rehearsal.events(EventKind.SIGNAL)][:1] == ["USR1"]
    assert result.steps_lost == 0


def test_requeued_by_an_administrator_resumes(stage: Stage, reference: RunFiles) -> None:
    rehearsal = stage.start("name=requeued")
    rehearsal.wait_for_checkpoint(10)
    rehearsal.sandbox.command("scontrol", "requeue", str(rehearsal.job_id))
    rehearsal.assert_done_exactly(reference)
    assert rehearsal.causes[0] == "requeued", rehearsal.logs()
    assert rehearsal.events(EventKind.RESUME)[-1].resume_step >= 10


def test_cancelled_by_scancel_stays_cancelled(stage: Stage) -> None:
    rehearsal = stage.start("name=scancelled")
    rehearsal.wait_for_step(5)
    rehearsal.sandbox.command("scancel", str(rehearsal.job_id))
    row = rehearsal.wait_till_over()
    assert row.state is RunState.CANCELLED, rehearsal.logs()
    rehearsal.wait_until(lambda row: row.state is RunState.CANCELLED, "cancelled for good")
    record = rehearsal.slurm.show_job(rehearsal.job_id)
    assert record is not None and record.state.name in ("CANCELLED", "COMPLETING")
    assert record.restart_count == 0
    assert not [e for e in rehearsal.events(EventKind.ACTION) if e.action == "requeue"]


def test_cancelled_by_hpctrain_during_the_grace_of_a_preemption(stage: Stage) -> None:
    """The supervisor is about to requeue: `cancel` has taken that right away first."""
    rehearsal = stage.start("name=cancelled")
    rehearsal.wait_for_step(5)
    rehearsal.urgent_job()
    cancel(rehearsal.run, rehearsal.slurm)
    row = rehearsal.wait_till_over()
    assert row.state is RunState.CANCELLED, rehearsal.logs()


def test_finished_during_the_grace_does_not_run_twice(stage: Stage, reference: RunFiles) -> None:
    rehearsal = stage.start("name=finishing")
    rehearsal.wait_for_step(STEPS - 1)
    rehearsal.urgent_job()
    result = rehearsal.assert_done_exactly(reference)
    assert result.steps_lost == 0


def test_a_run_that_is_done_trains_nothing_when_it_is_requeued(
    stage: Stage, reference: RunFiles
) -> None:
    rehearsal = stage.start("name=again")
    rehearsal.assert_done_exactly(reference)
    rehearsal.sandbox.command("scontrol", "requeue", str(rehearsal.job_id))
    rehearsal.wait_until(lambda _: rehearsal.attempts == 2, "started again")
    rehearsal.wait_until(lambda _: len(rehearsal.events(EventKind.ACTION)) == 2, "finished at once")
    assert len(rehearsal.events(EventKind.LAUNCH_STARTED)) == 1
    assert rehearsal.assert_done_exactly(reference).steps_lost == 0
