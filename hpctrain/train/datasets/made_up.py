"""Samples that are made up, to try a run out without data, as Megatron's mock dataset does it.

Each row follows from its number alone, and there is something to learn in it. Belongs here: such
rows, for the formats that are not tokens. Does not belong here: anything that a result could rest
on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from hpctrain.train.datasets.batches import LabelledTexts, Microbatch, Pictures
from hpctrain.train.datasets.pixels import Look

ROWS = 65536
_NOISE = 0.2
_WAVES = 4


@dataclass(frozen=True)
class MadeUpPictures:
    """Waves whose directions and lengths are those of the class, in noise."""

    classes: int
    look: Look

    def __len__(self) -> int:
        return ROWS

    def read(self, rows: np.ndarray, samples: range, *, training: bool) -> Pictures:
        shown = [
            self.look.of_array(self._picture(int(row)), sample if training else None)
            for row, sample in zip(rows, samples, strict=True)
        ]
        labels = torch.from_numpy(rows.astype(np.int64) % self.classes)
        return Pictures(torch.from_numpy(np.stack(shown)), labels, samples)

    def _picture(self, row: int) -> np.ndarray:
        across, down = np.random.RandomState(row % self.classes).uniform(-_WAVES, _WAVES, 2)
        x, y = np.meshgrid(*[np.linspace(0, 2 * np.pi, self.look.side)] * 2)
        noise = np.random.RandomState(row).random_sample(x.shape)
        waves = 0.5 + 0.5 * np.sin(across * x + down * y)
        return ((1 - _NOISE) * waves + _NOISE * noise).astype(np.float32)


@dataclass(frozen=True)
class MadeUpTexts:
    """Half of the words of a text are its class's own word."""

    classes: int
    vocab_size: int
    seq_length: int

    def __len__(self) -> int:
        return ROWS

    def read(self, rows: np.ndarray, samples: range, *, training: bool) -> LabelledTexts:
        tokens = torch.from_numpy(np.stack([self._text(int(row)) for row in rows]))
        labels = torch.from_numpy(rows.astype(np.int64) % self.classes)
        return LabelledTexts(tokens, torch.ones_like(tokens), labels, samples)

    def _text(self, row: int) -> np.ndarray:
        draws = np.random.RandomState(row)
        words = draws.randint(self.vocab_size, size=self.seq_length)
        own = draws.random_sample(self.seq_length) < 0.5
        return np.where(own, row % self.classes % self.vocab_size, words).astype(np.int64)


@dataclass(frozen=True)
class MadeUpConversations:
    """Two texts a sequence, each of numbers that count up."""

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
