"""Sum losses over the microbatches and ranks of a global batch.

The loss of a step is the mean over all labels of the global batch, however it is distributed over
ranks and microbatches. Belongs here: sums and the number of labels. Does not belong here: the loss
of a batch (see `tasks`), gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from hpctrain.engines.module import ModuleConfig
from hpctrain.train.data import Samples


def nominal_labels(config: ModuleConfig) -> float:
    """Return the number of labels in a global batch without padding.

    Losses are divided by it before the actual number is known. In pretraining, where every token
    has a label, both are the same.
    """
    return float(config.global_batch_size * config.labels_per_sample)


class LossTotals:
    """Sums [losses, labels] of one step's microbatches, and with the last one over all ranks.

    `group`: the ranks to sum over; None: all ranks.
    """

    def __init__(self, microbatches: int, device: torch.device, group: Any = None) -> None:
        self._remaining = microbatches
        self._totals = torch.zeros(2, device=device)
        self._group = group
        self._sum: Any = None

    def add(self, loss_sum: Any, count: Any) -> None:
        """Add one microbatch; the last one starts the sum over ranks, beside its backward pass."""
        self._totals += torch.stack([loss_sum.detach().float(), count.float()])
        self._remaining -= 1
        if self._remaining == 0:
            self._sum = dist.all_reduce(self._totals, group=self._group, async_op=True)

    def wait(self) -> Any:
        """Return the sums over all ranks; call it after the last microbatch."""
        self._sum.wait()
        return self._totals


def evaluation_totals(
    samples: Samples,
    batches: Iterable[int],
    global_batch_size: int,
    loss: Callable[[Any], tuple[Any, ...]],
) -> Any:
    """Sum the numbers that `loss` returns per microbatch over this rank's part of `batches`."""
    totals: Any = 0  # of as many numbers as the task has
    for number in batches:
        for batch in samples.microbatches(number * global_batch_size):
            totals = totals + torch.stack([value.float() for value in loss(batch)])
    return totals
