"""Folders of images: which files there are, found once, and reading them.

The list of files is an archive: what `data prepare` made, or what rank 0 writes into the index
cache at a run's first start, named by the folder and the times of its directories. Belongs here:
the list, and decoding. Does not belong here: what becomes of the pixels (see `pixels`).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from hpctrain.store.prepared import class_directories
from hpctrain.train.datasets.archive import Table, write_archive
from hpctrain.train.datasets.batches import Pictures
from hpctrain.train.datasets.listing import list_images, listing_columns
from hpctrain.train.datasets.pixels import Look
from hpctrain.train.faults import DataError


@dataclass(frozen=True)
class ImageRows:
    """Files below one directory for each archive of the table."""

    table: Table
    names: Sequence[tuple[np.ndarray, np.ndarray]]
    roots: Sequence[Path]
    look: Look

    def __len__(self) -> int:
        return len(self.table)

    def path(self, row: int) -> Path:
        """The file of a row."""
        number, place = self.table.place(row)
        blob, ends = self.names[number]
        begin = int(ends[place - 1]) if place else 0
        return self.roots[number] / os.fsdecode(blob[begin : int(ends[place])].tobytes())

    def read(self, rows: np.ndarray, samples: range, *, training: bool) -> Pictures:
        """Decode and cut out; the same file gives the same pixels with the same Pillow."""
        shown = [
            self._decode(self.path(int(row)), sample, training)
            for row, sample in zip(rows, samples, strict=True)
        ]
        labels = torch.from_numpy(self.table.take("labels", rows).astype(np.int64))
        return Pictures(torch.from_numpy(np.stack(shown)), labels, samples)

    def _decode(self, path: Path, sample: int, training: bool) -> np.ndarray:
        from PIL import Image

        try:
            with Image.open(path) as image:
                return self.look.of_image(image, sample if training else None)
        except MemoryError:
            raise
        # decoders raise all kinds of exceptions at a damaged file: SyntaxError, IndexError, ...
        except Exception as error:
            raise DataError(f"sample {sample}: {path} cannot be read: {error}") from error


def listed(root: Path, cache: Path) -> Path:
    """The archive that lists `root`, made if it is not there; one process calls this.

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
