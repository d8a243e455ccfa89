"""Which row of the data is sample k of a run: a pure function, the same for every layout.

As with torch's DistributedSampler and `set_epoch`, every epoch is a new permutation; unlike there
no rank holds a part of it, so that a resume needs nothing but the number of samples consumed, and
the number of ranks may change. Belongs here: splits and permutations. Does not belong here: what
lies in a row.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from hpctrain.errors import InvalidInputError, Problem

# Streams of random numbers that must not be each other's.
_SPLIT, _EPOCH, _SAMPLE = 1, 2, 3
_EPOCHS_KEPT = 2  # both are in use where one ends in the middle of a batch
_WORD = 2**32


@dataclass(frozen=True)
class Order:
    """The rows of one part of the data, and how a run goes through them.

    `horizon` is the number of samples in the run: a run that leaves some out takes the first ones
    again at its end. `seed` None: always in the same order, for validation.
    """

    rows: np.ndarray
    horizon: int
    seed: int | None

    def of(self, samples: range) -> np.ndarray:
        """The rows of these samples of the run."""
        count = len(self.rows)
        places = [divmod(sample % self.horizon, count) for sample in samples]
        return np.array([self.rows[self._place(epoch, place)] for epoch, place in places])

    def _place(self, epoch: int, place: int) -> int:
        if self.seed is None:
            return place
        return int(_permutation(self.seed, epoch, len(self.rows))[place])


@functools.lru_cache(maxsize=_EPOCHS_KEPT)
def _permutation(seed: int, epoch: int, count: int) -> np.ndarray:
    return _draws(_EPOCH, seed, epoch).permutation(count)


def draws_for(seed: int, sample: int) -> np.random.RandomState:
    """Random numbers for what is done to one sample of the run, whoever reads it."""
    return _draws(_SAMPLE, seed, *divmod(sample, _WORD))


def _draws(stream: int, *words: int) -> np.random.RandomState:
    """RandomState, whose numbers NEP 19 promises for good: an upgrade must not change a run."""
    return np.random.RandomState([stream, *words])


def split_rows(count: int, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Rows of training and of validation, by shares such as `98,2,0`.

    Which row is in which part depends on their number alone: runs with other seeds can be
    compared, and go on from each other's weights, without having seen the validation data. Raises
    InvalidInputError when all shares are 0.
    """
    shares = [float(share) for share in split.split(",")]
    if sum(shares) <= 0:
        raise InvalidInputError([Problem(f"data_split {split} leaves no samples at all")])
    ends = np.rint(np.cumsum(shares) / sum(shares) * count).astype(int)
    rows = _draws(_SPLIT, count % _WORD).permutation(count)
    return rows[: ends[0]], rows[ends[0] : ends[1]]
