"""A replica of a service under the supervisor of runs: what counts as progress, limits, words."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
from supervise_facts import NOTHING, config, exits

from hpctrain.judge.causes import Cause, can_happen
from hpctrain.judge.classify import classify
from hpctrain.judge.documents import ActionKind, History, Situation, Verdict
from hpctrain.judge.launch_history import history
from hpctrain.judge.policy import decide
from hpctrain.judge.silence_limits import StallLimits
from hpctrain.records.ledger import Event
from hpctrain.records.run_records import Phase
from hpctrain.runs.why import budgets, preview_policy

SERVES = config().model_copy(update={"serves": True})
HERE = Situation()


def event(kind: str, **fields: object) -> Event:
    return Event.model_validate({"event": kind, "time": 0.0, "job_id": 5, **fields})


STARTED = event("launch_started", resume_step=0)
READY = event("serving", served_seconds=0.0)
PROVEN = event("serving", served_seconds=600.0)
CRASH = event("launch_ended", cause="crash", resume_step=0)
LOST = event("attempt_lost", cause="node_failure")
LIMIT = event("launch_ended", cause="time_limit", resume_step=0)


@pytest.mark.parametrize(
    ("events", "failures", "time_limits"),
    [
        ([STARTED, CRASH, STARTED, CRASH], 2, 0),
        # Being ready is not enough: an engine that dies after a minute does so for ever.
        ([STARTED, READY, CRASH, STARTED, READY, CRASH], 2, 0),
        ([STARTED, CRASH, STARTED, READY, PROVEN], 0, 0),
        # The end of a launch that has served is the first of nothing.
        ([STARTED, CRASH, STARTED, READY, PROVEN, CRASH], 0, 0),
        ([STARTED, READY, PROVEN, CRASH, STARTED, CRASH], 1, 0),
        ([STARTED, READY, PROVEN, LOST, STARTED, READY, PROVEN, LOST], 0, 0),
        ([STARTED, READY, LOST, STARTED, READY, LOST], 2, 0),
        ([STARTED, LIMIT, STARTED, READY, PROVEN, LIMIT, STARTED, LIMIT], 0, 1),
    ],
)
def test_having_served_long_is_progress(
    events: list[Event], failures: int, time_limits: int
) -> None:
    found = history(events)
    assert (found.failures_without_progress, found.time_limits_without_progress) == (
        failures,
        time_limits,
    )


def test_a_replica_that_was_ready_has_fitted() -> None:
    out_of_memory = event("launch_ended", cause="gpu_oom", resume_step=0)
    verdict = Verdict(Cause.GPU_OOM, "CUDA out of memory")
    never = decide(verdict, history([STARTED, out_of_memory]), HERE, SERVES)
    assert never.kind is ActionKind.STOP and "`hpctrain serve plan`" in never.reason
    once = decide(verdict, history([STARTED, READY, out_of_memory]), HERE, SERVES)
    assert once.kind is ActionKind.RELAUNCH


@pytest.mark.parametrize(
    ("cause", "count", "kind"),
    [
        (Cause.ENGINE_EXIT, 1, ActionKind.RELAUNCH),
        (Cause.ENGINE_EXIT, 2, ActionKind.RELAUNCH),
        (Cause.ENGINE_EXIT, 3, ActionKind.STOP),
        (Cause.WEIGHTS, 1, ActionKind.RELAUNCH),
        (Cause.WEIGHTS, 2, ActionKind.STOP),
        (Cause.CRASH, 3, ActionKind.STOP),
        (Cause.PREEMPTED, 9, ActionKind.REQUEUE),
    ],
)
def test_budgets_of_a_replica(cause: Cause, count: int, kind: ActionKind) -> None:
    past = History(count, 0, by_cause=((str(cause), count),))
    action = decide(Verdict(cause, "it failed"), past, HERE, SERVES)
    assert action.kind is kind
    assert "checkpoint" not in action.reason and "hpctrain resume" not in action.reason
    if kind is ActionKind.STOP:
        assert "without having served for" in action.reason


def test_a_replica_that_was_asked_to_leave_stops_well() -> None:
    action = decide(Verdict(Cause.YIELDED, "asked to stop"), history([]), HERE, SERVES)
    assert (action.kind, action.exit_code) == (ActionKind.STOP, 0)
    assert action.reason == "asked to stop; the replica has left"


def test_only_what_can_happen_is_shown() -> None:
    for serves, settings in ((True, SERVES), (False, config())):
        shown = {one.cause for one in budgets(history([]), settings)}
        assert {Cause.WEIGHTS, Cause.ENGINE_EXIT} <= {*map(Cause, shown)} or not serves
        assert all(can_happen(Cause(cause), serves=serves) for cause in shown)
        for preview in preview_policy([], settings, 0.0, 0, 0):
            assert all(can_happen(Cause(cause), serves=serves) for cause in preview.causes)


def test_silence_while_it_serves_is_limited_as_a_step_is() -> None:
    limits = StallLimits(SERVES)
    caps = {phase: limits.cap(phase) for phase in get_args(Phase)}
    assert caps["serving"] == caps["draining"] == caps["training"] == SERVES.stall_seconds
    assert caps["loading"] == SERVES.setup_stall_seconds


def test_the_words_of_a_replica_about_its_drain_stand_in_the_ledger() -> None:
    left = exits("yielded drained: 0 requests were broken off")
    evidence = replace(NOTHING, rank_exits=left, last_step=1, signals=("USR1",))
    verdict = classify(evidence)
    assert verdict.cause is Cause.TIME_LIMIT
    assert verdict.reason == "the time limit is near: drained: 0 requests were broken off"
    saved = classify(replace(evidence, rank_exits=exits("yielded")))
    assert saved.reason == "the time limit is near: the trainer saved and left"
