"""The heads of an `.npz` file: which arrays it has, of which type and shape, and where they begin.

An .npz file is a zip archive of .npy files (numpy/lib/_format_impl.py), uncompressed unless
somebody asked for it, so its arrays can be mapped into memory. Belongs here: reading heads, for
which NumPy is not needed. Does not belong here: the numbers (see `hpctrain.train.datasets`).
"""

from __future__ import annotations

import ast
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from hpctrain.base.errors import InvalidInputError, Problem

_MAGIC = b"\x93NUMPY"
# PKZIP's appnote.txt, 4.3.7: the local head of a file, of which the lengths of name and extra
# field come last; both may be others than in the central directory
_LOCAL_HEAD = struct.Struct("<26xHH")
_SUFFIX = ".npy"


@dataclass(frozen=True)
class ArrayHead:
    """One array. `dtype` is NumPy's word, such as `<u2`; `offset` is None where it is compressed.

    `offset`: bytes from the beginning of the archive to the first number.
    """

    dtype: str
    shape: tuple[int, ...]
    fortran_order: bool
    offset: int | None

    @property
    def kind(self) -> str:
        """NumPy's letter: `u` and `i` are integers, `f` is floating point."""
        return self.dtype.lstrip("<>=|")[:1]

    @property
    def rows(self) -> int:
        """Length of the first axis."""
        return self.shape[0] if self.shape else 0


def read_heads(path: Path) -> dict[str, ArrayHead]:
    """The arrays by name. Raises InvalidInputError when the file is missing or no .npz file."""
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as raw:
            names = [one for one in archive.infolist() if one.filename.endswith(_SUFFIX)]
            return {one.filename.removesuffix(_SUFFIX): _head(archive, raw, one) for one in names}
    except OSError as error:
        words = f"cannot be read: {error.strerror or error}"
        problem = Problem(words, file=str(path), node_dependent=True)
        raise InvalidInputError([problem]) from error
    except (zipfile.BadZipFile, ValueError, SyntaxError, EOFError, struct.error) as error:
        hint = "numpy.savez writes one; a file that was cut off lacks the directory at its end"
        problem = Problem(f"is no .npz file, or cut off: {error}", file=str(path), hint=hint)
        raise InvalidInputError([problem]) from error


def _head(archive: zipfile.ZipFile, raw: IO[bytes], member: zipfile.ZipInfo) -> ArrayHead:
    """Raises ValueError for what is no .npy file."""
    with archive.open(member) as stream:
        words, head_bytes = _npy_head(stream)
    fields = ast.literal_eval(words)
    dtype, shape = fields["descr"], fields["shape"]
    if not isinstance(dtype, str) or not all(isinstance(length, int) for length in shape):
        raise ValueError(f"{member.filename} has elements of several parts")
    offset = None
    if member.compress_type == zipfile.ZIP_STORED:
        raw.seek(member.header_offset)
        name_bytes, extra_bytes = _LOCAL_HEAD.unpack(raw.read(_LOCAL_HEAD.size))
        offset = member.header_offset + _LOCAL_HEAD.size + name_bytes + extra_bytes + head_bytes
    return ArrayHead(dtype, tuple(shape), bool(fields["fortran_order"]), offset)


def _npy_head(stream: IO[bytes]) -> tuple[str, int]:
    """The text of an .npy file's head, and the bytes before the first number."""
    start = stream.read(len(_MAGIC) + 2)
    if start[: len(_MAGIC)] != _MAGIC:
        raise ValueError("an array in it does not begin like one")
    length = struct.Struct("<H" if start[len(_MAGIC)] == 1 else "<I")
    (text_bytes,) = length.unpack(stream.read(length.size))
    return stream.read(text_bytes).decode("latin-1"), len(start) + length.size + text_bytes
