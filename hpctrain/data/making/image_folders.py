"""Format `images`: check that every image of a folder can be decoded, and write their list.

Belongs here: shards of files to decode, and the list. Does not belong here: pixels for training
(see `hpctrain.train.datasets`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.data.making.corpus import Corpus, Source
from hpctrain.data.making.optional_packages import missing_package
from hpctrain.data.making.shard_contents import DocumentCounts, ShardContents
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
