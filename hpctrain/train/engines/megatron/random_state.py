"""Read and set the random number generators, so that dropout continues exactly after a resume.

Only dropout draws random numbers while training: torch's default generators and megatron-core's
trackers hold all of their state. Python's and NumPy's generators are not used. Data-parallel
replicas share their state, as in Megatron-LM. Belongs here: reading, setting, and the sharded form
of the state.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.tensor_parallel.random import (
    convert_cuda_rng_state,
    is_graph_safe_cuda_rng_tracker,
)

from hpctrain.train.device import on_cpu

KEY = "rng_state"


def set_rng_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if state["cuda"] is not None and not on_cpu():
        torch.cuda.set_rng_state(state["cuda"])
    tracker = tensor_parallel.get_cuda_rng_tracker()
    graphs = is_graph_safe_cuda_rng_tracker(tracker)
    tracker.set_states(_converted(state["trackers"], to_graphable=graphs))


def _converted(states: dict[str, Any], *, to_graphable: bool) -> dict[str, Any]:
    """Convert states of generators: tensors to store, generators where CUDA graphs need them.

    As Megatron-LM's checkpointing.py does; a run may start or stop using CUDA graphs at a resume.
    """
    return {
        name: convert_cuda_rng_state(state, to_graphable=to_graphable)
        for name, state in states.items()
    }


def sharded_rng_state() -> ShardedObject:
    """Return one object per (pipeline, tensor) rank, as in Megatron-LM's checkpoints."""
    state = {
        "cpu": torch.get_rng_state(),
        "cuda": None if on_cpu() else torch.cuda.get_rng_state(),
        "trackers": _converted(
            tensor_parallel.get_cuda_rng_tracker().get_states(), to_graphable=False
        ),
    }
    return ShardedObject(
        KEY,
        state,
        (
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_tensor_model_parallel_world_size(),
        ),
        (
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_rank(),
        ),
        replica_id=parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )
