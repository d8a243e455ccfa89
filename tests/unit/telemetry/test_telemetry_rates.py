"""What metrics say in a few numbers."""

from __future__ import annotations

from step_rows import trained_step

from hpctrain.records.run_records import StepMetrics
from hpctrain.telemetry.rates import Rates, recent_rates


def row(step: int, step_seconds: float, epoch: int = 1, mfu: float | None = None) -> StepMetrics:
    changes = dict(epoch=epoch, step_seconds=step_seconds, mfu=mfu)
    return trained_step(step, 10.0 - step, tokens_per_second=1000 / step_seconds, **changes)


def test_nothing_is_known_without_a_step() -> None:
    assert recent_rates([]) == Rates(None, None, None, None)


def test_the_first_step_of_a_launch_warms_up_and_does_not_count() -> None:
    rates = recent_rates([row(1, 50.0), row(2, 2.0), row(3, 4.0), row(4, 3.0)])
    assert (rates.step_seconds, rates.tokens_per_second) == (3.0, 1000 / 3)
    assert rates.loss == 6.0
    assert recent_rates([row(1, 50.0)]).step_seconds == 50.0


def test_only_the_newest_launch_and_the_newest_steps_count() -> None:
    old = [row(step, 9.0, epoch=1) for step in range(1, 30)]
    new = [row(30, 50.0, epoch=2), *(row(step, 1.0, epoch=2) for step in range(31, 80))]
    slow_start = [row(30, 50.0, epoch=2), *(row(s, 7.0, epoch=2) for s in range(31, 40)), *new[10:]]
    assert recent_rates([*old, *new]).step_seconds == 1.0
    assert recent_rates([*old, *slow_start], window=20).step_seconds == 1.0


def test_a_profiler_makes_steps_slow_that_are_not() -> None:
    rows = [
        row(1, 50.0),
        row(2, 2.0),
        row(3, 90.0).model_copy(update={"profiled": True}),
        row(4, 3.0),
    ]
    assert recent_rates(rows).step_seconds == 2.5
    assert recent_rates(rows[2:3]).step_seconds == 90.0, "better than nothing"


def test_mfu_is_a_median_of_what_is_known() -> None:
    assert recent_rates([row(1, 1.0), row(2, 1.0)]).mfu is None
    rows = [row(1, 1.0, mfu=0.1), *(row(s, 1.0, mfu=m) for s, m in ((2, 0.4), (3, 0.5), (4, 0.6)))]
    assert recent_rates(rows).mfu == 0.5
