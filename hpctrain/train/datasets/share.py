"""Which samples a rank reads.

Belongs here: dealing the samples of a step to ranks and microbatches. Does not belong here: what a
sample is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Share:
    """The samples of data rank `rank` of `size`, onto `device`."""

    rank: int
    size: int
    device: torch.device

    def deal(self, consumed_samples: int, micro_batch: int, microbatches: int) -> Iterator[range]:
        """Numbers of the samples of each microbatch of the step that begins there.

        Microbatch m of data rank d holds samples m * (micro * dp) + d * micro + [0, micro), as
        Megatron-LM's MegatronPretrainingSampler deals them: the same set for every layout.
        """
        for number in range(microbatches):
            first = consumed_samples + (number * self.size + self.rank) * micro_batch
            yield range(first, first + micro_batch)
