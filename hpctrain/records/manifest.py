"""The manifest: what a complete checkpoint consists of, and checking that it is all there.

A checkpoint directory counts only when it holds `manifest.json` and everything that the manifest
lists is on disk: same names, same sizes and, in a deep check, same SHA-256. megatron-core does not
notice flipped bytes in a shard, so the digests are ours. They are written by the ranks that wrote
the files, so that no single process has to read the whole checkpoint. The manifest carries a digest
of its own list, so that a list that lost entries is not taken for a smaller checkpoint.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from hpctrain.base.durable import replace_text
from hpctrain.base.formats import refuse_newer

MANIFEST_NAME = "manifest.json"
DIGESTS_DIRECTORY = "digests"
_NAME = re.compile(r"iter_(\d{7,})")
_PARTIAL_NAME = re.compile(r"iter_\d{7,}\.partial-e(\d{6,})")
_SAVING_NAME = re.compile(r"\.saving-e(\d{6,})")
_READ_BYTES = 1 << 22
# Files that torch.distributed.checkpoint and megatron-core look up by name when they load: one that
# is there and not listed was listed once (torch/distributed/checkpoint/filesystem.py).
_NEEDED_TO_LOAD = re.compile(r"\.metadata|__\d+_\d+\.distcp")


class FileDigest(BaseModel):
    """One file of a checkpoint: name relative to its directory, size in bytes, SHA-256."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    size_bytes: int
    sha256: str


class Manifest(BaseModel):
    """Everything that says what a checkpoint is.

    `file_count` and `list_sha256` seal the list of files (see `sealed`); manifests of older
    versions have neither. `writers[i]` is the rank that wrote `files[i]`, empty if that is not
    known: ranks that compare digests share their work by it. `library_version` is the version of
    the engine's library that has saved it, None where no resume depends on it. `consumed_samples`:
    None where a trainer of its own has not told.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    schema_version: Literal[1] = 1
    step: int
    epoch: int
    engine: str
    layout: str
    world_size: int
    consumed_samples: int | None
    time: float
    file_count: int | None = None
    list_sha256: str | None = None
    writers: tuple[int, ...] = ()
    library_version: str | None = None
    files: tuple[FileDigest, ...]

    @property
    def total_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    def sealed(self) -> Manifest:
        """The same manifest with the digest of its own list, as it is written to disk."""
        seal = {"file_count": len(self.files), "list_sha256": self._list_sha256()}
        return self.model_copy(update=seal)

    def why_not_whole(self) -> str | None:
        """What shows that the manifest itself has changed since it was written; None if nothing."""
        if self.file_count is not None and self.file_count != len(self.files):
            return f"{MANIFEST_NAME} lists {len(self.files)} of {self.file_count} files"
        if self.list_sha256 is not None and self.list_sha256 != self._list_sha256():
            return f"{MANIFEST_NAME} is not as it was written (its own SHA-256 differs)"
        return None

    def _list_sha256(self) -> str:
        """Over what decides what is loaded, in a text that later versions can make, too."""
        head = f"{self.step} {self.epoch} {self.world_size} {self.consumed_samples}"
        lines = (f"{file.sha256} {file.size_bytes} {file.name}" for file in self.files)
        return hashlib.sha256("\n".join([head, *lines]).encode()).hexdigest()


class RankDigests(BaseModel):
    """The files that one rank has written."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    files: tuple[FileDigest, ...]


def checkpoint_name(step: int) -> str:
    """`iter_0000012`: Megatron-LM's name of a checkpoint directory."""
    return f"iter_{step:07d}"


def partial_name(step: int, epoch: int) -> str:
    """The name while it is being written; the epoch keeps two writers apart."""
    return f"{checkpoint_name(step)}.partial-e{epoch:06d}"


def partial_epoch(name: str) -> int | None:
    """The epoch in the name of a directory that is being written, None for any other name."""
    match = _PARTIAL_NAME.fullmatch(name)
    return int(match[1]) if match else None


def saving_name(epoch: int) -> str:
    """The directory of a launch whose engine names its checkpoints itself, until they count."""
    return f".saving-e{epoch:06d}"


def unpublished_epoch(name: str) -> int | None:
    """The epoch in the name of anything that does not count yet, None for any other name."""
    match = _SAVING_NAME.fullmatch(name)
    return int(match[1]) if match else partial_epoch(name)


def step_of(name: str) -> int | None:
    """The step of a published checkpoint's directory name, None for any other name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def digest_file(directory: Path, name: str) -> FileDigest:
    """Read `directory/name` once and return its size and SHA-256."""
    sha256 = hashlib.sha256()
    size_bytes = 0
    with (directory / name).open("rb") as stream:
        while block := stream.read(_READ_BYTES):
            sha256.update(block)
            size_bytes += len(block)
    return FileDigest(name=name, size_bytes=size_bytes, sha256=sha256.hexdigest())


def write_rank_digests(directory: Path, rank: int, names: list[str]) -> None:
    """Digest the files that `rank` wrote and leave the result beside them."""
    files = tuple(digest_file(directory, name) for name in sorted(names))
    target = directory / DIGESTS_DIRECTORY / f"rank-{rank:06d}.json"
    target.parent.mkdir(exist_ok=True)
    replace_text(target, RankDigests(files=files).model_dump_json())


def read_rank_digests(directory: Path) -> tuple[FileDigest, ...]:
    """All digests left by the ranks, by name. Raises OSError, ValidationError if unreadable."""
    digests = {file.name: file for _, file in _left_by_ranks(directory)}
    return tuple(digests[name] for name in sorted(digests))


def read_writers(directory: Path) -> dict[str, int]:
    """The rank that wrote each file, by name. Raises OSError, ValidationError if unreadable."""
    return {file.name: rank for rank, file in _left_by_ranks(directory)}


def remove_rank_digests(directory: Path) -> None:
    """Remove what the ranks of a published checkpoint have left: its manifest has all of it.

    What cannot be removed stays; nothing reads it.
    """
    shutil.rmtree(directory / DIGESTS_DIRECTORY, ignore_errors=True)


def _left_by_ranks(directory: Path) -> Iterator[tuple[int, FileDigest]]:
    for path in sorted((directory / DIGESTS_DIRECTORY).glob("rank-*.json")):
        rank = int(path.stem.removeprefix("rank-"))
        for file in RankDigests.model_validate_json(path.read_bytes()).files:
            yield rank, file


def read_manifest(directory: Path) -> Manifest | None:
    """The manifest of a checkpoint directory, None when there is none that can be read.

    Raises NewerFormatError: a checkpoint of a newer hpctrain is not an unfinished one.
    """
    path = directory / MANIFEST_NAME
    try:
        text = path.read_bytes()
    except OSError:
        return None
    try:
        return Manifest.model_validate_json(text)
    except ValidationError:
        refuse_newer(path, text, Manifest)
        return None


def what_is_wrong(directory: Path, manifest: Manifest | None, *, deep: bool) -> str | None:
    """The first thing that keeps `directory` from being a good checkpoint; None if it is good.

    `deep` compares the SHA-256 of every file, which reads the whole checkpoint.
    """
    problem = list_problem(directory, manifest)
    if problem is not None or manifest is None:
        return problem
    for file in manifest.files:
        problem = file_problem(directory, file, deep=deep)
        if problem is not None:
            return problem
    return None


def list_problem(directory: Path, manifest: Manifest | None) -> str | None:
    """What is wrong with the list of files itself; None if it is whole and names all shards.

    Asks about no listed file: the cost is one listing, however large the checkpoint is.
    """
    if manifest is None:
        return f"no readable {MANIFEST_NAME}: the save did not finish"
    if step_of(directory.name) != manifest.step:
        return f"the manifest is of step {manifest.step}"
    if not manifest.files:
        return "the manifest lists no files"
    return manifest.why_not_whole() or _unlisted_problem(directory, manifest)


def _unlisted_problem(directory: Path, manifest: Manifest) -> str | None:
    """Shards that the engine would load and that nobody has digested."""
    listed = {file.name for file in manifest.files}
    try:
        names = sorted(os.listdir(directory))
    except OSError as error:
        return f"{directory.name} cannot be read: {error.strerror}"
    unlisted = [name for name in names if _NEEDED_TO_LOAD.fullmatch(name) and name not in listed]
    if not unlisted:
        return None
    more = f" and {len(unlisted) - 1} more" if len(unlisted) > 1 else ""
    return f"{unlisted[0]}{more} is there, and {MANIFEST_NAME} does not list it"


def file_problem(directory: Path, file: FileDigest, *, deep: bool) -> str | None:
    """What is wrong with one file of a checkpoint; None if it is as it was written."""
    try:
        size_bytes = (directory / file.name).stat().st_size
        if size_bytes != file.size_bytes:
            return f"{file.name} has {size_bytes} bytes instead of {file.size_bytes}"
        if deep and digest_file(directory, file.name).sha256 != file.sha256:
            return f"{file.name} has other content than was written (SHA-256 differs)"
    except OSError as error:
        return f"{file.name} cannot be read: {error.strerror}"
    return None
