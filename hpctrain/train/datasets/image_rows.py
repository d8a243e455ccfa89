"""Read and decode the images of a folder by a list of its files.

The list is an archive: made by `data prepare`, or written by rank 0 into the index cache at a run's
first start, named by the folder and the times of its directories. Belongs here: the list, and
decoding. Does not belong here: augmentation and normalization (see `image_transforms`).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from hpctrain.records.datasets import class_directories
from hpctrain.train.datasets.batches import ImageBatch
from hpctrain.train.datasets.image_listing import list_images, listing_columns
from hpctrain.train.datasets.image_transforms import ImageTransform
from hpctrain.train.datasets.npz_arrays import ArchiveTable, write_archive
from hpctrain.train.faults import DataError


@dataclass(frozen=True)
class ImageRows:
    """Image files listed by the archives of `table`, below one root directory per archive."""

    table: ArchiveTable
    names: Sequence[tuple[np.ndarray, np.ndarray]]
    roots: Sequence[Path]
    transform: ImageTransform

    def __len__(self) -> int:
        return len(self.table)

    def path(self, row: int) -> Path:
        """Return the file of a row."""
        number, place = self.table.place(row)
        blob, ends = self.names[number]
        begin = int(ends[place - 1]) if place else 0
        return self.roots[number] / os.fsdecode(blob[begin : int(ends[place])].tobytes())

    def read(self, rows: np.ndarray, samples: range, *, training: bool) -> ImageBatch:
        """Decode and transform; the same file gives the same pixels with the same Pillow."""
        from PIL import Image

        pixels = []
        for row, sample in zip(rows, samples, strict=True):
            path = self.path(int(row))
            try:
                with Image.open(path) as image:
                    pixels.append(self.transform.of_image(image, sample if training else None))
            except MemoryError:
                raise
            # decoders raise all kinds of exceptions at a damaged file: SyntaxError, IndexError, ...
            except Exception as error:
                raise DataError(f"sample {sample}: {path} cannot be read: {error}") from error
        labels = torch.from_numpy(self.table.take("labels", rows).astype(np.int64))
        return ImageBatch(torch.from_numpy(np.stack(pixels)), labels, samples)


def list_into_cache(root: Path, cache: Path) -> Path:
    """Return the archive that lists `root`, writing it if needed; only one process calls this.

    Raises InvalidInputError as `list_images` does.
    """
    times = [str(os.stat(root / name).st_mtime_ns) for name in ["", *class_directories(root)]]
    identity = "\n".join([str(root.absolute()), *times])
    path = cache / f"images-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.npz"
    if not path.exists():
        columns = listing_columns(list_images(root))
        cache.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}-{os.getpid()}")
        write_archive(unfinished, columns)
        os.replace(unfinished, path)
    return path
