"""The parts that a model is made of, beside its sizes: attention, positions, experts, state spaces.

Terms are those of the field (Hugging Face's configurations, megatron-core's TransformerConfig). A
part says what is computed, not how a layout divides it. Belongs here: fields of parts and what they
count. Does not belong here: which parts a published family has (`families/*.yaml`), what they cost
(`hpctrain.plan.model`), which engine has them (`hpctrain.plan.abilities`).
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from hpctrain.spec.document import Document

# Far above any model, and low enough that counting layers and divisors ends at once.
MOST_LAYERS, MOST_HEADS, MOST_WIDTH = 10_000, 65_536, 10_000_000
MOST_TOKENS = 1_000_000_000

# What mixes the tokens of one layer; `mlp` and `moe` stand where a layer is an MLP alone.
Mixer = Literal["full", "window", "chunk", "linear", "mamba", "mlp", "moe"]


class AttentionSpec(Document):
    """How heads attend, beside their number and size."""

    window: int | None = Field(
        None,
        ge=1,
        le=MOST_TOKENS,
        description="Tokens that a `window` layer looks back to (sliding window)",
    )
    chunk: int | None = Field(
        None,
        ge=1,
        le=MOST_TOKENS,
        description="Tokens of a chunk, in which a `chunk` layer stays (Llama 4)",
    )
    qk_norm: Literal["head", "head_turned", "each_head", "width", "l2"] | None = Field(
        None,
        description="Norm of queries and keys: over a head with shared weights (Qwen3), behind its "
        "rotary positions (HunYuan), with own weights for each head (StableLM 2), over all heads "
        "together (OLMo 2), or without weights (Llama 4)",
    )
    sinks: bool = Field(
        False, description="The softmax has a learned logit for each head more (GPT-OSS)"
    )
    soft_cap: float | None = Field(
        None, gt=0, description="Logits x become cap tanh(x / cap) (Gemma 2)"
    )
    scale: float | None = Field(
        None, gt=0, description="Factor of the logits; default: 1 / sqrt(head size)"
    )
    gate: bool = Field(
        False, description="The output is multiplied by the sigmoid of a projection (Qwen3-Next)"
    )


class RopeScaling(Document):
    """How rotary angles are changed for sequences that are longer than in training.

    linear: Chen et al. 2023 (arXiv 2306.15595). yarn: Peng et al. 2023 (arXiv 2309.00071). llama3:
    transformers, modeling_rope_utils.py. longrope: Ding et al. 2024 (arXiv 2402.13753).
    """

    kind: Literal["linear", "dynamic", "yarn", "llama3", "longrope"] = Field(
        description="`rope_type` of config.json"
    )
    factor: float = Field(1.0, ge=1, description="Longer by")
    original_seq: int | None = Field(
        None, ge=1, le=MOST_TOKENS, description="Length before (original_max_position_embeddings)"
    )
    low_freq_factor: float | None = Field(None, gt=0, description="llama3")
    high_freq_factor: float | None = Field(None, gt=0, description="llama3")
    beta_fast: float | None = Field(None, gt=0, description="yarn")
    beta_slow: float | None = Field(None, gt=0, description="yarn")
    mscale: float | None = Field(None, description="yarn, of DeepSeek")
    mscale_all_dim: float | None = Field(None, description="yarn, of DeepSeek")
    attention_factor: float | None = Field(None, gt=0, description="yarn, longrope")
    truncate: bool | None = Field(None, description="yarn: rounds the bounds to whole dimensions")
    short_factor: tuple[float, ...] | None = Field(None, description="longrope")
    long_factor: tuple[float, ...] | None = Field(None, description="longrope")


class RopeSpec(Document):
    """Rotary positions, beside their base (`rope_base`)."""

    partial: float = Field(1.0, gt=0, le=1, description="Share of a head that is turned")
    window_base: float | None = Field(
        None, gt=0, description="Base in `window` layers, which are not scaled (Gemma 3)"
    )
    without: tuple[bool, ...] = Field(
        (),
        description="Which layers have no positions at all; repeated over the layers",
    )
    interleaved: bool = Field(
        False, description="Pairs are neighbours (GPT-J, DeepSeek), not halves of a head"
    )
    scaling: RopeScaling | None = Field(None, description="For longer sequences; absent: none")


class RelativeSpec(Document):
    """Learned numbers for distances, which are added to the logits of attention.

    Raffel et al. 2020 (arXiv 1910.10683), section 2.1; transformers, modeling_t5.py.
    """

    buckets: int = Field(32, ge=4, le=MOST_WIDTH, description="Numbers of each head")
    max_distance: int = Field(
        128, ge=2, le=MOST_TOKENS, description="Distance from which all have the last of them"
    )
    each_layer: bool = Field(
        False, description="Each layer has numbers of its own (UMT5), else all share them (T5)"
    )


class MoeSpec(Document):
    """Mixture of experts in place of the MLP: every token goes to `top_k` of `experts` MLPs."""

    experts: int = Field(ge=2, le=65_536, description="Routed experts of one layer")
    top_k: int = Field(ge=1, description="Experts that each token is sent to")
    ffn: int = Field(ge=8, le=MOST_WIDTH, description="MLP size of one expert")
    shared_ffn: int = Field(
        0, ge=0, le=MOST_WIDTH, description="MLP size of the shared experts together"
    )
    shared_gate: bool = Field(
        False, description="A sigmoid for each token weighs the shared experts (Qwen2-MoE)"
    )
    dense_layers: int = Field(
        0, ge=0, le=MOST_LAYERS, description="First layers that keep the dense MLP"
    )
    every: int = Field(
        1, ge=1, le=MOST_LAYERS, description="Of so many layers the last one has experts"
    )
    score: Literal["softmax", "sigmoid", "sparsemixer"] = Field(
        "softmax",
        description="What makes the router's logits into weights; sparsemixer: Phi-3.5-MoE's",
    )
    normalize: bool = Field(
        True, description="Weights of the chosen experts add up to 1 (norm_topk_prob)"
    )
    scale: float = Field(1.0, gt=0, description="Factor of these weights (routed_scaling_factor)")
    expert_bias: bool = Field(
        False, description="A bias without gradient balances the choice (DeepSeek-V3)"
    )
    groups: int | None = Field(None, ge=1, description="Groups of experts, of which some count")
    top_groups: int | None = Field(None, ge=1, description="Groups that each token is sent to")
    balance_loss: float | None = Field(
        None, ge=0, description="Coefficient of the loss that balances experts; default: 0.01"
    )

    balance: Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "none"] = Field(
        "aux_loss",
        description="The loss that balances experts, over a microbatch, each sample, or the tokens "
        "of all ranks; none: without (megatron's names)",
    )
    z_loss: float | None = Field(
        None, gt=0, description="Coefficient of a loss on the router's logits (ST-MoE), as 0.001"
    )
    jitter: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="In training, what experts read is multiplied by random numbers in 1 +- this "
        "(Mixtral's router_jitter_noise)",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.top_k > self.experts:
            raise ValueError(f"top_k {self.top_k} is above experts {self.experts}")
        if (self.groups is None) != (self.top_groups is None):
            raise ValueError("groups and top_groups go together")
        if self.groups is not None and self.experts % self.groups:
            raise ValueError(f"experts {self.experts} are not divisible by groups {self.groups}")
        return self

    def has_experts(self, layer: int) -> bool:
        """Whether layer `layer` (from 0) has experts in place of its MLP."""
        return layer >= self.dense_layers and (layer + 1) % self.every == 0


class MlaSpec(Document):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

    q_rank: int | None = Field(
        None, ge=1, le=MOST_WIDTH, description="Rank of the query projection; absent: full"
    )
    kv_rank: int = Field(ge=1, le=MOST_WIDTH, description="Rank of the joint key/value projection")
    nope_dim: int = Field(
        128, ge=1, le=MOST_WIDTH, description="Head size of query and key without positions"
    )
    rope_dim: int = Field(
        64, ge=1, le=MOST_WIDTH, description="Head size that carries the rotary positions"
    )
    value_dim: int = Field(128, ge=1, le=MOST_WIDTH, description="Head size of the values")


class MambaSpec(Document):
    """A Mamba-2 block (Dao and Gu 2024, arXiv 2405.21060)."""

    heads: int = Field(ge=1, le=MOST_HEADS, description="Heads of the scan")
    head_dim: int = Field(64, ge=1, le=MOST_WIDTH, description="Channels of a head")
    state: int = Field(128, ge=1, le=MOST_WIDTH, description="State of a channel (N)")
    groups: int = Field(1, ge=1, le=MOST_WIDTH, description="Groups of heads that share B and C")
    conv: int = Field(4, ge=1, le=MOST_WIDTH, description="Width of the convolution")
    chunk: int = Field(
        256, ge=1, le=MOST_WIDTH, description="Tokens that are computed as one product"
    )
    conv_bias: bool = Field(True, description="The convolution has a bias")
    bias: bool = Field(False, description="The projections have biases")

    @property
    def inner(self) -> int:
        """Channels of the scan."""
        return self.heads * self.head_dim


# Digest with its algorithm.
_DIGEST = "^sha256:[0-9a-f]{64}$"


class RemoteCodeSpec(Document):
    """Python files beside a config.json, which somebody has read and allows to run."""

    directory: str = Field(pattern="^/", description="Where they are, for nodes too: absolute")
    digest: str = Field(
        pattern=_DIGEST, description="Of all of them; others are refused before the queue and there"
    )


class CountedSpec(Document):
    """What the class of transformers says of a model whose parts the record has not."""

    config: str = Field(
        pattern=_DIGEST,
        description="Digest of the config.json that was counted; `hpctrain init --model DIR` "
        "writes this section",
    )
    parameters: int = Field(ge=1, le=10**15, description="Parameters, each once")
    blocks: tuple[str, ...] = Field(
        (),
        description="Classes of its repeated blocks, which fsdp shards one by one; none: it shards "
        "the model as one",
    )
    recomputes: bool = Field(description="Its blocks can be computed again (recompute: full)")
    remote_code: RemoteCodeSpec | None = Field(
        None, description="Code of the model's own, which its class is; absent: transformers has it"
    )


class LinearSpec(Document):
    """Linear attention: gated DeltaNet (arXiv 2412.06464), or lightning attention (2401.04658)."""

    kind: Literal["gated_delta", "lightning"] = Field(description="What updates the state")
    key_heads: int = Field(ge=1, le=MOST_HEADS, description="Heads of queries and keys")
    value_heads: int = Field(ge=1, le=MOST_HEADS, description="Heads of values")
    key_dim: int = Field(ge=1, le=MOST_WIDTH, description="Size of a head of queries and keys")
    value_dim: int = Field(ge=1, le=MOST_WIDTH, description="Size of a head of values")
    conv: int | None = Field(
        None, ge=1, le=MOST_WIDTH, description="Width of the convolution; absent: none"
    )
