"""Make one training step and one evaluation with DeepSpeed's ZeRO, for the training loop.

The loss is the mean over all labels of the global batch, however it is distributed over ranks and
microbatches. Belongs here: the order of work within a step. Does not belong here: how the module is
placed, differences between DeepSpeed's optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from hpctrain.train.engine import Evaluation, Update, evaluated
from hpctrain.train.engines.deepspeed.engine_base import DeepSpeedEngineBase
from hpctrain.train.engines.deepspeed.optimizer import (
    divide_gradients,
    norm_after_step,
    norm_before_step,
    reset_loss_scale,
)
from hpctrain.train.engines.models.global_batch import (
    LossTotals,
    evaluation_totals,
    nominal_labels,
)
from hpctrain.train.engines.models.tasks import Loss


@dataclass(kw_only=True)
class ZeroEngine(DeepSpeedEngineBase):
    """Implements `hpctrain.train.engine.Engine`; `inner` is a DeepSpeedEngine."""

    loss: Loss

    def update(self, first_sample: int, before_step: Callable[[], None]) -> Update:
        """Run forward, backward and optimizer.

        DeepSpeed takes the mean over ranks, and here no mean over microbatches. Its `step` after
        all but the last microbatch only counts them.
        """
        rate = self.set_next_rate()
        reset_loss_scale(self.inner)
        nominal = nominal_labels(self.config)
        scale, last = self.mesh.replicas / nominal, self.config.microbatches - 1
        losses = LossTotals(self.config.microbatches, self.mesh.device, self.mesh.data)
        for number, batch in enumerate(self.data.training.microbatches(first_sample)):
            with self.clock.computing():
                loss_sum, count = self.loss(self.inner, self._in_precision(batch))
            losses.add(loss_sum, count)
            with self.clock.timing("backward"):
                self.inner.backward(loss_sum * scale, scale_wrt_gas=False)
                if number < last:
                    self.inner.step()
        before_step()
        totals = losses.wait()
        divisor = max(1.0, float(totals[1])) / nominal
        if divisor != 1.0:
            divide_gradients(self.inner, divisor)
        norm = (
            norm_before_step(self.inner, self.mesh.tensors) if self.config.zero_stage == 0 else None
        )
        self.inner.step()
        if norm is None:
            norm = norm_after_step(self.inner)
        self.finished_steps += 1
        return Update(totals, norm, rate)

    def evaluate(self, batches: Iterable[int]) -> Evaluation | None:
        """Evaluate without dropout, hence without drawing random numbers.

        Batch norms get the statistics of rank 0, because each rank has its own and one model is
        evaluated. No training step reads them.
        """
        samples, batch_size = self.data.validation, self.config.global_batch_size
        if samples is None:
            return None
        for module in self.inner.module.modules():
            if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
                for buffer in module.buffers(recurse=False):
                    dist.broadcast(buffer, src=0)
        self.inner.eval()
        with torch.no_grad():
            totals = evaluation_totals(
                samples,
                batches,
                batch_size,
                lambda batch: self.loss(self.inner, self._in_precision(batch)),
            )
        self.inner.train()
        dist.all_reduce(totals, group=self.mesh.data)
        return evaluated(totals)

    def _in_precision(self, batch: Any) -> Any:
        """Cast images to the precision of the weights, which DeepSpeed keeps in bf16; tokens are
        integers in any case."""
        if self.config.precision == "fp32" or not hasattr(batch, "pixels"):
            return batch
        return replace(batch, pixels=batch.pixels.bfloat16())
