"""Measure how many bytes the forward pass of one microbatch keeps for its backward pass.

Measured on meta tensors: a dispatch mode sees every tensor that an operation returns and tracks
its storage until it is freed. That counts what a GPU's memory would hold, except what happens
inside kernels and libraries. Belongs here: counting, and one forward pass through model chunks.
Does not belong here: building them (see `model`), predicting the same number (see
`hpctrain.plan.cost.memory`).
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from megatron.core import parallel_state
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpctrain.engines.megatron import MegatronConfig
from hpctrain.train.engines.megatron.bert import run_bert


class LiveStorages(TorchDispatchMode):
    """Counts `live_bytes` of all meta storages that operations made under this mode and that are
    not freed yet."""

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                self.track(tensor.untyped_storage())
        return output

    def track(self, storage: Any) -> None:
        """Count a storage until it is freed; does nothing for one that is counted already."""
        key, size_bytes = id(storage), storage.nbytes()

        def freed(_: Any) -> None:
            del self._known[key]
            self.live_bytes -= size_bytes

        if key not in self._known:
            self.live_bytes += size_bytes
            self._known[key] = weakref.ref(storage, freed)


def kept_bytes(config: MegatronConfig, chunks: list[Any], tokens: int) -> int:
    """Count the bytes that one forward pass through all `chunks` keeps for the backward pass.

    `tokens` of each sequence are processed by this rank.

    What an earlier pass has left allocated for good is not counted: parameters, the causal mask,
    the buffer that sequence parallelism gathers into. A stage's output is sent and freed
    (schedules.py, deallocate_output_tensor), so only what its graph holds counts.
    """
    chunks = [chunk.bfloat16() if config.precision == "bf16" else chunk for chunk in chunks]
    with LiveStorages() as storages:
        for _ in range(2):
            graphs: list[Any] = []
            gc.collect()
            before_bytes = storages.live_bytes
            graphs = [_forward_graph(config, chunk, tokens) for chunk in chunks]
            gc.collect()
        kept = storages.live_bytes - before_bytes
    assert all(graphs), "without a graph nothing is kept"
    return kept


def _forward_graph(config: MegatronConfig, chunk: Any, tokens: int) -> Any:
    """Run one microbatch; returns the graph of the result, which holds what backward needs."""
    if not chunk.pre_process:
        # what the stage before sends: [tokens, micro batch, hidden], split with SP
        tp = parallel_state.get_tensor_model_parallel_world_size()
        length = tokens // (tp if config.sequence_parallel else 1)
        dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
        received = torch.zeros((length, config.micro_batch_size, config.hidden_size), dtype=dtype)
        chunk.set_input_tensor(received.requires_grad_())
        del received
    batch = torch.zeros(config.micro_batch_size, tokens, dtype=torch.long)
    needed = batch if chunk.pre_process or chunk.post_process else None
    labels = batch if chunk.post_process else None
    if config.model_type == "bert":
        graph = run_bert(chunk, needed, labels, tuple(batch.shape), batch.device).grad_fn
    else:
        graph = chunk(needed, needed, None, labels=labels).grad_fn
    chunk.set_input_tensor(None)  # or the module would hold it, whether backward needs it or not
    return graph
