"""Conversations into sequences of one length, as full as they get.

Best fit, the longest first (Ding et al. 2024, arXiv 2404.10830): each conversation goes whole into
the fullest sequence that still has room. Belongs here: that, and writing the sequences. Does not
belong here: tokens of a conversation.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpctrain.train.datasets.archive import Pieces, open_archive, write_archive

_COLUMNS = ("tokens", "learned", "lengths")
_ROWS_AT_ONCE = 256


def best_fit(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Numbers of the conversations in each sequence; all `lengths` are at most `capacity`.

    The same lengths give the same sequences. Time n log n.
    """
    sequences: list[list[int]] = []
    room: list[int] = []  # kinds of free space, sorted; `by_room` has the sequences of each
    by_room: dict[int, list[int]] = {}
    for number in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[number])
        place = bisect_left(room, length)
        if place == len(room):
            sequence, free = len(sequences), capacity
            sequences.append([])
        else:
            free = room[place]
            sequence = by_room[free].pop()
            if not by_room[free]:
                del by_room[free], room[place]
        sequences[sequence].append(number)
        left = free - length
        if left:
            if left not in by_room:
                insort(room, left)
            by_room.setdefault(left, []).append(sequence)
    return sequences


@dataclass(frozen=True)
class _Part:
    """The conversations of one shard."""

    columns: dict[str, np.ndarray]
    begins: np.ndarray


def join_conversations(archives: Sequence[Path], capacity: int, pad_id: int, target: Path) -> int:
    """Pack those of all shards, whatever the shards are; returns the number of sequences."""
    parts = []
    for path in archives:
        columns = open_archive(path, _COLUMNS)
        parts.append(_Part(columns, np.cumsum(columns["lengths"]) - columns["lengths"]))
    lengths = np.concatenate([part.columns["lengths"] for part in parts])
    owners = np.repeat(np.arange(len(parts)), [len(part.begins) for part in parts])
    firsts = np.cumsum([0, *(len(part.begins) for part in parts)])
    places = [(int(owner), number - int(firsts[owner])) for number, owner in enumerate(owners)]
    sequences = best_fit(lengths, capacity)
    packer = _Packer(parts, places, sequences, capacity, pad_id)
    shape = (len(sequences), capacity)
    kinds = {name: parts[0].columns[name].dtype for name in ("tokens", "learned")}
    positions = np.dtype(np.uint16 if capacity <= 2**16 else np.int32)
    write_archive(
        target,
        {
            "tokens": Pieces(kinds["tokens"], shape, packer.rows("tokens")),
            "learned": Pieces(kinds["learned"], shape, packer.rows("learned")),
            "positions": Pieces(positions, shape, packer.rows("positions")),
        },
    )
    return len(sequences)


@dataclass(frozen=True)
class _Packer:
    parts: list[_Part]
    places: list[tuple[int, int]]
    sequences: list[list[int]]
    capacity: int
    pad_id: int

    def rows(self, name: str) -> Iterator[np.ndarray]:
        """Sequences of one column, some at a time; padding is a text of its own, not learned."""
        for first in range(0, len(self.sequences), _ROWS_AT_ONCE):
            chosen = self.sequences[first : first + _ROWS_AT_ONCE]
            yield np.stack([self._row(name, numbers) for numbers in chosen])

    def _row(self, name: str, numbers: list[int]) -> np.ndarray:
        values = [self._values(name, *self.places[number]) for number in numbers]
        padding = self.capacity - sum(map(len, values))
        filler = np.arange(padding) if name == "positions" else np.full(padding, self._filler(name))
        return np.concatenate([*values, filler])

    def _filler(self, name: str) -> int:
        return self.pad_id if name == "tokens" else 0

    def _values(self, name: str, owner: int, number: int) -> np.ndarray:
        part = self.parts[owner]
        length, begin = int(part.columns["lengths"][number]), int(part.begins[number])
        if name == "positions":
            return np.arange(length)
        return part.columns[name][begin : begin + length]
