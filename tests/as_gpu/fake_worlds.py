"""Every rank of a large job, one after the other, on process groups that send nothing.

torch's fake process group has a rank and a size, and its collectives return at once: groups,
models, buffers and checkpoint keys of any coordinate can be built in one process. Numbers that
follow from a collective are not defined. Belongs here: entering a coordinate, and what a rank
builds there. Does not belong here: what must hold over a world (see `world_checks`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.tensor_parallel import random as tracker
from torch.testing._internal.distributed.fake_pg import FakeStore

from hpctrain.engines.megatron import MegatronConfig
from hpctrain.train.engines.megatron import assembly
from hpctrain.train.engines.megatron.engine import build_optimizer
from hpctrain.train.engines.megatron.mesh import MegatronMesh
from hpctrain.train.engines.megatron.model import ModelChunks, build_model
from hpctrain.train.engines.megatron.snapshot import MegatronSnapshot, sharding_metadata
from hpctrain.train.rank_environment import Launch

_init, _new_group = dist.init_process_group, dist.new_group


@contextmanager
def fake_groups(rank: int, world_size: int) -> Iterator[None]:
    """Let this process be one rank of a world; groups of every backend are fake."""

    def init_process_group(*arguments: Any, **keywords: Any) -> None:
        _init("fake", store=FakeStore(), rank=rank, world_size=world_size)

    def new_group(*arguments: Any, **keywords: Any) -> Any:
        keywords["backend"] = "fake"
        return _new_group(*arguments, **keywords)

    def all_gather_object(answers: list[Any], mine: Any, group: Any = None) -> None:
        answers[:] = [mine] * len(answers)

    gather = dist.all_gather_object
    for module in (dist, dist.distributed_c10d):
        module.new_group, module.all_gather_object = new_group, all_gather_object
    dist.init_process_group = init_process_group
    try:
        yield
    finally:
        dist.init_process_group = _init
        for module in (dist, dist.distributed_c10d):
            module.new_group, module.all_gather_object = _new_group, gather
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def group_of_one() -> Iterator[None]:
    """Let this process be a world of one rank on real groups, whose collectives return numbers.

    For DDP: its C++ code reads what its hook receives, and fake groups have no such work.
    """

    def init_process_group(*arguments: Any, **keywords: Any) -> None:
        _init("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def new_group(*arguments: Any, **keywords: Any) -> Any:
        return _new_group(*arguments, **{**keywords, "backend": "gloo"})

    with (
        mock.patch.object(dist, "init_process_group", init_process_group),
        mock.patch.object(dist, "new_group", new_group),
    ):
        try:
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


@contextmanager
def coordinate(config: MegatronConfig, rank: int) -> Iterator[MegatronMesh]:
    """Join the groups of one rank as its trainer does."""
    with fake_groups(rank, config.world_size):
        tracker._CUDA_RNG_STATE_TRACKER_INITIALIZED = False  # chosen anew, as in a process
        yield assembly.join(config, Launch(rank, config.world_size, rank % 8, "node", 0, ""))


@dataclass(frozen=True)
class Part:
    """A piece of a stored tensor: its place, and a digest of its numbers."""

    key: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    writes: bool
    digest: str


@dataclass(frozen=True)
class Place:
    """What one rank has built."""

    rank: int
    parts: list[Part]
    objects: list[tuple[str, bool]]
    buffers: list[dict[str, Any]]
    tensors: dict[tuple[str, tuple[int, ...]], torch.Tensor]


def visit(
    config: MegatronConfig, rank: int, *, kind: str | None = None, keep: bool = False
) -> Place:
    """Build the fresh model of a rank and its optimizer.

    `kind`: how the optimizer's state is cut for a checkpoint; None leaves it out. `keep`: with the
    tensors themselves.
    """
    with coordinate(config, rank) as mesh:
        model = build_model(config, mesh, initialize=True)
        optimizer = build_optimizer(config, model)
        metadata = sharding_metadata(kind or config.optimizer_sharding)
        if kind is None:
            state: Any = [chunk.sharded_state_dict(metadata=metadata) for chunk in model.bare]
        else:
            snapshot = MegatronSnapshot(config, model, optimizer, None)  # type: ignore[arg-type]
            state = snapshot._sharded_parts(metadata, is_loading=False)
        parts, objects, tensors = [], [], {}
        for leaf in leaves(state):
            writes = _is_main(leaf.replica_id)
            if isinstance(leaf, ShardedObject):
                objects.append((leaf.unique_key, writes))
                continue
            part = _part(leaf, writes)
            parts.append(part)
            if keep:
                tensors[part.key, part.offset] = leaf.data.detach().clone().view(part.shape)
        return Place(rank, parts, objects, buffers_of(model), tensors)


def leaves(state: Any) -> Iterator[Any]:
    """Find all sharded tensors and objects; factories are cut as when saving."""
    if isinstance(state, ShardedTensor | ShardedObject):
        yield state
    elif isinstance(state, ShardedTensorFactory):
        yield from leaves(state.build())
    elif isinstance(state, dict):
        for value in state.values():
            yield from leaves(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from leaves(value)


def _is_main(replica_id: Any) -> bool:
    """Tell the replica that is written (dist_checkpointing: is_main_replica)."""
    return replica_id == 0 if isinstance(replica_id, int) else not any(replica_id)


def _part(leaf: Any, writes: bool) -> Part:
    shape = (1,) * leaf.prepend_axis_num + tuple(leaf.local_shape)
    data = leaf.data
    digest = ""
    if data is not None:
        digest = hashlib.blake2b(
            data.detach().contiguous().view(torch.uint8).numpy().tobytes(), digest_size=8
        ).hexdigest()
    return Part(
        leaf.key, tuple(leaf.global_shape), tuple(leaf.global_offset), shape, writes, digest
    )


def buffers_of(model: ModelChunks) -> list[dict[str, Any]]:
    """Describe the gradient buffers of a rank: parameters by name with their ranges, buckets."""
    found = []
    for number, chunk in enumerate(model.wrapped):
        names = {id(weight): name for name, weight in chunk.module.named_parameters()}
        wanted = {name for name in names.values()}
        for kind, buffers in (
            ("dense", chunk.buffers),
            ("experts", chunk.expert_parallel_buffers),
        ):
            for buffer in buffers:
                ranges = {
                    names[id(weight)]: list(place)
                    for weight, place in buffer.param_index_map.items()
                }
                sizes = {names[id(weight)]: weight.numel() for weight in buffer.param_index_map}
                wanted -= set(ranges)
                found.append(
                    dict(
                        chunk=number,
                        kind=kind,
                        numel=buffer.numel,
                        ranks=dist.get_process_group_ranks(buffer.data_parallel_group),
                        ranges=ranges,
                        sizes=sizes,
                        buckets=[
                            [bucket.offset, bucket.grad_data.numel(), bucket.numel_unpadded]
                            for bucket in buffer.buckets
                        ],
                    )
                )
        assert not wanted, f"parameters without a buffer: {sorted(wanted)}"
    return found


def optimizer_ranges(config: MegatronConfig, rank: int) -> list[dict[str, Any]]:
    """Return what the optimizer of a rank owns: by buffer, ranges of each parameter."""
    with coordinate(config, rank) as mesh:
        model = build_model(config, mesh, initialize=True)
        names = {
            id(weight): f"{number}.{name}"
            for number, chunk in enumerate(model.wrapped)
            for name, weight in chunk.module.named_parameters()
        }
        inner = build_optimizer(config, model).inner
        found = []
        for optimizer in getattr(inner, "chained_optimizers", [inner]):
            for buffer, of_dtypes in zip(optimizer.buffers, optimizer.gbuf_ranges, strict=True):
                owned = {
                    names[id(weight)]: [place["param"].start, place["param"].end, weight.numel()]
                    for buckets in of_dtypes.values()
                    for bucket in buckets
                    for weight, place in bucket["param_map"].items()
                }
                group = dist.get_process_group_ranks(buffer.data_parallel_group)
                found.append(dict(ranks=group, owned=owned))
        return found
