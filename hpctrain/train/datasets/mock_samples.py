"""Generate mock samples, to test a run without data, like Megatron's mock dataset.

Each row is a function of its number and contains a learnable signal. Belongs here: such rows, for
all formats but tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from hpctrain.train.datasets.batches import ImageBatch, LabelledTexts, Microbatch
from hpctrain.train.datasets.image_transforms import ImageTransform

ROWS = 65536
_NOISE = 0.2
_WAVES = 4


@dataclass(frozen=True)
class MockImages:
    """Noisy waves whose direction and length depend on the class."""

    classes: int
    transform: ImageTransform

    def __len__(self) -> int:
        return ROWS

    def read(self, rows: np.ndarray, samples: range, *, training: bool) -> ImageBatch:
        pixels = [
            self.transform.of_array(self._image(int(row)), sample if training else None)
            for row, sample in zip(rows, samples, strict=True)
        ]
        labels = torch.from_numpy(rows.astype(np.int64) % self.classes)
        return ImageBatch(torch.from_numpy(np.stack(pixels)), labels, samples)

    def _image(self, row: int) -> np.ndarray:
        across, down = np.random.RandomState(row % self.classes).uniform(-_WAVES, _WAVES, 2)
        x, y = np.meshgrid(*[np.linspace(0, 2 * np.pi, self.transform.side)] * 2)
        noise = np.random.RandomState(row).random_sample(x.shape)
        waves = 0.5 + 0.5 * np.sin(across * x + down * y)
        return ((1 - _NOISE) * waves + _NOISE * noise).astype(np.float32)


@dataclass(frozen=True)
class MockTexts:
    """Random tokens, half of which are replaced by the token of the class."""

    classes: int
    vocab_size: int
    seq_length: int

    def __len__(self) -> int:
        return ROWS

    def read(self, rows: np.ndarray, samples: range, *, training: bool) -> LabelledTexts:
        texts = []
        for row in map(int, rows):
            rng = np.random.RandomState(row)
            noise = rng.randint(self.vocab_size, size=self.seq_length)
            replaced = rng.random_sample(self.seq_length) < 0.5
            class_token = row % self.classes % self.vocab_size
            texts.append(np.where(replaced, class_token, noise).astype(np.int64))
        tokens = torch.from_numpy(np.stack(texts))
        labels = torch.from_numpy(rows.astype(np.int64) % self.classes)
        return LabelledTexts(tokens, torch.ones_like(tokens), labels, samples)


@dataclass(frozen=True)
class MockConversations:
    """Two texts per sequence, each of increasing numbers."""

    vocab_size: int
    seq_length: int

    def __len__(self) -> int:
        return ROWS

    def read(self, rows: np.ndarray, samples: range, *, training: bool) -> Microbatch:
        half = max(2, self.seq_length // 2)
        positions = torch.arange(self.seq_length) % half
        begins = torch.from_numpy(rows.astype(np.int64))[:, None] * 7
        tokens = (begins + positions + torch.arange(self.seq_length) // half) % self.vocab_size
        learned = (positions < half - 1).to(torch.float32)
        learned[-1] = 0  # nothing follows
        shape = tokens.shape
        labels = torch.nn.functional.pad(tokens[:, 1:], (0, 1))
        return Microbatch(tokens, labels, learned.expand(shape), positions.expand(shape), samples)
