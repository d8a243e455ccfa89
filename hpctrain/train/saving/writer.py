"""Write one rank's part of a checkpoint beside training, in a process with a deadline.

On CPUs the process is forked: a copy-on-write snapshot of the rank's memory, at no cost. With CUDA
it is a process of its own that reads copies of the tensors (see `spawned_writer`). Does not belong
here: what is saved (see the engines' rooms) and when (see `saver`).
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
from pathlib import Path
from typing import Any, Protocol

from hpctrain.records.layout import RunLayout
from hpctrain.train.device import on_cpu
from hpctrain.train.engine import Writing
from hpctrain.train.saving.host_buffers import HostBuffers
from hpctrain.train.saving.write_job import WriteJob, WriteResult, run_job
from hpctrain.train.stacks import ignore_requests
from hpctrain.train.step_agreement import WriterState

# A writer that takes longer is stuck: a shared file system that no longer responds.
DEADLINE_SECONDS = 1800.0
_DYING_SECONDS = 10.0


class Writer(Protocol):
    """The writing process of one rank; it writes at most one checkpoint at a time."""

    def start(self, writing: Writing, directory: Path) -> None:
        """Begin to write, unless this rank has nothing to write; does not wait."""

    def state(self) -> WriterState:
        """Return the state without waiting; died or past the deadline counts as failed."""

    def failure_reason(self) -> str:
        """Describe why the writer failed."""

    def collect(self) -> Any:
        """Take the result of a finished writer; None where nothing ran."""

    def abandon(self) -> None:
        """Kill the process, if there is one, and abandon its checkpoint."""


def needs_copies() -> bool:
    """Return whether writers read copies in `HostBuffers`, because this rank must not fork.

    A forked child inherits the CUDA context, which it must not touch: crashes near certain on Grace
    (NVIDIA/Megatron-LM#1861). Pinned memory is not even copied on write: the driver maps it
    VM_SHARED (open-gpu-kernel-modules, nv-mmap.c), so a child would see later steps in it.
    """
    return not on_cpu()


def open_writer(rank: int, run: RunLayout, buffers: HostBuffers | None) -> Writer:
    """Return the kind of writer that this rank's device allows; `buffers` are the snapshot's."""
    if buffers is None:
        return ForkedWriter(rank, run)
    from hpctrain.train.saving.spawned_writer import SpawnedWriter

    return SpawnedWriter(rank, run, buffers)


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


class ForkedWriter:
    """A writing process that is forked for each save."""

    def __init__(self, rank: int, run: RunLayout) -> None:
        self._rank = rank
        self._run = run
        self._results = ResultFile()
        self._process: Any = None
        self._result: WriteResult | None = None
        self._started_at = 0.0

    def start(self, writing: Writing, directory: Path) -> None:
        assert self._process is None, "the previous writer was not collected"
        self._started_at = time.monotonic()
        self._results.clear()
        self._result = None
        if writing.write is None:
            return
        job = WriteJob(self._rank, self._run, directory, writing.write)
        context = multiprocessing.get_context("fork")
        self._process = context.Process(target=_write, args=(job, self._results), daemon=True)
        # The child would handle a request for stacks in its parent's file, so block it meanwhile.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGQUIT})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def state(self) -> WriterState:
        if self._process is None:
            return WriterState.FINISHED
        if self._process.is_alive():
            late = time.monotonic() - self._started_at > DEADLINE_SECONDS
            return WriterState.FAILED if late else WriterState.RUNNING
        if self._result is None:
            self._result = self._results.get() or WriteResult(
                WriterState.FAILED, f"it ended with exit code {self._process.exitcode}"
            )
        return self._result.state

    def failure_reason(self) -> str:
        assert self._process is not None, "a rank without a writer cannot have failed"
        if self._process.is_alive():
            return f"it did not finish within {DEADLINE_SECONDS:g} s"
        self.state()
        assert self._result is not None
        return str(self._result.value)

    def collect(self) -> Any:
        if self._process is None:
            return None
        self._process.join()
        self._process.close()
        self._process = None
        result = self._result or self._results.get()
        return result.value if result is not None else None

    def abandon(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join(_DYING_SECONDS)
            if not self._process.is_alive():  # otherwise a dead file system blocks it
                self._process.close()
            self._process = None


def _write(job: WriteJob, results: ResultFile) -> None:
    """Run the job in the forked process."""
    ignore_requests()
    gc.disable()  # collecting could run destructors of what belongs to the parent
    os.nice(5)  # training goes first
    results.put(run_job(job))
