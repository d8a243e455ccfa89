"""megatron-core's serialisation of one rank's shards, without the process it would start for it.

Its own writer has three faults that matter here (0.16.1, filesystem_async.py): it starts a Manager
process per rank that outlives a killed rank and keeps its stdout open, it waits for ever for a
writer that has died, and its persistent variant reads live parameters on a CPU. Belongs here: what
runs in the process of `hpctrain.train.saving.writer`, and carrying its result back. Does not belong
here: what is saved (see `snapshot`).
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


class Results:
    """In the place of megatron-core's Manager queue: holds what the forked process has told."""

    def __init__(self) -> None:
        self._told: Any = None

    def install(self) -> None:
        """filesystem_async.py, _get_write_results_queue: uses what is there before making one."""
        filesystem_async._results_queue = self

    def put(self, told: Any) -> None:
        self._told = told

    def get_nowait(self) -> Any:
        """The result; queue.Empty when there is none, as megatron-core expects it."""
        if self._told is None:
            raise queue.Empty
        return self._told


def writing_of(request: AsyncRequest, results: Results) -> Writing:
    """This rank's part of what `dist_checkpointing.save` has planned."""

    def finish(told: Any) -> None:
        results.put(told)
        with _metadata_errors_at_the_end():
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
def _metadata_errors_at_the_end() -> Iterator[None]:
    """What rank 0 cannot write is raised when all ranks are through.

    megatron-core has all ranks meet behind each of the two files (0.16.1: state_dict_saver.py, the
    broadcast at the end of `save_state_dict_async_finalize`; serialization.py, the barrier behind
    `save_config`). An error between them would have rank 0 leave, and the others wait for ever.
    """
    errors: list[Exception] = []
    places: tuple[tuple[Any, str], ...] = (
        (filesystem_async.FileSystemWriterAsync, "finish"),
        (serialization, "save_config"),
    )
    real = [getattr(place, name) for place, name in places]
    for (place, name), function in zip(places, real, strict=True):
        setattr(place, name, _keeping(errors, function))
    try:
        yield
    finally:
        for (place, name), function in zip(places, real, strict=True):
            setattr(place, name, function)
    if errors:
        raise errors[0]


def _keeping(errors: list[Exception], function: Callable[..., None]) -> Callable[..., None]:
    def kept(*arguments: Any) -> None:
        try:
            function(*arguments)
        except Exception as error:
            errors.append(error)

    return kept


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
