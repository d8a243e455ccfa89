"""The model of a published row: a registry entry, the row's columns, and rules for blank ones.

Belongs here: how columns overrule an entry, and the documented rules for what a source leaves
blank. Does not belong here: the registry (`model_registry`), parameter and FLOP counts
(`hpctrain.plan`).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from bench.model_registry import (
    Entry,
    Family,
    Hybrid,
    Mla,
    Moe,
    Norm,
    Registry,
    Window,
    load_registry,
)
from bench.published import NoteFacts, PublishedRow, facts_of


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Everything about a model that memory and time depend on; counts, not bytes.

    `layers` are all layers of the trunk (of a T5: of the encoder); with `hybrid` each has one
    mixer. `ffn` is of the dense MLP. `filled` names the fields that neither the row nor a registry
    entry gives and a rule of this module supplied. `uncertain` says why an entry is doubtful.
    """

    name: str
    entry: str | None
    family: Family
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    seq: int
    gated: bool
    norm: Norm
    norms_per_layer: int = 2
    tied: bool
    causal: bool
    bias: bool
    positions: str
    decoder_layers: int = 0
    image: int = 0
    patch: int = 0
    mtp_layers: int = 0
    mtp_shared: bool = False
    moe: Moe | None = None
    mla: Mla | None = None
    window: Window | None = None
    hybrid: Hybrid | None = None
    filled: tuple[str, ...] = ()
    uncertain: str = ""
    source: str = ""


class UnknownModel(LookupError):
    """A row whose columns and name do not determine a shape."""


# GPT-3 (arXiv 2005.14165) table 2.1: parameters in 10^9, layers, hidden, heads.
GPT3_TABLE = (
    (0.125, 12, 768, 12),
    (0.35, 24, 1024, 16),
    (0.76, 24, 1536, 16),
    (1.3, 24, 2048, 24),
    (2.7, 32, 2560, 32),
    (6.7, 32, 4096, 32),
    (13.0, 40, 5140, 40),
    (175.0, 96, 12288, 96),
)
NEAR = 0.2  # how far (as a ratio) a size may be from the table's
GPT2_VOCAB = 51200  # 50257 padded to 128 x tp, as Megatron does; what the open rows print
# Where the size that a source prints cannot have GPT-2's: Llama's and T5's SentencePiece, 50257
# padded to 128 (GPT-NeoX), ChatGLM3's, cl100k padded to 256, Llama 3's, Qwen's, BLOOM's.
VOCABULARIES = (GPT2_VOCAB, 32000, 50304, 65024, 100352, 128256, 152064, 250880)
SEQ = 2048


def model_of(row: PublishedRow, registry: Registry | None = None) -> ModelShape:
    """The model of a row: its columns, then the registry entry of its name, then rules.

    Raises UnknownModel where all three leave the size open.
    """
    known = load_registry() if registry is None else registry
    facts = facts_of(row)
    key = known.find(row.model)
    entry = known[key] if key else _by_size(row, known)
    shape = _from_entry(row, key, entry) if entry else _from_columns(row)
    return _noted(shape, facts)


def _from_entry(row: PublishedRow, key: str | None, entry: Entry) -> ModelShape:
    """An entry, overruled by what the row prints.

    `ffn_hidden` of a model whose layers are all MoE is the size of an expert (so the open tables
    print it); a value equal to the expert's size never becomes the dense one.
    """
    heads = row.heads or entry.heads
    filled = [] if key else [f"{name} from the size" for name in ("layers", "hidden", "heads")]
    moe, ffn = entry.moe, row.ffn_hidden or entry.ffn
    if moe and row.ffn_hidden and row.ffn_hidden not in (entry.ffn, moe.ffn):
        every_layer = not moe.dense_layers and moe.every == 1
        moe = moe.model_copy(update={"ffn": row.ffn_hidden}) if every_layer else moe
    if moe and row.ffn_hidden == moe.ffn:
        ffn = entry.ffn
    same_width = (row.hidden or entry.hidden, heads) == (entry.hidden, entry.heads)
    head_dim = entry.mla.value_dim if entry.mla else entry.head_dim if same_width else None
    layers = row.num_layers or entry.layers
    hybrid = entry.hybrid.scaled(layers / entry.layers) if entry.hybrid else None
    values = {name: getattr(entry, name) for name in COPIED}
    return ModelShape(
        name=row.model,
        entry=key,
        layers=layers,
        hidden=row.hidden or entry.hidden,
        ffn=ffn,
        heads=heads,
        kv_heads=row.kv_heads or _kv_heads(row, entry, heads),
        head_dim=head_dim or (row.hidden or entry.hidden) // heads,
        vocab=row.vocab or entry.vocab,
        seq=row.seq_len or entry.seq or SEQ,
        moe=_fewer_dense(moe, layers),
        hybrid=hybrid,
        filled=tuple(filled) + (() if row.seq_len or entry.seq else ("seq",)),
        **values,
    )


COPIED = (
    *("family", "gated", "norm", "norms_per_layer", "tied", "causal", "bias", "positions"),
    *("decoder_layers", "image", "patch", "mtp_layers", "mtp_shared"),
    *("mla", "window", "uncertain", "source"),
)


def _kv_heads(row: PublishedRow, entry: Entry, heads: int) -> int:
    grouped = entry.kv_heads or entry.heads
    return heads if grouped == entry.heads else grouped


def _fewer_dense(moe: Moe | None, layers: int) -> Moe | None:
    """A proxy with few layers keeps at least one of each kind."""
    if moe is None or moe.dense_layers < layers:
        return moe
    return moe.model_copy(update={"dense_layers": max(0, layers - 1)})


def _by_size(row: PublishedRow, registry: Registry) -> Entry | None:
    """`GPT 13B` without columns: a GPT-3 of the registry or of its table with nearly that size."""
    if row.hidden or not re.search(r"gpt", row.model, re.IGNORECASE):
        return None
    size = row.params_b or _size_in(row.model)
    if size is None:
        return None
    named = registry.find(f"gpt3-{size:g}b")
    if named:
        return registry[named]
    near = min(GPT3_TABLE, key=lambda line: abs(math.log(line[0] / size)))
    if abs(math.log(near[0] / size)) > NEAR:
        return None
    return Entry(
        match=(),
        source="GPT-3, arXiv 2005.14165 table 2.1, chosen by the parameter count",
        layers=near[1],
        hidden=near[2],
        ffn=4 * near[2],
        heads=near[3],
        vocab=GPT2_VOCAB,
        seq=SEQ,
        **GPT,
    )


GPT: dict[str, object] = {
    "family": "gpt",
    "gated": False,
    "norm": "layernorm",
    "tied": True,
    "bias": True,
    "positions": "learned",
}


def _size_in(name: str) -> float | None:
    """Parameters in 10^9 of a name such as `GPT 18.4B`, `MPT-760m` or `1T`."""
    found = re.search(r"(\d+(?:\.\d+)?)\s*([mbt])(?![a-z])", name.lower())
    scale = {"m": 1e-3, "b": 1.0, "t": 1e3}
    return float(found.group(1)) * scale[found.group(2)] if found else None


def _from_columns(row: PublishedRow) -> ModelShape:
    """A model without an entry, from its columns alone.

    Blank `num_layers`: from the parameters, (P - V h) / (params of a layer). Blank `ffn_hidden`:
    4 h (gated: 8/3 h to a multiple of 256). Blank heads: h / 128. Blank vocabulary: 51200, or
    what the printed size needs (`_vocabulary`). Llama-like (gated, RMSNorm, untied, no biases)
    where the name says so, or where kv_heads differs from heads or ffn is not 4 h; else GPT-like,
    tied unless an untied head comes nearer to the size.
    """
    if not row.hidden:
        raise UnknownModel(f"line {row.line}: no registry entry for `{row.model}` and no columns")
    filled = [name for name, column in BLANKS.items() if getattr(row, column) is None]
    gated = _is_gated(row)
    heads = row.heads or max(1, row.hidden // 128)
    ffn = row.ffn_hidden or (_gated_ffn(row.hidden) if gated else 4 * row.hidden)
    kv_heads = row.kv_heads or heads
    width = 2 * row.hidden * row.hidden * (1 + kv_heads / heads) + (2 + gated) * row.hidden * ffn
    vocab = row.vocab or _vocabulary(row, width, gated)
    layers = row.num_layers or _layers_of(row, vocab, width)
    style = {"family": "llama", "gated": True, "norm": "rmsnorm", "tied": False, "bias": False}
    style = style | {"positions": "rope"} if gated else GPT
    style = style | {"tied": _is_tied(row, layers * width, vocab, bool(style["tied"]))}
    return ModelShape(
        name=row.model,
        entry=None,
        layers=layers,
        hidden=row.hidden,
        ffn=ffn,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=row.hidden // heads,
        vocab=vocab,
        seq=row.seq_len or SEQ,
        causal=True,
        filled=(*filled, "gated", "norm", "tied"),
        **style,  # type: ignore[arg-type]
    )


def _vocabulary(row: PublishedRow, width: float, gated: bool) -> int:
    """The vocabulary with which layers and embedding round to the size that the source prints.

    GPT-2's, which is the usual one, wherever it does or no other does. Biases and norms have 13 h
    parameters a layer, learned positions a row for each token (arXiv 2005.14165, Megatron-LM).
    """
    size, hidden = row.params_b, row.hidden or 0
    if not size or not row.num_layers:
        return GPT2_VOCAB
    digits = len(f"{size:g}".partition(".")[2])
    small = 0 if gated else 13 * hidden * row.num_layers + hidden * (row.seq_len or SEQ)
    body = row.num_layers * width + small
    tables = 2 if gated else 1
    fits = (v for v in VOCABULARIES if round((body + tables * v * hidden) / 1e9, digits) == size)
    return next(fits, GPT2_VOCAB)


def _is_tied(row: PublishedRow, body: float, vocab: int, usual: bool) -> bool:
    """Untied where a second embedding comes nearer to the printed size (within 3%); else usual."""
    if not (row.params_b and row.vocab and row.num_layers):
        return usual
    one, two = (
        abs((body + n * vocab * (row.hidden or 0)) / row.params_b / 1e9 - 1) for n in (1, 2)
    )
    return usual and not (two < one and two < 0.03)


# Columns that a rule of `_from_columns` fills, by the field of the shape.
BLANKS = {
    "layers": "num_layers",
    "ffn": "ffn_hidden",
    "heads": "heads",
    "kv_heads": "kv_heads",
    "vocab": "vocab",
    "seq": "seq_len",
}


def _layers_of(row: PublishedRow, vocab: int, width: float) -> int:
    size = row.params_b or _size_in(row.model)
    if size is None:
        raise UnknownModel(f"line {row.line}: neither layers nor parameters of `{row.model}`")
    return max(1, round((size * 1e9 - vocab * (row.hidden or 0)) / width))


def _is_gated(row: PublishedRow) -> bool:
    name = row.model.lower()
    if re.search(r"llama|mistral|mixtral|qwen|yi-|baichuan|internlm|deepseek|gemma|olmo", name):
        return True
    if re.search(r"gpt|opt|bloom|mpt|bert|nemotron|falcon", name) or not row.hidden:
        return False
    grouped = bool(row.kv_heads and row.heads and row.kv_heads != row.heads)
    return grouped or bool(row.ffn_hidden and row.ffn_hidden != 4 * row.hidden)


def _gated_ffn(hidden: int) -> int:
    """Llama (arXiv 2302.13971) section 2.2: 2/3 of 4 h, to a multiple of 256 as its code does."""
    return 256 * math.ceil(8 * hidden / 3 / 256)


def _noted(shape: ModelShape, facts: NoteFacts) -> ModelShape:
    """What the notes say against the entry: experts of a proxy, a second embedding.

    A model without an entry has experts where the notes give their number and how many a token
    meets; their size is the notes', else that of `ffn_hidden`.
    """
    if shape.moe is None and shape.entry is None and facts.experts and facts.top_k:
        moe = Moe(experts=facts.experts, top_k=facts.top_k, ffn=shape.ffn)
        shape = replace(shape, moe=moe)
    if facts.untied:
        shape = replace(shape, tied=False)
    given = {
        "experts": facts.experts,
        "top_k": facts.top_k,
        "ffn": facts.expert_ffn,
        "dense_layers": facts.dense_layers,
    }
    update = {name: value for name, value in given.items() if value is not None}
    if shape.moe and update:
        shape = replace(shape, moe=shape.moe.model_copy(update=update))
    return shape
