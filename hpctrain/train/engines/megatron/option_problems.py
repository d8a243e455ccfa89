"""Find options of megatron-core that exclude each other, or that a model or layout excludes.

megatron-core would raise for most of them while it builds the model, by names that a spec does not
have; some it would ignore, or compute wrongly. Sources are files of megatron-core 0.16.1. Belongs
here: pure checks of the configuration. Does not belong here: what ranks have installed (see
`hpctrain.engines.megatron`). Imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Iterator

from hpctrain.base.errors import Problem
from hpctrain.engines.megatron import MegatronConfig

# What TransformerEngine wants to be divisible: (features of a matrix, tokens of a rank).
# FP8: pytorch/utils.py, assert_dim_for_fp8_exec; MXFP8 and NVFP4: blocks of 32 and of 16 that are
# multiplied in pairs of rows (fp4_utils.py, get_fp4_align_size).
_MULTIPLES_OF_8_BITS = (16, 8)
_MULTIPLES_OF_BLOCKS = (32, 32)


def option_problems(config: MegatronConfig) -> Iterator[Problem]:
    """Yield every option that cannot be had with the others."""
    yield from _layer_problems(config)
    yield from _format_problems(config)
    yield from _memory_problems(config)
    yield from _message_problems(config)
    yield from _dispatch_problems(config)
    yield from _graph_problems(config)


def _layer_problems(config: MegatronConfig) -> Iterator[Problem]:
    """Find options of TransformerEngine's layers where megatron-core's own are planned."""
    if config.transformer_impl != "local":
        return
    needing = {
        "`precision: fp8`": config.fp8 is not None,
        "`precision: fp4`": config.fp4 is not None,
        "`tp_comm_overlap`": config.tp_comm_overlap,
        "`activation_offload_layers`": config.cpu_offloading_num_layers > 0,
        # gradient_accumulation_fusion comes with TransformerEngine's layers (model.py)
        "`defer_embedding_wgrad_compute`": config.defer_embedding_wgrad_compute,
    }
    if config.recompute_granularity == "selective":
        # tensor_parallel/random.py, CheckpointWithoutOutput, has names of TransformerEngine
        for part in ("layernorm", "moe_act", "mla_up_proj"):
            needing[f"`recompute_modules: [{part}]`"] = part in config.recompute_modules
    for setting in (setting for setting, wanted in needing.items() if wanted):
        yield Problem(
            f"{setting} needs TransformerEngine's layers, and the run has megatron-core's own",
            hint="leave `engine.implementation` at auto, with `software.transformer_engine: true` "
            "in the profile",
        )


def _format_problems(config: MegatronConfig) -> Iterator[Problem]:
    """Check numbers of 8 and 4 bits, and the type of gradients."""
    if config.precision == "fp32" and not config.grad_reduce_in_fp32:
        # param_and_grad_buffer.py: gradients have the type of weights unless fp32 is asked for
        yield Problem(
            "`grad_reduce_in_fp32: false` has no effect with `precision: fp32`",
            hint="leave it true, or set `precision: bf16`",
        )
    if config.precision == "fp32" and config.cross_entropy_loss_fusion:
        # fusions/fused_cross_entropy.py, calculate_gradients: `.to(torch.bfloat16)`
        yield Problem(
            "the fused cross entropy rounds its gradient to bf16: not with `precision: fp32`",
            hint="leave `cross_entropy_loss_fusion` false",
        )
    if config.deterministic_mode and config.cross_entropy_loss_fusion:
        # Megatron-LM's arguments.py: "Cross Entropy Fusion is currently not deterministic."
        yield Problem(
            "the fused cross entropy is not deterministic",
            hint="leave `cross_entropy_loss_fusion` or `engine.deterministic` false",
        )
    if config.fp8_param:
        # The initial weights are drawn into the storage of parameters, and checkpoints are written
        # from it (drawn_weights.py, shard_writing.py). Weights of 8 bits keep theirs elsewhere.
        yield Problem(
            "`fp8_param_gather` is not supported: hpctrain draws and saves weights of 16 or 32 "
            "bits",
            hint="leave it false: products are computed in 8 bits, weights are gathered in bf16",
        )
    if config.fp8 is None and config.fp4 is None:
        return
    if config.fp8 is not None and config.fp4 is not None:
        yield Problem("fp8 and fp4 exclude each other")
    if config.precision != "bf16":
        yield Problem("numbers of 8 or 4 bits need the others in bf16: precision bf16")
    yield from _indivisible(config)
    parts = {"moe_act", "layernorm"} & set(config.recompute_modules)
    if config.fp8_recipe == "delayed" and config.recompute_granularity == "selective" and parts:
        yield Problem(
            f"`fp8_recipe: delayed` does not go with recompute_modules {', '.join(sorted(parts))}",
            hint="set `fp8_recipe: tensorwise`, or recompute other modules",
        )


def _indivisible(config: MegatronConfig) -> Iterator[Problem]:
    """Check the sizes of the matrices that a rank multiplies."""
    blocks = config.fp4 is not None or config.fp8_recipe == "mxfp8"
    features, tokens = _MULTIPLES_OF_BLOCKS if blocks else _MULTIPLES_OF_8_BITS
    tp = config.tensor_model_parallel_size
    sizes = {
        "hidden_size": config.hidden_size,
        "ffn_hidden_size / tp": config.ffn_hidden_size // tp,
    }
    if config.num_moe_experts is not None and config.moe_ffn_hidden_size is not None:
        size = config.moe_ffn_hidden_size // config.expert_tensor_ranks
        sizes["moe_ffn_hidden_size / etp"] = size
    if not config.multi_latent_attention:
        sizes["heads x kv_channels / tp"] = config.num_attention_heads * config.kv_channels // tp
    own = config.seq_length * config.micro_batch_size // config.context_parallel_size
    name = "fp4" if config.fp4 is not None else f"fp8 ({config.fp8_recipe})"
    for what, size, multiple in (
        *((what, size, features) for what, size in sizes.items()),
        ("tokens of a micro-batch / cp", own // (tp if config.sequence_parallel else 1), tokens),
    ):
        if size % multiple:
            yield Problem(f"{name} needs {what} divisible by {multiple}, got {size}")


def _memory_problems(config: MegatronConfig) -> Iterator[Problem]:
    """Check recomputation of some layers, and activations in the host's memory."""
    layers, granularity = config.recompute_num_layers, config.recompute_granularity
    if layers is not None and granularity != "full":
        # transformer_config.py: "recompute_num_layers must be None" with selective
        yield Problem(
            f"`recompute_layers` {layers} has no effect with recompute {granularity or 'none'}",
            hint="set `recompute: full`, or leave it out",
        )
    most = max(
        layers_of_chunk for stage in config.pipeline_layer_split for layers_of_chunk in stage
    )
    if layers is not None and layers > most:
        yield Problem(f"`recompute_layers` {layers} is above the {most} layers of a chunk")
    offloaded = config.cpu_offloading_num_layers
    if not offloaded:
        return
    if offloaded >= config.num_layers:
        yield Problem(
            f"`activation_offload_layers` {offloaded} must be below the {config.num_layers} layers "
            "of the model: the last ones are needed at once"
        )
    if config.pipeline_model_parallel_size > 1:
        yield Problem("`activation_offload_layers` needs a model without a pipeline: pp 1")
    if granularity is not None:
        yield Problem(
            f"`activation_offload_layers` does not go with recompute {granularity}",
            hint="set `recompute: none`",
        )


def _message_problems(config: MegatronConfig) -> Iterator[Problem]:
    """Check the overlap of tensor parallel messages, and the deferred gradient."""
    if config.tp_comm_overlap:
        if config.tensor_model_parallel_size == 1 or not config.sequence_parallel:
            # extensions/transformer_engine.py overlaps the gather and the scatter of sequences
            yield Problem("`tp_comm_overlap` needs tp of at least 2 with sequence_parallel")
        if config.multi_latent_attention:
            # multi_latent_attention.py: q_up_proj and kv_up_proj, which have no buffers
            # (extensions/transformer_engine.py knows qkv, proj, fc1 and fc2)
            yield Problem("`tp_comm_overlap` does not know the projections of latent attention")
        if config.mtp_num_layers:
            # multi_token_prediction.py builds eh_proj without the name of a buffer
            yield Problem("`tp_comm_overlap` does not know the projection of prediction layers")
    if not config.defer_embedding_wgrad_compute:
        return
    if config.pipeline_model_parallel_size == 1:
        yield Problem("`defer_embedding_wgrad_compute` fills the end of a pipeline: pp is 1")
    if config.mtp_num_layers:
        # The output layer then runs several times per micro-batch. Its inputs are stored in the
        # order of the forward pass, its gradients in that of the backward pass, and both are taken
        # from the front (tensor_parallel/layers.py, utils.py drain_embedding_wgrad_compute).
        yield Problem("`defer_embedding_wgrad_compute` would be wrong with prediction layers")
    if config.model_type == "bert":
        # bert_model.py has no buffers for it
        yield Problem("`defer_embedding_wgrad_compute` is for gpt and llama")


def _dispatch_problems(config: MegatronConfig) -> Iterator[Problem]:
    """Check options of experts."""
    flex = config.moe_token_dispatcher_type == "flex"
    if config.num_moe_experts is None:
        for name, given in {
            "moe_token_dispatcher_type: flex": flex,
            "moe_permute_fusion": config.moe_permute_fusion,
            "moe_shared_expert_overlap": config.moe_shared_expert_overlap,
        }.items():
            if given:
                yield Problem(f"`{name}` has no effect: the model has no experts")
        return
    ranks = config.expert_tensor_ranks * config.expert_model_parallel_size
    if flex and ranks == 1:
        # token_dispatcher.py: "Flex token dispatcher requires TPxEP > 1"
        yield Problem("`moe_token_dispatcher_type: flex` needs etp x ep above 1")
    if config.moe_shared_expert_overlap:
        if config.moe_shared_expert_intermediate_size is None:
            yield Problem("`moe_shared_expert_overlap` has no effect without `shared_ffn`")
        if flex:
            yield Problem("`moe_shared_expert_overlap` needs `moe_token_dispatcher_type: alltoall`")


def _graph_problems(config: MegatronConfig) -> Iterator[Problem]:
    """Check what cannot be captured in a CUDA graph."""
    kind = config.cuda_graph_impl
    if kind == "none":
        return
    graphs = f"`cuda_graph_impl: {kind}`"
    if config.accelerator == "cpu":
        yield Problem(f"{graphs} needs GPUs, and the run trains on CPUs")
    if config.model_type == "bert":
        # each micro-batch has a mask of its own, which a graph would replay from the first
        yield Problem(f"{graphs} is for gpt and llama")
    if config.recompute_granularity == "full":
        yield Problem(
            f"{graphs} does not go with full recomputation", hint="set `recompute: selective`"
        )
    if config.cpu_offloading_num_layers:
        yield Problem(f"{graphs} does not go with `activation_offload_layers`")
    redrawn = {"core_attn", "mlp", "moe"} & set(config.recompute_modules)
    if config.recompute_granularity == "selective" and config.dropout and redrawn:
        # transformer_config.py: "attention dropout is not supported with graphed attention
        # recomputation"
        yield Problem(
            f"{graphs} cannot draw dropout again while {', '.join(sorted(redrawn))} is recomputed",
            hint="set `model.dropout: 0`, or `recompute: none`",
        )
