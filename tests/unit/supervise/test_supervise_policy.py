"""What is done about each cause, for each history, situation and site."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from supervise_facts import config

from hpctrain.judge.causes import FAILURE_CAUSES, FINAL_CAUSES, SCHEDULER_CAUSES, Cause
from hpctrain.judge.documents import ActionKind, History, Situation, Verdict
from hpctrain.judge.policy import RETRIES, budget_of, decide
from hpctrain.records.supervise_config import SuperviseConfig

HERE = Situation()
GONE = Situation(keeps_nodes=False)
NUMERICS = {Cause.DIVERGED, Cause.SUSPECT_NUMERICS}
SITES = ("requeue", "chain", "singleton", "array", "none")


def site(continuation: str = "requeue", **changes: object) -> SuperviseConfig:
    return config().model_copy(update={"continuation": continuation, **changes})


def past(cause: Cause, count: int, **changes: object) -> History:
    """`count` launches in a row that ended so without progress; the run had made some before."""
    failures = count if cause in FAILURE_CAUSES else 0
    limits = count if cause is Cause.TIME_LIMIT else 0
    return replace(
        History(failures, limits, ((str(cause), count),), ever_progressed=True),
        **changes,  # type: ignore[arg-type]
    )


def first(cause: Cause, situation: Situation = HERE, settings: SuperviseConfig | None = None):  # type: ignore[no-untyped-def]
    return decide(Verdict(cause, "because"), past(cause, 1), situation, settings or site())


@pytest.mark.parametrize(
    ("cause", "kind", "exit_code"),
    [
        (Cause.DONE, ActionKind.FINISH, 0),
        (Cause.SUPERSEDED, ActionKind.LEAVE, 0),
        (Cause.YIELDED, ActionKind.STOP, 0),
        (Cause.CANCELLED, ActionKind.STOP, 1),
        (Cause.DEADLINE, ActionKind.STOP, 1),
        (Cause.CONFIG_ERROR, ActionKind.STOP, 1),
        (Cause.USER_ERROR, ActionKind.STOP, 1),
        (Cause.BAD_CHECKPOINT, ActionKind.STOP, 1),
        (Cause.DISK_FULL, ActionKind.STOP, 1),
        (Cause.PREEMPTED, ActionKind.REQUEUE, 0),
        (Cause.TIME_LIMIT, ActionKind.REQUEUE, 0),
        (Cause.REQUEUED, ActionKind.REQUEUE, 0),
        (Cause.CONTROLLER_AWAY, ActionKind.REQUEUE, 0),
        *((cause, ActionKind.RELAUNCH, 0) for cause in sorted(FAILURE_CAUSES)),
    ],
)
def test_the_first_time(cause: Cause, kind: ActionKind, exit_code: int) -> None:
    action = first(cause)
    assert (action.kind, action.exit_code) == (kind, exit_code)


@pytest.mark.parametrize("cause", sorted(FAILURE_CAUSES))
def test_without_the_nodes_the_next_attempt_goes_on(cause: Cause) -> None:
    assert first(cause, GONE).kind is ActionKind.REQUEUE
    for continuation in ("chain", "singleton", "array"):
        action = first(cause, GONE, site(continuation))
        assert (action.kind, action.exit_code) == (ActionKind.LEAVE, 0)


def test_nothing_is_launched_again_with_an_allocation_that_is_broken() -> None:
    verdict = Verdict(Cause.LAUNCH_FAILURE, "no step", broken_allocation=True)
    kinds = [
        decide(verdict, past(Cause.LAUNCH_FAILURE, count), HERE, site()).kind for count in (1, 2, 3)
    ]
    assert kinds == [ActionKind.REQUEUE, ActionKind.REQUEUE, ActionKind.STOP]


@pytest.mark.parametrize("cause", sorted(SCHEDULER_CAUSES))
def test_how_each_kind_of_site_goes_on(cause: Cause) -> None:
    queued = Verdict(cause, "because", already_requeued=True)
    kinds = {one: first(cause, HERE, site(one)).kind for one in SITES}
    assert kinds == {
        "requeue": ActionKind.REQUEUE,
        "chain": ActionKind.LEAVE,
        "singleton": ActionKind.LEAVE,
        "array": ActionKind.LEAVE,
        "none": ActionKind.STOP,
    }
    for one in SITES:
        assert decide(queued, past(cause, 1), HERE, site(one)).kind is ActionKind.LEAVE
    stopped = first(cause, HERE, site("none"))
    assert stopped.exit_code == 1
    assert "hpctrain resume" in stopped.reason


@pytest.mark.parametrize("cause", sorted(FAILURE_CAUSES - NUMERICS))
def test_each_cause_has_a_budget_of_its_own(cause: Cause) -> None:
    """One retry more than the budget stops, with the count and the reason."""
    roomy = site(failures_without_progress=3)
    budget = budget_of(cause, roomy)
    assert budget is not None
    verdict = Verdict(cause, "rank 3 failed")
    kinds = [decide(verdict, past(cause, n), HERE, roomy).kind for n in range(1, budget + 2)]
    assert kinds == [ActionKind.RELAUNCH] * budget + [ActionKind.STOP]
    stop = decide(verdict, past(cause, budget + 1), HERE, roomy)
    assert stop.exit_code == 1
    assert "rank 3 failed" in stop.reason and "without a new checkpoint" in stop.reason
    other = Cause.CRASH if cause is not Cause.CRASH else Cause.HANG
    assert decide(verdict, past(other, 9), HERE, roomy).kind is ActionKind.RELAUNCH


def test_budgets_by_default_by_number_and_by_name() -> None:
    assert budget_of(Cause.CRASH, site()) == 2
    assert budget_of(Cause.CRASH, site(failures_without_progress=6)) == 5
    assert budget_of(Cause.NODE_FAILURE, site()) == RETRIES[Cause.NODE_FAILURE] == 5
    assert budget_of(Cause.CRASH, site(budgets={"crash": 7})) == 7
    assert budget_of(Cause.HANG, site(budgets={"crash": 7})) == 2
    assert budget_of(Cause.PREEMPTED, site()) is None
    assert all(budget_of(cause, site()) == 0 for cause in FINAL_CAUSES)
    never = site(budgets={"crash": 0})
    assert first(Cause.CRASH, HERE, never).kind is ActionKind.STOP


def test_ever_new_causes_are_stopped_too() -> None:
    verdict = Verdict(Cause.CRASH, "because")
    many = History(12, 0, (("crash", 1), ("hang", 11)), ever_progressed=True)
    assert decide(verdict, many, HERE, site()).kind is ActionKind.STOP
    assert decide(verdict, replace(many, failures_without_progress=11), HERE, site()).kind is (
        ActionKind.RELAUNCH
    )


def test_progress_protects_and_preemption_is_free() -> None:
    kinds = {
        decide(Verdict(Cause.CRASH, "x"), History(0, 0), HERE, site()).kind for _ in range(100)
    }
    assert kinds == {ActionKind.RELAUNCH}
    for count in (1, 10, 1000):
        action = decide(Verdict(Cause.PREEMPTED, "x"), past(Cause.PREEMPTED, count), HERE, site())
        assert action.kind is ActionKind.REQUEUE


def test_memory_that_has_never_sufficed() -> None:
    verdict = Verdict(Cause.GPU_OOM, "CUDA out of memory")
    never = replace(past(Cause.GPU_OOM, 1), ever_progressed=False)
    stop = decide(verdict, never, HERE, site())
    assert stop.kind is ActionKind.STOP and "hpctrain plan" in stop.reason
    assert first(Cause.GPU_OOM).kind is ActionKind.RELAUNCH


def test_delays_double_and_are_bounded() -> None:
    roomy = site(failures_without_progress=50, budgets={"storage": 50})
    for cause, begin in ((Cause.CRASH, 1), (Cause.STORAGE, 30)):
        verdict = Verdict(cause, "because")
        delays = [decide(verdict, past(cause, n), HERE, roomy).delay_seconds for n in range(1, 49)]
        assert delays[:3] == [begin, 2 * begin, 4 * begin]
        assert max(delays) == delays[-1] == 300


def test_time_limits_without_a_checkpoint_stop_with_advice() -> None:
    verdict = Verdict(Cause.TIME_LIMIT, "because")
    kinds = [decide(verdict, past(Cause.TIME_LIMIT, n), HERE, site()).kind for n in range(4)]
    assert kinds == [ActionKind.REQUEUE] * 3 + [ActionKind.STOP]
    stop = decide(verdict, past(Cause.TIME_LIMIT, 3), HERE, site())
    assert "resources.walltime" in stop.reason
    # a job that Slurm has requeued already has to be stopped as well
    queued = replace(verdict, already_requeued=True)
    assert decide(queued, past(Cause.TIME_LIMIT, 3), HERE, site()).kind is ActionKind.STOP


# -- nodes -------------------------------------------------------------------------------------

FOUR_AND_A_SPARE = Situation(allocated_nodes=5, healthy_nodes=4, needed_nodes=4, least_nodes=4)


def test_a_spare_takes_the_place_of_a_lost_node() -> None:
    action = first(Cause.NODE_FAILURE, FOUR_AND_A_SPARE)
    assert action.kind is ActionKind.RELAUNCH and "spare" in action.reason


def test_too_few_nodes_are_given_back() -> None:
    short = replace(FOUR_AND_A_SPARE, healthy_nodes=3)
    action = first(Cause.NODE_FAILURE, short)
    assert action.kind is ActionKind.REQUEUE
    assert "3 of 5 nodes answer, 4 are needed" in action.reason
    assert first(Cause.NODE_FAILURE, short, site("chain")).kind is ActionKind.LEAVE
    stop = first(Cause.NODE_FAILURE, short, site("none"))
    assert stop.kind is ActionKind.STOP and "`hpctrain resume` goes on" in stop.reason


def test_an_elastic_run_goes_on_with_fewer() -> None:
    elastic = replace(FOUR_AND_A_SPARE, healthy_nodes=3, least_nodes=2)
    action = first(Cause.NODE_FAILURE, elastic)
    assert action.kind is ActionKind.RELAUNCH and "on 3 of 4 nodes" in action.reason
    assert first(Cause.NODE_FAILURE, replace(elastic, healthy_nodes=1)).kind is ActionKind.REQUEUE


def test_avoiding_nodes_is_only_said_until_it_is_allowed() -> None:
    blamed = replace(
        FOUR_AND_A_SPARE,
        healthy_nodes=5,
        exclude=("n3",),
        exclude_here=("n3",),
        why_exclude="XID 79",
    )
    observed = first(Cause.CRASH, blamed)
    assert observed.exclude == ()
    assert observed.observed == ("would avoid n3 (XID 79)",)
    acted = first(Cause.CRASH, blamed, site(exclude_nodes="act"))
    assert (acted.kind, acted.exclude, acted.observed) == (ActionKind.RELAUNCH, ("n3",), ())
    requeued = first(Cause.PREEMPTED, blamed, site(exclude_nodes="act"))
    assert (requeued.kind, requeued.exclude) == (ActionKind.REQUEUE, ("n3",))


def test_a_node_that_is_unfit_for_the_run_is_left_whatever_the_spec_says() -> None:
    """It was shown that the run cannot work there, not only suspected."""
    lacking = Situation(
        allocated_nodes=2,
        healthy_nodes=1,
        needed_nodes=2,
        least_nodes=2,
        exclude=("n1", "n7"),
        why_exclude="failed a check",
        unfit=("n1",),
    )
    action = first(Cause.NODE_FAILURE, lacking)
    assert (action.kind, action.exclude) == (ActionKind.REQUEUE, ("n1",))
    assert action.observed == ("would avoid n7 (failed a check)",)
    assert "1 of 2 nodes are fit, 2 are needed" in action.reason
    acted = first(Cause.NODE_FAILURE, lacking, site(exclude_nodes="act"))
    assert (acted.exclude, acted.observed) == (("n1", "n7"), ())
    chained = first(Cause.NODE_FAILURE, lacking, site("chain"))
    assert (chained.kind, chained.exclude) == (ActionKind.LEAVE, ("n1",))
    spare = first(Cause.NODE_FAILURE, replace(lacking, allocated_nodes=3, healthy_nodes=2))
    assert spare.kind is ActionKind.RELAUNCH and "with a spare node" in spare.reason


def test_broken_hardware_without_a_spare_is_left_only_when_that_is_allowed() -> None:
    full = Situation(allocated_nodes=4, healthy_nodes=4, needed_nodes=4, least_nodes=4)
    full = replace(full, exclude=("n3",), exclude_here=("n3",))
    verdict = Verdict(Cause.GPU_ERROR, "XID 79", nodes=("n3",), hard=True)
    history = past(Cause.GPU_ERROR, 1)
    assert decide(verdict, history, full, site()).kind is ActionKind.RELAUNCH
    acted = decide(verdict, history, full, site(exclude_nodes="act"))
    assert (acted.kind, acted.exclude) == (ActionKind.REQUEUE, ("n3",))
    soft = decide(replace(verdict, hard=False), history, full, site(exclude_nodes="act"))
    assert soft.kind is ActionKind.RELAUNCH


def test_a_storm_gives_the_nodes_back_or_waits() -> None:
    stormy = replace(past(Cause.CRASH, 0), recent_failures=5)
    verdict = Verdict(Cause.CRASH, "because")
    action = decide(verdict, stormy, HERE, site())
    assert action.kind is ActionKind.REQUEUE and "5 failures within 30 min" in action.reason
    waits = [
        decide(verdict, replace(stormy, recent_failures=n), HERE, site("chain")).delay_seconds
        for n in (4, 5, 6, 7, 8, 50)
    ]
    assert waits == [1, 300, 600, 1200, 1800, 1800]
    calm = site(storm_failures=6)
    assert decide(verdict, stormy, HERE, calm).kind is ActionKind.RELAUNCH


# -- numerics ----------------------------------------------------------------------------------

NAN = Verdict(Cause.DIVERGED, "loss is NaN at step 33", nodes=("n0", "n1"), step=33)
BACK = Situation(good_checkpoints=(30, 20, 10), allocated_nodes=2, needed_nodes=2, least_nodes=2)


def anomalies(count: int) -> History:
    return replace(past(Cause.DIVERGED, count + 1), anomalies_at_step=count)


def rollback(**changes: object) -> SuperviseConfig:
    settings = config().rollback.model_copy(update={"act": True, "skip_steps": 3, **changes})
    return site(rollback=settings, cluster_nodes=8)


def test_the_first_nan_is_repeated_on_other_nodes_if_allowed() -> None:
    here = decide(NAN, anomalies(0), BACK, site(cluster_nodes=8))
    assert here.kind is ActionKind.RELAUNCH
    assert here.rollback_to is None
    assert here.observed == ("would repeat them without n0, n1",)
    other = decide(NAN, anomalies(0), BACK, site(cluster_nodes=8, exclude_nodes="act"))
    assert (other.kind, other.exclude) == (ActionKind.REQUEUE, ("n0", "n1"))
    spares = replace(BACK, allocated_nodes=4, healthy_nodes=4)
    spare = decide(NAN, anomalies(0), spares, site(cluster_nodes=8, exclude_nodes="act"))
    assert (spare.kind, spare.exclude) == (ActionKind.RELAUNCH, ("n0", "n1"))
    small = decide(NAN, anomalies(0), BACK, site(cluster_nodes=3, exclude_nodes="act"))
    assert (small.kind, small.exclude) == (ActionKind.RELAUNCH, ())


def test_a_nan_that_comes_again_is_the_run_s_own() -> None:
    stop = decide(NAN, anomalies(1), BACK, site())
    assert stop.kind is ActionKind.STOP
    assert stop.observed == ("would go back to step 30 and leave out 1 batches",)
    back = decide(NAN, anomalies(1), BACK, rollback(checkpoints=2))
    assert (back.kind, back.rollback_to, back.skip_steps) == (ActionKind.RELAUNCH, 20, 3)
    far = decide(NAN, anomalies(1), BACK, rollback(checkpoints=9))
    assert far.rollback_to == 10
    none = decide(NAN, anomalies(1), replace(BACK, good_checkpoints=()), rollback())
    assert none.rollback_to == 0
    assert decide(NAN, anomalies(2), BACK, rollback()).rollback_to == 30
    assert decide(NAN, anomalies(3), BACK, rollback()).kind is ActionKind.STOP


def test_without_a_list_that_can_be_extended_the_run_does_not_go_back() -> None:
    unreadable = replace(BACK, skip_list_problem="skips.json is not a list of skipped data")
    action = decide(NAN, anomalies(1), unreadable, rollback())
    assert (action.kind, action.exit_code, action.rollback_to) == (ActionKind.STOP, 1, None)
    assert "cannot go back" in action.reason and "restore the file" in action.reason


def test_results_that_a_repetition_did_not_confirm_are_repeated_elsewhere() -> None:
    suspect = replace(NAN, cause=Cause.SUSPECT_NUMERICS)
    action = decide(suspect, anomalies(0), BACK, site(cluster_nodes=8, exclude_nodes="act"))
    assert (action.kind, action.exclude) == (ActionKind.REQUEUE, ("n0", "n1"))


# -- everything --------------------------------------------------------------------------------


def test_every_cause_has_an_answer_and_unknown_loses_nothing() -> None:
    counts = (0, 1, 3, 10**6)
    flags = itertools.product(Cause, counts, SITES, (False, True), (HERE, GONE), (False, True))
    for cause, count, name, queued, situation, acting in flags:
        settings = site(name, exclude_nodes="act" if acting else "observe")
        verdict = Verdict(cause, "because", already_requeued=queued, nodes=("n0",))
        action = decide(verdict, past(cause, count), situation, settings)
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


@pytest.mark.parametrize("name", ["chain", "singleton", "array"])
def test_the_last_job_of_a_chain_does_not_leave_as_if_all_were_well(name: str) -> None:
    """Exit code 0 is COMPLETED for Slurm, and nobody gets a mail."""
    alone = replace(GONE, followed=False)
    action = first(Cause.TIME_LIMIT, alone, site(name))
    assert (action.kind, action.exit_code) == (ActionKind.LEAVE, 1)
    assert "no job of the" in action.reason and "hpctrain resume" in action.reason


@pytest.mark.parametrize(
    ("count", "restarts", "name", "kind"),
    [
        (5, 0, "requeue", ActionKind.RELAUNCH),
        (6, 0, "requeue", ActionKind.REQUEUE),
        (6, 4, "requeue", ActionKind.REQUEUE),
        (6, 5, "requeue", ActionKind.STOP),
        (6, 0, "chain", ActionKind.STOP),
        (6, 0, "none", ActionKind.STOP),
    ],
)
def test_a_directory_that_only_this_node_cannot_reach(
    count: int, restarts: int, name: str, kind: ActionKind
) -> None:
    """The ledger cannot count then; Slurm does."""
    away = replace(HERE, storage_away=True, restarts=restarts)
    verdict = Verdict(Cause.STORAGE, "the run directory is away")
    action = decide(verdict, past(Cause.STORAGE, count), away, site(name))
    assert action.kind is kind
    assert (action.exit_code == 0) is (kind is not ActionKind.STOP)
    stormy = past(Cause.STORAGE, 5, recent_failures=5)
    if name == "requeue":
        stopped = decide(verdict, stormy, away, site(name)).kind is ActionKind.STOP
        assert stopped is (restarts >= 5), "storms have no budget of their own"


def test_every_end_that_nobody_asked_for_fails_the_job() -> None:
    """Slurm says FAILED and sends its mail; 0 is for done, as asked, and what goes on."""
    flags = itertools.product(Cause, (0, 10**6), SITES, (HERE, GONE), (False, True))
    for cause, count, name, situation, followed in flags:
        action = decide(
            Verdict(cause, "because"),
            past(cause, count),
            replace(situation, followed=followed),
            site(name),
        )
        asked = cause is Cause.YIELDED
        if action.kind is ActionKind.STOP:
            assert (action.exit_code == 0) is asked, (cause, name)
        if action.kind is ActionKind.LEAVE and cause is not Cause.SUPERSEDED:
            assert (action.exit_code == 0) is followed, (cause, name)


def test_what_is_held_is_held_where_slurm_can() -> None:
    verdict = Verdict(Cause.YIELDED, "asked to hold by ada", hold=True)
    assert decide(verdict, past(Cause.YIELDED, 1), HERE, site()).kind is ActionKind.HOLD
    for name in ("chain", "singleton", "array", "none"):
        assert decide(verdict, past(Cause.YIELDED, 1), HERE, site(name)).kind is ActionKind.STOP


FOUR = Situation(allocated_nodes=4, healthy_nodes=4, needed_nodes=4, least_nodes=4)
FIVE = replace(FOUR, allocated_nodes=5, healthy_nodes=5)


@pytest.mark.parametrize(
    ("situation", "acting", "words"),
    [
        (FOUR, False, "on the same nodes"),
        (FOUR, True, "on the same nodes"),
        (
            replace(FOUR, exclude=("n3",), exclude_here=("n3",)),
            True,
            "on the same nodes",
        ),  # soft blame, no spare
        (FIVE, True, "on the same nodes"),
        (replace(FIVE, exclude=("n3",), exclude_here=("n3",)), True, "with a spare node"),
        (replace(FIVE, exclude=("n3",), exclude_here=("n3",)), False, "on the same nodes"),
        (replace(FIVE, healthy_nodes=4), False, "with a spare node"),
        (replace(FOUR, healthy_nodes=3, least_nodes=3), True, "on 3 of 4 nodes"),
    ],
)
def test_where_a_relaunch_happens(situation: Situation, acting: bool, words: str) -> None:
    settings = site(exclude_nodes="act" if acting else "observe")
    action = first(Cause.CRASH, situation, settings)
    assert action.kind is ActionKind.RELAUNCH
    assert f"start again {words} (" in action.reason


def test_broken_hardware_with_a_spare_stays() -> None:
    verdict = Verdict(Cause.GPU_ERROR, "XID 79", nodes=("n3",), hard=True)
    spare = replace(FIVE, exclude=("n3",), exclude_here=("n3",))
    settings = site(exclude_nodes="act")
    action = decide(verdict, past(Cause.GPU_ERROR, 1), spare, settings)
    assert (action.kind, action.exclude) == (ActionKind.RELAUNCH, ("n3",))


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "it had made progress"), (1, "failure 1 of 3"), (2, "failure 2 of 3")],
)
def test_a_relaunch_says_how_much_of_the_budget_is_left(count: int, words: str) -> None:
    action = decide(Verdict(Cause.CRASH, "x"), past(Cause.CRASH, count), HERE, site())
    assert words in action.reason


def test_a_stop_says_how_often_it_has_happened() -> None:
    stop = decide(Verdict(Cause.GPU_OOM, "x"), past(Cause.GPU_OOM, 2), HERE, site())
    assert "2 failed launches in a row (gpu oom)" in stop.reason
    none = site(budgets={"crash": 0})
    stop = decide(Verdict(Cause.CRASH, "x"), past(Cause.CRASH, 1), HERE, none)
    assert "1 launch (crash)" in stop.reason
    cancelled = decide(Verdict(Cause.CANCELLED, "x"), past(Cause.CANCELLED, 1), HERE, site())
    assert cancelled.reason == "cancelled runs stay cancelled"


def test_the_budgets_are_those_of_the_documents() -> None:
    assert {str(cause): retries for cause, retries in RETRIES.items()} == {
        "node_failure": 5,
        "prolog_failure": 5,
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


def test_a_reason_and_a_decision_are_joined_and_the_decision_alone_needs_no_reason() -> None:
    verdict = Verdict(Cause.CRASH, "rank 3 failed")
    assert verdict.followed_by("start again") == "rank 3 failed: start again"
    assert verdict.followed_by("start again", "; ") == "rank 3 failed; start again"
    assert verdict.preceded_by("3 in a row") == "3 in a row: rank 3 failed"
    without = replace(verdict, reason="")
    assert without.followed_by("start again", "; ") == without.preceded_by("start again")
