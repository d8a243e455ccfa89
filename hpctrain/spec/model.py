"""The model of a run spec: the sizes and parts of a transformer, or the shape of a ResNet.

This one record is read by planner, trainers and converter. Belongs here: sizes, choices, and checks
that need only these. Does not belong here: parts with fields of their own (`architecture`), what a
published family chooses (`families`), parameter counts (`hpctrain.plan.model.parameters`),
requirements of a layout on the shape, such as heads per tp rank (`hpctrain.plan.mesh.rules`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, Literal, NamedTuple, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from hpctrain.spec.architecture import (
    MOST_HEADS,
    MOST_LAYERS,
    MOST_TOKENS,
    MOST_WIDTH,
    AttentionSpec,
    CountedSpec,
    LinearSpec,
    MambaSpec,
    Mixer,
    MlaSpec,
    MoeSpec,
    RelativeSpec,
    RopeSpec,
)
from hpctrain.spec.document import Contradiction, Document
from hpctrain.spec.families import OTHER, family_named, family_names
from hpctrain.spec.fields import did_you_mean
from hpctrain.spec.job_text import SubmitText

# He et al. 2016 (arXiv 1512.03385), table 1: layers -> features of the last stage. Networks of
# 50 layers and more are made of bottlenecks, whose output is four times as wide.
RESNET_FEATURES = {18: 512, 34: 512, 50: 2048, 101: 2048, 152: 2048}
RESNET_STRIDE = 32  # pixels of the image for one position of the last feature map

MOST_PIXELS = 65_536

# Of an MLP; those in GATED have a third matrix, whose product is activated and multiplied.
Activation = Literal[
    "gelu", "gelu_tanh", "relu", "squared_relu", "silu", "xielu",
    "swiglu", "geglu", "geglu_tanh", "reglu", "swiglu_clamped",
]  # fmt: skip
GATED = ("swiglu", "geglu", "geglu_tanh", "reglu", "swiglu_clamped")
# With weight and bias, with a weight, or with neither.
Norm = Literal["layernorm", "layernorm_no_bias", "layernorm_no_weights", "rmsnorm"]


def _required(schema: dict[str, Any]) -> None:
    """Relax the schema for editors: a ResNet needs no `hidden`, `heads`, `seq`, a ViT no `seq`."""
    schema["required"] = [name for name in schema["required"] if name in ("layers", "vocab")]
    schema["allOf"] = [
        {"if": _family("resnet"), "else": {"required": ["hidden", "heads"]}},
        {"if": _family("vit", "resnet"), "else": {"required": ["seq"]}},
    ]


def _family(*names: str) -> dict[str, Any]:
    return {"properties": {"family": {"enum": list(names)}}, "required": ["family"]}


class LayerKind(NamedTuple):
    """What one layer is: what mixes tokens, and whether it has a dense MLP, or experts."""

    mixer: Mixer
    mlp: bool
    experts: bool


class ModelSpec(Document):
    """Shape of a transformer (GPT, Llama, BERT, DistilBERT, ViT) or a ResNet."""

    model_config = ConfigDict(json_schema_extra=_required)

    pretrained: SubmitText | None = Field(
        None,
        description="Local Hugging Face directory (config.json, weights) to start from; `$NAME` is "
        "put in where you submit",
    )
    config: dict[str, Any] | None = Field(
        None,
        description="The config.json of a published model, by its path (or that of its directory), "
        "or what stands in it: it gives every field that is not given here",
    )
    counted: CountedSpec | None = Field(
        None,
        description="A count of what `config` describes, where no family has its parts: the class "
        "of transformers is trained; absent: the parts are read from `config`",
    )
    family: str = Field(
        "gpt",
        description="What people call it: a preset of the choices below, see `hpctrain models`",
    )
    layers: int = Field(
        ge=1,
        le=MOST_LAYERS,
        description="Number of transformer layers; resnet: 18, 34, 50, 101 or 152",
    )
    encoder_layers: int = Field(
        0,
        ge=0,
        le=MOST_LAYERS,
        description="Layers of an encoder beside them, alike in all other sizes: each of `layers` "
        "attends to what it returns as well (T5, BART); `seq` is its length",
    )
    hidden: int = Field(
        ge=8, le=MOST_WIDTH, description="Hidden size; resnet: follows from `layers`"
    )
    ffn: int | None = Field(
        None,
        ge=8,
        le=MOST_WIDTH,
        description="MLP size; with gelu 4 x hidden, with swiglu required",
    )
    heads: int = Field(ge=1, le=MOST_HEADS, description="Attention heads; resnet: none")
    kv_heads: int | None = Field(
        None, ge=1, le=MOST_HEADS, description="Key/value heads (GQA); default: heads"
    )
    head_dim: int | None = Field(None, ge=1, le=MOST_WIDTH, description="Default: hidden / heads")
    vocab: int = Field(
        ge=2,
        le=MOST_TOKENS,
        description="Vocabulary size of the tokenizer, before padding; vit, resnet: classes",
    )
    classes: int | None = Field(
        None, ge=2, description="Classes of whole texts, for `task: classification`"
    )
    seq: int = Field(
        ge=2,
        le=MOST_TOKENS,
        description="Sequence length in tokens; vit, resnet: follows from `image`",
    )
    max_seq: int | None = Field(
        None,
        ge=2,
        le=MOST_TOKENS,
        description="Positions that the model is made for (max_position_embeddings), learned ones "
        "included; default: `seq`",
    )
    activation: Activation | None = Field(
        None, description="llama: swiglu, others: gelu; OpenAI's GPT-2 has gelu_tanh"
    )
    norm: Norm | None = Field(None, description="llama: rmsnorm, others: layernorm")
    norm_epsilon: float = Field(
        1e-5, gt=0, description="Added to the variance in norms; bert, distilbert, vit: 1e-12"
    )
    norm_place: Literal["before", "after", "both"] = Field(
        "before",
        description="Norms before attention and MLP (GPT-2, Llama), behind them (BERT, OLMo 2), or "
        "both (Gemma 2)",
    )
    norm_zero_centered: bool = Field(
        False, description="A norm multiplies by 1 + its weight (Gemma, Nemotron)"
    )
    final_norm: bool = Field(True, description="A norm behind the last layer")
    parallel_residual: Literal["one_norm", "two_norms"] | None = Field(
        None, description="Attention and MLP have the same input (GPT-J, Falcon; GPT-NeoX)"
    )
    positions: Literal["learned", "rope", "alibi", "relative", "none"] | None = Field(
        None, description="llama: rope, others: learned"
    )
    position_offset: int = Field(
        0,
        ge=0,
        le=MOST_TOKENS,
        description="First rows of learned positions that no token has (OPT: 2)",
    )
    rope_base: float = Field(10000, ge=1, description="Base of the rotary angles (theta)")
    rope: RopeSpec | None = Field(None, description="More about rotary positions; absent: plain")
    relative: RelativeSpec | None = Field(
        None, description="More about relative positions; absent: as T5 has them"
    )
    tied: bool | None = Field(
        None, description="Share input and output embeddings; llama, vit: false, others: true"
    )
    bias: bool | Literal["qkv", "attention", "mlp"] | None = Field(
        None,
        description="Bias in all linear layers of a block, in none, in those of queries, keys and "
        "values (Qwen2), of attention, or of the MLP (GPT-J); llama: false, others: true",
    )
    output_bias: bool = Field(False, description="Bias of the output layer (Phi)")
    embedding_norm: bool = Field(False, description="A norm behind the embedding (BLOOM, BERT)")
    embedding_size: int | None = Field(
        None, ge=8, le=MOST_WIDTH, description="Size of embeddings if not `hidden` (OPT-350m)"
    )
    embedding_scale: float = Field(
        1.0, gt=0, description="Factor of embeddings (Gemma: sqrt(hidden); Granite)"
    )
    residual_scale: float = Field(
        1.0, gt=0, description="Factor of what a block adds (Granite: residual_multiplier)"
    )
    logit_scale: float = Field(1.0, gt=0, description="Factor of logits (Granite, Cohere)")
    logit_soft_cap: float | None = Field(
        None, gt=0, description="Logits x become cap tanh(x / cap) (Gemma 2)"
    )
    bidirectional: bool = Field(
        False, description="Every token sees all others: an encoder (BERT, ViT)"
    )
    segments: int = Field(0, ge=0, le=MOST_WIDTH, description="Embeddings of segments; bert: 2")
    dropout: float = Field(0.0, ge=0, lt=1, description="Hidden and attention dropout")
    init_std: float | None = Field(
        None, gt=0, description="Standard deviation of the first weights; default: 0.02"
    )
    vocab_multiple: int | None = Field(
        None,
        ge=1,
        description="megatron-core: rows of embeddings are padded to a multiple of this times tp; "
        "default: 128",
    )
    pattern: tuple[Mixer, ...] = Field(
        (),
        description="What mixes the tokens of each layer, repeated over the layers, such as "
        "`[window, full]`; default: `[full]`, with `attention.window` `[window]`",
    )
    single_blocks: bool = Field(
        False, description="A layer is attention, a state space or an MLP alone (Nemotron-H, Mamba)"
    )
    attention: AttentionSpec | None = Field(
        None, description="More about attention: windows, norms of queries and keys; absent: plain"
    )
    moe: MoeSpec | None = Field(None, description="Mixture of experts; absent: dense MLPs")
    mla: MlaSpec | None = Field(None, description="Multi-head latent attention; absent: MHA or GQA")
    mamba: MambaSpec | None = Field(None, description="State spaces of `mamba` layers")
    linear: LinearSpec | None = Field(None, description="Linear attention of `linear` layers")
    mtp_layers: int = Field(
        0, ge=0, le=MOST_LAYERS, description="Multi-token prediction layers behind the model"
    )
    image: int = Field(
        224, ge=8, le=MOST_PIXELS, description="vit, resnet: pixels of one side of the image"
    )
    patch: int = Field(16, ge=1, description="vit: pixels of one side of a patch")

    @field_validator("family")
    @classmethod
    def _is_known(cls, name: str) -> str:
        if family_named(name) is None:
            names = family_names()
            hint = did_you_mean(name, names) or f"there are {', '.join(names)}"
            raise Contradiction(("model", "family"), f"no family is called `{name}`", hint)
        return name

    @model_validator(mode="before")
    @classmethod
    def _fill_from_family(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        # behind this validator a list is no tuple any more, as it is in JSON
        data = {name: one if name == "config" else _tuples(one) for name, one in data.items()}
        known = family_named(str(data.get("family", "gpt")))
        if known is None:
            return data
        return completed(data, {**known.choices, **_derived(known.name, data)})

    @model_validator(mode="after")
    def _check_shape(self) -> Self:
        for problem in _shape_problems(self):
            raise ValueError(problem)
        return self

    @property
    def ffn_size(self) -> int:
        """Size of the dense MLP; that of one expert if no layer has a dense MLP.

        Of a counted model: that with which a dense decoder has as many parameters.
        """
        if self.counted is not None:
            tables = (1 if self.tied else 2) * self.vocab * self.hidden
            each = (self.counted.parameters - tables) // self.layers - 4 * self.hidden**2
            return max(1, each // (2 * self.hidden))
        if self.ffn is not None:
            return self.ffn
        if self.moe is not None and self.moe.dense_layers == 0:
            return self.moe.ffn
        return 4 * self.hidden

    @property
    def key_value_heads(self) -> int:
        return self.kv_heads if self.kv_heads is not None else self.heads

    @property
    def head_size(self) -> int:
        return self.head_dim if self.head_dim is not None else self.hidden // self.heads

    @property
    def query_key_size(self) -> int:
        """Head size of queries and keys."""
        return self.mla.nope_dim + self.mla.rope_dim if self.mla else self.head_size

    @property
    def value_size(self) -> int:
        """Head size of values and of the output of attention."""
        return self.mla.value_dim if self.mla else self.head_size

    def takes_fused_attention(self, *, pads: bool = False) -> bool:
        """Whether kernels that keep no scores in memory take its heads.

        Multiples of 8, 256 at most (TransformerEngine, dot_product_attention/utils.py,
        get_attention_backend). PyTorch `pads` smaller ones, and has a kernel for larger multiples
        (aten/native/transformers: attention.cpp, cuda/sdp_utils.cpp).
        """
        sizes: tuple[int, ...] = (self.query_key_size, self.value_size)
        without = self.pattern and not {"full", "window", "chunk"} & {*self.pattern}
        if without or self.family == "resnet":
            sizes = ()
        if pads:
            return all(size <= 256 or size % 8 == 0 for size in sizes)
        return all(size <= 256 and size % 8 == 0 for size in sizes)

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate projection (three matrices instead of two)."""
        return self.activation in GATED

    @property
    def attends(self) -> AttentionSpec:
        """The part `attention`, plain if it is absent."""
        return self.attention or AttentionSpec()

    @property
    def rotates(self) -> RopeSpec:
        """The part `rope`, plain if it is absent."""
        return self.rope or RopeSpec()

    @property
    def distances(self) -> RelativeSpec:
        """The part `relative`, as T5 has it if it is absent."""
        return self.relative or RelativeSpec()

    @property
    def qkv_bias(self) -> bool:
        return self.bias in (True, "qkv", "attention")

    @property
    def attention_output_bias(self) -> bool:
        return self.bias in (True, "attention")

    @property
    def mlp_bias(self) -> bool:
        return self.bias in (True, "mlp")

    @cached_property
    def kinds(self) -> tuple[LayerKind, ...]:
        """What each layer is; those of a kind are equal objects."""
        plain: tuple[Mixer, ...] = ("window",) if self.attends.window else ("full",)
        pattern = self.pattern or plain
        kinds = []
        for layer in range(self.layers):
            mixer = pattern[layer % len(pattern)]
            experts = self.moe is not None and self.moe.has_experts(layer)
            if self.single_blocks:
                kinds.append(LayerKind(mixer, mixer == "mlp", mixer == "moe"))
            else:
                kinds.append(LayerKind(mixer, not experts, experts))
        return tuple(kinds)

    def mixer(self, layer: int) -> Mixer:
        """What mixes the tokens of layer `layer` (from 0)."""
        return self.kinds[layer].mixer

    @property
    def causal(self) -> bool:
        """Whether a token attends only to earlier ones: GPT and Llama, but no encoder."""
        return not self.bidirectional

    @cached_property
    def spans(self) -> SpanLengths:
        """How many tokens of a text an encoder-decoder reads and writes as a sample."""
        return span_lengths(self.seq)

    @property
    def target_seq(self) -> int:
        """Tokens of a sample that `layers` read: fewer than `seq` behind an encoder."""
        return self.spans.targets if self.encoder_layers else self.seq

    @property
    def reads_masked_text(self) -> bool:
        """Whether it is an encoder of texts (BERT, RoBERTa, DistilBERT)."""
        return self.bidirectional and not self.reads_images

    @property
    def called(self) -> str:
        """What it is, for messages: its family, or the type of a counted model."""
        if self.counted is None:
            return self.family
        return f"model of type {(self.config or {}).get('model_type')}"

    @property
    def splits(self) -> bool:
        """Whether anything but whole blocks is known of it, so that it can be split over ranks."""
        return not self.reads_images and self.counted is None

    @property
    def recomputes(self) -> bool:
        """Whether it has blocks that can be computed again."""
        return self.family != "resnet" and (self.counted is None or self.counted.recomputes)

    @property
    def reads_images(self) -> bool:
        """Whether a sample is an image (ViT, ResNet); `vocab` is then the number of classes."""
        return self.family in ("vit", "resnet")

    def has_experts(self, layer: int) -> bool:
        """Whether layer `layer` (from 0) has experts in place of its MLP."""
        return self.kinds[layer].experts

    def has_mlp(self, layer: int) -> bool:
        """Whether layer `layer` (from 0) has a dense MLP."""
        return self.kinds[layer].mlp


# Raffel et al. 2020 (arXiv 1910.10683), section 3.1.4: 15 % of the tokens are left out, in spans of
# three tokens in the mean.
LEFT_OUT, MEAN_SPAN = 0.15, 3


class SpanLengths(NamedTuple):
    """Tokens of a sample of span corruption: of its text, and left out of it, in so many spans."""

    text: int
    left_out: int
    spans: int

    @property
    def inputs(self) -> int:
        """The text with a sentinel in place of each span, and its end."""
        return self.text - self.left_out + self.spans + 1

    @property
    def targets(self) -> int:
        """What was left out, each span behind its sentinel, and the end."""
        return self.left_out + self.spans + 1


def span_lengths(inputs: int) -> SpanLengths:
    """Find the longest text of which an encoder reads `inputs` tokens.

    As `random_spans_helper` of google-research/text-to-text-transfer-transformer
    (t5/data/preprocessors.py) with `random_spans_noise_mask`: at least one token is left out.
    """

    def lengths(text: int) -> SpanLengths:
        left_out = max(1, round(text * LEFT_OUT))
        return SpanLengths(text, left_out, max(1, round(left_out / MEAN_SPAN)))

    near = round((inputs - 1) / (1 - LEFT_OUT + LEFT_OUT / MEAN_SPAN))
    around = map(lengths, range(max(1, near - 3), near + 4))
    return max(found for found in around if found.inputs <= inputs)


class ModelAlone(Document):
    """The section `model` of a spec without the others, as a config.json makes one."""

    model: ModelSpec


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _tuples(one) for name, one in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def completed(data: dict[str, Any], preset: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in what `data` lacks from a preset; of a part that both have, field by field."""
    result = dict(data)
    for name, value in preset.items():
        own = result.get(name)
        if own is None:
            result[name] = _tuples(value)
        elif isinstance(own, dict) and isinstance(value, Mapping):
            result[name] = completed(own, value)
    return result


def _derived(family: str, data: dict[str, object]) -> dict[str, object]:
    """Compute fields that follow from others; none if those are invalid, as pydantic reports."""
    image, patch = data.get("image", 224), data.get("patch", 16)
    if not isinstance(image, int) or not isinstance(patch, int) or patch < 1:
        return {}
    if family == "vit":
        return {"seq": _patches(image, patch)}
    if family == "resnet":
        layers = data.get("layers")
        known = isinstance(layers, int) and layers in RESNET_FEATURES
        hidden = RESNET_FEATURES[layers] if known else 512  # type: ignore[index]
        return {"hidden": hidden, "heads": 1, "seq": _positions(image)}
    return {}


def _patches(image: int, patch: int) -> int:
    """Count the tokens of a ViT: patches and the class token (arXiv 2010.11929, section 3.1)."""
    return (image // patch) ** 2 + 1


def _positions(image: int) -> int:
    """Count the positions of a ResNet's last feature map, its sequence length; at least 2."""
    return max(2, int((-(-image // RESNET_STRIDE)) ** 2))


def _shape_problems(model: ModelSpec) -> Iterator[str]:
    """Find contradictions within a shape, in the order in which they are worth reporting."""
    moe, mla = model.moe, model.mla
    if model.max_seq is not None and model.seq > model.max_seq and model.positions == "learned":
        yield f"seq {model.seq} is longer than the {model.max_seq} learned positions (max_seq)"
    if model.counted is not None or model.family == OTHER:
        yield from _counted_problems(model)
    if model.family == "resnet":
        yield from _resnet_problems(model)
    # experts, latent attention and token prediction are for causal language models
    causal_only = {"moe": moe, "mla": mla, "mtp_layers": model.mtp_layers}
    wrong = [name for name, value in causal_only.items() if value]
    if wrong and not model.causal:
        yield f"{wrong[0]} goes with causal language models, not with {model.family}"
    yield from _encoder_problems(model)
    if model.classes is not None and model.reads_images:
        yield f"classes of a {model.family} are its `vocab`: remove `classes`"
    if model.classes is not None and not model.reads_masked_text:
        yield f"classes goes with encoders of texts (bert, distilbert), not with {model.family}"
    if mla is None and model.head_dim is None and model.hidden % model.heads:
        yield f"hidden {model.hidden} is not divisible by heads {model.heads}"
    if model.heads % model.key_value_heads:
        yield f"heads {model.heads} is not divisible by kv_heads {model.key_value_heads}"
    if moe is not None and moe.dense_layers >= model.layers:
        yield (
            f"moe.dense_layers {moe.dense_layers} leaves none of the {model.layers} layers "
            "with experts"
        )
    if moe is not None and moe.shared_ffn and model.mlp_bias:
        # megatron/core/transformer/moe/shared_experts.py:46 asserts it
        yield "moe.shared_ffn needs an MLP without bias: shared experts have none"
    if mla is not None and model.kv_heads is not None:
        yield "mla takes the place of kv_heads: remove one of them"
    if mla is not None and model.head_dim is not None:
        yield "mla says all head sizes (nope_dim, rope_dim, value_dim): remove head_dim"
    if mla is not None and model.positions != "rope":
        yield "mla carries rotary positions of its own: set `positions: rope`"
    if model.ffn is None and model.gated and (moe is None or moe.dense_layers > 0):
        yield "ffn is required with swiglu (Llama-7B: 11008 at hidden 4096)"
    if model.family == "vit":
        if model.image % model.patch:
            yield f"image {model.image} is not divisible by patch {model.patch}"
        side, tokens = model.image // model.patch, _patches(model.image, model.patch)
        if model.seq != tokens:
            yield (
                f"seq {model.seq} does not fit {side} x {side} patches and one class token: remove "
                f"it, it is {tokens}"
            )
        if model.positions != "learned":
            yield "a ViT has learned positions: remove `positions`"


# Of a counted model; everything else is the class's own.
_OF_COUNTED = (
    *("config", "counted", "family", "pretrained", "seq"),
    *("layers", "hidden", "heads", "vocab", "max_seq", "tied"),
)


def _counted_problems(model: ModelSpec) -> Iterator[str]:
    if model.counted is None or model.config is None or model.family != OTHER:
        yield "a counted model has `config`, `counted` and no family: `hpctrain init --model DIR`"
        return
    if model.max_seq is not None and model.seq > model.max_seq:
        yield f"seq {model.seq} is longer than the {model.max_seq} positions of its config.json"
    family = family_named(OTHER)
    assert family is not None
    for name, field in ModelSpec.model_fields.items():
        plain = family.choices.get(name, field.default)
        if name not in _OF_COUNTED and getattr(model, name) != plain:
            yield f"{name}: a counted model is what its config.json says, remove the field"


def _encoder_problems(model: ModelSpec) -> Iterator[str]:
    if model.relative is not None and model.positions != "relative":
        yield "relative goes with `positions: relative`"
    if not model.encoder_layers:
        if model.positions == "relative":
            yield "relative positions are those of a model with `encoder_layers`"
        return
    special = model.bidirectional or model.single_blocks or model.mla or model.mtp_layers
    if special or {*model.kinds} != {LayerKind("full", mlp=True, experts=False)}:
        yield "encoder_layers goes with plain layers: attention to all tokens and an MLP"
    if model.seq < 4:
        yield f"seq {model.seq} leaves an encoder no span of its text"
    if model.init_std is not None:
        yield "init_std: the first weights of an encoder-decoder follow from its class"


def _resnet_problems(model: ModelSpec) -> Iterator[str]:
    if model.init_std is not None:
        yield "init_std: the first weights of a ResNet follow from its widths (He et al. 2015)"
    if model.layers not in RESNET_FEATURES:
        yield f"a ResNet has 18, 34, 50, 101 or 152 layers, not {model.layers}"
    hidden, positions = RESNET_FEATURES.get(model.layers), _positions(model.image)
    for name, value in {"hidden": hidden, "heads": 1, "seq": positions}.items():
        if getattr(model, name) != value:
            yield (
                f"{name} {getattr(model, name)} does not belong to a ResNet of {model.layers} "
                f"layers: remove it"
            )


# -- The task of a run, and its low-rank adapters (LoRA) ----------------------------------------


Task = Literal["language_modeling", "masked_language_modeling", "span_corruption", "classification"]


class LoraSpec(Document):
    """Low-rank adaptation: frozen weights and a product of two thin matrices beside them.

    Hu et al. 2021 (arXiv 2106.09685).
    """

    rank: int = Field(16, ge=1, description="Inner size of the two thin matrices (r)")
    alpha: float = Field(32.0, gt=0, description="Their product is scaled by alpha / rank")
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout before the thin matrices")
    targets: tuple[str, ...] | Literal["all"] = Field(
        "all", description="Names of linear layers to adapt; all: every one in the blocks"
    )
