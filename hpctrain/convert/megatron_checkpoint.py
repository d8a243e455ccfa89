"""Build a GPTModel on one rank on the CPU; load and save its megatron-core checkpoints.

Does not belong here: the names of weights in other formats (see `pretrained_weights`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Before anything that imports megatron-core: it installs the CPU layer.
import hpctrain.train.engines.megatron.assembly  # noqa: F401  # isort: skip
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.serialization import (
    get_default_save_sharded_strategy,
    load_tensors_metadata,
)

from hpctrain.engines.conversion import conversion_config
from hpctrain.spec.model import ModelSpec
from hpctrain.train.engines.megatron import fixes
from hpctrain.train.engines.megatron.core_versions.supported import current
from hpctrain.train.engines.megatron.model import build_chunks, load_weights, transformer_settings
from hpctrain.train.engines.megatron.snapshot import WriteResults, writing_from_request

_PLAIN = {"singleton_local_shards": False}


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


def build(model: ModelSpec, dtype: torch.dtype) -> Any:
    """Build a GPTModel with unset weights, on one rank; its vocabulary is not padded."""
    fixes.install()
    config = conversion_config(model, half=dtype == torch.bfloat16)
    settings = transformer_settings(config, compiled=False)
    (chunk,) = build_chunks(config, settings)
    return chunk


def save(chunk: Any, directory: Path) -> None:
    """Write a `torch_dist` checkpoint of the weights, which any layout can load."""
    results = WriteResults()
    results.install()
    strategy = get_default_save_sharded_strategy("torch_dist")
    strategy.thread_count = 1
    request = dist_checkpointing.save(
        {"model0": chunk.sharded_state_dict(metadata=_PLAIN)},
        str(directory),
        strategy,
        async_sharded_save=True,
        **current().save_options,
    )
    writing = writing_from_request(request, results, None)
    assert writing.write is not None, "one rank writes everything"
    writing.finish(writing.write()[1])


def stored_dtype(directory: Path) -> torch.dtype:
    """Return the type of the weights in a `torch_dist` checkpoint."""
    metadata = load_tensors_metadata(str(directory))
    return metadata["embedding.word_embeddings.weight"].dtype


def load(chunk: Any, directory: Path) -> None:
    """Load the weights of a `torch_dist` checkpoint, which may hold more than weights.

    Raises InvalidInputError when one is missing.
    """
    load_weights(str(directory), [chunk])
