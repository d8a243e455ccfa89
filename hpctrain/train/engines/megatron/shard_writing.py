"""Write one rank's shards as megatron-core plans them, without its writer process.

megatron-core's own writer has three faults that matter here (0.16.1, filesystem_async.py): it
starts a Manager process per rank that outlives a killed rank and keeps its stdout open, it waits
for ever for a writer that has died, and its persistent variant reads live parameters on a CPU.
Belongs here: from its plan to files, and its metadata. Does not belong here: what is saved (see
`snapshot`), writing files (see `hpctrain.train.saving.shard_files`).
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
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)

from hpctrain.train.engine import Writing
from hpctrain.train.saving.host_buffers import HostBuffers
from hpctrain.train.saving.shard_files import ShardFile, WriteShards, copied


class WriteResults:
    """Replaces megatron-core's Manager queue; holds the result of this rank's writer."""

    def __init__(self) -> None:
        self._result: Any = None

    def install(self) -> None:
        """Plan one file per rank, of the tensors as they are, whose results come from here.

        megatron-core clones each tensor on a CPU that is part of a larger storage, as all of its
        optimizer's are, while training waits (0.16.1: filesystem_async.py, `_clone_if_needed`).
        Our writers copy such a tensor when they write it (`hpctrain.train.saving.shard_files`).
        0.19.2 also dequantizes weights in 8 bits there, which no run has (see `option_problems`).
        """

        def prepare_write_data(
            planned: filesystem_async.FileSystemWriterAsync, plan: SavePlan, planner: SavePlanner
        ) -> None:
            raw: list[tuple[WriteItem, Any]] = []
            tensors: list[tuple[WriteItem, Any]] = []
            for item in plan.items:
                kind = raw if item.type == WriteItemType.BYTE_IO else tensors
                kind.append((item, planner.resolve_data(item)))
            name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
            path = Path(planned.checkpoint_dir) / name
            planned.write_buckets = [(str(path), name, (raw, tensors))] if plan.items else []
            planned.results_queue = self if plan.items else None

        filesystem_async.FileSystemWriterAsync.prepare_write_data = prepare_write_data

    def put(self, result: Any) -> None:
        self._result = result

    def get_nowait(self) -> Any:
        """Return the result; raises queue.Empty without one, as megatron-core expects."""
        if self._result is None:
            raise queue.Empty
        return self._result


def writing_from_request(
    request: AsyncRequest, results: WriteResults, buffers: HostBuffers | None
) -> Writing:
    """Return this rank's part of what `dist_checkpointing.save` has planned.

    With `buffers` all tensors are copied into them before this returns.
    """

    def finish(result: Any) -> None:
        results.put(result)
        with _postponed_metadata_errors():
            for finalize in request.finalize_fns:
                finalize()

    if request.async_fn is None:
        return Writing(None, finish)
    # filesystem_async.py, get_save_function_and_args: the second argument of `async_fn`; buckets
    # are (path, name, (pairs of item and bytes, pairs of item and tensor))
    planned = request.async_fn_args[1]
    files = tuple(ShardFile(Path(path), name, (*raw, *data)) for path, name, (raw, data) in planned)
    return Writing(WriteShards(copied(files, buffers)), finish)


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
