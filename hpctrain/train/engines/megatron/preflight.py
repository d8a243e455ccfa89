"""Find what megatron-core would refuse, or compute wrongly, before it is imported.

Belongs here: pure checks of layout and options. Does not belong here: checks for all engines (see
`hpctrain.train.preflight`), installed software (see `hpctrain.engines.megatron`). Imports
nothing heavy.
"""

from __future__ import annotations

from collections.abc import Iterator

from hpctrain.base.errors import Problem
from hpctrain.engines.megatron import MegatronConfig
from hpctrain.records.layout import RunLayout

# -- Find options of megatron-core that exclude each other, or that a model or layout excludes ---
# megatron-core would raise for most of them while it builds the model, by names that a spec does
# not have; some it would ignore, or compute wrongly. Sources are files of megatron-core 0.16.1.


# What TransformerEngine wants to be divisible: (features of a matrix, tokens of a rank).
# FP8: pytorch/utils.py, assert_dim_for_fp8_exec; MXFP8 and NVFP4: blocks of 32 and of 16 that are
# multiplied in pairs of rows (fp4_utils.py, get_fp4_align_size).
_MULTIPLES_OF_8_BITS = (16, 8)
_MULTIPLES_OF_BLOCKS = (32, 32)


def option_problems(config: MegatronConfig) -> Iterator[Problem]:
    """Yield every option that cannot be had with the others."""
    yield from _layer_problems(config)
    yield from _sharing_problems(config)
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
    kernels = config.attention_backend
    needing |= {
        "`use_precision_aware_optimizer`": config.use_precision_aware_optimizer,
        f"`attention_backend: {kernels}`": kernels not in ("auto", "local"),
        "`hierarchical_context_parallel_sizes`": bool(config.hierarchical_context_parallel_sizes),
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


def _sharing_problems(config: MegatronConfig) -> Iterator[Problem]:
    """Check the optimizer's instances and types, and the levels of context parallelism."""
    instances, sizes = (
        config.num_distributed_optimizer_instances,
        config.hierarchical_context_parallel_sizes,
    )
    if config.attention_backend == "local" and config.transformer_impl != "local":
        # language_module.py, _set_attention_backend: no kernel of TransformerEngine is left
        yield Problem("`attention_backend: local` needs `engine.implementation: local`")
    if not config.use_distributed_optimizer:
        for name, given in {
            "use_precision_aware_optimizer": config.use_precision_aware_optimizer,
            "num_distributed_optimizer_instances": instances > 1,
        }.items():
            if given:
                yield Problem(f"`{name}` needs the distributed optimizer: `optimizer.zero: 1`")
    types = (config.exp_avg_dtype, config.exp_avg_sq_dtype, config.main_params_dtype)
    if not config.use_precision_aware_optimizer and set(types) != {"fp32"}:
        # optimizer_config.py: "can only be fp32 when not using precision-aware optimizer"
        yield Problem(
            "exp_avg_dtype, exp_avg_sq_dtype and main_params_dtype need "
            "`use_precision_aware_optimizer`"
        )
    replicas = config.context_parallel_size * config.data_parallel_size
    ranks, ep = config.tensor_model_parallel_size * replicas, config.expert_model_parallel_size
    copies = {"dp x cp": replicas}
    if config.model.moe is not None:
        copies["of experts"] = ranks // (config.expert_tensor_ranks * ep)
    for what, count in copies.items():
        if count % instances:
            # parallel_state.py: "Data parallel size should be divisible by partial DistOpt shard
            # factor", and the same of experts
            yield Problem(
                f"`num_distributed_optimizer_instances` {instances} does not divide the {count} "
                f"replicas {what}"
            )
    if sizes is not None and sizes[0] * sizes[1] != config.context_parallel_size:
        yield Problem(
            f"`hierarchical_context_parallel_sizes` {sizes[0]} x {sizes[1]} is not the "
            f"context_parallel_size {config.context_parallel_size}"
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
    model, tp = config.model, config.tensor_model_parallel_size
    sizes = {
        "hidden_size": model.hidden,
        "ffn_hidden_size / tp": model.ffn_size // tp,
    }
    if model.moe is not None:
        size = model.moe.ffn // config.expert_tensor_ranks
        sizes["moe_ffn_hidden_size / etp"] = size
    if model.mla is None:
        sizes["heads x kv_channels / tp"] = model.heads * model.head_size // tp
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
    if offloaded >= config.model.layers:
        yield Problem(
            f"`activation_offload_layers` {offloaded} must be below the {config.model.layers} "
            "layers of the model: the last ones are needed at once"
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
        if config.model.mla is not None:
            # multi_latent_attention.py: q_up_proj and kv_up_proj, which have no buffers
            # (extensions/transformer_engine.py knows qkv, proj, fc1 and fc2)
            yield Problem("`tp_comm_overlap` does not know the projections of latent attention")
        if config.model.mtp_layers:
            # multi_token_prediction.py builds eh_proj without the name of a buffer
            yield Problem("`tp_comm_overlap` does not know the projection of prediction layers")
    if not config.defer_embedding_wgrad_compute:
        return
    if config.pipeline_model_parallel_size == 1:
        yield Problem("`defer_embedding_wgrad_compute` fills the end of a pipeline: pp is 1")
    if config.model.mtp_layers:
        # The output layer then runs several times per micro-batch. Its inputs are stored in the
        # order of the forward pass, its gradients in that of the backward pass, and both are taken
        # from the front (tensor_parallel/layers.py, utils.py drain_embedding_wgrad_compute).
        yield Problem("`defer_embedding_wgrad_compute` would be wrong with prediction layers")
    if config.model.reads_masked_text:
        # bert_model.py has no buffers for it
        yield Problem("`defer_embedding_wgrad_compute` is for gpt and llama")


def _dispatch_problems(config: MegatronConfig) -> Iterator[Problem]:
    """Check options of experts."""
    flex = config.moe_token_dispatcher_type == "flex"
    if config.model.moe is None:
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
        if not config.model.moe.shared_ffn:
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
    if config.model.reads_masked_text:
        # each micro-batch has a mask of its own, which a graph would replay from the first
        yield Problem(f"{graphs} is for gpt and llama")
    if config.recompute_granularity == "full":
        yield Problem(
            f"{graphs} does not go with full recomputation", hint="set `recompute: selective`"
        )
    if config.cpu_offloading_num_layers:
        yield Problem(f"{graphs} does not go with `activation_offload_layers`")
    redrawn = {"core_attn", "mlp", "moe"} & set(config.recompute_modules)
    if config.recompute_granularity == "selective" and config.model.dropout and redrawn:
        # transformer_config.py: "attention dropout is not supported with graphed attention
        # recomputation"
        yield Problem(
            f"{graphs} cannot draw dropout again while {', '.join(sorted(redrawn))} is recomputed",
            hint="set `model.dropout: 0`, or `recompute: none`",
        )


def engine_problems(config: MegatronConfig, run: RunLayout) -> Iterator[Problem]:
    """Yield everything that is wrong for megatron-core."""
    yield from _layout_problems(config)
    yield from _recompute_problems(config)
    if config.context_parallel_size > 1 and config.transformer_impl == "local":
        # dot_product_attention.py asserts context_parallel_size == 1
        yield Problem(
            "context_parallel_size above 1 needs TransformerEngine: megatron-core's "
            "local attention does not support it"
        )
    yield from _expert_problems(config)
    yield from option_problems(config)
    learned_positions = config.model.positions == "learned"
    if config.model.mtp_layers and learned_positions and config.pipeline_model_parallel_size > 1:
        # their copy is not in the group that sums gradients (parallel_state.py,
        # default_position_embedding_ranks: the first stage alone)
        yield Problem("prediction layers behind a pipeline need rotary positions")


def _layout_problems(config: MegatronConfig) -> Iterator[Problem]:
    """Check that tp divides the model, and the stages of the pipeline."""
    model, tp = config.model, config.tensor_model_parallel_size
    for name, size in {
        "num_attention_heads": model.heads,
        "ffn_hidden_size": model.ffn_size,
        "padded_vocab_size": config.padded_vocab_size,
    }.items():
        if size % tp:
            yield Problem(f"{name} {size} is not divisible by tp {tp}")
    groups = model.key_value_heads
    if groups % tp and tp % groups:  # transformer_config.py, __post_init__: either may divide
        yield Problem(f"num_query_groups {groups} and tp {tp} do not divide each other")
    if config.sequence_parallel and (tp == 1 or config.seq_length % tp):
        yield Problem(f"sequence_parallel needs tp > 1 that divides seq_length, got tp {tp}")
    if config.padded_vocab_size < config.vocab_size:
        yield Problem(f"padded_vocab_size is below vocab_size {config.vocab_size}")

    pp, vpp = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size
    split = config.pipeline_layer_split
    if len(split) != pp or any(len(stage) != (vpp or 1) for stage in split):
        yield Problem(f"pipeline_layer_split must have {pp} stages of {vpp or 1} chunks: {split}")
    if sum(map(sum, split)) != model.layers:
        yield Problem(f"pipeline_layer_split {split} does not add up to {model.layers} layers")
    if vpp is not None and pp < 2:
        yield Problem("virtual_pipeline_model_parallel_size needs a pipeline of at least 2 stages")
    odd = [size for size in config.batch_sizes.all if config.microbatches_of(size) % pp]
    if vpp is not None and odd:
        # schedules.py: the interleaved schedule works on groups of pp microbatches
        yield Problem(
            f"the interleaved schedule needs microbatches divisible by pp {pp}, "
            f"got {config.microbatches_of(odd[0])}"
        )


def _recompute_problems(config: MegatronConfig) -> Iterator[Problem]:
    """Check that the model has what is recomputed (transformer_config.py, __post_init__)."""
    if config.recompute_granularity != "selective":
        return
    hint = "leave it out of `recompute_modules`"
    if "moe_act" in config.recompute_modules and config.model.moe is None:
        yield Problem("recompute_modules has moe_act, and the model has no experts", hint=hint)
    if "mla_up_proj" in config.recompute_modules and config.model.mla is None:
        message = "recompute_modules has mla_up_proj, and the model has no latent attention"
        yield Problem(message, hint=hint)


def _expert_problems(config: MegatronConfig) -> Iterator[Problem]:
    ep, moe = config.expert_model_parallel_size, config.model.moe
    ranks = config.tensor_model_parallel_size * config.context_parallel_size
    ranks *= config.data_parallel_size
    if ranks % ep:
        yield Problem(f"expert_model_parallel_size {ep} does not divide tp x cp x dp = {ranks}")
    if moe is None:
        if ep > 1:
            yield Problem("expert_model_parallel_size above 1 needs num_moe_experts")
        if config.expert_tensor_parallel_size is not None:
            yield Problem("expert_tensor_parallel_size has no effect: the model has no experts")
        return
    etp = config.expert_tensor_ranks
    if ranks % (etp * ep):
        # parallel_state.py: the ranks of a stage are etp x ep x expert dp
        yield Problem(f"etp {etp} x ep {ep} does not divide tp x cp x dp = {ranks}")
    if ep == 1 and etp != config.tensor_model_parallel_size:
        # 0.16.1, tensor_parallel/layers.py: without expert parallelism the gradients of experts are
        # summed like those of dense weights, over data-parallel ranks alone. Ranks of tp that hold
        # the same expert would train it with different gradients, without an error.
        yield Problem(
            f"etp {etp} without expert parallelism must be tp "
            f"{config.tensor_model_parallel_size}: experts would get wrong gradients",
            hint="leave `parallel.etp` out, or set ep of at least 2",
        )
    if moe.ffn % etp:
        yield Problem(f"moe_ffn_hidden_size is not divisible by etp {etp}")
    if moe.experts % ep:
        yield Problem(f"num_moe_experts {moe.experts} is not divisible by ep {ep}")
    if config.model.mlp_bias and config.expert_tensor_ranks > 1:
        # transformer_config.py: "Bias in Moe is only supported when ETP==1"
        yield Problem("experts with biases cannot be split over tp: use ep, or no biases")
    if config.tensor_model_parallel_size > 1 and not config.sequence_parallel:
        # moe_layer.py refuses tensor without sequence parallelism while training
        yield Problem("experts with tp need sequence_parallel")
