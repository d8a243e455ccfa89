"""What the engines that train a Hugging Face module share, whatever holds its weights.

Belongs here: the parts of such an engine, the rate of a step, and an evaluation. Does not belong
here: a training step, which each library makes in its own way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from hpctrain.engines.module import ModuleConfig
from hpctrain.train.data import Data
from hpctrain.train.engine import Evaluation, evaluated, evaluated_samples
from hpctrain.train.schedule import learning_rate
from hpctrain.train.times import StepClock


@dataclass(kw_only=True)
class ModuleEngine:
    """All parts on one rank.

    `finished_steps` determines the learning rate; set it after loading a checkpoint.
    """

    config: ModuleConfig
    mesh: Any
    data: Data
    clock: StepClock
    finished_steps: int = 0
    # gradients include those of other ranks when they can be checked: the norm shows bad ones, for
    # all
    rejection: str | None = field(default=None, init=False)

    def set_next_rate(self, optimizer: Any) -> float:
        """Set the learning rate of the next step, and return it."""
        rate = learning_rate(self.config, self.finished_steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        return rate

    def mean_over(
        self,
        batches: Iterable[int],
        module: Any,
        loss: Callable[[Any], tuple[Any, ...]],
        group: Any = None,
    ) -> Evaluation | None:
        """Evaluate without dropout, hence without drawing random numbers.

        `loss` returns the numbers of one microbatch, which are summed over this rank's part of
        `batches` and over the ranks of `group`; None: all ranks.
        """
        samples = self.data.validation
        if samples is None:
            return None
        module.eval()
        totals: Any = 0  # of as many numbers as the task has
        with torch.no_grad():
            for number in batches:
                for batch in samples.microbatches(evaluated_samples(self.config, number)):
                    totals = totals + torch.stack([value.float() for value in loss(batch)])
        module.train()
        dist.all_reduce(totals, group=group)
        return evaluated(totals)
