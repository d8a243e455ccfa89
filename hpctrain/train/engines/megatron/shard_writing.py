"""Write one rank's shards with megatron-core's serialisation, without its writer process.

megatron-core's own writer has three faults that matter here (0.16.1, filesystem_async.py): it
starts a Manager process per rank that outlives a killed rank and keeps its stdout open, it waits
for ever for a writer that has died, and its persistent variant reads live parameters on a CPU.
Belongs here: what runs in the process of `hpctrain.train.saving.writer`, and its result. Does not
belong here: what is saved (see `snapshot`).
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

from hpctrain.train.engine import Writing


class WriteResults:
    """Replaces megatron-core's Manager queue; holds the result of the forked process."""

    def __init__(self) -> None:
        self._result: Any = None

    def install(self) -> None:
        """Become the queue that filesystem_async.py uses (_get_write_results_queue)."""
        filesystem_async._results_queue = self

    def put(self, result: Any) -> None:
        self._result = result

    def get_nowait(self) -> Any:
        """Return the result; raises queue.Empty without one, as megatron-core expects."""
        if self._result is None:
            raise queue.Empty
        return self._result


def writing_from_request(request: AsyncRequest, results: WriteResults) -> Writing:
    """Return this rank's part of what `dist_checkpointing.save` has planned."""

    def finish(result: Any) -> None:
        results.put(result)
        with _postponed_metadata_errors():
            for finalize in request.finalize_fns:
                finalize()

    if request.async_fn is None:
        return Writing(None, finish)
    transforms, buckets = request.async_fn.args[0], request.preload_fn()

    def write() -> tuple[list[str], Any]:
        written = {
            number: _write_bucket(transforms, number, bucket)
            for number, bucket in enumerate(buckets)
        }
        return [Path(bucket[0]).name for bucket in buckets], written

    return Writing(write, finish)


@contextlib.contextmanager
def _postponed_metadata_errors() -> Iterator[None]:
    """Raise rank 0's error in writing metadata only after all ranks have finished.

    megatron-core synchronizes all ranks behind each of the two files (0.16.1: state_dict_saver.py,
    the broadcast at the end of `save_state_dict_async_finalize`; serialization.py, the barrier
    behind `save_config`). After an error between them rank 0 would exit, and the others would wait
    for ever.
    """
    errors: list[Exception] = []
    patched: tuple[tuple[Any, str], ...] = (
        (filesystem_async.FileSystemWriterAsync, "finish"),
        (serialization, "save_config"),
    )

    def postponing(function: Callable[..., None]) -> Callable[..., None]:
        def run(*arguments: Any) -> None:
            try:
                function(*arguments)
            except Exception as error:
                errors.append(error)

        return run

    originals = [getattr(owner, name) for owner, name in patched]
    for (owner, name), function in zip(patched, originals, strict=True):
        setattr(owner, name, postponing(function))
    try:
        yield
    finally:
        for (owner, name), function in zip(patched, originals, strict=True):
            setattr(owner, name, function)
    if errors:
        raise errors[0]


def _write_bucket(transforms: list[Any], number: int, bucket: Any) -> Any:
    """Write one shard file by megatron-core's function, which returns through two queues."""
    results: queue.Queue[Any] = queue.Queue()
    running: queue.Queue[int] = queue.Queue()
    running.put(number)
    filesystem_async.FileSystemWriterAsync.write_preloaded_data(
        transforms, number, bucket, results, running, True
    )
    _, written = results.get()
    if isinstance(written, Exception):
        raise written
    return written
