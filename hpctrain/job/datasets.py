"""Makes, describes and verifies datasets.

Belongs here: starting the program that makes a dataset (it needs megatron-core, this room must
not), and reading the head of Megatron's `.idx` file. Does not belong here: tokenizing, output,
making one on a cluster (see `hpctrain.data.on_slurm`).
"""

from __future__ import annotations

import hashlib
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

from pydantic import ValidationError

from hpctrain.base.errors import HpctrainError, InvalidInputError, Problem, UsageError
from hpctrain.records.datasets import (
    DatasetFailure,
    DatasetReport,
    DatasetRequest,
    DatasetSidecar,
    SamplesSidecar,
    bin_path,
    idx_path,
    npz_path,
    read_heads,
    read_samples_sidecar,
    sidecar_path,
)
from hpctrain.spec.document import Document

_PROGRAM = "hpctrain.data.making"
_OTHERWISE_GIVEN = ("output", "inputs", "suffixes", "force")  # not as --NAME=VALUE
# megatron/core/datasets/indexed_dataset.py: _INDEX_HEADER and _IndexWriter (magic, version,
# dtype code, number of sequences, number of document indices: one more than documents), then per
# sequence its length (int32) and byte offset (int64), then the document indices (int64) and, in
# multimodal datasets, one int8 per sequence. megatron-core writes the arrays in native order.
_HEAD = struct.Struct("<9sQBQQ")
_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_LENGTH = struct.Struct("=i")
_OFFSET = struct.Struct("=q")
# indexed_dataset.py: class DType, with the bytes of one token
_DTYPES = {
    1: ("uint8", 1),
    2: ("int8", 1),
    3: ("int16", 2),
    4: ("int32", 4),
    5: ("int64", 8),
    6: ("float64", 8),
    7: ("float32", 4),
    8: ("uint16", 2),
}


def dataset_command(request: DatasetRequest, stage: str | None = None) -> list[str]:
    """Build the program's argv. -P: text is often beside files named like Python modules."""
    argv = [*program(sys.executable), f"--output={request.output}"]
    argv += [f"--suffix={suffix}" for suffix in request.suffixes]
    given = request.model_dump(exclude_unset=True, exclude={*_OTHERWISE_GIVEN, "seq_length"})
    given |= {"seq": request.seq_length, "classes": ",".join(request.classes) or None}
    given |= {"stage": stage}
    argv += [
        f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value is not None
    ]
    argv += ["--force"] if request.force else []
    return [*argv, "--", *map(str, request.inputs)]


def program(python: str) -> list[str]:
    """Build the command that starts the data program."""
    return [python, "-P", "-m", _PROGRAM, "--json"]


def prepare_dataset(request: DatasetRequest, *, timeout_seconds: float = 86400.0) -> DatasetReport:
    """Make a dataset on this machine; progress goes to stderr, one line per step.

    Raises UsageError, InvalidInputError (a wrong input, or another dataset in the way), and
    HpctrainError when the program fails otherwise or exceeds the time limit.
    """
    answer = run_program(dataset_command(request), request.output, timeout_seconds)
    return DatasetReport.model_validate_json(answer)


def run_program(command: list[str], output: Path, timeout_seconds: float) -> bytes:
    """Run the data program and return the JSON that it prints. Raises as `prepare_dataset` does."""
    try:
        ended = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, timeout=timeout_seconds
        )
    except subprocess.TimeoutExpired as error:
        raise HpctrainError(
            f"preparing {output} was stopped after {timeout_seconds:g} seconds",
            hint="nothing was published; give it more time or less text",
        ) from error
    if ended.returncode == 0:
        return ended.stdout
    if ended.returncode < 0:
        raise HpctrainError(
            f"data preparation was killed by {signal.Signals(-ended.returncode).name}",
            hint="SIGKILL often means that the machine is out of memory",
        )
    try:
        failure = DatasetFailure.model_validate_json(ended.stdout)
    except ValidationError:
        raise HpctrainError(
            f"data preparation ended with exit code {ended.returncode}; its messages are above"
        ) from None
    if failure.exit_code == InvalidInputError.exit_code:
        raise InvalidInputError(
            [
                Problem(entry.message, file=entry.file, line=entry.line, hint=entry.hint)
                for entry in failure.problems
            ]
        )
    message = "\n".join(entry.message for entry in failure.problems)
    kind = UsageError if failure.exit_code == UsageError.exit_code else HpctrainError
    raise kind(message, hint=failure.problems[0].hint if failure.problems else None)


class DatasetDescription(Document):
    """The head of `PREFIX.idx`; `sidecar` is what `prepare_dataset` wrote beside it."""

    prefix: str
    documents: int
    sequences: int
    tokens: int
    dtype: str
    bin_bytes: int
    idx_bytes: int
    sidecar: DatasetSidecar | None


class SamplesDescription(Document):
    """The heads in `PREFIX.npz`: type and shape of each array."""

    prefix: str
    arrays: dict[str, str]
    npz_bytes: int
    sidecar: SamplesSidecar | None


def describe_dataset(prefix: Path) -> DatasetDescription | SamplesDescription:
    """Read the head and the ends of `PREFIX.idx`, or the heads of arrays.

    This takes as long for a terabyte as for a kilobyte. Raises InvalidInputError when a
    file is missing, is not Megatron's or no archive, or the two do not belong together by size.
    """
    try:
        if npz_path(prefix).exists() and not idx_path(prefix).exists():
            return _describe_samples(prefix)
        for path in (idx_path(prefix), bin_path(prefix)):
            if path.exists() and not path.is_file():
                raise InvalidInputError([Problem("is not a file", file=str(path))])
        idx_bytes = idx_path(prefix).stat().st_size
        with bin_path(prefix).open("rb") as stream:  # closed files have sizes, too
            bin_bytes = os.fstat(stream.fileno()).st_size
        dtype_code, sequences, boundaries = _read_head(idx_path(prefix), idx_bytes)
        dtype, token_bytes = _DTYPES[dtype_code]
        tokens = 0  # up to the end of the last sequence
        if sequences:
            lengths_end = _HEAD.size + sequences * _LENGTH.size
            with idx_path(prefix).open("rb") as stream:
                stream.seek(lengths_end - _LENGTH.size)
                (length,) = _LENGTH.unpack(stream.read(_LENGTH.size))
                stream.seek(lengths_end + (sequences - 1) * _OFFSET.size)
                (offset_bytes,) = _OFFSET.unpack(stream.read(_OFFSET.size))
            tokens = int(offset_bytes) // token_bytes + int(length)
    except OSError as error:
        hint = "give the path without .bin or .idx" if prefix.suffix in (".bin", ".idx") else None
        problem = Problem(f"cannot be read: {error.strerror}", file=str(error.filename), hint=hint)
        raise InvalidInputError([problem]) from error
    if tokens * token_bytes != bin_bytes:
        message = f"has {bin_bytes} bytes, but the .idx is of {tokens * token_bytes} bytes"
        hint = "the two files are not of one dataset, or the .bin is cut off"
        raise InvalidInputError([Problem(message, file=str(bin_path(prefix)), hint=hint)])
    return DatasetDescription(
        prefix=str(prefix),
        documents=boundaries - 1,
        sequences=sequences,
        tokens=tokens,
        dtype=dtype,
        bin_bytes=bin_bytes,
        idx_bytes=idx_bytes,
        sidecar=_read_sidecar(prefix),
    )


def _describe_samples(prefix: Path) -> SamplesDescription:
    path = npz_path(prefix)
    return SamplesDescription(
        prefix=str(prefix),
        arrays={
            name: f"{head.dtype} {' x '.join(map(str, head.shape))}"
            for name, head in read_heads(path).items()
        },
        npz_bytes=path.stat().st_size,
        sidecar=read_samples_sidecar(path),
    )


class VerifiedDataset(Document):
    """A dataset whose `files` are unchanged since it was made."""

    prefix: str
    files: tuple[str, ...]


def verify_dataset(prefix: Path) -> VerifiedDataset:
    """Read a whole dataset, and compare it with the digests from when it was made.

    Raises InvalidInputError for files that are missing or changed, and for a dataset without
    digests.
    """
    samples, tokens = read_samples_sidecar(npz_path(prefix)), _read_sidecar(prefix)
    expected: dict[Path, str] = {}
    if samples is not None:
        expected[npz_path(prefix)] = samples.npz_sha256
    elif tokens is not None and tokens.bin_sha256 is not None and tokens.idx_sha256 is not None:
        expected = {bin_path(prefix): tokens.bin_sha256, idx_path(prefix): tokens.idx_sha256}
    if not expected:
        if not any(path.is_file() for path in (idx_path(prefix), npz_path(prefix))):
            hint = f"neither {idx_path(prefix).name} nor {npz_path(prefix).name} is there"
            raise InvalidInputError([Problem("does not exist", file=str(prefix), hint=hint)])
        hint = "datasets of older versions and of others have none; prepare it again"
        problem = Problem("has no digests to compare with", file=str(prefix), hint=hint)
        raise InvalidInputError([problem])
    problems = []
    for path, digest in expected.items():
        try:
            with path.open("rb") as stream:
                found = hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            problem = Problem(f"cannot be read: {error.strerror}", file=str(path))
            raise InvalidInputError([problem]) from error
        if found != digest:
            problems.append(Problem("has changed since the dataset was made", file=str(path)))
    if problems:
        raise InvalidInputError(problems)
    return VerifiedDataset(prefix=str(prefix), files=tuple(path.name for path in expected))


def _read_head(path: Path, idx_bytes: int) -> tuple[int, int, int]:
    """Read type code, number of sequences and of document indices. Raises InvalidInputError."""
    with path.open("rb") as stream:
        raw = stream.read(_HEAD.size)
    if len(raw) < _HEAD.size or not raw.startswith(_MAGIC):
        raise _not_an_index(path, "is not a Megatron index (its first bytes are not MMIDIDX)")
    _, version, dtype_code, sequences, boundaries = _HEAD.unpack(raw)
    if version != _VERSION or dtype_code not in _DTYPES:
        raise _not_an_index(path, f"has unknown version {version} or type code {dtype_code}")
    least = _HEAD.size + sequences * (_LENGTH.size + _OFFSET.size) + boundaries * _OFFSET.size
    if idx_bytes not in (least, least + sequences) or boundaries < 1:
        raise _not_an_index(path, f"has {idx_bytes} bytes instead of {least}: it is cut off")
    return dtype_code, sequences, boundaries


def _not_an_index(path: Path, message: str) -> InvalidInputError:
    return InvalidInputError([Problem(message, file=str(path))])


def _read_sidecar(prefix: Path) -> DatasetSidecar | None:
    try:
        return DatasetSidecar.model_validate_json(sidecar_path(prefix).read_bytes())
    except (OSError, ValidationError):
        return None
