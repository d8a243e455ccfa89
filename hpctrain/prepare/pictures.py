"""Image folders: whether every image can be decoded, and the list of them.

Belongs here: shards of files to look at, and the list. Does not belong here: pixels for training
(see `hpctrain.train.datasets`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hpctrain.errors import InvalidInputError, Problem
from hpctrain.prepare.contents import Contents, Counts
from hpctrain.prepare.corpus import Corpus, Source
from hpctrain.prepare.tokens import missing
from hpctrain.train.datasets.archive import write_archive
from hpctrain.train.datasets.listing import Listing, list_images, listing_columns

_SHOWN = 20


def picture_corpus(listing: Listing, root: Path) -> Corpus:
    """The files as sources. Their contents are not read: names, sizes and times stand for them."""
    sources = []
    for name in listing.names:
        about = (root / name).stat()
        identity = f"{name} {about.st_size} {about.st_mtime_ns}"
        digest = hashlib.sha256(identity.encode()).hexdigest()
        source = Source(path=root / name, name=name, size_bytes=about.st_size, sha256=digest)
        sources.append(source)
    return Corpus(tuple(sources), (), 0, tuple(source.sha256 for source in sources))


def check_pictures(sources: Sequence[Source]) -> Contents:
    """Decode every image. Raises InvalidInputError with those that cannot be."""
    try:
        from PIL import Image
    except ImportError as error:
        raise missing(error, "data") from error
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
        raise InvalidInputError(problems[:_SHOWN])
    return Contents({"checked": np.arange(len(sources))}, Counts(documents=len(sources)))


def join_pictures(root: Path, expected: int, target: Path) -> int:
    """Write the list of files, and return their number.

    Raises InvalidInputError when files came or went meanwhile.
    """
    listing = list_images(root)
    if len(listing.names) != expected:
        hint = "start again when nobody writes to the input"
        changed = Problem("changed while its images were looked at", file=str(root), hint=hint)
        raise InvalidInputError([changed])
    write_archive(target, listing_columns(listing))
    return len(listing.names)
