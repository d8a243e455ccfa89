"""Reading a run directory for a diagnosis, and having the planner price what it advises."""

from __future__ import annotations

from pathlib import Path

import pytest
from judged_runs import GIB, has_saved, has_trained, has_window, submitted

from hpctrain.base.errors import UsageError
from hpctrain.diagnose.facts import Price, TopicFinding
from hpctrain.diagnose.of_run import diagnose, gather, is_worth_it
from hpctrain.handle import open_run
from hpctrain.records.find import RunFiles
from hpctrain.records.run_records import read_metrics
from hpctrain.slurm.fake import FakeSlurm


@pytest.fixture
def run(tmp_path: Path) -> RunFiles:
    """Full memory on eight ranks, 60 steps, saves at steps 10 to 40."""
    made, ranks = submitted(tmp_path, "gpt1300m", "a100x64")
    has_trained(made.layout, [30.0] + [6.0] * 59)
    has_saved(made.layout, [0.5] * 4)
    has_window(made.layout, ranks, 8, step_seconds=6.0, reserved_memory_bytes=79 * GIB)
    return made


def _of(run: RunFiles, topic: str, *, price: bool = True) -> TopicFinding:
    return next(one for one in diagnose(run, price=price).findings if one.topic == topic)


def test_changes_have_the_prices_of_the_planner(run: RunFiles) -> None:
    memory = _of(run, "memory")
    priced = {one.changes[0]: one.price for one in memory.remedies if one.price}
    assert len(priced) >= 2
    assert any(change.startswith("batch.micro=") for change in priced)
    for price in priced.values():
        assert price is not None and price.peak_bytes < price.peak_bytes_now
    seconds = [price.step_seconds or 0.0 for price in priced.values() if price]
    assert seconds == sorted(seconds), "what costs least comes first"
    unpriced = _of(run, "memory", price=False)
    assert len(unpriced.remedies) >= len(memory.remedies), "what the planner refuses is left out"
    assert all(one.price is None for one in unpriced.remedies)


@pytest.mark.parametrize(
    ("step", "peak", "memory", "worth"),
    [
        (9.0, 100, False, True),
        (10.0, 50, False, False),
        (10.0, 50, True, True),
        (12.0, 99.5, True, False),
        (9.0, 120, True, True),
        (None, 100, False, True),
        (None, 100, True, False),
    ],
)
def test_what_brings_nothing_is_not_advised(
    step: float | None, peak: float, memory: bool, worth: bool
) -> None:
    now = None if step is None else 10.0
    price = Price(
        step_seconds=step, step_seconds_now=now, peak_bytes=int(peak * 10), peak_bytes_now=1000
    )
    assert is_worth_it(price, memory=memory) is worth


def test_without_a_plan_the_times_still_tell(run: RunFiles) -> None:
    run.layout.plan.unlink()
    told = diagnose(run)
    assert {one.topic: one.answer for one in told.findings}["data"] == "no"
    assert "plan.json" in [one.file for one in told.read]
    assert _of(run, "memory").answer == "unknown"


def test_profiled_and_first_steps_are_no_usual_ones(run: RunFiles) -> None:
    rows = read_metrics(run.layout)
    changed = [row.model_copy(update={"profiled": row.step == 7, "step_seconds": row.step * 1.0})
               for row in rows]  # fmt: skip
    run.layout.metrics.write_text("".join(f"{row.model_dump_json()}\n" for row in changed))
    steps = gather(run)[0].steps
    assert steps is not None
    assert [step for step, _ in steps.usual] == [step for step in range(2, 61) if step != 7]


def test_the_save_that_ends_a_launch_stops_nothing(run: RunFiles) -> None:
    has_saved(run.layout, [0.0] * 5 + [100.0])  # the last one at step 60
    saves = gather(run)[0].saves
    assert saves is not None and (saves.count, saves.stall_seconds) == (9, 2.0)


def test_from_python_and_before_the_first_step(run: RunFiles, tmp_path: Path) -> None:
    handle = open_run(run.run_id, runs=tmp_path, slurm=FakeSlurm())
    stands_out = [one.topic for one in handle.diagnose(price=False).stands_out]
    assert stands_out == ["communication", "memory"]
    run.layout.metrics.unlink()
    run.layout.rank_times.unlink()
    with pytest.raises(UsageError, match="has not finished a step yet"):
        handle.diagnose()
