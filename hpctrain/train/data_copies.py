"""Copy the data of a run to a disk of this node, and say where the copies are.

Every rank that reads data calls this; one process of a node copies, the others wait for its lock.
A copy is complete or absent: it is made beside its place, compared with the size and the digest
that `submit` has recorded, and renamed. Launches that follow on the same node find it. The place is
named after path, size and time of the source, so a source that has changed is copied again.
Belongs here: copying. Does not belong here: which runs may (`hpctrain.actions.data_staging`),
reading (`datasets`), removing (the site empties its scratch directories).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hpctrain.engines.module import ModuleConfig
from hpctrain.engines.training import TrainConfig
from hpctrain.errors import InvalidInputError, Problem
from hpctrain.store.data_identity import read_identity
from hpctrain.store.datasets import bin_path, idx_path, npz_path, sidecar_path
from hpctrain.train.job import Job

_BLOCK_BYTES = 16 << 20
_POLL_SECONDS = 0.2
# Left free on the node's disk for everybody else.
_SPARE_BYTES = 1 << 30


@dataclass(frozen=True)
class _File:
    """A file of a source as it is now."""

    path: Path
    size_bytes: int
    mtime_ns: int


def staged_copies(job: Job, reads: bool, working: Callable[[], None]) -> dict[str, str]:
    """Copy all sources of a run with `stage_data`, and map each to its copy.

    Empty for other runs and on ranks that read nothing. `working` is called several times a second
    meanwhile. Raises InvalidInputError if a file cannot be copied or does not arrive as it was.
    """
    config = job.config
    if not config.stage_data or not reads:
        return {}
    place = _place(os.environ)
    identity = read_identity(job.run.data_identity)
    digests = {file.path: file.sha256 for file in identity.files} if identity else {}
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _only_process(place / "lock", working):
            return {
                source: str(_copied(files, place, digests, working) / Path(source).name)
                for source, files in _files_of(config)
            }
    except OSError as error:
        message = f"cannot be copied to {place}: {error.strerror or error}"
        where = error.filename or place
        raise InvalidInputError([Problem(message, str(where), node_dependent=True)]) from error


def _place(environment: Mapping[str, str]) -> Path:
    """Find the directory of copies: the script has made TMPDIR one on this node's disk."""
    if not environment.get("TMPDIR"):
        message = "TMPDIR is not set, below which data is copied"
        raise InvalidInputError([Problem(message, hint="start the run with its script")])
    return Path(environment["TMPDIR"], "hpctrain-data")


def _files_of(config: TrainConfig) -> Iterator[tuple[str, list[_File]]]:
    """List the sources of a configuration, each with its files and, if it has one, its sidecar."""
    rows = isinstance(config, ModuleConfig) and config.data_format != "tokens"
    sources = [path for _, path in config.data_blend]
    if isinstance(config, ModuleConfig) and config.data_validation is not None:
        sources.append(config.data_validation)
    for source in dict.fromkeys(sources):
        path = Path(source)
        needed = [npz_path(path)] if rows else [bin_path(path), idx_path(path)]
        optional = sidecar_path(path)
        files = [*needed, optional] if optional.exists() else needed
        found = [(file, file.stat()) for file in files]
        yield source, [_File(file, status.st_size, status.st_mtime_ns) for file, status in found]


def _copied(
    files: Iterable[_File],
    place: Path,
    digests: Mapping[str, str | None],
    working: Callable[[], None],
) -> Path:
    """Return the directory with the copies of some files, which it makes if there is none."""
    files = list(files)
    name = hashlib.sha256(repr(files).encode(errors="surrogateescape")).hexdigest()[:24]
    directory, unfinished = place / name, place / f"{name}.part"
    if directory.is_dir():
        return directory
    shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed
    _require_room(place, sum(file.size_bytes for file in files))
    unfinished.mkdir(mode=0o700)
    try:
        for file in files:
            _copy(file, unfinished / file.path.name, digests.get(str(file.path)), working)
        unfinished.rename(directory)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return directory


def _require_room(place: Path, size_bytes: int) -> None:
    free_bytes = shutil.disk_usage(place).free
    if free_bytes < size_bytes + _SPARE_BYTES:
        message = (
            f"has {free_bytes / 1e9:.1f} GB free, and the copies of the data take "
            f"{size_bytes / 1e9:.1f} GB ({_SPARE_BYTES / 1e9:.1f} GB stay free)"
        )
        hint = "`data: {stage: false}` reads them where they are"
        raise InvalidInputError([Problem(message, str(place), hint=hint, node_dependent=True)])


def _copy(file: _File, target: Path, sha256: str | None, working: Callable[[], None]) -> None:
    """Copy one file. Raises OSError, InvalidInputError if it is not what was recorded."""
    digest = hashlib.sha256()
    copied_bytes = 0
    with file.path.open("rb", buffering=0) as source, target.open("xb", buffering=0) as copy:
        while block := source.read(_BLOCK_BYTES):
            if sha256 is not None:
                digest.update(block)
            rest = memoryview(block)
            while rest:
                rest = rest[copy.write(rest) :]
            copied_bytes += len(block)
            working()
    if copied_bytes != file.size_bytes:
        message = f"{copied_bytes} of {file.size_bytes} bytes arrived in {target.parent.parent}"
    elif sha256 is not None and digest.hexdigest() != sha256:
        message = "was read with another SHA-256 than the dataset's sidecar has"
    else:
        return
    hint = "the file has changed, or this node reads it wrongly"
    raise InvalidInputError([Problem(message, str(file.path), hint=hint, node_dependent=True)])


@contextlib.contextmanager
def _only_process(path: Path, working: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of this node, calling `working` while another process holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                working()
                time.sleep(_POLL_SECONDS)
        yield
    finally:
        os.close(descriptor)
