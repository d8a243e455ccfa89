"""`python -m hpctrain.train.engines.megatron.verify TRAIN_JSON`: build a rank of each stage, on no
GPU.

Prints the model that megatron-core built as one JSON document
(`hpctrain.engines.verification.BuiltModel`). The ranks are in a fake process group of the planned
size, and their tensors on the meta device have shapes and no memory. The modules are those that
training uses (`model`). Belongs here: the order of steps, how kept bytes are counted, and the
command line. Does not belong here: what a model is made of (see `model`), comparing (see
`hpctrain.engines`).
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# First of all that imports megatron-core: it puts the CPU layer in force.
import hpctrain.train.engines.megatron.assembly  # noqa: F401  # isort: skip
import weakref
from collections.abc import Callable

from megatron.core import parallel_state
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpctrain.base.errors import InvalidInputError
from hpctrain.engines.megatron import MegatronConfig
from hpctrain.engines.verification import BuiltModel, BuiltStage
from hpctrain.plan.layout_words import DEFAULT_ORDER
from hpctrain.train import software
from hpctrain.train.engines.megatron import fixes
from hpctrain.train.engines.megatron.mesh import parallel_sizes, seed_everything
from hpctrain.train.engines.megatron.model import build_chunks, run_bert, transformer_settings
from hpctrain.train.engines.megatron.option_settings import without_gpu_options
from hpctrain.train.job import read_config


def build(config: MegatronConfig) -> BuiltModel:
    """Build one rank of each stage: tensor, context and data parallel rank 0."""
    fixes.install()
    unmeasured = unmeasured_reason(config)
    engine = config.transformer_impl != "local"
    tokens = config.seq_length // config.context_parallel_size

    # what can be built without a GPU, with the same parameters
    changes: dict[str, object] = {"transformer_impl": "local"}
    remarks = []
    if engine:
        remarks.append("built with megatron-core's own layers: TransformerEngine's need a GPU")
    if config.model.mla is not None and engine:
        remarks.append("latent attention was arranged from them as TransformerEngine's would be")
    if config.context_parallel_size > 1:
        ranks = config.context_parallel_size * config.data_parallel_size
        changes |= dict(context_parallel_size=1, data_parallel_size=ranks)
        remarks.append("built with cp as part of dp: cp splits no parameters")
    if without_gpu_options(config) != config:
        remarks.append("built in bf16 or fp32 without options that need a GPU")
    buildable = without_gpu_options(config).model_copy(update=changes)

    stages = []
    with flash_attention(engine and config.precision != "fp32"):
        for index in range(config.pipeline_model_parallel_size):
            with _fake_rank(buildable, index) as rank, MetaDeviceMode():
                settings = transformer_settings(buildable, compiled=True, on_meta=True)
                chunks = build_chunks(buildable, settings)
                stages.append(
                    BuiltStage(
                        index=index,
                        rank=rank,
                        parameters=sum(p.numel() for chunk in chunks for p in chunk.parameters()),
                        kept_bytes=None if unmeasured else kept_bytes(buildable, chunks, tokens),
                    )
                )
            del settings, chunks
    return BuiltModel(
        megatron_core_version=software.megatron_core() or "unknown",
        torch_version=torch.__version__,
        stages=tuple(stages),
        remarks=(*remarks, *([unmeasured] if unmeasured else [])),
    )


def unmeasured_reason(config: MegatronConfig) -> str | None:
    """Return why kept bytes are not measured; None if they are."""
    if config.model.moe is not None:
        return "activations are not measured: how many tokens an expert gets is not known here"
    if config.model.mla is not None or config.model.mtp_layers:
        return "activations are not measured with latent attention or prediction layers"
    return None


@contextmanager
def _fake_rank(config: MegatronConfig, stage: int) -> Iterator[int]:
    """Make this process the first rank of a stage; collectives return at once and move nothing."""
    tp, pp = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
    replicas = config.data_parallel_size  # context parallel ranks were made part of them
    inner = replicas if config.parallel_order == DEFAULT_ORDER else 1
    rank = stage * tp * inner
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=tp * pp * replicas)
    try:
        parallel_state.initialize_model_parallel(
            **parallel_sizes(config), create_gloo_process_groups=False
        )
        assert parallel_state.get_pipeline_model_parallel_rank() == stage
        seed_everything(config)
        yield rank
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def main(argv: Sequence[str]) -> int:
    """Print only the document to stdout; returns 0, or the exit code of an error on stderr."""
    gc.freeze()  # imported objects stay: collecting through them for each stage takes seconds
    try:
        with redirect_stdout(sys.stderr):
            config = read_config(Path(argv[0]))
            assert isinstance(config, MegatronConfig), "only megatron-core's models are verified"
            built = build(config)
    except InvalidInputError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(built.model_dump_json())
    return 0


# -- Measure how many bytes the forward pass of one microbatch keeps for its backward pass ------
# Measured on meta tensors: a dispatch mode sees every tensor that an operation returns and tracks
# its storage until it is freed. That counts what a GPU's memory would hold, except what happens
# inside kernels and libraries.


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
        received = torch.zeros((length, config.micro_batch_size, config.model.hidden), dtype=dtype)
        chunk.set_input_tensor(received.requires_grad_())
        del received
    batch = torch.zeros(config.micro_batch_size, tokens, dtype=torch.long)
    needed = batch if chunk.pre_process or chunk.post_process else None
    labels = batch if chunk.post_process else None
    if config.model.reads_masked_text:
        graph = run_bert(chunk, needed, labels, tuple(batch.shape), batch.device).grad_fn
    else:
        graph = chunk(needed, needed, None, labels=labels).grad_fn
    chunk.set_input_tensor(None)  # or the module would hold it, whether backward needs it or not
    return graph


# -- Replace all new tensors by meta tensors, which have shapes and no memory -------------------


META = torch.device("meta")


class MetaDeviceMode(TorchFunctionMode):
    """Puts every new tensor on the meta device, whatever device the caller names.

    `torch.device("meta")` as a context is not enough: it leaves calls that name a device
    (megatron-core names the GPU), and the factories that `megatron_on_cpu.install` has wrapped.
    `torch.tensor` keeps its values on the CPU: recomputation stores the kind of mask in one and
    reads it again.
    """

    def __init__(self) -> None:
        super().__init__()
        factories = {getattr(one, "__wrapped__", one) for one in _device_constructors()}
        self._factories = factories - {getattr(torch.tensor, "__wrapped__", torch.tensor)}

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in self._factories:
            return function(*args, **{**kwargs, "device": META})
        return _AS_ON_GPUS.get(function, function)(*args, **kwargs)


def _dropout(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Apply the kernel that CUDA uses, which keeps one byte per element."""
    return torch.native_dropout(x, p, training)[0] if training and p > 0 else x


class _KeepsInputs(torch.autograd.Function):
    """An output of `shape` that keeps these tensors for a backward pass, which never runs."""

    @staticmethod
    def forward(context: Any, shape: tuple[int, ...], *kept: Any) -> Any:
        output = kept[0].new_empty(shape)
        context.save_for_backward(*kept)
        return output


def _rms_norm(x: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    """Keep what CUDA's kernel keeps: the input and one fp32 number per row."""
    scales = x.new_empty((*x.shape[: -len(normalized_shape)], 1), dtype=torch.float32)
    return _KeepsInputs.apply(tuple(x.shape), x, weight, scales)


_AS_ON_GPUS: dict[Any, Callable[..., Any]] = {
    torch.nn.functional.dropout: _dropout,
    torch.nn.functional.rms_norm: _rms_norm,
}


class _KeepsInputsAndOutput(_KeepsInputs):
    """Flash attention (Dao et al. 2022, arXiv 2205.14135, algorithm 2) also keeps its output."""

    @staticmethod
    def forward(context: Any, shape: tuple[int, ...], *kept: Any) -> Any:
        output = kept[0].new_empty(shape)
        context.save_for_backward(*kept, output)
        return output


def _flash_forward(self: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
    """Return [s, b, a d] from [s, b, a, d] each, key and value with fewer heads.

    Keeps one sum per row besides inputs and output.
    """
    length, batch, heads, size = query.shape
    sums = query.new_empty((batch, heads, length), dtype=torch.float32)
    return _KeepsInputsAndOutput.apply((length, batch, heads * size), query, key, value, sums)


@contextmanager
def flash_attention(enabled: bool) -> Iterator[None]:
    """Let core attention keep what flash attention keeps, instead of s x s tensors."""
    original = DotProductAttention.forward
    if enabled:
        DotProductAttention.forward = _flash_forward
    try:
        yield
    finally:
        DotProductAttention.forward = original


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
