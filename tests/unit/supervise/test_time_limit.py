"""What is left of the time limit: before a launch, during one, and between two."""

from __future__ import annotations

import math
import os
import signal
import time
from functools import partial
from typing import Any

import pytest
from launch_evidence import config
from step_rows import trained_step
from supervise_stage import JOB_ID, Stage
from virtual_clock import ShiftedClock, VirtualClock

from hpctrain.records.find import RunFiles
from hpctrain.records.ledger import EventKind
from hpctrain.records.run_records import SaveRecord, StepMetrics, append_metrics, append_save
from hpctrain.runs.describe import describe
from hpctrain.slurm.states import JobState
from hpctrain.supervise import loop, time_limit
from hpctrain.supervise.context import attempt_from
from hpctrain.supervise.evidence import launch_watch
from hpctrain.supervise.time_limit import (
    JobTimeLimit,
    StopTime,
    measured_lead,
    query_time_limit,
    stop_lead,
    too_late_for_launch,
)

LEAD = 180.0


@pytest.fixture
def warned(stage: Stage) -> Stage:
    """A run whose script has Slurm warn 180 s before the end."""
    stage.configure(config().model_copy(update={"warning_seconds": LEAD}))
    return stage


def ends_in(stage: Stage, seconds: float) -> None:
    stage.slurm.change(end_time=time.time() + seconds)


@pytest.mark.parametrize(
    ("time_limit", "cause"),
    [
        (JobTimeLimit(None), None),
        (JobTimeLimit(math.inf), None),
        (JobTimeLimit(1e12), None),
        (JobTimeLimit(1e12, preempted=True), "preempted"),
        (JobTimeLimit(None, preempted=True), "preempted"),
        (JobTimeLimit(5.0), "time_limit"),
        (None, None),
    ],
)
def test_why_no_launch(warned: Stage, time_limit: JobTimeLimit | None, cause: str | None) -> None:
    verdict = too_late_for_launch(warned.supervisor().context, time_limit)
    assert (verdict.cause if verdict else None) == cause


def test_the_limit_that_slurm_set_at_the_start_counts_where_slurm_is_silent(warned: Stage) -> None:
    """And not once it is over, because then it has been moved."""
    for seconds, refused in ((100, True), (1000, False), (-100, False)):
        supervisor = warned.supervisor()
        end_time = str(int(time.time() + seconds))
        attempt = attempt_from(
            {"SLURM_JOB_ID": "5", "SLURM_JOB_NODELIST": "n0", "SLURM_JOB_END_TIME": end_time}
        )
        object.__setattr__(supervisor.context, "attempt", attempt)
        assert (too_late_for_launch(supervisor.context, None) is not None) is refused


@pytest.mark.parametrize("text", ["", "4294967295", "4294967294", "never"])
def test_no_limit_at_the_start(text: str) -> None:
    environment = {"SLURM_JOB_ID": "5", "SLURM_JOB_NODELIST": "n0", "SLURM_JOB_END_TIME": text}
    assert attempt_from(environment).end_time is None


def test_a_job_that_has_been_started_anew_tells_nothing(warned: Stage) -> None:
    ends_in(warned, 10)
    context = warned.supervisor().context
    assert query_time_limit(context) is not None
    warned.slurm.change(restart_count=1)
    assert query_time_limit(context) is None
    warned.slurm.change(restart_count=0, state=JobState.COMPLETING)
    assert query_time_limit(context) is None
    warned.slurm.away = True
    assert query_time_limit(context) is None


@pytest.fixture
def clock(virtual_clock: VirtualClock) -> VirtualClock:
    virtual_clock.begins_at = 1000.0
    return virtual_clock


def known(step_seconds: float, save_seconds: float) -> Any:
    lead = stop_lead([step_seconds] * 20, [save_seconds] * 3)
    return lambda run: lead


# Slurm warns 180 s before the end or a little earlier. Moments and what is due then; `moved`: the
# end, as changed after the launch began; `learn`: seconds of a step and of a save.
STOPS: dict[str, tuple[dict[str, Any], list[tuple[float, bool]]]] = {
    "a warning that does not come is noticed": (
        {}, [(1000, False), (1820, False), (1834, False), (1835, True)]),
    "a limit that has been moved warns later": (
        {"moved": 3000.0}, [(1835, False), (2834, False), (2835, True)]),
    "no limit": ({"end": None}, [(1e12, False)]),
    "an infinite limit": ({"end": math.inf}, [(1e12, False)]),
    # a stop takes 30 + 10 + 2 x 100 s, and the script has planned 180 s
    "a run whose saves are slow stops before the warning": (
        {"learn": (10.0, 100.0)}, [(1519, False), (1521, False), (1759, False), (1760, True)]),
    "a stop leaves half of the time to training": (
        {"learn": (10.0, 5000.0)}, [(1499, False), (1500, True)]),
}  # fmt: skip


@pytest.mark.parametrize("name", STOPS)
def test_when_a_launch_has_to_stop(warned: Stage, clock: VirtualClock, name: str) -> None:
    given, moments = STOPS[name]
    warned.slurm.change(end_time=given.get("end", 2000.0))
    context = warned.supervisor().context
    learn = known(*given["learn"]) if "learn" in given else measured_lead
    stop = StopTime(context, query_time_limit(context), learn)
    if "moved" in given:
        warned.slurm.change(end_time=given["moved"])
    for now, due in moments:
        clock.advance_to(now)
        assert stop.is_due() is due


def test_silence_of_slurm_is_no_warning(warned: Stage, clock: VirtualClock) -> None:
    warned.slurm.change(end_time=2000.0)
    context = warned.supervisor().context
    warning = StopTime(context, query_time_limit(context))
    warned.slurm.away = True
    clock.advance_to(1900)
    assert not warning.is_due()
    warned.slurm.away = False
    assert not warning.is_due(), "asked again after half a minute, not at once"
    clock.advance_to(1931)
    assert warning.is_due()


# -- what the run has measured -------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "saves"), [(0, 0), (19, 3), (20, 2), (1000, 0)])
def test_too_few_measurements_say_nothing(steps: int, saves: int) -> None:
    assert stop_lead([1.0] * steps, [5.0] * saves) is None


def test_a_stop_takes_a_step_and_two_saves() -> None:
    """The slow ones of them: one of a hundred is left out, all of ten count."""
    steps = [*[2.0] * 97, 3.0, 3.0, 300.0]
    lead = stop_lead(steps, [10.0] * 9 + [40.0])
    assert lead is not None
    assert (lead.step_seconds, lead.save_seconds) == (2.0, 40.0)
    assert lead.seconds == 30.0 + 2.0 + 2 * 40.0
    assert "112 s" in lead.sentence and "40.0 s (of 10)" in lead.sentence


def test_a_run_whose_saves_are_fast_trains_on_after_the_warning(
    warned: Stage, clock: VirtualClock
) -> None:
    """A stop takes 30 + 2 + 2 x 4 s."""
    warned.slurm.change(end_time=2000.0)
    context = warned.supervisor().context
    stop = StopTime(context, query_time_limit(context), known(2.0, 4.0))
    clock.advance_to(1820)
    assert not stop.is_due() and stop.outlasts_warning()
    for now, due in ((1900, False), (1959, False), (1960, True)):
        clock.advance_to(now)
        assert stop.is_due() is due
    assert not stop.outlasts_warning()


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(dict(preempt_time=1.0), id="preempted"),
        pytest.param(dict(end_time=9000.0), id="sent by a person"),
        pytest.param(dict(end_time=math.inf), id="no limit"),
        pytest.param(None, id="no answer"),
    ],
)
def test_a_warning_that_is_followed_at_once(
    warned: Stage, clock: VirtualClock, change: dict[str, Any] | None
) -> None:
    warned.slurm.change(end_time=2000.0)
    context = warned.supervisor().context
    stop = StopTime(context, query_time_limit(context), known(2.0, 4.0))
    clock.advance_to(1820)
    assert stop.outlasts_warning()
    if change is None:
        warned.slurm.away = True
    else:
        warned.slurm.change(**change)
    assert not stop.outlasts_warning()


def test_the_records_of_all_attempts_are_read(warned: Stage) -> None:
    layout = warned.layout
    assert measured_lead(layout) is None
    for epoch in (1, 2):
        for step in range(20 * epoch - 19, 20 * epoch + 1):
            append_metrics(layout, trained(step, epoch))
            if step % 10 == 0:
                save = SaveRecord(
                    step=step, epoch=epoch, time=1.0, stall_seconds=1.0, publish_seconds=4.0,
                    size_bytes=1,
                )  # fmt: skip
                append_save(layout, save)
    lead = measured_lead(layout)
    assert lead is not None
    assert (lead.steps, lead.saves, lead.step_seconds, lead.save_seconds) == (38, 4, 2.0, 5.0)


def trained(step: int, epoch: int) -> StepMetrics:
    """A step that has taken as many seconds as the launch has as number."""
    return trained_step(step, epoch=epoch, time=1.0, step_seconds=float(epoch))


def test_a_stop_by_measured_times_is_in_the_ledger(
    warned: Stage, monkeypatch: pytest.MonkeyPatch, shifted_clock: ShiftedClock
) -> None:
    """The launch is stopped by the supervisor, with a save, and the next attempt goes on."""
    monkeypatch.setattr(launch_watch, "StopTime", partial(StopTime, learn=known(10.0, 200.0)))
    ends_in(warned, 10000)
    warned.once_training(lambda: setattr(shifted_clock, "ahead_seconds", 9700.0))
    assert warned.play("progress:3 save:20 await-stop") == 0
    assert (warned.causes, warned.actions) == (["time_limit"], ["requeue"])
    (timed,) = warned.events(EventKind.STOP_TIMED)
    assert "440 s as measured" in str(timed.reason) and "180 s ahead" in str(timed.reason)


def test_a_launch_trains_on_after_the_warning(
    warned: Stage, monkeypatch: pytest.MonkeyPatch, shifted_clock: ShiftedClock
) -> None:
    """Slurm warns 170 s before the end, and a stop takes 40 s: it comes when these are left."""
    monkeypatch.setattr(launch_watch, "StopTime", partial(StopTime, learn=known(2.0, 4.0)))
    ends_in(warned, 10000)

    def warn() -> None:
        shifted_clock.ahead_seconds = 9830
        os.kill(os.getpid(), signal.SIGUSR1)

    def near_the_end() -> None:
        assert not (warned.layout.control / "stop").exists()
        shifted_clock.ahead_seconds = 9990

    warned.once_training(warn)
    warned.once(lambda: warned.events(EventKind.STOP_TIMED), near_the_end)
    assert warned.play("progress:3 save:20 await-stop") == 0
    assert (warned.causes, warned.actions) == (["time_limit"], ["requeue"])
    reasons = [str(event.reason) for event in warned.events(EventKind.STOP_TIMED)]
    assert [reason.partition(":")[0] for reason in reasons] == [
        "Slurm has warned, and there is time to train on",
        "the time limit is near",
    ]
    (attempt,) = describe(RunFiles(warned.layout)).attempts
    assert attempt.stop_time == reasons[-1]


# -- whole attempts ----------------------------------------------------------------------------


def test_nothing_is_launched_when_too_little_time_is_left(warned: Stage) -> None:
    """The warning has come before the supervisor was up, and the script ignores it until then."""
    ends_in(warned, 100)
    assert warned.play("done") == 0
    assert (warned.causes, warned.actions) == (["time_limit"], ["requeue"])
    assert not (warned.layout.directory / "srun.pid").exists()
    assert "the time limit is" in str(warned.events(EventKind.ACTION)[0].reason)


def test_a_limit_that_is_too_short_for_any_launch_is_named(warned: Stage) -> None:
    ends_in(warned, 100)
    for restart in range(3):
        warned.slurm.change(restart_count=restart, state=JobState.RUNNING)
        warned.supervisor("done", restart_count=restart).run()
    assert warned.actions == ["requeue", "requeue", "stop"]
    assert "raise `resources.walltime`" in str(warned.events(EventKind.ACTION)[-1].reason)


def test_the_limit_comes_near_without_a_warning_of_slurm(
    warned: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time_limit, "_OVERDUE_SECONDS", -1e4)
    ends_in(warned, LEAD + 1000)
    assert warned.play("progress:3 await-stop") == 0
    assert (warned.causes, warned.actions) == (["time_limit"], ["requeue"])
    ended = warned.events(EventKind.LAUNCH_ENDED)[0]
    assert ended.reason == "the time limit is near: the trainer saved and left"


@pytest.mark.parametrize("how", ["USR1", "preempted", "limit"])
def test_a_pause_leads_to_no_launch_that_cannot_finish(
    warned: Stage, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    delay = 600.0 if how == "USR1" else 0.1
    monkeypatch.setattr("hpctrain.judge.policy._FIRST_DELAY_SECONDS", delay)

    def happens() -> None:
        if how == "USR1":
            os.kill(os.getpid(), signal.SIGUSR1)
        elif how == "preempted":
            warned.slurm.change(preempt_time=1.0)
        else:
            ends_in(warned, 100)

    real, left = loop.act, [happens]

    def act(*words: Any) -> int:
        """As the pause begins."""
        code = real(*words)
        if left:
            left.pop()()
        return code

    monkeypatch.setattr(loop, "act", act)
    began = time.monotonic()
    assert warned.play("crash", "done") == 0
    assert warned.actions == ["relaunch", "requeue"]
    assert warned.causes == ["crash"]
    assert time.monotonic() - began < 300, "the pause would have taken 600 s"


@pytest.mark.parametrize("kind", ["stop", "hold"])
def test_a_request_ends_a_pause(warned: Stage, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr("hpctrain.judge.policy._FIRST_DELAY_SECONDS", 600.0)
    warned.once(lambda: warned.actions, lambda: (warned.layout.control / kind).touch())
    began = time.monotonic()
    warned.play("crash", "done")
    assert warned.actions == ["relaunch", kind]
    assert time.monotonic() - began < 300


# -- starts --------------------------------------------------------------------------------------


@pytest.fixture
def impatient(warned: Stage, monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setattr("hpctrain.supervise.evidence.launch_watch._STARTUP_STOP_SECONDS", 0.2)
    return warned


def asked(stage: Stage, how: str) -> None:
    if how == "USR1":
        os.kill(os.getpid(), signal.SIGUSR1)
    else:
        (stage.layout.control / how).write_text("ada: maintenance\n")


STARTS = ["sleep:600", "phase:starting sleep:600", "phase:loading sleep:600"]


@pytest.mark.parametrize("part", STARTS)
@pytest.mark.parametrize(
    ("how", "cause", "action"),
    [("stop", "yielded", "stop"), ("hold", "yielded", "hold"), ("USR1", "time_limit", "requeue")],
)
def test_a_start_that_is_asked_to_stop_is_ended(
    impatient: Stage, part: str, how: str, cause: str, action: str
) -> None:
    """No step has been trained, so nothing can be lost; and it is no failure."""
    begun = impatient.layout.directory / "srun.pid"
    impatient.once(begun.exists, lambda: asked(impatient, how))
    assert impatient.play(part) == 0
    assert (impatient.causes, impatient.actions) == ([cause], [action])
    assert (JOB_ID, "0", "KILL") in impatient.slurm.signals


def test_a_first_step_is_not_ended(impatient: Stage) -> None:
    """It is saved when it is through."""
    impatient.once_training(lambda: asked(impatient, "stop"))
    assert impatient.play("progress:0 sleep:1 progress:1 await-stop") == 0
    assert (impatient.causes, impatient.actions) == (["yielded"], ["stop"])
    assert (JOB_ID, "0", "KILL") not in impatient.slurm.signals


def test_a_start_that_nobody_stops_may_take_long(impatient: Stage) -> None:
    assert impatient.play("phase:loading sleep:1 progress:1 done") == 0
    assert impatient.causes == ["done"]


def test_a_failure_in_a_start_that_is_asked_to_stop_costs_no_budget(warned: Stage) -> None:
    """A rank that leaves breaks the connections of another one."""
    warned.once((warned.layout.directory / "srun.pid").exists, lambda: asked(warned, "USR1"))

    def yielded() -> None:
        from hpctrain.records.exit_records import write_exit_record
        from hpctrain.records.run_records import ExitRecord

        values: dict[str, Any] = dict(epoch=1, rank=1, node="n0", outcome="yielded", step=0)
        record = ExitRecord(**values, exit_code=75, time=1.0)
        write_exit_record(warned.layout, 1, record)

    warned.once(lambda: warned.layout.stop_request.exists(), yielded)
    assert warned.play("progress:0 await:exits/e000001/node-000001.jsonl crash") == 0
    assert (warned.causes, warned.actions) == (["time_limit"], ["requeue"])
