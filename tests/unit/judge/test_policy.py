"""What is done about each cause, for each history, situation and site."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from launch_evidence import config

from hpctrain.judge.causes import FAILURE_CAUSES, FINAL_CAUSES, SCHEDULER_CAUSES, Cause
from hpctrain.judge.documents import Action, ActionKind, History, Situation, Verdict
from hpctrain.judge.policy import RETRIES, budget_of, decide
from hpctrain.records.supervise_config import SuperviseConfig

ROWS = {
    name: (cause, given, due)
    for name, cause, given, due in yaml.safe_load(
        Path(__file__).with_name("policy.yaml").read_text()
    )
}
NUMERICS = {Cause.DIVERGED, Cause.SUSPECT_NUMERICS}
SITES = ("requeue", "chain", "singleton", "array", "none")
OF = ("allocated_nodes", "healthy_nodes", "needed_nodes", "least_nodes")


def site(**changes: Any) -> SuperviseConfig:
    return config().model_copy(update=changes)


def decided(cause: Cause, count: int = 1, **given: Any) -> Action:
    """Decide after `count` launches in a row that ended so without progress.

    The run had made some before. `given` are fields of the verdict, the history, the situation and
    the settings.
    """
    if "anomalies" in given:  # at one step, with checkpoints from before
        anomalies = given.pop("anomalies")
        count = anomalies + 1
        numerics = {"anomalies_at_step": anomalies, "nodes": ("n0", "n1"), "step": 33}
        numerics |= {"of": (2, 1, 2, 2), "good_checkpoints": (30, 20, 10)}
        given = numerics | given
    failures = count if cause in FAILURE_CAUSES else 0
    known: dict[type, dict[str, Any]] = {
        Verdict: {"cause": cause, "reason": "because"},
        History: {
            "failures_without_progress": given.pop("failures_without_progress_so_far", failures),
            "time_limits_without_progress": count if cause is Cause.TIME_LIMIT else 0,
            "by_cause": ((str(cause), count),),
            "ever_progressed": True,
        },
        Situation: dict(zip(OF, given.pop("of"), strict=True)) if "of" in given else {},
    }
    settings = {}
    for name, value in given.items():
        value = tuple(value) if isinstance(value, list) else value
        owner = next((k for k in known if name in {f.name for f in fields(k)}), None)
        (settings if owner is None else known[owner])[name] = value
    if "rollback" in settings:
        settings["rollback"] = config().rollback.model_copy(update=settings["rollback"])
    assert settings.keys() <= SuperviseConfig.model_fields.keys()
    verdict, history, situation = (kind(**values) for kind, values in known.items())
    return decide(verdict, history, situation, site(**settings))


@pytest.mark.parametrize("name", ROWS)
def test_the_action(name: str) -> None:
    cause, given, due = ROWS[name]
    expected = {"kind": due} if isinstance(due, str) else dict(due)
    words = expected.pop("reason", "")
    action = decided(Cause(cause), **given)
    usual = Action(action.kind, "", exit_code=int(expected["kind"] == "stop"))
    due = replace(usual, **{k: tuple(v) if isinstance(v, list) else v for k, v in expected.items()})
    assert replace(action, reason="", delay_seconds=0.0) == due, action
    assert action.reason and words in action.reason
    if given.get("serves"):
        assert "checkpoint" not in action.reason and "hpctrain resume" not in action.reason


@pytest.mark.parametrize(
    ("cause", "kind", "exit_code"),
    [
        (Cause.DONE, ActionKind.FINISH, 0),
        (Cause.SUPERSEDED, ActionKind.LEAVE, 0),
        (Cause.YIELDED, ActionKind.STOP, 0),
        *((cause, ActionKind.STOP, 1) for cause in sorted(FINAL_CAUSES - {Cause.YIELDED})),
        *((cause, ActionKind.REQUEUE, 0) for cause in sorted(SCHEDULER_CAUSES)),
        *((cause, ActionKind.RELAUNCH, 0) for cause in sorted(FAILURE_CAUSES)),
    ],
)
def test_the_first_time(cause: Cause, kind: ActionKind, exit_code: int) -> None:
    action = decided(cause)
    assert (action.kind, action.exit_code) == (kind, exit_code)


@pytest.mark.parametrize("cause", sorted(FAILURE_CAUSES | SCHEDULER_CAUSES))
def test_how_each_kind_of_site_goes_on_without_the_nodes(cause: Cause) -> None:
    kinds = {one: decided(cause, keeps_nodes=False, continuation=one).kind for one in SITES}
    assert kinds == {
        "requeue": ActionKind.REQUEUE,
        "chain": ActionKind.LEAVE,
        "singleton": ActionKind.LEAVE,
        "array": ActionKind.LEAVE,
        "none": ActionKind.STOP,
    }
    stopped = decided(cause, keeps_nodes=False, continuation="none")
    assert stopped.exit_code == 1
    assert cause in NUMERICS or "hpctrain resume" in stopped.reason
    if cause in SCHEDULER_CAUSES:
        for one in SITES:
            assert decided(cause, continuation=one).kind is kinds[one]
            queued = decided(cause, continuation=one, already_requeued=True)
            assert queued.kind is ActionKind.LEAVE


@pytest.mark.parametrize("cause", sorted(FAILURE_CAUSES - NUMERICS))
def test_each_cause_has_a_budget_of_its_own(cause: Cause) -> None:
    """One retry more than the budget stops, with the count and the reason."""
    budget = budget_of(cause, site(failures_without_progress=3))
    assert budget is not None
    kinds = [decided(cause, n).kind for n in range(1, budget + 2)]
    assert kinds == [ActionKind.RELAUNCH] * budget + [ActionKind.STOP]
    stop = decided(cause, budget + 1, reason="rank 3 failed")
    assert stop.exit_code == 1
    assert "rank 3 failed" in stop.reason and "without a new checkpoint" in stop.reason
    other = Cause.CRASH if cause is not Cause.CRASH else Cause.HANG
    of_others = decided(cause, 9, by_cause=((str(other), 9),))
    assert of_others.kind is ActionKind.RELAUNCH


def test_budgets_by_default_by_number_and_by_name() -> None:
    assert budget_of(Cause.CRASH, site()) == 2
    assert budget_of(Cause.CRASH, site(failures_without_progress=6)) == 5
    assert budget_of(Cause.NODE_FAILURE, site()) == RETRIES[Cause.NODE_FAILURE] == 5
    assert budget_of(Cause.CRASH, site(budgets={"crash": 7})) == 7
    assert budget_of(Cause.HANG, site(budgets={"crash": 7})) == 2
    assert budget_of(Cause.PREEMPTED, site()) is None
    assert all(budget_of(cause, site()) == 0 for cause in FINAL_CAUSES)


def test_the_budgets_are_those_of_the_documents() -> None:
    assert {str(cause): retries for cause, retries in RETRIES.items()} == {
        "node_failure": 5,
        "prolog_failure": 5,
        "node_command": 5,
        "external_signal": 5,
        "gpu_error": 5,
        "fabric": 5,
        "storage": 5,
        "port": 5,
        "gpu_oom": 1,
        "host_oom": 1,
        "data_loader": 1,
        "weights": 1,
        "diverged": 1,
        "suspect_numerics": 1,
        "load_failed": 3,
    }


def test_delays_double_and_are_bounded() -> None:
    roomy = {"failures_without_progress_so_far": 0, "budgets": {"storage": 50, "crash": 50}}
    for cause, begin in ((Cause.CRASH, 1), (Cause.STORAGE, 30)):
        delays = [decided(cause, n, **roomy).delay_seconds for n in range(1, 49)]
        assert delays[:3] == [begin, 2 * begin, 4 * begin]
        assert max(delays) == delays[-1] == 300
    waits = [
        decided(Cause.CRASH, 0, recent_failures=n, continuation="chain").delay_seconds
        for n in (4, 5, 6, 7, 8, 50)
    ]
    assert waits == [1, 300, 600, 1200, 1800, 1800], "a storm where nobody requeues"


# -- everything --------------------------------------------------------------------------------


def test_every_cause_has_an_answer_and_unknown_loses_nothing() -> None:
    """Every end that nobody asked for fails the job: Slurm sends its mail."""
    flags = itertools.product(
        Cause, (0, 1, 3, 10**6), SITES, (False, True), (False, True), (False, True), (False, True)
    )
    for cause, count, name, queued, keeps, acting, followed in flags:
        action = decided(
            cause,
            count,
            continuation=name,
            already_requeued=queued,
            keeps_nodes=keeps,
            exclude_nodes="act" if acting else "observe",
            followed=followed,
            nodes=("n0",),
        )
        assert action.reason
        assert 0 <= action.delay_seconds <= 1800
        assert action.exit_code in (0, 1)  # 85 and the like may mean "requeue" to a site
        goes_on = action.kind in (ActionKind.REQUEUE, ActionKind.RELAUNCH)
        if cause is Cause.UNKNOWN:
            assert action.rollback_to is None and not action.exclude
        if cause in FINAL_CAUSES or cause is Cause.DONE:
            assert not goes_on
        if queued or name != "requeue":
            assert action.kind is not ActionKind.REQUEUE
        if action.kind is ActionKind.STOP:
            assert (action.exit_code == 0) is (cause is Cause.YIELDED), (cause, name)
        if action.kind is ActionKind.LEAVE and cause is not Cause.SUPERSEDED and not queued:
            assert (action.exit_code == 0) is followed, (cause, name)


def test_a_reason_and_a_decision_are_joined_and_the_decision_alone_needs_no_reason() -> None:
    verdict = Verdict(Cause.CRASH, "rank 3 failed")
    assert verdict.followed_by("start again") == "rank 3 failed: start again"
    assert verdict.followed_by("start again", "; ") == "rank 3 failed; start again"
    assert verdict.preceded_by("3 in a row") == "3 in a row: rank 3 failed"
    without = replace(verdict, reason="")
    assert without.followed_by("start again", "; ") == without.preceded_by("start again")
