"""Make one training step and one evaluation with FSDP or DDP, for the training loop.

The loss is the mean over all labels of the global batch, however it is distributed over ranks and
microbatches. Belongs here: the order of work within a step. Does not belong here: how the module is
wrapped and its optimizer built.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hpctrain.engines.native import NativeConfig
from hpctrain.train.data import Data
from hpctrain.train.engine import Evaluation, Update, evaluated
from hpctrain.train.engines.models.global_batch import (
    LossTotals,
    evaluation_totals,
    nominal_labels,
)
from hpctrain.train.engines.models.tasks import Loss
from hpctrain.train.engines.native.mesh import NativeMesh
from hpctrain.train.engines.native.optimizer import scale_and_clip, set_rate
from hpctrain.train.numerics import are_finite
from hpctrain.train.schedule import learning_rate
from hpctrain.train.times import StepClock


@dataclass
class NativeEngine:
    """All parts on one rank; implements `hpctrain.train.engine.Engine`.

    `finished_steps` determines the learning rate; set it after loading a checkpoint.
    """

    config: NativeConfig
    mesh: NativeMesh
    module: Any
    optimizer: torch.optim.Optimizer
    data: Data
    loss: Loss
    clock: StepClock
    finished_steps: int = 0
    # this rank's gradients include those of other ranks: the norm shows bad ones, for all
    rejection: str | None = field(default=None, init=False)

    def update(self, first_sample: int, before_step: Callable[[], None]) -> Update:
        """Run forward, backward and optimizer.

        Gradients are averaged over ranks with the last microbatch.
        """
        rate = learning_rate(self.config, self.finished_steps)
        self.optimizer.zero_grad(set_to_none=True)
        nominal = nominal_labels(self.config)
        scale, microbatches = self.mesh.size / nominal, self.config.microbatches
        losses = LossTotals(microbatches, self.mesh.device)
        for number, batch in enumerate(self.data.training.microbatches(first_sample)):
            with self._gradient_sync(number == microbatches - 1):
                with self.clock.computing(), self._autocast():
                    loss_sum, count = self.loss(self.module, batch)
                losses.add(loss_sum, count)
                with self.clock.timing("backward"):
                    (loss_sum * scale).backward()
        before_step()
        totals = losses.wait()
        factor = nominal / totals[1].clamp(min=1)
        norm = scale_and_clip(self.optimizer, factor, self.config.clip_grad)
        set_rate(self.optimizer, rate)
        self.optimizer.step()
        self.finished_steps += 1
        return Update(totals, norm, rate)

    @contextlib.contextmanager
    def _gradient_sync(self, last: bool) -> Any:
        """Sum gradients over ranks in the backward pass of the last microbatch only."""
        if self.config.engine == "fsdp":
            self.module.set_requires_gradient_sync(last)
            yield
        else:
            with contextlib.nullcontext() if last else self.module.no_sync():
                yield

    def _autocast(self) -> Any:
        """Return the precision of operations: FSDP casts weights itself, DDP uses autocast."""
        half = self.config.engine == "ddp" and self.config.precision == "bf16"
        return torch.autocast(self.mesh.device.type, torch.bfloat16, enabled=half)

    def evaluate(self, batches: Iterable[int]) -> Evaluation | None:
        """Evaluate without dropout, hence without drawing random numbers."""
        samples, batch_size = self.data.validation, self.config.global_batch_size
        if samples is None:
            return None
        self.module.eval()
        with torch.no_grad(), self._autocast():
            totals = evaluation_totals(
                samples, batches, batch_size, lambda batch: self.loss(self.module, batch)
            )
        self.module.train()
        dist.all_reduce(totals)
        return evaluated(totals)

    def weights_are_finite(self) -> bool:
        weights = [p.detach() for p in self.module.parameters()]
        return are_finite([p.to_local() if isinstance(p, DTensor) else p for p in weights])
