"""The models against figures that others have published."""

from __future__ import annotations

import math

import forecast_specimens as specimen
import pytest
from published_failures import (
    LLAMA3_FAILURES_PER_NODE_DAY,
    RSC2_FAILURES_PER_NODE_DAY,
    first_order_ettr,
)

from hpctrain.plan.forecast.intervals import best_steps, daly_seconds, young_seconds
from hpctrain.plan.forecast.predict import Attempt, expected, forecast
from hpctrain.plan.forecast.rates import RSC1_FAILURES_PER_NODE_DAY, bytes_per_parameter

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
