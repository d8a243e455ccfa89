"""Recognize outages of the run directory, retry until it is back, and check for free space.

A run directory may be away for seconds (a remount, an eviction, a failover). Reads and writes are
then retried for a while, and missing files prove nothing about the owner of the run. Does not
belong here: the operations that are retried, beside the last one of a process. Imports nothing
heavy.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hpctrain.base.durable import is_storage_fault
from hpctrain.base.errors import CheckpointError, StorageError
from hpctrain.checkpoints.publish import Fence, StaleEpochError, published_steps
from hpctrain.records.epochs import current_epoch
from hpctrain.records.exit_records import mark_left_startup, write_exit_record
from hpctrain.records.layout import RunLayout
from hpctrain.records.manifest import checkpoint_name, read_manifest
from hpctrain.records.run_records import ExitRecord, Outcome, TrainerExit
from hpctrain.train.rank_environment import Launch

# How long a rank waits for its run directory before it fails and the supervisor decides: longer
# than a typical failover of a shared file system.
PATIENCE_SECONDS = 300.0
_RETRY_SECONDS = 1.0
# A file may have been missing with its directory, which is back by now: retry this often.
_SECOND_LOOKS = 2
_Result = TypeVar("_Result")


def is_away(error: BaseException, run: RunLayout) -> bool:
    """Check whether `error` occurred because the run directory is, or was, unreachable.

    This includes a missing file while the whole directory is missing.
    """
    if any(isinstance(link, StorageError) or is_storage_fault(link) for link in chain(error)):
        return True
    return not is_present(run)


def lost_in(directory: Path, error: BaseException) -> bool:
    """Check whether a file below `directory`, which this rank is writing, is missing.

    It can only have disappeared together with the whole directory.
    """
    links = chain(error)
    missing = (link for link in links if isinstance(link, FileNotFoundError) and link.filename)
    return any(_is_below(directory, link.filename) for link in missing)


def failed_below(run: RunLayout, error: BaseException) -> bool:
    """Check whether the error is about a file of the run while the run directory is unreachable.

    Other errors in the meantime, such as broken connections, have other reasons.
    """
    with_file = [link for link in chain(error) if isinstance(link, OSError) and link.filename]
    of_run = [link for link in with_file if _is_below(run.directory, link.filename)]
    return bool(of_run) and (not is_present(run) or any(map(is_storage_fault, of_run)))


def _is_below(directory: Path, name: str | bytes) -> bool:
    return Path(os.fsdecode(name)).is_relative_to(directory)


def is_present(run: RunLayout) -> bool:
    """Check whether the run directory is reachable at this moment."""
    try:
        run.require()
    except OSError:
        return False
    return True


def outlast(
    run: RunLayout, work: Callable[[], _Result], patience_seconds: float | None = None
) -> _Result:
    """Run `work`, retrying while the run directory is away.

    Raises errors of `work` that have other reasons, and StorageError after `patience_seconds`
    (default: `PATIENCE_SECONDS`).
    """
    patience_seconds = PATIENCE_SECONDS if patience_seconds is None else patience_seconds
    deadline = time.monotonic() + patience_seconds
    second_looks = _SECOND_LOOKS
    while True:
        try:
            return work()
        except Exception as error:
            if not is_away(error, run):
                if not second_looks or not lost_in(run.directory, error):
                    raise
                second_looks -= 1
            if time.monotonic() >= deadline:
                raise StorageError(
                    f"{run.directory} was away for {patience_seconds:.0f} s: {error}",
                    hint="check the mount of this file system",
                ) from error
        time.sleep(_RETRY_SECONDS)


# How long the record of an end waits for the run directory: Slurm may be ending the job.
_EXIT_RECORD_SECONDS = 10.0


def record_exit(
    run: RunLayout,
    launch: Launch,
    outcome: Outcome,
    *,
    left_startup: bool = False,
    **fields: Any,
) -> None:
    """Write how this process has ended; `fields` of the record replace what the launch says."""
    own = {"epoch": launch.epoch, "rank": launch.rank, "node": launch.node, "time": time.time()}
    fields = {**own, "exit_code": TrainerExit.of(outcome), **fields}
    record = ExitRecord(outcome=outcome, **fields)

    def write() -> None:
        if left_startup:
            mark_left_startup(run, launch.epoch)  # before others fail by it
        write_exit_record(run, launch.node_rank, record)

    try:
        outlast(run, write, _EXIT_RECORD_SECONDS)
    except OSError as error:
        print(f"the exit record could not be written: {error}", file=sys.stderr, flush=True)


def fence_of(run: RunLayout, launch: Launch) -> Fence:
    """Return the fence for publishing: this launch's epoch must still be the run's highest."""

    def newest_epoch() -> int:
        try:
            return current_epoch(run.epochs)
        except FileNotFoundError:
            if launch.epoch:
                raise
            run.require()
            return 0  # started by hand in a directory that never had a supervisor

    return Fence(launch.epoch, newest_epoch)


def stale_or(error: Exception, run: RunLayout, launch: Launch) -> Exception:
    """Return a StaleEpochError if a newer launch owns the run, else `error` itself.

    A newer launch removes the files of this one, which causes all kinds of errors. If the owner is
    unknown, `error` is returned.
    """
    if isinstance(error, StaleEpochError):
        return error
    try:
        fence_of(run, launch).check()
    except StaleEpochError as stale:
        return StaleEpochError(f"{stale}; {error}")
    except OSError:
        return error
    return error


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the exception and its causes or contexts, the outermost first."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


# -- Check for free space before a checkpoint is written -----------------------------------------
# A disk that fills up during a save breaks the save and other users of the disk. Nothing is
# deleted to make room: old checkpoints may be all that is left of the run.


# Checkpoints of a run differ by little; the margin is for metadata and other users of the disk.
_MARGIN = 1.2
_EXHAUSTED_BYTES = 1 << 16
# Digests, metadata and records beside the shards.
_SPARE_INODES = 16


class NoSpaceError(CheckpointError):
    """The file system, or the quota, has no room for a checkpoint."""


@dataclass(frozen=True)
class Need:
    """Space for a checkpoint in bytes and files, and the source of these numbers."""

    size_bytes: int
    files: int
    source: str


def newest_size(root: Path, world_size: int) -> Need | None:
    """Return the size of the newest published checkpoint; None if there is none with a manifest."""
    for step in reversed(published_steps(root)):
        manifest = read_manifest(root / checkpoint_name(step))
        if manifest is not None:
            files = len(manifest.files) + world_size
            return Need(manifest.total_bytes, files, f"as much as {checkpoint_name(step)}")
    return None


def check_room(root: Path, need: Need) -> str | None:
    """Describe the missing space on the file system of `root`; None if there is room.

    statvfs(3): f_bavail is available to unprivileged users. File systems without a fixed number of
    inodes report 0. User quotas appear in neither.
    """
    state = os.statvfs(root)
    free_bytes, wanted_bytes = state.f_bavail * state.f_frsize, int(_MARGIN * need.size_bytes)
    if free_bytes < wanted_bytes:
        return (
            f"no room for a checkpoint: {_amount(wanted_bytes)} needed ({need.source}, and a fifth "
            f"more), {_amount(free_bytes)} free in {root}; nothing was written or deleted"
        )
    wanted_inodes = need.files + _SPARE_INODES
    if state.f_files and state.f_favail < wanted_inodes:
        return (
            f"no room for a checkpoint: {wanted_inodes} files needed, inodes for {state.f_favail} "
            f"free in {root}; nothing was written or deleted"
        )
    return None


def exhausted(path: Path) -> bool:
    """Check whether the file system of `path` is practically full.

    Libraries often lose the reason of a failed write (PyTorchStreamWriter's message has none).
    """
    try:
        state = os.statvfs(path)
    except OSError:
        return False
    full = state.f_bavail * state.f_frsize < _EXHAUSTED_BYTES
    return full or bool(state.f_files and not state.f_favail)


def _amount(size_bytes: int) -> str:
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.1f} {unit}"
    return f"{size_bytes} bytes"
