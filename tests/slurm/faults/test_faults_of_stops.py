"""Stops at the wrong moment: in an evaluation, a start, a save, a pause between launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from rehearsal import STEPS, PlannedFault, Rehearsal, Stage
from slurm_settings import grace, nothing_starts
from survival import BY_SLURM, Fault, Survival

from hpctrain.checkpoints.publish import published_steps
from hpctrain.records.find import RunFiles
from hpctrain.records.ledger import Event, EventKind
from hpctrain.records.run_records import Progress, lineage, read_metrics, read_record
from hpctrain.runs import control
from hpctrain.runs.state import RunState

pytestmark = pytest.mark.stand_in

# By cause. When a grace is over Slurm may be first to requeue.
WISHED = {"time_limit": ("requeue",), "preempted": BY_SLURM, "yielded": ("hold",)}
# One evaluation takes 200 s: the script warns 120 s before the limit, and a grace is 120 s.
BATCHES, BATCH_SECONDS = 100, 2.0
# Launch, what is asked of it, words for the report, and the cause that is found.
Asked = tuple[int, Callable[[Rehearsal], None], str, str]
EVALUATION = ("evaluation.every_steps=20", f"evaluation.batches={BATCHES}")


def slow_evaluations(epoch: int) -> PlannedFault:
    return PlannedFault(
        epoch=epoch, rank=0, do="evaluate_slowly", seconds=BATCH_SECONDS, text="evaluated"
    )


@pytest.mark.variant("test_stops_in_pauses_are_heard_at_once")
def test_an_evaluation_longer_than_any_warning_is_left_and_made_up_for(
    stage: Stage, reference: RunFiles, survival: Survival
) -> None:
    words = "warned of the time limit during an evaluation of 200 s"
    leave_evaluations(stage, reference, survival, ((1, warn, words, "time_limit"),))


@pytest.mark.variant("test_stops_in_pauses_are_heard_at_once")
def test_an_evaluation_is_left_by_each_launch_that_makes_up_for_it(
    stage: Stage, reference: RunFiles, survival: Survival
) -> None:
    asked = (
        (1, preempt, "preempted during an evaluation of 200 s", "preempted"),
        (2, hold, "held while the next launch makes up for it", "yielded"),
    )
    leave_evaluations(stage, reference, survival, asked)


def leave_evaluations(
    stage: Stage, reference: RunFiles, survival: Survival, asked: Sequence[Asked]
) -> None:
    name = f"evaluated-{len(asked)}"
    whole = stage.start(f"name={name}", *EVALUATION)
    whole.assert_done_exactly(reference)
    rehearsal = stage.start(
        f"name=left-{name}",
        "supervise.failures_without_progress=1",
        *EVALUATION,
        planned=[slow_evaluations(epoch) for epoch, *_ in asked],
    )
    for epoch, ask, words, cause in asked:
        wait_for_evaluation(rehearsal, epoch=epoch, step=20)
        with grace(stage.sandbox):
            ask(rehearsal)
            action = end_of(rehearsal, epoch, cause)
        assert published_steps(rehearsal.run.layout.checkpoints)[:2] == [10, 20], rehearsal.logs()
        facts = dict(resumed_step=20, lost_steps=0)
        survival.shown(Fault(73, words), cause=cause, action=action, **facts)
    if asked[-1][1] is hold:
        rehearsal.wait_until(lambda row: "held" in row.reason, "held")
        control.resume(rehearsal.run, rehearsal.slurm)
    result = rehearsal.assert_done_exactly(reference)
    assert result.steps_lost == 0, "a step was trained twice"
    assert evaluations(rehearsal.run) == evaluations(whole.run)
    assert len(evaluations(whole.run)) == STEPS // 20


def evaluations(run: RunFiles) -> dict[int, float]:
    rows = lineage(read_metrics(run.layout))
    return {row.step: row.eval_loss for row in rows if row.eval_loss is not None}


def wait_for_evaluation(rehearsal: Rehearsal, *, epoch: int, step: int) -> None:
    """The launch is in the middle of the evaluation of this step."""
    assert rehearsal.place is not None
    note = rehearsal.place / "evaluated"

    def evaluating() -> bool:
        progress = read_record(rehearsal.run.layout.progress, Progress)
        if progress is None or (progress.epoch, progress.phase) != (epoch, "evaluating"):
            return False
        # the phase is reported before the first batch, which writes the note
        return progress.step == step and note.exists() and f"{epoch}:1\n" in note.read_text()

    rehearsal.wait(evaluating, f"in the evaluation of step {step} of launch {epoch}")


def warn(rehearsal: Rehearsal) -> None:
    """What `--signal=B:USR1@N` does."""
    rehearsal.sandbox.command("scancel", "--batch", "--signal=USR1", str(rehearsal.job_id))


# Starts that would take an hour.
STARTS = (
    PlannedFault(epoch=1, rank=1, do="check_slowly"),
    PlannedFault(epoch=2, rank=0, do="open_data_slowly"),
    PlannedFault(epoch=3, rank=1, do="agree_late"),
)


@pytest.mark.variant("test_stops_in_pauses_are_heard_at_once")
def test_stops_in_each_part_of_a_start_are_heard_at_once(
    stage: Stage, reference: RunFiles, survival: Survival
) -> None:
    """A budget of two failures: only the time limit without a new checkpoint counts."""
    rehearsal = stage.start(
        "name=starting", "supervise.failures_without_progress=2", planned=STARTS
    )
    asked = (
        (1, preempt, "preempted while one rank imports and the other waits for it", "preempted"),
        (2, warn, "warned of the time limit while data is built", "time_limit"),
        (3, hold, "held while one rank is late to the first collective", "yielded"),
    )
    for epoch, ask, words, cause in asked:
        wait_for_start(rehearsal, epoch)
        with grace(stage.sandbox):
            ask(rehearsal)
            action = end_of(rehearsal, epoch, cause)
        assert not rehearsal.rows(epoch), rehearsal.logs()
        survival.shown(Fault(74, words), cause=cause, action=action)
    rehearsal.wait_until(lambda row: "held" in row.reason, "held")
    control.resume(rehearsal.run, rehearsal.slurm)
    rehearsal.assert_done_exactly(reference)


# A save of 5 s, and a start that would take an hour.
SAVE_AND_START = (
    PlannedFault(epoch=1, rank=0, do="publish_slowly", seconds=5),
    PlannedFault(epoch=1, rank=1, step=13, do="await_warning"),
    PlannedFault(epoch=2, rank=1, do="load_slowly"),
)
STALE = PlannedFault(epoch=1, rank=1, step=15, do="fail", text="[Errno 116] Stale file handle")


@pytest.mark.variant("test_stops_in_pauses_are_heard_at_once")
def test_stops_in_saves_and_loads_are_heard_at_once(
    stage: Stage, reference: RunFiles, survival: Survival
) -> None:
    rehearsal = stage.start(
        "name=stopping", "supervise.budgets.time_limit=4", planned=SAVE_AND_START
    )
    rehearsal.wait_for_step(12, epoch=1)
    warn(rehearsal)
    action = end_of(rehearsal, 1, "time_limit")
    assert published_steps(rehearsal.run.layout.checkpoints)[:2] == [10, 13], "each of them once"
    words = "warned of the time limit while a checkpoint of step 10 is published, at step 13"
    facts = dict(resumed_step=13, lost_steps=0)
    survival.shown(Fault(74, words), cause="time_limit", action=action, **facts)
    wait_for_start(rehearsal, 2)
    assert rehearsal.events(EventKind.LAUNCH_STARTED)[-1].resume_step == 13, rehearsal.logs()
    warn(rehearsal)
    action = end_of(rehearsal, 2, "time_limit")
    words = "warned of the time limit while a checkpoint is loaded"
    survival.shown(Fault(74, words), cause="time_limit", action=action)
    rehearsal.assert_done_exactly(reference)


def test_stops_in_pauses_are_heard_at_once(
    stage: Stage, reference: RunFiles, survival: Survival
) -> None:
    """A crash that is waited after for 30 s; a budget of one failure, of which there is one."""
    rehearsal = stage.start(
        "name=pausing",
        "supervise.failures_without_progress=1",
        "supervise.budgets.storage=1",
        "supervise.budgets.time_limit=4",
        planned=(STALE,),
    )
    rehearsal.wait(lambda: 1 in launched(rehearsal), "in the first launch")
    with nothing_starts(stage.sandbox):
        rehearsal.wait(lambda: actions(rehearsal)[-1] == "relaunch", "in the pause")
        warn(rehearsal)
        rehearsal.wait(lambda: actions(rehearsal)[-1] == "requeue", "requeued out of the pause")
        words = "warned of the time limit in the 30 s before a relaunch"
        survival.shown(Fault(74, words), cause="storage", action="relaunch, then requeue")
        attempts = rehearsal.attempts
        too_short(rehearsal)
    rehearsal.wait(lambda: rehearsal.attempts > attempts, "started with too little time")
    with nothing_starts(stage.sandbox):
        rehearsal.wait(lambda: actions(rehearsal)[-2:] == ["requeue"] * 2, "requeued at once")
        assert launched(rehearsal)[-1] == 1, "a launch that cannot finish was begun"
        words = "an attempt with less time than a stop takes, whose warning nobody has noticed"
        survival.shown(Fault(74, words), cause="time_limit", action="requeue, nothing launched")
        limit(rehearsal, "00:30:00")
    rehearsal.assert_done_exactly(reference)
    assert rehearsal.causes.count("storage") == 1, rehearsal.logs()


def launched(rehearsal: Rehearsal) -> list[int]:
    return [event.epoch or 0 for event in rehearsal.events(EventKind.LAUNCH_STARTED)]


def actions(rehearsal: Rehearsal) -> list[str | None]:
    return [None, *(event.action for event in rehearsal.events(EventKind.ACTION))]


def too_short(rehearsal: Rehearsal) -> None:
    """Less than the 120 s that the warning comes ahead, from the next attempt on."""
    rehearsal.wait_until(lambda row: row.state is RunState.PENDING, "pending")
    limit(rehearsal, "00:01:00")


def limit(rehearsal: Rehearsal, time_limit: str) -> None:
    words = (f"JobId={rehearsal.job_id}", f"TimeLimit={time_limit}")
    rehearsal.sandbox.command("scontrol", "update", *words)


def preempt(rehearsal: Rehearsal) -> None:
    rehearsal.urgent_job()


def hold(rehearsal: Rehearsal) -> None:
    control.hold(rehearsal.run, rehearsal.slurm, reason="maintenance")


def wait_for_start(rehearsal: Rehearsal, epoch: int) -> None:
    assert rehearsal.place is not None
    begun = rehearsal.place / f"starts-{epoch}"
    rehearsal.wait(begun.exists, f"in the start of launch {epoch}")


def end_of(rehearsal: Rehearsal, epoch: int, cause: str) -> str:
    """What was done about the launch, which has ended by this cause."""

    def ends() -> list[Event]:
        return [e for e in rehearsal.events(EventKind.LAUNCH_ENDED) if e.epoch == epoch]

    rehearsal.wait(lambda: bool(ends()), f"through with launch {epoch}")
    (end,) = ends()
    assert end.cause == cause, rehearsal.logs()

    def later() -> list[Event]:
        events = rehearsal.run.ledger.events()
        return [e for e in events[events.index(end) :] if e.event is EventKind.ACTION]

    rehearsal.wait(lambda: bool(later()), f"acted on the end of launch {epoch}")
    action = str(later()[0].action)
    assert action in WISHED[cause], rehearsal.logs()
    return action
