"""The process that writes one rank's part of a checkpoint, beside training.

megatron-core's own writer has three faults that matter here (0.16.1, filesystem_async.py): it
starts a Manager process per rank that outlives a killed rank and keeps its stdout open, it waits
for ever for a writer that has died, and its persistent variant reads live parameters on a CPU.
So its serialisation is called in a process of ours: forked, hence a snapshot by copy-on-write of
what is on the CPU (GPU tensors are copied to the CPU before), with an exit code and a deadline.
Belongs here: the process. Does not belong here: what is saved and when.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import queue
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

from hpctrain.checkpoints.manifest import write_rank_digests
from hpctrain.train.control import WriterState
from hpctrain.train.faults import is_full
from hpctrain.train.room import exhausted
from hpctrain.train.stacks import ignore_requests

# A writer that is not through by then is stuck: a shared file system that no longer answers.
DEADLINE_SECONDS = 1800.0
# The process's exit code when the disk is full.
_NO_SPACE_EXIT = 28


class ResultFile:
    """Carries the writer's result to the trainer, in place of megatron-core's Manager queue.

    An unnamed file that both processes have open: nothing is left behind by a kill.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 lives as long as the rank

    def clear(self) -> None:
        os.ftruncate(self._file.fileno(), 0)

    def put(self, value: object) -> None:
        data = pickle.dumps(value)
        os.pwrite(self._file.fileno(), data, 0)

    def get_nowait(self) -> Any:
        """The result; queue.Empty when there is none, as megatron-core expects it."""
        data = os.pread(self._file.fileno(), os.fstat(self._file.fileno()).st_size, 0)
        if not data:
            raise queue.Empty
        return pickle.loads(data)


class Writer:
    """At most one writing process of this rank."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._results = ResultFile()
        # filesystem_async.py, _get_write_results_queue: uses what is there before making its own
        filesystem_async._results_queue = self._results
        self._process: Any = None
        self._started_at = 0.0

    def start(self, request: AsyncRequest) -> None:
        """Fork the process for what `dist_checkpointing.save` has planned for this rank."""
        assert self._process is None, "the previous writer was not collected"
        self._started_at = time.monotonic()
        self._results.clear()
        if request.async_fn is None:
            return
        transforms = request.async_fn.args[0]
        buckets = request.preload_fn()
        context = multiprocessing.get_context("fork")
        self._process = context.Process(
            target=_write, args=(self._rank, transforms, buckets, self._results), daemon=True
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
        with contextlib.suppress(queue.Empty):
            return str(self._results.get_nowait())
        return f"it ended with exit code {self._process.exitcode}"

    def collect(self) -> None:
        """Forget the finished process."""
        if self._process is not None:
            self._process.join()
            self._process.close()
            self._process = None

    def abandon(self) -> None:
        """Kill the process, if there is one, when the launch ends without its checkpoint."""
        if self._process is not None and self._process.is_alive():
            self._process.kill()
            self._process.join()


_STATES = {0: WriterState.FINISHED, _NO_SPACE_EXIT: WriterState.NO_SPACE}


@contextlib.contextmanager
def _no_stacks_of_the_child() -> Iterator[None]:
    """Hold back requests for stacks while forking: the child would answer in its parent's file."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGQUIT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _write(rank: int, transforms: list[Any], buckets: list[Any], results: ResultFile) -> None:
    """In the forked process: write the buckets, digest the files, report."""
    ignore_requests()
    gc.disable()  # collecting could touch GPU memory that belongs to the parent
    os.nice(5)  # training goes first
    try:
        written = {
            number: _write_bucket(transforms, number, bucket)
            for number, bucket in enumerate(buckets)
        }
        paths = [Path(bucket[0]) for bucket in buckets]
        write_rank_digests(paths[0].parent, rank, [path.name for path in paths])
        results.put(written)
    except Exception as error:
        results.put(f"{type(error).__name__}: {error}")
        full = is_full(error) or exhausted(Path(buckets[0][0]).parent)
        sys.exit(_NO_SPACE_EXIT if full else 1)


def _write_bucket(transforms: list[Any], number: int, bucket: Any) -> Any:
    """One shard file by megatron-core's function, which answers through two queues."""
    answers: queue.Queue[Any] = queue.Queue()
    running: queue.Queue[int] = queue.Queue()
    running.put(number)
    filesystem_async.FileSystemWriterAsync.write_preloaded_data(
        transforms, number, bucket, answers, running, True
    )
    _, written = answers.get()
    if isinstance(written, Exception):
        raise written
    return written
