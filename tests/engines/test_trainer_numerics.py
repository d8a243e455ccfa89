"""Numbers that must not be trained on: the launch ends, says so, and saves nothing more."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from trial_runs import PP2, TWO, MakeTrial, Trial, wrap

from hpctrain.checkpoints.publish import published_steps
from hpctrain.records.run_records import ExitRecord, TrainerExit
from hpctrain.train.engines.megatron.engine import MegatronEngine
from hpctrain.train.numerics import LEAST_STEPS, LossWindow

DIVERGED = TrainerExit.DIVERGED
LONG = dict(train_steps=24, lr_decay_steps=24)


def _at_step(step: int, rank: int, change: Callable[[Any], Any]) -> Callable[[], None]:
    """Change one rank's output of the model in one step, every microbatch."""

    def prepare() -> None:
        current = 0

        @wrap("hpctrain.train.loop:Loop", "one_step")
        def one_step(real: Any, self: Any) -> Any:
            nonlocal current
            current = self.position.step + 1
            return real(self)

        @wrap("hpctrain.train.engines.megatron.engine", "forward_step")
        def forward_step(real: Any, iterator: Any, model: Any) -> Any:
            output, loss = real(iterator, model)
            hit = current == step and os.environ["RANK"] == str(rank)
            return (change(output) if hit else output), loss

    return prepare


def _diverged(trial: Trial, step: int) -> list[ExitRecord]:
    records = trial.exits()
    assert {record.cause for record in records} == {"diverged"}
    assert {record.outcome for record in records} == {"crash"}
    assert {record.exit_code for record in records} == {17}
    assert {record.step for record in records} == {step}
    assert {record.consumed_samples for record in records} == {(step - 1) * 8}
    return records


@pytest.mark.variant("test_broken_weights_are_never_saved")
def test_a_loss_that_is_not_finite_ends_all_ranks(trial: MakeTrial) -> None:
    """One rank of two has it, in the step after an asynchronous save was begun."""
    wild = trial(async_save=True, save_interval_steps=1, **TWO)
    codes = wild.train(prepare=_at_step(3, 1, lambda output: output * float("nan")))
    assert codes == [DIVERGED, DIVERGED]
    records = _diverged(wild, 3)
    assert "local grad norm" in (records[1].message or ""), "whose gradients they are"
    assert "another rank" in (records[0].message or "")
    assert "16 samples consumed before the step" in (records[0].message or "")
    assert published_steps(wild.run.checkpoints) == [1, 2], "what began before may still count"
    assert not list(wild.run.checkpoints.glob("*partial*3*"))
    last = wild.rows[-1]
    assert (last.step, last.loss, last.consumed_samples) == (3, None, 24)


@pytest.mark.variant("test_broken_weights_are_never_saved")
def test_across_pipeline_stages(trial: MakeTrial) -> None:
    wild = trial(save_interval_steps=1, **PP2)
    codes = wild.train(prepare=_at_step(2, 1, lambda output: output * float("inf")))
    assert codes == [DIVERGED, DIVERGED]
    _diverged(wild, 2)
    assert published_steps(wild.run.checkpoints) == [1]


def test_at_the_last_step(trial: MakeTrial) -> None:
    """The final save must not happen, nor may the run be done."""
    wild = trial(train_steps=2)
    assert wild.train(prepare=_at_step(2, 0, lambda out: out * float("nan"))) == [DIVERGED]
    assert published_steps(wild.run.checkpoints) == []
    assert not wild.run.done.exists()


def test_an_overflowing_update(trial: MakeTrial) -> None:
    wild = trial(lr=1e25, min_lr=0.0, clip_grad=0.0, save_interval_steps=100)
    assert wild.train() == [DIVERGED]
    assert published_steps(wild.run.checkpoints) == []


def _break_weights() -> None:
    """Rank 1 of two pipeline stages has a weight that is not finite after the update."""
    steps: list[int] = []

    @wrap(MegatronEngine, "update")
    def update(real: Any, self: MegatronEngine, *arguments: Any) -> Any:
        result = real(self, *arguments)
        steps.append(1)
        if len(steps) == 2 and os.environ["RANK"] == "1":
            with torch.no_grad():
                next(iter(self.model.bare[0].parameters())).view(-1)[7] = float("inf")
        return result


def test_broken_weights_are_never_saved(trial: MakeTrial) -> None:
    """The loss of their step is still good: it was computed before the update."""
    wild = trial(save_interval_steps=1, **PP2)
    assert wild.train(prepare=_break_weights) == [DIVERGED, DIVERGED]
    records = _diverged(wild, 2)
    assert "weights are not finite" in (records[0].message or "")
    assert published_steps(wild.run.checkpoints) == [1]


@pytest.mark.variant("test_broken_weights_are_never_saved")
def test_a_spike_ends_the_launch_also_right_after_a_resume(trial: MakeTrial) -> None:
    """The window is that of the run, not of the launch: it is read back from the metrics."""
    settings = dict(loss_spike=10.0, save_interval_steps=4, **LONG)
    spiking = trial(**settings)
    codes = spiking.train(prepare=_at_step(20, 0, lambda output: output * 3))
    assert codes == [DIVERGED]
    (record,) = _diverged(spiking, 20)
    assert "loss spike" in (record.message or "")
    assert published_steps(spiking.run.checkpoints)[-1] == 16
    again = spiking.train(resume=16, prepare=_at_step(18, 0, lambda output: output * 3))
    assert again == [DIVERGED], "three losses of its own are not enough to judge"
    assert _diverged(spiking, 18)
    calm = trial(**settings)
    assert calm.train() == [0], "the same run without a spike"


@pytest.mark.parametrize(("code", "cause"), [(16, "suspect_numerics"), (17, "diverged")])
def test_megatrons_own_verdict(code: int, cause: str, trial: MakeTrial) -> None:
    def leave() -> None:
        MegatronEngine.update = lambda *_: sys.exit(code)  # type: ignore[method-assign]

    judged = trial()
    assert judged.train(prepare=leave) == [code]
    assert [(record.cause, record.exit_code) for record in judged.exits()] == [(cause, code)]


def test_what_a_spike_is() -> None:
    steady = [2.0 + 0.01 * (number % 5 - 2) for number in range(LEAST_STEPS)]  # MAD 0.01
    assert LossWindow(10, steady).spike(2.09) is None
    assert "loss spike" in (LossWindow(10, steady).spike(2.2) or "")
    assert LossWindow(10, steady).spike(1.0) is None, "down is no spike"
    assert LossWindow(None, steady).spike(1e9) is None
    assert LossWindow(10, steady[:-1]).spike(1e9) is None, "too few to judge"
    assert LossWindow(10, [2.0] * 16).spike(2.001) is None, "no spread at all"
    window = LossWindow(10, steady)
    assert window.spike(50.0)
    assert window.last == steady[-1], "a spike is not remembered"
