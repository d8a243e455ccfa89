"""The model of one rank: megatron-core's configuration, layers, and data-parallel wrapper.

Belongs here: from MegatronConfig to model chunks. Does not belong here: the optimizer, the data.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import partial
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
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import (
    MLATransformerConfig,
    TransformerConfig,
)

from hpctrain.engines.megatron import MegatronConfig
from hpctrain.train.device import on_cpu
from hpctrain.train.engines.megatron.bert import build_bert
from hpctrain.train.engines.megatron.mesh import Mesh

# Elements per gradient bucket; None leaves the choice to megatron-core (40 million and more).
BUCKET_ELEMENTS: int | None = None

# Weight of the loss that spreads tokens over experts (Fedus et al. 2021, arXiv 2101.03961, section
# 2.2: alpha = 10^-2; transformer_config.py, moe_aux_loss_coeff, recommends the same).
BALANCE_LOSS_WEIGHT = 1e-2

_ACTIVATIONS = {
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "swiglu": functional.silu,
    "squared_relu": squared_relu,
}


@dataclass(frozen=True)
class Model:
    """`wrapped` are the data-parallel chunks to train, `bare` the same models to save."""

    settings: TransformerConfig
    wrapped: list[Any]
    bare: list[Any]


def build_model(config: MegatronConfig, mesh: Mesh, *, initialize: bool) -> Model:
    """Build all chunks of this rank; `initialize` False leaves weights unset for a checkpoint."""
    settings = transformer_settings(config, initialize=initialize)
    bare = [chunk.to(mesh.device) for chunk in build_chunks(config, settings)]
    half = [Float16Module(settings, chunk) for chunk in bare] if settings.bf16 else bare
    wrapped = [
        DistributedDataParallel(settings, ddp_settings(config), chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(half)
    ]
    for chunk in wrapped:
        chunk.broadcast_params()
    _connect(settings, config, wrapped)
    return Model(settings, wrapped, bare)


def build_chunks(config: MegatronConfig, settings: TransformerConfig) -> list[Any]:
    """The models of this rank, in the order of its virtual stages, on the default device.

    Reads the pipeline rank from megatron-core's parallel state, which must be initialised.
    """
    chunks = config.virtual_pipeline_model_parallel_size
    stages = range(chunks) if chunks else (None,)
    build = _bert if config.model_type == "bert" else _gpt
    return [build(config, settings, stage) for stage in stages]


def uses_transformer_engine(config: MegatronConfig) -> bool:
    """TransformerEngine where it is asked for, or installed on a machine with GPUs."""
    if config.transformer_impl == "auto":
        return not on_cpu() and importlib.util.find_spec("transformer_engine") is not None
    return config.transformer_impl == "transformer_engine"


def transformer_settings(
    config: MegatronConfig, *, initialize: bool = True, compiled: bool | None = None
) -> TransformerConfig:
    """megatron-core's model configuration.

    `compiled`: with megatron-core's fusions, which torch compiles; default: on GPUs.

    Weights are initialised on the CPU, which makes them independent of the tensor-parallel size
    (tensor_parallel/layers.py, _initialize_affine_weight_cpu: each rank cuts its part out of the
    whole matrix).
    """
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    fused = _fusion_settings(config, not on_cpu() if compiled is None else compiled)
    kind = MLATransformerConfig if config.multi_latent_attention else TransformerConfig
    return kind(
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
        activation_func=_activation(config, fused["bias_activation_fusion"]),
        hidden_dropout=config.dropout,
        attention_dropout=config.dropout,
        attention_softmax_in_fp32=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=config.precision == "bf16",
        use_cpu_initialization=True,
        deterministic_mode=config.deterministic_mode,
        # how many words are masked differs from microbatch to microbatch
        calculate_per_token_loss=config.model_type == "bert",
        deallocate_pipeline_outputs=_may_free_while_sending(),
        **({} if initialize else _unset_weights()),
        **_parallel_settings(config),
        **_recompute_settings(config),
        **fused,
        **_expert_settings(config),
        **_latent_settings(config),
    )


def _expert_settings(config: MegatronConfig) -> dict[str, Any]:
    """Mixture of experts: dropless routing over an all-to-all, prediction layers behind it.

    Experts run one after the other without TransformerEngine and as one grouped product with it.
    megatron-core refuses top-1 routing unless the softmax comes first.
    """
    predicted = dict(mtp_num_layers=config.mtp_num_layers)
    if config.num_moe_experts is None:
        return predicted
    dense = config.moe_first_dense_layers
    return predicted | dict(
        num_moe_experts=config.num_moe_experts,
        moe_layer_freq=[0] * dense + [1] * (config.num_layers - dense),
        moe_ffn_hidden_size=config.moe_ffn_hidden_size,
        moe_shared_expert_intermediate_size=config.moe_shared_expert_intermediate_size,
        moe_router_topk=config.moe_router_topk,
        moe_router_pre_softmax=config.moe_router_topk == 1,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=BALANCE_LOSS_WEIGHT,
        moe_token_dispatcher_type="alltoall",
        moe_grouped_gemm=uses_transformer_engine(config),
        expert_model_parallel_size=config.expert_model_parallel_size,
        expert_tensor_parallel_size=config.expert_tensor_parallel_size,
    )


def _latent_settings(config: MegatronConfig) -> dict[str, Any]:
    """Multi-head latent attention with norms behind both ranks and plain rotary positions.

    The norms: DeepSeek-V2, arXiv 2405.04434, section 3.1.2 ("additional RMS Norm layers after
    the compressed latent vectors").
    """
    if not config.multi_latent_attention:
        return {}
    return dict(
        multi_latent_attention=True,
        q_lora_rank=config.q_lora_rank,
        kv_lora_rank=config.kv_lora_rank,
        qk_head_dim=config.qk_head_dim,
        qk_pos_emb_head_dim=config.qk_pos_emb_head_dim,
        v_head_dim=config.v_head_dim,
        qk_layernorm=True,
        rope_type="rope",
        rotary_base=config.rotary_base,
    )


def _may_free_while_sending() -> bool:
    """Drop a stage's output as soon as its transfer has been started: saves memory on GPUs.

    NCCL's streams keep the memory until it is sent. gloo sends from where the tensor's data was,
    so with overlapped transfers the next stage would now and then receive something else.
    """
    return not on_cpu()


def _unset_weights() -> dict[str, Any]:
    """Draw no random numbers for weights that a checkpoint is going to overwrite.

    Not `perform_initialization=False`: that also skips the attribute `tensor_model_parallel`
    (tensor_parallel/layers.py), without which the gradient norm counts one tensor rank only.
    """
    names = ("init_method", "output_layer_init_method", "embedding_init_method")
    return dict.fromkeys(names, _leave)


def _leave(weight: Any) -> Any:
    return weight


def _parallel_settings(config: MegatronConfig) -> dict[str, Any]:
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
        pipeline_model_parallel_layout=stage_layout(
            config.pipeline_layer_split, config.mtp_num_layers or 0
        ),
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
    )


def stage_layout(
    split: tuple[tuple[int, ...], ...], prediction_layers: int = 0
) -> list[list[str]] | None:
    """megatron-core's list of stages for an uneven split, None for an even one.

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


def _recompute_settings(config: MegatronConfig) -> dict[str, Any]:
    """Korthikanti et al. 2022 (arXiv:2205.05198): selective recomputes named parts of a layer."""
    if config.recompute_granularity == "full":
        return dict(
            recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
        )
    if config.recompute_granularity == "selective":
        return dict(
            recompute_granularity="selective", recompute_modules=list(config.recompute_modules)
        )
    return {}


def _activation(config: MegatronConfig, fused: bool) -> Any:
    """megatron-core knows its fused GELU by `functional.gelu`, and approximates it with tanh
    (fusions/fused_bias_gelu.py): exactly what `gelu_tanh` asks for."""
    if fused and config.activation == "gelu_tanh":
        return functional.gelu
    return _ACTIVATIONS[config.activation]


def _fusion_settings(config: MegatronConfig, compiled: bool) -> dict[str, Any]:
    """Fused kernels: compiled ones on GPUs only, hand-written ones with TransformerEngine only."""
    fused = uses_transformer_engine(config)
    biased_gelu = config.activation in ("gelu", "gelu_tanh") and config.add_bias_linear
    return dict(
        bias_dropout_fusion=compiled,
        bias_activation_fusion=compiled and (biased_gelu or config.activation == "swiglu"),
        gradient_accumulation_fusion=fused,
        apply_rope_fusion=fused and config.position_embedding_type == "rope",
        masked_softmax_fusion=False,
        persist_layer_norm=fused,
    )


def ddp_settings(config: MegatronConfig) -> DistributedDataParallelConfig:
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


def _aligned_gather(config: MegatronConfig) -> bool:
    return config.overlap_param_gather and config.virtual_pipeline_model_parallel_size is not None


def _bert(config: MegatronConfig, settings: TransformerConfig, stage: int | None) -> Any:
    return build_bert(
        config,
        settings,
        stage,
        fused=uses_transformer_engine(config),
        first=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        last=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
    )


def _gpt(config: MegatronConfig, settings: TransformerConfig, stage: int | None) -> Any:
    layers = _layer_spec(config, settings, stage)
    return GPTModel(
        settings,
        layers,
        vocab_size=config.padded_vocab_size,
        max_sequence_length=config.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        share_embeddings_and_output_weights=config.share_embeddings_and_output_weights,
        position_embedding_type=config.position_embedding_type,
        rotary_base=config.rotary_base,
        mtp_block_spec=_prediction_spec(config, settings, stage),
        vp_stage=stage,
    )


def _layer_spec(config: MegatronConfig, settings: TransformerConfig, stage: int | None) -> Any:
    """One spec for all layers of a dense model, one per layer where layers differ."""
    engine = uses_transformer_engine(config)
    if config.num_moe_experts is not None:
        return get_gpt_decoder_block_spec(
            settings, engine, normalization=config.normalization, vp_stage=stage
        )
    kinds = dict(
        multi_latent_attention=config.multi_latent_attention, qk_layernorm=settings.qk_layernorm
    )
    if engine:
        return get_gpt_layer_with_transformer_engine_spec(**kinds)
    return get_gpt_layer_local_spec(normalization=config.normalization, **kinds)


def _prediction_spec(config: MegatronConfig, settings: TransformerConfig, stage: int | None) -> Any:
    """Prediction layers are made like the model's last layer; None where this chunk has none.

    Not from the chunk's own last layer, as Megatron-LM does: a last chunk may have no layers.
    """
    if config.mtp_num_layers is None:
        return None
    engine = uses_transformer_engine(config)
    layers = get_gpt_decoder_layer_specs(settings, engine, normalization=config.normalization)
    return get_gpt_mtp_block_spec(settings, layers[-1], engine, vp_stage=stage)


def _connect(settings: TransformerConfig, config: MegatronConfig, wrapped: list[Any]) -> None:
    """Tell the pipeline schedules how to reach the data-parallel wrapper."""
    settings.finalize_model_grads_func = finalize_model_grads
    if config.overlap_grad_reduce:
        settings.no_sync_func = _each([chunk.no_sync for chunk in wrapped])
    if _aligned_gather(config):
        settings.param_sync_func = _each([chunk.start_param_sync for chunk in wrapped])


def _each(functions: list[Any]) -> Any:
    """The schedules want a list with several chunks and a plain function with one."""
    return functions if len(functions) > 1 else functions[0]
