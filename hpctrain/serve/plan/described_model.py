"""Read a `config.json` of Hugging Face as the planner of a service needs it. Pure.

Any decoder with the names of Llama's configuration is understood, whether hpctrain trains it or
not: dense, mixture of experts, latent attention, sliding windows, quantised weights.

Belongs here: the names in that file. Does not belong here: opening it, what an engine can serve
(engines say that themselves), the stricter reading for training (`hpctrain.spec.families`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from hpctrain.plan.cost.case import Shape
from hpctrain.plan.cost.from_spec import shape_of
from hpctrain.serve.plan.candidates import ModelFacts
from hpctrain.spec.model import ModelSpec
from hpctrain.spec.service import WeightPrecision

Config = Mapping[str, Any]

_DTYPES: dict[str, WeightPrecision] = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
}
# Names that models have for the same thing, the first that is there counts.
_EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts")
_GPT2_NAMES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size",
}


def described_model(config: Config, stored_bytes: float | None = None) -> ModelFacts:
    """Describe the model of a `config.json`; `stored_bytes`: of its weights' files.

    Raises ValueError with what is missing.
    """
    text = _text_part(config)
    fields = _fields(text)
    try:
        spec = ModelSpec.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{where + ': ' if where else ''}{first['msg']}") from None
    shape = _windowed(shape_of(spec), text)
    facts = model_facts(spec, stored_precision(config), stored_bytes, shape)
    return replace(facts, block_scales=bool(_quantisation(config).get("weight_block_size")))


def model_facts(
    spec: ModelSpec,
    stored: WeightPrecision,
    stored_bytes: float | None = None,
    shape: Shape | None = None,
) -> ModelFacts:
    """Describe the model of a spec. Raises ValueError for one that writes no text."""
    if not spec.causal:
        raise ValueError(f"a {spec.family} makes no tokens: only gpt and llama are served")
    if spec.encoder_layers:
        raise ValueError(f"a {spec.family} answers from an encoder: only decoders are served")
    return ModelFacts(
        shape=shape if shape is not None else shape_of(spec),
        layers=spec.layers,
        heads=spec.heads,
        longest_tokens=spec.seq,
        stored=stored,
        stored_bytes=stored_bytes,
    )


def stored_precision(config: Config) -> WeightPrecision:
    """Return the number format of the weights: that of a quantisation, else of the tensors.

    The methods are those that vLLM reads: fp8, modelopt, compressed-tensors, awq, gptq, mxfp4,
    bitsandbytes.
    """
    text = _text_part(config)
    if quantisation := _quantisation(config):
        return _quantised(quantisation)
    name = text.get("dtype") or text.get("torch_dtype") or config.get("torch_dtype") or "bfloat16"
    return _DTYPES.get(str(name).removeprefix("torch."), "bf16")


def _quantisation(config: Config) -> Config:
    return config.get("quantization_config") or _text_part(config).get("quantization_config") or {}


def _quantised(settings: Config) -> WeightPrecision:
    method = str(settings.get("quant_method", "")).lower()
    words = f"{method} {settings.get('quant_algo', '')} {settings.get('fmt', '')}".lower()
    if "fp4" in words or "nvfp4" in words:
        return "fp4"
    if "fp8" in words:
        return "fp8"
    bits = settings.get("bits") or settings.get("w_bit")
    kind = "int"
    for group in (settings.get("config_groups") or {}).values():
        weights = group.get("weights") or {}
        bits, kind = weights.get("num_bits", bits), str(weights.get("type", kind))
    if settings.get("load_in_8bit"):
        bits = 8
    low: WeightPrecision = "fp4" if kind == "float" else "int4"
    high: WeightPrecision = "fp8" if kind == "float" else "int8"
    return high if bits == 8 else low


def _text_part(config: Config) -> Config:
    """Return the language model of a model that sees, too."""
    inner = config.get("text_config")
    found = dict(inner) if isinstance(inner, Mapping) else dict(config)
    for theirs, name in _GPT2_NAMES.items():
        if found.get(theirs) is not None:
            found.setdefault(name, found[theirs])
    return found


def _fields(config: Config) -> dict[str, Any]:
    """Translate to the fields of `model` in a spec."""
    needed = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    missing = [name for name in needed if not config.get(name)]
    if missing:
        raise ValueError(f"config.json has no `{missing[0]}`: give the shape by `model`")
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    gpt2 = config.get("model_type") == "gpt2"
    fields: dict[str, Any] = dict(
        family="gpt" if gpt2 else "llama",
        layers=config["num_hidden_layers"],
        hidden=hidden,
        heads=heads,
        ffn=config.get("intermediate_size") or 4 * hidden,
        vocab=config["vocab_size"],
        seq=config.get("max_position_embeddings") or 2048,
        tied=bool(config.get("tie_word_embeddings", gpt2)),
    )
    experts = next((config[name] for name in _EXPERTS if config.get(name)), None)
    if experts:
        each = config.get("moe_intermediate_size") or fields["ffn"]
        shared = config.get("shared_expert_intermediate_size") or each * (
            config.get("n_shared_experts") or 0
        )
        fields["moe"] = dict(
            experts=experts,
            top_k=config.get("num_experts_per_tok") or 1,
            ffn=each,
            shared_ffn=shared,
            dense_layers=config.get("first_k_dense_replace") or 0,
        )
    if config.get("kv_lora_rank"):
        fields["mla"] = dict(
            q_rank=config.get("q_lora_rank"),
            kv_rank=config["kv_lora_rank"],
            nope_dim=config.get("qk_nope_head_dim", 128),
            rope_dim=config.get("qk_rope_head_dim", 64),
            value_dim=config.get("v_head_dim", 128),
        )
    else:
        fields["kv_heads"] = config.get("num_key_value_heads") or heads
        fields["head_dim"] = config.get("head_dim") or hidden // heads
    return fields


def _windowed(shape: Shape, config: Config) -> Shape:
    """Enter the sliding window and the share of the layers that have it."""
    window = config.get("sliding_window")
    if not window or config.get("use_sliding_window") is False:
        return shape
    kinds = config.get("layer_types")
    share = 1.0
    if kinds:
        share = sum(kind == "sliding_attention" for kind in kinds) / len(kinds)
    return replace(shape, window=int(window), window_share=share)
