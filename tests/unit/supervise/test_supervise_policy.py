"""What is done about each cause, for each history and site."""

from __future__ import annotations

import itertools

import pytest
from supervise_facts import config

from hpctrain.supervise.causes import Cause
from hpctrain.supervise.documents import (
    ActionKind,
    History,
    Verdict,
)
from hpctrain.supervise.policy import FAILURE_CAUSES, SCHEDULER_CAUSES, decide

FRESH = History(0, 0)


@pytest.mark.parametrize(
    ("cause", "kind", "exit_code"),
    [
        (Cause.DONE, ActionKind.FINISH, 0),
        (Cause.SUPERSEDED, ActionKind.LEAVE, 0),
        (Cause.YIELDED, ActionKind.STOP, 0),
        (Cause.CANCELLED, ActionKind.STOP, 1),
        (Cause.CONFIG_ERROR, ActionKind.STOP, 1),
        (Cause.BAD_CHECKPOINT, ActionKind.STOP, 1),
        (Cause.PREEMPTED, ActionKind.REQUEUE, 0),
        (Cause.TIME_LIMIT, ActionKind.REQUEUE, 0),
        (Cause.NODE_FAILURE, ActionKind.REQUEUE, 0),
        (Cause.REQUEUED, ActionKind.REQUEUE, 0),
        (Cause.CRASH, ActionKind.RELAUNCH, 0),
        (Cause.HANG, ActionKind.RELAUNCH, 0),
        (Cause.LAUNCH_FAILURE, ActionKind.RELAUNCH, 0),
        (Cause.UNKNOWN, ActionKind.RELAUNCH, 0),
    ],
)
def test_the_first_time(cause: Cause, kind: ActionKind, exit_code: int) -> None:
    action = decide(Verdict(cause, "because"), History(1, 0), config())
    assert (action.kind, action.exit_code) == (kind, exit_code)


@pytest.mark.parametrize("cause", sorted(SCHEDULER_CAUSES))
def test_what_slurm_has_requeued_is_left_alone_and_a_site_without_requeue_stops(
    cause: Cause,
) -> None:
    queued = Verdict(cause, "because", already_requeued=True)
    for continuation in ("requeue", "none"):
        site = config(continuation)
        assert decide(queued, FRESH, site).kind is ActionKind.LEAVE
    stopped = decide(Verdict(cause, "because"), FRESH, config("none"))
    assert (stopped.kind, stopped.exit_code) == (ActionKind.STOP, 1)
    assert "hpctrain resubmit" in stopped.reason


@pytest.mark.parametrize("cause", sorted(FAILURE_CAUSES))
def test_failures_may_repeat_until_the_budget_is_used_up(cause: Cause) -> None:
    verdict = Verdict(cause, "rank 3 failed")
    kinds = [decide(verdict, History(count, 0), config()).kind for count in range(5)]
    assert kinds == [ActionKind.RELAUNCH] * 3 + [ActionKind.STOP] * 2
    stop = decide(verdict, History(3, 0), config())
    assert stop.exit_code == 1
    assert "3 failed launches" in stop.reason
    assert "rank 3 failed" in stop.reason


def test_delays_double_and_are_bounded() -> None:
    site = config(failures_without_progress=50)
    verdict = Verdict(Cause.CRASH, "because")
    delays = [decide(verdict, History(count, 0), site).delay_seconds for count in range(49)]
    assert delays[:6] == [1, 1, 2, 4, 8, 16]
    assert max(delays) == delays[-1] == 300


def test_time_limits_without_a_checkpoint_stop_with_advice() -> None:
    verdict = Verdict(Cause.TIME_LIMIT, "because")
    kinds = [decide(verdict, History(0, count), config()).kind for count in range(4)]
    assert kinds == [ActionKind.REQUEUE] * 3 + [ActionKind.STOP]
    assert "resources.walltime" in decide(verdict, History(0, 3), config()).reason
    # Preemptions are not the run's fault, and failures have their own budget.
    assert decide(Verdict(Cause.PREEMPTED, "x"), History(9, 9), config()).kind is ActionKind.REQUEUE
    assert decide(verdict, History(9, 0), config()).kind is ActionKind.REQUEUE


def test_every_cause_has_an_answer_and_unknown_loses_nothing() -> None:
    histories = [History(*pair) for pair in itertools.product((0, 1, 3, 10**6), repeat=2)]
    for cause, past, site, queued in itertools.product(
        Cause, histories, (config(), config("none")), (False, True)
    ):
        action = decide(Verdict(cause, "because", already_requeued=queued), past, site)
        assert action.reason
        assert 0 <= action.delay_seconds <= 300
        assert action.exit_code in (0, 1)  # 85 and the like may mean "requeue" to a site
        if cause is Cause.UNKNOWN:
            budget_left = past.failures_without_progress < site.failures_without_progress
            assert action.kind is (ActionKind.RELAUNCH if budget_left else ActionKind.STOP)
        if cause in (Cause.CANCELLED, Cause.YIELDED, Cause.CONFIG_ERROR, Cause.DONE):
            assert action.kind not in (ActionKind.REQUEUE, ActionKind.RELAUNCH)
