"""Compute the seconds that one microbatch spends in each kind of block on one rank.

Belongs here: which kernels and messages an attention, MLP, MoE, Mamba block and the output layer
consist of, and how fast kernels and collectives are. Does not belong here: how microbatches follow
each other (`step`).

Letters: T tokens of a microbatch on one rank, h hidden, t tensor parallel size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hpctrain.plan.cost.case import Array, Case, flag, once

# -- Collective operations over NVLink, the network, or both ------------------------------------
# A group is `size` ranks, `stride` apart. `domain` consecutive ranks reach each other over NVLink.
# Ring formulas: Thakur, Rabenseifner and Gropp 2005 (Int. J. High Perform. Comput. Appl. 19(1)),
# as in the performance notes of nccl-tests: all-gather and reduce-scatter move (n - 1) / n of the
# whole tensor through each rank, all-reduce twice that.


HOP_SECONDS = 6e-6  # start of one collective and one hop; nccl-tests, small messages


def members_inside(case: Case, size: Array, stride: Array) -> Array:
    """Count the ranks of a group that share one NVLink domain."""
    return np.clip(np.floor_divide(case.machine.domain, stride), 1, size)


def gather_seconds(case: Case, whole_bytes: Array, size: Array, stride: Array) -> Array:
    """Price an all-gather or reduce-scatter of a tensor of `whole_bytes`.

    Inside a domain the NVLink ring; across domains every domain has to take in the whole tensor
    through the network cards of its members (NCCL makes one ring per card), and the NVLink ring
    inside runs at the same time: the slower one counts.
    """
    inside = members_inside(case, size, stride)
    domains = size / inside
    fast = whole_bytes * (size - 1) / size / nvlink(case)
    slow = whole_bytes * (domains - 1) / domains / (inside * network(case))
    hops = HOP_SECONDS * np.log2(np.maximum(size, 1) + 1)
    return np.where(np.asarray(size) > 1, np.maximum(fast, slow) + hops, 0.0)


def reduce_seconds(case: Case, whole_bytes: Array, size: Array, stride: Array) -> Array:
    """Price an all-reduce: a reduce-scatter and an all-gather."""
    return 2 * gather_seconds(case, whole_bytes, size, stride)


def exchange_seconds(case: Case, near_bytes: Array, far_bytes: Array, size: Array) -> Array:
    """All-to-all in which each of `size` ranks sends so much over NVLink and over the network."""
    near, far = near_bytes / nvlink(case), far_bytes / network(case)
    hops = HOP_SECONDS * np.log2(np.maximum(size, 1) + 1)
    return np.where(np.asarray(size) > 1, np.maximum(near, far) + hops, 0.0)


def send_seconds(case: Case, sent_bytes: Array, stride: Array) -> Array:
    """Price one message to the rank `stride` away."""
    near = np.asarray(stride) < case.machine.domain
    return HOP_SECONDS + sent_bytes / np.where(near, nvlink(case), network(case))


@once
def nvlink(case: Case) -> Array:
    """Return the bytes per second that a GPU sends over NVLink in a ring."""
    return case.machine.nvlink_bandwidth * case.machine.nvlink_efficiency


@once
def network(case: Case) -> Array:
    """Return the bytes per second that a GPU sends over its share of the network cards."""
    machine = case.machine
    spread = np.logical_and(np.asarray(machine.leaf_gpus) > 0, case.mesh.gpus > machine.leaf_gpus)
    thinned = machine.network_bandwidth / np.where(spread, machine.oversubscription, 1.0)
    return thinned * machine.network_efficiency


# -- Blocks ---------------------------------------------------------------------------------------


EXPERT_TILE = 128  # rows of a tile of a grouped product: experts' shares are padded to it


# Of messages beside products: NCCL's blocks of threads, one for each of the 24 channels that it
# logs on a DGX A100, take a fifth of 108 multiprocessors from those meanwhile.
BESIDE = 0.8


@dataclass(frozen=True)
class Passes:
    """Seconds of compute and of messages that were not hidden, forward and backward."""

    forward: Array
    backward: Array
    forward_messages: Array = 0.0
    backward_messages: Array = 0.0

    def __add__(self, other: Passes) -> Passes:
        return Passes(
            self.forward + other.forward,
            self.backward + other.backward,
            self.forward_messages + other.forward_messages,
            self.backward_messages + other.backward_messages,
        )

    def times(self, factor: Array) -> Passes:
        return Passes(
            self.forward * factor,
            self.backward * factor,
            self.forward_messages * factor,
            self.backward_messages * factor,
        )


@once
def tokens(case: Case) -> Array:
    """Count T, the tokens of a rank: context parallelism splits the sequence."""
    return case.mesh.micro_batch * case.shape.seq / case.mesh.cp


@once
def written(case: Case) -> Case:
    """Return the case of what a decoder reads and predicts, where that is another text."""
    shape = case.shape
    if not np.any(shape.decoder_blocks):
        return case
    return replace(case, shape=replace(shape, seq=shape.written_seq, causal=1))


@once
def across(case: Case) -> Case:
    """Return the case of a decoder's attention to what an encoder returns."""
    return replace(case, shape=replace(written(case).shape, key_seq=case.shape.seq, causal=0))


@once
def key_share(case: Case) -> Array:
    """Return the tokens of which keys and values are over those of queries."""
    shape = case.shape
    return np.where(np.asarray(shape.key_seq) > 0, shape.key_seq, shape.seq) / shape.seq


@once
def split_tokens(case: Case) -> Array:
    """Count tokens outside the tensor parallel region: T / t with sequence parallelism."""
    mesh = case.mesh
    return tokens(case) / np.where(np.asarray(mesh.sequence_parallel) > 0, mesh.tp, 1)


def linear(case: Case, rows: Array, n: Array, k: Array, count: Array = 1.0) -> Passes:
    """Price a linear layer [rows, k] -> [rows, n]: one product forward, two of that size back.

    In 8 bits its input and its gradient are quantised. Frozen weights (LoRA) need no weight
    gradient, which is the second product back. `count` of them in one grouped kernel. Where that
    product does not add to earlier gradients itself, other kernels do.
    """
    forward = product_seconds(case, rows, n, k, count) + quantising_seconds(case, count * rows * k)
    trained = np.asarray(case.shape.trainable) >= 1
    adding = stream(case, count * case.mesh.added_bytes * k * n)
    of_weights = np.where(trained, product_seconds(case, k, n, rows, count) + adding, 0.0)
    of_input = product_seconds(case, rows, k, n, count) + quantising_seconds(case, count * rows * n)
    return Passes(forward, of_input + of_weights)


def adapters(case: Case) -> Passes:
    """Price all of LoRA's matrices of one layer: as one product with as many weights."""
    shape = case.shape
    trained = replace(case, shape=replace(shape, trainable=1))
    rank = np.maximum(shape.adapter_rank, 1)
    return linear(trained, tokens(case), rank, shape.adapters / rank).times(
        flag(np.asarray(shape.adapters) > 0)
    )


def streaming(case: Case, forward_bytes: Array) -> Passes:
    """Price elementwise work; backward also reads the gradient and writes another."""
    seconds = case.software.streaming * stream(case, forward_bytes)
    return Passes(seconds, 1.6 * seconds)


@once
def surroundings(case: Case) -> Passes:
    """Price norm (in, out) and residual addition (two in, one out) in front of a block."""
    added = 3 * case.mesh.element_bytes * split_tokens(case) * case.shape.hidden
    return norm(case) + streaming(case, added)


@once
def norm(case: Case) -> Passes:
    """Price one norm alone: in and out, or what kernels of its own for each operation move."""
    moved = 2 * case.mesh.element_bytes * split_tokens(case) * case.shape.hidden
    return streaming(case, case.software.norm_traffic * moved)


@once
def region_messages(case: Case) -> Passes:
    """Price entering and leaving the tensor parallel region once.

    Without sequence parallelism one all-reduce of [T, h] forward and one back (Shoeybi et al.
    2019, arXiv 1909.08053, section 3); with it an all-gather and a reduce-scatter each way
    (Korthikanti et al. 2022, section 4.2.2), which move as much, and backward another all-gather
    of the input for the weight gradient, which always hides behind the input gradient.
    """
    whole = case.mesh.element_bytes * tokens(case) * case.shape.hidden
    seconds = reduce_seconds(case, whole, case.mesh.tp, 1)
    shown = seconds * (1 - case.software.overlaps_tensors * case.software.tp_overlap)
    return Passes(0.0, 0.0, shown, shown)


def beside_weights(case: Case, passes: Passes) -> Array:
    """Compute how much of the messages of a block's backward pass its weight gradients hide.

    The gradient of the input of a column-parallel product is reduced while the weight gradient of
    that product is computed (Megatron-LM, megatron/core/tensor_parallel/layers.py,
    LinearWithGradAccumulationAndAsyncCommunication): all messages of the backward pass, or half of
    them with sequence parallelism, whose all-gather comes before. That product is about a quarter
    of the backward pass: two products of a block have two gradients each. Zero-bubble schedules
    compute it later.
    """
    software, mesh = case.software, case.mesh
    half = np.where(np.asarray(mesh.sequence_parallel) > 0, 0.5, 1.0)
    there = software.beside_weights * flag(np.asarray(software.zero_bubble) == 0)
    return there * np.minimum(BESIDE * half * passes.backward_messages, passes.backward / 4)


def attention(case: Case) -> Passes:
    """Price norm, projections, rotary positions, core attention, residual."""
    projections = np.asarray(case.shape.mla) > 0
    chosen = plain_projections(case)
    if np.any(projections):
        latent = latent_projections(case)
        chosen = Passes(
            np.where(projections, latent.forward, chosen.forward),
            np.where(projections, latent.backward, chosen.backward),
        )
    rotated = case.shape.rope * (case.shape.heads + case.shape.kv_heads) * case.shape.qk_dim
    turning = streaming(case, 2 * case.mesh.element_bytes * tokens(case) * rotated / case.mesh.tp)
    parts = surroundings(case) + chosen + turning + core_attention(case)
    return parts + region_messages(case)


def plain_projections(case: Case) -> Passes:
    """Price QKV and output projection of MHA or GQA."""
    shape, mesh, rows = case.shape, case.mesh, tokens(case)
    keys = shape.kv_heads * (shape.qk_dim + shape.value_dim)
    width = shape.heads * shape.qk_dim + keys
    output = linear(case, rows, shape.hidden, shape.heads * shape.value_dim / mesh.tp)
    if np.any(shape.key_seq):  # of another text than queries
        output = output + linear(case, rows * key_share(case), keys / mesh.tp, shape.hidden)
        width = width - keys
    return linear(case, rows, width / mesh.tp, shape.hidden) + output


def latent_projections(case: Case) -> Passes:
    """MLA: down to the ranks (on every tensor parallel rank), up to the heads, output."""
    shape, mesh, rows = case.shape, case.mesh, tokens(case)
    has_rank = flag(np.asarray(shape.q_rank) > 0)
    down = linear(case, rows, shape.q_rank, shape.hidden).times(has_rank)
    joint = linear(case, rows, shape.kv_rank + shape.rope_dim, shape.hidden)
    output = linear(case, rows, shape.hidden, shape.heads * shape.value_dim / mesh.tp)
    return down + joint + latent_up(case) + output


@once
def latent_up(case: Case) -> Passes:
    """Price MLA from the ranks up to the queries, keys and values of the heads."""
    shape, mesh, rows = case.shape, case.mesh, tokens(case)
    inner = np.where(np.asarray(shape.q_rank) > 0, shape.q_rank, shape.hidden)
    query = linear(case, rows, shape.heads * shape.qk_dim / mesh.tp, inner)
    keys = shape.qk_dim - shape.rope_dim + shape.value_dim
    return query + linear(case, rows, shape.heads * keys / mesh.tp, shape.kv_rank)


def visible_pairs(case: Case, causal_saves: Array) -> Array:
    """Count pairs of query and key per head and microbatch, mean over the attention blocks."""
    shape = case.shape
    length = np.asarray(shape.seq * key_share(case), dtype=float)
    everything = length * np.where(np.asarray(shape.causal) * causal_saves > 0, 0.5, 1.0)
    window = np.where(np.asarray(shape.window) > 0, np.minimum(shape.window, length), length)
    limited = np.minimum(window, everything)
    keys: Array = shape.window_share * limited + (1 - shape.window_share) * everything
    return tokens(case) * keys


@once
def core_attention(case: Case) -> Passes:
    """Price softmax(Q K') V: fused (2 products forward, 5 back) or unfused (2 and 4)."""
    heads = case.shape.heads / case.mesh.tp
    seen, all_pairs = visible_pairs(case, 1.0), visible_pairs(case, 0.0)
    flash = np.asarray(case.software.flash) > 0
    return Passes(
        np.where(
            flash,
            flash_seconds(case, seen, heads, backward=False),
            unfused_seconds(case, all_pairs, heads, 2.0),
        ),
        np.where(
            flash,
            flash_seconds(case, seen, heads, backward=True),
            unfused_seconds(case, all_pairs, heads, 4.0),
        ),
    )


def context_messages(case: Case) -> Passes:
    """Keys and values go around the context parallel ring, behind the attention of one block.

    Ring attention (Liu et al. 2023, arXiv 2310.01889): c - 1 exchanges forward, twice the bytes
    backward (gradients too). What is longer than the attention of that block shows. With two levels
    near ranks exchange heads for tokens first, in the open (Fang and Zhao 2024, arXiv 2405.07719):
    the ring is shorter, and its messages are as large.
    """
    shape, mesh = case.shape, case.mesh
    both = shape.kv_heads * (shape.qk_dim + shape.value_dim) / mesh.tp
    block = mesh.element_bytes * tokens(case) * both
    near = mesh.near_context
    once = (mesh.cp / near - 1) * send_seconds(case, block, mesh.tp * near)
    # queries, keys and values before, what attends behind: all but an own share is sent
    width = shape.heads * (shape.qk_dim + shape.value_dim) / mesh.tp + both
    sent = mesh.element_bytes * tokens(case) * width * (near - 1) / near
    inside = members_inside(case, near, mesh.tp) == near
    away = np.where(inside, 0.0, sent)
    exchanged = exchange_seconds(case, sent - away, away, near)
    core = core_attention(case)
    hidden = 0.8
    shown = np.maximum(once - hidden * core.forward, 0.1 * once)
    shown_back = np.maximum(2 * once - hidden * core.backward, 0.2 * once)
    several = np.asarray(mesh.cp) > 1
    shown, shown_back = shown + exchanged, shown_back + exchanged
    return Passes(0.0, 0.0, np.where(several, shown, 0.0), np.where(several, shown_back, 0.0))


def mlp(case: Case) -> Passes:
    """Price norm, two or three matrices, activation, residual."""
    return surroundings(case) + feed_forward(case, case.shape.ffn) + region_messages(case)


def feed_forward(case: Case, ffn: Array) -> Passes:
    """Price the matrices of one MLP of size `ffn`, split over t, and its activation function."""
    shape, mesh, rows = case.shape, case.mesh, tokens(case)
    part = ffn / mesh.tp
    first = linear(case, rows, shape.mlp_width * part, shape.hidden)
    second = linear(case, rows, shape.hidden, part)
    active = streaming(case, mesh.element_bytes * rows * part * (shape.mlp_width + 1))
    return first + second + active


def moe(case: Case) -> Passes:
    """Price norm, router, experts as grouped products, shared experts, residual; no messages."""
    shape = case.shape
    router = linear(case, split_tokens(case), shape.experts, shape.hidden)
    return surroundings(case) + router + shared_expert(case) + experts(case) + permutation(case)


@once
def routed_rows(case: Case) -> Array:
    """Count rows that the experts of one rank compute: every token top_k times, balanced.

    Tensor parallel ranks hold different tokens (T / t each); ranks that split experts gather each
    other's, so that all of them see T tokens where expert tp is t.
    """
    return own_rows(case) * case.mesh.expert_tp


@once
def own_rows(case: Case) -> Array:
    """Count rows that one rank sends to experts: its T / t tokens, top_k times."""
    return tokens(case) * case.shape.top_k / case.mesh.tp


def experts(case: Case) -> Passes:
    """Price grouped products over the experts of a rank, and the activation function."""
    shape, mesh = case.shape, case.mesh
    rows, own = routed_rows(case), np.maximum(shape.experts / mesh.ep, 1)
    each = rows / own
    padded = np.where(rows > 0, each + EXPERT_TILE / 2, 0.0)
    part = shape.expert_ffn / mesh.expert_tp
    width = shape.expert_hidden
    first = linear(case, padded, shape.mlp_width * part, width, own)
    second = linear(case, padded, width, part, own)
    return first + second + expert_activation(case)


@once
def expert_activation(case: Case) -> Passes:
    """Price the activation function between the two products of the experts."""
    shape, mesh = case.shape, case.mesh
    part = shape.expert_ffn / mesh.expert_tp
    moved = mesh.element_bytes * routed_rows(case) * part * (shape.mlp_width + 1)
    return streaming(case, moved)


def permutation(case: Case) -> Passes:
    """Price sorting tokens by expert before and after the experts: in and out each."""
    return streaming(
        case, 6 * case.mesh.element_bytes * routed_rows(case) * case.shape.expert_hidden
    )


def dispatch_messages(case: Case) -> Passes:
    """Price the all-to-all to the experts and back, both passes.

    Ranks that split an expert gather all their rows behind the first one, and reduce and scatter
    their partial sums before the second, each of the size of the gathered rows, and in the open
    (megatron-core: moe/token_dispatcher.py, MoEAlltoAllTokenDispatcher, AG(TP) and RS(TP)).
    """
    mesh = case.mesh
    width = mesh.element_bytes * case.shape.expert_hidden
    # the experts' own mesh is nearest: expert tp, then ep (Megatron's order)
    exchanged = 2 * exchange(case, width, mesh.ep, mesh.expert_tp)
    gathered = 2 * gather_seconds(case, width * routed_rows(case), mesh.expert_tp, 1)
    hidden = case.software.overlaps_experts * case.software.ep_overlap
    shown = exchanged * (1 - hidden) + gathered
    return Passes(0.0, 0.0, shown, shown)


def exchange(case: Case, token_bytes: Array, size: Array, stride: Array) -> Array:
    """Price sending the tokens of a rank to the experts of `size` ranks, or back.

    The all-to-all sends each token top_k times. DeepEP and HybridEP send one copy to each other
    node that has experts for it, and one from there to each such rank over NVLink (deepseek-ai/
    DeepEP, README, "Normal kernels"): of n places top_k choices meet n (1 - (1 - 1 / n)^top_k).
    """
    shape, software = case.shape, case.software
    own = tokens(case) / case.mesh.tp * token_bytes
    inside = members_inside(case, size, stride)
    nodes = size / inside
    ranks_met, nodes_met = _met(size, shape.top_k), _met(nodes, shape.top_k)
    single = np.asarray(software.one_copy) > 0
    near_copies = np.where(single, ranks_met / inside, shape.top_k / size) * (inside - 1)
    far_copies = np.where(single, nodes_met * (nodes - 1) / nodes, shape.top_k * (1 - 1 / nodes))
    seconds = exchange_seconds(case, own * near_copies, own * far_copies, size)
    return seconds / software.dispatch_efficiency


def _met(places: Array, choices: Array) -> Array:
    """Return the expected number of different places of so many independent choices."""
    return places * (1 - (1 - 1 / places) ** choices)


@once
def shared_expert(case: Case) -> Passes:
    """Price the shared experts' MLP; nothing without one."""
    present = flag(np.asarray(case.shape.shared_ffn) > 0)
    return feed_forward(case, case.shape.shared_ffn).times(present)


def mamba(case: Case) -> Passes:
    """A Mamba-2 block: input projection, convolution, chunked scan, gate, output projection.

    Dao and Gu 2024 (arXiv 2405.21060), section 6: the scan costs O(T N) products of the state
    size N per channel; it is bound by memory traffic in practice.
    """
    shape, mesh, rows = case.shape, case.mesh, tokens(case)
    inner, states = shape.mamba_inner / mesh.tp, shape.mamba_groups * shape.mamba_state
    width = 2 * inner + 2 * states / mesh.tp + shape.mamba_heads / mesh.tp
    into = linear(case, rows, width, shape.hidden)
    out = linear(case, rows, shape.hidden, inner)
    own = shape.mamba_groups / mesh.tp * shape.mamba_state
    chunked = shape.mamba_chunk * (own + inner) + 4 * inner * shape.mamba_state
    scan = rows * chunked / (case.machine.peak * case.machine.scan_efficiency)
    passing = streaming(case, 12 * mesh.element_bytes * rows * inner)
    return (
        surroundings(case) + into + out + passing + Passes(scan, 2 * scan) + region_messages(case)
    )


def output_layer(case: Case) -> Passes:
    """Price final norm, logits and cross entropy; the output matrix stays in 16 bits.

    Unfused cross entropy works on fp32 logits: cast, maximum, exponential, sum, gradient
    (megatron/core/tensor_parallel/cross_entropy.py); fused kernels read and write 16 bits.
    """
    shape, rows = case.shape, tokens(case)
    part = shape.vocab / case.mesh.tp
    wide = replace(case, mesh=replace(case.mesh, low=0))
    known = np.where(np.asarray(case.software.fused_loss) > 0, 8.0, 24.0)
    given = case.software.loss_bytes
    per_logit = np.where(np.asarray(given) > 0, given, known)
    loss = stream(case, per_logit * rows * part)
    product = linear(wide, rows, part, shape.hidden)
    return surroundings(case) + product + Passes(loss, loss) + region_messages(case)


@once
def output_gradient(case: Case) -> Array:
    """Price the weight gradient of the output layer, for one microbatch and one head."""
    shape, rows = case.shape, tokens(case)
    wide = replace(case, mesh=replace(case.mesh, low=0))
    return product_seconds(wide, shape.hidden, shape.vocab / case.mesh.tp, rows)


def embedding(case: Case) -> Passes:
    """Price reading rows of the table, adding their gradients, one reduction over t."""
    moved = 3 * case.mesh.element_bytes * tokens(case) * case.shape.hidden
    return streaming(case, moved) + region_messages(case).times(0.5)


# -- Single kernels: matrix products, attention, elementwise passes -------------------------------


# Elements: tensor cores take 16-bit operands in multiples of 16 bytes (NVIDIA, Matrix
# Multiplication Background User's Guide, "Tensor Core Requirements").
ALIGNMENT = 8
LARGEST_HEAD = 128.0  # larger ones have no faster kernel: registers are full
# Moved to quantise one operand of a product in 8 bits: 16 bits in, rows and columns out in 8.
QUANTISED_BYTES = 4.0


def product_seconds(case: Case, m: Array, n: Array, k: Array, count: Array = 1.0) -> Array:
    """Price matrix products [m, k] x [k, n] of a linear layer, `count` in one grouped kernel.

    A roofline: the operations at the rate a large product reaches, while both operands come from
    memory once; then the result goes there, which nothing of its tile hides. Operands that take as
    long as the operations show half: the norm of order 2, between one after the other (1) and the
    longer one alone (infinite). Of orders 1, 1.5 and 2 the last predicts unseen sources best. A
    grouped kernel has one last wave of tiles, however many products.
    """
    mesh, machine = case.mesh, case.machine
    low = np.asarray(mesh.low) > 0
    rate = np.where(
        low,
        machine.peak_low * machine.low_efficiency,
        machine.peak * machine.product_efficiency,
    )
    width = np.where(low, 1.5, mesh.element_bytes)  # 8-bit operands, 16-bit result
    busy, operands = 2.0 * m * n * k / rate, stream(case, width * (m * k + k * n))
    result = stream(case, width * m * n)
    tail = 2.0 * machine.tail_products * k / rate
    return count * (np.hypot(busy, operands) + result) + tail


def flash_seconds(case: Case, pairs: Array, heads: Array, backward: bool) -> Array:
    """Fused attention: `pairs` of query and key per head, products of the head's size per pair.

    Dao et al. 2022 (arXiv 2205.14135), Dao 2023 (arXiv 2307.08691): two products forward, five
    backward, causal halves the pairs.
    """
    machine = case.machine
    flops = 2.0 * (5.0 if backward else 2.0) * pairs * heads * _head_size(case)
    speed = case.software.flash_speed * pass_speed(machine.forward_ratio, backward)
    shares = _share_of_heads(case) * _share_of_length(case)
    return flops / (machine.peak * machine.flash_efficiency * shares * speed)


def pass_speed(forward_ratio: Array, backward: bool) -> Array:
    """Return the rate of one pass over that of both, 2 and 5 products, which take as long as 7."""
    together = (2.0 / forward_ratio + 5.0) / 7.0
    return together * (1.0 if backward else forward_ratio)


@once
def _head_size(case: Case) -> Array:
    """Return the mean size of the heads of queries and values."""
    return (case.shape.qk_dim + case.shape.value_dim) / 2


@once
def _share_of_heads(case: Case) -> Array:
    """Return the rate of a fused kernel over that with heads of 128.

    Each pair of query and key costs one exponential, as long as the products of `half_head`
    numbers (arXiv 2407.08608, section 3.1): smaller heads wait for it.
    """
    size = np.clip(_head_size(case), 1.0, LARGEST_HEAD)
    half = case.machine.half_head
    return size / (size + half) * (LARGEST_HEAD + half) / LARGEST_HEAD


@once
def _share_of_length(case: Case) -> Array:
    """Return the rate of a fused kernel over that of long causal sequences."""
    length = case.shape.seq / case.mesh.cp
    machine = case.machine
    causal = np.asarray(case.shape.causal) > 0
    half = np.where(causal, machine.half_length_causal, machine.half_length)
    return length / (length + half)


def unfused_seconds(case: Case, pairs: Array, heads: Array, products: Array) -> Array:
    """Price attention as batched products with s x s matrices in memory; no causal saving."""
    shape, machine, element = case.shape, case.machine, case.mesh.element_bytes
    flops = 2.0 * products * pairs * heads * (shape.qk_dim + shape.value_dim) / 2
    aligned = np.asarray(shape.qk_dim) % ALIGNMENT == 0
    penalty = np.where(aligned, 1.0, machine.misaligned_cost)
    moved = case.software.softmax_passes * products / 2 * element * pairs * heads
    return penalty * flops / (machine.peak * machine.batched_efficiency) + stream(case, moved)


def quantising_seconds(case: Case, elements: Array) -> Array:
    """Price turning the operand of a product into 8 bits; nothing in 16 bits."""
    seconds = stream(case, QUANTISED_BYTES * elements)
    return np.where(np.asarray(case.mesh.low) > 0, seconds, 0.0)


def stream(case: Case, moved_bytes: Array) -> Array:
    """Price elementwise kernels by the bytes that they move."""
    machine = case.machine
    return moved_bytes / (machine.memory_bandwidth * machine.memory_efficiency)
