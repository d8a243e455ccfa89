"""The model of a run spec: the shape of a transformer or a ResNet, with presets for each family.

Belongs here: fields, presets, and the checks that need nothing but the shape. Does not belong here:
how many parameters that makes (`hpctrain.plan.model.parameters`) or what a layout demands of a
shape (`hpctrain.plan.mesh.layout`: heads and tp, experts and ep).
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from hpctrain.spec.document import Document

# He et al. 2016 (arXiv 1512.03385), table 1: layers -> features of the last stage. Networks of
# 50 layers and more are made of bottlenecks, whose output is four times as wide.
RESNET_FEATURES = {18: 512, 34: 512, 50: 2048, 101: 2048, 152: 2048}
RESNET_STRIDE = 32  # pixels of the image for one position of the last feature map

Family = Literal["gpt", "llama", "bert", "distilbert", "vit", "resnet"]


class MoeSpec(Document):
    """Mixture of experts in place of the MLP: every token goes to `top_k` of `experts` MLPs."""

    experts: int = Field(ge=2, description="Routed experts of one layer")
    top_k: int = Field(ge=1, description="Experts that each token is sent to")
    ffn: int = Field(ge=8, description="MLP size of one expert")
    shared_ffn: int = Field(0, ge=0, description="MLP size of the shared experts together")
    dense_layers: int = Field(0, ge=0, description="First layers that keep the dense MLP")

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
    """For editors: a ResNet needs no `hidden` and `heads`, and like a ViT no `seq`."""
    schema["required"] = [one for one in schema["required"] if one in ("layers", "vocab")]
    schema["allOf"] = [
        {"if": _family("resnet"), "else": {"required": ["hidden", "heads"]}},
        {"if": _family("vit", "resnet"), "else": {"required": ["seq"]}},
    ]


def _family(*names: str) -> dict[str, Any]:
    return {"properties": {"family": {"enum": list(names)}}, "required": ["family"]}


class ModelSpec(Document):
    """Shape of a transformer (GPT, Llama, BERT, DistilBERT, ViT) or a ResNet."""

    model_config = ConfigDict(json_schema_extra=_required)

    pretrained: str | None = Field(
        None, description="Local Hugging Face directory (config.json, weights) to start from"
    )
    family: Family = Field("gpt", description="Preset of the choices below")
    layers: int = Field(
        ge=1, description="Number of transformer layers; resnet: 18, 34, 50, 101 or 152"
    )
    hidden: int = Field(ge=8, description="Hidden size; resnet: follows from `layers`")
    ffn: int | None = Field(
        None, ge=8, description="MLP size; with gelu 4 x hidden, with swiglu required"
    )
    heads: int = Field(ge=1, description="Attention heads; resnet: none")
    kv_heads: int | None = Field(None, ge=1, description="Key/value heads (GQA); default: heads")
    head_dim: int | None = Field(None, ge=1, description="Default: hidden / heads")
    vocab: int = Field(
        ge=2, description="Vocabulary size of the tokenizer, before padding; vit, resnet: classes"
    )
    classes: int | None = Field(
        None, ge=2, description="Classes of whole texts, for `task: classification`"
    )
    seq: int = Field(
        ge=2, description="Sequence length in tokens; vit, resnet: follows from `image`"
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
    mtp_layers: int = Field(0, ge=0, description="Multi-token prediction layers behind the model")
    image: int = Field(224, ge=8, description="vit, resnet: pixels of one side of the image")
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
        problem = next((words for check in _CHECKS if (words := check(self))), None)
        if problem:
            raise ValueError(problem)
        return self

    @property
    def ffn_size(self) -> int:
        """Size of the dense MLP; that of one expert where no layer has a dense MLP."""
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
        """Head size of values, and of what attention puts out."""
        return self.mla.value_dim if self.mla else self.head_size

    @property
    def gated(self) -> bool:
        """True when the MLP has a gate projection (three matrices instead of two)."""
        return self.activation == "swiglu"

    @property
    def causal(self) -> bool:
        """True when a token sees only those before it: GPT and Llama, but no encoder."""
        return self.family in ("gpt", "llama")

    @property
    def reads_images(self) -> bool:
        """True for ViT and ResNet: a sample is an image, and `vocab` counts classes."""
        return self.family in ("vit", "resnet")

    def has_experts(self, layer: int) -> bool:
        """True when transformer layer `layer` (0 is the first one) has experts for its MLP."""
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
    """What follows from other fields; nothing where those are wrong (pydantic says so)."""
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
    """Tokens of a ViT: its patches and the class token (arXiv 2010.11929, section 3.1)."""
    return (image // patch) ** 2 + 1


def _positions(image: int) -> int:
    """Positions of a ResNet's last feature map: what takes the place of a sequence, 2 at least."""
    return max(2, int((-(-image // RESNET_STRIDE)) ** 2))


def _heads_problem(model: ModelSpec) -> str | None:
    if model.mla is None and model.head_dim is None and model.hidden % model.heads:
        return f"hidden {model.hidden} is not divisible by heads {model.heads}"
    if model.heads % model.key_value_heads:
        return f"heads {model.heads} is not divisible by kv_heads {model.key_value_heads}"
    return None


def _ffn_problem(model: ModelSpec) -> str | None:
    has_dense_mlp = model.moe is None or model.moe.dense_layers > 0
    if model.ffn is None and model.gated and has_dense_mlp:
        return "ffn is required with swiglu (Llama-7B: 11008 at hidden 4096)"
    return None


def _family_problem(model: ModelSpec) -> str | None:
    """Experts, latent attention and token prediction are for models that read text causally."""
    given = [("moe", model.moe), ("mla", model.mla), ("mtp_layers", model.mtp_layers)]
    wrong = [name for name, value in given if value]
    if wrong and not model.causal:
        return f"{wrong[0]} goes with families gpt and llama, not with {model.family}"
    return None


def _classes_problem(model: ModelSpec) -> str | None:
    if model.classes is None or model.family in ("bert", "distilbert"):
        return None
    if model.reads_images:
        return f"classes of a {model.family} are its `vocab`: remove `classes`"
    return f"classes goes with families bert and distilbert, not with {model.family}"


def _moe_problem(model: ModelSpec) -> str | None:
    if model.moe is None:
        return None
    if model.moe.dense_layers >= model.layers:
        return (
            f"moe.dense_layers {model.moe.dense_layers} leaves none of the {model.layers} layers "
            "with experts"
        )
    if model.moe.shared_ffn and model.bias:
        # megatron/core/transformer/moe/shared_experts.py:46 asserts it
        return "moe.shared_ffn needs `bias: false`: shared experts have no biases"
    return None


def _mla_problem(model: ModelSpec) -> str | None:
    if model.mla is None:
        return None
    if model.kv_heads is not None:
        return "mla takes the place of kv_heads: remove one of them"
    if model.head_dim is not None:
        return "mla says all head sizes (nope_dim, rope_dim, value_dim): remove head_dim"
    if model.positions != "rope":
        return "mla carries rotary positions of its own: set `positions: rope`"
    return None


def _vit_problem(model: ModelSpec) -> str | None:
    if model.family != "vit":
        return None
    if model.image % model.patch:
        return f"image {model.image} is not divisible by patch {model.patch}"
    side, tokens = model.image // model.patch, _patches(model.image, model.patch)
    if model.seq != tokens:
        return (
            f"seq {model.seq} does not fit {side} x {side} patches and one class token: remove "
            f"it, it is {tokens}"
        )
    if model.positions != "learned":
        return "a ViT has learned positions: remove `positions`"
    return None


def _resnet_problem(model: ModelSpec) -> str | None:
    if model.family != "resnet":
        return None
    if model.layers not in RESNET_FEATURES:
        return f"a ResNet has 18, 34, 50, 101 or 152 layers, not {model.layers}"
    derived = {
        "hidden": RESNET_FEATURES[model.layers],
        "heads": 1,
        "seq": _positions(model.image),
    }
    for name, value in derived.items():
        if getattr(model, name) != value:
            return (
                f"{name} {getattr(model, name)} does not belong to a ResNet of {model.layers} "
                f"layers: remove it"
            )
    return None


_CHECKS = (
    _resnet_problem,
    _family_problem,
    _classes_problem,
    _heads_problem,
    _moe_problem,
    _mla_problem,
    _ffn_problem,
    _vit_problem,
)
