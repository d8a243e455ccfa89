"""Read and write megatron-core's checkpoints weight by weight, without the model in memory.

A GPTModel on torch's meta device knows names, shapes and places of its weights; megatron-core plans
the checkpoint from it. Does not belong here: the names of weights in other formats (see
`pretrained_weights`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Before anything that imports megatron-core: it installs the CPU layer.
import hpctrain.train.engines.megatron.assembly  # noqa: F401  # isort: skip
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import WriteResult, _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.checkpoints.staged import MEGATRON_NAME
from hpctrain.convert.unfinished import DigestedStream, UnfinishedConversion
from hpctrain.engines.conversion import conversion_config
from hpctrain.spec.model import ModelSpec
from hpctrain.train.engines.megatron import fixes
from hpctrain.train.engines.megatron.core_versions.supported import current
from hpctrain.train.engines.megatron.model import (
    build_chunks,
    sharded_parts,
    stored_name,
    transformer_settings,
)
from hpctrain.train.engines.megatron.snapshot import WriteResults, writing_from_request

_PLAIN = {"singleton_local_shards": False}
# Rows may be more than a model has: those of a padded vocabulary, or of longer sequences.
_LONGER = ("embedding.word_embeddings.", "embedding.position_embeddings.", "output_layer.")


@contextmanager
def one_rank() -> Iterator[None]:
    """Initialize process groups of world size 1 for the duration of the block."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(0)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def build(model: ModelSpec, dtype: torch.dtype, *, on_meta: bool = True) -> Any:
    """Build a GPTModel on one rank, its vocabulary not padded: without memory, or with unset
    weights."""
    fixes.install()
    config = conversion_config(model, half=dtype == torch.bfloat16)
    with torch.device("meta" if on_meta else "cpu"):
        settings = transformer_settings(config, compiled=False, on_meta=on_meta)
        (chunk,) = build_chunks(config, settings)
    return chunk


@dataclass(frozen=True)
class StoredPart:
    """A part of a weight in a checkpoint: where it begins in the tensor `key`, and how it lies in
    the weight, which may be stored as several (gate and up projections)."""

    key: str
    offset: tuple[int, ...]
    global_shape: tuple[int, ...]
    view: tuple[tuple[int, ...], tuple[int, ...], int]  # shape, strides, first element

    @property
    def shape(self) -> tuple[int, ...]:
        """As it is stored, layers and experts being axes in front."""
        return (1,) * (len(self.offset) - len(self.view[0])) + self.view[0]

    def of(self, weight: Any) -> Any:
        return torch.as_strided(weight, *self.view)


@dataclass(frozen=True)
class CoreWeight:
    """A weight or buffer of a GPTModel."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[StoredPart, ...]


class CoreWeights:
    """The weights of a model by their names in its GPTModel, in the order of its layers."""

    def __init__(self, model: ModelSpec, dtype: torch.dtype) -> None:
        self.state = build(model, dtype).sharded_state_dict(metadata=_PLAIN)
        self.weights = {
            name: _described(one)
            for name, one in self.state.items()
            if isinstance(one, ShardedTensor | ShardedTensorFactory)
        }

    def write(self, make: Callable[[str], Any], work: UnfinishedConversion) -> None:
        """Write a `torch_dist` checkpoint, which any layout can load, of what `make` makes."""
        (work.directory / MEGATRON_NAME).unlink(missing_ok=True)  # of an attempt that was complete
        # it warns of a directory in which there are files
        logging.getLogger(dist_checkpointing.serialization.__name__).setLevel(logging.ERROR)
        results = WriteResults()
        results.install()
        strategy = get_default_save_sharded_strategy("torch_dist")
        strategy.thread_count = 1
        request = dist_checkpointing.save(
            {"model0": self.state},
            str(work.directory),
            strategy,
            async_sharded_save=True,
            **current().save_options,
        )
        ((_, _, (raw, tensors)),) = request.async_fn_args[1]
        names = {
            (part.key, part.offset): (name, part)
            for name, weight in self.weights.items()
            for part in weight.parts
        }
        order = {name: number for number, name in enumerate(self.weights)}
        placed = [(item, *names[item.index.fqn, tuple(item.index.offset)]) for item, _ in tensors]
        placed.sort(key=lambda one: order[one[1]])  # the parts of a weight beside each other

        @lru_cache(maxsize=1)
        def whole(name: str) -> Any:
            made, weight = make(name), self.weights[name]
            assert tuple(made.shape) == weight.shape, (name, made.shape, weight.shape)
            return made.to(weight.dtype).contiguous()

        written = [
            result
            for number, group in enumerate(self._files(placed, work.most_file_bytes))
            for result in _write_shard(work, number, raw if number == 0 else [], group, whole)
        ]
        writing_from_request(request, results, None).finish({0: written})

    def _files(self, placed: list[Any], most_file_bytes: int) -> Iterator[list[Any]]:
        """Cut the list of items into files."""
        group: list[Any] = []
        size_bytes = 0
        for item, name, part in placed:
            more = torch.Size(part.shape).numel() * self.weights[name].dtype.itemsize
            if group and size_bytes + more > most_file_bytes:
                yield group
                group, size_bytes = [], 0
            group.append((item, name, part))
            size_bytes += more
        yield group


def _described(one: Any) -> CoreWeight:
    parts = tuple(
        StoredPart(
            part.key,
            tuple(part.global_offset),
            tuple(part.global_shape),
            (tuple(part.data.shape), part.data.stride(), part.data.storage_offset()),
        )
        for part in sharded_parts(one)
    )
    return CoreWeight(tuple(one.data.shape), one.data.dtype, parts)


def _write_shard(
    work: UnfinishedConversion,
    number: int,
    raw: list[Any],
    group: list[Any],
    whole: Callable[[str], Any],
) -> list[WriteResult]:
    """Write one file: each item by torch.save, as `hpctrain.train.saving.shard_files` does."""
    name = f"__{number}_0.distcp"

    def write(stream: DigestedStream) -> list[tuple[int, int]]:
        places = []
        for _, data in raw:
            places.append((stream.tell(), stream.write(data.getbuffer())))
        for _, weight, part in group:
            begin = stream.tell()
            tensor = part.of(whole(weight)).reshape(part.shape)
            if tensor.untyped_storage().nbytes() != tensor.numel() * tensor.itemsize:
                tensor = tensor.clone()  # torch.save writes whole storages
            torch.save(tensor, stream)
            places.append((begin, stream.tell() - begin))
        return places

    items = [*(item for item, _ in raw), *(item for item, _, _ in group)]
    return [
        WriteResult(item.index, length, _StorageInfo(name, begin, length))
        for item, (begin, length) in zip(items, work.write(name, write), strict=True)
    ]


class StoredWeights:
    """A `torch_dist` checkpoint, of any layout, which may hold more than weights."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._reader = FileSystemReader(directory)
        self._metadata = self._reader.read_metadata()

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights."""
        about: Any = self._metadata.state_dict_metadata["embedding.word_embeddings.weight"]
        dtype: torch.dtype = about.properties.dtype
        return dtype

    @property
    def has_predictions(self) -> bool:
        """Whether there are prediction layers."""
        return any(name.startswith("mtp.") for name in self._metadata.state_dict_metadata)

    def check(self, weights: CoreWeights) -> None:
        """Raise InvalidInputError where weights are missing or have another shape."""
        wrong = []
        for name, weight in weights.weights.items():
            for part in weight.parts:
                about = self._about(part)
                found = () if about is None else tuple(about.size)
                rows = max(found[:1], part.global_shape[:1])
                same = (*rows, *part.global_shape[1:])
                if found != (same if part.key.startswith(_LONGER) else part.global_shape):
                    wrong.append(name)
        if wrong:
            message = f"has no weights {', '.join(wrong[:3])}: it is of another model"
            raise InvalidInputError([Problem(message, str(self.directory))])

    def read(self, weight: CoreWeight) -> Any:
        """Read one weight from all chunks that have a part of it."""
        tensor = torch.empty(weight.shape, dtype=weight.dtype)
        for part in weight.parts:
            self._fill(part.of(tensor).view(part.shape), part)
        return tensor

    def _about(self, part: StoredPart) -> Any:
        known = self._metadata.state_dict_metadata
        return known.get(stored_name(part.key, known))

    def _fill(self, target: Any, part: StoredPart) -> None:
        about = self._about(part)
        filled = 0
        for chunk in about.chunks:
            begins = [max(a, b) for a, b in zip(part.offset, chunk.offsets, strict=True)]
            ends = [
                min(a + size, b + length)
                for a, size, b, length in zip(
                    part.offset, part.shape, chunk.offsets, chunk.sizes, strict=True
                )
            ]
            if any(begin >= end for begin, end in zip(begins, ends, strict=True)):
                continue
            ranges = list(zip(begins, ends, strict=True))
            here = [slice(b - o, e - o) for (b, e), o in zip(ranges, part.offset, strict=True)]
            there = [slice(b - o, e - o) for (b, e), o in zip(ranges, chunk.offsets, strict=True)]
            key = stored_name(part.key, self._metadata.state_dict_metadata)
            info = self._metadata.storage_data[MetadataIndex(key, chunk.offsets)]
            with (self.directory / info.relative_path).open("rb") as stream:
                view = self._reader._slice_file(stream, info)
                whole = torch.load(view, map_location="cpu", weights_only=True)
            found = whole[tuple(there)]
            target[tuple(here)].copy_(found)
            filled += found.numel()
        assert filled == target.numel(), f"{part.key} has holes"
