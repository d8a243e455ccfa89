"""Build the model of one rank: megatron-core's configuration, layers, wrapper, first weights.

Belongs here: from MegatronConfig to model chunks. Does not belong here: the optimizer, the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as functional
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.activations import quick_gelu, squared_relu
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.serialization import load_tensors_metadata
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.bert.bert_layer_specs import (
    bert_layer_local_spec,
    get_bert_layer_with_transformer_engine_spec,
)
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import (
    MLATransformerConfig,
    TransformerConfig,
)

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.engines.megatron import INITIAL_STD, MegatronConfig, core_fields, position_kind
from hpctrain.train import software
from hpctrain.train.data import Microbatch
from hpctrain.train.device import on_cpu
from hpctrain.train.engines.megatron.core_versions.supported import current
from hpctrain.train.engines.megatron.layers import arrange_ends, arranged, scale_rotary
from hpctrain.train.engines.megatron.mesh import MegatronMesh
from hpctrain.train.engines.megatron.option_settings import (
    attention_settings,
    counts_tokens,
    dispatch_settings,
    gradient_settings,
    graph_settings,
    message_settings,
    number_format_settings,
    offload_settings,
    recompute_settings,
)
from hpctrain.train.engines.models.tasks import Masking, masking_of
from hpctrain.train.initial_weights import Normal, fill, stream_key

# -- Build BERT on megatron-core and run one microbatch of masked language modeling --------------
# The same tokens are masked as for the other engines' BERT. There is no next-sentence head (Liu et
# al. 2019, arXiv 1907.11692, section 4.2: no loss without it). Norms come before attention and
# MLP, as megatron-core has them.


LossOf = Callable[[Any], Callable[[Any], tuple[Any, Any, Any]]]


def build_bert(
    config: MegatronConfig,
    settings: TransformerConfig,
    stage: int | None,
    *,
    fused: bool,
    first: bool,
    last: bool,
) -> BertModel:
    """Build one chunk; `stage` is its virtual stage, `first` embeds, `last` has the heads.

    `fused`: with TransformerEngine's layers.
    """
    layers = get_bert_layer_with_transformer_engine_spec() if fused else bert_layer_local_spec
    return BertModel(
        settings,
        num_tokentypes=config.model.segments,
        transformer_layer_spec=layers,
        vocab_size=config.padded_vocab_size,
        max_sequence_length=config.seq_length,
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=config.model.tied,
        position_embedding_type=position_kind(config.model),
        add_binary_head=False,
        vp_stage=stage,
    )


def run_bert(chunk: Any, tokens: Any, labels: Any, shape: tuple[int, int], device: Any) -> Any:
    """Run one chunk; returns the losses [batch, sequence] of the last one, else its output.

    `tokens` and `labels` are None where they are not needed. Every token attends to every token,
    by a mask of ones of `shape` (batch, sequence) that the middle stages need too. All tokens are
    of the first segment.
    """
    attended = torch.ones(shape, device=device)
    zeros = torch.zeros(shape, dtype=torch.long, device=device)
    if tokens is None:
        tokens = zeros  # every chunk of the first stage reads their length
    output = chunk(tokens, attended, zeros, lm_labels=labels)
    return output[0] if isinstance(output, tuple) else output


@dataclass(frozen=True)
class MaskedTokensStep:
    """The forward step of megatron-core's schedules; `loss_of` makes a loss of 0/1 weights."""

    config: MegatronConfig
    device: Any
    loss_of: LossOf

    @cached_property
    def masking(self) -> Masking:
        return masking_of(self.config)

    def __call__(self, iterator: Iterator[Microbatch | None], model: Any) -> tuple[Any, Any]:
        batch = next(iterator)
        shape = (self.config.micro_batch_size, self.config.seq_length)
        if batch is None:
            return run_bert(model, None, None, shape, self.device), self.loss_of(None)
        visible, masked = self.masking.apply(batch.tokens, batch.samples)
        losses = run_bert(model, visible, batch.tokens, shape, self.device)
        return losses, self.loss_of(masked.to(torch.float32))


_gelu_tanh = partial(functional.gelu, approximate="tanh")
# Of an MLP, with or without a gate.
_ACTIVATIONS: dict[str | None, Any] = {
    "gelu": functional.gelu,
    "geglu": functional.gelu,
    "gelu_tanh": _gelu_tanh,
    "geglu_tanh": _gelu_tanh,
    "relu": functional.relu,
    "reglu": functional.relu,
    "squared_relu": squared_relu,
    "silu": functional.silu,
    "swiglu": functional.silu,
    "swiglu_clamped": quick_gelu,
}


@dataclass(frozen=True)
class ModelChunks:
    """The chunks of this rank: `wrapped` data-parallel to train, `bare` the same ones to save."""

    settings: TransformerConfig
    wrapped: list[Any]
    bare: list[Any]


def build_model(config: MegatronConfig, mesh: MegatronMesh, *, initialize: bool) -> ModelChunks:
    """Build all chunks of this rank; `initialize` False leaves weights unset for a checkpoint."""
    settings = transformer_settings(config)
    bare = [chunk.to(mesh.device) for chunk in build_chunks(config, settings)]
    if initialize:
        draw_weights(config.seed, bare)
    half = [Float16Module(settings, chunk) for chunk in bare] if settings.bf16 else bare
    wrapped = [
        DistributedDataParallel(settings, ddp_settings(config), chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(half)
    ]
    for chunk in wrapped:
        chunk.broadcast_params()
    # how the pipeline schedules reach the data-parallel wrapper
    settings.finalize_model_grads_func = finalize_model_grads
    if config.overlap_grad_reduce:
        settings.no_sync_func = _list_or_one([chunk.no_sync for chunk in wrapped])
    if _aligned_gather(config):
        settings.param_sync_func = _list_or_one([chunk.start_param_sync for chunk in wrapped])
    return ModelChunks(settings, wrapped, bare)


def _list_or_one(functions: list[Any]) -> Any:
    """Return what the schedules take: a list for several chunks, a function for one."""
    return functions if len(functions) > 1 else functions[0]


def build_chunks(config: MegatronConfig, settings: TransformerConfig) -> list[Any]:
    """Build the models of this rank, in the order of its virtual stages, on the default device.

    Reads the pipeline rank from megatron-core's parallel state, which must be initialised.
    """
    chunks = config.virtual_pipeline_model_parallel_size
    models = []
    for stage in range(chunks) if chunks else (None,):
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage)
        if config.model.reads_masked_text:
            fused = uses_transformer_engine(config)
            models.append(build_bert(config, settings, stage, fused=fused, first=first, last=last))
        else:
            models.append(_build_gpt(config, settings, stage, first=first, last=last))
    return models


def _build_gpt(
    config: MegatronConfig,
    settings: TransformerConfig,
    stage: int | None,
    *,
    first: bool,
    last: bool,
) -> GPTModel:
    """Build one chunk; `stage` is its virtual stage, `first` embeds, `last` has the head."""
    model, engine = config.model, uses_transformer_engine(config)
    kinds = dict(normalization=settings.normalization)
    layers: Any
    if model.moe is not None:  # layers differ: one spec for each
        layers = get_gpt_decoder_block_spec(settings, engine, vp_stage=stage, **kinds)
        own = [arranged(layer, settings, engine) for layer in layers.layer_specs]
        layers = replace(layers, layer_specs=own)
    else:
        [layers, *_] = get_gpt_decoder_layer_specs(settings, engine, **kinds)
        layers = arranged(layers, settings, engine)
    prediction = None
    if model.mtp_layers:
        # Like the model's last layer. Not like the chunk's own last layer, as in Megatron-LM: a
        # last chunk may have no layers.
        last_layer = get_gpt_decoder_layer_specs(settings, engine, **kinds)[-1]
        last_layer = arranged(last_layer, settings, engine)
        prediction = get_gpt_mtp_block_spec(settings, last_layer, engine, vp_stage=stage)
    chunk = GPTModel(
        settings,
        layers,
        vocab_size=config.padded_vocab_size,
        max_sequence_length=(model.max_seq or model.seq) + model.position_offset,
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=model.tied,
        position_embedding_type=position_kind(model),
        rotary_percent=model.rotates.partial,
        rotary_base=model.rope_base,
        mtp_block_spec=prediction,
        vp_stage=stage,
    )
    arrange_ends(chunk, settings)
    return chunk


def uses_transformer_engine(config: MegatronConfig) -> bool:
    """Return whether the config sets TransformerEngine; for `auto`, whether a GPU can use it."""
    if config.transformer_impl == "auto":
        return not on_cpu() and software.transformer_engine().imported
    return config.transformer_impl == "transformer_engine"


def transformer_settings(
    config: MegatronConfig, *, compiled: bool | None = None, on_meta: bool = False
) -> TransformerConfig:
    """Return megatron-core's model configuration.

    `compiled`: with megatron-core's fusions, which torch compiles; default: on GPUs. `on_meta`:
    weights on the default device, which has no memory.

    megatron-core draws no weights itself: `draw_weights` does, where they are to be drawn.
    """
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    fused = _fusion_settings(config, not on_cpu() if compiled is None else compiled)
    model = config.model
    activation = _ACTIVATIONS[model.activation]
    if fused["bias_activation_fusion"] and model.activation == "gelu_tanh":
        # megatron-core selects its fused GELU by `functional.gelu`, and approximates it with tanh
        # (fusions/fused_bias_gelu.py): exactly `gelu_tanh`
        activation = functional.gelu
    # Not `perform_initialization=False`: that also skips the attribute `tensor_model_parallel`
    # (tensor_parallel/layers.py), without which the gradient norm counts one tensor rank only.
    std = model.init_std or INITIAL_STD
    # Standard deviations as megatron-core's own (utils.py, init_method_normal and
    # scaled_init_method_normal; Megatron-LM's 0.02).
    initialisers = dict(
        init_method=noted(std),
        output_layer_init_method=noted(std / math.sqrt(2.0 * model.layers)),
        embedding_init_method=noted(std),
    )
    kind = TransformerConfig if model.mla is None else MLATransformerConfig
    settings = kind(
        **core_fields(model),
        activation_func=activation,
        attention_softmax_in_fp32=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=config.precision == "bf16",
        use_cpu_initialization=on_meta,
        deterministic_mode=config.deterministic_mode,
        calculate_per_token_loss=counts_tokens(config),
        # Saves memory on GPUs, where NCCL's streams keep an output until it is sent. gloo sends
        # from the tensor's memory: with overlapped transfers the next stage would sometimes
        # receive other data.
        deallocate_pipeline_outputs=not on_cpu(),
        **initialisers,
        **_parallel_settings(config),
        **fused,
        **_expert_settings(config),
        **number_format_settings(config),
        **recompute_settings(config),
        **offload_settings(config),
        **message_settings(config),
        **attention_settings(config),
        **graph_settings(config),
    )
    settings.record = model  # what `layers` reads
    scale_rotary(settings, model)
    return settings


def _expert_settings(config: MegatronConfig) -> dict[str, Any]:
    """Return how experts are split and computed.

    They run one after the other without TransformerEngine and as one grouped product with it.
    """
    if config.model.moe is None:
        return {}
    return dict(
        moe_grouped_gemm=uses_transformer_engine(config),
        expert_model_parallel_size=config.expert_model_parallel_size,
        expert_tensor_parallel_size=config.expert_tensor_ranks,
        **dispatch_settings(config),
    )


def _parallel_settings(config: MegatronConfig) -> dict[str, Any]:
    """Return the settings of the layout; the interleaved schedule always overlaps its transfers.

    With two stages it must: without the overlap megatron-core 0.16.1 silently computes wrong
    gradients (Megatron-LM's arguments.py refuses that, megatron-core does not).
    """
    interleaved = config.virtual_pipeline_model_parallel_size is not None
    return dict(
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
        context_parallel_size=config.context_parallel_size,
        sequence_parallel=config.sequence_parallel,
        pipeline_model_parallel_layout=stage_layout(
            config.pipeline_layer_split, config.model.mtp_layers
        ),
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
    )


def stage_layout(
    split: tuple[tuple[int, ...], ...], prediction_layers: int = 0
) -> list[list[str]] | None:
    """Return megatron-core's list of stages for an uneven split, None for an even one.

    `split` does not count the prediction layers (multi-token prediction), which come before the
    loss in the last chunk: where megatron-core puts them for an even split. Order as in
    pipeline_parallel_layer_layout.py: first chunks of all stages, then second ones.
    """
    if len({layers for stage in split for layers in stage}) == 1:
        return None
    chunks = len(split[0])
    layout = [["decoder"] * stage[chunk] for chunk in range(chunks) for stage in split]
    layout[0].insert(0, "embedding")
    layout[-1] += ["mtp"] * prediction_layers + ["loss"]
    return layout


def _fusion_settings(config: MegatronConfig, compiled: bool) -> dict[str, Any]:
    """Return the fused kernels: compiled ones on GPUs, hand-written ones with TransformerEngine.

    The output layer is megatron-core's own also with TransformerEngine, and adds the gradient of
    its weight with Apex's extension or not at all (tensor_parallel/layers.py). Rotary positions of
    latent attention are fused for YaRN only (transformer_config.py, __post_init__). Grouped experts
    add their biases themselves (experts.py, TEGroupedMLP). Norms that BERT has outside its layers
    are torch's where Apex is missing, and refuse `persist_layer_norm` (torch_norm.py).
    """
    model, fused = config.model, uses_transformer_engine(config)
    rotary = model.positions == "rope" and model.mla is None
    # fused_bias_gelu.py approximates with tanh: not what `gelu` means
    biased_gelu = model.activation == "gelu_tanh" and model.mlp_bias
    biased_experts = fused and model.moe is not None and model.mlp_bias
    return dict(
        bias_dropout_fusion=compiled and not biased_experts,
        bias_activation_fusion=compiled and (biased_gelu or model.activation == "swiglu"),
        gradient_accumulation_fusion=fused and software.apex_wgrad().imported,
        apply_rope_fusion=fused and rotary,
        masked_softmax_fusion=False,
    )


def ddp_settings(config: MegatronConfig) -> DistributedDataParallelConfig:
    """Return the settings of data parallelism.

    With interleaving, all stages gather parameters at the same time.
    """
    return DistributedDataParallelConfig(
        use_distributed_optimizer=config.use_distributed_optimizer,
        overlap_grad_reduce=config.overlap_grad_reduce,
        overlap_param_gather=config.overlap_param_gather,
        align_param_gather=_aligned_gather(config),
        check_for_nan_in_grad=True,
        bucket_size=config.ddp_bucket_size,
        **gradient_settings(config),
    )


def _aligned_gather(config: MegatronConfig) -> bool:
    return config.overlap_param_gather and config.virtual_pipeline_model_parallel_size is not None


# ----------------------------------------------------------------------------------------------
# Draw the initial weights of this rank's part of a megatron-core model, at its place in the model.
# megatron-core draws either whole matrices on the CPU of each rank, from one seed (equal experts on
# all expert-parallel ranks, minutes for a large stage), or parts from generators that differ
# between layouts. Here its initialisers only note their standard deviation, and the sharded state
# dict tells which part of which weight a tensor is.


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
            fill(
                part.data.view((1,) * added + tuple(part.data.shape)),
                stream_key(seed, part.key),
                Normal(0.0, noted_by_storage[storage]),
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


# -- Load megatron-core's weights of `model.pretrained` at the start of a run --------------------


_POSITIONS = "embedding.position_embeddings.weight"


def start_from_weights(config: MegatronConfig, model: ModelChunks, *, loads: bool) -> None:
    """Load the weights and leave padded rows out of the loss.

    `loads` False: do not load, because a checkpoint will be loaded. All ranks must call this.
    Raises InvalidInputError if a weight is missing.
    """
    if config.pretrained is None:
        return
    for chunk in model.bare:
        hide_padding(config, chunk)
    if loads:
        load_weights(config.pretrained, model.bare)


def load_weights(directory: str, chunks: list[Any]) -> None:
    """Load every rank's part; rows beyond a shorter sequence or vocabulary are cut off, and padded
    rows are zero. Raises InvalidInputError if a weight is missing."""
    metadata = {"singleton_local_shards": False}
    state = {
        f"model{number}": chunk.sharded_state_dict(metadata=metadata)
        for number, chunk in enumerate(chunks)
    }
    stored = load_tensors_metadata(directory)
    missing = set()
    for weights in state.values():
        if _POSITIONS in weights:
            weights[_POSITIONS].allow_shape_mismatch = True  # sequences may be shorter
        for weight in weights.values():
            if isinstance(weight, ShardedTensor):
                weight.key = stored_name(weight.key, stored)
            missing |= {part.key for part in sharded_parts(weight)} - stored.keys()
    if missing:
        message = f"has no weights {', '.join(sorted(missing)[:3])}: it is of another model"
        raise InvalidInputError([Problem(message, directory)])
    # what else the checkpoint holds does not matter, nor which states of 8 bit scales are missing
    loaded, _, _ = dist_checkpointing.load(
        state,
        directory,
        strict=StrictHandling.RETURN_ALL,
        **current().load_options(Path(directory)),
    )
    for number, chunk in enumerate(chunks):
        # converted weights have no states of 8 bit scales; TransformerEngine's layers expect some
        different = chunk.load_state_dict(loaded.get(f"model{number}", {}), strict=False)
        keys = (*different.missing_keys, *different.unexpected_keys)
        assert all(key.endswith("_extra_state") for key in keys), different


# A norm is a module of its own, or part of TransformerEngine's linear layer behind it. Checkpoints
# have either name, not always that of the layers that read them: experts, latent attention.
_NORM_NAMES = (
    ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    ("self_attention.q_layernorm.", "self_attention.linear_q_up_proj.layer_norm_"),
    ("self_attention.kv_layernorm.", "self_attention.linear_kv_up_proj.layer_norm_"),
    ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
)


def stored_name(name: str, stored: Container[str]) -> str:
    """Find the name that a checkpoint has for a weight, which may be that of other layers."""
    others = (
        name.replace(one, other)
        for pair in _NORM_NAMES
        for one, other in (pair, pair[::-1])
        if one in name
    )
    return next((known for known in (name, *others) if known in stored), name)


def hide_padding(config: MegatronConfig, chunk: Any) -> None:
    """Make the logits of padded rows so small that their probability is zero.

    The pretrained model has no such rows, and its logits may all be far below zero. GPT-2's are,
    so rows of zeros would get nearly all probability.
    """
    layer = getattr(chunk, "output_layer", None)
    if layer is None:
        return
    rows = config.padded_vocab_size // config.tensor_model_parallel_size
    first = rows * parallel_state.get_tensor_model_parallel_rank()
    known = max(0, config.vocab_size - first)
    if known >= rows:
        return

    def hide(module: Any, inputs: Any, output: Any) -> Any:
        logits, bias = output
        logits[..., known:] = torch.finfo(logits.dtype).min / 2
        return logits, bias

    layer.register_forward_hook(hide)
