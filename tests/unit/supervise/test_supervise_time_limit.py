"""What is left of the time limit: before a launch, during one, and between two."""

from __future__ import annotations

import math
import os
import signal
import time
from typing import Any

import pytest
from supervise_facts import config
from supervise_stage import JOB_ID, Stage

from hpctrain.slurm.states import JobState
from hpctrain.store.ledger import EventKind
from hpctrain.supervise import loop, time_limit
from hpctrain.supervise.attempt import attempt_from
from hpctrain.supervise.time_limit import (
    JobTimeLimit,
    OverdueWarning,
    query_time_limit,
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


class Clock:
    """`time.time` by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time_limit, "time", clock)
    return clock


def test_a_warning_that_does_not_come_is_noticed(warned: Stage, clock: Clock) -> None:
    """Slurm warns 180 s before the end or a little earlier."""
    warned.slurm.change(end_time=2000.0)
    context = warned.supervisor().context
    warning = OverdueWarning(context, query_time_limit(context))
    for now, due in ((1000, False), (1820, False), (1834, False), (1835, True)):
        clock.now = now
        assert warning.is_due() is due


def test_a_limit_that_has_been_moved_warns_later(warned: Stage, clock: Clock) -> None:
    warned.slurm.change(end_time=2000.0)
    context = warned.supervisor().context
    warning = OverdueWarning(context, query_time_limit(context))
    warned.slurm.change(end_time=3000.0)
    for now, due in ((1835, False), (2834, False), (2835, True)):
        clock.now = now
        assert warning.is_due() is due


def test_silence_of_slurm_is_no_warning(warned: Stage, clock: Clock) -> None:
    warned.slurm.change(end_time=2000.0)
    context = warned.supervisor().context
    warning = OverdueWarning(context, query_time_limit(context))
    warned.slurm.away = True
    clock.now = 1900
    assert not warning.is_due()
    warned.slurm.away = False
    assert not warning.is_due(), "asked again after half a minute, not at once"
    clock.now = 1931
    assert warning.is_due()


@pytest.mark.parametrize("end_time", [None, math.inf])
def test_no_limit_no_warning(warned: Stage, clock: Clock, end_time: float | None) -> None:
    warned.slurm.change(end_time=end_time)
    context = warned.supervisor().context
    warning = OverdueWarning(context, query_time_limit(context))
    clock.now = 1e12
    assert not warning.is_due()


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
    monkeypatch.setattr("hpctrain.supervise.judge.policy._FIRST_DELAY_SECONDS", delay)

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
    monkeypatch.setattr("hpctrain.supervise.judge.policy._FIRST_DELAY_SECONDS", 600.0)
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
        from hpctrain.store.exit_records import write_exit_record
        from hpctrain.store.run_records import ExitRecord

        values: dict[str, Any] = dict(epoch=1, rank=1, node="n0", outcome="yielded", step=0)
        record = ExitRecord(**values, exit_code=75, time=1.0)
        write_exit_record(warned.layout, 1, record)

    warned.once(lambda: warned.layout.stop_request.exists(), yielded)
    assert warned.play("progress:0 await:exits/e000001/node-000001.jsonl crash") == 0
    assert (warned.causes, warned.actions) == (["time_limit"], ["requeue"])
