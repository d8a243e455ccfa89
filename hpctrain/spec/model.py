"""The model of a run spec: the shape of a transformer or a ResNet, with presets for each family.

Belongs here: fields, presets, and checks that need only the shape. Does not belong here: parameter
counts (`hpctrain.plan.model.parameters`), requirements of a layout on the shape, such as heads per
tp rank (`hpctrain.plan.mesh.rules`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from hpctrain.spec.document import Document
from hpctrain.spec.job_text import SubmitText

# He et al. 2016 (arXiv 1512.03385), table 1: layers -> features of the last stage. Networks of
# 50 layers and more are made of bottlenecks, whose output is four times as wide.
RESNET_FEATURES = {18: 512, 34: 512, 50: 2048, 101: 2048, 152: 2048}
RESNET_STRIDE = 32  # pixels of the image for one position of the last feature map

# Far above any model, and low enough that counting layers and divisors ends at once.
MOST_LAYERS, MOST_HEADS, MOST_WIDTH = 10_000, 65_536, 10_000_000
MOST_TOKENS, MOST_PIXELS = 1_000_000_000, 65_536

Family = Literal["gpt", "llama", "bert", "distilbert", "vit", "resnet"]


class MoeSpec(Document):
    """Mixture of experts in place of the MLP: every token goes to `top_k` of `experts` MLPs."""

    experts: int = Field(ge=2, le=65_536, description="Routed experts of one layer")
    top_k: int = Field(ge=1, description="Experts that each token is sent to")
    ffn: int = Field(ge=8, le=MOST_WIDTH, description="MLP size of one expert")
    shared_ffn: int = Field(
        0, ge=0, le=MOST_WIDTH, description="MLP size of the shared experts together"
    )
    dense_layers: int = Field(
        0, ge=0, le=MOST_LAYERS, description="First layers that keep the dense MLP"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.top_k > self.experts:
            raise ValueError(f"top_k {self.top_k} is above experts {self.experts}")
        return self


class MlaSpec(Document):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

    q_rank: int | None = Field(None, ge=1, description="Rank of the query projection; absent: full")
    kv_rank: int = Field(ge=1, description="Rank of the joint key/value projection")
    nope_dim: int = Field(128, ge=1, description="Head size of query and key without positions")
    rope_dim: int = Field(64, ge=1, description="Head size that carries the rotary positions")
    value_dim: int = Field(128, ge=1, description="Head size of the values")


def _required(schema: dict[str, Any]) -> None:
    """Relax the schema for editors: a ResNet needs no `hidden`, `heads`, `seq`, a ViT no `seq`."""
    schema["required"] = [name for name in schema["required"] if name in ("layers", "vocab")]
    schema["allOf"] = [
        {"if": _family("resnet"), "else": {"required": ["hidden", "heads"]}},
        {"if": _family("vit", "resnet"), "else": {"required": ["seq"]}},
    ]


def _family(*names: str) -> dict[str, Any]:
    return {"properties": {"family": {"enum": list(names)}}, "required": ["family"]}


class ModelSpec(Document):
    """Shape of a transformer (GPT, Llama, BERT, DistilBERT, ViT) or a ResNet."""

    model_config = ConfigDict(json_schema_extra=_required)

    pretrained: SubmitText | None = Field(
        None,
        description="Local Hugging Face directory (config.json, weights) to start from; `$NAME` is "
        "put in where you submit",
    )
    family: Family = Field("gpt", description="Preset of the choices below")
    layers: int = Field(
        ge=1,
        le=MOST_LAYERS,
        description="Number of transformer layers; resnet: 18, 34, 50, 101 or 152",
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
    activation: Literal["gelu", "gelu_tanh", "swiglu", "squared_relu"] | None = Field(
        None, description="llama: swiglu, others: gelu; OpenAI's GPT-2 has gelu_tanh"
    )
    norm: Literal["layernorm", "rmsnorm"] | None = Field(
        None, description="llama: rmsnorm, others: layernorm"
    )
    norm_epsilon: float = Field(
        1e-5, gt=0, description="Added to the variance in norms; bert, distilbert, vit: 1e-12"
    )
    positions: Literal["learned", "rope"] | None = Field(
        None, description="llama: rope, others: learned"
    )
    rope_base: int = Field(10000, ge=1, description="Base of the rotary angles (theta)")
    tied: bool | None = Field(
        None, description="Share input and output embeddings; llama, vit: false, others: true"
    )
    bias: bool | None = Field(None, description="Bias in linear layers; llama: false, others: true")
    dropout: float = Field(0.0, ge=0, lt=1, description="Hidden and attention dropout")
    moe: MoeSpec | None = Field(None, description="Mixture of experts; absent: dense MLPs")
    mla: MlaSpec | None = Field(None, description="Multi-head latent attention; absent: MHA or GQA")
    mtp_layers: int = Field(
        0, ge=0, le=MOST_LAYERS, description="Multi-token prediction layers behind the model"
    )
    image: int = Field(
        224, ge=8, le=MOST_PIXELS, description="vit, resnet: pixels of one side of the image"
    )
    patch: int = Field(16, ge=1, description="vit: pixels of one side of a patch")

    @model_validator(mode="before")
    @classmethod
    def _fill_from_family(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        family = str(data.get("family", "gpt"))
        preset = {**_CHOICES.get(family, {}), **_derived(family, data)}
        missing = {key: value for key, value in preset.items() if data.get(key) is None}
        return {**data, **missing}

    @model_validator(mode="after")
    def _check_shape(self) -> Self:
        for problem in _shape_problems(self):
            raise ValueError(problem)
        return self

    @property
    def ffn_size(self) -> int:
        """Size of the dense MLP; that of one expert if no layer has a dense MLP."""
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

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate projection (three matrices instead of two)."""
        return self.activation == "swiglu"

    @property
    def causal(self) -> bool:
        """Whether a token attends only to earlier ones: GPT and Llama, but no encoder."""
        return self.family in ("gpt", "llama")

    @property
    def reads_images(self) -> bool:
        """Whether a sample is an image (ViT, ResNet); `vocab` is then the number of classes."""
        return self.family in ("vit", "resnet")

    def has_experts(self, layer: int) -> bool:
        """Whether transformer layer `layer` (from 0) has experts in place of its MLP."""
        return self.moe is not None and layer >= self.moe.dense_layers


_PLAIN: dict[str, object] = dict(
    activation="gelu", norm="layernorm", positions="learned", tied=True, bias=True
)
_CHOICES: dict[str, dict[str, object]] = {
    "gpt": _PLAIN,
    "llama": dict(
        activation="swiglu", norm="rmsnorm", positions="rope", tied=False, bias=False
    ),
    # Devlin et al. 2018 (arXiv 1810.04805); megatron-core puts the norms in front of the layers
    "bert": {**_PLAIN, "norm_epsilon": 1e-12},
    # Sanh et al. 2019 (arXiv 1910.01108): a BERT without segments and pooler
    "distilbert": {**_PLAIN, "norm_epsilon": 1e-12},
    # Dosovitskiy et al. 2020 (arXiv 2010.11929)
    "vit": {**_PLAIN, "tied": False, "norm_epsilon": 1e-12},
    "resnet": {**_PLAIN, "tied": False},  # to be complete: a ResNet has none of these
}  # fmt: skip


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
    if model.family == "resnet":
        yield from _resnet_problems(model)
    # experts, latent attention and token prediction are for causal language models
    causal_only = {"moe": moe, "mla": mla, "mtp_layers": model.mtp_layers}
    wrong = [name for name, value in causal_only.items() if value]
    if wrong and not model.causal:
        yield f"{wrong[0]} goes with families gpt and llama, not with {model.family}"
    if model.classes is not None and model.reads_images:
        yield f"classes of a {model.family} are its `vocab`: remove `classes`"
    if model.classes is not None and model.family not in ("bert", "distilbert"):
        yield f"classes goes with families bert and distilbert, not with {model.family}"
    if mla is None and model.head_dim is None and model.hidden % model.heads:
        yield f"hidden {model.hidden} is not divisible by heads {model.heads}"
    if model.heads % model.key_value_heads:
        yield f"heads {model.heads} is not divisible by kv_heads {model.key_value_heads}"
    if moe is not None and moe.dense_layers >= model.layers:
        yield (
            f"moe.dense_layers {moe.dense_layers} leaves none of the {model.layers} layers "
            "with experts"
        )
    if moe is not None and moe.shared_ffn and model.bias:
        # megatron/core/transformer/moe/shared_experts.py:46 asserts it
        yield "moe.shared_ffn needs `bias: false`: shared experts have no biases"
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


def _resnet_problems(model: ModelSpec) -> Iterator[str]:
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


Task = Literal["language_modeling", "masked_language_modeling", "classification"]


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
