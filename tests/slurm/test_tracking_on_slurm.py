"""TensorBoard and W&B of real runs: one continuous curve, and training that notices nothing."""

from __future__ import annotations

import numpy
import pytest
from command_line import hpctrain
from rehearsal import STEPS, Rehearsal, Stage, held, waits_for
from slurm_settings import grace
from tracked_runs import shown
from wandb_files import history, run_records

from hpctrain.records.find import RunFiles
from hpctrain.records.ledger import EventKind
from hpctrain.records.run_records import lineage, read_metrics
from hpctrain.records.tracking import finished_segments

LATE = "not ready"
BOTH = ("tracking.tensorboard=true", "tracking.wandb.project=rehearsals")


def losses(rehearsal: Rehearsal) -> dict[int, float]:
    """What the run's own metrics say, of the steps that count."""
    rows = lineage(read_metrics(rehearsal.run.layout))
    return {row.step: row.loss for row in rows if row.loss is not None}


def assert_curves_are_continuous(rehearsal: Rehearsal) -> None:
    run, expected = rehearsal.run.layout, losses(rehearsal)
    assert list(expected) == [*range(1, STEPS + 1)]
    seen = shown(run.tensorboard)
    assert seen == {step: float(numpy.float32(loss)) for step, loss in expected.items()}
    segments = finished_segments(run)
    rows = [row for segment in segments for row in history(segment)]
    assert [(row["_step"], row["train/loss"]) for row in rows] == [*expected.items()]
    assert len({record.run_id for one in segments for record in run_records(one)}) == 1


def commands(rehearsal: Rehearsal) -> tuple[str, str]:
    run = rehearsal.run.layout
    return f"tensorboard --logdir {run.tensorboard}", f"wandb sync {run.wandb}"


def export(rehearsal: Rehearsal) -> None:
    run = rehearsal.run.layout
    for kind in ("--tensorboard", "--wandb"):
        outcome = hpctrain("export", run.run_id, kind, "--runs", str(run.directory.parent))
        assert outcome.exit_code == 0, outcome.stderr


def describe(rehearsal: Rehearsal) -> str:
    runs = str(rehearsal.run.layout.directory.parent)
    return hpctrain("describe", rehearsal.run.run_id, "--runs", runs).stdout


@pytest.mark.stand_in
def test_a_run_that_rewinds_and_is_preempted_has_one_curve(
    stage: Stage, reference: RunFiles
) -> None:
    """A rank dies at step 17, so 11 to 16 are trained again; then another job takes the nodes."""
    planned = (*held(1, 17), *held(2, 34, do="await_warning"))
    rehearsal = stage.start("name=tracked", *BOTH, planned=planned)
    rehearsal.wait_for_step(16)
    rehearsal.kill_rank(1)
    rehearsal.wait_for_step(33, epoch=2)
    with grace(stage.sandbox, seconds=600):
        rehearsal.urgent_job()
        rehearsal.wait(lambda: len(rehearsal.causes) == 2, "preempted")
    rehearsal.assert_done_exactly(reference)
    assert rehearsal.causes == ["crash", "preempted", "done"], rehearsal.logs()
    assert rehearsal.attempts == 2
    failures = [event.reason or "" for event in rehearsal.events(EventKind.TRACKING_FAILED)]
    # Slurm sends TERM to all processes of a job that it ends, of which W&B's own dies
    expected = (LATE, "W&B: ServicePollForTokenError: wandb-core exited with code -15")
    assert all(reason.startswith(expected) for reason in failures), failures
    if failures:  # this machine may be too slow to write everything within seconds of the end
        export(rehearsal)
    assert len(read_metrics(rehearsal.run.layout)) > STEPS, "steps were trained again"
    assert_curves_are_continuous(rehearsal)
    run = rehearsal.run.layout
    # one that was late is killed, and what it had to write is in the segment of the next one
    late = len(failures)
    assert len(finished_segments(run)) + late >= 2, "each attempt in time leaves one"
    log = run.job_log(rehearsal.job_id).read_text()
    for command in commands(rehearsal):
        # the job names what there is at its end: nothing of W&B if both were late
        assert late == 2 or f"tracking: {command}\n" in log
        assert command in describe(rehearsal)


@pytest.mark.variant("test_a_run_that_rewinds_and_is_preempted_has_one_curve")
def test_the_process_may_be_killed_and_training_notices_nothing(
    stage: Stage, reference: RunFiles
) -> None:
    rehearsal = stage.start("name=untracked", *BOTH, planned=waits_for("go", 13))
    rehearsal.wait_for_step(12)
    followers = [p for p in rehearsal.processes() if "hpctrain.tracking" in p.command_line]
    rehearsal.kill(followers)
    rehearsal.wait(lambda: bool(rehearsal.events(EventKind.TRACKING_FAILED)), "noticed")
    rehearsal.say("go")
    rehearsal.assert_done_exactly(reference)
    assert rehearsal.causes == ["done"] and rehearsal.attempts == 1, rehearsal.logs()
    run = rehearsal.run.layout
    assert run.job_log(rehearsal.job_id).read_text().count("ended by signal 9") == 1
    assert describe(rehearsal).count("  tracking  ended by signal 9; `hpctrain export") == 1
    export(rehearsal)
    assert_curves_are_continuous(rehearsal)
