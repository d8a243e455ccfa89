"""FSDP and DDP as the training loop knows an engine: one step, one evaluation.

The loss is the mean over everything that counts in the whole global batch, however it is spread
over ranks and microbatches. Belongs here: the order of things within a step. Does not belong here:
how the module is wrapped and its optimizer built.
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
from hpctrain.train.engines.models.tasks import Loss
from hpctrain.train.engines.native.mesh import Mesh
from hpctrain.train.engines.native.optimizer import scale_and_clip, set_rate
from hpctrain.train.numerics import are_finite
from hpctrain.train.schedule import learning_rate
from hpctrain.train.times import StepClock


@dataclass
class NativeEngine:
    """All parts on one rank; `hpctrain.train.engine.Engine` says the rest.

    `finished_steps` decides the learning rate; whoever loads a checkpoint sets it.
    """

    config: NativeConfig
    mesh: Mesh
    module: Any
    optimizer: torch.optim.Optimizer
    data: Data
    loss: Loss
    clock: StepClock
    finished_steps: int = 0
    # gradients of other ranks are in this rank's when it sees them: the norm tells, for all
    rejection: str | None = field(default=None, init=False)

    def update(self, first_sample: int, before_step: Callable[[], None]) -> Update:
        """Forward, backward, optimizer."""
        rate = learning_rate(self.config, self.finished_steps)
        self.optimizer.zero_grad(set_to_none=True)
        totals, summed = self._accumulate(first_sample)
        before_step()
        summed.wait()
        factor = self._nominal / totals[1].clamp(min=1)
        norm = scale_and_clip(self.optimizer, factor, self.config.clip_grad)
        set_rate(self.optimizer, rate)
        self.optimizer.step()
        self.finished_steps += 1
        return Update(totals, norm, rate)

    @property
    def _nominal(self) -> float:
        """What the losses are divided by at first; what really counts is known afterwards, and
        where everything counts (pretraining) it is the same number."""
        return float(self.config.global_batch_size * self.config.labels_per_sample)

    def _accumulate(self, first_sample: int) -> tuple[Any, Any]:
        """Gradients of all microbatches, averaged over ranks with the last.

        Returns [losses, count] and what to wait for until they are sums over all ranks: these are
        taken beside the last backward pass.
        """
        totals, summed = torch.zeros(2, device=self.mesh.device), None
        scale, last = self.mesh.size / self._nominal, self.config.microbatches - 1
        for number, batch in enumerate(self.data.training.microbatches(first_sample)):
            with self._summing(number == last):
                with self.clock.computing(), self._precision():
                    loss_sum, count = self.loss(self.module, batch)
                totals += torch.stack([loss_sum.detach().float(), count.float()])
                if number == last:
                    summed = dist.all_reduce(totals, async_op=True)
                with self.clock.timing("backward"):
                    (loss_sum * scale).backward()
        return totals, summed

    @contextlib.contextmanager
    def _summing(self, last: bool) -> Any:
        """Gradients are summed over ranks in the backward pass of the last microbatch only."""
        if self.config.engine == "fsdp":
            self.module.set_requires_gradient_sync(last)
            yield
        else:
            with contextlib.nullcontext() if last else self.module.no_sync():
                yield

    def _precision(self) -> Any:
        """FSDP casts weights itself; under DDP operations choose (torch.autocast)."""
        half = self.config.engine == "ddp" and self.config.precision == "bf16"
        return torch.autocast(self.mesh.device.type, torch.bfloat16, enabled=half)

    def evaluate(self, batches: Iterable[int]) -> Evaluation | None:
        """Without dropout, hence without drawing random numbers."""
        samples, config = self.data.validation, self.config
        if samples is None:
            return None
        totals: Any = 0  # of as many numbers as the task tells
        self.module.eval()
        with torch.no_grad(), self._precision():
            for number in batches:
                for batch in samples.microbatches(number * config.global_batch_size):
                    told = self.loss(self.module, batch)
                    totals = totals + torch.stack([one.float() for one in told])
        self.module.train()
        dist.all_reduce(totals)
        return evaluated(totals)

    def weights_are_finite(self) -> bool:
        weights = [p.detach() for p in self.module.parameters()]
        return are_finite([p.to_local() if isinstance(p, DTensor) else p for p in weights])
