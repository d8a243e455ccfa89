"""The process that writes one rank's part of a checkpoint, beside training.

The process is forked, hence a snapshot by copy-on-write of what is on the CPU (GPU tensors are
copied to the CPU before), and has an exit code and a deadline. Belongs here: the process. Does not
belong here: what is saved (see the engines' rooms) and when (see `saver`).
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hpctrain.checkpoints.manifest import write_rank_digests
from hpctrain.store.layout import RunLayout
from hpctrain.train.engine import Writing
from hpctrain.train.faults import is_full
from hpctrain.train.free_space import exhausted
from hpctrain.train.stacks import ignore_requests
from hpctrain.train.step_agreement import WriterState
from hpctrain.train.storage import is_away, lost_in

# A writer that is not through by then is stuck: a shared file system that no longer answers.
DEADLINE_SECONDS = 1800.0
_DYING_SECONDS = 10.0
# The process's exit codes when the disk is full, and when the run directory is away (EX_IOERR).
_NO_SPACE_EXIT = 28
_AWAY_EXIT = 74


class ResultFile:
    """Carries the writer's result to the trainer.

    An unnamed file that both processes have open: nothing is left behind by a kill.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 lives as long as the rank

    def clear(self) -> None:
        os.ftruncate(self._file.fileno(), 0)

    def put(self, value: object) -> None:
        data = pickle.dumps(value)
        os.pwrite(self._file.fileno(), data, 0)

    def get(self) -> Any:
        """The result; None when there is none."""
        data = os.pread(self._file.fileno(), os.fstat(self._file.fileno()).st_size, 0)
        return pickle.loads(data) if data else None


class Writer:
    """At most one writing process of this rank."""

    def __init__(self, rank: int, run: RunLayout) -> None:
        self._rank = rank
        self._run = run
        self._results = ResultFile()
        self._process: Any = None
        self._started_at = 0.0

    def start(self, writing: Writing, directory: Path) -> None:
        """Fork the process for what is planned for this rank."""
        assert self._process is None, "the previous writer was not collected"
        self._started_at = time.monotonic()
        self._results.clear()
        if writing.write is None:
            return
        context = multiprocessing.get_context("fork")
        self._process = context.Process(
            target=_write,
            args=(self._rank, self._run, writing.write, directory, self._results),
            daemon=True,
        )
        with _no_stacks_of_the_child():
            self._process.start()

    def state(self) -> WriterState:
        """Without waiting: running, finished, or failed (died, or past the deadline)."""
        if self._process is None:
            return WriterState.FINISHED
        if self._process.is_alive():
            late = time.monotonic() - self._started_at > DEADLINE_SECONDS
            return WriterState.FAILED if late else WriterState.RUNNING
        return _STATES.get(self._process.exitcode, WriterState.FAILED)

    def what_happened(self) -> str:
        """For the message of a failure."""
        assert self._process is not None, "a rank without a writer cannot have failed"
        if self._process.is_alive():
            return f"it did not finish within {DEADLINE_SECONDS:g} s"
        told = self._results.get()
        return str(told) if told else f"it ended with exit code {self._process.exitcode}"

    def collect(self) -> Any:
        """Forget the finished process; what it has told `finish`, None where nothing ran."""
        if self._process is None:
            return None
        self._process.join()
        self._process.close()
        self._process = None
        return self._results.get()

    def abandon(self) -> None:
        """Kill the process, if there is one, and forget it: its checkpoint will not be."""
        if self._process is not None:
            self._process.kill()
            self._process.join(_DYING_SECONDS)
            if not self._process.is_alive():  # else a dead file system holds it
                self._process.close()
            self._process = None


_STATES = {
    0: WriterState.FINISHED,
    _NO_SPACE_EXIT: WriterState.NO_SPACE,
    _AWAY_EXIT: WriterState.AWAY,
}


@contextlib.contextmanager
def _no_stacks_of_the_child() -> Iterator[None]:
    """Hold back requests for stacks while forking: the child would answer in its parent's file."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGQUIT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _write(
    rank: int,
    run: RunLayout,
    write: Callable[[], tuple[list[str], Any]],
    directory: Path,
    results: ResultFile,
) -> None:
    """In the forked process: write this rank's files, digest them, report."""
    ignore_requests()
    gc.disable()  # collecting could touch GPU memory that belongs to the parent
    os.nice(5)  # training goes first
    try:
        names, told = write()
        write_rank_digests(directory, rank, names)
        results.put(told)
    except Exception as error:
        results.put(f"{type(error).__name__}: {error}")
        sys.exit(_exit_code(error, run, directory))


def _exit_code(error: Exception, run: RunLayout, directory: Path) -> int:
    if is_full(error) or exhausted(directory):
        return _NO_SPACE_EXIT
    return _AWAY_EXIT if lost_in(directory, error) or is_away(error, run) else 1
