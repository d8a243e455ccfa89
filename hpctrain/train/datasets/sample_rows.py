"""Build batches in CPU memory from rows of all formats but tokens: arrays, image files, mock data.

Does not belong here: choosing rows (see `sample_order`), Megatron's tokens (see `token_samples`).
"""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.records.datasets import class_directories
from hpctrain.spec.data import Augmentation, Colors
from hpctrain.train.datasets.batches import Batch, ImageBatch, LabelledTexts, Microbatch
from hpctrain.train.datasets.image_listing import list_images, listing_columns
from hpctrain.train.datasets.npz_arrays import ArchiveTable, write_archive
from hpctrain.train.datasets.sample_order import sample_rng
from hpctrain.train.faults import DataError

# -- Crop, flip, resize and normalize images, deterministically for each sample ------------------
# Random numbers depend on the seed and the number of the sample within the run. A resumed run and
# any layout therefore see the same pixels, and every epoch sees different ones.


# Szegedy et al. 2014 (arXiv 1409.4842), section 6: 8% to 100% of the area, sides 3:4 to 4:3.
_AREA, _RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
_ATTEMPTS = 10
# The usual center crop for validation: 224 of 256 pixels.
_CENTER = 224 / 256
# He et al. 2016 (arXiv 1512.03385), section 4.2: 4 pixels of padding around 32
_PADDING = 8
_COLORS = 3

Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class ImageTransform:
    """Transform to `side` pixels, normalized by `mean` and `std` of the colors (0 to 1)."""

    side: int
    mean: Colors
    std: Colors
    augmentation: Augmentation
    seed: int

    def of_array(self, image: np.ndarray, sample: int | None) -> np.ndarray:
        """Transform [side, side] or [colors, side, side] to fp32 [3, side, side].

        Integers are 0 to 255, others 0 to 1. `sample` None: no augmentation.
        """
        scale = 1.0 if image.dtype.kind == "f" else 255.0
        colors = image.astype(np.float32).reshape(-1, *image.shape[-2:]) / np.float32(scale)
        if sample is not None and self.augmentation != "none":
            rng = sample_rng(self.seed, sample)
            # a random crop of the image's size from the image with a black border
            side = colors.shape[-1]
            border = max(1, side // _PADDING)
            padded = np.pad(colors, ((0, 0), (border, border), (border, border)))
            top, left = (rng.randint(2 * border + 1) for _ in range(2))
            colors = self._flip(padded[:, top : top + side, left : left + side], rng)
        return self._normalize(np.broadcast_to(colors, (_COLORS, *colors.shape[-2:])))

    def of_image(self, image: Any, sample: int | None) -> np.ndarray:
        """Transform a PIL image of any size to fp32 [3, side, side]."""
        from PIL import Image

        rng = None
        if sample is not None and self.augmentation != "none":
            rng = sample_rng(self.seed, sample)
        width, height = image.size
        if rng is None:
            box = _center_box(width, height, min(width, height) * _CENTER)
        else:
            box = _random_box(width, height, rng)
        rgb = image.convert("RGB")
        resized = rgb.resize((self.side, self.side), Image.Resampling.BILINEAR, box=box)
        colors = np.asarray(resized, np.float32).transpose(2, 0, 1) / np.float32(255.0)
        return self._normalize(colors if rng is None else self._flip(colors, rng))

    def _flip(self, colors: np.ndarray, rng: np.random.RandomState) -> np.ndarray:
        """Flip horizontally with probability 1/2; the number is drawn in any case."""
        flipped = rng.random_sample() < 0.5
        return colors[..., ::-1] if flipped and self.augmentation == "crop_flip" else colors

    def _normalize(self, colors: np.ndarray) -> np.ndarray:
        mean, std = (np.array(v, np.float32).reshape(-1, 1, 1) for v in (self.mean, self.std))
        return np.ascontiguousarray((colors - mean) / std)


def _center_box(width: int, height: int, side: float) -> Box:
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def _random_box(width: int, height: int, rng: np.random.RandomState) -> Box:
    """Return a box of random area, aspect ratio and position; the center square if none fits."""
    for _ in range(_ATTEMPTS):
        area = width * height * rng.uniform(*_AREA)
        ratio = np.exp(rng.uniform(*np.log(_RATIO)))
        wide, high = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
        if 0 < wide <= width and 0 < high <= height:
            left, top = rng.randint(width - wide + 1), rng.randint(height - high + 1)
            return float(left), float(top), float(left + wide), float(top + high)
    return _center_box(width, height, min(width, height))


class SampleRows(ABC):
    """A dataset that can build a batch of any of its rows; mock data without other rows."""

    def __len__(self) -> int:
        return MOCK_ROWS

    @abstractmethod
    def read(self, rows: np.ndarray, samples: range, *, training: bool) -> Batch:
        """Read rows as the samples of the run with these numbers; `training` augments them.

        Raises DataError when they cannot be read, InvalidInputError when they do not fit the
        model.
        """


@dataclass(frozen=True)
class TableRows(SampleRows):
    """Rows of archives."""

    table: ArchiveTable

    def __len__(self) -> int:
        return len(self.table)


# -- Read and decode the images of a folder by a list of its files -------------------------------
# The list is an archive: made by `data prepare`, or written by rank 0 into the index cache at a
# run's first start, named by the folder and the times of its directories.


@dataclass(frozen=True)
class ImageRows(TableRows):
    """Image files listed by the archives of `table`, below one root directory per archive."""

    names: Sequence[tuple[np.ndarray, np.ndarray]]
    roots: Sequence[Path]
    transform: ImageTransform

    def path(self, row: int) -> Path:
        """Return the file of a row."""
        number, place = self.table.place(row)
        blob, ends = self.names[number]
        begin = int(ends[place - 1]) if place else 0
        return self.roots[number] / os.fsdecode(blob[begin : int(ends[place])].tobytes())

    def read(self, rows: np.ndarray, samples: range, *, training: bool) -> ImageBatch:
        """Decode and transform; the same file gives the same pixels with the same Pillow."""
        from PIL import Image

        pixels = []
        for row, sample in zip(rows, samples, strict=True):
            path = self.path(int(row))
            try:
                with Image.open(path) as image:
                    pixels.append(self.transform.of_image(image, sample if training else None))
            except MemoryError:
                raise
            # decoders raise all kinds of exceptions at a damaged file: SyntaxError, IndexError, ...
            except Exception as error:
                raise DataError(f"sample {sample}: {path} cannot be read: {error}") from error
        labels = _integers(self.table.take("labels", rows))
        return ImageBatch(torch.from_numpy(np.stack(pixels)), labels, samples)


def list_into_cache(root: Path, cache: Path) -> Path:
    """Return the archive that lists `root`, writing it if needed; only one process calls this.

    Raises InvalidInputError as `list_images` does.
    """
    times = [str(os.stat(root / name).st_mtime_ns) for name in ["", *class_directories(root)]]
    identity = "\n".join([str(root.absolute()), *times])
    path = cache / f"images-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.npz"
    if not path.exists():
        columns = listing_columns(list_images(root))
        cache.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}-{os.getpid()}")
        write_archive(unfinished, columns)
        os.replace(unfinished, path)
    return path


# ------------------------------------------------------------------------------------------------
# Build batches in CPU memory from rows of array formats: texts with classes, packed texts, images.


@dataclass(frozen=True)
class PackedRows(TableRows):
    """Several texts in one sequence. The label of a token is the next token."""

    vocab_size: int

    def read(self, rows: np.ndarray, samples: range, *, training: bool) -> Microbatch:
        """Read rows; positions restart with each text, and padding counts as a text."""
        tokens = _integers(self.table.take("tokens", rows))
        check_vocabulary(tokens, self.vocab_size)
        labels = torch.nn.functional.pad(tokens[:, 1:], (0, 1))
        learned = torch.from_numpy(self.table.take("learned", rows).astype(np.float32))
        positions = _integers(self.table.take("positions", rows))
        return Microbatch(tokens, labels, learned, positions, samples)


@dataclass(frozen=True)
class LabelledRows(TableRows):
    """Texts padded to one length, each with its class."""

    vocab_size: int

    def read(self, rows: np.ndarray, samples: range, *, training: bool) -> LabelledTexts:
        """Read rows; the attention mask is computed from the lengths."""
        tokens = _integers(self.table.take("tokens", rows))
        check_vocabulary(tokens, self.vocab_size)
        lengths = _integers(self.table.take("lengths", rows))
        mask = torch.arange(tokens.shape[1]) < lengths[:, None]
        labels = _integers(self.table.take("labels", rows))
        return LabelledTexts(tokens, mask.to(torch.int64), labels, samples)


@dataclass(frozen=True)
class ArrayRows(TableRows):
    """Images stored as arrays, each with its class."""

    transform: ImageTransform

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
    message = f"token id {{}} in the data, but the model has vocab_size {vocab_size}"
    _check_range(tokens, vocab_size, message)


def check_classes(labels: np.ndarray, classes: int, path: str) -> None:
    """Raise InvalidInputError for a class that the model has no output for."""
    message = f"class {{}} in the data, but the model has classes 0 to {classes - 1}"
    _check_range(labels, classes, message, path)


def _check_range(numbers: Any, end: int, message: str, path: str | None = None) -> None:
    smallest, largest = int(numbers.min()), int(numbers.max())
    if smallest < 0 or largest >= end:
        wrong = largest if largest >= end else smallest
        raise InvalidInputError([Problem(message.format(wrong), path)])


# -- Generate mock samples, to test a run without data, like Megatron's mock dataset -------------
# Each row is a function of its number and contains a learnable signal.


MOCK_ROWS = 65536
_NOISE = 0.2
_WAVES = 4


@dataclass(frozen=True)
class MockImages(SampleRows):
    """Noisy waves whose direction and length depend on the class."""

    classes: int
    transform: ImageTransform

    def read(self, rows: np.ndarray, samples: range, *, training: bool) -> ImageBatch:
        pixels = [
            self.transform.of_array(self._image(int(row)), sample if training else None)
            for row, sample in zip(rows, samples, strict=True)
        ]
        labels = _integers(rows) % self.classes
        return ImageBatch(torch.from_numpy(np.stack(pixels)), labels, samples)

    def _image(self, row: int) -> np.ndarray:
        across, down = np.random.RandomState(row % self.classes).uniform(-_WAVES, _WAVES, 2)
        x, y = np.meshgrid(*[np.linspace(0, 2 * np.pi, self.transform.side)] * 2)
        noise = np.random.RandomState(row).random_sample(x.shape)
        waves = 0.5 + 0.5 * np.sin(across * x + down * y)
        return ((1 - _NOISE) * waves + _NOISE * noise).astype(np.float32)


@dataclass(frozen=True)
class MockTexts(SampleRows):
    """Random tokens, half of which are replaced by the token of the class."""

    classes: int
    vocab_size: int
    seq_length: int

    def read(self, rows: np.ndarray, samples: range, *, training: bool) -> LabelledTexts:
        texts = []
        for row in map(int, rows):
            rng = np.random.RandomState(row)
            noise = rng.randint(self.vocab_size, size=self.seq_length)
            replaced = rng.random_sample(self.seq_length) < 0.5
            class_token = row % self.classes % self.vocab_size
            texts.append(np.where(replaced, class_token, noise).astype(np.int64))
        tokens = torch.from_numpy(np.stack(texts))
        labels = _integers(rows) % self.classes
        return LabelledTexts(tokens, torch.ones_like(tokens), labels, samples)


@dataclass(frozen=True)
class MockConversations(SampleRows):
    """Two texts per sequence, each of increasing numbers."""

    vocab_size: int
    seq_length: int

    def read(self, rows: np.ndarray, samples: range, *, training: bool) -> Microbatch:
        half = max(2, self.seq_length // 2)
        positions = torch.arange(self.seq_length) % half
        begins = _integers(rows)[:, None] * 7
        tokens = (begins + positions + torch.arange(self.seq_length) // half) % self.vocab_size
        learned = (positions < half - 1).to(torch.float32)
        learned[-1] = 0  # nothing follows
        shape = tokens.shape
        labels = torch.nn.functional.pad(tokens[:, 1:], (0, 1))
        return Microbatch(tokens, labels, learned.expand(shape), positions.expand(shape), samples)
