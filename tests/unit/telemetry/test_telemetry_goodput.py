"""Where the wall time of a run went: every moment once, and exactly."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from goodput_histories import BEGIN, History, made_up, submitted

from hpctrain.records.run_records import StepMetrics, lineage
from hpctrain.records.step_times import StepTime
from hpctrain.telemetry.goodput import FIRST_START, OCCUPYING, Goodput, account, rolling_goodput
from hpctrain.telemetry.timeline import (
    Category,
    Mark,
    MarkKind,
    Segment,
    Timeline,
    epochs_that_trained_again,
    non_decreasing_times,
    steps_of_rows,
    ticks,
    timeline,
)

ENDED, RELAUNCHING, QUEUED = MarkKind.LAUNCH_ENDED, MarkKind.RELAUNCHING, MarkKind.QUEUED
ATTEMPT, LAUNCH, LOST = MarkKind.ATTEMPT_STARTED, MarkKind.LAUNCH_STARTED, MarkKind.ATTEMPT_LOST
HOUR = 3600


def cut(history: History, now: float | None = None) -> Timeline:
    end = history.now if now is None else now
    return timeline(history.marks, history.steps, history.saves, end)


def told(history: History, now: float | None = None, gpus: int = 8) -> Goodput:
    return account(cut(history, now), gpus)


def spent(result: Goodput) -> dict[str, float]:
    """Seconds of what took any time."""
    return {category: seconds for category, seconds in result.seconds.items() if seconds}


def kinds(history: History) -> list[tuple[str, float]]:
    return [(s.category.value, (s.end - s.start) / 1e6) for s in cut(history).segments]


# -- undisturbed runs --------------------------------------------------------------------------


def test_a_run_without_trouble() -> None:
    run = submitted().train(1, 50).save(5).train(51, 100).save(7).after(2)
    result = told(run.mark(ENDED, "done").after(1).mark(MarkKind.FINISHED).after(9999))
    assert spent(result) == {
        "productive": 100,
        "saving": 12,
        "starting": 10,
        "queueing": 100,
        "detecting": 2,
        "restarting": 1,
    }
    assert result.wall_seconds == 225
    assert result.ettr == 100 / 225
    assert result.ettr_without_queue == 100 / 125
    assert result.gpu_hours == 8 * 125 / HOUR
    assert (result.launches, result.attempts, result.failures) == (1, 1, 0)
    assert (result.kept_steps, result.lost_steps) == (100, 0)
    assert result.mttf_seconds is None and result.recovery_mean_seconds is None


def test_evaluations_and_saves_in_the_background_take_gaps_between_steps() -> None:
    """A background save stops training at its start (1 s) and for 2 s when it is published."""
    run = submitted().train(1, 10).save(3, at_once=False).after(1).train(11, 15)
    run.after(2).train(16, 20).after(4).train(21, 25)
    assert kinds(run)[2:] == [
        ("productive", 10),
        ("saving", 1),
        ("productive", 5),
        ("saving", 2),
        ("productive", 5),
        ("between", 4),
        ("productive", 5),
    ]


def test_a_stall_that_finds_no_gap_takes_no_time_from_steps() -> None:
    run = submitted().train(1, 10).save(500, at_once=False).train(11, 20)
    assert spent(told(run))["productive"] == 20
    assert "saving" not in spent(told(run))


@pytest.mark.parametrize(
    ("silent", "category"), [(30, "between"), (1800, "between"), (1801, "down")]
)
def test_a_run_under_way(silent: float, category: str) -> None:
    run = submitted().train(1, 10).after(silent)
    assert kinds(run)[-1] == (category, silent)
    assert cut(run).segments[-1].cause == (None if category == "between" else "unknown")


def test_a_run_that_is_starting_up_is_not_down() -> None:
    assert kinds(submitted()) == [("queueing", 100), ("starting", 10)]
    assert kinds(submitted().after(1800))[-1] == ("down", 1806)


def test_a_run_that_never_started() -> None:
    assert told(History()).wall_seconds == 0
    assert told(History()).ettr is None and told(History()).hour.last is None
    waiting = History().mark(MarkKind.SUBMITTED).after(70)
    assert spent(told(waiting)) == {"queueing": 70}
    assert (told(waiting).ettr, told(waiting).ettr_without_queue) == (0, None)


# -- interruptions -----------------------------------------------------------------------------


def crashed() -> History:
    """30 steps, a save after 20, a hang; in place, then 10 steps again and 20 new ones."""
    run = submitted().train(1, 20).save(2).train(21, 30).after(60)
    run.mark(ENDED, "hang", failure=True).mark(RELAUNCHING).after(3).mark(LAUNCH).after(8)
    return run.train(21, 50)


def test_lost_steps_are_redone_and_belong_to_what_lost_them() -> None:
    result = told(crashed())
    assert spent(result) == {
        "productive": 50,
        "redone": 10,
        "saving": 2,
        "starting": 18,
        "queueing": 100,
        "detecting": 60,
        "restarting": 3,
    }
    assert (result.kept_steps, result.lost_steps) == (50, 10)
    first, hang = result.causes
    assert (hang.cause, hang.ends, hang.lost_steps) == ("hang", 1, 10)
    assert hang.seconds == {"redone": 10, "starting": 8, "detecting": 60, "restarting": 3}
    assert hang.lost_seconds == 81
    assert hang.lost_gpu_hours == 8 * 81 / HOUR
    assert (first.cause, first.lost_seconds, first.lost_gpu_hours) == (
        FIRST_START,
        110,
        8 * 10 / HOUR,
    )
    assert result.mttf_seconds == 6 + 32 + 8 + 30 + 4
    assert result.recovery_median_seconds == 71


def test_a_launch_that_fails_at_its_start_costs_its_own_cause() -> None:
    run = crashed().mark(ENDED, "port", failure=True).mark(RELAUNCHING).mark(LAUNCH).after(5)
    run.mark(ENDED, "crash", failure=True).mark(RELAUNCHING).mark(LAUNCH).after(7).train(51, 52)
    losses = {loss.cause: loss.seconds for loss in told(run).causes}
    assert losses["port"] == {Category.STARTING: 5} or losses["port"] == {}
    assert losses["crash"] == {Category.STARTING: 12}


def test_a_requeue_is_a_queue_and_its_cause_pays() -> None:
    run = submitted().train(1, 10).after(4).mark(ENDED, "node_failure", failure=True).after(1)
    run.mark(QUEUED).after(500)
    run.attempt = (1, 1)
    run.mark(ATTEMPT).after(2).mark(LAUNCH).after(8).train(11, 20)
    result = told(run)
    assert spent(result)["queueing"] == 600
    assert result.recovery_mean_seconds == 4 + 1 + 500 + 10
    node = result.causes[0]
    assert node.cause == "node_failure" and node.lost_seconds == 515
    assert node.lost_gpu_hours == 8 * 15 / HOUR
    assert (result.attempts, result.launches) == (2, 2)


def test_going_back_takes_steps_of_earlier_launches_too() -> None:
    run = crashed().mark(ENDED, "diverged", failure=True).mark(RELAUNCHING).mark(LAUNCH)
    result = told(run.train(11, 30))
    assert (result.kept_steps, result.lost_steps) == (30, 50)
    lost = {loss.cause: loss.lost_steps for loss in result.causes if loss.lost_steps}
    assert lost == {"hang": 10, "diverged": 40}
    assert spent(result)["redone"] == 50


def test_an_attempt_lost_without_a_word_is_down_since_its_last_sign() -> None:
    run = submitted().train(1, 10).after(400)
    run.mark(LOST, "supervisor_lost", failure=True)
    run.attempt = (1, 1)
    run.after(20).mark(ATTEMPT).after(5).mark(LAUNCH).after(5).train(11, 20)
    result = told(run)
    assert spent(result)["down"] == 420
    assert result.failures == 1 and result.mttf_seconds == 6 + 10 + 4 + 20
    assert result.causes[0].cause == "supervisor_lost"
    assert result.causes[0].seconds == {"down": 420, "starting": 10}
    assert result.causes[0].lost_gpu_hours == 8 * 10 / HOUR


def test_a_lost_attempt_that_was_submitted_again_waits_in_the_queue() -> None:
    run = submitted().train(1, 10).after(100).mark(LOST, "supervisor_lost", failure=True)
    run.after(50).mark(MarkKind.SUBMITTED).after(30)
    assert kinds(run)[-2:] == [("down", 150), ("queueing", 30)]


def test_held_time_counts_neither_for_nor_against_the_run() -> None:
    run = submitted().train(1, 10).mark(ENDED, "yielded").mark(MarkKind.STOPPED).after(5000)
    assert told(run).wall_seconds == 120, "nothing is counted after the end of a stopped run"
    run.mark(MarkKind.SUBMITTED).after(40)
    run.attempt = (2, 0)
    result = told(run.mark(ATTEMPT).mark(LAUNCH).after(10).train(11, 20))
    assert spent(result)["held"] == 5000 and spent(result)["queueing"] == 140
    assert result.ettr == 20 / (5180 - 5000) and result.ettr_without_queue == 20 / 40
    assert result.recovery_mean_seconds is None
    assert result.causes[-1].cause == "yielded" and result.causes[-1].lost_seconds == 50


def test_a_job_cancelled_in_the_queue_waits_no_more() -> None:
    run = History().mark(MarkKind.SUBMITTED).after(70).mark(MarkKind.CANCELLED).after(900)
    assert spent(told(run)) == {"queueing": 70}
    training = submitted().train(1, 5).mark(MarkKind.CANCELLED).train(6, 9)
    assert spent(told(training))["productive"] == 9


def test_a_successor_that_is_submitted_early_does_not_end_the_attempt() -> None:
    run = submitted().train(1, 4).mark(MarkKind.SUBMITTED).train(5, 9)
    assert spent(told(run)) == {"queueing": 100, "starting": 10, "productive": 9}


# -- damage ------------------------------------------------------------------------------------


def test_a_launch_whose_start_is_torn_is_known_by_its_steps() -> None:
    run = crashed()
    run.marks = [mark for mark in run.marks if (mark.kind, mark.epoch) != (LAUNCH, 2)]
    result = told(run)
    assert spent(result)["productive"] == 50 and spent(result)["redone"] == 10
    assert spent(result)["restarting"] == 11 and result.launches == 2
    assert {loss.cause: loss.lost_steps for loss in result.causes}["hang"] == 10
    whole = told(crashed().mark(ENDED, "done").mark(MarkKind.FINISHED))
    run.mark(ENDED, "done").mark(MarkKind.FINISHED)
    assert told(run).seconds["productive"] == whole.seconds["productive"]


def test_a_launch_whose_end_is_torn_is_judged_by_what_was_done() -> None:
    run = crashed()
    run.marks = [mark for mark in run.marks if mark.kind is not ENDED]
    assert spent(told(run)) == spent(told(crashed()))
    assert {loss.cause for loss in told(run).causes} == {"unknown", FIRST_START}


def test_a_launch_that_follows_without_a_word_leaves_the_last_one_down() -> None:
    run = submitted().train(1, 10).after(50).mark(LAUNCH).after(5).train(11, 12)
    assert ("down", 50) in kinds(run)


def test_words_of_a_supervisor_that_outlived_its_attempt_change_nothing() -> None:
    run = crashed()
    old = Mark(QUEUED, run.now, (1, 7), None)
    run.marks += [old, Mark(ENDED, run.now, run.attempt, 1, "crash", True)]
    run.train(51, 60)
    result = told(run)
    assert spent(result)["productive"] == 60 and result.failures == 1


def test_steps_of_a_trainer_that_outlived_its_launch_take_no_time() -> None:
    run = crashed()
    run.epoch = 1
    clock = run.clock
    run.train(31, 35)
    run.epoch, run.clock = 2, clock
    result = told(run)
    assert result.wall_seconds == run.clock
    assert spent(result) == spent(told(crashed()))
    assert result.kept_steps == 50 and result.lost_steps == 15


def test_one_wrong_clock_moves_nothing_else() -> None:
    run, straight = crashed(), told(crashed())
    early = [Mark(m.kind, m.time, m.attempt, m.epoch, m.cause, m.failure) for m in run.marks]
    early[3] = Mark(ENDED, run.now + 9e6, run.attempt, 1, "hang", True)
    run.marks = early
    result = told(run)
    assert result.wall_seconds == straight.wall_seconds
    assert result.seconds["productive"] == pytest.approx(50, abs=60)
    assert result.seconds[Category.QUEUEING] == 100


@pytest.mark.parametrize(
    ("written", "agreed"),
    [
        ([], []),
        ([5], [5]),
        ([1, 2, 3], [1, 2, 3]),
        ([1, 99, 3, 4], [1, 1, 3, 4]),
        ([1, 2, -50, 4], [1, 2, 2, 4]),
        ([100, 110, 70, 80, 90], [70, 70, 70, 80, 90]),
        ([7, 7, 7], [7, 7, 7]),
        ([None, 5, None, 6], [5, 5, 5, 6]),
        ([None], [0]),
    ],
)
def test_times_agree_with_their_order(written: list[int | None], agreed: list[int]) -> None:
    assert non_decreasing_times(written) == agreed


def test_a_damaged_first_time_does_not_begin_the_run_in_1970() -> None:
    run = crashed()
    run.marks[0] = Mark(MarkKind.SUBMITTED, math.nan)
    assert told(run).wall_seconds == run.clock - 100


def test_numbers_that_are_none_are_nothing() -> None:
    assert [ticks(x) for x in (math.nan, math.inf, -math.inf, 1e300, 1.5)] == [0, 0, 0, 0, 1500000]


@pytest.mark.parametrize("seed", range(150))
def test_whatever_happened_adds_up(seed: int) -> None:
    """Exactly, without a gap or an overlap, and productive is what is in the weights."""
    run = made_up(seed)
    cuts = cut(run)
    segments = cuts.segments
    for one, following in itertools.pairwise(segments):
        assert one.end == following.start
        assert (one.category, one.cause) != (following.category, following.cause)
    assert all(one.end > one.start for one in segments)
    result = account(cuts, 8)
    wall = segments[-1].end - segments[0].start if segments else 0
    assert sum(ticks(seconds) for seconds in result.seconds.values()) == wall
    rows = [
        StepMetrics.model_construct(step=step.step, epoch=step.epoch, time=float(index))
        for index, step in enumerate(run.steps)
    ]
    kept = [(row.step, row.epoch, int(row.time)) for row in lineage(rows)]
    assert result.kept_steps == len(kept)
    assert result.lost_steps == len(run.steps) - len(kept)
    lost = sum(loss.lost_seconds for loss in result.causes)
    trained = sum(result.seconds[one] for one in (Category.PRODUCTIVE, Category.SAVING))
    rest = result.seconds[Category.BETWEEN] + result.seconds[Category.HELD]
    assert lost + trained + rest == pytest.approx(wall / 1e6, abs=1e-3)
    most = sum(max(0.0, s.step_seconds) for s in run.steps if math.isfinite(s.step_seconds))
    assert result.seconds["productive"] + result.seconds[Category.REDONE] <= most + 1e-3
    for window in (result.hour, result.day):
        assert window.worst is None or 0 <= window.worst <= (window.last or 0) <= 1
    assert 0 <= (result.ettr or 0) <= (result.ettr_without_queue or 0) <= 1


def test_most_made_up_histories_train() -> None:
    """The property test would say nothing about runs that never do."""
    accounts = [told(made_up(seed)) for seed in range(150)]
    for category in set(Category) - {Category.UNREPORTED}:
        assert sum(one.seconds[category] > 0 for one in accounts) > 15, category
    assert sum(one.hour.worst is not None for one in accounts) > 15


# -- windows -----------------------------------------------------------------------------------


def stretch(*parts: tuple[Category, int]) -> list[Segment]:
    """Segments of so many hours, one after the other."""
    found, clock = [], ticks(BEGIN)
    for category, hours in parts:
        found.append(Segment(clock, clock + ticks(hours * HOUR), category, None))
        clock = found[-1].end
    return found


def test_the_worst_window_need_not_end_with_the_run() -> None:
    good, bad = Category.PRODUCTIVE, Category.DOWN
    parts = stretch((good, 10), (bad, 3), (good, 10))
    assert rolling_goodput(parts, 4 * HOUR).worst == 0.25
    assert rolling_goodput(parts, 4 * HOUR).last == 1
    assert rolling_goodput(parts, 2 * HOUR).worst == 0
    assert rolling_goodput(parts, 24 * HOUR).worst is None
    assert rolling_goodput(stretch((bad, 1), (good, 3)), 2 * HOUR).worst == 0.5
    assert rolling_goodput(stretch((good, 3), (bad, 1)), 2 * HOUR).last == 0.5


def test_windows_are_as_slow_counting_says() -> None:
    parts = cut(crashed()).segments
    every = [
        sum(max(0, min(s.end, end) - max(s.start, end - ticks(20)))
            for s in parts if s.category is Category.PRODUCTIVE) / ticks(20)
        for end in range(parts[0].start + ticks(20), parts[-1].end + 1, ticks(1))
    ]  # fmt: skip
    assert rolling_goodput(parts, 20).worst == pytest.approx(min(every), abs=1 / 60)
    assert rolling_goodput(parts, 20).last == pytest.approx(every[-1])


def test_what_occupies_nodes() -> None:
    assert {str(c) for c in Category} - {str(c) for c in OCCUPYING} == {"queueing", "down", "held"}


# -- trainers that report some steps only -------------------------------------------------------


def some_steps(of_first_report: float | None) -> History:
    """Every tenth step of 2 s is reported. A launch from step 0 dies after step 37 with a
    checkpoint of step 25, from which the next one goes on to step 60."""
    history = submitted()
    for first, last in ((0, 37), (25, 60)):
        begun, seconds = history.clock, of_first_report
        for step in range(first // 10 * 10 + 10, last + 1, 10):
            history.clock = begun + 2.0 * (step - first)
            history.steps.append(StepTime(step, history.epoch, history.now, seconds, None))
            seconds = 2.0
        history.clock = begun + 2.0 * (last - first)
        if last < 60:
            history.mark(MarkKind.LAUNCH_ENDED, "crash", failure=True).after(5)
            history.mark(MarkKind.LAUNCH_STARTED).after(6)
    history.mark(MarkKind.FINISHED)
    starts = {1: 0, 2: 25}
    history.marks = [
        replace(mark, resume_step=starts[mark.epoch or 0])
        if mark.kind is MarkKind.LAUNCH_STARTED
        else mark
        for mark in history.marks
    ]
    return history


@pytest.mark.parametrize("of_first_report", [2.0, None])
def test_a_report_stands_for_all_steps_since_the_one_before(of_first_report: float | None) -> None:
    result = told(some_steps(of_first_report))
    # Steps 31 to 37 were never reported.
    assert (result.kept_steps, result.lost_steps) == (60, 5)
    assert result.seconds[Category.PRODUCTIVE] == pytest.approx(2.0 * (20 + 35))
    assert result.seconds[Category.REDONE] == pytest.approx(2.0 * 10)
    assert result.seconds[Category.STARTING] == pytest.approx(4 + 6 + 6)


def test_a_launch_that_goes_on_before_an_earlier_report_replaces_it() -> None:
    history = submitted()
    history.steps = [
        StepTime(step, epoch, BEGIN + 10.0 * step + epoch, None, None)
        for epoch, step in ((1, 10), (1, 20), (1, 30), (2, 34))
    ]
    assert epochs_that_trained_again(history.steps, {}) == [None, None, None, None]
    again = epochs_that_trained_again(history.steps, {1: 0, 2: 24})
    assert again == [None, None, 2, None]
    assert steps_of_rows(history.steps, again, {1: 0, 2: 24}) == [10, 10, 6, 14]
