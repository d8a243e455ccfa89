"""Compute the seconds of one iteration of an engine: some prompt tokens, some decoding sequences.

Products and messages have the bandwidths of the training cost model (`hpctrain.plan.cost`); what
differs at small batches has constants of its own, which `bench/calibrate_serving.py` fits.

Belongs here: rooflines of products that read their weights once per iteration, attention over the
KV cache, messages, and the least time of a block; bytes of the KV cache, and what fits beside the
weights; these seconds as a table, so that a simulation can look up millions of them. Does not
belong here: which requests an iteration holds (`batching`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hpctrain.plan.cost import blocks
from hpctrain.plan.cost.case import Array, Mask
from hpctrain.serve.plan.served_model import (
    EIGHT_BLOCKS,
    NO_SHAPE,
    WIDE,
    ReplicaLayout,
    ServedModel,
    block_weights,
    layout_case,
    weight_bytes,
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


# -- Count the bytes of the KV cache, and what fits beside the weights --------------------------


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


# ----------------------------------------------------------------------------------------------


CostFunction: TypeAlias = Callable[[IterationLoad], Array]
_Grid: TypeAlias = npt.NDArray[np.float64]
_NODES_PER_DOUBLING = 4  # of prompt tokens and of sequences


class IterationTable:
    """Seconds of iterations of up to `most_prompt_tokens` and `most_sequences`.

    Between four sampled loads they are `start + per_prompt p + per_sequence n + both p n`, and
    beside that `per_key` for each key that decoding sequences read, `per_pair` for each pair of a
    prompt's token and a key that it sees: cost functions are linear in both. `cells[i][j]` has
    these six numbers, `prompt_cell[p]` and `sequence_cell[n]` are the indices.
    """

    def __init__(
        self,
        cost: CostFunction,
        most_prompt_tokens: int,
        most_sequences: int,
        usual_context_tokens: float,
    ) -> None:
        """Sample `cost`; what it takes per key is that at `usual_context_tokens`."""
        prompt_nodes, sequence_nodes = _nodes(most_prompt_tokens), _nodes(most_sequences)
        self.prompt_cell = _cell_indices(prompt_nodes)
        self.sequence_cell = _cell_indices(sequence_nodes)
        self._grid = _cells(cost, prompt_nodes, sequence_nodes, max(1.0, usual_context_tokens))
        self.cells: list[list[list[float]]] = self._grid.tolist()

    def slower(self, factor: float) -> IterationTable:
        """Return the table in which every iteration takes `factor` times as long."""
        other = object.__new__(IterationTable)
        other.prompt_cell, other.sequence_cell = self.prompt_cell, self.sequence_cell
        other._grid = self._grid * factor
        other.cells = other._grid.tolist()
        return other

    def seconds(
        self, prompt_tokens: int, pairs: float, sequences: int, context_tokens: float
    ) -> float:
        """Look up one iteration.

        `pairs`: of prompt tokens and the keys that they see; `context_tokens`: of all decoding
        sequences together.
        """
        row = self.cells[self.prompt_cell[prompt_tokens]]
        start, per_prompt, per_sequence, both, per_key, per_pair = row[
            self.sequence_cell[sequences]
        ]
        return (
            start
            + per_prompt * prompt_tokens
            + (per_sequence + both * prompt_tokens) * sequences
            + per_key * context_tokens
            + per_pair * pairs
        )


@cache
def _nodes(most: int) -> tuple[int, ...]:
    """Choose the sampled numbers from 0 to `most`."""
    step = 1 / _NODES_PER_DOUBLING
    spaced = np.unique(np.rint(2.0 ** np.arange(0, np.log2(max(most, 2)), step)))
    return (0, *(int(node) for node in spaced if node < most), most)


@cache
def _cell_indices(nodes: tuple[int, ...]) -> list[int]:
    """Return the index of the cell of each number from 0 to the last node.

    Cell 0 is 0 alone: an iteration with a single token of a prompt costs more than one without (no
    CUDA graph), so that nothing lies between them.
    """
    last = max(1, len(nodes) - 2)
    return [0] + [min(bisect_right(nodes, number) - 1, last) for number in range(1, nodes[-1] + 1)]


def _cells(
    cost: CostFunction,
    prompt_nodes: tuple[int, ...],
    sequence_nodes: tuple[int, ...],
    context_tokens: float,
) -> _Grid:
    """Compute the six numbers of all cells from samples at their corners."""
    prompts = np.asarray(prompt_nodes, dtype=float)[:, None]
    sequences = np.asarray(sequence_nodes, dtype=float)[None, :]
    shape = (len(prompt_nodes), len(sequence_nodes))

    def sample(prompt_keys: float, context: float) -> _Grid:
        load = IterationLoad(prompts, prompt_keys, sequences, context)
        return np.broadcast_to(np.asarray(cost(load), dtype=float), shape)

    bare = sample(0.0, 0.0)
    per_key = (sample(0.0, context_tokens) - bare) / np.maximum(1, sequences * context_tokens)
    per_pair = (sample(context_tokens, 0.0) - bare) / np.maximum(1, prompts * context_tokens)
    p0, p1 = _corners(shape[0])
    n0, n1 = _corners(shape[1])
    left, low = prompts[p0], sequences[:, n0]
    wide = np.maximum(prompts[p1] - left, 1)
    tall = np.maximum(sequences[:, n1] - low, 1)
    at = bare[np.ix_(p0, n0)]
    right, above, far = bare[np.ix_(p1, n0)], bare[np.ix_(p0, n1)], bare[np.ix_(p1, n1)]
    by_prompt, by_sequence = (right - at) / wide, (above - at) / tall
    both = (far - right - above + at) / (wide * tall)

    def mean(grid: _Grid) -> _Grid:
        pairs = grid[np.ix_(p0, n0)] + grid[np.ix_(p1, n0)] + grid[np.ix_(p0, n1)]
        return (pairs + grid[np.ix_(p1, n1)]) / 4

    return np.stack(
        [
            at - by_prompt * left - by_sequence * low + both * left * low,
            by_prompt - both * low,
            by_sequence - both * left,
            both,
            mean(per_key),
            mean(per_pair),
        ],
        axis=-1,
    )


def _corners(count: int) -> tuple[list[int], list[int]]:
    """Return lower and upper node of each cell; cell 0 has node 0 only."""
    if count == 2:
        return [0, 1], [0, 1]
    return [0, *range(1, count - 1)], [0, *range(2, count)]
