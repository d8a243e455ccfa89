"""Write one rank's part of a checkpoint beside training, in a process with a deadline.

On CPUs the process is forked: a copy-on-write snapshot of the rank's memory, at no cost. With CUDA
it is a process of its own that reads copies of the tensors. Does not belong here: what is saved
(see the engines' rooms) and when (see `saver`), the loop of that process (`writing_process`).
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from hpctrain.records.layout import RunLayout
from hpctrain.records.manifest import write_rank_digests
from hpctrain.train.device import on_cpu
from hpctrain.train.engine import Writing
from hpctrain.train.faults import is_full
from hpctrain.train.saving.host_buffers import HostBuffers
from hpctrain.train.stacks import ignore_requests
from hpctrain.train.step_agreement import WriterState
from hpctrain.train.stop import LEFT_TO_RANKS
from hpctrain.train.storage import exhausted, is_away, lost_in

# -- Write one rank's files of one checkpoint, digest them, and report how that ended ------------
# Runs in the process of a writer, whichever kind it is.


@dataclass(frozen=True)
class WriteJob:
    """What one rank writes below `directory`; `write` returns names of files and a result."""

    rank: int
    run: RunLayout
    directory: Path
    write: Callable[[], tuple[list[str], Any]]


@dataclass(frozen=True)
class WriteResult:
    """How a job ended: `value` is the result of `write`, or the reason as text."""

    state: WriterState
    value: Any


def run_job(job: WriteJob) -> WriteResult:
    """Write and digest; never raises."""
    try:
        names, value = job.write()
        write_rank_digests(job.directory, job.rank, names)
        return WriteResult(WriterState.FINISHED, value)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        if is_full(error) or exhausted(job.directory):
            return WriteResult(WriterState.NO_SPACE, reason)
        if lost_in(job.directory, error) or is_away(error, job.run):
            return WriteResult(WriterState.AWAY, reason)
        return WriteResult(WriterState.FAILED, reason)


# A writer that takes longer is stuck: a shared file system that no longer responds.
DEADLINE_SECONDS = 1800.0
_DYING_SECONDS = 10.0


class Writer(ABC):
    """The writing process of one rank; it writes at most one checkpoint at a time."""

    def __init__(self, rank: int, run: RunLayout) -> None:
        self._rank = rank
        self._run = run
        self._job: WriteJob | None = None
        self._result: WriteResult | None = None
        self._started_at = 0.0

    def start(self, writing: Writing, directory: Path) -> None:
        """Begin to write, unless this rank has nothing to write; does not wait."""
        assert self._job is None, "the previous writer was not collected"
        self._started_at = time.monotonic()
        self._result = None
        if writing.write is not None:
            self._job = WriteJob(self._rank, self._run, directory, writing.write)
            self._begin(self._job)

    def state(self) -> WriterState:
        """Return the state without waiting; died or past the deadline counts as failed."""
        if self._job is None:
            return WriterState.FINISHED
        if self._result is None:
            self._look()
        if self._result is not None:
            return self._result.state
        late = time.monotonic() - self._started_at > DEADLINE_SECONDS
        return WriterState.FAILED if late else WriterState.RUNNING

    def failure_reason(self) -> str:
        """Describe why the writer failed, after `state` has said so."""
        assert self._job is not None, "a rank without a writer cannot have failed"
        if self._result is None:
            return f"it did not finish within {DEADLINE_SECONDS:g} s"
        return str(self._result.value)

    def collect(self) -> Any:
        """Take the result of a finished writer; None where nothing ran."""
        result, self._job, self._result = self._result, None, None
        return result.value if result is not None else None

    def abandon(self) -> None:
        """Kill the process, if there is one, and abandon its checkpoint."""
        self._end()
        self._job = self._result = None

    @abstractmethod
    def _begin(self, job: WriteJob) -> None:
        """Let the process write."""

    @abstractmethod
    def _look(self) -> None:
        """Set `_result` if the process has ended its job, or has died."""

    @abstractmethod
    def _end(self) -> None:
        """Kill the process, if there is one."""


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
    return SpawnedWriter(rank, run, buffers)


class ForkedWriter(Writer):
    """A writing process that is forked for each save.

    Its result comes through an unnamed file that both have open: a killed process leaves no file
    behind.
    """

    def __init__(self, rank: int, run: RunLayout) -> None:
        super().__init__(rank, run)
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 lives as long as the rank
        self._process: Any = None

    def _begin(self, job: WriteJob) -> None:
        os.ftruncate(self._file.fileno(), 0)
        context = multiprocessing.get_context("fork")
        arguments = (job, self._file.fileno())
        self._process = context.Process(target=_write, args=arguments, daemon=True)
        # The child would handle a request for stacks in its parent's file, so block it meanwhile.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGQUIT})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _look(self) -> None:
        if self._process.is_alive():
            return
        descriptor = self._file.fileno()
        data = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        reason = f"it ended with exit code {self._process.exitcode}"
        self._result = pickle.loads(data) if data else WriteResult(WriterState.FAILED, reason)
        self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.join(_DYING_SECONDS)
            if not process.is_alive():  # otherwise a dead file system blocks it
                process.close()


def _write(job: WriteJob, descriptor: int) -> None:
    """Run the job in the forked process."""
    ignore_requests()
    gc.disable()  # collecting could run destructors of what belongs to the parent
    os.nice(5)  # training goes first
    os.pwrite(descriptor, pickle.dumps(run_job(job)), 0)


# -- Write checkpoints in a process that never touches CUDA, one for all saves of a launch -------
# If the process dies, the rank writes the same copies by itself, in a thread: no save is lost.


# After so many deaths of the process the rank writes by itself for the rest of the launch.
_MOST_DEATHS = 2


class SpawnedWriter(Writer):
    """The writing process of this rank. Its first start takes the time to import torch."""

    def __init__(self, rank: int, run: RunLayout, buffers: HostBuffers) -> None:
        super().__init__(rank, run)
        self._buffers = buffers
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Any = None
        self._deaths = 0
        self._spawn()

    def _begin(self, job: WriteJob) -> None:
        if self._process is None and self._deaths < _MOST_DEATHS:
            self._spawn()
        if self._process is None:
            self._write_here()
            return
        # the process may still be importing torch, and a pipe holds little
        threading.Thread(target=self._send, args=(job,), daemon=True).start()

    def _spawn(self) -> None:
        ours, theirs = Pipe()
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        module = "hpctrain.train.saving.writing_process"
        descriptors = (theirs.fileno(), self._buffers.descriptor)
        argv = [sys.executable, "-m", module, *map(str, (*descriptors, os.getpid()))]
        # until the process ignores them itself, none of Slurm's signals may end it
        before = signal.pthread_sigmask(signal.SIG_BLOCK, LEFT_TO_RANKS)
        try:
            self._process = subprocess.Popen(
                argv, pass_fds=descriptors, env=environment, stdin=subprocess.DEVNULL
            )
        except OSError as error:
            self._deaths = _MOST_DEATHS
            print(f"writer of rank {self._rank}: no process: {error}", file=sys.stderr, flush=True)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        self._connection = ours

    def _send(self, job: WriteJob) -> None:
        """Send a job; a broken pipe shows in `state` as the death of the process."""
        try:
            data = self._buffers.dumps(job)
            self._connection.send_bytes(self._buffers.size_bytes.to_bytes(8, "big"))
            self._connection.send_bytes(data)
        except OSError:
            return
        except Exception as error:  # something that cannot be pickled
            print(f"writer of rank {self._rank}: {error}", file=sys.stderr, flush=True)
            self._end()
            self._write_here()

    def _look(self) -> None:
        """Take the result if it has come; write here if the process has died."""
        if self._process is None:  # this rank writes by itself
            return
        died = self._process.poll() is not None  # before the last look into the pipe
        try:
            if self._connection.poll():
                self._result = self._connection.recv()
                return
        except (EOFError, OSError):
            died = True
        if died:
            code = self._process.wait()
            self._end()
            self._deaths += 1
            print(
                f"writer of rank {self._rank}: the process ended with exit code {code}; "
                "the rank writes by itself",
                file=sys.stderr,
                flush=True,
            )
            self._write_here()

    def _write_here(self) -> None:
        job = self._job
        assert job is not None

        def write() -> None:
            self._result = run_job(job)

        threading.Thread(target=write, daemon=True, name="checkpoint-writer").start()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            try:
                process.wait(_DYING_SECONDS)
            except subprocess.TimeoutExpired:
                return  # a dead file system blocks it
            self._connection.close()
