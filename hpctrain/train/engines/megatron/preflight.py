"""Find what megatron-core would refuse, or compute wrongly, before it is imported.

Belongs here: checks of the layout. Does not belong here: options (see `option_problems`), checks
for all engines (see `hpctrain.train.preflight`), installed software (see
`hpctrain.train.software_agreement`). Imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Iterator

from hpctrain.base.errors import Problem
from hpctrain.engines.megatron import MegatronConfig
from hpctrain.records.layout import RunLayout
from hpctrain.train.engines.megatron.option_problems import option_problems

# multi_latent_attention.py gives core attention two head sizes, which dot_product_attention.py
# does not take
LATENT_NEEDS_ENGINE = Problem(
    "multi-head latent attention needs TransformerEngine: megatron-core's own layers cannot",
    hint="leave `engine.implementation` at auto, and install TransformerEngine",
)


def engine_problems(config: MegatronConfig, run: RunLayout) -> Iterator[Problem]:
    """Yield everything that is wrong for megatron-core."""
    yield from _layout_problems(config)
    yield from _recompute_problems(config)
    if config.multi_latent_attention and config.transformer_impl == "local":
        yield LATENT_NEEDS_ENGINE
    if config.context_parallel_size > 1 and config.transformer_impl == "local":
        # dot_product_attention.py asserts context_parallel_size == 1
        yield Problem(
            "context_parallel_size above 1 needs TransformerEngine: megatron-core's "
            "local attention does not support it"
        )
    yield from _expert_problems(config)
    yield from option_problems(config)
    learned_positions = config.position_embedding_type == "learned_absolute"
    if config.mtp_num_layers and learned_positions and config.pipeline_model_parallel_size > 1:
        # their copy is not in the group that sums gradients (parallel_state.py,
        # default_position_embedding_ranks: the first stage alone)
        yield Problem("prediction layers behind a pipeline need rotary positions")


def _layout_problems(config: MegatronConfig) -> Iterator[Problem]:
    """Check that tp divides the model, and the stages of the pipeline."""
    tp = config.tensor_model_parallel_size
    for name in ("num_attention_heads", "ffn_hidden_size", "padded_vocab_size"):
        if getattr(config, name) % tp:
            yield Problem(f"{name} {getattr(config, name)} is not divisible by tp {tp}")
    groups = config.num_query_groups
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
    if sum(map(sum, split)) != config.num_layers:
        yield Problem(f"pipeline_layer_split {split} does not add up to {config.num_layers} layers")
    if vpp is not None and pp < 2:
        yield Problem("virtual_pipeline_model_parallel_size needs a pipeline of at least 2 stages")
    if vpp is not None and config.microbatches % pp:
        # schedules.py: the interleaved schedule works on groups of pp microbatches
        yield Problem(
            f"the interleaved schedule needs microbatches divisible by pp {pp}, "
            f"got {config.microbatches}"
        )


def _recompute_problems(config: MegatronConfig) -> Iterator[Problem]:
    """Check that the model has what is recomputed (transformer_config.py, __post_init__)."""
    if config.recompute_granularity != "selective":
        return
    hint = "leave it out of `recompute_modules`"
    if "moe_act" in config.recompute_modules and config.num_moe_experts is None:
        yield Problem("recompute_modules has moe_act, and the model has no experts", hint=hint)
    if "mla_up_proj" in config.recompute_modules and not config.multi_latent_attention:
        message = "recompute_modules has mla_up_proj, and the model has no latent attention"
        yield Problem(message, hint=hint)


def _expert_problems(config: MegatronConfig) -> Iterator[Problem]:
    ep, experts = config.expert_model_parallel_size, config.num_moe_experts
    ranks = config.tensor_model_parallel_size * config.context_parallel_size
    ranks *= config.data_parallel_size
    if ranks % ep:
        yield Problem(f"expert_model_parallel_size {ep} does not divide tp x cp x dp = {ranks}")
    if experts is None:
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
    if (config.moe_ffn_hidden_size or config.ffn_hidden_size) % etp:
        yield Problem(f"moe_ffn_hidden_size is not divisible by etp {etp}")
    if experts % ep:
        yield Problem(f"num_moe_experts {experts} is not divisible by ep {ep}")
    if config.add_bias_linear and config.moe_shared_expert_intermediate_size:
        # shared_experts.py: "bias is not supported in the shared experts"
        yield Problem("add_bias_linear: shared experts have no biases in megatron-core")
    if config.add_bias_linear and config.expert_tensor_ranks > 1:
        # transformer_config.py: "Bias in Moe is only supported when ETP==1"
        yield Problem("experts with biases cannot be split over tp: use ep, or no biases")
    if config.tensor_model_parallel_size > 1 and not config.sequence_parallel:
        # moe_layer.py refuses tensor without sequence parallelism while training
        yield Problem("experts with tp need sequence_parallel")
