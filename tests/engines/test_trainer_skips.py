"""Data that is left out: the same samples after every restart, and the run still has its length."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from trial_runs import Trial, retire_in_turn, trained

from hpctrain.checkpoints.publish import published_steps
from hpctrain.records.manifest import checkpoint_name, read_manifest
from hpctrain.records.run_records import SkipList, SkippedData, TrainerExit, write_record
from hpctrain.train.datasets.token_samples import TokenSamples

DP2 = dict(data_parallel_size=2)


def _skip(trial: Trial, *ranges: tuple[int, int]) -> None:
    skips = [
        SkippedData(from_samples=first, to_samples=end, reason="spike", time=1.0)
        for first, end in ranges
    ]
    write_record(trial.run.skips, SkipList(skips=tuple(skips)))


def _advance_data() -> None:
    """The data itself lacks samples 16 to 31: what is asked for from there on comes 16 later."""
    real = TokenSamples.microbatches

    def advanced(self: Any, consumed_samples: int, reads: bool = True) -> Iterator[Any]:
        return real(self, consumed_samples + (16 if consumed_samples >= 16 else 0), reads)

    TokenSamples.microbatches = advanced  # type: ignore[method-assign]


def test_as_if_the_data_had_been_advanced(trial: Callable[..., Trial]) -> None:
    skipping = trial(save_interval_steps=1, **DP2)
    _skip(skipping, (16, 32))
    advanced, whole = trial(**DP2), trained(**DP2)
    assert skipping.train() == [0, 0]
    assert advanced.train(prepare=_advance_data) == [0, 0]
    assert skipping.exact == advanced.exact
    assert skipping.exact[2] == whole.exact[2] and skipping.exact[3] != whole.exact[3]
    assert [row.consumed_samples for row in skipping.rows] == [8, 16, 40, 48, 56, 64]
    manifest = read_manifest(skipping.run.checkpoints / checkpoint_name(6))
    assert manifest is not None and manifest.consumed_samples == 64
    for step in (2, 3):  # right before the range, and behind it
        resumed = trial(**DP2)
        resumed.adopt(skipping, step)
        _skip(resumed, (16, 32))
        assert resumed.train(resume=step) == [0, 0]
        assert resumed.exact == {s: skipping.exact[s] for s in range(step + 1, 7)}


@pytest.mark.variant("test_as_if_the_data_had_been_advanced")
def test_the_last_checkpoint_before_left_out_data_stays(trial: Callable[..., Trial]) -> None:
    kept = trial(save_interval_steps=1, keep_checkpoints=1)
    _skip(kept, (24, 32))
    assert kept.train(prepare=retire_in_turn) == [0]
    assert published_steps(kept.run.checkpoints) == [3, 6]


@pytest.mark.parametrize(
    "text", ["{", '{"skips": [{"from_samples": 8, "to_samples": 8, "reason": "", "time": 0}]}']
)
def test_a_list_that_makes_no_sense_is_refused(text: str, trial: Callable[..., Trial]) -> None:
    """Training on data that somebody wanted left out must not happen silently."""
    made = trial(**DP2)
    made.run.skips.write_text(text)
    assert made.train() == [TrainerExit.CONFIG_ERROR] * 2
    assert "skips" in (made.exits()[0].message or "")
    assert made.rows == []
