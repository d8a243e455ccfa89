"""Crop, flip, resize and normalize images, deterministically for each sample.

Random numbers depend on the seed and the number of the sample within the run. A resumed run and any
layout therefore see the same pixels, and every epoch sees different ones. Does not belong here:
files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hpctrain.spec.data import Augmentation, Colors
from hpctrain.train.datasets.sample_order import sample_rng

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
