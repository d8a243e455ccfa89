"""Readers of what stands in `config.json` in more than one name, or in a form of its own.

Each yields (field of `model`, value). Belongs here: these few functions. Does not belong here: a
name that is a field by itself, which is a row of a family's file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hpctrain.spec.architecture import MOST_LAYERS

Config = Mapping[str, Any]
Found = Iterator[tuple[str, Any]]


@dataclass(frozen=True)
class Reader:
    """`names`: what it reads in `config.json`, the one to name in messages first. `write`: from
    fields of `model` to names of `config.json`; None: they follow from other names."""

    names: tuple[str, ...]
    read: Callable[[Config], Found]
    write: Callable[[Config], dict[str, Any]] | None = None


class UnreadableError(ValueError):
    """A value, by its name, of which no field of `model` can be made."""


def given(value: Any) -> bool:
    """Tell whether a value of `config.json` says something: not null, false, or empty."""
    return value is not None and value is not False and value != [] and value != {}


def _rope(config: Config) -> Found:
    """Rotary positions; transformers 4 had them in two places, 5 has one, by type of layer."""
    scaling = config.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise UnreadableError("rope_scaling")
    older = {"rope_theta": config.get("rope_theta"), **scaling}
    found = config.get("rope_parameters") or older
    if not isinstance(found, dict):
        raise UnreadableError("rope_parameters")
    if isinstance(found.get("full_attention"), dict):
        window, found = found.get("sliding_attention") or {}, found["full_attention"]
        plain = {
            "rope_type": "default",
            "partial_rotary_factor": found.get("partial_rotary_factor"),
        }
        if window != found and any(window.get(name, plain[name]) != plain[name] for name in plain):
            raise UnreadableError("rope_parameters")  # `window` layers are scaled in their own way
        yield "rope.window_base", window.get("rope_theta") if window != found else None
    elif config.get("rope_local_base_freq") is not None:
        yield "rope.window_base", config["rope_local_base_freq"]
    yield "rope_base", found.get("rope_theta") or config.get("rope_theta")
    partial = found.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    yield "rope.partial", partial if partial != 1.0 else None
    kind = found.get("rope_type", found.get("type", "default"))
    if kind in ("default", None, "none"):
        return
    names = {
        "original_max_position_embeddings": "original_seq",
        **{name: name for name in _SCALING},
    }
    yield "rope.scaling.kind", "longrope" if kind == "su" else kind
    for theirs, ours in names.items():
        value = found.get(theirs, config.get(theirs) if ours == "original_seq" else None)
        yield f"rope.scaling.{ours}", tuple(value) if isinstance(value, list) else value


def _write_rope(fields: Config) -> dict[str, Any]:
    rope = fields.get("rope") or {}
    scaling = dict(rope.get("scaling") or {})
    written: dict[str, Any] = {"rope_theta": fields.get("rope_base"), "rope_type": "default"}
    if rope.get("partial") is not None:
        written["partial_rotary_factor"] = rope["partial"]
    if scaling:
        written["rope_type"] = scaling.pop("kind")
        written["original_max_position_embeddings"] = scaling.pop("original_seq", None)
        written |= scaling
    written = {name: value for name, value in written.items() if value is not None}
    if rope.get("window_base") is not None:
        local = {"rope_theta": rope["window_base"], "rope_type": "default"}
        written = {"full_attention": written, "sliding_attention": local}
    return {"rope_parameters": written}


_SCALING = (
    *("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"),
    *("mscale", "mscale_all_dim", "attention_factor", "truncate", "short_factor", "long_factor"),
)
_MIXERS = {
    "full_attention": "full",
    "sliding_attention": "window",
    "chunked_attention": "chunk",
    "linear_attention": "linear",
    "mamba": "mamba",
    "attention": "full",
    "mlp": "mlp",
    "moe": "moe",
}


def shortest(pattern: list[Any]) -> tuple[Any, ...]:
    """Return the shortest part of which a list is made by repeating it (the last time cut).

    What is left is the longest beginning that the list also ends with (Knuth, Morris and Pratt).
    """
    ends = [0] * len(pattern)
    for n in range(1, len(pattern)):
        length = ends[n - 1]
        while length and pattern[n] != pattern[length]:
            length = ends[length - 1]
        ends[n] = length + (pattern[n] == pattern[length])
    return tuple(pattern[: len(pattern) - ends[-1]]) if pattern else ()


def _counted(config: Config, name: str) -> int:
    """Return a number of layers, 0 where there is none. Raises UnreadableError."""
    value = config.get(name)
    if value is None or value is False:
        return 0
    if not isinstance(value, int) or not 0 <= value <= MOST_LAYERS:
        raise UnreadableError(name)
    return int(value)


def _listed(config: Config, name: str) -> list[Any]:
    """Return a list, empty where there is none. Raises UnreadableError."""
    value = config.get(name)
    if not isinstance(value, list | None):
        raise UnreadableError(name)
    return value or []


def _pattern(config: Config) -> Found:
    """The kinds of layers, also where all see everything: a family may have another pattern."""
    kinds = _listed(config, "layer_types") or _listed(config, "layers_block_type")
    if kinds:
        yield "pattern", shortest([_MIXERS.get(str(kind), str(kind)) for kind in kinds])


def _write_pattern(fields: Config) -> dict[str, Any]:
    pattern, layers = fields.get("pattern"), fields.get("layers", 0)
    if not pattern:
        return {}
    words = {ours: theirs for theirs, ours in reversed(_MIXERS.items())}
    return {"layer_types": [words[pattern[n % len(pattern)]] for n in range(layers)]}


def _window(config: Config) -> Found:
    """A window over all layers, over those from `max_window_layers` on, or over a pattern."""
    window = config.get("sliding_window")
    if config.get("use_sliding_window") is False or not window:
        return
    first, layers = config.get("max_window_layers"), config.get("num_hidden_layers")
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and "sliding_attention" not in kinds:
        return
    if not isinstance(kinds, list) and isinstance(first, int) and isinstance(layers, int):
        if first >= layers:
            return
        if first and layers <= MOST_LAYERS:
            yield "pattern", tuple("full" if n < first else "window" for n in range(layers))
    yield "attention.window", window


def _write_window(fields: Config) -> dict[str, Any]:
    window = (fields.get("attention") or {}).get("window")
    return {"sliding_window": window, "use_sliding_window": window is not None}


def _every(config: Config) -> Found:
    """Windows by a number: of so many layers the last one sees everything."""
    if config.get("layer_types"):
        return
    names = ("sliding_window_pattern", "_sliding_window_pattern")
    if (every := max(_counted(config, name) for name in names)) > 1:
        yield "pattern", (*["window"] * (every - 1), "full")


def _interval(config: Config) -> Found:
    """Of so many layers the last one has full attention (Qwen3-Next)."""
    every = _counted(config, "full_attention_interval")
    if every > 1 and not config.get("layer_types"):
        yield "pattern", (*["linear"] * (every - 1), "full")


def _biases(config: Config) -> Found:
    """Biases of attention and MLP, which have a name each."""
    attention, mlp = (bool(config.get(name)) for name in ("attention_bias", "mlp_bias"))
    if attention or mlp:
        yield "bias", True if attention and mlp else "attention" if attention else "mlp"


def _write_biases(fields: Config) -> dict[str, Any]:
    bias = fields.get("bias")
    attention, mlp = bias in (True, "attention"), bias in (True, "mlp")
    return {"attention_bias": attention, "mlp_bias": mlp}


def _embedding_root(config: Config) -> Found:
    """Embeddings are multiplied by the root of their size (GemmaModel.forward)."""
    hidden = config.get("hidden_size")
    if isinstance(hidden, int) and hidden > 0:
        yield "embedding_scale", hidden**0.5


def _decoder_layers(config: Config) -> Found:
    """As many as the encoder has, if no number is given; what it makes of its activation's name
    (T5Config)."""
    decoder, name = config.get("num_decoder_layers"), config["feed_forward_proj"]
    yield "layers", config["num_layers"] if decoder is None else decoder
    activation = "gelu_new" if name == "gated-gelu" else name.removeprefix("gated-")
    if config.get("dense_act_fn", activation) != activation:
        raise UnreadableError("dense_act_fn")
    if config.get("is_gated_act", gated := name.startswith("gated-")) != gated:
        raise UnreadableError("is_gated_act")


def _write_decoder_layers(fields: Config) -> dict[str, Any]:
    ours = fields.get("activation")
    words = {"geglu_tanh": "gelu_new", "gelu_tanh": "gelu_new", "swiglu": "silu", "reglu": "relu"}
    return {
        "num_decoder_layers": fields["layers"],
        "dense_act_fn": words.get(str(ours), ours),
        "is_gated_act": ours in words and ours != "gelu_tanh",
    }


def _output_root(config: Config) -> Found:
    """What the output layer reads is divided by the root of its size (modeling_umt5.py)."""
    if (size := config["d_model"]) > 0:
        yield "logit_scale", size**-0.5


def _scaled_if_tied(config: Config) -> Found:
    """The same for T5 of version 1.0 alone, whose output layer has the embeddings' weights."""
    tied = config.get("tie_word_embeddings") is not False
    yield "tied", tied and config.get("scale_decoder_outputs") is not False
    if tied and config.get("scale_decoder_outputs") is not False:
        yield from _output_root(config)


def _like_encoder(config: Config) -> Found:
    """Heads and MLPs of the decoder must have the encoder's sizes (BART)."""
    for name in ("attention_heads", "ffn_dim"):
        if config[f"decoder_{name}"] != config[f"encoder_{name}"]:
            raise UnreadableError(f"decoder_{name}")
    yield from ()


def _write_like_encoder(fields: Config) -> dict[str, Any]:
    return {"decoder_attention_heads": fields["heads"], "decoder_ffn_dim": fields["ffn"]}


def _scaled_embedding(config: Config) -> Found:
    """Embeddings are multiplied by the root of their size, or not (BartScaledWordEmbedding)."""
    if config["scale_embedding"] and (size := config["d_model"]) > 0:
        yield "embedding_scale", size**0.5


def _query_scalar(config: Config) -> Found:
    """Logits are divided by the root of a number that need not be the head's size (Gemma 2)."""
    scalar = config.get("query_pre_attn_scalar")
    if isinstance(scalar, int | float) and scalar > 0:
        yield "attention.scale", scalar**-0.5


def _head_scale(config: Config) -> Found:
    """A factor of the logits that is not that of the head's size (HyperCLOVA X)."""
    scale, size = config.get("attention_multiplier"), config.get("head_dim")
    if scale is None:
        return
    plain = (size or config["hidden_size"] // config["num_attention_heads"]) ** -0.5
    yield "attention.scale", scale if abs(scale - plain) > 1e-9 * plain else None


def _write_head_scale(fields: Config) -> dict[str, Any]:
    return {"attention_multiplier": (fields.get("attention") or {}).get("scale")}


def _groups(config: Config) -> Found:
    """Groups of experts; one group is none."""
    groups, top = config.get("n_group"), config.get("topk_group")
    if isinstance(groups, int) and groups > 1:
        yield "moe.groups", groups
        yield "moe.top_groups", top


def _write_query_scalar(fields: Config) -> dict[str, Any]:
    scale = (fields.get("attention") or {}).get("scale")
    if scale is None:
        return {}
    square = round(scale**-2, 6)  # an integer, unless it cannot be: the class wants one
    return {"query_pre_attn_scalar": int(square) if square.is_integer() else square}


def _write_groups(fields: Config) -> dict[str, Any]:
    moe = fields.get("moe") or {}
    return {"n_group": moe.get("groups", 1), "topk_group": moe.get("top_groups", 1)}


def _groups_of_method(config: Config) -> Found:
    """Groups of experts, where the choice is by them (DeepSeek-V2's topk_method)."""
    method = config.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise UnreadableError("topk_method")
    if method != "greedy":
        yield from _groups(config)


def _write_groups_of_method(fields: Config) -> dict[str, Any]:
    grouped = (fields.get("moe") or {}).get("groups") is not None
    method = "group_limited_greedy" if grouped else "greedy"
    return {**_write_groups(fields), "topk_method": method}


def _neox_rope(config: Config) -> Found:
    """Names of rotary positions in older files of GPT-NeoX."""
    if "rope_parameters" not in config:
        yield "rope.partial", config.get("rotary_pct")
        yield "rope_base", config.get("rotary_emb_base")


def _rotary_dim(config: Config) -> Found:
    """Numbers of a head that are turned (GPT-J)."""
    turned, hidden, heads = (config.get(name) for name in ("rotary_dim", "n_embd", "n_head"))
    if all(isinstance(one, int) and one > 0 for one in (turned, hidden, heads)):
        yield "rope.partial", turned / (hidden // heads)  # type: ignore[operator]


def _write_rotary_dim(fields: Config) -> dict[str, Any]:
    share = (fields.get("rope") or {}).get("partial", 1.0)
    return {"rotary_dim": round(share * (fields["hidden"] // fields["heads"]))}


def _embedding_size(config: Config) -> Found:
    """A projection between embeddings and layers, where their sizes differ (OPT-350m)."""
    size = config.get("word_embed_proj_dim")
    if size is not None and size != config.get("hidden_size", 768):
        yield "embedding_size", size


def _falcon(config: Config) -> Found:
    """Which of its architectures a Falcon has (FalconDecoderLayer, FalconAttention)."""
    newer = bool(config.get("new_decoder_architecture", False))
    if config.get("alibi"):
        yield "positions", "alibi"
    if newer:
        yield "kv_heads", config.get("num_kv_heads")
        one = config.get("num_ln_in_parallel_attn") == 1
        yield "parallel_residual", "one_norm" if one else "two_norms"
        return
    if config.get("multi_query", True):
        yield "kv_heads", 1
    if config.get("parallel_attn", True):
        yield "parallel_residual", "one_norm"


def _multi_query(config: Config) -> Found:
    """One key and one value for all heads (StarCoder)."""
    if config.get("multi_query", True):
        yield "kv_heads", 1


def _write_multi_query(fields: Config) -> dict[str, Any]:
    return {"multi_query": fields.get("kv_heads") == 1}


def _full_first(config: Config) -> Found:
    """Of four layers the first one sees everything (GraniteSWAConfig)."""
    if not config.get("layer_types"):
        yield "pattern", ("full", "window", "window", "window")


def _layer_bases(config: Config) -> Found:
    """A base of rotary angles for each layer, 0 for none (GraniteSWA): here one base for all."""
    if bases := _listed(config, "layer_rope_theta"):
        if len({*filter(None, bases)}) > 1:
            raise UnreadableError("layer_rope_theta")
        without = shortest([not base for base in bases])
        yield "rope.without", without if any(without) else None
        yield "rope_base", max(bases) or None


def _write_layer_bases(fields: Config) -> dict[str, Any]:
    without = (fields.get("rope") or {}).get("without") or (False,)
    layers, base = range(fields.get("layers", 0)), fields.get("rope_base")
    return {"layer_rope_theta": [0 if without[n % len(without)] else base for n in layers]}


def _windowed(config: Config) -> Found:
    """The class makes the mask of a window in any case, and cannot without its size."""
    if config.get("sliding_window") is None:
        raise UnreadableError("sliding_window")
    yield from ()


def _write_rope_by_layer(fields: Config) -> dict[str, Any]:
    """Name both kinds of layers, also where they are alike (MellumConfig)."""
    rope = _write_rope(fields)["rope_parameters"]
    both = rope if "full_attention" in rope else {"full_attention": rope, "sliding_attention": rope}
    return {"rope_parameters": both}


def _minicpm3(config: Config) -> Found:
    """Factors that follow from the depth and from the width of a smaller model (MiniCPM3Config)."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    value, depth, base = map(config.get, ("v_head_dim", "scale_depth", "dim_model_base"))
    yield "mla.value_dim", hidden // heads if value is None else value
    yield "residual_scale", None if depth is None else depth / config["num_hidden_layers"] ** 0.5
    yield "logit_scale", None if base is None else base / hidden
    if config.get("num_key_value_heads") not in (None, heads):
        raise UnreadableError("num_key_value_heads")


def _write_minicpm3(fields: Config) -> dict[str, Any]:
    return {
        "v_head_dim": fields["mla"]["value_dim"],
        "scale_depth": fields.get("residual_scale", 1.0) * fields["layers"] ** 0.5,
        "dim_model_base": round(fields.get("logit_scale", 1.0) * fields["hidden"]),
        "num_key_value_heads": fields["heads"],
    }


def _logits_scaling(config: Config) -> Found:
    """Logits are divided by it (Granite)."""
    scaling = config.get("logits_scaling")
    if isinstance(scaling, int | float) and scaling > 0 and scaling != 1:
        yield "logit_scale", 1 / scaling


def _write_logits_scaling(fields: Config) -> dict[str, Any]:
    return {"logits_scaling": 1 / fields.get("logit_scale", 1.0)}


_LETTERS = {"M": "mamba", "*": "full", "-": "mlp", "E": "moe"}


def _hybrid_pattern(config: Config) -> Found:
    """What each layer is, by a letter (`hybrid_override_pattern`) or a word."""
    letters, kinds = config.get("hybrid_override_pattern"), config.get("layers_block_type")
    mixers: list[str] = []
    if isinstance(letters, str):
        mixers = [_LETTERS.get(letter, letter) for letter in letters]
    elif isinstance(kinds, list):
        words = {**_MIXERS, "linear_attention": "mamba"}
        mixers = [words.get(str(kind), str(kind)) for kind in kinds]
    if mixers:
        yield "pattern", shortest(mixers)
        yield "layers", len(mixers)


def _write_hybrid_pattern(fields: Config) -> dict[str, Any]:
    pattern, layers = fields.get("pattern") or ("full",), fields.get("layers", 0)
    words = {"mamba": "linear_attention", "full": "full_attention"}
    kinds = [words.get(pattern[n % len(pattern)], pattern[n % len(pattern)]) for n in range(layers)]
    return {"layers_block_type": kinds}


def _write_hybrid_experts(fields: Config) -> dict[str, Any]:
    moe = fields.get("moe")
    if moe is None:
        return {}
    return {
        "n_routed_experts": moe["experts"],
        "num_experts_per_tok": moe["top_k"],
        "moe_intermediate_size": moe["ffn"],
        "n_shared_experts": 1,
        "moe_shared_expert_intermediate_size": moe["shared_ffn"],
        "norm_topk_prob": moe["normalize"],
        "routed_scaling_factor": moe["scale"],
        **_write_groups(fields),
    }


def _hybrid_experts(config: Config) -> Found:
    """Experts, if a layer has them: their sizes stand in files of models without, too."""
    letters, kinds = config.get("hybrid_override_pattern"), config.get("layers_block_type")
    if "E" not in str(letters or "") and "moe" not in (kinds or ()):
        return
    yield "moe.experts", config.get("n_routed_experts")
    yield "moe.top_k", config.get("num_experts_per_tok")
    yield "moe.ffn", config.get("moe_intermediate_size")
    shared = config.get("n_shared_experts"), config.get("moe_shared_expert_intermediate_size")
    if all(isinstance(one, int) for one in shared):
        yield "moe.shared_ffn", shared[0] * shared[1]  # type: ignore[operator]
    yield "moe.score", "sigmoid"
    yield "moe.expert_bias", True
    yield "moe.normalize", config.get("norm_topk_prob")
    yield "moe.scale", config.get("routed_scaling_factor")
    yield from _groups(config)


def _lightning(config: Config) -> Found:
    """Lightning attention has the heads of the other layers (MiniMax)."""
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    size = config.get("head_dim")
    if size is None and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        size = hidden // heads
    yield "linear.key_heads", heads
    yield "linear.value_heads", heads
    yield "linear.key_dim", size
    yield "linear.value_dim", size


def _offset_positions(config: Config) -> Found:
    """Positions begin behind that of the padding token (RobertaEmbeddings)."""
    rows, padding = config.get("max_position_embeddings", 512), config.get("pad_token_id", 1)
    if isinstance(rows, int) and isinstance(padding, int):
        yield "max_seq", rows - padding - 1
        yield "position_offset", padding + 1


def _write_labels(fields: Config) -> dict[str, Any]:
    return {"num_labels": fields.get("vocab")}


def _write_offset_positions(fields: Config) -> dict[str, Any]:
    return {"max_position_embeddings": fields["max_seq"] + fields["position_offset"]}


def _labels(config: Config) -> Found:
    """Classes of a model that reads images: two, unless labels are named (PretrainedConfig)."""
    labels = config.get("id2label")
    named = len(labels) if isinstance(labels, dict) else 2
    yield "vocab", config.get("num_labels", named)


def _no_rope(config: Config) -> Found:
    """Layers without positions: a list with 0 for them, or every so many (SmolLM3, Llama 4)."""
    turned, every = _listed(config, "no_rope_layers"), _counted(config, "no_rope_layer_interval")
    if turned:
        without = shortest([not one for one in turned])
        yield "rope.without", without if any(without) else None
    elif every > 1:
        yield "rope.without", (*[False] * (every - 1), True)


def _write_no_rope(fields: Config) -> dict[str, Any]:
    without = (fields.get("rope") or {}).get("without")
    layers = range(fields.get("layers", 0))
    return {"no_rope_layers": [int(not (without and without[n % len(without)])) for n in layers]}


def _no_rope_full(config: Config) -> Found:
    """Of windowed models, layers that see everything have no positions (Exaone4Attention)."""
    if not config.get("sliding_window"):
        return
    if kinds := _listed(config, "layer_types"):
        yield "rope.without", shortest([kind == "full_attention" for kind in kinds])
    elif (every := _counted(config, "sliding_window_pattern")) > 1:
        yield "rope.without", (*[False] * (every - 1), True)


def _rope_by_kind(config: Config) -> Found:
    """Rotary positions of each kind of layer, of which one may have none (Cohere Compass)."""
    kinds = _listed(config, "layer_types") or ["full_attention"]
    tables = config.get("rope_parameters") or {}
    turned = [tables[kind] for kind in sorted({*kinds}) if tables[kind]]
    if any(one != turned[0] or "partial_rotary_factor" in one for one in turned):
        raise UnreadableError("rope_parameters")
    if turned:
        yield from _rope({"rope_parameters": turned[0]})
    without = shortest([not tables[kind] for kind in kinds])
    yield "rope.without", without if any(without) else None
    yield "pattern", shortest([_MIXERS.get(str(kind), str(kind)) for kind in kinds])
    yield "attention.window", config.get("sliding_window") if "sliding_attention" in kinds else None


def _write_rope_by_kind(fields: Config) -> dict[str, Any]:
    kinds = _write_pattern({"pattern": ("full",), **fields})["layer_types"]
    without = (fields.get("rope") or {}).get("without") or (False,)
    table = _write_rope(fields)["rope_parameters"]
    tables = {kind: None if without[n % len(without)] else table for n, kind in enumerate(kinds)}
    window = (fields.get("attention") or {}).get("window")
    return {"layer_types": kinds, "rope_parameters": tables} | (
        {} if window is None else {"sliding_window": window}
    )


def _flint(config: Config) -> Found:
    """First layers without experts, and which layers see everything, without positions: the first
    two, every fourth, and the last (FlintConfig)."""
    dense, layers = config.get("mlp_only_layers"), _counted(config, "num_hidden_layers")
    if dense is None or [*dense] != [*range(len(dense))]:
        raise UnreadableError("mlp_only_layers")
    yield "moe.dense_layers", len(dense)
    full = [n < 2 or n % 4 == 1 or n == layers - 1 for n in range(layers)]
    if kinds := _listed(config, "layer_types"):
        full = [kind == "full_attention" for kind in kinds]
    yield "pattern", shortest(["full" if one else "window" for one in full])
    yield "rope.without", shortest(full)


def _write_flint(fields: Config) -> dict[str, Any]:
    dense = (fields.get("moe") or {}).get("dense_layers", 0)
    return {"mlp_only_layers": [*range(dense)], **_write_pattern(fields)}


def _mlp_types(config: Config) -> Found:
    """A word for each layer: those with experts are behind those without."""
    kinds = _listed(config, "mlp_layer_types")
    dense = kinds.count("dense")
    if kinds != ["dense"] * dense + ["sparse"] * (len(kinds) - dense):
        raise UnreadableError("mlp_layer_types")
    if kinds:
        yield "moe.dense_layers", dense


def _write_mlp_types(fields: Config) -> dict[str, Any]:
    dense, layers = (fields.get("moe") or {}).get("dense_layers", 0), fields.get("layers", 0)
    return {"mlp_layer_types": ["dense"] * dense + ["sparse"] * (layers - dense)}


def _mamba_types(config: Config) -> Found:
    """State spaces and attention: a word for each layer, or the numbers of the latter (Bamba)."""
    kinds = _listed(config, "layer_types") or _listed(config, "layers_block_type")
    attention, layers = _listed(config, "attn_layer_indices"), _counted(config, "num_hidden_layers")
    if not kinds and attention:
        kinds = ["attention" if n in attention else "mamba" for n in range(layers)]
    words = {**_MIXERS, "linear_attention": "mamba"}
    if kinds:
        yield "pattern", shortest([words.get(str(kind), str(kind)) for kind in kinds])


def _write_layer_words(fields: Config) -> dict[str, Any]:
    pattern, layers = fields.get("pattern") or ("mamba",), fields.get("layers", 0)
    words = {"mamba": "linear_attention", "full": "full_attention"}
    kinds = [pattern[n % len(pattern)] for n in range(layers)]
    return {"layer_types": [words.get(kind, kind) for kind in kinds]}


def _write_layer_numbers(fields: Config) -> dict[str, Any]:
    pattern, layers = fields.get("pattern") or ("mamba",), fields.get("layers", 0)
    return {"attn_layer_indices": [n for n in range(layers) if pattern[n % len(pattern)] == "full"]}


def _time_step_limit(config: Config) -> Found:
    """Steps of state-space layers are of any length: no other limit is trained."""
    limit = config.get("time_step_limit")
    endless = (math.inf, "Infinity", {"__float__": "Infinity"})  # as files of all ages write it
    if limit is not None and limit not in [[0.0, one] for one in endless]:
        raise UnreadableError("time_step_limit")
    yield from ()


def _mamba_heads(config: Config) -> Found:
    """Heads are of a multiple of the hidden size (BambaMixer)."""
    heads = _counted(config, "mamba_n_heads")
    if heads:
        yield "mamba.head_dim", config["mamba_expand"] * config["hidden_size"] // heads


def _write_mamba_heads(fields: Config) -> dict[str, Any]:
    mamba = fields.get("mamba") or {}
    inner = mamba.get("heads", 0) * mamba.get("head_dim", 0)
    return {"mamba_d_head": mamba.get("head_dim"), "mamba_expand": inner // fields["hidden"]}


def _experts_or_mlp(config: Config) -> Found:
    """Experts beside an MLP, which is there without experts, too (Granite 4)."""
    if not (experts := config.get("num_local_experts")):
        return
    yield "moe.experts", experts
    yield "moe.top_k", config.get("num_experts_per_tok")
    yield "moe.ffn", config.get("intermediate_size")
    yield "moe.shared_ffn", config.get("shared_intermediate_size")
    yield "moe.balance_loss", config.get("router_aux_loss_coef")


def _write_experts_or_mlp(fields: Config) -> dict[str, Any]:
    moe = fields.get("moe")
    if moe is None:
        return {"num_local_experts": 0}
    return {
        "num_local_experts": moe["experts"],
        "num_experts_per_tok": moe["top_k"],
        "intermediate_size": moe["ffn"],
        "shared_intermediate_size": moe["shared_ffn"],
    }


def _last_experts(config: Config) -> Found:
    """The last layer that may have experts must be the last one (ERNIE 4.5)."""
    if config.get("moe_layer_end_index") not in (-1, config.get("num_hidden_layers", 0) - 1):
        raise UnreadableError("moe_layer_end_index")
    yield from ()


def _write_last_experts(fields: Config) -> dict[str, Any]:
    return {"moe_layer_end_index": fields.get("layers", 0) - 1}


def _turned(config: Config) -> Found:
    """Numbers of a head that are turned, where its share is not said (MiniMax-M2)."""
    said = {**config, **(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    turned, size = config.get("rotary_dim"), config.get("head_dim")
    if turned is not None and size is not None and "partial_rotary_factor" not in said:
        yield "rope.partial", turned / size


def _stretched_rope(config: Config) -> Found:
    """Rotary positions, of which a constant `alpha` makes the base larger (Hunyuan)."""
    said = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind, alpha = said.get("rope_type", said.get("type")), said.get("alpha")
    if kind == "dynamic" and alpha:
        size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        base = said.get("rope_theta") or config.get("rope_theta") or 10000.0
        base *= alpha ** (size / (size - 2))
        config = {**config, "rope_scaling": None, "rope_parameters": {"rope_theta": base}}
    yield from _rope(config)


def _moe_topk(config: Config) -> Found:
    """Experts of each token, a number or one for each layer (Hunyuan)."""
    chosen = config.get("num_experts_per_tok", config.get("moe_topk"))
    if isinstance(chosen, list):
        if len(set(chosen)) != 1:
            raise UnreadableError("moe_topk")
        chosen = chosen[0]
    yield "moe.top_k", chosen


def _write_moe_topk(fields: Config) -> dict[str, Any]:
    return {"moe_topk": (fields.get("moe") or {}).get("top_k")}


# He et al. 2016 (arXiv 1512.03385), table 1: blocks of the four stages -> layers.
_BLOCKS = {
    ("basic", (2, 2, 2, 2)): 18,
    ("basic", (3, 4, 6, 3)): 34,
    ("bottleneck", (3, 4, 6, 3)): 50,
    ("bottleneck", (3, 4, 23, 3)): 101,
    ("bottleneck", (3, 8, 36, 3)): 152,
}


def _resnet(config: Config) -> Found:
    """The number of layers; other widths or blocks are no ResNet of the paper."""
    kind = config.get("layer_type", "bottleneck")
    wide = 4 if kind == "bottleneck" else 1
    if config.get("hidden_sizes", widths := [64 * 2**stage * wide for stage in range(4)]) != widths:
        raise UnreadableError("hidden_sizes")
    layers = _BLOCKS.get((kind, tuple(config.get("depths", (3, 4, 6, 3)))))
    if layers is None:
        raise UnreadableError("depths")
    yield "layers", layers


def _write_resnet(fields: Config) -> dict[str, Any]:
    """As torchvision does ("v1.5": a bottleneck strides in its 3x3 layer)."""
    layers = {count: key for key, count in _BLOCKS.items()}
    kind, depths = layers[fields["layers"]]
    wide = 4 if kind == "bottleneck" else 1
    return {
        "num_channels": 3,
        "embedding_size": 64,
        "hidden_sizes": [64 * 2**stage * wide for stage in range(4)],
        "depths": list(depths),
        "layer_type": kind,
        "downsample_in_bottleneck": False,
        "downsample_in_first_stage": False,
    }


_ROPE_NAMES = (
    *("rope_scaling", "rope_parameters", "rope_theta", "rope_local_base_freq"),
    *("partial_rotary_factor", "original_max_position_embeddings", "rope_interleave"),
)
READERS: Mapping[str, Reader] = {
    "rope": Reader(_ROPE_NAMES, _rope, _write_rope),
    "rope_by_layer": Reader(_ROPE_NAMES, _rope, _write_rope_by_layer),
    "pattern": Reader(("layer_types",), _pattern, _write_pattern),
    "window": Reader(
        ("sliding_window", "use_sliding_window", "max_window_layers"), _window, _write_window
    ),
    "every": Reader(("sliding_window_pattern", "_sliding_window_pattern"), _every),
    "interval": Reader(("full_attention_interval",), _interval),
    "biases": Reader(("attention_bias", "mlp_bias"), _biases, _write_biases),
    "embedding_root": Reader(("hidden_size",), _embedding_root),
    "decoder_layers": Reader(
        ("num_decoder_layers", "dense_act_fn", "is_gated_act"),
        _decoder_layers,
        _write_decoder_layers,
    ),
    "like_encoder": Reader(
        ("decoder_attention_heads", "decoder_ffn_dim"), _like_encoder, _write_like_encoder
    ),
    "scaled_embedding": Reader(
        ("scale_embedding",),
        _scaled_embedding,
        lambda fields: {"scale_embedding": fields.get("embedding_scale", 1.0) != 1.0},
    ),
    "output_root": Reader(("d_model",), _output_root),
    "scaled_if_tied": Reader(
        ("tie_word_embeddings", "scale_decoder_outputs"),
        _scaled_if_tied,
        lambda fields: {"tie_word_embeddings": bool(fields.get("tied"))},
    ),
    "query_scalar": Reader(("query_pre_attn_scalar",), _query_scalar, _write_query_scalar),
    "head_scale": Reader(("attention_multiplier",), _head_scale, _write_head_scale),
    "groups": Reader(("n_group", "topk_group"), _groups, _write_groups),
    "groups_of_method": Reader(
        ("topk_method", "n_group", "topk_group"), _groups_of_method, _write_groups_of_method
    ),
    "neox_rope": Reader(("rotary_pct", "rotary_emb_base"), _neox_rope),
    "rotary_dim": Reader(("rotary_dim",), _rotary_dim, _write_rotary_dim),
    "embedding_size": Reader(("word_embed_proj_dim",), _embedding_size),
    "falcon": Reader(
        (
            *("num_kv_heads", "multi_query", "parallel_attn", "new_decoder_architecture"),
            *("num_ln_in_parallel_attn", "alibi"),
        ),
        _falcon,
    ),
    "multi_query": Reader(("multi_query",), _multi_query, _write_multi_query),
    "full_first": Reader(("layer_types",), _full_first),
    "layer_bases": Reader(("layer_rope_theta",), _layer_bases, _write_layer_bases),
    "windowed": Reader(("sliding_window",), _windowed),
    "minicpm3": Reader(
        ("scale_depth", "dim_model_base", "v_head_dim", "num_key_value_heads"),
        _minicpm3,
        _write_minicpm3,
    ),
    "logits_scaling": Reader(("logits_scaling",), _logits_scaling, _write_logits_scaling),
    "hybrid_pattern": Reader(
        ("layers_block_type", "hybrid_override_pattern"), _hybrid_pattern, _write_hybrid_pattern
    ),
    "hybrid_experts": Reader(
        (
            *("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"),
            *("n_shared_experts", "moe_shared_expert_intermediate_size", "norm_topk_prob"),
            *("routed_scaling_factor", "n_group", "topk_group", "num_nextn_predict_layers"),
        ),
        _hybrid_experts,
        _write_hybrid_experts,
    ),
    "lightning": Reader(("head_dim",), _lightning),
    "offset_positions": Reader(
        ("max_position_embeddings", "pad_token_id"), _offset_positions, _write_offset_positions
    ),
    "labels": Reader(("id2label", "num_labels"), _labels, _write_labels),
    "no_rope": Reader(("no_rope_layers", "no_rope_layer_interval"), _no_rope, _write_no_rope),
    "no_rope_full": Reader(("sliding_window_pattern",), _no_rope_full),
    "rope_by_kind": Reader(
        ("rope_parameters", "layer_types", "sliding_window"), _rope_by_kind, _write_rope_by_kind
    ),
    "flint": Reader(("mlp_only_layers", "layer_types"), _flint, _write_flint),
    "mlp_types": Reader(("mlp_layer_types",), _mlp_types, _write_mlp_types),
    "last_experts": Reader(("moe_layer_end_index",), _last_experts, _write_last_experts),
    "mamba_types": Reader(("layer_types", "layers_block_type"), _mamba_types, _write_layer_words),
    "mamba_numbers": Reader(("attn_layer_indices",), _mamba_types, _write_layer_numbers),
    "mamba_heads": Reader(("mamba_expand", "mamba_d_head"), _mamba_heads, _write_mamba_heads),
    "time_step_limit": Reader(("time_step_limit",), _time_step_limit),
    "experts_or_mlp": Reader(
        (
            *("num_local_experts", "num_experts_per_tok", "intermediate_size"),
            *("shared_intermediate_size", "router_aux_loss_coef"),
        ),
        _experts_or_mlp,
        _write_experts_or_mlp,
    ),
    "turned": Reader(("rotary_dim",), _turned),
    "stretched_rope": Reader(
        ("rope_scaling", "rope_parameters", "rope_theta"), _stretched_rope, _write_rope
    ),
    "moe_topk": Reader(("moe_topk", "num_experts_per_tok"), _moe_topk, _write_moe_topk),
    "resnet": Reader(("depths", "hidden_sizes", "layer_type"), _resnet, _write_resnet),
}
