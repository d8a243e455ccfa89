"""Recognize outages of the run directory, and retry until it is back.

A run directory may be away for seconds (a remount, an eviction, a failover). Reads and writes are
then retried for a while, and missing files prove nothing about the owner of the run. Does not
belong here: the operations that are retried. Imports nothing heavy.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from hpctrain.base.durable import is_storage_fault
from hpctrain.base.errors import StorageError
from hpctrain.checkpoints.publish import Fence, StaleEpochError
from hpctrain.records.epochs import current_epoch
from hpctrain.records.layout import RunLayout
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
