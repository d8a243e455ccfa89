"""Scenarios for the tests of the simulation."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from published_failures import first_order_ettr

from hpctrain.judge import launch_history
from hpctrain.judge.causes import Cause
from hpctrain.plan.forecast.intervals import daly_seconds
from hpctrain.plan.forecast.predict import Attempt, expected
from hpctrain.records.ledger import Event, EventKind
from hpctrain.records.supervise_config import SuperviseConfig
from hpctrain.simulate.monte_carlo import (
    Outcome,
    auto_interval_seconds,
    choose,
    poisson_spares,
    simulate,
)
from hpctrain.simulate.scenario import LLAMA3, MIXES, Scenario
from hpctrain.simulate.simulated_run import (
    NO_END,
    Cycle,
    HistoryCounter,
    RunOutcome,
    SimulatedRun,
    Stretch,
)
from hpctrain.telemetry.timeline import Category


def settings(**changes: Any) -> SuperviseConfig:
    given: dict[str, Any] = dict(
        run_id="simulated",
        target_step=1,
        continuation="requeue",
        failures_without_progress=3,
        stall_seconds=600.0,
        setup_stall_seconds=1800.0,
        kill_wait_seconds=30.0,
        verify="auto",
        exclude_nodes="act",
    )
    return SuperviseConfig.model_validate({**given, **changes})


def scenario(**changes: Any) -> Scenario:
    """128 nodes, 20 days, a crash in 28.8 h that costs nothing but time; saves of 60 s."""
    given: dict[str, Any] = dict(
        nodes=128,
        work_seconds=20 * 86400.0,
        step_seconds=10.0,
        interval_seconds=3600.0,
        save_stall_seconds=60.0,
        failures_per_node_day=6.5e-3,
        mix="crashes",
        detect_seconds=0.0,
        relaunch_seconds=0.0,
        restart_seconds=420.0,
        supervise=settings(failures_without_progress=1000),
    )
    return Scenario.model_validate({**given, **changes})


# -- Simulated runs: against closed forms, against slow counting, and what the policy does in t


DAY = 86400


def one(seed: int = 1, **changes: Any) -> RunOutcome:
    return SimulatedRun(scenario(**changes), random.Random(seed)).run()


# -- against what is known ---------------------------------------------------------------------


def test_without_failures_a_run_takes_its_work_its_start_and_its_saves() -> None:
    run = one(failures_per_node_day=0.0, work_seconds=7200.0)
    assert run.seconds == {
        "queueing": 0,
        "starting": 420,
        "productive": 7200,
        "saving": 120,
        "redone": 0,
    }
    assert run.requeues == 0 and run.failures == {} and run.stopped is None


# Nodes, interval, stall, restart: where failures within one interval are rare.
KOKOLIS = [
    (64, 3600.0, 60.0, 420.0),
    (128, 3600.0, 60.0, 600.0),
    (128, 1200.0, 5.0, 600.0),
    (512, 900.0, 10.0, 300.0),
    (2048, 300.0, 1.0, 120.0),
]


@pytest.mark.parametrize(
    ("nodes", "interval", "stall", "restart"),
    [*KOKOLIS[:2], *(pytest.param(*row, marks=pytest.mark.variant) for row in KOKOLIS[2:])],
)
def test_agrees_with_the_ratio_of_kokolis(
    nodes: int, interval: float, stall: float, restart: float
) -> None:
    """Within 1 %, and the closed form without the approximation within the simulation's error.

    The cost function is Daly's (2006): tau / (M e^(R/M) (e^((tau + delta)/M) - 1)).
    """
    played = scenario(
        nodes=nodes,
        interval_seconds=interval,
        save_stall_seconds=stall,
        restart_seconds=restart,
        work_seconds=40 * DAY,
    )
    outcome = simulate(played, 200, seed=nodes)
    ettr, mttf = outcome.ettr, played.mttf_seconds
    first_order = first_order_ettr(1 / mttf, restart, interval, stall)
    assert ettr.mean == pytest.approx(first_order, rel=0.01)
    assert ettr.standard_error < 0.002
    growth = math.expm1((interval + stall) / mttf) * math.exp(restart / mttf)
    assert abs(ettr.mean - interval / (mttf * growth)) < 4 * ettr.standard_error + 1e-3
    failures = 40 * DAY / ettr.mean / mttf
    assert outcome.failures == pytest.approx(failures, rel=0.03)


@pytest.mark.parametrize("warned", [True, False])
def test_agrees_with_the_exact_means_with_limits_preemptions_and_saves_beside(
    warned: bool,
) -> None:
    """The forecast's own means over attempts, which know nothing of this simulation."""
    given = scenario(
        nodes=256,
        interval_seconds=1800.0,
        save_stall_seconds=20.0,
        save_write_seconds=300.0,
        walltime_seconds=DAY / 2,
        preemptions_per_day=1.5,
        warned=warned,
        mix="nodes",
        work_seconds=30 * DAY,
        lost_node_seconds=0.0,
        requeue_delay_seconds=0.0,
    )
    mean = expected(
        Attempt(
            work_seconds=1800.0,
            stall_seconds=20.0,
            delay_seconds=300.0,
            start_seconds=420.0,
            last_save_seconds=320.0,
            limit_seconds=DAY / 2,
            failures_per_second=1 / given.mttf_seconds,
            preemptions_per_second=1.5 / DAY,
            warned=warned,
        )
    )
    ratio = mean.saved_seconds / mean.occupied_seconds
    ettr = simulate(given, 200, seed=5).ettr
    assert ettr.mean == pytest.approx(ratio, abs=4 * ettr.standard_error + 1e-3)


@pytest.mark.variant("test_agrees_with_the_ratio_of_kokolis")
def test_the_best_interval_is_flat_around_that_of_daly() -> None:
    """At 2048 nodes: no other interval is better than Daly's by more than chance, and three times
    shorter or longer is worse by more than that."""
    base = scenario(
        nodes=2048, restart_seconds=300.0, save_stall_seconds=20.0, work_seconds=20 * DAY
    )
    best = daly_seconds(20.0, base.mttf_seconds)
    assert auto_interval_seconds(base) == pytest.approx(best, abs=10)
    factors = (1 / 3, 2 / 3, 1.0, 1.5, 3.0)
    outcomes = [
        simulate(base.model_copy(update={"interval_seconds": best * f}), 100, seed=3)
        for f in factors
    ]
    daly = outcomes[2].ettr
    for outcome in outcomes:
        assert outcome.ettr.mean < daly.mean + 3 * math.hypot(
            outcome.ettr.standard_error, daly.standard_error
        )
    for far in (outcomes[0], outcomes[-1]):
        assert far.ettr.mean < daly.mean - 5 * daly.standard_error


@pytest.mark.parametrize("seed", range(60))
def test_a_stretch_is_what_stepping_through_it_gives(seed: int) -> None:
    dice = random.Random(seed)
    cycle = Cycle(
        work=dice.choice([1, 3, 10]),
        stall=dice.choice([0, 1, 2]),
        delay=dice.choice([0, 4]),
        last=5,
    )
    left = dice.randrange(1, 40)
    whole = cycle.to_the_end(left)
    seconds = dice.randrange(0, int(whole))
    done = stalled = clock = since_save = 0
    durable_at: list[tuple[int, int]] = []
    while clock < seconds:
        if done == left:
            stalled, clock = stalled + 1, clock + 1
        elif since_save == cycle.work:
            for _ in range(int(cycle.stall)):
                if clock < seconds:
                    stalled, clock = stalled + 1, clock + 1
            since_save = 0
        else:
            done, clock, since_save = done + 1, clock + 1, since_save + 1
    begin, saved = 0, 0
    while saved + cycle.work < left:
        saved += int(cycle.work)
        begin += int(cycle.work + cycle.stall)
        durable_at.append((begin + int(cycle.delay), saved))
    kept = max((work for at, work in durable_at if at <= seconds), default=0)
    assert cycle.cut_off(seconds, left) == Stretch(done, kept, stalled)
    assert cycle.finished(left).done == left == cycle.finished(left).kept


# -- the same history as in the ledger ---------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_memory_counts_what_the_ledger_would_say(seed: int) -> None:
    dice = random.Random(seed)
    memory, events, clock, best = HistoryCounter(1800.0), [], 0.0, 0
    causes = [Cause.CRASH, Cause.HANG, Cause.TIME_LIMIT, Cause.PREEMPTED, Cause.GPU_ERROR]
    for epoch in range(1, 25):
        resumed = best
        events.append(
            Event(event=EventKind.LAUNCH_STARTED, time=clock, epoch=epoch, resume_step=resumed)
        )
        clock += dice.choice([10.0, 600.0, 2000.0])
        best += dice.choice([0, 0, 0, 5])
        cause = dice.choice(causes)
        events.append(
            Event(
                event=EventKind.LAUNCH_ENDED,
                time=clock,
                epoch=epoch,
                cause=cause,
                resume_step=resumed,
                checkpoint_step=best,
            )
        )
        memory.ended(cause, clock, best, resumed)
        assert memory.history() == launch_history.history(events, 1800.0)


# -- what the policy does ----------------------------------------------------------------------


def test_a_crash_is_started_again_on_the_same_nodes() -> None:
    run = one(relaunch_seconds=7.0)
    assert sum(run.failures.values()) > 10 and run.requeues == 0
    # 7 s and at least the policy's first delay of 1 s
    least = 8 * sum(run.failures.values())
    assert least <= run.seconds[Category.RESTARTING] < least + 40


def test_without_spares_each_lost_node_is_a_requeue_and_a_spare_saves_one() -> None:
    def requeues(spares: int) -> float:
        given = scenario(mix="nodes", spare_nodes=spares, lost_node_seconds=0.0)
        outcome = simulate(given, 60, seed=2)
        return outcome.requeues / outcome.failures

    # A failure of the first node, one of 128, always takes the job.
    assert requeues(0) == pytest.approx(1.0, abs=0.001)
    assert requeues(1) == pytest.approx(0.5, abs=0.04)
    assert requeues(4) == pytest.approx(0.2, abs=0.04)


def test_spares_wait_less_in_the_queue_and_cost_gpu_hours() -> None:
    def played(spares: int) -> Outcome:
        given = scenario(mix="nodes", spare_nodes=spares, queue_wait_seconds=7200.0)
        return simulate(given, 40, seed=2)

    without, some = played(0), played(3)
    assert some.seconds["queueing"] < 0.5 * without.seconds["queueing"]
    assert some.ettr.mean > without.ettr.mean
    assert some.gpu_hours.mean > without.gpu_hours.mean


def test_nodes_that_wait_interrupt_nothing() -> None:
    few, many = (simulate(scenario(spare_nodes=n), 30, seed=6).failures for n in (0, 128))
    assert many == pytest.approx(few, rel=0.02)


def test_nodes_that_wait_fail_too() -> None:
    trial = SimulatedRun(
        scenario(nodes=4, spare_nodes=400, mix="nodes", failures_per_node_day=1.0), random.Random(1)
    )
    trial._allocate()
    trial._lose_spares(DAY)
    assert trial.healthy == pytest.approx(4 + 400 / math.e, abs=30)
    assert len(trial.repairs) == 404 - trial.healthy


def test_spares_that_have_failed_cannot_stand_in() -> None:
    """Of 4 nodes that train one is the supervisor's. With 40 spare nodes that last for ever a job
    is requeued for the loss of that one only, a quarter of all; with mortal ones sooner."""
    given = scenario(nodes=4, spare_nodes=2, mix="nodes", failures_per_node_day=0.05,
                     work_seconds=1000 * DAY)  # fmt: skip
    outcome = simulate(given, 20, seed=3)
    # Without the failures of spare nodes: 1 / (1 + 3/4 + 9/16) = 0.43 requeues for each failure.
    assert outcome.requeues / outcome.failures > 0.47


def test_a_full_cluster_waits_for_repairs() -> None:
    full = simulate(scenario(mix="nodes", cluster_nodes=128, repair_seconds=5000.0), 20, seed=1)
    roomy = simulate(scenario(mix="nodes", cluster_nodes=140, repair_seconds=5000.0), 20, seed=1)
    assert full.seconds["queueing"] / full.requeues == pytest.approx(5000, rel=0.001)
    assert roomy.seconds["queueing"] / roomy.requeues == pytest.approx(121, rel=0.001)


def test_a_budget_that_is_too_small_ends_runs_and_says_so() -> None:
    tight = dict(nodes=4096, restart_seconds=1800.0)
    stopped = simulate(
        scenario(**tight, supervise=settings(failures_without_progress=2)), 50, seed=1
    )
    assert stopped.stopped > 0.5
    assert "without a new checkpoint" in stopped.stop_reasons[0]
    patient = simulate(
        scenario(**tight, supervise=settings(failures_without_progress=50)), 20, seed=1
    )
    assert patient.stopped == 0 and patient.stop_reasons == ()


def test_a_site_that_does_not_requeue_ends_at_the_first_lost_node() -> None:
    given = scenario(mix="nodes", supervise=settings(continuation="none"))
    outcome = simulate(given, 20, seed=1)
    assert outcome.stopped == 1 and "node failure" in outcome.stop_reasons[0]
    assert outcome.failures == 1


def test_a_run_that_cannot_make_progress_is_given_up() -> None:
    hopeless = scenario(nodes=4096, interval_seconds=40000.0, restart_seconds=9000.0,
                        work_seconds=3 * DAY, supervise=settings(failures_without_progress=10**9,
                        storm_failures=10**9))  # fmt: skip
    assert simulate(hopeless, 2, seed=1).stop_reasons == (NO_END,)


def test_a_broken_node_that_nobody_finds_fails_again() -> None:
    def failures(found: float, exclude: str) -> Outcome:
        supervise = settings(failures_without_progress=100, exclude_nodes=exclude)
        given = scenario(mix="llama3", bad_nodes_found=found, supervise=supervise, spare_nodes=4)
        return simulate(given, 20, seed=1)

    found, avoided, missed = failures(1, "observe"), failures(0, "act"), failures(0, "observe")
    assert found.stopped == 0
    assert avoided.failures == pytest.approx(found.failures, rel=0.1)
    assert missed.failures > 2 * found.failures


def test_what_says_nothing_takes_the_stall_limit() -> None:
    quick = simulate(scenario(mix="byterobust", stall_seconds=10.0, detect_seconds=3.0), 40, seed=1)
    slow = simulate(
        scenario(mix="byterobust", stall_seconds=1010.0, detect_seconds=3.0), 40, seed=1
    )
    hangs = (slow.seconds["detecting"] - quick.seconds["detecting"]) / 1000
    assert hangs / slow.failures == pytest.approx(0.099, abs=0.03)


def test_a_save_waits_for_the_one_before() -> None:
    """20 min of work between saves, 30 min to write one: each stall is 10 min longer."""
    run = one(failures_per_node_day=0.0, work_seconds=6000.0, interval_seconds=1200.0,
              save_write_seconds=1800.0)  # fmt: skip
    assert run.seconds[Category.SAVING] == 4 * (60 + 600) + 60 + 1800


def test_the_standard_error_is_that_of_the_mean() -> None:
    few, many = simulate(scenario(), 25, seed=1).ettr, simulate(scenario(), 400, seed=1).ettr
    assert few.standard_error / many.standard_error == pytest.approx(4, rel=0.35)


def test_time_limits_cut_a_run_into_slices_and_lose_nothing() -> None:
    run = one(failures_per_node_day=0.0, walltime_seconds=DAY, work_seconds=5 * DAY)
    assert run.requeues == 5 and run.seconds[Category.REDONE] == 0
    assert run.seconds[Category.QUEUEING] == 5 * 121
    # A day less start and last save: 23 hours between saves, and 29 minutes of the next.
    slice_seconds = 23 * 3600 + (DAY - 420 - 60 - 23 * 3660)
    longer = one(
        failures_per_node_day=0.0, walltime_seconds=DAY, work_seconds=5 * slice_seconds + 1
    )
    assert longer.requeues == 5


def test_what_is_lost_is_put_to_a_cause() -> None:
    run = one(seed=4, mix="llama3", spare_nodes=2, queue_wait_seconds=600.0)
    wasted = (Category.REDONE, Category.DETECTING, Category.RESTARTING, Category.DOWN)
    at_least = sum(run.seconds.get(name, 0.0) for name in wasted)
    everything = run.wall_seconds - run.seconds[Category.PRODUCTIVE] - run.seconds[Category.SAVING]
    assert sum(run.lost_seconds.values()) == pytest.approx(everything - 420)
    assert at_least < everything


# -- many runs and the choice ------------------------------------------------------------------


def test_the_same_seed_gives_the_same_numbers() -> None:
    given = scenario(mix="llama3", spare_nodes=2, work_seconds=5 * DAY)
    assert simulate(given, 8, seed=3) == simulate(given, 8, seed=3)
    assert simulate(given, 8, seed=3) != simulate(given, 8, seed=4)


def test_quantiles_enclose_the_mean() -> None:
    outcome = simulate(scenario(), 100, seed=1)
    for spread in (outcome.ettr, outcome.days, outcome.gpu_hours):
        assert spread.p5 < spread.mean < spread.p95
        assert 0 < spread.standard_error < spread.p95 - spread.p5


def test_gpu_hours_count_spares_but_not_the_queue() -> None:
    given = scenario(failures_per_node_day=0.0, spare_nodes=2, work_seconds=7200.0,
                     first_wait_seconds=9999.0)  # fmt: skip
    outcome = simulate(given, 1, seed=1)
    assert outcome.gpu_hours.mean == pytest.approx(130 * 8 * (7200 + 420 + 120) / 3600)
    assert outcome.ettr.mean == pytest.approx(7200 / (7740 + 9999))
    assert outcome.ettr_without_queue.mean == pytest.approx(7200 / 7740)


def test_the_choice_weighs_spares_against_the_queue() -> None:
    given = scenario(mix="nodes", queue_wait_seconds=6 * 3600.0, work_seconds=10 * DAY)
    told = choose(given, (0, 1, 4), (1800.0, 3600.0), 40, 1, "time")
    assert len(told.outcomes) == 6
    assert told.outcomes[told.best].spare_nodes == 4
    cheap = choose(given, (0, 4), (3600.0,), 40, 1, "gpu-hours")
    assert cheap.outcomes[cheap.best].spare_nodes == 0
    assert "GPU-hours" in cheap.reasons[0] and "shortest time" in told.reasons[0]


def test_combinations_that_stop_are_no_choice() -> None:
    supervise = settings(failures_without_progress=2)
    given = scenario(
        nodes=512,
        restart_seconds=60.0,
        supervise=supervise,
        save_stall_seconds=1.0,
        work_seconds=5 * DAY,
    )
    told = choose(given, (0,), (60.0, 7200.0), 30, 1)
    assert told.best == 0
    assert told.outcomes[1].stopped > told.outcomes[0].stopped + 0.05
    assert any("stop more often" in reason for reason in told.reasons)


def test_the_quantile_of_poisson() -> None:
    """128 nodes at 6.5e-3 in 2 days: mean 1.66, and 4 spare nodes."""
    given = scenario(mix="nodes")
    assert poisson_spares(given, 2 * DAY) == 4
    assert poisson_spares(scenario(mix="crashes"), 2 * DAY) == 0
    assert poisson_spares(given, 2000 * DAY) == pytest.approx(1664 + 1.645 * 40.8, abs=3)


def test_the_table_of_llama_adds_up() -> None:
    assert LLAMA3.total_weight == 419
    assert LLAMA3.share_taking_nodes == pytest.approx(321 / 419, abs=0.01)
    assert all(mix.source for mix in MIXES.values())


def test_a_month_of_a_large_run() -> None:
    """About 420 failures in each run."""
    given = Scenario.model_validate({
        **scenario(nodes=2048, failures_per_node_day=419 / (54 * 2048), mix="llama3",
                   spare_nodes=16, interval_seconds=900.0).model_dump(),
        "work_seconds": 50.0 * DAY,
    })  # fmt: skip
    assert simulate(given, 20, seed=1).failures > 350


def test_what_was_played_is_given_again_and_nothing_else_is() -> None:
    first = simulate(scenario(), 3, seed=1)
    assert simulate(scenario(), 3, seed=1) is first
    others = [
        simulate(scenario(), 4, seed=1),
        simulate(scenario(), 3, seed=2),
        simulate(scenario(relaunch_seconds=7.0), 3, seed=1),
        simulate(scenario(supervise=settings(budgets={"crash": 0})), 3, seed=1),
    ]
    assert all(other is not first for other in others)


# -- The doubt about the step time is in the quantiles of days and GPU-hours, not in their mean


def days(deviation: float, **fields: float) -> tuple[float, float, float]:
    made: Scenario = scenario(step_deviation=deviation, **fields)
    found = simulate(made, 200, 1)
    hours = found.gpu_hours
    assert hours.p95 / hours.mean == pytest.approx(found.days.p95 / found.days.mean, rel=0.02)
    return found.days.p5, found.days.mean, found.days.p95


def test_a_doubtful_step_widens_the_range_and_keeps_the_mean() -> None:
    sure, doubtful = days(0.0), days(0.15)
    assert doubtful[1] == sure[1]
    assert doubtful[0] < sure[0]
    assert doubtful[2] > sure[2]


def test_the_first_start_takes_as_long_however_slow_the_steps_are() -> None:
    fields = {"work_seconds": 60.0, "restart_seconds": 600.0, "failures_per_node_day": 0.0}
    low, mean, high = days(0.5, **fields)
    assert low * 86400 > 600
    assert high * 86400 < 600 + 2.5 * (mean * 86400 - 600)


def test_without_failures_the_range_is_that_of_the_step() -> None:
    low, mean, high = days(0.2, failures_per_node_day=0.0)
    assert high / mean == pytest.approx(math.exp(1.645 * 0.2), rel=0.03)
    assert low / mean == pytest.approx(math.exp(-1.645 * 0.2), rel=0.03)
