"""Map the samples of a run to ranks and to rows of the data: pure functions, the same everywhere.

As with torch's DistributedSampler and `set_epoch`, every epoch is a new permutation. Unlike there,
the order is independent of ranks, so that a resume needs only the number of consumed samples, and
the number of ranks may change. Belongs here: shares of ranks, splits and permutations. Does not
belong here: the content of a row.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from hpctrain.base.errors import InvalidInputError, Problem

# -- Distribute the samples of a step over data-parallel ranks and microbatches ------------------


@dataclass(frozen=True)
class Share:
    """The samples of data-parallel rank `rank` of `size`, for `device`."""

    rank: int
    size: int
    device: torch.device

    def deal(self, samples: range, micro_batch: int) -> Iterator[range]:
        """Yield the sample numbers of each microbatch of the step that has `samples`.

        Microbatch m of data rank d has samples m * (micro * dp) + d * micro + [0, micro), as in
        Megatron-LM's MegatronPretrainingSampler: a step has the same samples for every layout.
        """
        for begin in samples[:: self.size * micro_batch]:
            first = begin + self.rank * micro_batch
            yield range(first, first + micro_batch)


# How mock tokens are split into training, validation and test.
MOCK_SPLIT = "90,10,0"
# Independent streams of random numbers.
_SPLIT, _EPOCH, _SAMPLE = 1, 2, 3
_EPOCHS_KEPT = 2  # both are in use where an epoch ends within a batch
_UINT32_RANGE = 2**32


@dataclass(frozen=True)
class SampleOrder:
    """The rows of one part of the data, and the order in which a run reads them.

    `horizon` is the number of samples of the run: a run that skips samples repeats the first ones
    at its end. `seed` None: no shuffling, for validation.
    """

    rows: np.ndarray
    horizon: int
    seed: int | None

    def of(self, samples: range) -> np.ndarray:
        """Return the rows of these samples of the run."""
        count = len(self.rows)
        rows = []
        for sample in samples:
            epoch, position = divmod(sample % self.horizon, count)
            if self.seed is not None:
                position = int(_permutation(self.seed, epoch, count)[position])
            rows.append(self.rows[position])
        return np.array(rows)


@functools.lru_cache(maxsize=_EPOCHS_KEPT)
def _permutation(seed: int, epoch: int, count: int) -> np.ndarray:
    return _rng(_EPOCH, seed, epoch).permutation(count)


def sample_rng(seed: int, sample: int) -> np.random.RandomState:
    """Return the random numbers for one sample of the run, the same on every rank."""
    return _rng(_SAMPLE, seed, *divmod(sample, _UINT32_RANGE))


def _rng(stream: int, *words: int) -> np.random.RandomState:
    """Return a RandomState, whose numbers NEP 19 freezes: an upgrade must not change a run."""
    return np.random.RandomState([stream, *words])


def split_rows(count: int, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Split rows into training and validation, by shares such as `98,2,0`.

    The split depends on the number of rows only. Runs with different seeds can therefore be
    compared, or continue from each other's weights, without having seen the validation data. Raises
    InvalidInputError when all shares are 0.
    """
    shares = [float(share) for share in split.split(",")]
    if sum(shares) <= 0:
        raise InvalidInputError([Problem(f"data_split {split} leaves no samples at all")])
    ends = np.rint(np.cumsum(shares) / sum(shares) * count).astype(int)
    rows = _rng(_SPLIT, count % _UINT32_RANGE).permutation(count)
    return rows[: ends[0]], rows[ends[0] : ends[1]]
