"""Distribute the files of a checkpoint over the ranks of a launch, which compare their digests.

Each file goes to exactly one rank: to the one that wrote it, which reads it anyway when it loads
the same layout, unless that rank would have much more to read than others. Every rank computes the
same distribution from the manifest alone, so no message is needed.

A manifest lists the files of all ranks. If each of R ranks parsed it and asked the file system
about every file, a start would cost R x R operations on the metadata server. So the supervisor,
which has verified the checkpoint just before, divides the files once and writes the shares into
one file with lines of equal length: a rank reads the head and its own line.

Belongs here: who reads what, and that file. Does not belong here: reading and comparing (see
`hpctrain.train.saving.digest_check`).
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from hpctrain.base.durable import replace_text
from hpctrain.records.manifest import MANIFEST_NAME, FileDigest, Manifest

SHARES_NAME = "resume-shares.jsonl"
# The head has no list: names, a layout, numbers. A longer one is not written.
_HEAD_BYTES = 4096
_SHA256_LENGTH = 64
# A rank keeps the files it wrote up to so many times an even share; a file cannot be divided.
_MOST_SHARES = 1.25


def files_of_rank(manifest: Manifest, rank: int, world_size: int) -> tuple[FileDigest, ...]:
    """The files whose digests `rank` of `world_size` compares, the largest first."""
    return deal(manifest, world_size)[rank]


def deal(manifest: Manifest, world_size: int) -> tuple[tuple[FileDigest, ...], ...]:
    """The files of each rank. Ranks of another number than the writers' get neighbouring files."""
    known = len(manifest.writers) == len(manifest.files)
    writers = manifest.writers if known else (-1,) * len(manifest.files)
    homes = [writer * world_size // max(manifest.world_size, 1) for writer in writers]
    return _dealt(list(zip(manifest.files, homes, strict=True)), world_size)


def even_share(files: Sequence[FileDigest], rank: int, world_size: int) -> tuple[FileDigest, ...]:
    """The same for files that no rank has at home."""
    return _dealt([(file, -1) for file in files], world_size)[rank]


def _dealt(
    files: Sequence[tuple[FileDigest, int]], world_size: int
) -> tuple[tuple[FileDigest, ...], ...]:
    """`files` with the rank that each should go to, -1 for any."""
    limit_bytes = _MOST_SHARES * sum(file.size_bytes for file, _ in files) / world_size
    dealt: list[list[FileDigest]] = [[] for _ in range(world_size)]
    bytes_of = [0] * world_size
    left: list[FileDigest] = []
    for file, home in sorted(files, key=lambda pair: (-pair[0].size_bytes, pair[0].name)):
        fits = 0 <= home < world_size and bytes_of[home] + file.size_bytes <= limit_bytes
        if fits:
            dealt[home].append(file)
            bytes_of[home] += file.size_bytes
        else:
            left.append(file)
    least_loaded = [(load, rank) for rank, load in enumerate(bytes_of)]
    heapq.heapify(least_loaded)
    for file in left:
        load, rank = heapq.heappop(least_loaded)
        dealt[rank].append(file)
        heapq.heappush(least_loaded, (load + file.size_bytes, rank))
    return tuple(
        tuple(sorted(files, key=lambda file: file.size_bytes, reverse=True)) for files in dealt
    )


# -- The file of shares, which the supervisor writes beside the checkpoint -----------------------


class SharesHead(BaseModel):
    """What the shares are of.

    `manifest` is the manifest without its files. `manifest_size_bytes` and `manifest_mtime_ns` are
    those of its file (stat(2)): a checkpoint that was saved again has others. Every line of a share
    has `line_bytes` bytes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    checkpoint: str
    world_size: int
    manifest: Manifest
    manifest_size_bytes: int
    manifest_mtime_ns: int
    line_bytes: int


class ResumeShare(BaseModel):
    """The files of one rank; `manifest` is that of the checkpoint, without its files."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: int
    manifest: Manifest
    files: tuple[FileDigest, ...]


class _ShareLine(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: int
    files: tuple[FileDigest, ...]


def write_shares(directory: Path, manifest: Manifest, world_size: int) -> bool:
    """Write the shares of `world_size` ranks in the checkpoint `directory` beside it.

    Returns False, and writes nothing, if the head would be too long. Raises OSError.
    """
    texts = [
        _ShareLine(rank=rank, files=files).model_dump_json()
        for rank, files in enumerate(deal(manifest, world_size))
    ]
    line_bytes = _SHA256_LENGTH + 2 + max(len(text.encode()) for text in texts)
    state = (directory / MANIFEST_NAME).stat()
    head = SharesHead(
        checkpoint=directory.name,
        world_size=world_size,
        manifest=manifest.model_copy(update={"files": (), "writers": ()}),
        manifest_size_bytes=state.st_size,
        manifest_mtime_ns=state.st_mtime_ns,
        line_bytes=line_bytes,
    ).model_dump_json()
    if len(head.encode()) >= _HEAD_BYTES:
        return False
    lines = [head.encode().ljust(_HEAD_BYTES - 1)]
    for text in texts:
        line = f"{hashlib.sha256(text.encode()).hexdigest()} {text}".encode()
        lines.append(line.ljust(line_bytes - 1))
    replace_text(directory.parent / SHARES_NAME, b"\n".join([*lines, b""]).decode())
    return True


def read_head(directory: Path) -> SharesHead | None:
    """The head of the shares if they are of the checkpoint `directory` as it is; None otherwise."""
    try:
        with (directory.parent / SHARES_NAME).open("rb", buffering=0) as stream:
            return _matching_head(directory, stream.read(_HEAD_BYTES))
    except OSError:
        return None


def read_share(directory: Path, rank: int, world_size: int) -> ResumeShare | None:
    """The share of `rank` in the checkpoint `directory`.

    None if there is none: nobody has written shares, they are of another checkpoint or for another
    number of ranks, or they are damaged. Then the manifest has to be read.
    """
    try:
        with (directory.parent / SHARES_NAME).open("rb", buffering=0) as stream:
            head = _matching_head(directory, stream.read(_HEAD_BYTES))
            if head is None or head.world_size != world_size:
                return None
            stream.seek(_HEAD_BYTES + rank * head.line_bytes)
            data = stream.read(head.line_bytes)
    except OSError:
        return None
    sha256, _, text = data.rstrip().partition(b" ")
    if hashlib.sha256(text).hexdigest().encode() != sha256:
        return None
    try:
        line = _ShareLine.model_validate_json(text)
    except ValidationError:
        return None
    if line.rank != rank:
        return None
    return ResumeShare(rank=rank, manifest=head.manifest, files=line.files)


def _matching_head(directory: Path, data: bytes) -> SharesHead | None:
    try:
        head = SharesHead.model_validate_json(data.rstrip())
    except ValidationError:
        return None
    state = (directory / MANIFEST_NAME).stat()
    known = head.checkpoint, head.manifest_size_bytes, head.manifest_mtime_ns
    found = directory.name, state.st_size, state.st_mtime_ns
    return head if known == found else None
