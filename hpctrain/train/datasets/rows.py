"""Rows of the formats that are arrays: texts with classes, packed conversations, pictures.

Belongs here: from rows to a batch in CPU memory. Does not belong here: which rows, decoding image
files (see `images`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from hpctrain.errors import InvalidInputError, Problem
from hpctrain.train.datasets.archive import Table
from hpctrain.train.datasets.batches import Batch, LabelledTexts, Microbatch, Pictures
from hpctrain.train.datasets.pixels import Look


class Rows(Protocol):
    """A dataset: something that makes a batch of any of its rows."""

    def __len__(self) -> int: ...

    def read(self, rows: np.ndarray, samples: range, *, training: bool) -> Batch:
        """These rows as samples of those numbers, in CPU memory; augmented while training.

        Raises DataError when they cannot be read, InvalidInputError when they are not for the
        model.
        """
        ...


@dataclass(frozen=True)
class PackedRows:
    """Several texts in one sequence. The label of a token is the one that follows."""

    table: Table
    vocab_size: int

    def __len__(self) -> int:
        return len(self.table)

    def read(self, rows: np.ndarray, samples: range, *, training: bool) -> Microbatch:
        """Positions begin again with each text; padding at the end is a text of its own."""
        tokens = _integers(self.table.take("tokens", rows))
        check_vocabulary(tokens, self.vocab_size)
        labels = torch.nn.functional.pad(tokens[:, 1:], (0, 1))
        learned = torch.from_numpy(self.table.take("learned", rows).astype(np.float32))
        positions = _integers(self.table.take("positions", rows))
        return Microbatch(tokens, labels, learned, positions, samples)


@dataclass(frozen=True)
class LabelledRows:
    """Texts of one length by padding, each with its class."""

    table: Table
    vocab_size: int

    def __len__(self) -> int:
        return len(self.table)

    def read(self, rows: np.ndarray, samples: range, *, training: bool) -> LabelledTexts:
        """As it was prepared; the mask follows from the lengths."""
        tokens = _integers(self.table.take("tokens", rows))
        check_vocabulary(tokens, self.vocab_size)
        lengths = _integers(self.table.take("lengths", rows))
        mask = torch.arange(tokens.shape[1]) < lengths[:, None]
        labels = _integers(self.table.take("labels", rows))
        return LabelledTexts(tokens, mask.to(torch.int64), labels, samples)


@dataclass(frozen=True)
class ArrayRows:
    """Pictures that are arrays already, each with its class."""

    table: Table
    look: Look

    def __len__(self) -> int:
        return len(self.table)

    def read(self, rows: np.ndarray, samples: range, *, training: bool) -> Pictures:
        """One color stands for three."""
        pixels = self.table.take("x", rows)
        shown = [
            self.look.of_array(picture, sample if training else None)
            for picture, sample in zip(pixels, samples, strict=True)
        ]
        labels = _integers(self.table.take("y", rows))
        return Pictures(torch.from_numpy(np.stack(shown)), labels, samples)


def _integers(values: np.ndarray) -> Any:
    return torch.from_numpy(values.astype(np.int64))


def check_vocabulary(tokens: Any, vocab_size: int) -> None:
    """Raise InvalidInputError: an embedding fails on a GPU without a word, or not at all."""
    smallest, largest = int(tokens.min()), int(tokens.max())
    if largest >= vocab_size or smallest < 0:
        wrong = largest if largest >= vocab_size else smallest
        words = f"token id {wrong} in the data, but the model has vocab_size {vocab_size}"
        raise InvalidInputError([Problem(words)])


def check_classes(labels: np.ndarray, classes: int, path: str) -> None:
    """Raise InvalidInputError for a class that the model has no output for."""
    smallest, largest = int(labels.min()), int(labels.max())
    if smallest < 0 or largest >= classes:
        wrong = largest if largest >= classes else smallest
        words = f"class {wrong} in the data, but the model has classes 0 to {classes - 1}"
        raise InvalidInputError([Problem(words, path)])
