"""Distribute the samples of a step over data-parallel ranks and microbatches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Share:
    """The samples of data-parallel rank `rank` of `size`, for `device`."""

    rank: int
    size: int
    device: torch.device

    def deal(self, consumed_samples: int, micro_batch: int, microbatches: int) -> Iterator[range]:
        """Yield the sample numbers of each microbatch of the step that begins there.

        Microbatch m of data rank d has samples m * (micro * dp) + d * micro + [0, micro), as in
        Megatron-LM's MegatronPretrainingSampler: a step has the same samples for every layout.
        """
        for number in range(microbatches):
            first = consumed_samples + (number * self.size + self.rank) * micro_batch
            yield range(first, first + micro_batch)
