"""Draw the initial weights of this rank's part of a megatron-core model, at its place in the model.

megatron-core draws either whole matrices on the CPU of each rank, from one seed (equal experts on
all expert-parallel ranks, minutes for a large stage), or parts from generators that differ between
layouts. Here its initialisers only note their standard deviation, and the sharded state dict tells
which part of which weight a tensor is. Belongs here: that. Does not belong here: the numbers (see
`hpctrain.train.initial_weights`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from hpctrain.train.initial_weights import fill_normal, stream_key

_STD = "hpctrain_initial_std"


def noted(std: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return an initialiser that draws nothing and notes the standard deviation."""

    def note(weight: torch.Tensor) -> torch.Tensor:
        setattr(weight, _STD, std)
        return weight

    return note


@torch.no_grad()
def draw_weights(seed: int, chunks: list[Any]) -> None:
    """Draw all weights whose standard deviation was noted; others keep their zeros and ones."""
    # gpt_model.py reads the group for a copy of the embedding on the last stage
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {"dp_cp_group": group, "singleton_local_shards": False}
    for chunk in chunks:
        noted_by_storage = {
            parameter.untyped_storage().data_ptr(): getattr(parameter, _STD)
            for parameter in chunk.parameters()
            if hasattr(parameter, _STD) and parameter.numel()
        }
        drawn: set[int] = set()
        for part in sharded_parts(chunk.sharded_state_dict(metadata=metadata)):
            storage = part.data.untyped_storage().data_ptr()
            if storage not in noted_by_storage:
                continue
            drawn.add(storage)
            added = part.prepend_axis_num
            fill_normal(
                part.data.view((1,) * added + tuple(part.data.shape)),
                stream_key(seed, part.key),
                mean=0.0,
                std=noted_by_storage[storage],
                global_shape=part.global_shape,
                offsets=part.global_offset,
            )
        missing = noted_by_storage.keys() - drawn
        assert not missing, f"{len(missing)} weights are in no sharded state dict"


def sharded_parts(state: Any) -> Iterator[ShardedTensor]:
    """Find all sharded tensors; factories cut theirs into views of one weight."""
    if isinstance(state, ShardedTensor):
        yield state
    elif isinstance(state, ShardedTensorFactory):
        yield from sharded_parts(state.build())
    elif isinstance(state, dict):
        for value in state.values():
            yield from sharded_parts(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from sharded_parts(value)
