"""Small pictures as arrays: scikit-learn's digits, and files in MNIST's own format.

Belongs here: from these to x and y. Does not belong here: pictures of any size (see `pictures`).
"""

from __future__ import annotations

import gzip
import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpctrain.errors import InvalidInputError, Problem
from hpctrain.prepare.tokens import missing

_DIGITS_LARGEST = 16.0
# http://yann.lecun.com/exdb/mnist/: two zeros, the type (8: unsigned byte), the number of axes,
# then the length of each axis as 4 bytes, the highest first
_IDX_BYTES = 8
_LABEL_AXES, _PICTURE_AXES = 1, 3


@dataclass(frozen=True)
class Labelled:
    """Pictures [sample, side, side] and their classes [sample]."""

    x: np.ndarray
    y: np.ndarray
    classes: tuple[str, ...]

    @property
    def sha256(self) -> str:
        """Of the numbers, whatever file they came from."""
        digest = hashlib.sha256()
        for array in (self.x, self.y):
            digest.update(f"{array.dtype} {array.shape}\n".encode())
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()


def load_digits() -> Labelled:
    """1797 handwritten digits of 8 x 8 pixels, which come with scikit-learn.

    From the UCI repository, "Optical recognition of handwritten digits".
    """
    try:
        from sklearn import datasets
    except ImportError as error:
        raise missing(error, "data") from error
    found = datasets.load_digits()
    pictures = (found.images / _DIGITS_LARGEST).astype(np.float32)
    return Labelled(pictures, found.target.astype(np.int64), tuple("0123456789"))


def load_idx(paths: Sequence[Path]) -> Labelled:
    """A file of pictures and one of labels, in any order, perhaps compressed by gzip.

    Raises InvalidInputError for what is not such a pair.
    """
    arrays = [_read_idx(path) for path in paths]
    by_axes = {array.ndim: array for array in arrays}
    if len(arrays) != 2 or set(by_axes) != {_LABEL_AXES, _PICTURE_AXES}:
        words = "give two files: pictures and labels in MNIST's format (idx3-ubyte, idx1-ubyte)"
        raise InvalidInputError([Problem(words)])
    x, y = by_axes[_PICTURE_AXES], by_axes[_LABEL_AXES]
    if len(x) != len(y):
        raise InvalidInputError([Problem(f"{len(x)} pictures, but {len(y)} labels")])
    return Labelled(x, y.astype(np.int64), tuple(map(str, range(int(y.max()) + 1))))


def _read_idx(path: Path) -> np.ndarray:
    try:
        raw = path.read_bytes()
        raw = gzip.decompress(raw) if path.suffix == ".gz" else raw
    except (OSError, EOFError) as error:
        raise InvalidInputError([Problem(f"cannot be read: {error}", file=str(path))]) from error
    axes = raw[3] if raw[:3] == bytes((0, 0, _IDX_BYTES)) and len(raw) > 3 else 0
    begin = 4 + 4 * axes
    if axes not in (_LABEL_AXES, _PICTURE_AXES) or len(raw) < begin:
        raise InvalidInputError([Problem("is no file in MNIST's format", file=str(path))])
    shape = struct.unpack(f">{axes}I", raw[4:begin])
    if len(raw) - begin != int(np.prod(shape)) or 0 in shape:
        words = f"has {len(raw) - begin} numbers instead of {' x '.join(map(str, shape))}"
        raise InvalidInputError([Problem(words, file=str(path))])
    return np.frombuffer(raw, np.uint8, offset=begin).reshape(shape)
