"""Format `packed`, second half: pack conversations into sequences of one length.

Best-fit decreasing (Ding et al. 2024, arXiv 2404.10830): each conversation goes whole into the
fullest sequence with enough free space, the longest conversation first. Belongs here: that, and
writing the sequences. Does not belong here: tokens of a conversation.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpctrain.train.datasets.npz_arrays import Pieces, open_archive, write_archive

_COLUMNS = ("tokens", "learned", "lengths")
_SEQUENCES_AT_ONCE = 256


def best_fit(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Assign conversations to sequences; returns the conversation numbers of each sequence.

    All `lengths` are at most `capacity`. Deterministic; time n log n.
    """
    sequences: list[list[int]] = []
    free_sizes: list[int] = []  # distinct free spaces, sorted
    by_free: dict[int, list[int]] = {}  # the sequences with that free space
    for number in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[number])
        index = bisect_left(free_sizes, length)
        if index == len(free_sizes):
            sequence, free = len(sequences), capacity
            sequences.append([])
        else:
            free = free_sizes[index]
            sequence = by_free[free].pop()
            if not by_free[free]:
                del by_free[free], free_sizes[index]
        sequences[sequence].append(number)
        left = free - length
        if left:
            if left not in by_free:
                insort(free_sizes, left)
            by_free.setdefault(left, []).append(sequence)
    return sequences


@dataclass(frozen=True)
class _Shard:
    """The conversations of one shard; `begins` are their offsets in its token columns."""

    columns: dict[str, np.ndarray]
    begins: np.ndarray


def join_conversations(archives: Sequence[Path], capacity: int, pad_id: int, target: Path) -> int:
    """Pack the conversations of all shards; returns the number of sequences.

    The bytes do not depend on how the input was cut into shards.
    """
    shards = []
    for path in archives:
        columns = open_archive(path, _COLUMNS)
        shards.append(_Shard(columns, np.cumsum(columns["lengths"]) - columns["lengths"]))
    lengths = np.concatenate([shard.columns["lengths"] for shard in shards])
    # conversation number -> (its shard, its number within the shard)
    places = [(s, number) for s, shard in enumerate(shards) for number in range(len(shard.begins))]
    sequences = best_fit(lengths, capacity)
    packer = _Packer(shards, places, sequences, capacity, pad_id)
    shape = (len(sequences), capacity)
    dtypes = {name: shards[0].columns[name].dtype for name in ("tokens", "learned")}
    dtypes["positions"] = np.dtype(np.uint16 if capacity <= 2**16 else np.int32)
    write_archive(target, {name: Pieces(dtypes[name], shape, packer.rows(name)) for name in dtypes})
    return len(sequences)


@dataclass(frozen=True)
class _Packer:
    shards: list[_Shard]
    places: list[tuple[int, int]]
    sequences: list[list[int]]
    capacity: int
    pad_id: int

    def rows(self, name: str) -> Iterator[np.ndarray]:
        """Yield blocks of sequences of one column.

        Padding has positions from 0 like a text of its own, and no loss.
        """
        for first in range(0, len(self.sequences), _SEQUENCES_AT_ONCE):
            chosen = self.sequences[first : first + _SEQUENCES_AT_ONCE]
            yield np.stack([self._row(name, numbers) for numbers in chosen])

    def _row(self, name: str, numbers: list[int]) -> np.ndarray:
        values = []
        for shard_number, number in map(self.places.__getitem__, numbers):
            shard = self.shards[shard_number]
            length, begin = int(shard.columns["lengths"][number]), int(shard.begins[number])
            if name == "positions":
                values.append(np.arange(length))
            else:
                values.append(shard.columns[name][begin : begin + length])
        padding = self.capacity - sum(map(len, values))
        fill = self.pad_id if name == "tokens" else 0
        filler = np.arange(padding) if name == "positions" else np.full(padding, fill)
        return np.concatenate([*values, filler])
