"""The sidecar of a prepared dataset, `PREFIX.json`, and the report of the program that writes it.

Tokens for Megatron are a pair `PREFIX.bin` and `PREFIX.idx`; all other formats are one file of
arrays, `PREFIX.npz`, whose arrays `COLUMNS` names. Belongs here: these documents, which
`hpctrain.data.making` writes and `hpctrain.job` reads. Does not belong here: Megatron's
own `.bin`/`.idx` format, tokenizing.
"""

from __future__ import annotations

import ast
import os
import struct
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hpctrain.base.errors import InvalidInputError, Problem

END_OF_DOCUMENT = "<|endoftext|>"
NPZ_SUFFIX = ".npz"
ArrayFormat = Literal["packed", "examples", "images", "arrays"]
DatasetFormat = Literal["tokens", ArrayFormat]
Builtin = Literal["stdlib", "digits"]

# Format -> its arrays -> (kinds of NumPy's types, number of axes). The first axis counts samples.
COLUMNS: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {
    # tokens of several texts; 1 where the token that follows is learned; positions in each text
    "packed": {"tokens": ("ui", (2,)), "learned": ("ui", (2,)), "positions": ("ui", (2,))},
    # tokens with padding behind them; how many are no padding; the class
    "examples": {"tokens": ("ui", (2,)), "lengths": ("ui", (1,)), "labels": ("ui", (1,))},
    # the class; where the name of a file ends within `names`, which are relative to the sidecar's
    # `directory` and in UTF-8
    "images": {"labels": ("ui", (1,)), "ends": ("ui", (1,)), "names": ("u", (1,))},
    # pixels [sample, side, side] or [sample, colors, side, side], integers 0 to 255, or floating
    # point from 0 to 1; the class
    "arrays": {"x": ("uf", (3, 4)), "y": ("ui", (1,))},
}


def bin_path(prefix: Path) -> Path:
    """`PREFIX.bin`: the tokens. Appended, not replaced, since a prefix may contain dots."""
    return prefix.with_name(prefix.name + ".bin")


def idx_path(prefix: Path) -> Path:
    """`PREFIX.idx`: where documents and sequences begin."""
    return prefix.with_name(prefix.name + ".idx")


def npz_path(prefix: Path) -> Path:
    """`PREFIX.npz`, whether the suffix is given or not."""
    if prefix.suffix == NPZ_SUFFIX:
        return prefix
    return prefix.with_name(prefix.name + NPZ_SUFFIX)


def sidecar_path(prefix: Path) -> Path:
    """`PREFIX.json`: written last, so it stands for a complete dataset."""
    name = prefix.name.removesuffix(NPZ_SUFFIX)
    return prefix.with_name(name + ".json")


class DatasetDocument(BaseModel):
    """Base of the documents about datasets."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class DatasetRequest(DatasetDocument):
    """The dataset to make; equal to the options of `python -m hpctrain.data.making`.

    Either `inputs` (files and directories) or `builtin` (`stdlib`: source of Python's standard
    library, `digits`: scikit-learn's). `vocab_size` includes the end of the document, whose id is
    `vocab_size - 1`. `seq_length` is the tokens of a sample, `shard_bytes` about the text of a
    shard, `max_bytes` the most text that is read. None or empty: not given.
    """

    output: Path
    inputs: tuple[Path, ...] = ()
    builtin: Builtin | None = None
    format: DatasetFormat = Field(
        default_factory=lambda given: "arrays" if given["builtin"] == "digits" else "tokens"
    )
    suffixes: tuple[str, ...] = ()
    max_bytes: int | None = None
    vocab_size: int | None = None
    tokenizer: Path | None = None
    tokenizer_output: Path | None = None
    field: str | None = None
    seq_length: int | None = None
    chat_template: Path | None = None
    classes: tuple[str, ...] = ()
    workers: int = 1
    shard_bytes: int = 64 << 20
    force: bool = False


class DatasetSidecar(DatasetDocument):
    """What lies in `PREFIX.bin` and `PREFIX.idx`, and what it was made from.

    With a tokenizer of our own `end_of_document_id` is `vocab_size - 1`: Megatron's null
    tokenizer, which the trainer uses, is made with `vocab_size - 1` ordinary tokens and ends
    documents with the id after the last one
    (megatron/core/tokenizers/text/libraries/null_tokenizer.py). `sources_sha256` is the SHA-256
    over the SHA-256 of every file's bytes, in document order; `request_sha256` adds the options,
    so that equal values mean equal files. `tokenizer` is relative to the sidecar if both lie in
    one directory. Sidecars of older versions have no `bin_sha256` and `idx_sha256`.
    """

    schema_version: Literal[1] = 1
    documents: int
    tokens: int
    dtype: str
    text_bytes: int
    vocab_size: int
    end_of_document: str
    end_of_document_id: int
    tokenizer: str
    tokenizer_sha256: str
    sources_sha256: str
    request_sha256: str
    bin_bytes: int
    idx_bytes: int
    bin_sha256: str | None = None
    idx_sha256: str | None = None


class SamplesSidecar(DatasetDocument):
    """What lies in `PREFIX.npz`; the digests are as in `DatasetSidecar`.

    `tokens` are those that are no padding, `learned` those of them that a loss is computed for;
    `shortened` samples were longer than `seq_length`, `dropped` ones had nothing to learn.
    `classes` are names by number. `directory` is where the names of image files begin.
    """

    schema_version: Literal[1] = 1
    format: ArrayFormat
    samples: int
    classes: tuple[str, ...] = ()
    seq_length: int | None = None
    tokens: int = 0
    learned: int = 0
    shortened: int = 0
    dropped: int = 0
    vocab_size: int | None = None
    tokenizer: str | None = None
    tokenizer_sha256: str | None = None
    directory: str | None = None
    sources_sha256: str
    request_sha256: str
    npz_bytes: int
    npz_sha256: str


AnySidecar = DatasetSidecar | SamplesSidecar


class SkippedFile(DatasetDocument):
    """A file that was found but is not in the dataset."""

    name: str
    reason: str


class DatasetReport(DatasetDocument):
    """What `prepare_data` did. `over_budget_files`: left out because of the byte budget."""

    schema_version: Literal[1] = 1
    prefix: str
    status: Literal["written", "unchanged"]
    dataset: AnySidecar
    skipped: tuple[SkippedFile, ...]
    over_budget_files: int


class ShardsReport(DatasetDocument):
    """What `prepare_data` says where it did not make the dataset, but its plan or some shards."""

    schema_version: Literal[1] = 1
    directory: str
    shards: int
    missing: int


class ReportedProblem(DatasetDocument):
    """One problem of the input, as in `hpctrain.base.errors.Problem`."""

    message: str
    file: str | None = None
    line: int | None = None
    hint: str | None = None


class DatasetFailure(DatasetDocument):
    """Printed instead of a report when the program ends with `exit_code`."""

    schema_version: Literal[1] = 1
    exit_code: int
    problems: tuple[ReportedProblem, ...]


# -- Check from headers and small files whether a model can read a dataset of arrays or images --
# The same checks run at submission and, in the job, before torch is imported.


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


# -- The heads of an `.npz` file ----------------------------------------------------------------
# The heads of an `.npz` file: which arrays it has, of which type and shape, and where they begin.
# An .npz file is a zip archive of .npy files (numpy/lib/_format_impl.py), uncompressed unless
# somebody asked for it, so its arrays can be mapped into memory.


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
