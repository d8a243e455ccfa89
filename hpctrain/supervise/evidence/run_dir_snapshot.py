"""Read what the run directory shows of a launch, in a background thread.

A hung file system blocks whoever reads from it (see `timeouts`), so the caller may proceed
without a result. Belongs here: reading, and that thread. Does not belong here: what follows from a
snapshot, or from its absence (`launch_watch`).
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from queue import Empty, SimpleQueue

from hpctrain.base.errors import StorageError
from hpctrain.base.formats import NewerFormatError
from hpctrain.records.epochs import current_epoch
from hpctrain.records.exit_records import read_records
from hpctrain.records.layout import RunLayout
from hpctrain.records.manifest import partial_epoch, saving_name, step_of
from hpctrain.records.requests import Request, read_request
from hpctrain.records.run_records import (
    ExitRecord,
    Progress,
    RankTimes,
    parse_record,
    read_record,
    tail_metrics,
)
from hpctrain.records.speed_checks import SpeedCheck, read_speed_checks

_PAST_STEPS = 200


@dataclass(frozen=True)
class RunDirSnapshot:
    """The run directory at one moment.

    `failed`: a rank of this launch has recorded a failure. `left`: one has recorded that all ranks
    exit cleanly. `ranks_seen`: a rank has left any trace. `save_in_flight` and `rank_times` are
    read on request only. `speed_check`: what this launch has measured before training.
    """

    newest_epoch: int
    progress: Progress | None
    failed: bool
    left: bool
    ranks_seen: bool
    request: Request | None
    save_in_flight: bool = False
    rank_times: RankTimes | None = None
    speed_check: SpeedCheck | None = None


class RunDirReader:
    """Reads snapshots of one launch; files of exit records only when they have grown."""

    def __init__(self, run: RunLayout, epoch: int) -> None:
        self._run = run
        self._epoch = epoch
        self._outcomes: set[str] = set()
        self._exit_bytes: dict[str, int] = {}
        self._speed_check: SpeedCheck | None = None
        self._speed_bytes = 0

    def read(self, find_saves: bool, rank_times: bool) -> RunDirSnapshot:
        """Read everything once. Raises OSError when something exists and cannot be read.

        `find_saves`: also look for a save in flight; `rank_times`: also read those.
        """
        run, epoch = self._run, self._epoch
        run.require()
        progress = None
        with contextlib.suppress(FileNotFoundError):  # any other OSError is raised
            progress = parse_record(run.progress, run.progress.read_bytes(), Progress)
        if progress is not None and progress.epoch != epoch:
            progress = None
        self._read_exits(run.exits_of(epoch))
        outcomes = self._outcomes
        times = read_record(run.rank_times, RankTimes) if rank_times else None
        return RunDirSnapshot(
            newest_epoch=current_epoch(run.epochs),
            progress=progress,
            failed=bool({"crash", "config_error"} & outcomes),
            left=bool({"done", "yielded"} & outcomes),
            ranks_seen=bool(progress or outcomes or _names(run.stack_dump(epoch, 0).parent)),
            request=read_request(run),
            save_in_flight=find_saves and save_in_flight(run, epoch),
            rank_times=times if times is not None and times.epoch == epoch else None,
            speed_check=self.speed_check(),
        )

    def _read_exits(self, directory: Path) -> None:
        """Add the outcomes that ranks have recorded since the last snapshot."""
        for name in _names(directory):
            with contextlib.suppress(FileNotFoundError):
                # After opening the file an NFS client asks the server for the size, not its cache.
                with (directory / name).open("rb", buffering=0) as stream:
                    size_bytes = os.fstat(stream.fileno()).st_size
                if size_bytes == self._exit_bytes.get(name):
                    continue
                for record in read_records(directory / name):
                    if isinstance(record, ExitRecord):
                        self._outcomes.add(record.outcome)
                    else:  # an agent writes only about ranks that failed
                        self._outcomes.add("crash")
                self._exit_bytes[name] = size_bytes

    def speed_check(self) -> SpeedCheck | None:
        """Read what this launch has measured; None while it has recorded nothing.

        Raises OSError. The file is read only after it has grown.
        """
        run, size_bytes = self._run, 0
        with contextlib.suppress(FileNotFoundError):
            size_bytes = run.speed_checks.stat().st_size
        if self._speed_check is None and size_bytes != self._speed_bytes:
            self._speed_bytes = size_bytes
            own = [check for check in read_speed_checks(run) if check.epoch == self._epoch]
            self._speed_check = own[-1] if own else None
        return self._speed_check


def save_in_flight(run: RunLayout, epoch: int) -> bool:
    """True while a checkpoint of this launch is being written, by us or by the engine itself."""
    if any(partial_epoch(name) == epoch for name in _names(run.checkpoints)):
        return True
    engines_own = _names(run.checkpoints / saving_name(epoch))
    return any(step_of(name) is not None for name in engines_own)


def past_step_seconds(run: RunLayout) -> list[float]:
    """Durations of the last steps of earlier launches, without the first step of each."""
    rows = tail_metrics(run, _PAST_STEPS)
    return [
        row.step_seconds
        for before, row in pairwise(rows)
        if row.epoch == before.epoch and row.step_seconds is not None
    ]


def _names(directory: os.PathLike[str]) -> list[str]:
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []


class BackgroundReader:
    """A thread that reads a snapshot on request, one at a time."""

    def __init__(self, read: Callable[[bool, bool], RunDirSnapshot]) -> None:
        self.busy = False
        self.fault: OSError | None = None
        self._requests: SimpleQueue[tuple[bool, bool] | None] = SimpleQueue()
        self._results: SimpleQueue[RunDirSnapshot | OSError] = SimpleQueue()

        def serve() -> None:
            while (wanted := self._requests.get()) is not None:
                try:
                    self._results.put(read(*wanted))
                except OSError as error:
                    self._results.put(error)
                except NewerFormatError as error:
                    # The run's hpctrain has been replaced: the next attempt runs the newer one.
                    self._results.put(StorageError(str(error)))

        threading.Thread(target=serve, daemon=True, name="run-dir-reader").start()

    def request(self, *, find_saves: bool, rank_times: bool) -> None:
        """Begin to read a snapshot; must not be called while one is being read."""
        assert not self.busy
        self.busy = True
        self._requests.put((find_saves, rank_times))

    def result(self, wait_seconds: float = 0.0) -> RunDirSnapshot | None:
        """The snapshot; None while it is being read (`busy`) and when reading failed (`fault`)."""
        try:
            result = self._results.get(block=wait_seconds > 0, timeout=wait_seconds or None)
        except Empty:
            return None
        self.busy = False
        self.fault = result if isinstance(result, OSError) else None
        return None if isinstance(result, OSError) else result

    def close(self) -> None:
        """End the thread as soon as its last read has ended."""
        self._requests.put(None)
