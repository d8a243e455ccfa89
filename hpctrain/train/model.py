"""The GPT model of one rank: megatron-core's configuration, layers, and data-parallel wrapper.

Belongs here: from TrainConfig to model chunks. Does not belong here: the optimizer, the data.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as functional
from megatron.core import parallel_state
from megatron.core.activations import squared_relu
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from hpctrain.engines.megatron import TrainConfig
from hpctrain.train import cpu
from hpctrain.train.mesh import Mesh

# Elements per gradient bucket; None leaves the choice to megatron-core (40 million and more).
BUCKET_ELEMENTS: int | None = None

_ACTIVATIONS = {"gelu": functional.gelu, "swiglu": functional.silu, "squared_relu": squared_relu}


@dataclass(frozen=True)
class Model:
    """`wrapped` are the data-parallel chunks to train, `bare` the same GPTModels to save."""

    settings: TransformerConfig
    wrapped: list[Any]
    bare: list[Any]


def build_model(config: TrainConfig, mesh: Mesh, *, initialize: bool) -> Model:
    """Build all chunks of this rank; `initialize` False leaves weights unset for a checkpoint."""
    settings = transformer_settings(config, initialize=initialize)
    chunks = config.virtual_pipeline_model_parallel_size
    stages = range(chunks) if chunks else (None,)
    bare = [_gpt(config, settings, stage).to(mesh.device) for stage in stages]
    half = [Float16Module(settings, chunk) for chunk in bare] if settings.bf16 else bare
    wrapped = [
        DistributedDataParallel(settings, ddp_settings(config), chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(half)
    ]
    for chunk in wrapped:
        chunk.broadcast_params()
    _connect(settings, config, wrapped)
    return Model(settings, wrapped, bare)


def uses_transformer_engine(config: TrainConfig) -> bool:
    """TransformerEngine where it is asked for, or installed on a machine with GPUs."""
    if config.transformer_impl == "auto":
        return not cpu.needed() and importlib.util.find_spec("transformer_engine") is not None
    return config.transformer_impl == "transformer_engine"


def transformer_settings(config: TrainConfig, *, initialize: bool = True) -> TransformerConfig:
    """megatron-core's model configuration.

    Weights are initialised on the CPU, which makes them independent of the tensor-parallel size
    (tensor_parallel/layers.py, _initialize_affine_weight_cpu: each rank cuts its part out of the
    whole matrix).
    """
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    return TransformerConfig(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.ffn_hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_query_groups,
        kv_channels=config.kv_channels,
        normalization=config.normalization,
        layernorm_epsilon=config.layernorm_epsilon,
        add_bias_linear=config.add_bias_linear,
        gated_linear_unit=config.activation == "swiglu",
        activation_func=_ACTIVATIONS[config.activation],
        hidden_dropout=config.dropout,
        attention_dropout=config.dropout,
        attention_softmax_in_fp32=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=config.precision == "bf16",
        use_cpu_initialization=True,
        deterministic_mode=config.deterministic_mode,
        deallocate_pipeline_outputs=_may_free_while_sending(),
        **({} if initialize else _unset_weights()),
        **_parallel_settings(config),
        **_recompute_settings(config),
        **_fusion_settings(config),
    )


def _may_free_while_sending() -> bool:
    """Drop a stage's output as soon as its transfer has been started: saves memory on GPUs.

    NCCL's streams keep the memory until it is sent. gloo sends from where the tensor's data was,
    so with overlapped transfers the next stage would now and then receive something else.
    """
    return not cpu.needed()


def _unset_weights() -> dict[str, Any]:
    """Draw no random numbers for weights that a checkpoint is going to overwrite.

    Not `perform_initialization=False`: that also skips the attribute `tensor_model_parallel`
    (tensor_parallel/layers.py), without which the gradient norm counts one tensor rank only.
    """
    names = ("init_method", "output_layer_init_method", "embedding_init_method")
    return dict.fromkeys(names, _leave)


def _leave(weight: Any) -> Any:
    return weight


def _parallel_settings(config: TrainConfig) -> dict[str, Any]:
    """Layout. The interleaved schedule always overlaps its transfers.

    With two stages it must: without the overlap megatron-core 0.16.1 computes wrong gradients
    and says nothing (Megatron-LM's arguments.py refuses that, megatron-core does not).
    """
    interleaved = config.virtual_pipeline_model_parallel_size is not None
    return dict(
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
        context_parallel_size=config.context_parallel_size,
        sequence_parallel=config.sequence_parallel,
        pipeline_model_parallel_layout=stage_layout(config.pipeline_layer_split),
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
    )


def stage_layout(split: tuple[tuple[int, ...], ...]) -> list[list[str]] | None:
    """megatron-core's list of stages for an uneven split, None for an even one.

    Order as in pipeline_parallel_layer_layout.py: first chunks of all stages, then second ones.
    """
    if len({layers for stage in split for layers in stage}) == 1:
        return None
    chunks = len(split[0])
    layout = [["decoder"] * stage[chunk] for chunk in range(chunks) for stage in split]
    layout[0].insert(0, "embedding")
    layout[-1].append("loss")
    return layout


def _recompute_settings(config: TrainConfig) -> dict[str, Any]:
    """Korthikanti et al. 2022 (arXiv:2205.05198): selective recomputes the core attention."""
    if config.recompute_granularity == "full":
        return dict(
            recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
        )
    if config.recompute_granularity == "selective":
        return dict(recompute_granularity="selective", recompute_modules=["core_attn"])
    return {}


def _fusion_settings(config: TrainConfig) -> dict[str, Any]:
    """Fused kernels: compiled ones on GPUs only, hand-written ones with TransformerEngine only."""
    compiled = not cpu.needed()
    fused = uses_transformer_engine(config)
    biased_gelu = config.activation == "gelu" and config.add_bias_linear
    return dict(
        bias_dropout_fusion=compiled,
        bias_activation_fusion=compiled and (biased_gelu or config.activation == "swiglu"),
        gradient_accumulation_fusion=fused,
        apply_rope_fusion=fused and config.position_embedding_type == "rope",
        masked_softmax_fusion=False,
        persist_layer_norm=fused,
    )


def ddp_settings(config: TrainConfig) -> DistributedDataParallelConfig:
    """Gradients are summed in fp32. With interleaving, stages gather parameters in step."""
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=config.use_distributed_optimizer,
        overlap_grad_reduce=config.overlap_grad_reduce,
        overlap_param_gather=config.overlap_param_gather,
        align_param_gather=_aligned_gather(config),
        check_for_nan_in_grad=True,
        bucket_size=BUCKET_ELEMENTS,
    )


def _aligned_gather(config: TrainConfig) -> bool:
    return config.overlap_param_gather and config.virtual_pipeline_model_parallel_size is not None


def _gpt(config: TrainConfig, settings: TransformerConfig, stage: int | None) -> Any:
    return GPTModel(
        settings,
        _layer_spec(config),
        vocab_size=config.padded_vocab_size,
        max_sequence_length=config.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        share_embeddings_and_output_weights=config.share_embeddings_and_output_weights,
        position_embedding_type=config.position_embedding_type,
        rotary_base=config.rotary_base,
        vp_stage=stage,
    )


def _layer_spec(config: TrainConfig) -> Any:
    if uses_transformer_engine(config):
        return get_gpt_layer_with_transformer_engine_spec()
    return get_gpt_layer_local_spec(normalization=config.normalization)


def _connect(settings: TransformerConfig, config: TrainConfig, wrapped: list[Any]) -> None:
    """Tell the pipeline schedules how to reach the data-parallel wrapper."""
    settings.finalize_model_grads_func = finalize_model_grads
    if config.overlap_grad_reduce:
        settings.no_sync_func = _each([chunk.no_sync for chunk in wrapped])
    if _aligned_gather(config):
        settings.param_sync_func = _each([chunk.start_param_sync for chunk in wrapped])


def _each(functions: list[Any]) -> Any:
    """The schedules want a list with several chunks and a plain function with one."""
    return functions if len(functions) > 1 else functions[0]
