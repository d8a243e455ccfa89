"""Formats `images`, a folder whose images are checked and listed, and `arrays`, small pictures.

Belongs here: shards of files to decode, and the list; scikit-learn's digits, and files in MNIST's
format. Does not belong here: pixels for training (see `hpctrain.train.datasets`).
"""

from __future__ import annotations

import gzip
import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.data.making.corpus import Corpus, Source
from hpctrain.data.making.shards import DocumentCounts, ShardContents
from hpctrain.data.making.text_tokenizers import missing_package
from hpctrain.train.datasets.image_listing import ImageListing, list_images, listing_columns
from hpctrain.train.datasets.npz_arrays import write_archive

_MAX_PROBLEMS = 20


def image_corpus(listing: ImageListing, root: Path) -> Corpus:
    """Describe the files as sources; digests cover name, size and time, not the contents."""
    sources = []
    for name in listing.names:
        status = (root / name).stat()
        identity = f"{name} {status.st_size} {status.st_mtime_ns}"
        digest = hashlib.sha256(identity.encode()).hexdigest()
        source = Source(path=root / name, name=name, size_bytes=status.st_size, sha256=digest)
        sources.append(source)
    return Corpus(tuple(sources), (), 0, tuple(source.sha256 for source in sources))


def check_images(sources: Sequence[Source]) -> ShardContents:
    """Decode every image. Raises InvalidInputError with those that cannot be decoded."""
    try:
        from PIL import Image
    except ImportError as error:
        raise missing_package(error, "data") from error
    problems = []
    for source in sources:
        try:
            with Image.open(source.path) as image:
                image.convert("RGB")
        except MemoryError:
            raise
        except Exception as error:  # decoders raise all kinds of exceptions at a damaged file
            problems.append(Problem(f"cannot be decoded: {error}", file=str(source.path)))
    if problems:
        raise InvalidInputError(problems[:_MAX_PROBLEMS])
    counts = DocumentCounts(documents=len(sources))
    return ShardContents({"checked": np.arange(len(sources))}, counts)


def join_images(root: Path, expected: int, target: Path) -> int:
    """Write the list of files, and return their number.

    Raises InvalidInputError when files were added or removed since the shards were planned.
    """
    listing = list_images(root)
    if len(listing.names) != expected:
        hint = "start again when nobody writes to the input"
        changed = Problem("changed while its images were checked", file=str(root), hint=hint)
        raise InvalidInputError([changed])
    write_archive(target, listing_columns(listing))
    return len(listing.names)


# -- Format `arrays`: load small images from scikit-learn's digits or files in MNIST's format ---


_DIGITS_LARGEST = 16.0
# http://yann.lecun.com/exdb/mnist/: two zeros, the type (8: unsigned byte), the number of axes,
# then the length of each axis as 4 bytes, the highest first
_IDX_BYTES = 8
_LABEL_AXES, _IMAGE_AXES = 1, 3


@dataclass(frozen=True)
class LabelledImages:
    """Images [sample, side, side] and their classes [sample]."""

    x: np.ndarray
    y: np.ndarray
    classes: tuple[str, ...]

    @property
    def sha256(self) -> str:
        """Digest of the numbers, independent of the files they came from."""
        digest = hashlib.sha256()
        for array in (self.x, self.y):
            digest.update(f"{array.dtype} {array.shape}\n".encode())
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()


def load_digits() -> LabelledImages:
    """Load the 1797 handwritten digits of 8 x 8 pixels that come with scikit-learn.

    From the UCI repository, "Optical recognition of handwritten digits".
    """
    try:
        from sklearn import datasets
    except ImportError as error:
        raise missing_package(error, "data") from error
    digits = datasets.load_digits()
    images = (digits.images / _DIGITS_LARGEST).astype(np.float32)
    return LabelledImages(images, digits.target.astype(np.int64), tuple("0123456789"))


def load_idx(paths: Sequence[Path]) -> LabelledImages:
    """Load an idx file of images and one of labels, in any order, optionally gzipped.

    Raises InvalidInputError for anything else.
    """
    arrays = [_read_idx(path) for path in paths]
    by_axes = {array.ndim: array for array in arrays}
    if len(arrays) != 2 or set(by_axes) != {_LABEL_AXES, _IMAGE_AXES}:
        message = "give two files: images and labels in MNIST's format (idx3-ubyte, idx1-ubyte)"
        raise InvalidInputError([Problem(message)])
    x, y = by_axes[_IMAGE_AXES], by_axes[_LABEL_AXES]
    if len(x) != len(y):
        raise InvalidInputError([Problem(f"{len(x)} images, but {len(y)} labels")])
    return LabelledImages(x, y.astype(np.int64), tuple(map(str, range(int(y.max()) + 1))))


def _read_idx(path: Path) -> np.ndarray:
    try:
        raw = path.read_bytes()
        raw = gzip.decompress(raw) if path.suffix == ".gz" else raw
    except (OSError, EOFError) as error:
        raise InvalidInputError([Problem(f"cannot be read: {error}", file=str(path))]) from error
    axes = raw[3] if raw[:3] == bytes((0, 0, _IDX_BYTES)) and len(raw) > 3 else 0
    begin = 4 + 4 * axes
    if axes not in (_LABEL_AXES, _IMAGE_AXES) or len(raw) < begin:
        raise InvalidInputError([Problem("is not a file in MNIST's format", file=str(path))])
    shape = struct.unpack(f">{axes}I", raw[4:begin])
    if len(raw) - begin != int(np.prod(shape)) or 0 in shape:
        message = f"has {len(raw) - begin} numbers instead of {' x '.join(map(str, shape))}"
        raise InvalidInputError([Problem(message, file=str(path))])
    return np.frombuffer(raw, np.uint8, offset=begin).reshape(shape)
