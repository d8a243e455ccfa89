"""Read arrays of .npz files by memory mapping, and write array files piece by piece or atomically.

Belongs here: array data. Does not belong here: headers (see `hpctrain.records.datasets`), the
meaning of the arrays.
"""

from __future__ import annotations

import contextlib
import functools
import os
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.records.datasets import read_heads


def open_archive(path: Path, columns: Iterable[str]) -> dict[str, np.ndarray]:
    """Open some arrays of a file. Raises InvalidInputError when it is not an .npz file.

    Uncompressed arrays are mapped, so that the ranks of a node share one copy.
    """
    heads = read_heads(path)
    arrays: dict[str, np.ndarray] = {}
    for name in columns:
        head = heads[name]
        if head.offset is None or 0 in head.shape:
            with np.load(path, allow_pickle=False) as archive:
                arrays[name] = np.asarray(archive[name])
            continue
        mapped = np.memmap(
            path,
            dtype=np.dtype(head.dtype),
            mode="r",
            offset=head.offset,
            shape=head.shape,
            order="F" if head.fortran_order else "C",
        )
        arrays[name] = mapped.view(np.ndarray)  # np.memmap itself has overhead at every access
    return arrays


@dataclass(frozen=True)
class Pieces:
    """An array to be written in pieces along its first axis."""

    dtype: np.dtype
    shape: tuple[int, ...]
    pieces: Iterable[np.ndarray]


def write_archive(path: Path, arrays: Mapping[str, np.ndarray | Pieces]) -> None:
    """Write an uncompressed .npz file; the same arrays give the same bytes.

    NumPy's own `savez` needs all arrays in memory at once.
    """
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name, array in arrays.items():
            pieces = array
            if not isinstance(pieces, Pieces):
                pieces = Pieces(pieces.dtype, pieces.shape, [pieces])
            # opened by name, so that the entry has no time of day
            with archive.open(f"{name}.npy", "w", force_zip64=True) as stream:
                fields = {
                    "descr": np.lib.format.dtype_to_descr(pieces.dtype),
                    "fortran_order": False,
                    "shape": pieces.shape,
                }
                np.lib.format.write_array_header_1_0(stream, fields)
                for piece in pieces.pieces:
                    stream.write(np.ascontiguousarray(piece, pieces.dtype).tobytes())


class ArchiveTable:
    """The rows of one or several archives, concatenated."""

    def __init__(self, archives: list[dict[str, np.ndarray]], counted: str) -> None:
        """`counted` is an array whose first axis counts rows."""
        self._archives = archives
        self._ends = np.cumsum([len(archive[counted]) for archive in archives])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def place(self, row: int) -> tuple[int, int]:
        """Return the index of the archive, and of the row in it."""
        number = int(np.searchsorted(self._ends, row, side="right"))
        begin = int(self._ends[number - 1]) if number else 0
        return number, row - begin

    def take(self, column: str, rows: np.ndarray) -> np.ndarray:
        """Copy some rows of a column, in this order."""
        places = [self.place(int(row)) for row in rows]
        return np.stack([self._archives[number][column][row] for number, row in places])


# -- Make megatron-core write its dataset index files atomically ---------------------------------
# megatron-core caches indexes with `numpy.save`, which writes in place, and takes any existing
# file for a complete one (gpt_dataset.py, blended_dataset.py). A launch that ends while writing
# would leave a file that no later launch can read.


@contextlib.contextmanager
def complete_files() -> Iterator[None]:
    """Within the block, make `numpy.save` to a path replace the file atomically."""
    save = np.save

    @functools.wraps(save)
    def save_completely(file: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(file, str | os.PathLike):
            save(file, *args, **kwargs)
            return
        path = Path(f"{os.fspath(file).removesuffix('.npy')}.npy")  # as numpy.save names it
        unfinished = path.with_name(f".{path.name}.{os.getpid()}.npy")
        try:
            save(unfinished, *args, **kwargs)
            os.replace(unfinished, path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise

    np.save = save_completely
    try:
        yield
    finally:
        np.save = save
