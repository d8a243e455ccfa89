"""Compute bytes on one GPU, by component, of any stage of any number of cases.

After Korthikanti et al. 2022 (arXiv 2205.05198), with terms for grouped-query and latent
attention, gated MLPs, experts, flash attention, context parallelism and 8-bit operands, of which
TransformerEngine keeps what backward multiplies: inputs of linear layers, in one layout. The paper
counts s b h units for 16-bit activations with dropout and unfused attention; each docstring says
which of its terms a line is. What the paper leaves out was found on runs that print exact bytes
(docs/planner.md): 16-bit placeholders of one layer's weight gradients and of the output matrix.

Belongs here: bytes. Does not belong here: whether they fit (`hpctrain.plan.search.layouts`).

Letters: T tokens of a microbatch on one rank, h hidden, t tensor parallel size, e bytes per
element.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hpctrain.plan.cost.blocks import (
    across,
    key_share,
    routed_rows,
    split_tokens,
    tokens,
    written,
)
from hpctrain.plan.cost.case import (
    RECOMPUTE_FULL,
    RECOMPUTE_SELECTIVE,
    Array,
    Case,
    Mask,
    flag,
    once,
)
from hpctrain.plan.cost.weights import (
    Blocks,
    Weights,
    all_blocks,
    block_weights,
    first_blocks,
    later_blocks,
    prediction_blocks,
    prediction_weights,
    stage_weights,
    table_weights,
)


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one stage; the parts add up to `total`."""

    weights: Array
    gradients: Array
    optimizer: Array
    activations: Array
    logits: Array
    buffers: Array
    context: Array

    @property
    def total(self) -> Array:
        return sum((getattr(self, name) for name in type(self).__dataclass_fields__), start=0.0)


@dataclass(frozen=True)
class Stage:
    """Which stage: its index, its blocks, whether it has the ends of the model."""

    index: Array
    blocks: Blocks
    embedding: Array
    loss: Array


@once
def stages_that_matter(case: Case) -> tuple[Stage, Stage, Stage]:
    """First, second and last stage: one of them is the fullest.

    The first has the embedding and the most microbatches in flight, the last the logits; of the
    others the second has the most in flight. A model without pipeline is all three at once.
    """
    mesh = case.mesh
    alone, several = np.asarray(mesh.pp) == 1, np.asarray(mesh.pp) > 2
    both, early = flag(alone), 1.0 - flag(several)  # numbers: to add two flags is no "or"
    first = first_blocks(case)
    inner = later_blocks(case, np.where(several, mesh.layers_middle, mesh.layers_last))
    last = later_blocks(case, mesh.layers_last)
    return (
        Stage(0, first, 1, both),
        Stage(np.minimum(1, mesh.pp - 1), _either(alone, first, inner), both, early),
        Stage(mesh.pp - 1, _either(alone, first, last), both, 1),
    )


def _either(condition: Mask, yes: Blocks, no: Blocks) -> Blocks:
    return Blocks(
        layers=np.where(condition, yes.layers, no.layers),
        attention=np.where(condition, yes.attention, no.attention),
        mlp=np.where(condition, yes.mlp, no.mlp),
        moe=np.where(condition, yes.moe, no.moe),
        mamba=np.where(condition, yes.mamba, no.mamba),
        decoder=np.where(condition, yes.decoder, no.decoder),
    )


@once
def peak_bytes(case: Case) -> Array:
    """Compute the bytes on the fullest GPU."""
    first, second, last = (stage_memory(case, stage).total for stage in stages_that_matter(case))
    return np.maximum(np.maximum(first, second), last)


def stage_memory(case: Case, stage: Stage) -> StageMemory:
    """Compute the bytes on one GPU of `stage`."""
    software = case.software
    weights = held_weights(case, stage)
    kept = activation_bytes(case, stage)
    logits = logit_bytes(case) * stage.loss
    buffers = passing_buffers(case, stage)
    # these are gone while the optimizer runs, which has copies of its own
    buffers = buffers + np.maximum(copied_bytes(case, stage) - (kept + logits + buffers), 0.0)
    slack = np.where(np.asarray(software.slack) > 0, software.slack, 1.0)
    return StageMemory(
        weights=weight_bytes(case, weights, low_weights(case, stage)),
        gradients=gradient_bytes(case, weights),
        optimizer=optimizer_bytes(case, weights),
        activations=kept * slack,
        logits=logits * slack,
        buffers=buffers * slack + software.bucket_bytes,
        context=outside_allocator_bytes(case) + 0.0 * kept,
    )


@once
def outside_allocator_bytes(case: Case) -> Array:
    """Compute what PyTorch's allocator does not hold: CUDA context, libraries, NCCL's buffers."""
    software = case.software
    total: Array = software.context_bytes + communicators(case) * software.communicator_bytes
    return total


@once
def communicators(case: Case) -> Array:
    """Count the groups that a rank sums or gathers over: tensor, context, pipeline, data parallel.

    NCCL has buffers of its own for each, and makes them with the first message ("More communicators
    = more memory used", NVIDIA/nccl issue 986). That of experts counts by its peers: messages from
    each to each have channels of their own, with up to eight ranks half as many bytes for each peer
    as a ring and a tree have for all (issue 1685: 3.3 GB for seven peers on H100).
    """
    mesh = case.mesh
    groups = (mesh.tp, mesh.cp, mesh.pp, mesh.replicas, mesh.instances)
    total: Array = 0.5 * (np.minimum(mesh.ep, 8) - 1)
    return sum((flag(np.asarray(size) > 1) for size in groups), start=total)


def passing_bytes(case: Case, stage: Stage) -> Array:
    """Compute what forward and backward passes have at their peak besides weights and state."""
    logits = logit_bytes(case) * stage.loss
    passing: Array = activation_bytes(case, stage) + logits + passing_buffers(case, stage)
    return passing


def passing_buffers(case: Case, stage: Stage) -> Array:
    """Compute what passes in a layer's backward pass, or at the loss where that is more."""
    loss = loss_bytes(case, stage)
    scores = stage.loss * score_gradient_bytes(case) - logit_bytes(case) * stage.loss
    more: Array = np.maximum(loss, scores)
    return transient_bytes(case, stage) + message_bytes(case) + more


def copied_bytes(case: Case, stage: Stage) -> Array:
    """Compute what the optimizer copies of its shard's gradients while it runs."""
    if not np.any(case.mesh.gradient_copy):
        return 0.0
    copies: Array = case.mesh.gradient_copy * _divided(held_weights(case, stage), shards(case, 1))
    return copies


def reserved_bytes(case: Case, capacity_bytes: Array) -> Array:
    """Compute what the allocator holds on the fullest GPU, with what lies outside of it.

    That is what `nvidia-smi` shows, and not what a run needs: PyTorch's allocator keeps freed
    blocks, and gives them back only where an allocation fails (c10/cuda/CUDACachingAllocator.cpp,
    release_cached_blocks). So one large copy of gradients comes on top of freed activations, until
    the GPU is full.
    """
    held = [reserved_on_stage(case, stage, capacity_bytes) for stage in stages_that_matter(case)]
    return np.maximum(np.maximum(held[0], held[1]), held[2])


def reserved_on_stage(case: Case, stage: Stage, capacity_bytes: Array) -> Array:
    """Compute the same on one GPU of `stage`."""
    found = stage_memory(case, stage)
    passing = found.activations + found.logits + found.buffers
    cached = case.software.cached * passing
    copies = copied_bytes(case, stage)
    # of copies and all else `passing` has the larger
    beside = case.software.flat_copies * np.minimum(copies, passing_bytes(case, stage))
    return np.minimum(found.total + cached + beside, np.maximum(found.total, capacity_bytes))


def held_weights(case: Case, stage: Stage) -> Weights:
    """Count parameters of a stage; a tied table counts once where both ends are on one GPU."""
    return stage_weights(case, stage.blocks, stage.embedding, stage.loss)


def shards(case: Case, least_zero: int) -> tuple[Array, Array]:
    """Count the ranks that divide dense and routed state at this ZeRO stage and above.

    Megatron's optimizer groups include context parallel ranks (ZeRO-1: Rajbhandari et al. 2020,
    arXiv 1910.02054, section 5.1); experts are held by fewer replicas. There may be several
    instances of that optimizer (parallel_state.py, intra_partial_data_parallel_size).
    """
    mesh = case.mesh
    on = np.asarray(mesh.zero) >= least_zero
    size = np.where(np.asarray(mesh.shard_gpus) > 0, mesh.shard_gpus, mesh.replicas)
    dense, routed = size / mesh.instances, mesh.expert_replicas / mesh.instances
    return np.where(on, dense, 1), np.where(on, routed, 1)


def _divided(weights: Weights, by: tuple[Array, Array]) -> Array:
    return weights.dense / by[0] + weights.routed / by[1]


def low_weights(case: Case, stage: Stage) -> Weights:
    """Count parameters of layers, whose products are in 8 or 4 bits where any are.

    Norms and routers among them are not worth a count of their own.
    """
    own, ahead = block_weights(case, stage.blocks), prediction_weights(case)
    return Weights(
        own.dense + stage.loss * ahead.dense,
        own.routed + stage.loss * ahead.routed,
    )


def weight_bytes(case: Case, weights: Weights, low: Weights) -> Array:
    """Compute 16-bit weights (ZeRO-3: a share), and forms of `low` for 8-bit and 4-bit products.

    With fp8 parameter gather these forms take the place of 16 bits.
    """
    share, of_low = _divided(weights, shards(case, 3)), _divided(low, shards(case, 3))
    more = case.mesh.low_bytes - case.mesh.low_only * case.mesh.element_bytes
    return case.mesh.element_bytes * share + more * of_low


def gradient_bytes(case: Case, weights: Weights) -> Array:
    """Compute accumulated gradients (ZeRO-2 and 3: a share of them)."""
    return case.mesh.gradient_bytes * _divided(weights, shards(case, 2))


def optimizer_bytes(case: Case, weights: Weights) -> Array:
    """Main copy and two moments of Adam (ZeRO-1 and above: a share; offloaded: none here).

    Rajbhandari et al. 2020 (arXiv 1910.02054), section 3.1: K = 12 bytes per parameter.
    """
    state = case.software.main_bytes * _divided(weights, shards(case, 1))
    return np.where(np.asarray(case.mesh.offload) > 0, 0.0, state)


@once
def outside_bytes(case: Case) -> Array:
    """Compute one tensor [T, h] outside the tensor parallel region: e T h, / t with SP."""
    return case.mesh.element_bytes * split_tokens(case) * case.shape.hidden


@once
def outside_pair(case: Case) -> Array:
    """Compute what a norm and the linear layer behind it keep of [T, h], / t with SP.

    The norm keeps its input, the layer what the norm put out, in 8 or 4 bits where its product is
    (TransformerEngine: module/layernorm_linear.py, `ln_out`, of which one layout is saved).
    """
    mesh, split = case.mesh, split_tokens(case)
    whole = np.asarray(case.software.gathered_inputs) > 0
    products = mesh.kept_input_bytes * np.where(whole, tokens(case), split)
    return (mesh.element_bytes * split + products) * case.shape.hidden


@dataclass(frozen=True)
class Kept:
    """Bytes that one block keeps, and how many of them selective recomputation drops."""

    whole: Array
    again: Array

    def left(self, case: Case) -> Array:
        selective = np.asarray(case.mesh.recompute) == RECOMPUTE_SELECTIVE
        return self.whole - np.where(selective, self.again, 0.0)


@once
def attention_kept(case: Case) -> Kept:
    """One attention block: eq. 2's 11 s b h (and 5 a s^2 b when unfused), plus masks.

    Selective recomputation of core attention drops the s x s part (eq. 6), of the
    up-projections of latent attention their outputs. In 8 and 4 bits queries, keys, values and
    the output of attention stay in 16, and the projection behind keeps that same output; with
    delayed scaling it keeps 8 bits of it besides (megatron-core: transformer/attention.py,
    set_save_original_input). The two down-projections of latent attention each keep their input.
    """
    shape = case.shape
    plain = shape.heads * (shape.qk_dim + shape.value_dim)
    grouped = shape.kv_heads * (shape.qk_dim + shape.value_dim) * key_share(case)
    turned = case.software.turned_copy * shape.rope
    copies = turned * (shape.heads + shape.kv_heads) * shape.qk_dim
    latent = shape.heads * (2 * shape.qk_dim + 2 * shape.value_dim)
    kept = case.mesh.kept_input_bytes
    rows = case.mesh.element_bytes * tokens(case)
    mla = np.asarray(shape.mla) > 0
    inside = rows * np.where(mla, latent, plain + grouped + copies) / case.mesh.tp
    ranks = (case.mesh.element_bytes + kept) * (shape.q_rank + shape.kv_rank)
    ranks = ranks + case.mesh.element_bytes * shape.rope_dim
    inside = inside + tokens(case) * np.where(mla, ranks, 0.0)
    output = shape.heads * shape.value_dim / case.mesh.tp
    inside = inside + case.mesh.projected_bytes * tokens(case) * output
    second = np.where(mla & (np.asarray(case.mesh.input_bytes) > 0), kept, 0.0)
    inside = inside + second * split_tokens(case) * shape.hidden
    core = core_attention_bytes(case)
    up = rows * np.where(mla, shape.heads * 2 * shape.qk_dim, 0.0) / case.mesh.tp
    again = case.mesh.again_core_attn * core + case.mesh.again_mla_up_proj * up
    outside = outside_pair(case) + _mask(case) * outside_bytes(case)
    return Kept(outside + inside + core, again)


@once
def _mask(case: Case) -> Array:
    """Compute a dropout mask on [T, h]: one byte for every two of the tensor."""
    return np.where(np.asarray(case.shape.dropout) > 0, 0.5, 0.0)


@once
def core_attention_bytes(case: Case) -> Array:
    """Flash: one fp32 number per head and token. Unfused: eq. 2's 5 a s^2 b.

    Without dropout the product with V multiplies the softmax's own result: 2 a s^2 b. A softmax
    in fp32 (`softmax_bytes`) keeps that besides the 16 bits that are multiplied.
    """
    shape, mesh = case.shape, case.mesh
    heads = shape.heads / mesh.tp
    fused = 4.0 * tokens(case) * heads
    dropped, own = np.asarray(shape.dropout) > 0, np.asarray(case.software.softmax_bytes)
    result = np.where(own > 0, own, np.where(dropped, mesh.element_bytes, 0.0))
    per_pair = mesh.element_bytes + result + np.where(dropped, 1.0, 0.0)
    unfused = per_pair * tokens(case) * shape.seq * key_share(case) * heads
    return np.where(np.asarray(case.software.flash) > 0, fused, unfused)


@once
def mlp_kept(case: Case) -> Kept:
    """One MLP block: eq. 2's 19 s b h for f = 4h; recomputed, its input alone stays.

    The input of the activation function stays in 16 bits (megatron-core keeps 8 with
    activation_func_fp8_input_store, which no recipe sets); its output has the product's format.
    """
    shape, mesh = case.shape, case.mesh
    copies = case.software.gate_copy * shape.gated
    inside = tokens(case) * _activated(case, shape.mlp_width + copies) * shape.ffn / mesh.tp
    whole = outside_pair(case) + _mask(case) * outside_bytes(case) + inside
    return Kept(whole, mesh.again_mlp * (whole - outside_bytes(case)))


def _activated(case: Case, inputs: Array) -> Array:
    """Compute bytes per unit of an MLP's width: `inputs` of its activation function, one output."""
    return case.mesh.element_bytes * inputs + case.mesh.kept_input_bytes


@once
def moe_kept(case: Case) -> Kept:
    """One MoE block: routed rows before and inside the experts, shared experts, scores.

    The router keeps what the norm put out in 16 bits, and a shared expert the same; with delayed
    scaling that expert has 8 bits of its own (megatron-core: moe/shared_experts.py).
    """
    shape, mesh = case.shape, case.mesh
    kept, part = mesh.kept_input_bytes, shape.expert_ffn / mesh.expert_tp
    own = mesh.imbalance * routed_rows(case)
    rows = own * (kept * shape.expert_hidden + _activated(case, shape.mlp_width) * part)
    active = kept * own * part
    shared = tokens(case) * _activated(case, shape.mlp_width) * shape.shared_ffn / mesh.tp
    has_shared = np.where(np.asarray(shape.shared_ffn) > 0, mesh.projected_bytes, 0.0)
    shared = shared + has_shared * split_tokens(case) * shape.hidden
    scores = 4.0 * 3 * split_tokens(case) * shape.experts
    whole = 2 * outside_bytes(case) + rows + shared + scores
    again = np.maximum(mesh.again_moe * (whole - outside_bytes(case)), mesh.again_moe_act * active)
    return Kept(whole, again)


@once
def mamba_kept(case: Case) -> Kept:
    """One Mamba-2 block: projections, convolution, gate and scan inputs."""
    shape, mesh = case.shape, case.mesh
    inner = (4 * shape.mamba_inner + 4 * shape.mamba_groups * shape.mamba_state) / mesh.tp
    output = mesh.kept_input_bytes * shape.mamba_inner / mesh.tp
    inside = tokens(case) * (mesh.element_bytes * inner + output)
    return Kept(outside_pair(case) + inside, 0.0)


@once
def decoder_kept(case: Case) -> Kept:
    """One layer behind an encoder: two attentions and an MLP, by what each of them reads."""
    own = written(case)
    parts = (attention_kept(own), attention_kept(across(case)), mlp_kept(own))
    norms = 3 * case.software.norm_bytes * split_tokens(own) * case.shape.hidden
    return Kept(sum((p.whole for p in parts), start=norms), sum(p.again for p in parts))


def blocks_bytes(case: Case, blocks: Blocks, *, whole: bool = False) -> Array:
    """Compute one microbatch in a group of layers; `whole`: without recomputation."""
    kinds = (
        (blocks.attention, attention_kept),
        (blocks.mlp, mlp_kept),
        (blocks.moe, moe_kept),
        (blocks.mamba, mamba_kept),
        (blocks.decoder, decoder_kept),
    )
    parts = ((n, kept_by(case)) for n, kept_by in kinds if np.any(n))
    total = sum((n * (kept.whole if whole else kept.left(case)) for n, kept in parts), start=0.0)
    outputs = np.asarray(case.mesh.recompute) == RECOMPUTE_SELECTIVE
    dropped = np.where(outputs, case.mesh.again_layernorm, 0.0) * (0.0 if whole else 1.0)
    dropped = dropped * case.mesh.kept_input_bytes
    each = split_tokens(case) * case.shape.hidden
    return total + blocks.count * (case.software.norm_bytes - dropped) * each


def kept_bytes(case: Case, blocks: Blocks) -> Array:
    """Compute what one microbatch in a group of layers keeps for the backward pass.

    Full recomputation keeps the input of each layer (Korthikanti et al., section 5).
    """
    shorter = blocks.decoder * (1 - tokens(written(case)) / tokens(case))
    inputs = case.software.checkpoint_copies * (blocks.layers - shorter) * outside_bytes(case)
    full = np.asarray(case.mesh.recompute) == RECOMPUTE_FULL
    share = case.mesh.full_share_of(blocks.layers)
    plain = blocks_bytes(case, blocks)
    return np.where(full, share * inputs + (1 - share) * plain, plain)


def microbatches_in_flight(case: Case, stage: Stage) -> Array:
    """Count the microbatches whose activations wait for their backward pass.

    1F1B: min(p - stage, m) microbatches (Narayanan et al. 2021, section 2.2.1). Interleaved:
    2 (p - stage - 1) + (v - 1) p + 1 chunks (megatron/core/pipeline_parallel/schedules.py,
    get_pp_rank_microbatches); on stage 0 the factor 1 + (p - 1) / (p v) of Korthikanti et al.,
    section 4.2.3. The schedules ZB-1p and ZB-2p are searched under a limit of p and 2 p
    microbatches, the same for all stages, which all of them use up (Qi et al. 2023, arXiv
    2401.10241, section 5.1 and table 4).
    """
    mesh = case.mesh
    plain = np.minimum(mesh.pp - stage.index, mesh.accumulation)
    limit = np.minimum(case.software.zero_bubble * mesh.pp, mesh.accumulation)
    plain = np.where(np.asarray(case.software.zero_bubble) > 0, limit, plain)
    chunks = 2 * (mesh.pp - stage.index - 1) + (mesh.vpp - 1) * mesh.pp + 1
    chunks = np.minimum(chunks, mesh.accumulation * mesh.vpp)
    return np.where(np.asarray(mesh.vpp) > 1, chunks / mesh.vpp, plain)


def activation_bytes(case: Case, stage: Stage) -> Array:
    """Compute all activations in flight, and the one layer that is being recomputed.

    Of the layers that wait on the host one is on its way. Deferred weight gradients of the output
    layer keep its input and the gradient of its output (megatron-core: tensor_parallel/layers.py,
    wgrad_deferral_limit).
    """
    kept = kept_bytes(case, stage.blocks)
    layers = np.maximum(stage.blocks.layers, 1e-9)
    working = np.maximum(blocks_bytes(case, stage.blocks, whole=True) - kept, 0.0) / layers
    if np.any(stage.blocks.decoder):
        # an encoder's layer is larger than one of the shorter text, and behind the logits' time
        one = Blocks(1.0, 1.0, 1.0, 0.0, 0.0)
        encoder = np.maximum(blocks_bytes(case, one, whole=True) - kept_bytes(case, one), 0.0)
        encoder = encoder + flag(encoder > 0) * widest_bytes(case)
        working = np.where(np.asarray(stage.blocks.decoder) > 0, encoder, working)
    before = case.software.loss_first * logit_bytes(case) * stage.loss
    working = np.maximum(working - before, 0.0)
    start = stage.embedding * np.minimum(case.mesh.pp, case.mesh.accumulation)
    ends = (start + 2 * stage.loss) * outside_bytes(case)
    extra = stage.loss * predicted_bytes(case) if np.any(case.shape.mtp_layers) else 0.0
    gradient = case.mesh.element_bytes * tokens(case) * case.shape.vocab / case.mesh.tp
    heads = (1 + case.shape.mtp_layers) * stage.loss
    deferred = heads * case.mesh.waiting_outputs * (outside_bytes(case) + gradient)
    here = kept - (away_bytes(case, stage.blocks) if np.any(case.mesh.kept_on_host) else 0.0)
    in_flight = microbatches_in_flight(case, stage) * here
    late: Array = 0.0
    if np.any(case.software.zero_bubble):
        late = np.maximum(weight_gradient_bytes(case, stage.blocks) - kept, 0.0)
        late = np.where(np.asarray(case.software.zero_bubble) > 0, late, 0.0)
    total: Array = in_flight + working + ends + extra + deferred + late
    return total


def weight_gradient_bytes(case: Case, blocks: Blocks) -> Array:
    """Compute what one microbatch keeps until its weight gradients are computed.

    Zero-bubble schedules compute them later than the gradients of activations: inputs of linear
    layers and gradients of their outputs wait (Qi et al. 2023, table 1: M_W = 32 s b h). Where that
    is more than the forward pass keeps, as with recomputation, one microbatch has it.
    """
    shape, mesh = case.shape, case.mesh
    low, wide = mesh.kept_input_bytes, mesh.element_bytes
    whole = (low + wide) * split_tokens(case) * shape.hidden  # of [T, h]: one input, one gradient
    width = shape.heads * shape.qk_dim + shape.kv_heads * (shape.qk_dim + shape.value_dim)
    output = shape.heads * shape.value_dim
    attention = whole + tokens(case) * (wide * width + low * output) / mesh.tp
    inside = wide * shape.mlp_width + low
    mlp = whole + tokens(case) * inside * shape.ffn / mesh.tp
    rows = mesh.imbalance * routed_rows(case)
    each = (low + wide) * shape.expert_hidden + inside * shape.expert_ffn / mesh.expert_tp
    shared = tokens(case) * inside * shape.shared_ffn / mesh.tp
    total: Array = (
        blocks.attention * attention
        + blocks.mlp * mlp
        + blocks.moe * (rows * each + shared + whole)
    )
    return total


@once
def predicted_bytes(case: Case) -> Array:
    """Compute what token prediction layers keep."""
    mesh = replace(case.mesh, full_layers=0, full_share=case.mesh.full_share_of_predicted)
    return kept_bytes(replace(case, mesh=mesh), prediction_blocks(case))


@once
def host_bytes(case: Case) -> Array:
    """Compute what one microbatch of the offloaded layers keeps in the host's memory."""
    blocks = all_blocks(case)
    layers = np.minimum(case.mesh.kept_on_host, blocks.layers)
    held: Array = layers * kept_bytes(case, blocks) / np.maximum(blocks.layers, 1e-9)
    return held


def away_bytes(case: Case, blocks: Blocks) -> Array:
    """Compute what offloaded layers do not keep on the GPU: all of them but one on its way."""
    layers = np.maximum(np.minimum(case.mesh.kept_on_host, blocks.layers) - 1, 0.0)
    left: Array = layers * kept_bytes(case, blocks) / np.maximum(blocks.layers, 1e-9)
    return left


@once
def logit_bytes(case: Case) -> Array:
    """Logits at the peak: the fp32 softmax that backward turns into the gradient, in place."""
    shape, mesh = case.shape, case.mesh
    heads = 1 + shape.mtp_layers
    more = np.where(np.asarray(mesh.tp) > 1, case.software.split_logit_bytes, 0)
    ranks = np.where(np.asarray(case.software.gathered_logits) > 0, 1, mesh.tp)
    rows = tokens(written(case))
    return heads * (case.software.logit_bytes + more) * rows * shape.vocab / ranks


def transient_bytes(case: Case, stage: Stage) -> Array:
    """Gradients that exist for a moment: of one layer's weights and of the widest activation.

    With gradient accumulation fused into the product TransformerEngine and megatron-core still
    return a tensor of each weight's shape to autograd (transformer_engine/pytorch/module/base.py,
    get_dummy_wgrad, which keeps one per shape; megatron/core/tensor_parallel/layers.py,
    LinearWithGradAccumulationAndAsyncCommunication.backward), in the weight's type.
    """
    shape, mesh, element = case.shape, case.mesh, case.mesh.element_bytes
    own = block_weights(case, stage.blocks)
    experts = np.maximum(shape.experts / mesh.ep, 1)  # one placeholder for all of one shape
    layers = np.maximum(stage.blocks.layers, 1e-9)
    single = (own.dense + own.routed / experts) / layers
    whole = (own.dense + own.routed) / layers
    gathered = np.asarray(mesh.zero) >= 3
    layer = np.where(gathered, 2 * whole, case.software.dummy_gradients * single)
    wide = np.maximum(widest_bytes(case), score_gradient_bytes(case))
    return element * layer + np.where(np.asarray(stage.loss) > 0, 0.0, wide)


@once
def widest_bytes(case: Case) -> Array:
    """Compute the widest activation of a layer: that of its MLP, or its output."""
    shape, mesh = case.shape, case.mesh
    widest = np.maximum(shape.mlp_width * shape.ffn / mesh.tp, shape.hidden / mesh.tp)
    return mesh.element_bytes * tokens(case) * widest


@once
def score_gradient_bytes(case: Case) -> Array:
    """Compute gradients of one layer's s x s matrices that are there at once; flash: none.

    Fused kernels of the softmax put its gradient in place of the product's (Megatron-LM and
    TransformerEngine: scaled_upper_triang_masked_softmax, "backward pass is completely in-place");
    dropout makes one more. A softmax in fp32 has its own two beside that of the product.
    """
    mesh, software = case.mesh, case.software
    dropped = np.asarray(case.shape.dropout) > 0
    own = 2.0 * np.asarray(software.softmax_bytes)
    each = mesh.element_bytes * (1.0 + dropped) * np.where(own > 0, 0.0, 1.0) + own
    pairs = tokens(case) * case.shape.seq * case.shape.heads / mesh.tp
    # fused kernels return that of scores where positions are learned (torch, attention.cpp)
    fused = case.shape.score_gradients * mesh.element_bytes * pairs
    return np.where(np.asarray(software.flash) > 0, fused, each * pairs)


def loss_bytes(case: Case, stage: Stage) -> Array:
    """Compute what is there beside fp32 logits: a placeholder of the output matrix's gradient.

    megatron-core's caller of the loss has the 16-bit logits while their fp32 form is made; the
    placeholder is there when that form has become a 16-bit gradient (models/gpt/gpt_model.py,
    tensor_parallel/cross_entropy.py). Two of Megatron-LM's functional tests print both
    (gpt3_7b_tp1_pp4_memory_speed and gpt3_7b_tp4_pp1_memory_speed: 6 bytes per logit).
    """
    software, element = case.software, case.mesh.element_bytes
    table = software.dummy_gradients * element * table_weights(case)
    logits = tokens(written(case)) * case.shape.vocab / case.mesh.tp
    narrow = np.where(np.asarray(software.narrow_logits) > 0, element * logits, 0.0)
    later = narrow + table - np.where(narrow > 0, software.logit_bytes * logits, 0.0)
    return stage.loss * np.maximum(narrow, later)


@once
def message_bytes(case: Case) -> Array:
    """Receive buffers of the pipeline and the gathered input of a column-parallel layer."""
    mesh = case.mesh
    pipeline = np.where(np.asarray(mesh.pp) > 1, 2 * outside_bytes(case), 0.0)
    sequence = np.asarray(mesh.sequence_parallel) > 0
    whole = mesh.element_bytes * tokens(case) * case.shape.hidden
    return pipeline + np.where(sequence, whole, 0.0)
