"""Other jobs take the nodes away, with and without grace: nothing is lost that could be saved."""

from __future__ import annotations

from pathlib import Path

import pytest
from rehearsal import STEPS, PlannedFault, Rehearsal, Stage, held, own_sandbox
from slurm_settings import LONG_GRACE_SECONDS, grace
from survival import BY_SLURM, Fault, Survival

from hpctrain.checkpoints.discover import checkpoints
from hpctrain.records.find import RunFiles
from hpctrain.records.jobs import sbatch_options
from hpctrain.records.ledger import EventKind
from hpctrain.sandbox.shape import default_shape
from hpctrain.slurm.records import RequeueResult

pytestmark = pytest.mark.stand_in

# One launch after the other is preempted while rank 1 is in the middle of a long step.
SAVED_DEAF_AND_LAST = (
    PlannedFault(epoch=1, rank=1, step=13, do="await_warning"),
    PlannedFault(epoch=2, rank=-1, do="hear_nothing"),
    *held(2, 23),
    PlannedFault(epoch=3, rank=1, step=STEPS, do="await_warning"),
)
KILLED_AND_UNPUBLISHED = (
    PlannedFault(epoch=1, rank=-1, do="die_of_term"),
    *held(1, 13),
    PlannedFault(epoch=2, rank=0, do="publish_slowly", seconds=600),
    PlannedFault(epoch=2, rank=1, step=24, do="sleep"),
)


@pytest.mark.usefixtures("patient_slurm")
def test_preemptions_of_all_kinds_cost_no_budget(
    stage: Stage, reference: RunFiles, survival: Survival
) -> None:
    """A budget of no failure at all, and 6 s of grace where it is to be too short."""
    rehearsal = stage.start(
        "name=preempted",
        "resources.partition=brief",
        "supervise.failures_without_progress=1",
        planned=SAVED_DEAF_AND_LAST,
    )
    with grace(stage.sandbox, "brief"):
        preempt(rehearsal, epoch=1, after_step=12)
        fault = Fault(1, "preempted; the ranks save and leave within the grace")
        saved = survival.recovered(rehearsal, fault, cause="preempted", action="requeue", epoch=1)
    assert (saved.resumed_step, saved.lost_steps) == (13, 0), rehearsal.logs()
    preempt(rehearsal, epoch=2, after_step=22)
    fault = Fault(3, "preempted; the ranks hear nothing and are killed when the grace is over")
    deaf = survival.recovered(rehearsal, fault, cause="preempted", action=BY_SLURM, epoch=2)
    assert deaf.resumed_step == 20, rehearsal.logs()
    with grace(stage.sandbox, "brief"):
        preempt(rehearsal, epoch=3, after_step=STEPS - 1)
        result = rehearsal.assert_done_exactly(reference)
    assert len(rehearsal.rows(3)) == STEPS - deaf.resumed_step, result
    survival.shown(
        Fault(6, "preempted during the last step of the run"),
        cause="done",
        action="finish",
        identical=result.steps_compared,
    )
    assert rehearsal.causes == ["preempted"] * 2 + ["done"], rehearsal.logs()
    survival.shown(
        Fault(7, "preempted three times in one run that may not fail even once"),
        cause="preempted",
        action="requeue, each time",
        identical=result.steps_compared,
    )
    log = next(rehearsal.run.layout.logs.glob("slurm-*.out")).read_text()
    assert log.count(f"attempt {rehearsal.job_id}.") == 3, log
    survival.shown(
        Fault(41, "requeues, which truncate the log where nobody asks for more"),
        action="appended: the log holds all attempts",
    )


@pytest.mark.usefixtures("patient_slurm")
@pytest.mark.variant("test_preemptions_of_all_kinds_cost_no_budget")
def test_preempted_ranks_that_die_of_term_or_have_not_published(
    stage: Stage, reference: RunFiles, survival: Survival
) -> None:
    rehearsal = stage.start(
        "name=unpublished", "resources.partition=brief", planned=KILLED_AND_UNPUBLISHED
    )
    with grace(stage.sandbox, "brief"):
        preempt(rehearsal, epoch=1, after_step=12)
        fault = Fault(2, "preempted; TERM kills the ranks within the grace (code 143)")
        died = survival.recovered(rehearsal, fault, cause="preempted", action="requeue", epoch=1)
    assert died.resumed_step == 10, rehearsal.logs()
    preempt(rehearsal, epoch=2, after_step=23)
    fault = Fault(5, "preempted while a checkpoint is complete on the disk but not published")
    torn = survival.recovered(rehearsal, fault, cause="preempted", action=BY_SLURM, epoch=2)
    assert torn.resumed_step == 10, rehearsal.logs()
    rehearsal.assert_done_exactly(reference)
    good = checkpoints(rehearsal.run.layout.checkpoints, "sha256")
    assert all(one.good and one.manifest and one.manifest.epoch != 2 for one in good)


def preempt(rehearsal: Rehearsal, *, epoch: int, after_step: int) -> None:
    rehearsal.wait_for_step(after_step, epoch)
    rehearsal.urgent_job()


@pytest.mark.usefixtures("patient_slurm")
@pytest.mark.variant("test_preemptions_of_all_kinds_cost_no_budget")
def test_preempted_without_grace(stage: Stage, reference: RunFiles, survival: Survival) -> None:
    planned = (PlannedFault(epoch=1, rank=1, step=14, do="sleep"),)
    rehearsal = stage.start("name=sudden", "resources.partition=sudden", planned=planned)
    preempt(rehearsal, epoch=1, after_step=13)
    fault = Fault(3, "preempted in a partition without grace")
    survival.recovered(rehearsal, fault, cause="preempted", action=BY_SLURM, epoch=1)
    rehearsal.assert_done_exactly(reference)
    log = next(rehearsal.run.layout.logs.glob("slurm-*.out")).read_text()
    assert "attempt" in log and log.count(f"attempt {rehearsal.job_id}.") == 2, log
    survival.shown(
        Fault(41, "a requeue, which truncates the log where nobody asks for more"),
        action="appended: the log holds both attempts",
    )
    refused = rehearsal.slurm.requeue(rehearsal.job_id)
    assert refused.result is RequeueResult.DISABLED, "what is over is not to be requeued"
    again = sbatch_options(rehearsal.run.layout.directory)
    rehearsal.job_id = rehearsal.slurm.submit(rehearsal.run.layout.script, again).job_id
    rehearsal.wait(lambda: rehearsal.attempts == 3, "started again")
    result = rehearsal.assert_done_exactly(reference)
    assert rehearsal.epoch == 2, "a run that is done was launched again"
    survival.shown(
        Fault(6, "a run that is done is requeued, which Slurm refuses, and started by hand"),
        cause="done",
        action="finish",
        identical=result.steps_compared,
    )


@pytest.mark.variant("test_preemptions_of_all_kinds_cost_no_budget")
def test_preempted_with_the_user_signal(
    tmp_path: Path, reference: RunFiles, survival: Survival
) -> None:
    """Where the site sends the user signal, the batch shell hears of it and the tasks do not."""
    planned = (PlannedFault(epoch=1, rank=1, step=13, do="await_warning"),)
    shape = default_shape(grace_seconds=LONG_GRACE_SECONDS, user_signal_on_preempt=True)
    with own_sandbox(shape) as sandbox:
        rehearsal = Stage(sandbox, tmp_path).start("name=usersignal", planned=planned)
        preempt(rehearsal, epoch=1, after_step=12)
        fault = Fault(4, "preempted where the site sends the job's own signal to the batch shell")
        saved = survival.recovered(rehearsal, fault, cause="preempted", action="requeue", epoch=1)
        rehearsal.assert_done_exactly(reference)
    assert [event.signal for event in rehearsal.events(EventKind.SIGNAL)][:1] == ["USR1"]
    assert saved.lost_steps == 0, rehearsal.logs()
