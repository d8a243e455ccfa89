"""`profile:`: traces of chosen steps and ranks, which change nothing of the training."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from trial_runs import DDP2, FSDP2, GPT, MODULE_GPT, ZERO, MakeTrial, trained

from hpctrain.records.run_records import RankTimes, read_record

TWO_STEPS = dict(steps=(3, 4, 6), ranks=(1,))


def _names(path: Path) -> set[str]:
    with gzip.open(path) as stream:
        return {event.get("name", "") for event in json.load(stream)["traceEvents"]}


ENGINES: dict[str, dict[str, Any]] = {
    "megatron": dict(GPT, data_parallel_size=2),
    "ddp": DDP2,
    "fsdp": FSDP2,
    "zero": ZERO,
}


@pytest.mark.variant("test_a_trace_that_is_too_large_is_not_kept")
@pytest.mark.parametrize("engine", ENGINES)
def test_chosen_steps_are_traced_and_nothing_changes(engine: str, trial: MakeTrial) -> None:
    plain = trained(ENGINES[engine])
    traced = trial(ENGINES[engine], rank_times_interval_steps=1, profile=TWO_STEPS)
    assert traced.train() == [0, 0]
    assert traced.exact == plain.exact
    found = sorted(path.name for path in traced.run.traces.iterdir())
    prefix = "e000000-rank-000001-steps"
    assert found == [f"{prefix}-3-4.json.gz", f"{prefix}-6-6.json.gz"]
    names = _names(traced.run.trace(0, 1, 3, 4))
    assert {"hpctrain: step 3", "hpctrain: step 4", "hpctrain: data"} <= names
    assert {"hpctrain: compute", "hpctrain: optimizer"} <= names
    assert any(name.startswith("gloo:") for name in names), "what is sent shows"
    assert [row.step for row in traced.rows if row.profiled] == [2, 3, 4, 5, 6]
    assert read_record(traced.run.rank_times, RankTimes) is None, "no usual step was left"


def test_a_trace_that_is_too_large_is_not_kept(
    trial: MakeTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpctrain.train.profiling._MOST_TRACE_BYTES", 100)
    small = trial(MODULE_GPT, train_steps=3, profile=dict(steps=(2,)))
    assert small.train() == [0]
    assert list(small.run.traces.iterdir()) == []
    said = small.said
    assert "bytes not kept: 100 are the most" in said


@pytest.mark.variant("test_a_trace_that_is_too_large_is_not_kept")
def test_what_fails_ends_the_profile_and_not_the_run(trial: MakeTrial) -> None:
    """Here: a file lies where the directory of traces would be."""
    broken = trial(MODULE_GPT, train_steps=3, profile=dict(steps=(2,)))
    broken.run.traces.write_text("")
    assert broken.train() == [0]
    said = broken.said
    assert "event=profile rank=0 profiling given up" in said and "FileExistsError" in said
