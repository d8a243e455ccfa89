"""Compute the seconds of one iteration of an engine: some prompt tokens, some decoding sequences.

Belongs here: rooflines of products that read their weights once per iteration, attention over the
KV cache, messages, and the least time of a block. Does not belong here: which requests an
iteration holds (`batching`), what waits for what (`steady_state`).

Products and messages have the bandwidths of the training cost model (`hpctrain.plan.cost`); what
differs at small batches has constants of its own, which `bench/calibrate_serving.py` fits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpctrain.plan.cost import links
from hpctrain.plan.cost.case import Array
from hpctrain.plan.serving.kv_cache import block_token_bytes
from hpctrain.plan.serving.served_model import (
    EIGHT_BLOCKS,
    NO_SHAPE,
    WIDE,
    ReplicaLayout,
    ServedModel,
    block_weights,
    layout_case,
)
from hpctrain.plan.serving.serving_machine import EngineConstants, ServingMachine

SHARPNESS = 2.0  # of the roofline: seconds of compute and of reading add up as this norm


@dataclass(frozen=True)
class IterationLoad:
    """What one iteration of a replica computes. All fields broadcast.

    prefill_tokens          tokens of prompts, of all requests together
    prefill_context_tokens  keys that such a token sees in the mean (half the prompt, if whole)
    decode_sequences        sequences that are in the iteration beside prompts
    decode_context_tokens   tokens that such a sequence has in the cache
    drafted_tokens          tokens per sequence that are verified beside the next one (speculation)
    prompts                 prompts that the tokens belong to: attention data parallel ranks beyond
                            these have none (default: all ranks share them)
    """

    prefill_tokens: Array
    prefill_context_tokens: Array
    decode_sequences: Array
    decode_context_tokens: Array
    drafted_tokens: Array = 0.0
    prompts: Array = np.inf

    @property
    def decode_tokens(self) -> Array:
        """Rows of decoding sequences: the next token of each and what was drafted."""
        return self.decode_sequences * (1 + np.asarray(self.drafted_tokens))

    @property
    def tokens(self) -> Array:
        return self.prefill_tokens + self.decode_tokens

    def rank_prefill_tokens(self, layout: ReplicaLayout) -> Array:
        """Prompt tokens of the busiest attention rank: a prompt is computed by one of them."""
        return self.prefill_tokens / np.clip(self.prompts, 1.0, layout.dp)

    def rank_tokens(self, layout: ReplicaLayout) -> Array:
        """Tokens of the busiest attention rank."""
        return self.rank_prefill_tokens(layout) + self.decode_tokens / layout.dp


def iteration_seconds(
    served: ServedModel,
    gpu: ServingMachine,
    layout: ReplicaLayout,
    engine: EngineConstants,
    load: IterationLoad,
) -> Array:
    """Price one iteration of a replica.

    With a pipeline, pp micro-batches are under way and a token passes all stages: the seconds are
    those from one token of a sequence to its next.
    """
    part = IterationLoad(
        load.prefill_tokens / layout.pp,
        load.prefill_context_tokens,
        load.decode_sequences / layout.pp,
        load.decode_context_tokens,
        load.drafted_tokens,
        load.prompts,
    )
    shape = served.shape
    blocks = (
        shape.attention_blocks * attention_seconds(served, gpu, layout, engine, part)
        + served.recurrent_blocks * recurrent_seconds(served, gpu, layout, engine, part)
        + shape.mamba_blocks * mamba_seconds(served, gpu, layout, engine, part)
        + shape.mlp_blocks * mlp_seconds(served, gpu, layout, engine, part)
        + shape.moe_blocks * moe_seconds(served, gpu, layout, engine, part)
    )
    hops = (layout.pp - 1) * message_seconds(gpu, layout, engine, part.tokens * shape.hidden, 2.0)
    # attention data parallel ranks schedule and sample their own sequences
    own = engine.iteration_seconds + engine.sequence_seconds * load.decode_sequences / layout.dp
    # a draft is one more block of the model and the output matrix again, for each drafted token
    drafting = np.asarray(load.drafted_tokens) / np.maximum(shape.layers, 1)
    head = head_seconds(served, gpu, layout, engine, part) * (1 + np.asarray(load.drafted_tokens))
    computed = blocks * (1 + drafting) + hops + head
    return np.maximum(computed, launching_seconds(served, gpu, engine, part)) + own


def product_seconds(
    gpu: ServingMachine,
    engine: EngineConstants,
    rows: Array,
    weights: Array,
    bytes_each: Array,
    operands: Array,
) -> Array:
    """Price products of `rows` with a matrix of `weights`, which is read once.

    Between compute and reading the slower one counts, rounded off where they are alike.
    """
    reading = weights * bytes_each / gpu.memory_bandwidth / stream_share(gpu, operands)
    rate = product_rate(gpu, operands) * engine.product_speed
    return roofline(2.0 * rows * weights / rate, reading)


def grouped_seconds(
    gpu: ServingMachine,
    engine: EngineConstants,
    rows: Array,
    weights: Array,
    bytes_each: Array,
    operands: Array,
) -> Array:
    """Price the products of several experts at once, with kernels of their own."""
    expanded = gpu.grouped_expanded * engine.expanded_speed
    eight = gpu.grouped_8
    share = of_operands(operands, (gpu.grouped_16, eight, eight, gpu.grouped_4, expanded))
    reading = weights * bytes_each / (gpu.memory_bandwidth * share)
    rate = product_rate(gpu, operands) * gpu.grouped_product * engine.product_speed
    return roofline(2.0 * rows * weights / rate, reading)


def product_rate(gpu: ServingMachine, operands: Array) -> Array:
    """Return the FLOP/s of large products; expanded weights are multiplied in 16 bits."""
    wide, eight = gpu.peak_16 * gpu.product_16, gpu.peak_8 * gpu.product_8
    blocks, four = gpu.peak_8 * gpu.product_blocks, gpu.peak_4 * gpu.product_4
    return of_operands(operands, (wide, eight, blocks, four, wide))


def stream_share(gpu: ServingMachine, operands: Array) -> Array:
    """Return the share of the memory bandwidth at which products read their weights."""
    eight = gpu.stream_8
    return of_operands(operands, (gpu.stream_16, eight, eight, gpu.stream_4, gpu.stream_expanded))


def of_operands(operands: Array, values: tuple[Array, ...]) -> Array:
    """Choose by operands, which are indices in the order of `served_model.OPERANDS`."""
    kinds = np.asarray(operands)
    chosen = np.select([kinds == kind for kind in range(len(values))], list(values))
    return np.asarray(chosen, dtype=np.float64)


def roofline(first: Array, second: Array) -> Array:
    """Join two times of which the longer one counts; the corner between them is rounded."""
    return (np.asarray(first) ** SHARPNESS + np.asarray(second) ** SHARPNESS) ** (1 / SHARPNESS)


def attention_seconds(
    served: ServedModel,
    gpu: ServingMachine,
    layout: ReplicaLayout,
    engine: EngineConstants,
    load: IterationLoad,
) -> Array:
    """Price one attention block: projections, cache, prompts' attention, the sum over ranks."""
    shape, rows = served.shape, load.rank_tokens(layout)
    projections = projection_seconds(
        served, gpu, engine, rows, block_weights(served, layout).attention
    )
    latent = np.asarray(shape.mla) > 0
    indexer = np.where(np.asarray(served.sparse_keys) > 0, engine.indexer_seconds, 0.0)
    plain = np.where(latent, engine.latent_seconds, engine.attention_seconds)
    least = least_seconds(engine, gpu, plain, served.attention_operands)
    message = message_seconds(gpu, layout, engine, rows * shape.hidden, 2.0)
    return (
        projections
        + cached_seconds(served, gpu, layout, load)
        + prompt_attention_seconds(served, gpu, layout, load)
        + least
        + indexer * gpu.block_pace
        + message
    )


def projection_seconds(
    served: ServedModel, gpu: ServingMachine, engine: EngineConstants, rows: Array, weights: Array
) -> Array:
    """Price the products before and behind attention or a recurrence of one block."""
    return product_seconds(
        gpu, engine, rows, weights, served.attention_bytes, served.attention_operands
    )


def visible_keys(served: ServedModel, tokens: Array) -> Array:
    """Return the keys that one query reads, mean over attention blocks with and without window."""
    shape = served.shape
    window = np.where(np.asarray(shape.window) > 0, np.minimum(shape.window, tokens), tokens)
    sparse = np.asarray(served.sparse_keys)
    whole = np.where(sparse > 0, np.minimum(sparse, tokens), tokens)
    return shape.window_share * window + (1 - shape.window_share) * whole


def cached_seconds(
    served: ServedModel, gpu: ServingMachine, layout: ReplicaLayout, load: IterationLoad
) -> Array:
    """Price decoding sequences' attention in one block: reading their part of the cache once.

    Latent attention computes with the latent vectors (absorbed form, DeepSeek-V2 section 2.1.3):
    all heads read the same vector, so that operations count beside bytes. A cache of 8 bits is
    multiplied in 8 bits.
    """
    shape = served.shape
    keys = load.decode_sequences / layout.dp * visible_keys(served, load.decode_context_tokens)
    read = keys * block_token_bytes(served, layout)
    seconds = read / (gpu.memory_bandwidth * gpu.cache_stream)
    rows = 1 + np.asarray(load.drafted_tokens)
    flops = 2.0 * rows * keys * shape.heads / layout.tp * (2 * shape.kv_rank + shape.rope_dim)
    peak = np.where(np.asarray(served.cache_bytes) < 2, gpu.peak_8, gpu.peak_16)
    computed = flops / (peak * gpu.attention_share)
    return np.where(np.asarray(shape.mla) > 0, roofline(seconds, computed), seconds)


def prompt_attention_seconds(
    served: ServedModel, gpu: ServingMachine, layout: ReplicaLayout, load: IterationLoad
) -> Array:
    """Price attention of prompt tokens in one block: two products per pair and head."""
    shape = served.shape
    keys = visible_keys(served, load.prefill_context_tokens)
    pairs = load.rank_prefill_tokens(layout) * keys * shape.heads / layout.tp
    return 2.0 * pairs * (shape.qk_dim + shape.value_dim) / (gpu.peak_16 * gpu.attention_share)


def recurrent_seconds(
    served: ServedModel,
    gpu: ServingMachine,
    layout: ReplicaLayout,
    engine: EngineConstants,
    load: IterationLoad,
) -> Array:
    """Price one linear attention block: projections, and each sequence's state in and out."""
    shape, rows = served.shape, load.rank_tokens(layout)
    projections = projection_seconds(
        served, gpu, engine, rows, block_weights(served, layout).recurrent
    )
    moved = 2.0 * load.decode_sequences / layout.dp * served.recurrent_state / layout.tp
    state = moved / (gpu.memory_bandwidth * gpu.cache_stream)
    message = message_seconds(gpu, layout, engine, rows * shape.hidden, 2.0)
    least = least_seconds(engine, gpu, engine.recurrent_seconds, served.attention_operands)
    return projections + state + least + message


def mamba_seconds(
    served: ServedModel,
    gpu: ServingMachine,
    layout: ReplicaLayout,
    engine: EngineConstants,
    load: IterationLoad,
) -> Array:
    """Price one Mamba-2 block: projections, and each sequence's fp32 state in and out."""
    shape, rows = served.shape, load.rank_tokens(layout)
    projections = projection_seconds(served, gpu, engine, rows, block_weights(served, layout).mamba)
    state = 4.0 * shape.mamba_inner * shape.mamba_state / layout.tp
    moved = 2.0 * load.decode_sequences / layout.dp * state
    message = message_seconds(gpu, layout, engine, rows * shape.hidden, 2.0)
    least = least_seconds(engine, gpu, engine.recurrent_seconds, served.attention_operands)
    kept = moved / (gpu.memory_bandwidth * gpu.cache_stream)
    return projections + kept + least + message


def mlp_seconds(
    served: ServedModel,
    gpu: ServingMachine,
    layout: ReplicaLayout,
    engine: EngineConstants,
    load: IterationLoad,
) -> Array:
    """Price one dense MLP block, split over all ranks of the group."""
    weights = block_weights(served, layout).mlp
    products = product_seconds(
        gpu, engine, load.tokens, weights, served.mlp_bytes, served.mlp_operands
    )
    message = group_seconds(served, gpu, layout, engine, load)
    least = least_seconds(engine, gpu, engine.mlp_seconds, served.mlp_operands)
    return products + least + message


def moe_seconds(
    served: ServedModel,
    gpu: ServingMachine,
    layout: ReplicaLayout,
    engine: EngineConstants,
    load: IterationLoad,
) -> Array:
    """Price one block of experts: shared ones and router, routed ones, the exchange of tokens.

    Only experts that some token chose are read. With uniform choices of k of E experts that is
    E (1 - (1 - k / E)^T) of T tokens; as tokens choose alike, T counts in part. The rank with the
    most rows sets the pace of the others.
    """
    shape, own = served.shape, block_weights(served, layout)
    rows = load.tokens
    shared = product_seconds(gpu, engine, rows, own.shared, served.mlp_bytes, served.mlp_operands)
    alone = 1.0 + (rows - 1.0) * engine.expert_variety
    chosen = 1.0 - (1.0 - np.minimum(1.0, shape.top_k / shape.experts)) ** alone
    mine = shape.experts / layout.ep
    busiest = np.where(np.asarray(layout.ep) > 1, engine.expert_imbalance, 1.0)
    touched = np.minimum(mine, mine * chosen * busiest)
    each = rows * shape.top_k / shape.experts * busiest / np.maximum(chosen, 1e-12)
    routed = grouped_seconds(
        gpu, engine, each, touched * own.expert, served.expert_bytes, served.expert_operands
    )
    least = least_seconds(engine, gpu, engine.expert_seconds, served.expert_operands)
    message = exchange_seconds(served, gpu, layout, engine, load)
    return shared + routed + least + message


def group_seconds(
    served: ServedModel,
    gpu: ServingMachine,
    layout: ReplicaLayout,
    engine: EngineConstants,
    load: IterationLoad,
) -> Array:
    """Price the messages around an MLP or MoE block: an all-reduce over the whole group.

    With attention data parallel ranks that is the gather of all their tokens before and the
    scatter of sums behind, which move as much.
    """
    numbers = load.tokens * served.shape.hidden
    whole = ReplicaLayout(tp=layout.group)
    return message_seconds(gpu, whole, engine, numbers, 2.0)


def exchange_seconds(
    served: ServedModel,
    gpu: ServingMachine,
    layout: ReplicaLayout,
    engine: EngineConstants,
    load: IterationLoad,
) -> Array:
    """Price what a MoE block moves: the messages of a group, or less where experts are spread.

    With attention data parallel ranks a token goes to those ranks only that hold one of its k
    experts: of E ranks n = E (1 - (1 - 1/E)^k) in the mean, (E - 1) / E of them others (DeepEP;
    DeepSeek-V3, arXiv 2412.19437, section 3.2.2). It goes there in the format of the products and
    comes back in 16 bits.
    """
    whole = group_seconds(served, gpu, layout, engine, load)
    ranks = np.maximum(1.0, np.asarray(layout.ep, dtype=float))
    reached = ranks * (1 - (1 - 1 / ranks) ** served.shape.top_k)
    each = load.rank_tokens(layout) * reached * served.shape.hidden
    there = of_operands(served.expert_operands, (2.0, 1.0, 1.0, 0.5625, 2.0))
    whole_group = ReplicaLayout(tp=layout.group)
    spread = message_seconds(gpu, whole_group, engine, each, (there + 2.0) / 2)
    apart = (np.asarray(layout.dp) > 1) & (np.asarray(layout.ep) > 1)
    return np.where(apart, np.minimum(whole, spread), whole)


def message_seconds(
    gpu: ServingMachine,
    layout: ReplicaLayout,
    engine: EngineConstants,
    numbers: Array,
    width: Array,
) -> Array:
    """Price an all-reduce of `numbers` of `width` bytes over tp ranks.

    A least time that grows with the doublings of ranks, and 2 (n - 1) / n of the bytes, as in the
    training cost model (`hpctrain.plan.cost.links`), whose network counts where the ranks are in
    several NVLink domains and which is the slower part.
    """
    size = np.asarray(layout.tp, dtype=float)
    case = layout_case(NO_SHAPE, layout, gpu.links)
    inside = links.members_inside(case, size, 1)
    domains = size / inside
    near = (size - 1) / size / (gpu.links.nvlink_bandwidth * gpu.message_share)
    far = (domains - 1) / domains / (inside * links.network(case))
    moving = 2.0 * width * numbers * np.maximum(near, far)
    doublings = np.log2(np.maximum(size, 1))
    least = engine.message_seconds + engine.message_hop_seconds * (doublings - 1)
    return np.where(size > 1, least * gpu.message_pace + moving, 0.0)


def least_seconds(
    engine: EngineConstants, gpu: ServingMachine, seconds: Array, operands: Array
) -> Array:
    """Price a block's kernels at least, of which those without quantisation take `seconds`.

    Operands with a scale for each block of 128 need kernels of their own that quantise them.
    """
    scaled = np.where(np.asarray(operands) == EIGHT_BLOCKS, engine.scaling_seconds, 0.0)
    return np.asarray((seconds + scaled) * gpu.block_pace, dtype=np.float64)


def launching_seconds(
    served: ServedModel, gpu: ServingMachine, engine: EngineConstants, load: IterationLoad
) -> Array:
    """Price launching all kernels one by one, where prompts rule out CUDA graphs; else 0.

    In proportion to their number, as their least times are. The processor launches ahead of the
    GPU, so that the longer of both counts.
    """
    shape = served.shape
    plain = np.where(np.asarray(shape.mla) > 0, engine.latent_seconds, engine.attention_seconds)
    recurrent = served.recurrent_blocks + shape.mamba_blocks
    least = (
        shape.attention_blocks * least_seconds(engine, gpu, plain, served.attention_operands)
        + recurrent
        * least_seconds(engine, gpu, engine.recurrent_seconds, served.attention_operands)
        + shape.mlp_blocks * least_seconds(engine, gpu, engine.mlp_seconds, served.mlp_operands)
        + shape.moe_blocks
        * least_seconds(engine, gpu, engine.expert_seconds, served.expert_operands)
    )
    launched = np.where(np.asarray(load.prefill_tokens) > 0, engine.eager_factor * least, 0.0)
    return np.asarray(launched, dtype=np.float64)


def head_seconds(
    served: ServedModel,
    gpu: ServingMachine,
    layout: ReplicaLayout,
    engine: EngineConstants,
    load: IterationLoad,
) -> Array:
    """Price the output matrix, in 16 bits: one row per sequence that makes a token."""
    rows = np.maximum(1.0, load.decode_sequences / layout.dp)
    weights = block_weights(served, layout).table
    return product_seconds(gpu, engine, rows, weights, served.head_bytes, WIDE)
