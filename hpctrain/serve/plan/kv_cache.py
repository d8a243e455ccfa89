"""Count the bytes of the KV cache, and what fits beside the weights.

Belongs here: bytes per token and sequence, the tokens and sequences that a replica holds. Does not
belong here: weights (`served_model`), seconds (`step_time`), which sequences run (`batching`).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hpctrain.plan.cost.case import Array, Mask
from hpctrain.serve.plan.served_model import ReplicaLayout, ServedModel, weight_bytes
from hpctrain.serve.plan.serving_machine import ReplicaCase

WHOLE_MEMORY = 0.98  # of a GPU's memory: what vLLM and SGLang can be told to take at most
INDEXER_BYTES = 132.0  # DeepSeek-V3.2's indexer keeps 128 FP8 numbers and a scale per token


def block_token_bytes(served: ServedModel, layout: ReplicaLayout) -> Array:
    """Return the bytes that one token takes in one attention block on one GPU.

    Ranks share the KV heads; more ranks than heads keep copies. Latent attention keeps one latent
    vector and one rotary key (DeepSeek-V2, arXiv 2405.04434, section 2.1), on every rank.
    """
    shape = served.shape
    heads = np.maximum(1.0, shape.kv_heads / layout.tp)
    plain = heads * (shape.qk_dim + shape.value_dim) * served.cache_bytes
    latent = (shape.kv_rank + shape.rope_dim) * served.cache_bytes
    indexed = np.where(np.asarray(served.sparse_keys) > 0, INDEXER_BYTES, 0.0)
    return np.where(np.asarray(shape.mla) > 0, latent, plain) + indexed


def kv_bytes_per_token(served: ServedModel, layout: ReplicaLayout) -> Array:
    """Return the bytes that one more token takes on one GPU that holds its sequence.

    Blocks with a sliding window are left out: see `window_bytes`. Pipeline stages share blocks.
    """
    growing = served.shape.attention_blocks * (1 - served.shape.window_share)
    return block_token_bytes(served, layout) * growing / layout.pp


def sequence_bytes(served: ServedModel, layout: ReplicaLayout, tokens: Array) -> Array:
    """Return the bytes that a sequence of `tokens` takes on one GPU that holds it."""
    shape = served.shape
    windowed = shape.attention_blocks * shape.window_share / layout.pp
    kept = np.minimum(tokens, np.where(np.asarray(shape.window) > 0, shape.window, tokens))
    state = served.recurrent_blocks * served.recurrent_state / layout.tp / layout.pp
    inner = shape.mamba_inner * shape.mamba_state * 4.0  # fp32 state of a Mamba-2 block
    state = state + shape.mamba_blocks * inner / layout.tp / layout.pp
    own = block_token_bytes(served, layout)
    return kv_bytes_per_token(served, layout) * tokens + own * windowed * kept + state


def activation_bytes(case: ReplicaCase) -> Array:
    """Return the bytes of activations at the peak of an iteration on one GPU.

    Copies of [token budget, hidden], the widest MLP inside, and fp32 logits of all sequences.
    """
    shape, layout, engine = case.served.shape, case.layout, case.engine
    tokens = engine.token_budget
    widest = np.maximum(shape.ffn * (shape.mlp_blocks > np.asarray(0)), 0) / layout.group
    routed = shape.top_k * shape.expert_ffn / layout.group * (np.asarray(shape.moe_blocks) > 0)
    inside = shape.mlp_width * np.maximum(widest, routed)
    logits: Array = 4.0 * np.minimum(engine.max_sequences, 256) * shape.vocab / layout.tp
    return 2.0 * tokens * (engine.activation_copies * shape.hidden + inside) + logits


def free_bytes(case: ReplicaCase) -> Array:
    """Return the bytes that remain for the KV cache on one GPU; negative: weights do not fit."""
    used = weight_bytes(case.served, case.layout) + activation_bytes(case)
    return case.gpu.memory * case.engine.memory_share - used - case.engine.overhead_bytes


def largest_batch(case: ReplicaCase, tokens: Array) -> Array:
    """Return how many sequences of `tokens` a replica holds at once (a real number).

    Attention data parallel ranks hold different sequences, tensor parallel ones the same. At most
    the engine's own limit of sequences, which each attention data parallel rank has for itself;
    below 1 a single one does not fit.
    """
    each = np.maximum(sequence_bytes(case.served, case.layout, tokens), 1e-9)
    room = np.maximum(0.0, free_bytes(case)) / each * case.layout.dp
    return np.minimum(room, case.engine.max_sequences * case.layout.dp)


def fits(case: ReplicaCase, tokens: Array) -> Mask:
    """Tell whether a replica can run at all: weights, activations and one sequence of `tokens`.

    Engines can be given more than their default share of the memory, so the whole of it counts.
    """
    everything = case.engine.model_copy(update={"memory_share": WHOLE_MEMORY})
    rest = free_bytes(replace(case, engine=everything))
    return np.asarray(rest >= sequence_bytes(case.served, case.layout, tokens))
