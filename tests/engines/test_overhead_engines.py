"""The bench of the trainer's overhead still knows every engine: both loops train, in turns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trial_runs import GPT, MODULE_GPT, ZERO, make_trial

from bench.overhead import __main__ as overhead
from bench.overhead import turns
from bench.overhead.turns import BARE, OURS, STEPS_PER_TURN

pytestmark = pytest.mark.nightly("a bench, and no promise to users")

TINY: dict[str, dict[str, Any]] = {
    "megatron": dict(GPT, train_steps=40),
    "ddp": dict(MODULE_GPT, train_steps=40, data_parallel_size=2),
    "fsdp": dict(MODULE_GPT, train_steps=40, engine="fsdp", data_parallel_size=2, shard_size=2),
    "deepspeed": dict(ZERO, train_steps=40, zero_stage=2),
}


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """The bench with a tiny job, and two pairs of turns."""

    def make(engine: str) -> None:
        trial = make_trial(tmp_path / "job", TINY[engine])
        monkeypatch.setitem(overhead.JOBS, engine, trial.config)
        monkeypatch.setattr(turns, "LEAST_PAIRS", 2)

    return make


@pytest.mark.parametrize("engine", TINY)
def test_both_loops_train(
    engine: str, tiny: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    tiny(engine)
    found = overhead.measured(engine, seconds=0.0)
    assert found is not None, capsys.readouterr().err
    assert {kind: len(took.wall) for kind, took in found.items()} == {BARE: 2, OURS: 2}
    assert all(value > 0 for took in found.values() for value in (*took.wall, *took.cpu))
    assert overhead.told(engine, found, limit=1e9)
    assert STEPS_PER_TURN * 6 * 2 <= 40, "the job is long enough for the warm-up and both turns"
