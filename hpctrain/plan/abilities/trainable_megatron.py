"""List what hpctrain cannot train on megatron-core although it can be planned.

Belongs here: one message for each, with its field. Does not belong here: what holds for any engine
(see `trainable`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hpctrain.spec.families import family_named, missing_part, read_config
from hpctrain.spec.model import ModelSpec
from hpctrain.spec.positions import shorten
from hpctrain.spec.run import RunSpec


def _mixes(model: ModelSpec, mixer: str) -> bool:
    return any(model.mixer(layer) == mixer for layer in range(model.layers))


def _chosen_from_groups(model: ModelSpec) -> int | None:
    """Experts of a group whose scores megatron-core adds up to rank it (moe_utils.py,
    group_limited_topk); None without groups."""
    moe = model.moe
    return None if moe is None or moe.top_groups is None else moe.top_k // moe.top_groups


# Parts of a model that megatron-core 0.16.1 and 0.19.2 and the layers that hpctrain adds to them
# (`train/engines/megatron/layers.py`) do not have: whether a model has one, its field, and why not.
_MISSING: tuple[tuple[Callable[[ModelSpec], object], str, str], ...] = (
    (
        lambda model: model.encoder_layers,
        "encoder_layers",
        "its GPT attends to no encoder: train by fsdp, ddp or deepspeed",
    ),
    (
        lambda model: model.reads_masked_text and model.family != "bert",
        "family",
        "its encoder is BERT's, with two segments and a norm before each part",
    ),
    (
        lambda model: _mixes(model, "mamba"),
        "pattern",
        "its state spaces are kernels of mamba_ssm, which hpctrain has not trained",
    ),
    (
        lambda model: _mixes(model, "linear"),
        "pattern",
        "its linear attention is kernels of flash-linear-attention, which hpctrain has not trained",
    ),
    (
        lambda model: model.single_blocks,
        "single_blocks",
        "its GPT has attention and an MLP in each layer",
    ),
    (
        lambda model: model.activation == "xielu",
        "activation",
        "it has no xielu, whose slopes are learned",
    ),
    (
        lambda model: model.norm_place == "after" and not model.final_norm,
        "norm_place",
        "its norms are before a sum or on what is added, not behind the sum",
    ),
    (
        lambda model: model.family == "falcon" and model.positions == "alibi",
        "positions",
        "slopes are added to scaled scores, and Falcon's class scales their sum",
    ),
    (
        lambda model: model.embedding_size is not None,
        "embedding_size",
        "its embeddings have the size of its layers",
    ),
    (
        lambda model: _mixes(model, "chunk"),
        "attention.chunk",
        "it attends to all tokens before or to a window of them",
    ),
    (
        lambda model: model.attends.qk_norm in ("head_turned", "l2"),
        "attention.qk_norm",
        "its norms of queries and keys have weights, and are before the rotary positions",
    ),
    (
        lambda model: model.moe and model.moe.score == "sparsemixer",
        "moe.score",
        "its router has softmax and sigmoid",
    ),
    (
        lambda model: model.moe and model.moe.jitter,
        "moe.jitter",
        "its noise is on what the router reads, not on what the experts read",
    ),
    (
        lambda model: model.family == "llama4" and model.seq > 8191,
        "seq",
        "its attention has no temperature that rises from position 8,192 on",
    ),
    (
        lambda model: model.mla is not None and model.bias in (True, "qkv", "attention"),
        "bias",
        "its latent attention has no biases at the down projections",
    ),
    (
        lambda model: model.mla is not None and model.attends.scale is not None,
        "attention.scale",
        "the scale of latent attention follows from its sizes",
    ),
    (
        lambda model: model.family == "minicpm3" and not model.rotates.interleaved,
        "rope.interleaved",
        "the rotary pairs of its latent attention are neighbours",
    ),
    (
        lambda model: model.mla is not None and model.attends.qk_norm is not None,
        "attention.qk_norm",
        "latent attention has norms behind its down projections instead",
    ),
    (
        lambda model: model.mla is not None and model.attends.gate,
        "attention.gate",
        "the output of latent attention has no gate",
    ),
    (
        lambda model: (
            model.mla is not None
            and (
                model.norm not in ("layernorm", "rmsnorm")
                or model.norm_place == "after"
                or model.parallel_residual
            )
        ),
        "mla",
        "latent attention has a norm with weights before it, and the MLP behind it",
    ),
    (
        lambda model: model.mtp_layers and model.attends.qk_norm in ("width", "each_head"),
        "mtp_layers",
        "norms of queries and keys in a prediction layer are over a head, with shared weights",
    ),
    (
        lambda model: (
            model.mla is not None
            and model.rotates.scaling is not None
            and model.rotates.scaling.kind != "yarn"
        ),
        "rope.scaling.kind",
        "latent attention is scaled by yarn only",
    ),
    (
        lambda model: (
            model.rotates.scaling is not None
            and model.rotates.scaling.kind == "dynamic"
            and model.seq > (model.rotates.scaling.original_seq or model.max_seq or model.seq)
        ),
        "rope.scaling.kind",
        "dynamic scaling follows the length of each sequence: not above `max_seq`",
    ),
    (
        lambda model: model.moe and model.moe.score == "sigmoid" and not model.moe.normalize,
        "moe.normalize",
        "sigmoid scores are divided by their sum, and weigh what experts return",
    ),
    (
        lambda model: model.moe and model.moe.score == "softmax" and model.moe.expert_bias,
        "moe.expert_bias",
        "it balances by biases with `score: sigmoid` only",
    ),
    (
        lambda model: (
            model.moe
            and model.moe.score == "softmax"
            and _chosen_from_groups(model) != 1
            and _chosen_from_groups(model) is not None
        ),
        "moe.groups",
        "it ranks a group by the sum of its best experts, and these by the best one alone",
    ),
    (
        lambda model: (
            model.moe
            and model.moe.score == "sigmoid"
            and _chosen_from_groups(model) not in (None, 2)
        ),
        "moe.groups",
        "it ranks a group by `top_k / top_groups` of its experts, and these by two",
    ),
    (
        lambda model: (
            model.mtp_layers
            and any((model.attends.window, model.rotates.without, model.parallel_residual))
        ),
        "mtp_layers",
        "a prediction layer has no place in a pattern of layers, nor a parallel residual",
    ),
)


def missing_parts(model: ModelSpec) -> Iterator[tuple[str, str]]:
    """Yield (field of `model`, why megatron-core has it not); of an encoder that alone."""
    if model.counted is not None:
        yield "config", missing_part(model.config or {}) or "it is known by a count alone"
        return
    for has, field, why in _MISSING:
        if has(model):
            yield field, why
            if model.encoder_layers:
                return


# Parts that hpctrain adds to megatron-core, in a process of its own alone: an external Megatron-LM
# has them not.
_ADDED: tuple[tuple[Callable[[ModelSpec], object], str], ...] = (
    (lambda model: model.norm_place != "before", "norm_place"),
    (lambda model: model.norm not in ("layernorm", "rmsnorm"), "norm"),
    (lambda model: model.parallel_residual, "parallel_residual"),
    (lambda model: model.residual_scale != 1, "residual_scale"),
    (lambda model: model.embedding_scale != 1, "embedding_scale"),
    (lambda model: model.embedding_norm, "embedding_norm"),
    (lambda model: model.position_offset, "position_offset"),
    (lambda model: model.positions == "alibi", "positions"),
    (lambda model: model.logit_scale != 1, "logit_scale"),
    (lambda model: model.logit_soft_cap, "logit_soft_cap"),
    (lambda model: model.output_bias, "output_bias"),
    (lambda model: model.bias in ("attention", "mlp"), "bias"),
    (lambda model: model.attends.soft_cap, "attention.soft_cap"),
    (lambda model: model.attends.qk_norm in ("width", "each_head"), "attention.qk_norm"),
    (lambda model: model.rotates.window_base, "rope.window_base"),
    (lambda model: _scaled_otherwise(model), "rope.scaling"),
    (
        lambda model: model.activation not in ("gelu", "gelu_tanh", "swiglu", "squared_relu"),
        "activation",
    ),
)


def _scaled_otherwise(model: ModelSpec) -> bool:
    """Tell whether rotary positions are scaled as no argument of Megatron-LM does it.

    It scales linearly by whole numbers, and as Llama 3.1 with its own constants
    (rotary_pos_embedding.py, apply_scaling).
    """
    scaling = model.rotates.scaling
    if scaling is None or model.mla is not None:
        return False
    if scaling.kind == "linear":
        return not scaling.factor.is_integer()
    llama = (scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_seq)
    return scaling.kind != "llama3" or llama != (1, 4, 8192)


def added_parts(model: ModelSpec) -> Iterator[str]:
    """Yield the fields of `model` that megatron-core has not, and hpctrain adds."""
    yield from (field for has, field in _ADDED if has(model))


def own_layers_for(model: ModelSpec) -> str | None:
    """Name the part for which core attention must be unfused: TransformerEngine has it not."""
    parts = {
        "attention.soft_cap": model.attends.soft_cap is not None,
        "positions: alibi": model.positions == "alibi",
    }
    return next((name for name, present in parts.items() if present), None)


_LEARNED_FROM_TOKENS = ("language_modeling", "masked_language_modeling", "span_corruption")


def untrainable(spec: RunSpec) -> Iterator[tuple[str, str]]:
    """Yield (dotted path of the field, what the trainer lacks)."""
    model = spec.model
    bert = model.reads_masked_text
    for field, why in missing_parts(model):
        yield f"model.{field}", f"megatron-core cannot train this model: {why}"
    yield from _unknown_names(model)
    unfused = own_layers_for(model)
    if unfused is not None and spec.engine.implementation == "transformer_engine":
        message = f"TransformerEngine's attention has no {unfused}: say local"
        yield "engine.implementation", message
    if unfused is not None and spec.precision in ("fp8", "fp4"):
        message = f"TransformerEngine's layers compute in {spec.precision}, and have no {unfused}"
        yield "precision", message
    yield from _untrainable_options(spec)
    learned = spec.model.classes is None and spec.learned_task in _LEARNED_FROM_TOKENS
    for field, given in (("lora", spec.lora), ("task", None if learned else spec.learned_task)):
        if given is not None:
            yield field, f"{spec.engine.name} trains whole models from tokens: no `{field}`"
    if spec.parallel != "auto" and spec.parallel.cp > 1 and untrainable_axes(spec):
        sizes = f"{spec.model.query_key_size} and {spec.model.value_size}"
        message = "only fused kernels of attention divide a sequence"
        if spec.model.takes_fused_attention():
            message += f", not `attention_backend: {spec.engine.megatron.attention_backend}`"
        else:
            message += f", and they take heads of multiples of 8 up to 256, not of {sizes}"
        yield "parallel.cp", f"{message}: say 1"
    if bert and spec.model.pretrained is not None:
        yield "model.pretrained", "hpctrain converts no BERT to megatron-core"
    if bert and spec.parallel != "auto" and spec.parallel.cp > 1:
        yield "parallel.cp", "megatron-core's BERT has no context parallelism: say 1"


def _unknown_names(model: ModelSpec) -> Iterator[tuple[str, str]]:
    """Yield the names of a config.json that only the class of transformers may know."""
    family = family_named(model.family)
    if model.config is None or family is None or model.counted is not None:
        return
    for name, value in read_config(model.config, family).unknown:
        named = f"{shorten(name)} is {shorten(str(value))}"
        message = f"{named}, which megatron-core is not told: remove it, or train by fsdp"
        yield "model.config", message


def untrainable_axes(spec: RunSpec) -> tuple[str, ...]:
    """Name the axes by which this model is not split.

    TransformerEngine's attention that is not fused does not know context parallelism
    (dot_product_attention/utils.py, get_attention_backend).
    """
    unfused = spec.engine.megatron.attention_backend in ("unfused", "local")
    return ("cp",) if unfused or not spec.model.takes_fused_attention() else ()


# What megatron-core sets of TransformerEngine's switches, flash, fused and unfused
# (language_module.py, _set_attention_backend); another value ends a rank.
_SWITCHES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")


def _unusable_attention(spec: RunSpec) -> Iterator[tuple[str, str]]:
    """Yield kernels of attention that this model or precision has not (TransformerEngine:
    dot_product_attention/utils.py, get_attention_backend; context_parallel.py)."""
    own, model = spec.engine.megatron, spec.model
    kind, field = own.attention_backend, "engine.megatron.attention_backend"
    if kind in ("flash", "fused"):
        if spec.precision == "fp32":
            yield field, f"{kind} kernels of attention compute in 16 bits, not in fp32: say auto"
        if not model.takes_fused_attention():
            sizes = f"{model.query_key_size} and {model.value_size}"
            message = f"{kind} kernels take heads of multiples of 8 up to 256, not of {sizes}"
            yield field, f"{message}: say auto"
    if kind == "flash" and model.attends.sinks:
        yield field, "flash attention has no `attention.sinks`: say fused, or auto"
    if own.hierarchical_context_parallel_sizes and model.attends.window is not None:
        message = "rings of keys and values have no windows: leave it out, and say cp 1"
        yield "engine.megatron.hierarchical_context_parallel_sizes", message
    for place, name in enumerate(_SWITCHES):
        given = spec.environment.variables.get(name)
        wished = str(int(kind in ("auto", ("flash", "fused", "unfused")[place])))
        if given not in (None, wished) and not model.reads_images:
            message = f"{name} is {given}, and `attention_backend: {kind}` sets {wished}, or ends"
            yield f"environment.variables.{name}", f"{message}: remove it, and set {field}"


def _untrainable_options(spec: RunSpec) -> Iterator[tuple[str, str]]:
    """Yield options of `engine.megatron` that the trainer would ignore or compute wrongly.

    The trainer has the same conditions with their reasons
    (`hpctrain.train.engines.megatron.preflight`); those of a layout that the planner chooses
    are found there.
    """
    own, model, section = spec.engine.megatron, spec.model, "engine.megatron"
    yield from _unusable_attention(spec)
    if own.fp8_param_gather:
        message = "hpctrain draws and saves weights of 16 or 32 bits, not of 8: say false"
        yield f"{section}.fp8_param_gather", message
    if spec.precision == "fp32" and own.cross_entropy_loss_fusion:
        message = "the fused loss rounds its gradient to bf16: say false, or `precision: bf16`"
        yield f"{section}.cross_entropy_loss_fusion", message
    if spec.engine.deterministic and own.cross_entropy_loss_fusion:
        message = "the fused loss is not deterministic: say false"
        yield f"{section}.cross_entropy_loss_fusion", message
    if own.defer_embedding_wgrad_compute and model.mtp_layers:
        message = "the gradients of prediction layers would be wrong: say false"
        yield f"{section}.defer_embedding_wgrad_compute", message
    parts = {"latent attention": model.mla is not None, "prediction layers": model.mtp_layers > 0}
    for part, built in parts.items():
        if built and own.tp_comm_overlap:
            message = f"userbuffers do not know the projections of {part}: say false"
            yield f"{section}.tp_comm_overlap", message
    if spec.batch.ramp_up is not None and own.cuda_graph_impl != "none":
        message = "graphs are captured for one number of microbatches: say none, or no ramp_up"
        yield f"{section}.cuda_graph_impl", message
    if model.family == "bert" and own.cuda_graph_impl != "none":
        yield f"{section}.cuda_graph_impl", "it is for gpt and llama, not bert"
