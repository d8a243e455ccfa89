"""Write one rank's part of a checkpoint in a forked process, beside training.

The fork is a copy-on-write snapshot of CPU memory (GPU tensors are copied to the CPU before). The
process has an exit code and a deadline. Does not belong here: what is saved (see the engines'
rooms) and when (see `saver`).
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable
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

# A writer that takes longer is stuck: a shared file system that no longer responds.
DEADLINE_SECONDS = 1800.0
_DYING_SECONDS = 10.0
# The process's exit codes when the disk is full, and when the run directory is away (EX_IOERR).
_NO_SPACE_EXIT = 28
_AWAY_EXIT = 74


class ResultFile:
    """Passes the writer's result to the trainer, through an unnamed file that both have open.

    A killed process leaves no file behind.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 lives as long as the rank

    def clear(self) -> None:
        os.ftruncate(self._file.fileno(), 0)

    def put(self, value: object) -> None:
        data = pickle.dumps(value)
        os.pwrite(self._file.fileno(), data, 0)

    def get(self) -> Any:
        """Read the result; None when there is none."""
        data = os.pread(self._file.fileno(), os.fstat(self._file.fileno()).st_size, 0)
        return pickle.loads(data) if data else None


class Writer:
    """The writing process of this rank, at most one at a time."""

    def __init__(self, rank: int, run: RunLayout) -> None:
        self._rank = rank
        self._run = run
        self._results = ResultFile()
        self._process: Any = None
        self._started_at = 0.0

    def start(self, writing: Writing, directory: Path) -> None:
        """Fork the process, unless this rank has nothing to write."""
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
        # The child would handle a request for stacks in its parent's file, so block it meanwhile.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGQUIT})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def state(self) -> WriterState:
        """Return the state without waiting; died or past the deadline counts as failed."""
        if self._process is None:
            return WriterState.FINISHED
        if self._process.is_alive():
            late = time.monotonic() - self._started_at > DEADLINE_SECONDS
            return WriterState.FAILED if late else WriterState.RUNNING
        return _STATES.get(self._process.exitcode, WriterState.FAILED)

    def failure_reason(self) -> str:
        """Describe why the process failed."""
        assert self._process is not None, "a rank without a writer cannot have failed"
        if self._process.is_alive():
            return f"it did not finish within {DEADLINE_SECONDS:g} s"
        reason = self._results.get()
        return str(reason) if reason else f"it ended with exit code {self._process.exitcode}"

    def collect(self) -> Any:
        """Reap the finished process; returns its result, None where nothing ran."""
        if self._process is None:
            return None
        self._process.join()
        self._process.close()
        self._process = None
        return self._results.get()

    def abandon(self) -> None:
        """Kill the process, if there is one, and abandon its checkpoint."""
        if self._process is not None:
            self._process.kill()
            self._process.join(_DYING_SECONDS)
            if not self._process.is_alive():  # otherwise a dead file system blocks it
                self._process.close()
            self._process = None


_STATES = {
    0: WriterState.FINISHED,
    _NO_SPACE_EXIT: WriterState.NO_SPACE,
    _AWAY_EXIT: WriterState.AWAY,
}


def _write(
    rank: int,
    run: RunLayout,
    write: Callable[[], tuple[list[str], Any]],
    directory: Path,
    results: ResultFile,
) -> None:
    """Write this rank's files in the forked process, digest them, and report the result."""
    ignore_requests()
    gc.disable()  # collecting could touch GPU memory that belongs to the parent
    os.nice(5)  # training goes first
    try:
        names, result = write()
        write_rank_digests(directory, rank, names)
        results.put(result)
    except Exception as error:
        results.put(f"{type(error).__name__}: {error}")
        if is_full(error) or exhausted(directory):
            sys.exit(_NO_SPACE_EXIT)
        sys.exit(_AWAY_EXIT if lost_in(directory, error) or is_away(error, run) else 1)
