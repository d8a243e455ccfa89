"""DeepSpeed's pipeline as the training loop knows an engine: one step, one evaluation.

`PipelineEngine` runs forward, backward, sums and the optimizer of a whole global batch in one call.
Belongs here: that call. Does not belong here: which layers a stage has (see `stages`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass

from hpctrain.train.data import Samples
from hpctrain.train.engine import Evaluation, Update
from hpctrain.train.engines.deepspeed.engine_base import Built
from hpctrain.train.engines.deepspeed.optimizer import norm_after_step
from hpctrain.train.engines.models.tasks import WordLosses
from hpctrain.train.times import Part


def mean_of(words: WordLosses) -> Callable[[Any, Any], Any]:
    """The loss of a microbatch from logits and labels; these are the words and their weights.

    DeepSpeed takes the mean over microbatches and replicas, which is the mean over all words as
    long as each microbatch has as many: `preflight` lets nothing else have a pipeline.
    """

    def mean(logits: Any, labels: Any) -> Any:
        loss_sum, count = words(logits, *labels)
        return loss_sum / count.clamp(min=1)

    return mean


class PipelineEngine(Built):
    """`hpctrain.train.engine.Engine` says what it does; `inner` is DeepSpeed's engine of the same
    name."""

    def update(self, first_sample: int, before_step: Callable[[], None]) -> Update:
        rate = self.next_rate()
        with self._calling(before_step), self._timing():
            mean = self.inner.train_batch(self._batches(self.data.training, first_sample))
        self.finished_steps += 1
        words = float(self.config.global_batch_size * self.config.labels_per_sample)
        totals = torch.stack([mean.float() * words, mean.new_tensor(words).float()])
        return Update(totals, norm_after_step(self.inner), rate)

    @contextlib.contextmanager
    def _calling(self, before_step: Callable[[], None]) -> Iterator[None]:
        """Between the last backward pass and the optimizer (runtime/pipe/engine.py,
        _exec_optimizer_step)."""
        step = type(self.inner)._take_model_step

        def with_agreement(*given: Any) -> None:
            before_step()
            step(self.inner, *given)

        self.inner._take_model_step = with_agreement
        try:
            yield
        finally:
            del self.inner._take_model_step

    @contextlib.contextmanager
    def _timing(self) -> Iterator[None]:
        """Passes as such; sending, receiving and waiting for other stages are steps of their own
        (runtime/pipe/engine.py, _exec_schedule)."""
        steps = type(self.inner)._INSTRUCTION_MAP
        parts: dict[Any, Part] = {ForwardPass: "compute", BackwardPass: "backward"}
        timed = {kind: self._timed(steps[kind], part) for kind, part in parts.items()}
        self.inner._INSTRUCTION_MAP = {**steps, **timed}
        try:
            yield
        finally:
            del self.inner._INSTRUCTION_MAP

    def _timed(self, work: Callable[..., None], part: Part) -> Callable[..., None]:
        def run(*given: Any, **named: Any) -> None:
            with self.clock.timing(part):
                work(*given, **named)

        return run

    def _batches(self, samples: Samples, first_sample: int) -> Iterator[Any]:
        """(what the first stage reads, what the last one does) of each microbatch."""
        for batch in samples.microbatches(first_sample):
            yield batch.tokens, (batch.labels, batch.loss_mask)

    def evaluate(self, batches: Iterable[int]) -> Evaluation | None:
        """Without dropout, hence without drawing random numbers."""
        samples, config = self.data.validation, self.config
        if samples is None:
            return None
        means = [
            self.inner.eval_batch(self._batches(samples, number * config.global_batch_size))
            for number in batches
        ]
        return Evaluation(float(torch.stack([one.double().reshape(()) for one in means]).mean()))
