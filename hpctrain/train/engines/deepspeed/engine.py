"""DeepSpeed as the training loop knows an engine: one step, one evaluation.

The loss is the mean over everything that counts in the whole global batch, however it is spread
over ranks and microbatches. Belongs here: the order of things within a step. Does not belong here:
how the module is placed, what DeepSpeed's optimizers differ in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from hpctrain.train.engine import Evaluation, Update, evaluated
from hpctrain.train.engines.deepspeed.engine_base import Built
from hpctrain.train.engines.deepspeed.flops import FlopsCounter
from hpctrain.train.engines.deepspeed.optimizer import (
    divide_gradients,
    norm_after_step,
    norm_before_step,
    undivided,
)
from hpctrain.train.engines.models.tasks import Loss


@dataclass(kw_only=True)
class ZeroEngine(Built):
    """`hpctrain.train.engine.Engine` says what it does; `inner` is a DeepSpeedEngine."""

    loss: Loss
    flops: FlopsCounter

    def update(self, first_sample: int, before_step: Callable[[], None]) -> Update:
        """Forward, backward, optimizer."""
        rate = self.next_rate()
        undivided(self.inner)
        totals, summed = self._accumulate(first_sample)
        before_step()
        summed.wait()
        share = max(1.0, float(totals[1])) / self._nominal
        if share != 1.0:
            divide_gradients(self.inner, share)
        norm = (
            norm_before_step(self.inner, self.mesh.tensors) if self.config.zero_stage == 0 else None
        )
        self.inner.step()
        if norm is None:
            norm = norm_after_step(self.inner)
        self.finished_steps += 1
        return Update(totals, norm, rate)

    @property
    def _nominal(self) -> float:
        """What the losses are divided by at first; what really counts is known afterwards, and
        where everything counts (pretraining) it is the same number."""
        return float(self.config.global_batch_size * self.config.labels_per_sample)

    def _accumulate(self, first_sample: int) -> tuple[Any, Any]:
        """Gradients of all microbatches; [losses, count], and what to wait for until they are sums
        over all ranks: these are taken beside the last backward pass.

        DeepSpeed takes the mean over ranks, and here no mean over microbatches. Its `step` after
        all but the last microbatch only counts them.
        """
        totals, summed = torch.zeros(2, device=self.mesh.device), None
        scale = self.mesh.replicas / self._nominal
        last = self.config.microbatches - 1
        for number, batch in enumerate(self.data.training.microbatches(first_sample)):
            with self.clock.computing(), self.flops.counting(self.finished_steps + 1, number):
                loss_sum, count = self.loss(self.inner, self._fitting(batch))
            totals += torch.stack([loss_sum.detach().float(), count.float()])
            if number == last:
                summed = dist.all_reduce(totals, group=self.mesh.data, async_op=True)
            with self.clock.timing("backward"):
                self.inner.backward(loss_sum * scale, scale_wrt_gas=False)
                if number < last:
                    self.inner.step()
        return totals, summed

    def evaluate(self, batches: Iterable[int]) -> Evaluation | None:
        """Without dropout, hence without drawing random numbers.

        The statistics of batch norms change with it (see `_share_statistics`), which no training
        step reads.
        """
        samples, config = self.data.validation, self.config
        if samples is None:
            return None
        totals: Any = 0  # of as many numbers as the task tells
        self._share_statistics()
        self.inner.eval()
        with torch.no_grad():
            for number in batches:
                for batch in samples.microbatches(number * config.global_batch_size):
                    told = self.loss(self.inner, self._fitting(batch))
                    totals = totals + torch.stack([one.float() for one in told])
        self.inner.train()
        dist.all_reduce(totals, group=self.mesh.data)
        return evaluated(totals)

    def _fitting(self, batch: Any) -> Any:
        """Images in the precision of the weights, which DeepSpeed keeps in bf16; words are numbers
        of words in any case."""
        if self.config.precision == "fp32" or not hasattr(batch, "pixels"):
            return batch
        return replace(batch, pixels=batch.pixels.bfloat16())

    def _share_statistics(self) -> None:
        """Of batch norms, of which each rank has its own; one model is evaluated, rank 0's."""
        for module in self.inner.module.modules():
            if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
                for buffer in module.buffers(recurse=False):
                    dist.broadcast(buffer, src=0)
