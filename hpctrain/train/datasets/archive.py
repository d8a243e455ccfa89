"""Arrays of .npz files: mapped into memory when read, and written piece by piece.

Belongs here: the numbers. Does not belong here: heads (see `hpctrain.store.archives`), what the
arrays mean.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpctrain.store.archives import ArrayHead, read_heads


def open_archive(path: Path, columns: Iterable[str]) -> dict[str, np.ndarray]:
    """Some arrays of a file. Raises InvalidInputError when it is no .npz file.

    Uncompressed ones are not read but mapped, so that the ranks of a node share one copy.
    """
    heads = read_heads(path)
    return {name: _open_array(path, name, heads[name]) for name in columns}


def _open_array(path: Path, name: str, head: ArrayHead) -> np.ndarray:
    if head.offset is None or 0 in head.shape:
        with np.load(path, allow_pickle=False) as archive:
            return np.asarray(archive[name])
    mapped = np.memmap(
        path,
        dtype=np.dtype(head.dtype),
        mode="r",
        offset=head.offset,
        shape=head.shape,
        order="F" if head.fortran_order else "C",
    )
    return mapped.view(np.ndarray)  # a subclass of np.memmap checks itself with every access


@dataclass(frozen=True)
class Pieces:
    """An array that is written in pieces along its first axis."""

    dtype: np.dtype
    shape: tuple[int, ...]
    pieces: Iterable[np.ndarray]


def write_archive(path: Path, arrays: Mapping[str, np.ndarray | Pieces]) -> None:
    """An uncompressed .npz file: the same arrays give the same bytes.

    NumPy's own `savez` would need all of them in memory at once.
    """
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name, array in arrays.items():
            pieces = array if isinstance(array, Pieces) else _whole(array)
            # by its name alone: a ZipInfo has no time of day then
            with archive.open(f"{name}.npy", "w", force_zip64=True) as stream:
                fields = {
                    "descr": np.lib.format.dtype_to_descr(pieces.dtype),
                    "fortran_order": False,
                    "shape": pieces.shape,
                }
                np.lib.format.write_array_header_1_0(stream, fields)
                for piece in pieces.pieces:
                    stream.write(np.ascontiguousarray(piece, pieces.dtype).tobytes())


def _whole(array: np.ndarray) -> Pieces:
    return Pieces(array.dtype, array.shape, [array])


class Table:
    """Rows of one or several archives, one behind the other."""

    def __init__(self, archives: list[dict[str, np.ndarray]], counted: str) -> None:
        """`counted` is an array whose first axis counts rows."""
        self._archives = archives
        self._ends = np.cumsum([len(archive[counted]) for archive in archives])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def place(self, row: int) -> tuple[int, int]:
        """Number of the archive, and of the row in it."""
        number = int(np.searchsorted(self._ends, row, side="right"))
        begin = int(self._ends[number - 1]) if number else 0
        return number, row - begin

    def take(self, column: str, rows: np.ndarray) -> np.ndarray:
        """A copy of some rows of a column, in this order."""
        places = [self.place(int(row)) for row in rows]
        return np.stack([self._archives[number][column][row] for number, row in places])

    def whole(self, column: str) -> np.ndarray:
        """A column of all archives."""
        return np.concatenate([archive[column] for archive in self._archives])
