"""Check from headers and small files whether a model can read a dataset of arrays or images.

The same checks run at submission and, in the job, before torch is imported. Belongs here: checks of
names, types, shapes and sidecars. Does not belong here: values in arrays, Megatron's .bin/.idx.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.records.archives import ArrayHead, read_heads
from hpctrain.records.datasets import COLUMNS, SamplesSidecar, npz_path, sidecar_path

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".pgm")
PREPARE = "`hpctrain data prepare --format {format}` makes it"


@dataclass(frozen=True)
class Expected:
    """What a model reads; `classes` is None unless it classifies, `side`: pixels per edge."""

    format: str
    seq_length: int
    vocab_size: int
    classes: int | None
    side: int


def problems_of(path: Path, expected: Expected) -> list[Problem]:
    """List everything that is wrong with one source; empty when the model can read it."""
    try:
        return _problems_of(path, expected)
    except OSError as error:  # a directory that is closed
        words = f"cannot be read: {error.strerror}"
        return [Problem(words, str(error.filename or path), node_dependent=True)]


def _problems_of(path: Path, expected: Expected) -> list[Problem]:
    if expected.format == "images" and path.is_dir():
        return list(_folder_problems(path, expected))
    file = npz_path(path)
    if not file.is_file():
        hint = PREPARE.format(format=expected.format)
        return [Problem("does not exist", str(file), hint=hint, node_dependent=True)]
    try:
        heads = read_heads(file)
    except InvalidInputError as error:
        return list(error.problems)
    wrong = list(_column_problems(heads, expected.format))
    if not wrong:
        wrong = [*_shape_problems(heads, expected), *_sidecar_problems(file, expected)]
    return [Problem(words, str(file)) for words in wrong]


def read_samples_sidecar(path: Path) -> SamplesSidecar | None:
    """What `data prepare` left beside an .npz file; None for data from elsewhere."""
    try:
        return SamplesSidecar.model_validate_json(sidecar_path(path).read_bytes())
    except (OSError, ValidationError):
        return None


def class_directories(root: Path) -> list[str]:
    """Names of the directories in an image folder, sorted: class 0 is the first.

    Raises OSError. Names that begin with a dot are left out.
    """
    with os.scandir(root) as entries:
        return sorted(one.name for one in entries if one.is_dir() and one.name[0] != ".")


def is_image(name: str) -> bool:
    """True if a file of this name counts in a folder of images."""
    return name.lower().endswith(IMAGE_SUFFIXES)


def _folder_problems(root: Path, expected: Expected) -> Iterator[Problem]:
    try:
        found = len(class_directories(root))
    except OSError as error:
        yield Problem(f"cannot be read: {error.strerror}", str(root), node_dependent=True)
        return
    if found == 0:
        hint = "images lie in one directory per class: DIRECTORY/CLASS/IMAGE"
        yield Problem("has no directories for classes", str(root), hint=hint)
    elif found > (expected.classes or 0):
        yield Problem(f"has {found} classes, the model {expected.classes}", str(root))


def _column_problems(heads: dict[str, ArrayHead], format: str) -> Iterator[str]:
    for name, (kinds, axes) in COLUMNS[format].items():
        head = heads.get(name)
        if head is None:
            wanted, found = ", ".join(COLUMNS[format]), ", ".join(heads) or "none"
            yield f"format {format} needs arrays {wanted}; found: {found}"
            return
        if head.kind not in kinds:
            yield f"array {name} has type {head.dtype}, which is not one for format {format}"
        if len(head.shape) not in axes:
            expected = " or ".join(map(str, axes))
            yield f"array {name} has {len(head.shape)} axes instead of {expected}"


def _shape_problems(heads: dict[str, ArrayHead], expected: Expected) -> Iterator[str]:
    columns = COLUMNS[expected.format]
    rows = {name: heads[name].rows for name in columns if name != "names"}
    first = next(iter(rows.values()))
    if first == 0:
        yield "has no samples"
    if set(rows.values()) != {first}:
        counts = ", ".join(f"{name} {count}" for name, count in rows.items())
        yield f"arrays have different numbers of samples: {counts}"
    if expected.format in ("packed", "examples"):
        wanted = heads["tokens"].shape
        if wanted[1] > expected.seq_length:
            yield f"samples have {wanted[1]} tokens, the model reads {expected.seq_length} at most"
        for name in columns:
            if len(heads[name].shape) == 2 and heads[name].shape != wanted:
                yield f"array {name} has shape {heads[name].shape}, tokens {wanted}"
    if expected.format == "arrays":
        yield from _pixel_problems(heads["x"], expected.side)


def _pixel_problems(x: ArrayHead, side: int) -> Iterator[str]:
    if len(x.shape) == 4 and x.shape[1] not in (1, 3):
        yield f"x has {x.shape[1]} colors instead of 1 or 3 (axes: sample, color, row, column)"
    if x.shape[-2:] != (side, side):
        found = f"{x.shape[-2]} x {x.shape[-1]}"
        yield f"images have {found} pixels, the model reads {side} x {side} (`model.image`)"
    if x.kind == "u" and x.dtype.lstrip("<>=|") != "u1":
        yield f"x has type {x.dtype}: integers from 0 to 255 are uint8"


def _sidecar_problems(file: Path, expected: Expected) -> Iterator[str]:
    sidecar = read_samples_sidecar(file)
    if sidecar is None:
        if expected.format == "images":
            yield f"has no {sidecar_path(file).name} beside it that says where the images are"
        return
    if sidecar.format != expected.format:
        yield f"was made as {sidecar.format}, not as {expected.format}"
    if sidecar.npz_bytes != file.stat().st_size:
        yield f"has {file.stat().st_size} bytes instead of {sidecar.npz_bytes}: it was changed"
    if (sidecar.vocab_size or 0) > expected.vocab_size:
        yield (
            f"was made with a vocabulary of {sidecar.vocab_size} tokens, the model has "
            f"{expected.vocab_size}"
        )
    if len(sidecar.classes) > (expected.classes or len(sidecar.classes)):
        yield f"has {len(sidecar.classes)} classes, the model {expected.classes}"
    if sidecar.directory is not None and not Path(sidecar.directory).is_dir():
        yield f"lists the images of {sidecar.directory}, which is not there"
