"""Build batches in CPU memory from rows of array formats: texts with classes, packed texts, images.

Does not belong here: choosing rows (see `sample_order`), decoding image files (see `image_rows`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.train.datasets.batches import Batch, ImageBatch, LabelledTexts, Microbatch
from hpctrain.train.datasets.image_transforms import ImageTransform
from hpctrain.train.datasets.npz_arrays import ArchiveTable


class SampleRows(Protocol):
    """A dataset that can build a batch of any of its rows."""

    def __len__(self) -> int: ...

    def read(self, rows: np.ndarray, samples: range, *, training: bool) -> Batch:
        """Read rows as the samples of the run with these numbers; `training` augments them.

        Raises DataError when they cannot be read, InvalidInputError when they do not fit the
        model.
        """
        ...


@dataclass(frozen=True)
class PackedRows:
    """Several texts in one sequence. The label of a token is the next token."""

    table: ArchiveTable
    vocab_size: int

    def __len__(self) -> int:
        return len(self.table)

    def read(self, rows: np.ndarray, samples: range, *, training: bool) -> Microbatch:
        """Read rows; positions restart with each text, and padding counts as a text."""
        tokens = _integers(self.table.take("tokens", rows))
        check_vocabulary(tokens, self.vocab_size)
        labels = torch.nn.functional.pad(tokens[:, 1:], (0, 1))
        learned = torch.from_numpy(self.table.take("learned", rows).astype(np.float32))
        positions = _integers(self.table.take("positions", rows))
        return Microbatch(tokens, labels, learned, positions, samples)


@dataclass(frozen=True)
class LabelledRows:
    """Texts padded to one length, each with its class."""

    table: ArchiveTable
    vocab_size: int

    def __len__(self) -> int:
        return len(self.table)

    def read(self, rows: np.ndarray, samples: range, *, training: bool) -> LabelledTexts:
        """Read rows; the attention mask is computed from the lengths."""
        tokens = _integers(self.table.take("tokens", rows))
        check_vocabulary(tokens, self.vocab_size)
        lengths = _integers(self.table.take("lengths", rows))
        mask = torch.arange(tokens.shape[1]) < lengths[:, None]
        labels = _integers(self.table.take("labels", rows))
        return LabelledTexts(tokens, mask.to(torch.int64), labels, samples)


@dataclass(frozen=True)
class ArrayRows:
    """Images stored as arrays, each with its class."""

    table: ArchiveTable
    transform: ImageTransform

    def __len__(self) -> int:
        return len(self.table)

    def read(self, rows: np.ndarray, samples: range, *, training: bool) -> ImageBatch:
        """Read and transform rows; a single color channel becomes three."""
        images = self.table.take("x", rows)
        pixels = [
            self.transform.of_array(image, sample if training else None)
            for image, sample in zip(images, samples, strict=True)
        ]
        labels = _integers(self.table.take("y", rows))
        return ImageBatch(torch.from_numpy(np.stack(pixels)), labels, samples)


def _integers(values: np.ndarray) -> Any:
    return torch.from_numpy(values.astype(np.int64))


def check_vocabulary(tokens: Any, vocab_size: int) -> None:
    """Raise InvalidInputError for an id out of range; an embedding on a GPU may not report it."""
    smallest, largest = int(tokens.min()), int(tokens.max())
    if largest >= vocab_size or smallest < 0:
        wrong = largest if largest >= vocab_size else smallest
        message = f"token id {wrong} in the data, but the model has vocab_size {vocab_size}"
        raise InvalidInputError([Problem(message)])


def check_classes(labels: np.ndarray, classes: int, path: str) -> None:
    """Raise InvalidInputError for a class that the model has no output for."""
    smallest, largest = int(labels.min()), int(labels.max())
    if smallest < 0 or largest >= classes:
        wrong = largest if largest >= classes else smallest
        message = f"class {wrong} in the data, but the model has classes 0 to {classes - 1}"
        raise InvalidInputError([Problem(message, path)])
