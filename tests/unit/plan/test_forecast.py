"""A forecast of a whole run: sums, sources, defaults, refusals, and directions."""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from typing import Any

import forecast_specimens as specimen
import pytest
from published_failures import (
    LLAMA3_FAILURES_PER_NODE_DAY,
    RSC2_FAILURES_PER_NODE_DAY,
    first_order_ettr,
)
from variants import varied

from hpctrain.base.errors import DoesNotFitError, InvalidInputError
from hpctrain.base.units import Duration
from hpctrain.plan.forecast.documents import Budget, Forecast, RunFacts
from hpctrain.plan.forecast.intervals import best_steps, daly_seconds, young_seconds
from hpctrain.plan.forecast.options import compare_spot
from hpctrain.plan.forecast.predict import Attempt, expected, forecast
from hpctrain.plan.forecast.rates import (
    RSC1_FAILURES_PER_NODE_DAY,
    SPOT_PREEMPTION_SECONDS,
    SPOT_WAIT_SECONDS,
    bytes_per_parameter,
)

PRICES = {"currency": "EUR", "on_demand": 2.5, "spot": 1.0}


def predicted(
    in_spec: dict[str, Any] | None = None,
    in_profile: dict[str, Any] | None = None,
    **in_facts: Any,
) -> Forecast:
    profile = specimen.profile(**(in_profile or {}))
    return forecast(specimen.spec(**(in_spec or {})), profile, specimen.facts(**in_facts))


def test_numbers_of_a_run_that_nothing_stops() -> None:
    found = predicted(in_profile={"node_mtbf": "10000000d", "prices": PRICES})
    assert (found.steps, found.tokens) == (50_000, 200_000_000_000)
    assert found.times.training_seconds == 500_000
    # 833.3 saves of 2 s + 1.4 TB / 800 GPUs / 10 GB/s, and the last one with its write at 100 GB/s
    stall = 2 + 1.4e12 / 800 / 10e9
    assert found.checkpoint.stall_seconds == pytest.approx(stall)
    assert found.checkpoint.last_save_seconds == pytest.approx(stall + 14)
    assert found.times.saving_seconds == pytest.approx(50_000 / 60 * stall + stall + 14, rel=1e-3)
    assert found.times.starting_seconds == pytest.approx(600, rel=1e-3)
    assert found.starts == pytest.approx(1, abs=1e-3) and found.slices == 1
    assert found.cost is not None and found.cost.currency == "EUR"
    assert found.gpu_hours == pytest.approx(800 * found.times.occupied_seconds / 3600)
    assert found.cost.amount == pytest.approx(found.gpu_hours * 2.5)


def test_waiting_is_not_paid() -> None:
    waiting = predicted(in_profile={"prices": PRICES}, walltime="1d", queue_seconds=7200)
    promptly = predicted(in_profile={"prices": PRICES}, walltime="1d")
    assert waiting.cost == promptly.cost
    assert waiting.times.waiting_seconds == pytest.approx(7200 * waiting.starts)
    assert waiting.ettr == promptly.ettr > waiting.ettr_with_queue
    assert waiting.days > promptly.days


@pytest.mark.parametrize(("hours", "slices"), [(24, 6), (48, 3), (24 * 30, 1)])
def test_slices_of_a_run_that_nothing_stops(hours: int, slices: int) -> None:
    found = predicted(in_profile={"node_mtbf": "10000000d"}, walltime=f"{hours}h")
    assert found.slices == slices
    assert found.starts == pytest.approx(slices, abs=0.01)
    assert found.times.starting_seconds == pytest.approx(600 * slices, rel=0.01)


def test_evaluations_cost_a_third_of_a_step_per_batch() -> None:
    found = predicted(in_spec={"evaluation": {"every_steps": 500, "batches": 6}})
    assert found.times.evaluation_seconds == pytest.approx(100 * 6 * 10 / 3)
    assert predicted().times.evaluation_seconds == 0


def test_an_interval_in_time_ends_with_its_step() -> None:
    every = {"every": "65s", "every_steps": None, "asynchronous": True}
    assert forecast_with(every).interval.steps == 7
    assert forecast_with({**every, "every_steps": 5}).interval.steps == 5
    assert forecast_with({**every, "every": "1s"}).interval.steps == 1


def forecast_with(checkpoint: dict[str, Any]) -> Forecast:
    changed = {key: value for key, value in checkpoint.items() if value is not None}
    spec = specimen.spec()
    spec = spec.model_copy(update={"checkpoint": type(spec.checkpoint).model_validate(changed)})
    return forecast(spec, specimen.profile(), specimen.facts())


def test_what_limits_a_write() -> None:
    assert predicted().checkpoint.write_limit == "file system scratch"
    one = predicted(nodes=1, gpus=8, parameters=10**9)
    assert one.checkpoint.write_seconds == pytest.approx(14e9 / 100e9)
    disks = specimen.profile().filesystems
    fast = disks[0].model_copy(update={"write_bandwidth": 10e12, "name": "burst"})
    profile = specimen.profile().model_copy(update={"filesystems": (*disks, fast)})
    found = forecast(specimen.spec(), profile, specimen.facts(filesystem="burst", nodes=2, gpus=16))
    assert found.checkpoint.write_limit == "network cards of 2 nodes"
    assert found.checkpoint.write_seconds == pytest.approx(1.4e12 / (2 * 8 * 25e9))
    with pytest.raises(InvalidInputError, match="no file system `tape`"):
        forecast(specimen.spec(), profile, specimen.facts(filesystem="tape"))


def test_precision_engine_and_facts_give_the_size() -> None:
    assert predicted().checkpoint.total_bytes == 1_400_000_000_000
    assert predicted({"precision": "fp32"}).checkpoint.total_bytes == 1_600_000_000_000
    fsdp = predicted({"engine": {"name": "fsdp"}})
    assert fsdp.checkpoint.total_bytes == 1_200_000_000_000
    assert predicted(checkpoint_bytes_per_parameter=6).checkpoint.total_bytes == 600_000_000_000


def test_what_the_profile_does_not_say_is_assumed_aloud() -> None:
    said = predicted(in_profile={"node_mtbf": "100d"})
    assert not [
        line for line in map(str, said.assumptions) if "node failures" in line or "restart" in line
    ]
    silent = predicted(in_profile={"node_mtbf": None})
    assert any("6.5 per 1000 node-days" in line for line in map(str, silent.assumptions))
    assert any("restart: 10 min" in line for line in map(str, silent.assumptions))
    assert silent.interruptions.failure_mtbf_seconds == pytest.approx(86400 / 6.5e-3 / 100)
    small = predicted(in_profile={"node_mtbf": None, "per_node": 4, "domain": 4})
    assert small.interruptions.failure_mtbf_seconds == pytest.approx(86400 / 3.25e-3 / 100)
    assert any("by GPUs per node" in line for line in map(str, small.assumptions))


def test_waits_that_nobody_knows_are_named() -> None:
    spot = {"grace": "5min", "preemption_mtbf": "6h"}
    lines = [str(note) for note in predicted(in_profile=spot).assumptions]
    assert "preemptions: replacement nodes are available immediately" in lines
    assert any(line.startswith("queue: none of the 3") for line in lines)
    told = predicted(in_profile=spot, preemption_wait_seconds=60.0, queue_seconds=60.0)
    assert not [note for note in told.assumptions if note.kind in ("preemptions", "queue")]


def test_preemptions_that_the_profile_does_not_know() -> None:
    found = predicted(in_profile={"grace": "0s"}, nodes=1, gpus=8, parameters=10**9)
    assert found.tariff == "spot"
    assert found.interruptions.preemption_mtbf_seconds == SPOT_PREEMPTION_SECONDS
    assert any("Can't Be Late" in line for line in map(str, found.assumptions))
    waited = found.preemptions * SPOT_WAIT_SECONDS
    assert found.times.waiting_seconds == pytest.approx(waited)


def test_partition_decides_about_preemptions_unless_told() -> None:
    quiet = predicted()
    assert quiet.interruptions.preemption_mtbf_seconds is None and quiet.preemptions == 0
    spot = {"grace": "5min", "preemption_mtbf": "6h"}
    assert predicted(in_profile=spot).preemptions > 0
    assert predicted(in_profile=spot, spot=False).preemptions == 0


def test_a_grace_time_that_lasts_for_a_save_loses_no_work() -> None:
    long = predicted(in_profile={"grace": "5min", "preemption_mtbf": "6h"})
    short = predicted(in_profile={"grace": "20s", "preemption_mtbf": "6h"})
    assert long.interruptions.warned and not short.interruptions.warned
    assert long.times.redone_seconds < short.times.redone_seconds
    assert not long.warnings and any("grace time" in line for line in short.warnings)


def test_a_restart_lasts_at_least_as_long_as_reading() -> None:
    found = predicted(in_profile={"restart": "1s"})
    assert found.interruptions.restart_seconds == pytest.approx(1.4e12 / 100e9)


def test_a_better_interval_is_proposed_with_what_it_saves() -> None:
    rare = predicted({"every_steps": 4000})
    better = predicted({"every_steps": rare.interval.best_steps})
    saved = rare.times.occupied_seconds - better.times.occupied_seconds
    assert rare.interval.best_saves_seconds == pytest.approx(saved) and saved > 3600
    assert any(f"every {rare.interval.best_steps} steps" in line for line in rare.warnings)
    assert not better.warnings and better.interval.best_saves_seconds == 0


def test_saves_that_overlap_are_warned_about_and_cost_time() -> None:
    found = predicted({"every_steps": 1})
    assert any("each save waits for the last" in line for line in found.warnings)
    # a cycle lasts as long as the write: 14 s, of which 10 s are a step
    assert found.times.saving_seconds > 50_000 * 3


def test_walltime_without_room_for_a_step_is_refused() -> None:
    with pytest.raises(DoesNotFitError, match=r"walltime 10 min is too short .* start-up 10 min"):
        predicted(walltime="10min")


def test_a_run_without_progress_is_refused() -> None:
    with pytest.raises(DoesNotFitError, match=r"2048 nodes are stopped every 42\.2 s on average"):
        predicted(in_profile={"node_mtbf": "1d"}, nodes=2048, gpus=16384)


def test_any_plan_gets_a_sound_forecast_or_a_refusal() -> None:
    dice, refused = random.Random(3), 0
    for _ in range(1500):
        nodes = dice.choice([1, 2, 16, 512, 4096, 20_000])
        in_facts = dict(
            nodes=nodes,
            gpus=8 * nodes,
            parameters=round(10 ** dice.uniform(6, 13)),
            step_seconds=10 ** dice.uniform(-2, 3),
            train_steps=round(10 ** dice.uniform(0, 6)),
            walltime=dice.choice([None, "30min", "12h", "30d"]),
            queue_seconds=dice.choice([0, 3600]),
        )
        in_profile = dict(
            node_mtbf=f"{10 ** dice.uniform(0, 6):.3f}d",
            grace=dice.choice([None, "30s", "10min"]),
            preemption_mtbf=f"{10 ** dice.uniform(-1, 4):.3f}h",
        )
        in_spec = dict(every_steps=dice.choice([1, 100, 10_000]), asynchronous=dice.random() < 0.5)
        try:
            found = predicted(in_spec, in_profile, **in_facts)
        except DoesNotFitError:
            refused += 1
            continue
        assert 0 < found.ettr_with_queue <= found.ettr <= 1
        assert all(value >= 0 for value in found.times.model_dump().values()), found
        assert found.starts >= 1 - 1e-6 and found.slices >= 1
        ends = found.failures + found.preemptions
        assert found.starts >= ends and found.starts <= ends + found.slices + 1e-6
        mtbf = found.interruptions.failure_mtbf_seconds
        # by Wald's identity; the end of the run makes it slightly more than that
        assert found.failures * mtbf <= found.times.occupied_seconds * (1 + 1e-9)
    assert 50 < refused < 1000


@pytest.mark.parametrize(
    "worse",
    [
        {"in_profile": {"node_mtbf": "30d"}},
        {"in_profile": {"restart": "20min"}},
        {"in_spec": {"asynchronous": False}},
        {"walltime": "6h"},
        {"parameters": 400_000_000_000},
    ],
    ids=lambda change: str(next(iter(change))),
)
def test_what_lowers_the_effective_time(worse: dict[str, Any]) -> None:
    assert predicted(**worse).ettr < predicted().ettr


# -- spot against on demand: a 7B model, 48 hours of training on eight A100 ---------------------

SEVEN_B = dict(
    step_seconds=40.0,
    gpus=8,
    nodes=1,
    parameters=6_738_415_616,
    tokens_per_step=524_288,
    train_steps=4320,
    walltime="1d",
)


def compared(preemption_mtbf: str, deadline: str | None = None, **prices: float) -> Any:
    profile = specimen.profile(
        preemption_mtbf=preemption_mtbf, grace="30s", prices={**PRICES, **prices}
    )
    budget = Budget(deadline=Duration.parse(deadline)) if deadline else None
    return compare_spot(specimen.spec(every_steps=15), profile, specimen.facts(**SEVEN_B), budget)


def test_spot_is_taken_where_it_is_cheaper() -> None:
    found = compared("6h")
    assert found.recommended == "spot" and "it saves" in found.reason
    assert found.spot.cost.amount < 0.55 * found.on_demand.cost.amount
    assert found.spot.preemptions == pytest.approx(8.6, abs=0.5)
    assert found.spot.days > found.on_demand.days > 2


def test_spot_is_not_taken_for_a_deadline_that_it_misses() -> None:
    assert compared("6h", deadline="60h").recommended == "spot"
    found = compared("6h", deadline="49.5h")
    assert found.recommended == "on demand" and "after the deadline" in found.reason
    assert "neither" in compared("6h", deadline="40h").reason


def test_spot_is_not_taken_where_preemptions_eat_the_discount() -> None:
    found = compared("3h", spot=2.4)
    assert found.recommended == "on demand" and "cost more than" in found.reason


def test_spot_without_progress_is_not_taken() -> None:
    found = compared("90s")
    assert found.spot is None and found.recommended == "on demand"
    assert "no progress" in found.reason


def test_break_even_is_where_both_cost_the_same() -> None:
    limit = compared("6h").break_even_preemption_seconds
    at_limit = compared(f"{limit:.3f}s")
    assert at_limit.spot.cost.amount == pytest.approx(at_limit.on_demand.cost.amount, rel=1e-4)
    assert compared("6h", spot=2.5).break_even_preemption_seconds is None


def test_no_comparison_without_two_prices() -> None:
    profile = specimen.profile(prices={"on_demand": 2.0})
    assert compare_spot(specimen.spec(), profile, specimen.facts()) is None
    assert compare_spot(specimen.spec(), specimen.profile(), specimen.facts()) is None


def test_assumptions_have_a_kind_and_are_written_as_text() -> None:
    result = predicted()
    assert "queue" in {note.kind for note in result.assumptions}
    written = result.model_dump(mode="json")["assumptions"]
    assert written == [f"{note.kind}: {note.text}" for note in result.assumptions]


# -- The models against figures that others have published --------------------------------------


DAY = 86400.0


@pytest.mark.parametrize(
    ("mtbf_minutes", "minutes"),
    # Daly 2006, captions of figures 3 to 5: a dump of 5 min, M = 24 h, 6 h and 15 min
    [(24 * 60, 117), (6 * 60, 57), (15, 9.1)],
)
def test_interval_of_daly(mtbf_minutes: float, minutes: float) -> None:
    found = daly_seconds(5 * 60, mtbf_minutes * 60) / 60
    assert found == pytest.approx(minutes, abs=0.5 if minutes > 10 else 0.05)


def test_a_dump_of_twice_the_mtbf_is_daly_s_limit() -> None:
    assert daly_seconds(200, 100) == 100
    assert daly_seconds(400, 100) == 100
    assert daly_seconds(199.999, 100) == pytest.approx(200 * (1 + 1 / 3 + 1 / 9) - 200, rel=1e-4)


def test_young_is_the_first_order_of_daly() -> None:
    assert young_seconds(60, 28.8 * 3600) == pytest.approx(58.8 * 60, rel=0.01)
    assert daly_seconds(1e-3, 1e6) == pytest.approx(young_seconds(1e-3, 1e6), rel=1e-4)


@pytest.mark.parametrize(("stall", "mtbf"), [(5, 3e5), (60, 1e5), (300, 2e4), (900, 5e3)])
def test_daly_s_interval_is_the_best(stall: float, mtbf: float) -> None:
    """No other interval gives a better exact ratio than Daly's, up to a thousandth."""

    def ratio(work: float) -> float:
        mean = expected(Attempt(work, stall, 0, 300, stall, math.inf, 1 / mtbf, 0, False))
        return mean.saved_seconds / mean.occupied_seconds

    best = max(ratio(stall * 1.05**power) for power in range(-40, 260))
    assert ratio(daly_seconds(stall, mtbf)) >= best * 0.999
    worse = ratio(daly_seconds(stall, mtbf) * 2), ratio(daly_seconds(stall, mtbf) / 2)
    assert max(worse) < best


def test_interval_in_whole_steps() -> None:
    """Daly's 117 min (as above) in steps of 10 min; never below what one write takes."""
    assert best_steps(300, 24 * 3600, floor=0, step=600) == 12
    assert best_steps(300, 24 * 3600, floor=8000, step=600) == 14
    assert best_steps(1e-6, 3600, floor=0, step=600) == 1


def test_time_to_solution_of_daly() -> None:
    """Daly 2006, complete cost function: T_w = M e^(R/M) (e^((tau + delta)/M) - 1) T_s / tau."""
    mtbf, restart, dump, work = 6 * 3600.0, 600.0, 300.0, 57 * 60.0
    mean = expected(Attempt(work, dump, 0, restart, dump, math.inf, 1 / mtbf, 0, False))
    daly = mtbf * math.exp(restart / mtbf) * math.expm1((work + dump) / mtbf) / work
    assert mean.occupied_seconds / mean.saved_seconds == pytest.approx(daly, rel=1e-12)


@pytest.mark.parametrize(
    ("gpus", "hours"),
    # Kokolis et al., arXiv 2410.21680: projected from the failure rate of RSC-1
    [(16_384, 1.8), (131_072, 0.23)],
)
def test_mean_time_to_failure_of_meta_s_cluster(gpus: int, hours: float) -> None:
    found = mtbf_hours(gpus // 8, RSC1_FAILURES_PER_NODE_DAY)
    assert found == pytest.approx(hours, rel=0.03)


def mtbf_hours(nodes: int, failures_per_node_day: float) -> float:
    profile = specimen.profile(node_mtbf=f"{1 / failures_per_node_day * 24:.4f}h")
    facts = specimen.facts(
        nodes=nodes, gpus=nodes * 8, parameters=1_000_000, step_seconds=1, train_steps=100
    )
    found = forecast(specimen.spec(every_steps=10), profile, facts)
    return found.interruptions.failure_mtbf_seconds / 3600


def exact_ettr(nodes: int, rate: float, restart: float, interval: float, stall: float) -> float:
    """Without a limit or preemptions; `rate` in failures per node and day."""
    per_second = nodes * rate / DAY
    mean = expected(Attempt(interval, stall, 0, restart, 0, math.inf, per_second, 0, False))
    return mean.saved_seconds / mean.occupied_seconds


def test_ettr_of_meta_s_largest_job() -> None:
    """arXiv 2410.21680: 16,000 GPUs of RSC-1; a save every 5 min that blocks nothing: 0.93."""
    formula = first_order_ettr(2000 * RSC1_FAILURES_PER_NODE_DAY / DAY, 300, 300, 1e-9)
    assert formula == pytest.approx(0.93, abs=0.005)
    assert exact_ettr(2000, RSC1_FAILURES_PER_NODE_DAY, 300, 300, 1e-9) == pytest.approx(
        0.93, abs=0.006
    )


def test_100_000_gpus_need_minutes() -> None:
    """arXiv 2410.21680: for 0.9 on 100,000 GPUs with the rate of RSC-2, interval and restart must
    be about 2 min; so 2 min reach it and 5 min do not."""
    assert exact_ettr(12_500, RSC2_FAILURES_PER_NODE_DAY, 120, 120, 1e-9) > 0.9
    assert exact_ettr(12_500, RSC2_FAILURES_PER_NODE_DAY, 300, 300, 1e-9) < 0.9


@pytest.mark.parametrize("nodes", [16, 128, 512])
def test_first_order_is_the_limit_of_the_exact_ratio(nodes: int) -> None:
    rate = RSC1_FAILURES_PER_NODE_DAY
    formula = first_order_ettr(nodes * rate / DAY, 600, 1800, 30)
    assert exact_ettr(nodes, rate, 600, 1800, 30) == pytest.approx(formula, rel=0.02)
    assert exact_ettr(nodes, rate, 600, 1800, 30) > formula - 1e-3 * nodes


def test_llama_3_trained_more_than_nine_tenths_of_the_time() -> None:
    """arXiv 2407.21783, section 3.3.4: 2048 nodes, 419 interruptions in 54 days, effective time
    above 90%. With asynchronous saves and the low end of Meta's restart times, 5 min."""
    profile = specimen.profile(node_mtbf=f"{1 / LLAMA3_FAILURES_PER_NODE_DAY:.3f}d", restart="5min")
    facts = specimen.facts(
        nodes=2048, gpus=16_384, parameters=405_000_000_000, step_seconds=10, train_steps=450_000
    )
    found = forecast(specimen.spec(every_steps=40), profile, facts)
    assert found.failures * 54 * DAY / found.times.occupied_seconds == pytest.approx(419, rel=0.01)
    assert 0.90 < found.ettr < 0.97


def test_size_of_bloom_s_checkpoint() -> None:
    """bigscience/bloom model card: 176,247,271,424 parameters, 2.3 TB with optimizer states and
    329 GB of bf16 weights; its GB are GiB (2 bytes per parameter are 328.3 GiB)."""
    parameters = 176_247_271_424
    assert 2 * parameters / 2**30 == pytest.approx(329, rel=0.005)
    assert bytes_per_parameter(specimen.spec()) * parameters / 2**40 == pytest.approx(2.3, rel=0.03)


# -- The closed forms against a simulation that knows nothing of them ---------------------------


REPEATS = 300


class Played:
    """One run, played: wall-clock seconds, what they went into, and how often what happened."""

    def __init__(self, forecast: Forecast, facts: RunFacts, work_per_step: float) -> None:
        self.stops, self.checkpoint = forecast.interruptions, forecast.checkpoint
        self.facts = facts
        self.work_left = facts.train_steps * work_per_step
        self.between_saves = forecast.interval.steps * work_per_step
        self.spent: Counter[str] = Counter()
        self.happened: Counter[str] = Counter()

    def run(self, dice: random.Random) -> None:
        while self.work_left > 1e-6:
            self.happened["start"] += 1
            self.spent["waiting"] += self.facts.queue_seconds
            self.attempt(dice)

    def attempt(self, dice: random.Random) -> None:
        failure = dice.expovariate(1 / self.stops.failure_mtbf_seconds)
        preemption = self.stops.preemption_mtbf_seconds
        warning = dice.expovariate(1 / preemption) if preemption else float("inf")
        limit = float(self.facts.walltime) if self.facts.walltime else float("inf")
        last_call = limit - self.checkpoint.last_save_seconds
        end = min(failure, warning)
        clock = self.spend("starting", 0.0, self.stops.restart_seconds, end)
        done, kept, written_at, in_flight = 0.0, 0.0, float("inf"), 0.0
        while clock < end and clock < last_call and done < self.work_left - 1e-9:
            part = min(self.between_saves, self.work_left - done, last_call - clock)
            after = self.spend("working", clock, part, end)
            done += after - clock
            clock = after
            if clock >= end or done >= self.work_left - 1e-9 or clock >= last_call:
                break
            if self.checkpoint.asynchronous:
                if in_flight:  # the save before: wait for it, it may be through already
                    if written_at > clock:
                        clock = self.spend("saving", clock, written_at - clock, end)
                    if clock >= end:
                        break
                    kept, in_flight = in_flight, 0.0
                stage = min(self.checkpoint.stall_seconds, max(0.0, last_call - clock))
                clock = self.spend("saving", clock, stage, end)
                if clock < end:
                    in_flight, written_at = done, clock + self.checkpoint.write_seconds
            else:
                stall = min(self.checkpoint.stall_seconds, max(0.0, last_call - clock))
                clock = self.spend("saving", clock, stall, end)
                if clock < end:
                    kept = done
        if in_flight and written_at <= clock:
            kept = in_flight
        self.finish(clock, end, failure, warning, done, kept)

    def spend(self, what: str, clock: float, seconds: float, end: float) -> float:
        until = min(clock + seconds, end)
        self.spent[what] += until - clock
        return until

    def finish(
        self, clock: float, end: float, failure: float, warning: float, done: float, kept: float
    ) -> None:
        cut_off = clock >= end
        graceful = not cut_off or (warning < failure and self.stops.warned)
        if cut_off:
            self.happened["preemption" if warning < failure else "failure"] += 1
            if warning < failure:
                self.spent["waiting"] += self.facts.preemption_wait_seconds or 0.0
        if graceful:
            self.spent["saving"] += self.checkpoint.last_save_seconds
            kept = done
        self.spent["redone"] += done - kept
        self.spent["working"] -= done - kept
        self.work_left -= kept


def played(predicted: Forecast, facts: RunFacts, seed: int) -> list[Played]:
    dice, work = random.Random(seed), predicted.interval.seconds / predicted.interval.steps
    runs = []
    for _ in range(REPEATS):
        one = Played(predicted, facts, work)
        one.run(dice)
        runs.append(one)
    return runs


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "synchronous, no limit": ({"asynchronous": False}, {}, {}),
    "asynchronous, no limit": ({}, {}, {}),
    "rare saves": ({"every_steps": 1500}, {}, {}),
    "slow file system, saves overlap": (
        {"every_steps": 6},
        {"node_mtbf": "60d"},
        {"parameters": 10**12, "train_steps": 8000},
    ),
    "time limit of 12 h": ({}, {}, {"walltime": "12:00:00"}),
    "time limit shorter than the interval": (
        {"every_steps": 1500, "asynchronous": False},
        {},
        {"walltime": "3:00:00"},
    ),
    "preemptions with warning": (
        {},
        {"preemption_mtbf": "5h", "grace": "10min"},
        {"preemption_wait_seconds": 5000.0},
    ),
    "preemptions without warning": ({}, {"preemption_mtbf": "5h", "grace": "0s"}, {}),
    "everything at once": (
        {},
        {"preemption_mtbf": "9h", "grace": "10min"},
        {"walltime": "8:00:00", "queue_seconds": 1800.0, "preemption_wait_seconds": 600.0},
    ),
    "many failures": ({}, {"node_mtbf": "10d"}, {"train_steps": 10_000}),
    "short run in one slice": (
        {},
        {"node_mtbf": "60d"},
        {"train_steps": 17_280, "walltime": "7d"},
    ),
    "evaluations": ({"evaluation": {"every_steps": 100, "batches": 30}}, {}, {}),
}


@pytest.mark.parametrize("case", varied(CASES, *list(CASES)[::3]))
def test_agrees_with_played_runs(case: str) -> None:
    in_spec, in_profile, in_facts = CASES[case]
    facts = specimen.facts(**in_facts)
    spec = specimen.spec(**{"every_steps": 200, **in_spec})
    predicted = forecast(spec, specimen.profile(**in_profile), facts)
    runs = played(predicted, facts, seed=len(case))
    times = predicted.times
    check("all", times.total_seconds, [sum(run.spent.values()) for run in runs], 0.005)
    whole = times.total_seconds
    for what in ("saving", "redone", "starting", "waiting"):
        found = [run.spent[what] / whole for run in runs]
        check(what, getattr(times, f"{what}_seconds") / whole, found, 0.03)
    for what, number in (
        ("failure", predicted.failures),
        ("preemption", predicted.preemptions),
        ("start", predicted.starts),
    ):
        check(what, number, [float(run.happened[what]) for run in runs], 0.03)


def check(what: str, predicted: float, found: list[float], share: float) -> None:
    """Within `share` of the mean, or four standard errors where these are larger."""
    mean = statistics.fmean(found)
    error = statistics.stdev(found) / len(found) ** 0.5
    assert abs(predicted - mean) <= max(share * mean, 4 * error) + 1e-9, (what, predicted, mean)
    assert error <= 0.05 * mean + 1e-3, f"{what}: the simulation is too coarse to tell"


def test_parts_of_an_attempt_add_up() -> None:
    attempt = Attempt(600, 20, 50, 300, 70, 36_000, 1 / 20_000, 1 / 30_000, True)
    mean = expected(attempt)
    assert mean.failed + mean.preempted + mean.limited == pytest.approx(1)
    assert mean.failed == pytest.approx(mean.preempted * 1.5)
    assert 0 < mean.saved_seconds < attempt.full_work_seconds
