"""What is done about each cause; what counts as a failure and what as progress."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from launch_evidence import config

from hpctrain.judge.causes import FAILURE_CAUSES, FINAL_CAUSES, SCHEDULER_CAUSES, Cause, can_happen
from hpctrain.judge.documents import Action, ActionKind, History, Situation, Verdict
from hpctrain.judge.launch_history import (
    history,
    loaded_instead,
    mean_time_to_failure,
    pending_rejections,
    pending_rollback,
    pinned_steps,
)
from hpctrain.judge.policy import RETRIES, budget_of, decide
from hpctrain.judge.policy_preview import budgets, preview_policy
from hpctrain.judge.silence_limits import StallLimits
from hpctrain.records.ledger import Event
from hpctrain.records.run_records import Phase
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


# -- What counts as a failure, what as progress, and what the mean time to failure is ----------


def event(kind: str, time: float = 0.0, **fields: object) -> Event:
    return Event.model_validate({"event": kind, "time": time, "job_id": 5, **fields})


def ended(
    cause: Cause,
    resume_step: int = 10,
    checkpoint_step: int | None = 10,
    time: float = 0.0,
    **fields: object,
) -> Event:
    return event(
        "launch_ended",
        time,
        cause=str(cause),
        resume_step=resume_step,
        checkpoint_step=checkpoint_step,
        **fields,
    )


def started(resume_step: int, time: float = 0.0) -> Event:
    return event("launch_started", time, resume_step=resume_step)


def rolled_back(step: int) -> Event:
    return event("rolled_back", checkpoint_step=step)


def lost(cause: Cause) -> Event:
    return event("attempt_lost", cause=str(cause))


AT_10 = started(10)
CRASH, PREEMPTED, LIMIT = ended(Cause.CRASH), ended(Cause.PREEMPTED), ended(Cause.TIME_LIMIT)
PROGRESS = ended(Cause.CRASH, 10, 20)


@pytest.mark.parametrize(
    ("events", "failures", "time_limits"),
    [
        ([], 0, 0),
        ([CRASH], 1, 0),
        ([CRASH, ended(Cause.HANG), ended(Cause.UNKNOWN)], 3, 0),
        ([CRASH, PREEMPTED, CRASH], 2, 0),
        ([PREEMPTED] * 100, 0, 0),
        ([LIMIT, CRASH, LIMIT], 1, 2),
        ([CRASH, CRASH, PROGRESS], 0, 0),
        ([CRASH, CRASH, ended(Cause.PREEMPTED, 10, 20), CRASH], 1, 0),
        ([ended(Cause.CRASH, 0, None)], 1, 0),
        ([ended(Cause.CRASH, 20, 10)], 1, 0),
        ([CRASH, event("resume", resume_step=0, checkpoint_step=99)], 1, 0),
        ([ended(Cause.DONE), ended(Cause.CONFIG_ERROR), ended(Cause.CANCELLED)], 0, 0),
        # the same checkpoint again and again, because it turns out bad each time, is no progress
        ([AT_10, PROGRESS, PROGRESS, PROGRESS], 2, 0),
        # lost attempts count, and where the next launch begins shows what they had brought
        ([AT_10, lost(Cause.NODE_FAILURE), AT_10, lost(Cause.NODE_FAILURE)], 2, 0),
        ([AT_10, lost(Cause.NODE_FAILURE), started(20)], 0, 0),
        ([AT_10, lost(Cause.NODE_FAILURE), started(20), CRASH], 1, 0),
        # a person who resumes the run has looked at it
        ([CRASH, CRASH, event("control", action="resume"), CRASH], 1, 0),
        ([CRASH, CRASH, event("control", action="save"), CRASH], 3, 0),
        # going back makes older checkpoints new again, and is no progress itself
        ([AT_10, PROGRESS, ended(Cause.DIVERGED, 20, 20), rolled_back(10), CRASH], 2, 0),
        ([AT_10, PROGRESS, CRASH, rolled_back(10), AT_10, ended(Cause.CRASH, 10, 15)], 0, 0),
    ],
)
def test_failures_since_the_last_new_checkpoint(
    events: list[Event], failures: int, time_limits: int
) -> None:
    found = history([AT_10, *events] if events else events)
    assert found.failures_without_progress == failures
    assert found.time_limits_without_progress == time_limits


def test_each_cause_is_counted_for_itself() -> None:
    found = history([AT_10, CRASH, ended(Cause.HANG), CRASH, PREEMPTED])
    assert found.of(Cause.CRASH) == 2
    assert found.of(Cause.HANG) == 1
    assert found.of(Cause.PREEMPTED) == 1
    assert found.of(Cause.GPU_OOM) == 0


def test_whether_the_run_has_ever_progressed() -> None:
    assert not history([started(0), ended(Cause.CRASH, 0, None)]).ever_progressed
    assert history([started(0), ended(Cause.CRASH, 0, 5), CRASH, CRASH]).ever_progressed


def test_only_failures_within_the_window_are_recent() -> None:
    events = [ended(Cause.CRASH, time=float(t)) for t in (0, 700, 1000, 1300)]
    assert history(events, window_seconds=600).recent_failures == 3
    assert history(events, window_seconds=599).recent_failures == 2
    assert history([*events, ended(Cause.PREEMPTED, time=1301.0)], 600).recent_failures == 2


def test_progress_does_not_end_a_storm() -> None:
    events = [ended(Cause.CRASH, step, step + 5, time=float(step)) for step in range(0, 50, 5)]
    found = history(events, 1000)
    assert (found.failures_without_progress, found.recent_failures) == (0, 10)


def test_equal_fingerprints_in_a_row() -> None:
    def crash(print_: str | None) -> Event:
        return ended(Cause.CRASH, fingerprint=print_)

    assert history([AT_10, crash("b"), crash("a"), crash("a")]).same_fingerprint == 2
    assert history([AT_10, crash("a"), crash("b")]).same_fingerprint == 1
    assert history([AT_10, crash(None), crash(None)]).same_fingerprint == 0


@pytest.mark.parametrize("cause", [Cause.DIVERGED, Cause.SUSPECT_NUMERICS])
def test_anomalies_at_the_same_step_are_remembered_through_progress(cause: Cause) -> None:
    def anomaly(step: int | None) -> Event:
        return ended(cause, failed_step=step)

    assert history([anomaly(33)]).anomalies_at_step == 0
    assert history([anomaly(33), PROGRESS, anomaly(33)]).anomalies_at_step == 1
    assert history([anomaly(33), anomaly(34)]).anomalies_at_step == 0
    assert history([anomaly(33), anomaly(33), CRASH]).anomalies_at_step == 0
    assert history([anomaly(None), anomaly(None)]).anomalies_at_step == 0


def test_mean_time_to_failure() -> None:
    launch = [started(0, 100.0), ended(Cause.CRASH, 0, 5, time=400.0)]
    healthy = [started(0, 500.0), ended(Cause.PREEMPTED, 5, 5, time=800.0)]
    assert mean_time_to_failure([], None) is None
    assert mean_time_to_failure(healthy, None) is None
    assert mean_time_to_failure([], 1000.0) == 1000.0
    assert mean_time_to_failure([*launch, *healthy], None) == 600.0
    assert mean_time_to_failure([*launch, *healthy], 1000.0) == (1000 + 600) / 2
    # an end without a start, and a clock that went back
    assert mean_time_to_failure([CRASH, *launch], 1000.0) == (1000 + 300) / 2
    assert mean_time_to_failure([started(0, 9.0), ended(Cause.CRASH, time=4.0)], 50.0) == 25.0


def test_going_back_is_pending_until_the_next_launch() -> None:
    assert pending_rollback([]) is None
    assert pending_rollback([AT_10, CRASH]) is None
    assert pending_rollback([AT_10, CRASH, rolled_back(5), event("attempt_started")]) == 5
    assert pending_rollback([rolled_back(5), AT_10]) is None
    assert pending_rollback([AT_10, rolled_back(0)]) == 0


def test_checkpoints_from_before_an_anomaly_are_pinned() -> None:
    def anomaly(step: int | None) -> Event:
        return ended(Cause.DIVERGED, 10, step)

    assert pinned_steps([AT_10, CRASH]) == ()
    assert pinned_steps([anomaly(30), CRASH, anomaly(30)]) == (30,)
    assert pinned_steps([anomaly(10), anomaly(None), anomaly(30), anomaly(50)]) == (30, 50)


# A replica of a service under the supervisor of runs: what counts as progress, limits, words.


SERVES = config().model_copy(update={"serves": True})
HERE = Situation()


STARTED = event("launch_started", resume_step=0)
READY = event("serving", served_seconds=0.0)
PROVEN = event("serving", served_seconds=600.0)
DIED = event("launch_ended", cause="crash", resume_step=0)
LOST = event("attempt_lost", cause="node_failure")
OVER = event("launch_ended", cause="time_limit", resume_step=0)


@pytest.mark.parametrize(
    ("events", "failures", "time_limits"),
    [
        ([STARTED, DIED, STARTED, DIED], 2, 0),
        # Being ready is not enough: an engine that dies after a minute does so for ever.
        ([STARTED, READY, DIED, STARTED, READY, DIED], 2, 0),
        ([STARTED, DIED, STARTED, READY, PROVEN], 0, 0),
        # The end of a launch that has served is the first of nothing.
        ([STARTED, DIED, STARTED, READY, PROVEN, DIED], 0, 0),
        ([STARTED, READY, PROVEN, DIED, STARTED, DIED], 1, 0),
        ([STARTED, READY, PROVEN, LOST, STARTED, READY, PROVEN, LOST], 0, 0),
        ([STARTED, READY, LOST, STARTED, READY, LOST], 2, 0),
        ([STARTED, OVER, STARTED, READY, PROVEN, OVER, STARTED, OVER], 0, 1),
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
    assert not history([STARTED, DIED]).ever_progressed
    assert history([STARTED, READY, DIED]).ever_progressed


def test_only_what_can_happen_is_shown() -> None:
    foreign = config().model_copy(update={"launcher": "agent"})
    for serves, settings in ((True, SERVES), (False, config()), (False, foreign)):
        own = settings is foreign
        shown = {one.cause for one in budgets(history([]), settings)}
        assert {Cause.WEIGHTS, Cause.ENGINE_EXIT} <= {*map(Cause, shown)} or not serves
        assert (Cause.ENDED_EARLY in {*map(Cause, shown)}) is own
        assert all(can_happen(Cause(cause), serves=serves, foreign=own) for cause in shown)
        for preview in preview_policy([], settings, 0.0, 0, 0):
            known = (
                can_happen(Cause(cause), serves=serves, foreign=own) for cause in preview.causes
            )
            assert all(known)


def test_silence_while_it_serves_is_limited_as_a_step_is() -> None:
    limits = StallLimits(SERVES)
    caps = {phase: limits.cap(phase) for phase in get_args(Phase)}
    assert caps["serving"] == caps["draining"] == caps["training"] == SERVES.stall_seconds
    assert caps["loading"] == SERVES.setup_stall_seconds


# -- checkpoints that cannot be loaded ---------------------------------------------------------


def unloaded(step: int) -> Event:
    return ended(Cause.LOAD_FAILED, step, None)


def rejected(step: int) -> Event:
    return event("checkpoint_rejected", checkpoint_step=step, reason="cannot be loaded")


@pytest.mark.parametrize(
    ("events", "failed_loads"),
    [
        ([unloaded(20)], 1),
        ([started(20), unloaded(20)] * 2, 2),
        # a storage fault of one node, a crash after loading: neither is about the checkpoint
        ([ended(Cause.STORAGE, 20, None), ended(Cause.CRASH, 20, None), unloaded(20)], 1),
        ([unloaded(30), rejected(30), unloaded(20)], 1),
        ([unloaded(20), event("control", action="resume"), unloaded(20)], 1),
        ([unloaded(20), unloaded(20), rejected(20), unloaded(20)], 1),
        ([unloaded(20), CRASH], 0),
    ],
)
def test_failures_to_load_one_checkpoint(events: list[Event], failed_loads: int) -> None:
    assert history(events).failed_loads == failed_loads


def test_a_checkpoint_that_is_given_up() -> None:
    events = [started(20), ended(Cause.LOAD_FAILED, 20, 20), rejected(20), started(10)]
    saved_again = history([*events, ended(Cause.CRASH, 10, 20)])
    assert saved_again.failures_without_progress == 0, "saving it again is progress"
    assert pending_rejections(events[:3]) == {20: "cannot be loaded"}
    assert pending_rejections(events) == {}
    assert (loaded_instead(events), pinned_steps(events)) == (10, (10,)), "known to load"
    assert pinned_steps([*events, event("fresh_start_accepted")]) == ()
