"""What the run directory shows of a launch, without being held up by it.

A file system that hangs holds whoever reads, for minutes or for ever (nfs(5), `hard`), and the
supervisor has signals to handle meanwhile. So files are read in a thread of their own, and who
asks may go on without an answer. Belongs here: reading, and that thread. Does not belong here: what
follows from what is seen, or from not seeing (`launch_watch`).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from queue import Empty, SimpleQueue

from hpctrain.checkpoints.manifest import partial_epoch, saving_name, step_of
from hpctrain.errors import StorageError
from hpctrain.formats import NewerFormatError
from hpctrain.store.epochs import current_epoch
from hpctrain.store.layout import RunLayout
from hpctrain.store.requests import Request, read_request
from hpctrain.store.run_records import (
    ExitRecord,
    Progress,
    RankTimes,
    parse_record,
    read_record,
    tail_metrics,
)

_PAST_STEPS = 200
_ASKING_SECONDS = 0.2


@dataclass(frozen=True)
class Sight:
    """The run directory at one moment.

    `failed`: a rank of this launch says that it has failed; `left`: one says that all leave.
    `ranks_seen`: a rank has left any trace. The last two are only looked for when asked.
    """

    newest_epoch: int
    progress: Progress | None
    failed: bool
    left: bool
    ranks_seen: bool
    request: Request | None
    save_in_flight: bool = False
    rank_times: RankTimes | None = None


class Onlooker:
    """Looks at one launch; remembers the exit records it has read, which never change."""

    def __init__(self, run: RunLayout, epoch: int) -> None:
        self._run = run
        self._epoch = epoch
        self._outcomes: dict[str, str] = {}

    def look(self, closely: bool, rank_times: bool) -> Sight:
        """Read everything once. Raises OSError when something is there and cannot be read.

        `closely`: also look for a save in flight; `rank_times`: also read those.
        """
        run, epoch = self._run, self._epoch
        run.require()
        progress = self._progress()
        self._read_outcomes()
        return Sight(
            newest_epoch=current_epoch(run.epochs),
            progress=progress,
            failed=bool({"crash", "config_error"} & set(self._outcomes.values())),
            left=bool({"done", "yielded"} & set(self._outcomes.values())),
            ranks_seen=bool(progress or self._outcomes or _names(run.stack_dump(epoch, 0).parent)),
            request=read_request(run),
            save_in_flight=closely and save_in_flight(run, epoch),
            rank_times=self._rank_times() if rank_times else None,
        )

    def _progress(self) -> Progress | None:
        """Unlike `read_record`: a sign that cannot be read is not the same as none."""
        try:
            text = self._run.progress.read_bytes()
        except FileNotFoundError:
            return None
        progress = parse_record(self._run.progress, text, Progress)
        return progress if progress is not None and progress.epoch == self._epoch else None

    def _read_outcomes(self) -> None:
        directory = self._run.exit_record(self._epoch, 0).parent
        for name in _names(directory):
            if name.startswith("node-"):
                self._outcomes[name] = "crash"  # an agent writes only about ranks that failed
            elif name not in self._outcomes and name.startswith("rank-"):
                record = read_record(directory / name, ExitRecord)
                if record is not None:
                    self._outcomes[name] = record.outcome

    def _rank_times(self) -> RankTimes | None:
        times = read_record(self._run.rank_times, RankTimes)
        return times if times is not None and times.epoch == self._epoch else None


def save_in_flight(run: RunLayout, epoch: int) -> bool:
    """True while a checkpoint of this launch is being written, by us or by the engine itself."""
    if any(partial_epoch(name) == epoch for name in _names(run.checkpoints)):
        return True
    engines_own = _names(run.checkpoints / saving_name(epoch))
    return any(step_of(name) is not None for name in engines_own)


def past_step_seconds(run: RunLayout) -> list[float]:
    """Durations of the last steps of earlier launches, without the first step of each."""
    rows = tail_metrics(run, _PAST_STEPS)
    return [row.step_seconds for before, row in pairwise(rows) if row.epoch == before.epoch]


def _names(directory: os.PathLike[str]) -> list[str]:
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []


class Looker:
    """One thread that looks when it is asked to; one look at a time."""

    def __init__(self, look: Callable[[bool, bool], Sight]) -> None:
        self.busy = False
        self.fault: OSError | None = None
        self._look = look
        self._asked: SimpleQueue[tuple[bool, bool] | None] = SimpleQueue()
        self._seen: SimpleQueue[Sight | OSError] = SimpleQueue()
        threading.Thread(target=self._serve, daemon=True, name="looker").start()

    def _serve(self) -> None:
        while (wanted := self._asked.get()) is not None:
            try:
                self._seen.put(self._look(*wanted))
            except OSError as error:
                self._seen.put(error)
            except NewerFormatError as error:
                # The hpctrain of the run has been replaced: the next attempt has the newer one.
                self._seen.put(StorageError(str(error)))

    def ask(self, *, closely: bool, rank_times: bool) -> None:
        """Begin a look; not while one is under way."""
        assert not self.busy
        self.busy = True
        self._asked.put((closely, rank_times))

    def answer(self, wait_seconds: float = 0.0) -> Sight | None:
        """What was seen; None while the look goes on (`busy`), and when it has failed (`fault`)."""
        try:
            seen = self._seen.get(block=wait_seconds > 0, timeout=wait_seconds or None)
        except Empty:
            return None
        self.busy = False
        self.fault = seen if isinstance(seen, OSError) else None
        return None if isinstance(seen, OSError) else seen

    def close(self) -> None:
        """End the thread, as soon as its last look has ended."""
        self._asked.put(None)


def in_time(
    work: Callable[[], object],
    timeout_seconds: float,
    *,
    give_up: Callable[[], bool] = lambda: False,
) -> bool:
    """Do `work` in a thread; False if it has not ended in time. Its OSError is swallowed.

    For words and files that matter less than the time of whoever waits for them; late work is not
    taken back. `give_up` is asked a few times a second.
    """

    def attempt() -> None:
        with contextlib.suppress(OSError):
            work()

    thread = threading.Thread(target=attempt, daemon=True)
    deadline = time.monotonic() + timeout_seconds
    thread.start()
    while thread.is_alive() and (left := deadline - time.monotonic()) > 0:
        thread.join(min(left, _ASKING_SECONDS))
        if give_up():
            break
    return not thread.is_alive()
