"""The files of an image folder and their classes.

Belongs here: which files count, and in which order. Does not belong here: opening them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpctrain.errors import InvalidInputError, Problem
from hpctrain.store.prepared import IMAGE_SUFFIXES, class_directories, is_image


@dataclass(frozen=True)
class Listing:
    """Files of an image folder, by class and name; `names` are relative to the folder."""

    classes: tuple[str, ...]
    names: tuple[str, ...]
    labels: np.ndarray


def list_images(root: Path) -> Listing:
    """All images of `root/CLASS/...`, in the order of their names.

    Raises InvalidInputError for a class without images, or none at all.
    """
    try:
        classes = class_directories(root)
        found = [_images_of(root, name) for name in classes]
    except OSError as error:
        words = f"cannot be read: {error.strerror}"
        problem = Problem(words, str(root), node_dependent=True)
        raise InvalidInputError([problem]) from error
    empty = [name for name, files in zip(classes, found, strict=True) if not files]
    if empty or not classes:
        wrong = f"has no images in {', '.join(empty[:5])}" if classes else "has no directories"
        hint = f"images are DIRECTORY/CLASS/NAME with suffix {', '.join(IMAGE_SUFFIXES)}"
        raise InvalidInputError([Problem(wrong, str(root), hint=hint)])
    labels = np.repeat(np.arange(len(classes), dtype=np.int32), [len(files) for files in found])
    return Listing(tuple(classes), tuple(name for files in found for name in files), labels)


def _images_of(root: Path, name: str) -> list[str]:
    """Files of one class, deeper directories included."""
    return sorted(
        os.path.relpath(os.path.join(directory, file), root)
        for directory, _, files in os.walk(root / name, onerror=_raise)
        for file in files
        if is_image(file)
    )


def _raise(error: OSError) -> None:
    raise error


def listing_columns(listing: Listing) -> dict[str, np.ndarray]:
    """A listing as the arrays of format `images`."""
    encoded = [os.fsencode(name) for name in listing.names]
    return {
        "labels": listing.labels,
        "ends": np.cumsum([len(name) for name in encoded], dtype=np.int64),
        "names": np.frombuffer(b"".join(encoded), np.uint8),
    }
