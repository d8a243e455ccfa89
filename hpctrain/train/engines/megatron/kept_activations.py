"""How many bytes the forward pass of one microbatch leaves behind for its backward pass.

Measured on meta tensors: a dispatch mode sees every tensor that an operation returns and follows
its storage until it is freed. That counts what a GPU's memory would hold, except what happens
inside kernels and libraries. Belongs here: counting, and one forward pass through model chunks.
Does not belong here: building them (see `model`), predicting the same number (see
`hpctrain.plan.activations`).
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
    """Bytes of all meta storages that operations under this mode made and nobody freed yet."""

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
                self._follow(tensor.untyped_storage())
        return output

    def _follow(self, storage: Any) -> None:
        key, size_bytes = id(storage), storage.nbytes()
        if key not in self._known:
            self.live_bytes += size_bytes
            self._known[key] = weakref.ref(storage, lambda _: self._freed(key, size_bytes))

    def _freed(self, key: int, size_bytes: int) -> None:
        del self._known[key]
        self.live_bytes -= size_bytes


def kept_bytes(config: MegatronConfig, chunks: list[Any], tokens: int) -> int:
    """Bytes that one forward pass through all `chunks` keeps for the backward pass.

    `tokens` are those of each sequence that this rank works on.

    Whatever a pass before left behind for good is not counted: parameters, the causal mask, the
    buffer that sequence parallelism gathers into. A stage's output is sent and freed
    (schedules.py, deallocate_output_tensor), so only what its graph holds counts.
    """
    chunks = [_in_precision(config, chunk) for chunk in chunks]
    with LiveStorages() as storages:
        for _ in range(2):
            graphs: list[Any] = []
            gc.collect()
            before_bytes = storages.live_bytes
            graphs = [_forward(config, chunk, tokens) for chunk in chunks]
            gc.collect()
        kept = storages.live_bytes - before_bytes
    assert all(graphs), "without a graph nothing is kept"
    return kept


def _in_precision(config: MegatronConfig, chunk: Any) -> Any:
    return chunk.bfloat16() if config.precision == "bf16" else chunk


def _forward(config: MegatronConfig, chunk: Any, tokens: int) -> Any:
    """Run one microbatch; returns the graph of the result, which holds what backward needs."""
    if not chunk.pre_process:
        chunk.set_input_tensor(_received(config, tokens))
    batch = torch.zeros(config.micro_batch_size, tokens, dtype=torch.long)
    needed = batch if chunk.pre_process or chunk.post_process else None
    labels = batch if chunk.post_process else None
    if config.model_type == "bert":
        graph = run_bert(chunk, needed, labels, tuple(batch.shape), batch.device).grad_fn
    else:
        graph = chunk(needed, needed, None, labels=labels).grad_fn
    chunk.set_input_tensor(None)  # or the module would hold it, whether backward needs it or not
    return graph


def _received(config: MegatronConfig, tokens: int) -> Any:
    """What the stage before sends: [tokens, micro batch, hidden], split with SP."""
    parts = parallel_state.get_tensor_model_parallel_world_size() if config.sequence_parallel else 1
    shape = (tokens // parts, config.micro_batch_size, config.hidden_size)
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    return torch.zeros(shape, dtype=dtype).requires_grad_()
