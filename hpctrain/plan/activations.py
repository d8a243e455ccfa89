"""Bytes of activations that one GPU keeps between forward and backward.

After Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models"
(arXiv 2205.05198), generalised to grouped-query attention, gated MLPs, flash attention, context
parallelism and models without dropout. For a = h/d heads, k = a, f = 4h, dropout and unfused
attention in 16 bits, the terms below add up to the paper's equations; each docstring says which.
Belongs here: activations of one microbatch and how many microbatches are in flight. Does not
belong here: everything that does not depend on the batch (`memory`).

Letters: s sequence, b microbatch, h hidden, a heads, k kv heads, d head size, f ffn, t tensor
parallel size, c context parallel size, e bytes per element, T = s b / c tokens per GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from hpctrain.plan.documents import Layout, Recompute
from hpctrain.spec.run import ModelSpec


@dataclass(frozen=True)
class Microbatch:
    """One microbatch on one GPU, and how its layers are computed."""

    model: ModelSpec
    layout: Layout
    sequences: int
    element_bytes: int
    flash: bool

    @cached_property
    def tokens(self) -> int:
        """T: tokens that one GPU works on; context parallelism splits the sequence."""
        return self.sequences * self.model.seq // self.layout.cp

    @cached_property
    def hidden_split(self) -> int:
        """By how much tensors outside the tensor parallel region are divided: t with SP, else 1."""
        return self.layout.tp if self.layout.sequence_parallel else 1

    @cached_property
    def hidden_bytes(self) -> int:
        """One tensor of shape [T, h] outside the tensor parallel region: e T h (/ t with SP)."""
        return self.element_bytes * self.tokens * self.model.hidden // self.hidden_split


def mask_bytes(micro: Microbatch) -> int:
    """One dropout mask on [T, h]: one byte per element, none without dropout."""
    return micro.hidden_bytes // micro.element_bytes if micro.model.dropout else 0


def layer_bytes(micro: Microbatch) -> int:
    """Everything that one layer keeps, without recomputation.

    Outside the tensor parallel region: inputs of two norms and of two column-parallel layers,
    and two dropout masks: 4 e T h + 2 T h, the `10 sbh` of eq. 2 (split by t with sequence
    parallelism: eq. 4). Inside: `24 sbh / t` of eq. 2, here `projection_bytes`. Core attention:
    `5 a s^2 b / t` of eq. 2, here `core_attention_bytes`.
    """
    outside = 4 * micro.hidden_bytes + 2 * mask_bytes(micro)
    return outside + projection_bytes(micro) + core_attention_bytes(micro)


def projection_bytes(micro: Microbatch) -> int:
    """Inside the tensor parallel region: Q, K, V, attention output, and the MLP between its layers.

    Q and output a d each, K and V k d each (8 sbh of eq. 1 for k = a); MLP: output of the first
    layer f (2f with a gate) and input of the second f (16 sbh of eq. 1 for f = 4h).
    Rotary positions keep the unrotated QKV too, because V is a view into it
    (megatron/core/transformer/attention.py, torch.split of mixed_qkv): (a + k) d more.
    """
    model = micro.model
    heads, groups = model.heads, model.key_value_heads
    rotated = heads + groups if model.positions == "rope" else 0
    attention = (2 * heads + 2 * groups + rotated) * model.head_size
    mlp = (3 if model.gated else 2) * model.ffn_size
    return micro.element_bytes * micro.tokens * (attention + mlp) // micro.layout.tp


def core_attention_bytes(micro: Microbatch) -> int:
    """What selective recomputation does not keep (section 5 of the paper, eq. 6).

    Flash attention (Dao et al. 2022, arXiv 2205.14135) keeps one fp32 number per head and token.
    Unfused attention keeps for every pair of tokens: the softmax in fp32 (megatron-core's
    attention_softmax_in_fp32 is on by default), its copy in 16 bits, and with dropout a one-byte
    mask and the dropped-out copy instead; the paper counts 2 + 1 + 2 = 5 bytes with a 16-bit
    softmax. It also repeats K and V for every head of a group (dot_product_attention.py).
    """
    model, element = micro.model, micro.element_bytes
    if micro.flash:
        return 4 * micro.tokens * model.heads // micro.layout.tp
    softmax = 4 + (element if element < 4 or model.dropout else 0) + (1 if model.dropout else 0)
    pairs = micro.tokens * model.seq * model.heads // micro.layout.tp
    repeats = 2 * (model.heads - model.key_value_heads) * model.head_size
    return softmax * pairs + element * micro.tokens * repeats // micro.layout.tp


def kept_layer_bytes(micro: Microbatch, recompute: Recompute) -> int:
    """Bytes per layer and microbatch in flight.

    none: all (eq. 2 / 4). selective: without core attention (eq. 6: 34 sbh / t). full: only the
    layer's input, 2 sbh (section 5), divided by t with sequence parallelism since megatron-core
    then saves the split input.
    """
    if recompute == "full":
        return micro.hidden_bytes
    core = core_attention_bytes(micro) if recompute == "selective" else 0
    return layer_bytes(micro) - core


def working_bytes(micro: Microbatch, recompute: Recompute) -> int:
    """Extra bytes while one layer is recomputed: what was not kept of that one layer."""
    return layer_bytes(micro) - kept_layer_bytes(micro, recompute)


def in_flight(layout: Layout, stage: int, accumulation: int) -> tuple[int, ...]:
    """Microbatches whose activations each chunk of `stage` holds at the peak.

    1F1B (vpp = 1): min(pp - stage, m) (Narayanan et al. 2021, arXiv 2104.04473, section 2.2.1).
    Interleaved: the forward passes before the first backward pass, which is
    2 (pp - stage - 1) + (vpp - 1) pp + 1 chunks, at most m vpp
    (megatron/core/pipeline_parallel/schedules.py:774, get_pp_rank_microbatches), taken in groups
    of pp microbatches per chunk. On stage 0 that is pp vpp (1 + (pp - 1) / (pp vpp)) chunks: the
    factor of section 4.2.3 of Korthikanti et al.
    """
    pp, vpp = layout.pp, layout.vpp
    if vpp == 1:
        return (min(pp - stage, accumulation),)
    passes = min(2 * (pp - stage - 1) + (vpp - 1) * pp + 1, accumulation * vpp)
    rounds, rest = divmod(passes, pp * vpp)
    return tuple(pp * rounds + max(0, min(pp, rest - pp * chunk)) for chunk in range(vpp))


def stage_activation_bytes(
    micro: Microbatch,
    recompute: Recompute,
    stage: int,
    chunk_layers: Sequence[int],
    accumulation: int,
) -> int:
    """Activations of all microbatches in flight on one stage; logits are not included."""
    flights = in_flight(micro.layout, stage, accumulation)
    kept = kept_layer_bytes(micro, recompute)
    layers_in_flight = sum(
        layers * flight for layers, flight in zip(chunk_layers, flights, strict=True)
    )
    working = working_bytes(micro, recompute) if any(chunk_layers) else 0
    first = flights[0] * mask_bytes(micro) if stage == 0 else 0
    last = output_bytes(micro) * flights[-1] if stage == micro.layout.pp - 1 else 0
    return layers_in_flight * kept + working + first + last


def output_bytes(micro: Microbatch) -> int:
    """Inputs of the final norm and of the output layer: 4 sbh / t (section 4.3 of the paper)."""
    return 2 * micro.hidden_bytes


def logits_bytes(micro: Microbatch, padded_vocab: int) -> int:
    """Logits [T, V / t]: fp32 for the loss (4 sbv / t, section 4.3) plus the 16-bit original.

    megatron/core/tensor_parallel/cross_entropy.py casts to fp32 and works in place; with fp32
    training the cast is the same tensor.
    """
    per_logit = 4 + (micro.element_bytes if micro.element_bytes < 4 else 0)
    return per_logit * micro.tokens * padded_vocab // micro.layout.tp
