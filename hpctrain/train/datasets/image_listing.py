"""List the files of an image folder and their classes, in a fixed order."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.records.datasets import IMAGE_SUFFIXES, class_directories, is_image


@dataclass(frozen=True)
class ImageListing:
    """Files of an image folder, by class and name; `names` are relative to the folder."""

    classes: tuple[str, ...]
    names: tuple[str, ...]
    labels: np.ndarray


def list_images(root: Path) -> ImageListing:
    """List all images of `root/CLASS/...`, by class and name, subdirectories included.

    Raises InvalidInputError for a class without images, or no classes at all.
    """

    def fail(error: OSError) -> None:
        raise error

    by_class: list[list[str]] = []
    try:
        classes = class_directories(root)
        for name in classes:
            files = [
                os.path.relpath(os.path.join(directory, file), root)
                for directory, _, files in os.walk(root / name, onerror=fail)
                for file in files
                if is_image(file)
            ]
            by_class.append(sorted(files))
    except OSError as error:
        message = f"cannot be read: {error.strerror}"
        problem = Problem(message, str(root), node_dependent=True)
        raise InvalidInputError([problem]) from error
    empty = [name for name, files in zip(classes, by_class, strict=True) if not files]
    if empty or not classes:
        message = f"has no images in {', '.join(empty[:5])}" if classes else "has no directories"
        hint = f"images are DIRECTORY/CLASS/NAME with suffix {', '.join(IMAGE_SUFFIXES)}"
        raise InvalidInputError([Problem(message, str(root), hint=hint)])
    labels = np.repeat(np.arange(len(classes), dtype=np.int32), [len(files) for files in by_class])
    return ImageListing(tuple(classes), tuple(name for files in by_class for name in files), labels)


def listing_columns(listing: ImageListing) -> dict[str, np.ndarray]:
    """Convert a listing to the arrays of format `images`."""
    encoded = [os.fsencode(name) for name in listing.names]
    return {
        "labels": listing.labels,
        "ends": np.cumsum([len(name) for name in encoded], dtype=np.int64),
        "names": np.frombuffer(b"".join(encoded), np.uint8),
    }
