"""Make one training step and one evaluation with DeepSpeed's pipeline, for the training loop.

DeepSpeed's `PipelineEngine` runs forward, backward, sums and the optimizer of a whole global batch
in one call. Belongs here: that call. Does not belong here: which layers a stage has (see
`pipeline_stages`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass

from hpctrain.train.data import Samples
from hpctrain.train.engine import Evaluation, Update
from hpctrain.train.engines.deepspeed.engine_base import DeepSpeedEngineBase
from hpctrain.train.engines.deepspeed.optimizer import norm_after_step
from hpctrain.train.engines.models.global_batch import nominal_labels
from hpctrain.train.engines.models.tasks import TokenLosses
from hpctrain.train.times import Part


def mean_loss_of(token_losses: TokenLosses) -> Callable[[Any, Any], Any]:
    """Return the loss of a microbatch: a function of logits and (labels, their weights).

    DeepSpeed takes the mean over microbatches and replicas, which is the mean over all tokens if
    each microbatch has the same number. `preflight` refuses a pipeline for anything else.
    """

    def mean_loss(logits: Any, labels: Any) -> Any:
        loss_sum, count = token_losses(logits, *labels)
        return loss_sum / count.clamp(min=1)

    return mean_loss


class PipelineEngine(DeepSpeedEngineBase):
    """Implements `hpctrain.train.engine.Engine`; `inner` is DeepSpeed's engine of the same name."""

    def update(self, first_sample: int, before_step: Callable[[], None]) -> Update:
        rate = self.set_next_rate()
        with self._calling_before_optimizer(before_step), self._timed_passes():
            mean = self.inner.train_batch(self._batches(self.data.training, first_sample))
        self.finished_steps += 1
        tokens = nominal_labels(self.config)
        totals = torch.stack([mean.float() * tokens, mean.new_tensor(tokens).float()])
        return Update(totals, norm_after_step(self.inner), rate)

    @contextlib.contextmanager
    def _calling_before_optimizer(self, before_step: Callable[[], None]) -> Iterator[None]:
        """Call `before_step` between the last backward pass and the optimizer
        (runtime/pipe/engine.py, _exec_optimizer_step)."""
        step = type(self.inner)._take_model_step

        def step_after_agreement(*arguments: Any) -> None:
            before_step()
            step(self.inner, *arguments)

        self.inner._take_model_step = step_after_agreement
        try:
            yield
        finally:
            del self.inner._take_model_step

    @contextlib.contextmanager
    def _timed_passes(self) -> Iterator[None]:
        """Time the passes; sending, receiving and waiting for other stages are instructions of
        their own (runtime/pipe/engine.py, _exec_schedule)."""
        instructions = type(self.inner)._INSTRUCTION_MAP
        parts: dict[Any, Part] = {ForwardPass: "compute", BackwardPass: "backward"}

        def timed(work: Callable[..., None], part: Part) -> Callable[..., None]:
            def run(*arguments: Any, **keywords: Any) -> None:
                with self.clock.timing(part):
                    work(*arguments, **keywords)

            return run

        passes = {kind: timed(instructions[kind], part) for kind, part in parts.items()}
        self.inner._INSTRUCTION_MAP = {**instructions, **passes}
        try:
            yield
        finally:
            del self.inner._INSTRUCTION_MAP

    def _batches(self, samples: Samples, first_sample: int) -> Iterator[Any]:
        """Yield (input of the first stage, input of the last one) of each microbatch."""
        for batch in samples.microbatches(first_sample):
            yield batch.tokens, (batch.labels, batch.loss_mask)

    def evaluate(self, batches: Iterable[int]) -> Evaluation | None:
        """Evaluate without dropout, hence without drawing random numbers."""
        samples, config = self.data.validation, self.config
        if samples is None:
            return None
        means = [
            self.inner.eval_batch(self._batches(samples, number * config.global_batch_size))
            for number in batches
        ]
        return Evaluation(float(torch.stack([mean.double().reshape(()) for mean in means]).mean()))
