"""From a picture to normalized colors: cut out, mirrored, scaled, always the same for a sample.

What is drawn for a picture depends on the seed and the number of the sample within the run, so
that a resumed run and any layout see the same pixels, and every epoch other ones. Belongs here:
that arithmetic. Does not belong here: files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hpctrain.spec.data import Augmentation, Colors
from hpctrain.train.datasets.order import draws_for

# Szegedy et al. 2014 (arXiv 1409.4842), section 6: 8% to 100% of the area, sides 3:4 to 4:3.
_AREA, _RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
_ATTEMPTS = 10
# The usual part of a photograph that is looked at for validation: 224 of 256 pixels.
_CENTER = 224 / 256
# He et al. 2016 (arXiv 1512.03385), section 4.2: 4 pixels of padding around 32
_PADDING = 8
_COLORS = 3

Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class Look:
    """How a model sees pictures: `side` pixels, `mean` and `std` of its colors (0 to 1)."""

    side: int
    mean: Colors
    std: Colors
    augmentation: Augmentation
    seed: int

    def of_array(self, picture: np.ndarray, sample: int | None) -> np.ndarray:
        """[side, side] or [colors, side, side] as fp32 [3, side, side].

        Integers are 0 to 255, others 0 to 1. `sample` None: nothing is drawn.
        """
        scale = 1.0 if picture.dtype.kind == "f" else 255.0
        colors = picture.astype(np.float32).reshape(-1, *picture.shape[-2:]) / np.float32(scale)
        if sample is not None and self.augmentation != "none":
            draws = draws_for(self.seed, sample)
            colors = self._mirrored(_shifted(colors, draws), draws)
        return self._normalized(np.broadcast_to(colors, (_COLORS, *colors.shape[-2:])))

    def of_image(self, image: Any, sample: int | None) -> np.ndarray:
        """A PIL image of any size as fp32 [3, side, side]."""
        from PIL import Image

        draws = None
        if sample is not None and self.augmentation != "none":
            draws = draws_for(self.seed, sample)
        width, height = image.size
        box = _center(width, height) if draws is None else _any_part(width, height, draws)
        whole = image.convert("RGB")
        cut = whole.resize((self.side, self.side), Image.Resampling.BILINEAR, box=box)
        colors = np.asarray(cut, np.float32).transpose(2, 0, 1) / np.float32(255.0)
        return self._normalized(colors if draws is None else self._mirrored(colors, draws))

    def _mirrored(self, colors: np.ndarray, draws: np.random.RandomState) -> np.ndarray:
        """Left and right are exchanged for every second picture."""
        mirrored = draws.random_sample() < 0.5
        return colors[..., ::-1] if mirrored and self.augmentation == "crop_flip" else colors

    def _normalized(self, colors: np.ndarray) -> np.ndarray:
        mean, std = (np.array(one, np.float32).reshape(-1, 1, 1) for one in (self.mean, self.std))
        return np.ascontiguousarray((colors - mean) / std)


def _shifted(colors: np.ndarray, draws: np.random.RandomState) -> np.ndarray:
    """A part as large as the picture out of one with a black border."""
    side = colors.shape[-1]
    border = max(1, side // _PADDING)
    wide = np.pad(colors, ((0, 0), (border, border), (border, border)))
    top, left = (draws.randint(2 * border + 1) for _ in range(2))
    return wide[:, top : top + side, left : left + side]


def _center(width: int, height: int) -> Box:
    """The middle of the picture, as much of it as is usual."""
    side = min(width, height) * _CENTER
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def _any_part(width: int, height: int, draws: np.random.RandomState) -> Box:
    """A rectangle of random area, shape and place; the middle if none fits."""
    for _ in range(_ATTEMPTS):
        area = width * height * draws.uniform(*_AREA)
        ratio = np.exp(draws.uniform(*np.log(_RATIO)))
        wide, high = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
        if 0 < wide <= width and 0 < high <= height:
            left, top = draws.randint(width - wide + 1), draws.randint(height - high + 1)
            return float(left), float(top), float(left + wide), float(top + high)
    side = min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side
