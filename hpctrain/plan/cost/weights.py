"""Count blocks and parameters of a stage on the fullest rank, for any number of cases.

Real numbers, close to the exact counts of `hpctrain.plan.model.parameters` (a unit test compares
them), in closed forms that broadcast. Does not belong here: bytes (`memory`), seconds (`blocks`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpctrain.plan.cost.case import Array, Case, once


@dataclass(frozen=True)
class Blocks:
    """Numbers of blocks, not always whole: layers of a kind may be spread evenly."""

    layers: Array
    attention: Array
    mlp: Array
    moe: Array
    mamba: Array
    decoder: Array = 0.0  # layers that attend to an encoder

    @property
    def count(self) -> Array:
        """Blocks with a norm in front."""
        return self.attention + self.mlp + self.moe + self.mamba


@once
def all_blocks(case: Case) -> Blocks:
    """Count the blocks of the whole model, without multi-token prediction layers."""
    shape = case.shape
    return Blocks(
        shape.layers + shape.beside_layers,
        shape.attention_blocks,
        shape.mlp_blocks,
        shape.moe_blocks,
        shape.mamba_blocks,
        shape.decoder_blocks,
    )


@once
def first_blocks(case: Case) -> Blocks:
    """Count the blocks of the first stage: with `dense_first` its first layers are dense."""
    shape, layers = case.shape, case.mesh.layers_first
    even = _spread(case, layers)
    dense = np.minimum(shape.mlp_blocks, layers)
    first = np.asarray(shape.dense_first) > 0
    return Blocks(
        layers + shape.beside_layers,
        even.attention,
        np.where(first, dense, even.mlp),
        np.where(first, layers - dense, even.moe),
        even.mamba,
        even.decoder,
    )


def later_blocks(case: Case, layers: Array) -> Blocks:
    """Count the blocks of a stage behind the first one."""
    shape, mesh = case.shape, case.mesh
    even = _spread(case, layers)
    behind = np.maximum(shape.layers - mesh.layers_first, 1)
    left = np.maximum(shape.mlp_blocks - mesh.layers_first, 0)
    dense = left * layers / behind
    first = np.asarray(shape.dense_first) > 0
    return Blocks(
        layers,
        even.attention,
        np.where(first, dense, even.mlp),
        np.where(first, layers - dense, even.moe),
        even.mamba,
        even.decoder,
    )


@once
def prediction_blocks(case: Case) -> Blocks:
    """The multi-token prediction layers: as the model's last layer, so with experts if it has."""
    shape, layers = case.shape, case.shape.mtp_layers
    routed = np.asarray(shape.moe_blocks) > 0
    return Blocks(
        layers, layers, np.where(routed, 0, layers), np.where(routed, layers, 0), 0 * layers
    )


def _spread(case: Case, layers: Array) -> Blocks:
    shape = case.shape
    share = layers / shape.layers
    return Blocks(
        layers,
        shape.attention_blocks * share,
        shape.mlp_blocks * share,
        shape.moe_blocks * share,
        shape.mamba_blocks * share,
        shape.decoder_blocks * share,
    )


@dataclass(frozen=True)
class Weights:
    """Parameters of one rank: `routed` belong to experts, `dense` are all others."""

    dense: Array
    routed: Array


@once
def attention_weights(case: Case) -> Array:
    """Count one attention block on one tensor parallel rank, with its norm."""
    shape, t = case.shape, case.mesh.tp
    width = shape.heads * shape.qk_dim + shape.kv_heads * (shape.qk_dim + shape.value_dim)
    plain = shape.hidden * (width + shape.heads * shape.value_dim) / t
    has_rank = np.asarray(shape.q_rank) > 0
    inner = np.where(has_rank, shape.q_rank, shape.hidden)
    keys = shape.qk_dim - shape.rope_dim + shape.value_dim
    latent = (
        shape.hidden * (np.where(has_rank, shape.q_rank, 0) + shape.kv_rank + shape.rope_dim)
        + inner * shape.heads * shape.qk_dim / t
        + shape.kv_rank * shape.heads * keys / t
        + shape.heads * shape.value_dim * shape.hidden / t
    )
    latent = latent + norm_weights(case, np.where(has_rank, shape.q_rank, 0) + shape.kv_rank)
    inside = np.where(np.asarray(shape.mla) > 0, latent, plain + shape.biased * width / t)
    return inside + shape.biased * shape.hidden + norm_weights(case, shape.hidden)


def norm_weights(case: Case, size: Array) -> Array:
    """Count one norm over `size` numbers: a scale, and a shift where it is no RMSNorm."""
    return size * np.where(np.asarray(case.shape.rms_norm) > 0, 1, 2)


@once
def mlp_weights(case: Case) -> Array:
    """Count one MLP block on one tensor parallel rank, with its norm."""
    shape = case.shape
    own = _feed_forward(case, shape.hidden, shape.ffn, case.mesh.tp)
    return own + norm_weights(case, shape.hidden)


def _feed_forward(case: Case, hidden: Array, ffn: Array, t: Array) -> Array:
    """Count matrices and biases of one MLP; the output bias is on every rank."""
    width = case.shape.mlp_width
    bias = case.shape.biased * (width * ffn / t + hidden)
    return (1 + width) * hidden * ffn / t + bias


@once
def moe_weights(case: Case) -> tuple[Array, Array]:
    """(shared parts, experts) of one MoE block on one rank. Shared experts have no biases."""
    shape, mesh = case.shape, case.mesh
    shared = (1 + shape.mlp_width) * shape.hidden * shape.shared_ffn / mesh.tp
    router = (shape.hidden + shape.biased) * shape.experts
    each = _feed_forward(case, shape.expert_hidden, shape.expert_ffn, mesh.expert_tp)
    return shared + router + norm_weights(case, shape.hidden), each * shape.experts / mesh.ep


@once
def mamba_weights(case: Case) -> Array:
    """Count one Mamba-2 block on one tensor parallel rank, with its norm."""
    shape, t = case.shape, case.mesh.tp
    states = 2 * shape.mamba_groups * shape.mamba_state
    into = 2 * shape.mamba_inner + states + shape.mamba_heads
    small = 5 * (shape.mamba_inner + states)
    matrices = shape.hidden * (into + shape.mamba_inner) + small
    return matrices / t + norm_weights(case, shape.hidden)


@once
def table_weights(case: Case) -> Array:
    """Count one table of embeddings on one rank."""
    step = case.shape.vocab_multiple * case.mesh.tp
    return np.ceil(case.shape.vocab / step) * step / case.mesh.tp * case.shape.hidden


def block_weights(case: Case, blocks: Blocks) -> Weights:
    """Count all blocks of a group of layers."""
    fixed, routed = moe_weights(case)
    dense = (
        blocks.attention * attention_weights(case)
        + blocks.mlp * mlp_weights(case)
        + blocks.moe * fixed
        + blocks.mamba * mamba_weights(case)
        + blocks.decoder * (2 * attention_weights(case) + mlp_weights(case))
        + blocks.layers * case.shape.adapters
    )
    return Weights(dense, blocks.moe * routed)


def stage_weights(case: Case, blocks: Blocks, embedding: Array, loss: Array) -> Weights:
    """Count a stage with these blocks; `embedding`, `loss`: 1 where it has that end.

    A tied table counts once where both ends are on one rank; token prediction embeds again
    (GPTModel: `pre_process or mtp_process`).
    """
    shape = case.shape
    own, ahead = block_weights(case, blocks), prediction_weights(case)
    predicts = loss * np.where(np.asarray(shape.mtp_layers) > 0, 1, 0)
    embeds = np.maximum(embedding, predicts)
    tables = embeds + loss * (1 - shape.tied * embedding)
    ends = tables * table_weights(case) + embeds * shape.position_rows * shape.hidden
    dense = own.dense + ends + loss * (norm_weights(case, shape.hidden) + ahead.dense)
    return Weights(dense, own.routed + loss * ahead.routed)


@once
def prediction_weights(case: Case) -> Weights:
    """Count multi-token prediction layers without embedding and output matrix.

    Each has three norms and a projection of two hidden states to one (eh_proj) besides
    (megatron/core/transformer/multi_token_prediction.py).
    """
    shape = case.shape
    layers = block_weights(case, prediction_blocks(case))
    joining = 2 * shape.hidden * shape.hidden / case.mesh.tp
    norms = 3 * norm_weights(case, shape.hidden)
    return Weights(layers.dense + shape.mtp_layers * (joining + norms), layers.routed)


def weights_of(case: Case) -> Weights:
    """Count the stage that has the most to reduce and update: first, middle or last."""
    mesh = case.mesh
    alone = np.asarray(mesh.pp) == 1
    first = stage_weights(case, first_blocks(case), 1, 0)
    last = stage_weights(case, later_blocks(case, mesh.layers_last), 0, 1)
    whole = stage_weights(case, all_blocks(case), 1, 1)
    middle = stage_weights(case, later_blocks(case, mesh.layers_middle), 0, 0)
    return Weights(
        np.where(alone, whole.dense, _most(first.dense, middle.dense, last.dense)),
        np.where(alone, whole.routed, _most(first.routed, middle.routed, last.routed)),
    )


def _most(first: Array, middle: Array, last: Array) -> Array:
    return np.maximum(np.maximum(first, middle), last)
