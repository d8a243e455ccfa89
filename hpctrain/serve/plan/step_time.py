"""Compute the seconds of one iteration of an engine: some prompt tokens, some decoding sequences.

Belongs here: rooflines of products that read their weights once per iteration, attention over the
KV cache, messages, and the least time of a block. Does not belong here: which requests an
iteration holds (`batching`), what waits for what (`steady_state`).

Products and messages have the bandwidths of the training cost model (`hpctrain.plan.cost`); what
differs at small batches has constants of its own, which `bench/calibrate_serving.py` fits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hpctrain.plan.cost import blocks
from hpctrain.plan.cost.case import Array
from hpctrain.serve.plan.kv_cache import block_token_bytes
from hpctrain.serve.plan.served_model import (
    EIGHT_BLOCKS,
    NO_SHAPE,
    WIDE,
    ReplicaLayout,
    ServedModel,
    block_weights,
    layout_case,
)
from hpctrain.serve.plan.serving_machine import ReplicaCase, ServingMachine

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


def iteration_seconds(case: ReplicaCase, load: IterationLoad) -> Array:
    """Price one iteration of a replica.

    With a pipeline, pp micro-batches are under way and a token passes all stages: the seconds are
    those from one token of a sequence to its next.
    """
    served, layout, engine = case.served, case.layout, case.engine
    part = replace(
        load,
        prefill_tokens=load.prefill_tokens / layout.pp,
        decode_sequences=load.decode_sequences / layout.pp,
    )
    shape = served.shape
    blocks = (
        shape.attention_blocks * attention_seconds(case, part)
        + served.recurrent_blocks * recurrent_seconds(case, part)
        + shape.mamba_blocks * mamba_seconds(case, part)
        + shape.mlp_blocks * mlp_seconds(case, part)
        + shape.moe_blocks * moe_seconds(case, part)
    )
    hops = (layout.pp - 1) * message_seconds(case, part.tokens * shape.hidden, 2.0)
    # attention data parallel ranks schedule and sample their own sequences
    own = engine.iteration_seconds + engine.sequence_seconds * load.decode_sequences / layout.dp
    # a draft is one more block of the model and the output matrix again, for each drafted token
    drafting = np.asarray(load.drafted_tokens) / np.maximum(shape.layers, 1)
    head = head_seconds(case, part) * (1 + np.asarray(load.drafted_tokens))
    computed = blocks * (1 + drafting) + hops + head
    return np.maximum(computed, launching_seconds(case, part)) + own


def product_seconds(
    case: ReplicaCase, rows: Array, weights: Array, bytes_each: Array, operands: Array
) -> Array:
    """Price products of `rows` with a matrix of `weights`, which is read once.

    Between compute and reading the slower one counts, rounded off where they are alike.
    """
    gpu = case.gpu
    reading = weights * bytes_each / gpu.memory_bandwidth / stream_share(gpu, operands)
    rate = product_rate(gpu, operands) * case.engine.product_speed
    return roofline(2.0 * rows * weights / rate, reading)


def grouped_seconds(
    case: ReplicaCase, rows: Array, weights: Array, bytes_each: Array, operands: Array
) -> Array:
    """Price the products of several experts at once, with kernels of their own."""
    gpu, own = case.gpu, case.gpu.shares
    expanded = own.grouped_expanded * case.engine.expanded_speed
    eight = own.grouped_8
    share = of_operands(operands, (own.grouped_16, eight, eight, own.grouped_4, expanded))
    reading = weights * bytes_each / (gpu.memory_bandwidth * share)
    rate = product_rate(gpu, operands) * own.grouped_product * case.engine.product_speed
    return roofline(2.0 * rows * weights / rate, reading)


def product_rate(gpu: ServingMachine, operands: Array) -> Array:
    """Return the FLOP/s of large products; expanded weights are multiplied in 16 bits."""
    own = gpu.shares
    wide, eight = gpu.peak_16 * own.product_16, gpu.peak_8 * own.product_8
    blocks, four = gpu.peak_8 * own.product_blocks, gpu.peak_4 * own.product_4
    return of_operands(operands, (wide, eight, blocks, four, wide))


def stream_share(gpu: ServingMachine, operands: Array) -> Array:
    """Return the share of the memory bandwidth at which products read their weights."""
    own, eight = gpu.shares, gpu.shares.stream_8
    return of_operands(operands, (own.stream_16, eight, eight, own.stream_4, own.stream_expanded))


def of_operands(operands: Array, values: tuple[Array, ...]) -> Array:
    """Choose by operands, which are indices in the order of `served_model.OPERANDS`."""
    kinds = np.asarray(operands)
    chosen = np.select([kinds == kind for kind in range(len(values))], list(values))
    return np.asarray(chosen, dtype=np.float64)


def roofline(first: Array, second: Array) -> Array:
    """Join two times of which the longer one counts; the corner between them is rounded."""
    return (np.asarray(first) ** SHARPNESS + np.asarray(second) ** SHARPNESS) ** (1 / SHARPNESS)


def attention_seconds(case: ReplicaCase, load: IterationLoad) -> Array:
    """Price one attention block: projections, cache, prompts' attention, the sum over ranks."""
    served, engine = case.served, case.engine
    shape, rows = served.shape, load.rank_tokens(case.layout)
    latent = np.asarray(shape.mla) > 0
    indexer = np.where(np.asarray(served.sparse_keys) > 0, engine.indexer_seconds, 0.0)
    plain = np.where(latent, engine.latent_seconds, engine.attention_seconds)
    return (
        projection_seconds(case, rows, block_weights(served, case.layout).attention)
        + cached_seconds(case, load)
        + prompt_attention_seconds(case, load)
        + least_seconds(case, plain, served.attention_operands)
        + indexer * case.gpu.shares.block_pace
        + message_seconds(case, rows * shape.hidden, 2.0)
    )


def projection_seconds(case: ReplicaCase, rows: Array, weights: Array) -> Array:
    """Price the products before and behind attention or a recurrence of one block."""
    served = case.served
    return product_seconds(case, rows, weights, served.attention_bytes, served.attention_operands)


def visible_keys(served: ServedModel, tokens: Array) -> Array:
    """Return the keys that one query reads, mean over attention blocks with and without window."""
    shape = served.shape
    window = np.where(np.asarray(shape.window) > 0, np.minimum(shape.window, tokens), tokens)
    sparse = np.asarray(served.sparse_keys)
    whole = np.where(sparse > 0, np.minimum(sparse, tokens), tokens)
    return shape.window_share * window + (1 - shape.window_share) * whole


def cached_seconds(case: ReplicaCase, load: IterationLoad) -> Array:
    """Price decoding sequences' attention in one block: reading their part of the cache once.

    Latent attention computes with the latent vectors (absorbed form, DeepSeek-V2 section 2.1.3):
    all heads read the same vector, so that operations count beside bytes. A cache of 8 bits is
    multiplied in 8 bits.
    """
    served, gpu, layout = case.served, case.gpu, case.layout
    shape = served.shape
    keys = load.decode_sequences / layout.dp * visible_keys(served, load.decode_context_tokens)
    read = keys * block_token_bytes(served, layout)
    seconds = read / (gpu.memory_bandwidth * gpu.shares.cache_stream)
    rows = 1 + np.asarray(load.drafted_tokens)
    flops = 2.0 * rows * keys * shape.heads / layout.tp * (2 * shape.kv_rank + shape.rope_dim)
    peak = np.where(np.asarray(served.cache_bytes) < 2, gpu.peak_8, gpu.peak_16)
    computed = flops / (peak * gpu.shares.attention_share)
    return np.where(np.asarray(shape.mla) > 0, roofline(seconds, computed), seconds)


def prompt_attention_seconds(case: ReplicaCase, load: IterationLoad) -> Array:
    """Price attention of prompt tokens in one block: two products per pair and head."""
    shape, gpu = case.served.shape, case.gpu
    keys = visible_keys(case.served, load.prefill_context_tokens)
    pairs = load.rank_prefill_tokens(case.layout) * keys * shape.heads / case.layout.tp
    rate = gpu.peak_16 * gpu.shares.attention_share
    return 2.0 * pairs * (shape.qk_dim + shape.value_dim) / rate


def recurrent_seconds(case: ReplicaCase, load: IterationLoad) -> Array:
    """Price one linear attention block: projections, and each sequence's state in and out."""
    served, layout = case.served, case.layout
    rows = load.rank_tokens(layout)
    moved = 2.0 * load.decode_sequences / layout.dp * served.recurrent_state / layout.tp
    return (
        projection_seconds(case, rows, block_weights(served, layout).recurrent)
        + moved / (case.gpu.memory_bandwidth * case.gpu.shares.cache_stream)
        + least_seconds(case, case.engine.recurrent_seconds, served.attention_operands)
        + message_seconds(case, rows * served.shape.hidden, 2.0)
    )


def mamba_seconds(case: ReplicaCase, load: IterationLoad) -> Array:
    """Price one Mamba-2 block: projections, and each sequence's fp32 state in and out."""
    served, layout = case.served, case.layout
    shape, rows = served.shape, load.rank_tokens(layout)
    state = 4.0 * shape.mamba_inner * shape.mamba_state / layout.tp
    moved = 2.0 * load.decode_sequences / layout.dp * state
    return (
        projection_seconds(case, rows, block_weights(served, layout).mamba)
        + moved / (case.gpu.memory_bandwidth * case.gpu.shares.cache_stream)
        + least_seconds(case, case.engine.recurrent_seconds, served.attention_operands)
        + message_seconds(case, rows * shape.hidden, 2.0)
    )


def mlp_seconds(case: ReplicaCase, load: IterationLoad) -> Array:
    """Price one dense MLP block, split over all ranks of the group."""
    served = case.served
    weights = block_weights(served, case.layout).mlp
    return (
        product_seconds(case, load.tokens, weights, served.mlp_bytes, served.mlp_operands)
        + least_seconds(case, case.engine.mlp_seconds, served.mlp_operands)
        + group_seconds(case, load)
    )


def moe_seconds(case: ReplicaCase, load: IterationLoad) -> Array:
    """Price one block of experts: shared ones and router, routed ones, the exchange of tokens.

    Only experts that some token chose are read. With uniform choices of k of E experts that is
    E (1 - (1 - k / E)^T) of T tokens; as tokens choose alike, T counts in part. The rank with the
    most rows sets the pace of the others.
    """
    served, layout, engine = case.served, case.layout, case.engine
    shape, own = served.shape, block_weights(served, layout)
    rows = load.tokens
    alone = 1.0 + (rows - 1.0) * engine.expert_variety
    chosen = 1.0 - (1.0 - np.minimum(1.0, shape.top_k / shape.experts)) ** alone
    mine = shape.experts / layout.ep
    busiest = np.where(np.asarray(layout.ep) > 1, engine.expert_imbalance, 1.0)
    touched = np.minimum(mine, mine * chosen * busiest) * own.expert
    each = rows * shape.top_k / shape.experts * busiest / np.maximum(chosen, 1e-12)
    return (
        product_seconds(case, rows, own.shared, served.mlp_bytes, served.mlp_operands)
        + grouped_seconds(case, each, touched, served.expert_bytes, served.expert_operands)
        + least_seconds(case, engine.expert_seconds, served.expert_operands)
        + exchange_seconds(case, load)
    )


def group_seconds(case: ReplicaCase, load: IterationLoad) -> Array:
    """Price the messages around an MLP or MoE block: an all-reduce over the whole group.

    With attention data parallel ranks that is the gather of all their tokens before and the
    scatter of sums behind, which move as much.
    """
    return message_seconds(_over_the_group(case), load.tokens * case.served.shape.hidden, 2.0)


def exchange_seconds(case: ReplicaCase, load: IterationLoad) -> Array:
    """Price what a MoE block moves: the messages of a group, or less where experts are spread.

    With attention data parallel ranks a token goes to those ranks only that hold one of its k
    experts: of E ranks n = E (1 - (1 - 1/E)^k) in the mean, (E - 1) / E of them others (DeepEP;
    DeepSeek-V3, arXiv 2412.19437, section 3.2.2). It goes there in the format of the products and
    comes back in 16 bits.
    """
    served, layout = case.served, case.layout
    whole = group_seconds(case, load)
    ranks = np.maximum(1.0, np.asarray(layout.ep, dtype=float))
    reached = ranks * (1 - (1 - 1 / ranks) ** served.shape.top_k)
    each = load.rank_tokens(layout) * reached * served.shape.hidden
    there = of_operands(served.expert_operands, (2.0, 1.0, 1.0, 0.5625, 2.0))
    spread = message_seconds(_over_the_group(case), each, (there + 2.0) / 2)
    apart = (np.asarray(layout.dp) > 1) & (np.asarray(layout.ep) > 1)
    return np.where(apart, np.minimum(whole, spread), whole)


def _over_the_group(case: ReplicaCase) -> ReplicaCase:
    """The case with all ranks of a pipeline stage as one tensor parallel group."""
    return replace(case, layout=ReplicaLayout(tp=case.layout.group))


def message_seconds(case: ReplicaCase, numbers: Array, width: Array) -> Array:
    """Price an all-reduce of `numbers` of `width` bytes over tp ranks.

    A least time that grows with the doublings of ranks, and 2 (n - 1) / n of the bytes, as in the
    training cost model (`hpctrain.plan.cost.blocks`), whose network counts where the ranks are in
    several NVLink domains and which is the slower part.
    """
    gpu, engine = case.gpu, case.engine
    size = np.asarray(case.layout.tp, dtype=float)
    linked = layout_case(NO_SHAPE, case.layout, gpu.links)
    inside = blocks.members_inside(linked, size, 1)
    domains = size / inside
    near = (size - 1) / size / (gpu.links.nvlink_bandwidth * gpu.shares.message_share)
    far = (domains - 1) / domains / (inside * blocks.network(linked))
    moving = 2.0 * width * numbers * np.maximum(near, far)
    doublings = np.log2(np.maximum(size, 1))
    least = engine.message_seconds + engine.message_hop_seconds * (doublings - 1)
    return np.where(size > 1, least * gpu.shares.message_pace + moving, 0.0)


def least_seconds(case: ReplicaCase, seconds: Array, operands: Array) -> Array:
    """Price a block's kernels at least, of which those without quantisation take `seconds`.

    Operands with a scale for each block of 128 need kernels of their own that quantise them.
    """
    scaled = np.where(np.asarray(operands) == EIGHT_BLOCKS, case.engine.scaling_seconds, 0.0)
    return np.asarray((seconds + scaled) * case.gpu.shares.block_pace, dtype=np.float64)


def launching_seconds(case: ReplicaCase, load: IterationLoad) -> Array:
    """Price launching all kernels one by one, where prompts rule out CUDA graphs; else 0.

    In proportion to their number, as their least times are. The processor launches ahead of the
    GPU, so that the longer of both counts.
    """
    served, engine = case.served, case.engine
    shape = served.shape
    plain = np.where(np.asarray(shape.mla) > 0, engine.latent_seconds, engine.attention_seconds)
    recurrent = served.recurrent_blocks + shape.mamba_blocks
    least = (
        shape.attention_blocks * least_seconds(case, plain, served.attention_operands)
        + recurrent * least_seconds(case, engine.recurrent_seconds, served.attention_operands)
        + shape.mlp_blocks * least_seconds(case, engine.mlp_seconds, served.mlp_operands)
        + shape.moe_blocks * least_seconds(case, engine.expert_seconds, served.expert_operands)
    )
    launched = np.where(np.asarray(load.prefill_tokens) > 0, engine.eager_factor * least, 0.0)
    return np.asarray(launched, dtype=np.float64)


def head_seconds(case: ReplicaCase, load: IterationLoad) -> Array:
    """Price the output matrix, in 16 bits: one row per sequence that makes a token."""
    rows = np.maximum(1.0, load.decode_sequences / case.layout.dp)
    weights = block_weights(case.served, case.layout).table
    return product_seconds(case, rows, weights, case.served.head_bytes, WIDE)
