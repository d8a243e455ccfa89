"""Faults of storage as the ranks meet them: telling them from others, and outlasting them.

A run directory may be away for seconds (a remount, an eviction, a failover). What a rank wants to
read or write then is tried again for a while, and what is missing then is no word about who owns
the run. Belongs here: that decision and the waiting. Does not belong here: what is tried again.
Imports nothing heavy.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from hpctrain.checkpoints.publish import Fence, StaleEpochError
from hpctrain.durable import is_storage_fault
from hpctrain.errors import StorageError
from hpctrain.store.epochs import current_epoch
from hpctrain.store.layout import RunLayout
from hpctrain.train.rank_environment import Launch

# For how long a rank waits for its run directory before it gives up and the supervisor takes over:
# longer than a failover of a shared file system, as a rule, takes.
PATIENCE_SECONDS = 300.0
_RETRY_SECONDS = 1.0
# A file of a directory that is there again by now may have been missing with it: seen once more.
_SECOND_LOOKS = 2
_Result = TypeVar("_Result")


def is_away(error: BaseException, run: RunLayout) -> bool:
    """True if `error` came about because the run directory is, or was, out of reach.

    A missing file is such a case while the whole directory is missing.
    """
    if any(isinstance(one, StorageError) or is_storage_fault(one) for one in chain(error)):
        return True
    return not is_present(run)


def lost_in(directory: Path, error: BaseException) -> bool:
    """True if a file below `directory`, which this rank is just writing, cannot be found: only
    with the whole directory can it have gone."""
    missing = (one for one in chain(error) if isinstance(one, FileNotFoundError) and one.filename)
    return any(_is_below(directory, one.filename) for one in missing)


def failed_below(run: RunLayout, error: BaseException) -> bool:
    """True if the error is about a file of the run, and the run directory is out of reach: what
    else fails meanwhile, such as a connection, has other reasons."""
    own = [one for one in chain(error) if isinstance(one, OSError) and one.filename]
    ours = [one for one in own if _is_below(run.directory, one.filename)]
    return bool(ours) and (not is_present(run) or any(map(is_storage_fault, ours)))


def _is_below(directory: Path, name: str | bytes) -> bool:
    return Path(os.fsdecode(name)).is_relative_to(directory)


def is_present(run: RunLayout) -> bool:
    """True if the run directory can be looked into at this moment."""
    try:
        run.require()
    except OSError:
        return False
    return True


def outlast(
    run: RunLayout, work: Callable[[], _Result], patience_seconds: float | None = None
) -> _Result:
    """Do `work`, again and again while the run directory is away.

    Raises what `work` raises for any other reason, and StorageError after `patience_seconds`
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
                    hint="the mount of this file system is to be looked at",
                ) from error
        time.sleep(_RETRY_SECONDS)


def fence_of(run: RunLayout, launch: Launch) -> Fence:
    """The right to publish: this launch's epoch is still the highest of the run."""
    return Fence(launch.epoch, lambda: _newest_epoch(run, launch))


def _newest_epoch(run: RunLayout, launch: Launch) -> int:
    try:
        return current_epoch(run.epochs)
    except FileNotFoundError:
        if launch.epoch:
            raise
        run.require()
        return 0  # started by hand in a directory that never had a supervisor


def stale_or(error: Exception, run: RunLayout, launch: Launch) -> Exception:
    """StaleEpochError if a newer launch owns the run, else `error` itself.

    A newer launch takes the files of this one away, which shows as all kinds of errors. Where
    nobody can tell who owns the run, nothing is concluded.
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
    """The exception and those behind it, the outermost first."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or one.__context__
