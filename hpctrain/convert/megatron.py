"""A GPTModel on one rank and on the CPU: built, loaded from a checkpoint, or saved as one.

Belongs here: megatron-core, on as little as it can do with. Does not belong here: which weight is
which (see `mapping`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# First of all that imports megatron-core: it puts the CPU layer in force.
import hpctrain.train.engines.megatron.assembly  # noqa: F401  # isort: skip
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.serialization import (
    get_default_save_sharded_strategy,
    load_tensors_metadata,
)

from hpctrain.engines.conversion import conversion_config
from hpctrain.spec.model import ModelSpec
from hpctrain.train.engines.megatron.model import build_chunks, transformer_settings
from hpctrain.train.engines.megatron.pretrained_weights import load_weights
from hpctrain.train.engines.megatron.shard_writing import WriteResults, writing_from_request

_PLAIN = {"singleton_local_shards": False}


@contextmanager
def one_rank() -> Iterator[None]:
    """This process as a world of its own."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(0)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def build(model: ModelSpec, dtype: torch.dtype) -> Any:
    """A GPTModel with room for the weights, on one rank; its vocabulary is not padded."""
    config = conversion_config(model, half=dtype == torch.bfloat16)
    settings = transformer_settings(config, initialize=False, compiled=False)
    (chunk,) = build_chunks(config, settings)
    return chunk


def save(chunk: Any, directory: Path) -> None:
    """A `torch_dist` checkpoint with weights alone, for every layout."""
    results = WriteResults()
    results.install()
    strategy = get_default_save_sharded_strategy("torch_dist", 1)
    strategy.thread_count = 1
    request = dist_checkpointing.save(
        {"model0": chunk.sharded_state_dict(metadata=_PLAIN)},
        str(directory),
        strategy,
        async_sharded_save=True,
    )
    writing = writing_from_request(request, results)
    assert writing.write is not None, "one rank writes everything"
    writing.finish(writing.write()[1])


def stored_dtype(directory: Path) -> torch.dtype:
    """The type of the weights in a `torch_dist` checkpoint."""
    about = load_tensors_metadata(str(directory))
    return about["embedding.word_embeddings.weight"].dtype


def load(chunk: Any, directory: Path) -> None:
    """The weights of a `torch_dist` checkpoint, whatever else it holds and whoever saved it.

    Raises InvalidInputError when one is missing.
    """
    load_weights(str(directory), [chunk])
