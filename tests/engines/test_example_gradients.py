"""The promise of examples/digits: gradients of two processes are those of one, tensor by tensor."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from trial_runs import LIMIT_SECONDS

from bench import prefork
from hpctrain.data.making import __main__
from hpctrain.job.prepare import prepare
from hpctrain.records.layout import RunLayout

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# Two partial sums in place of one, in fp32; relative to the largest number of a tensor.
ROUNDING = 1e-5
# The norm of all gradients is 1. The bias of keys has none but rounding: softmax does not see it.
NOTHING = 1e-9


def kept_gradients(target: Path) -> Callable[[], None]:
    """In each rank: the first update writes down what it is given."""

    def watch() -> None:
        update = torch.optim.AdamW.step

        def step(self: Any, *arguments: Any) -> Any:
            path = target / f"{os.environ['RANK']}.pt"
            if not path.exists():
                groups = [group["params"] for group in self.param_groups]
                torch.save([p.grad.clone() for params in groups for p in params], path)
            return update(self, *arguments)

        torch.optim.AdamW.step = step

    return watch


def gradients(place: Path, gpus: int) -> list[Any]:
    """Of the first step, the same on every rank."""
    overrides = [f"resources.gpus={gpus}", "budget.steps=4", "schedule.warmup_steps=0"]
    prepared = prepare(EXAMPLES / "digits/tiny.yaml", "sandbox", overrides, runs=place)
    run = RunLayout(place / f"on-{gpus}")
    run.create()
    run.train_config.write_text(prepared.train.model_dump_json())
    ranks = prefork.start(run.train_config, gpus, run.logs, prepare=kept_gradients(run.logs))
    assert ranks.wait(LIMIT_SECONDS) == [0] * gpus, ranks.log()
    kept = [torch.load(run.logs / f"{rank}.pt") for rank in range(gpus)]
    for others in kept[1:]:
        assert all(torch.equal(a, b) for a, b in zip(kept[0], others, strict=True))
    return kept[0]


@pytest.mark.variant("test_losses_are_those_of_one_process")
def test_two_processes_have_the_gradients_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert __main__.main(["--output", "data/digits", "--builtin", "digits", "--json"]) == 0
    alone, spread = gradients(tmp_path, 1), gradients(tmp_path, 2)
    assert len(alone) == len(spread) > 30
    for one, two in zip(alone, spread, strict=True):
        assert one.abs().max() > 0
        assert (one - two).abs().max() <= ROUNDING * one.abs().max() + NOTHING
