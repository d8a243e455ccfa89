"""Write checkpoints in a process that never touches CUDA, one for all saves of a launch.

If the process dies, the rank writes the same copies by itself, in a thread: no save is lost.
Belongs here: starting the process and talking to it. Does not belong here: what the process does
(see `writing_process`), the copies (see `host_buffers`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from hpctrain.records.layout import RunLayout
from hpctrain.train.engine import Writing
from hpctrain.train.saving.host_buffers import HostBuffers
from hpctrain.train.saving.write_job import WriteJob, WriteResult, run_job
from hpctrain.train.saving.writer import DEADLINE_SECONDS
from hpctrain.train.saving.writing_process import IGNORED_SIGNALS
from hpctrain.train.step_agreement import WriterState

_DYING_SECONDS = 10.0
# After so many deaths of the process the rank writes by itself for the rest of the launch.
_MOST_DEATHS = 2


class SpawnedWriter:
    """The writing process of this rank. Its first start takes the time to import torch."""

    def __init__(self, rank: int, run: RunLayout, buffers: HostBuffers) -> None:
        self._rank = rank
        self._run = run
        self._buffers = buffers
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Any = None
        self._job: WriteJob | None = None
        self._result: WriteResult | None = None
        self._thread: threading.Thread | None = None
        self._deaths = 0
        self._started_at = 0.0
        self._spawn()

    def start(self, writing: Writing, directory: Path) -> None:
        assert self._job is None, "the previous writer was not collected"
        self._started_at = time.monotonic()
        self._result = None
        if writing.write is None:
            return
        self._job = WriteJob(self._rank, self._run, directory, writing.write)
        if self._process is None and self._deaths < _MOST_DEATHS:
            self._spawn()
        if self._process is None:
            self._write_here()
            return
        # the process may still be importing torch, and a pipe holds little
        self._thread = threading.Thread(target=self._send, args=(self._job,), daemon=True)
        self._thread.start()

    def state(self) -> WriterState:
        if self._job is None:
            return WriterState.FINISHED
        if self._result is None and self._process is not None:
            self._receive()
        if self._result is not None:
            return self._result.state
        late = time.monotonic() - self._started_at > DEADLINE_SECONDS
        return WriterState.FAILED if late else WriterState.RUNNING

    def failure_reason(self) -> str:
        assert self._job is not None, "a rank without a writer cannot have failed"
        if self._result is None:
            return f"it did not finish within {DEADLINE_SECONDS:g} s"
        return str(self._result.value)

    def collect(self) -> Any:
        result, self._job, self._result, self._thread = self._result, None, None, None
        return result.value if result is not None else None

    def abandon(self) -> None:
        self._end()
        self._job = self._result = self._thread = None

    def _spawn(self) -> None:
        ours, theirs = Pipe()
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        module = "hpctrain.train.saving.writing_process"
        descriptors = (theirs.fileno(), self._buffers.descriptor)
        argv = [sys.executable, "-m", module, *map(str, (*descriptors, os.getpid()))]
        # until the process ignores them itself, none of Slurm's signals may end it
        before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
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

    def _receive(self) -> None:
        """Take the result if it has come; write here if the process has died."""
        assert self._process is not None
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

        self._thread = threading.Thread(target=write, daemon=True, name="checkpoint-writer")
        self._thread.start()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            try:
                process.wait(_DYING_SECONDS)
            except subprocess.TimeoutExpired:
                return  # a dead file system blocks it
            self._connection.close()
