"""Make one training step and one evaluation with megatron-core, for the training loop.

Belongs here: the order of work within a step. Does not belong here: how each part is built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from hpctrain.train.data import Data, Samples
from hpctrain.train.engine import Evaluation, Update, evaluated
from hpctrain.train.engines.megatron.cuda_graphs import LayerGraphs
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


# -- Compute the loss on validation data without changing the training state --------------------
# Every evaluation reads the same first samples of the validation data, so losses are comparable and
# no position has to be stored. No random numbers are drawn, because dropout is off.


def evaluate(runner: GlobalBatchPass, samples: Samples, batches: Iterable[int]) -> Evaluation:
    """Compute the mean loss over these global batches; all ranks must call this."""
    totals = torch.zeros(2, device=runner.mesh.device)
    config = runner.config
    with _evaluation_mode(runner), torch.no_grad():
        for number in batches:
            first = number * config.global_batch_size
            totals += runner.totals(runner.run(samples, first, forward_only=True))
    return evaluated(totals)


@contextmanager
def _evaluation_mode(runner: GlobalBatchPass) -> Iterator[None]:
    """Disable dropout and timers; with overlap_param_gather, gather all weights at once."""
    settings, chunks = runner.model.settings, runner.model.wrapped
    overlapped = runner.config.overlap_param_gather
    gather, settings.param_sync_func = settings.param_sync_func, None
    timers, settings.timers = settings.timers, None
    for chunk in chunks:
        chunk.eval()
        if overlapped:
            chunk.disable_forward_pre_hook(param_sync=True)
    try:
        yield
    finally:
        settings.param_sync_func, settings.timers = gather, timers
        for chunk in chunks:
            chunk.train()
            if overlapped:
                chunk.enable_forward_pre_hook()
