"""Make one training step and one evaluation with megatron-core, for the training loop.

Belongs here: the order of work within a step. Does not belong here: how each part is built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from hpctrain.train.data import Data
from hpctrain.train.engine import Evaluation, Update
from hpctrain.train.engines.megatron.cuda_graphs import LayerGraphs
from hpctrain.train.engines.megatron.evaluate import evaluate
from hpctrain.train.engines.megatron.forward import GlobalBatchPass
from hpctrain.train.engines.megatron.gradient_check import GradientCheck
from hpctrain.train.engines.megatron.optimizer import MegatronOptimizer
from hpctrain.train.numerics import are_finite
from hpctrain.train.times import StepClock


@dataclass(frozen=True)
class MegatronEngine:
    """All parts of megatron-core on one rank; implements `hpctrain.train.engine.Engine`."""

    runner: GlobalBatchPass
    optimizer: MegatronOptimizer
    data: Data
    gradient_check: GradientCheck
    clock: StepClock
    graphs: LayerGraphs

    @property
    def rejection(self) -> str | None:
        return self.gradient_check.rejection

    def update(self, first_sample: int, before_step: Callable[[], None]) -> Update:
        """Run forward, backward and optimizer; a skipped step does not advance the schedule."""
        self.graphs.before_step()
        for chunk in self.runner.model.wrapped:
            chunk.zero_grad_buffer()
        self.optimizer.inner.zero_grad()
        reports = self.runner.run(self.data.training, first_sample, forward_only=False)
        before_step()
        learning_rate = self.optimizer.learning_rate
        updated, grad_norm, _ = self.optimizer.inner.step()
        if updated:
            self.optimizer.schedule.step(increment=1)
        return Update(self.runner.totals(reports), grad_norm, learning_rate)

    def evaluate(self, batches: Iterable[int]) -> Evaluation | None:
        if self.data.validation is None:
            return None
        return evaluate(self.runner, self.data.validation, batches)

    def weights_are_finite(self) -> bool:
        parameters: list[Any] = []
        for chunk in self.runner.model.wrapped:
            parameters.extend(chunk.parameters())
        return are_finite(parameters)
