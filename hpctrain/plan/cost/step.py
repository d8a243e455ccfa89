"""Compute the seconds of one optimizer step and their parts.

Belongs here: one microbatch in the first, a middle and the last pipeline stage, the pipeline's
schedule, data parallel traffic, the optimizer, straggling. Does not belong here: what a single
microbatch costs in a block (`blocks`), bytes (`memory`).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace

import numpy as np

from hpctrain.plan.cost import blocks
from hpctrain.plan.cost import blocks as block
from hpctrain.plan.cost.blocks import Passes, output_gradient, split_tokens
from hpctrain.plan.cost.case import RECOMPUTE_FULL, RECOMPUTE_SELECTIVE, Array, Case, Mask, flag
from hpctrain.plan.cost.memory import host_bytes
from hpctrain.plan.cost.weights import (
    Blocks,
    Weights,
    all_blocks,
    first_blocks,
    later_blocks,
    prediction_blocks,
    weights_of,
)

# Sorting tokens by expert and back takes as many kernels as the products of so many experts.
SORTING_EXPERTS = 24
# Each product in 8 bits, an expert's too, has kernels besides that quantise its operands, and more
# host code.
LOW_LAUNCHES = 1.5


@dataclass(frozen=True)
class Turn:
    """One microbatch in a stage, forward and backward; messages are what does not hide."""

    forward: Array
    backward: Array
    again: Array
    tensor: Array
    context: Array
    experts: Array

    @property
    def total(self) -> Array:
        return self.forward + self.backward + self.again + self.tensor + self.context + self.experts

    @property
    def parts(self) -> tuple[Array, ...]:
        there = (self.forward, self.backward, self.again)
        return (*there, self.tensor, self.context, self.experts)

    def __add__(self, other: Turn) -> Turn:
        return Turn(*map(operator.add, self.parts, other.parts))

    def times(self, factor: Array) -> Turn:
        return Turn(*(part * factor for part in self.parts))


@dataclass(frozen=True)
class Stages:
    """The slowest stage, and all stages together."""

    slowest: Turn
    everything: Array  # seconds of one microbatch in all stages
    last_backward: Array  # backward of one microbatch in the slowest stage
    first_forward: Array
    messages: Array = 0.0  # seconds in which the slowest stage exchanges one microbatch


def stages_of(case: Case, exchange: Array = 0.0) -> Stages:
    """Compute the times of the stages of every case.

    `exchange`: seconds in which two neighbours exchange an activation and a gradient, both ways at
    once. A stage does so with each neighbour, and the ends of a pipeline have one (megatron-core:
    pipeline_parallel/schedules.py, send_forward_recv_backward); the chunks of an interleaved one
    are a ring. So the output layer slows a pipeline down by less than it takes itself.
    """
    mesh = case.mesh
    kinds = _Shares.of(case) if np.any(mesh.full_layers) else _Kinds.of(case)
    start, end = kinds.start, kinds.end
    first = kinds.turn(first_blocks(case)) + start
    middle = kinds.turn(later_blocks(case, mesh.layers_middle))
    last = kinds.turn(later_blocks(case, mesh.layers_last)) + end
    whole = kinds.everything(all_blocks(case)) + start + end
    alone = np.asarray(mesh.pp) == 1
    inner = 2 * mesh.vpp * exchange
    outer = np.where(np.asarray(mesh.vpp) > 1, inner, exchange)
    outermost = _where(first.total >= last.total, first, last)
    within = np.logical_and(np.asarray(mesh.pp) > 2, middle.total + inner > outermost.total + outer)
    slowest = _where(alone, whole, _where(within, middle, outermost))
    messages = np.where(alone, 0.0, np.where(within, inner, outer))
    backward = slowest.backward + slowest.again
    return Stages(slowest, whole.total, backward, slowest.forward, messages)


def _where(condition: Mask, yes: Turn, no: Turn) -> Turn:
    return Turn(*(np.where(condition, a, b) for a, b in zip(yes.parts, no.parts, strict=True)))


@dataclass(frozen=True)
class _Kinds:
    """One block of each kind, and the ends of the model."""

    case: Case
    attention: Turn
    mlp: Turn
    moe: Turn
    mamba: Turn
    decoding: Turn
    adapters: Turn
    start: Turn
    end: Turn

    @classmethod
    def of(cls, case: Case) -> _Kinds:
        nothing = Turn(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        mamba_turn, decoder, adapters = nothing, nothing, nothing
        own = block.written(case)
        if np.any(case.shape.decoder_blocks):
            decoder = _attention_turn(own) + _attention_turn(block.across(case)) + _mlp_turn(own)
        if np.any(case.shape.mamba_blocks):
            mamba = block.mamba(case)
            again, messages = _again(case, mamba, 0.0)
            mamba_turn = _plain(case, mamba, again) + Turn(0.0, 0.0, 0.0, messages, 0.0, 0.0)
        if np.any(case.shape.adapters):
            passes = block.adapters(case)
            adapters = _plain(case, passes, _again(case, passes, 0.0)[0])
        moe_turn = _moe_turn(case) if np.any(case.shape.moe_blocks) else nothing
        plain_turns = (_attention_turn(case), _mlp_turn(case), moe_turn, mamba_turn)
        each = (*plain_turns, decoder, adapters)
        head = _plain(own, block.output_layer(own), 0.0)
        share = case.mesh.waiting_outputs / case.mesh.accumulation
        waiting = share * block.output_gradient(own)
        head = replace(head, backward=head.backward - waiting)
        plain = cls(case, *each, head, head)
        ahead = plain.turn(prediction_blocks(case))
        predicted = ahead + head.times(1 + case.shape.mtp_layers)
        start = _plain(case, block.embedding(case), 0.0)
        return cls(case, *each, start, predicted)

    def everything(self, blocks: Blocks) -> Turn:
        """Add up all stages."""
        return self.turn(blocks)

    def turn(self, blocks: Blocks) -> Turn:
        """Add up a group of layers, and what the GPU waits for the host that launches them."""
        busy = (
            self.attention.times(blocks.attention)
            + self.mlp.times(blocks.mlp)
            + self.moe.times(blocks.moe)
            + self.mamba.times(blocks.mamba)
            + self.decoding.times(blocks.decoder)
            + self.adapters.times(blocks.layers)
        )
        host, behind_sizes = launch_seconds(self.case, blocks)
        full = np.asarray(self.case.mesh.recompute) == RECOMPUTE_FULL
        again = np.where(full, self.case.mesh.full_share, 0.0) * host
        messages = (busy.tensor + busy.experts) / 2
        there = waiting_seconds(busy.forward + messages + busy.context / 3, host)
        behind = busy.backward + busy.again + messages + busy.context * 2 / 3
        back = waiting_seconds(behind, host + again)
        there, back = there + behind_sizes, back + behind_sizes
        return busy + Turn(there, back, 0.0, 0.0, 0.0, 0.0)


def launch_seconds(case: Case, blocks: Blocks) -> tuple[Array, Array]:
    """Compute how long the host takes to launch one pass of a group of layers: (ahead, late).

    An MoE block sorts tokens, and starts the products of its experts one by one: late, as the host
    waits for the numbers of their tokens, unless these are fixed.
    """
    software, own = case.software, np.maximum(case.shape.experts / case.mesh.ep, 1)
    kernels = np.where(np.asarray(case.mesh.low) > 0, LOW_LAUNCHES, 1.0)
    layers = kernels * software.launched_layers * software.layer_overhead * blocks.layers
    each = kernels * software.launched_experts * software.expert_overhead * (SORTING_EXPERTS + own)
    known = np.asarray(software.known_sizes) > 0
    experts = each * blocks.moe
    return layers + np.where(known, experts, 0.0), np.where(known, 0.0, experts)


def waiting_seconds(busy: Array, host: Array) -> Array:
    """Compute how long a GPU that is busy for a time waits for its host, which launches ahead.

    The longer of the two counts; where they are alike, kernels shorter than their launch show even
    if the whole is not: the norm of order 4, between one after the other (1) and the longer one
    alone (infinite).
    """
    squares = np.asarray(busy) ** 2, np.asarray(host) ** 2
    together = np.sqrt(np.sqrt(squares[0] ** 2 + squares[1] ** 2))  # the norm of order 4
    return np.where(np.asarray(host) > 0, together - busy, 0.0)


@dataclass(frozen=True)
class _Shares:
    """The same where stages compute a number of layers again, each its own share of them.

    A stage's times are linear in that share: `nothing` is with none, `layers` with all of them.
    """

    case: Case
    nothing: _Kinds
    layers: _Kinds

    @classmethod
    def of(cls, case: Case) -> _Shares:
        none, every = (
            replace(case, mesh=replace(case.mesh, full_layers=0, full_share=share))
            for share in (0.0, 1.0)
        )
        return cls(case, _Kinds.of(none), _Kinds.of(every))

    @property
    def start(self) -> Turn:
        return self.nothing.start

    @property
    def end(self) -> Turn:
        share = self.case.mesh.full_share_of_predicted
        return _between(self.nothing.end, self.layers.end, share)

    def turn(self, blocks: Blocks) -> Turn:
        """Add up a group of layers."""
        share = self.case.mesh.full_share_of(blocks.layers)
        return _between(self.nothing.turn(blocks), self.layers.turn(blocks), share)

    def everything(self, blocks: Blocks) -> Turn:
        """Add up all stages."""
        mesh = self.case.mesh
        behind = np.maximum(mesh.pp - 2, 0)
        several = flag(np.asarray(mesh.pp) > 1)
        covered = (
            mesh.full_share_of(mesh.layers_first) * mesh.layers_first
            + behind * mesh.full_share_of(mesh.layers_middle) * mesh.layers_middle
            + several * mesh.full_share_of(mesh.layers_last) * mesh.layers_last
        )
        counted = np.minimum(1.0, covered / self.case.shape.layers)
        share = np.where(np.asarray(mesh.full_layers) > 0, counted, mesh.full_share)
        return _between(self.nothing.turn(blocks), self.layers.turn(blocks), share)


def _between(none: Turn, every: Turn, share: Array) -> Turn:
    return none.times(1 - share) + every.times(share)


def _plain(case: Case, passes: Passes, again: Array) -> Turn:
    """Make the turn of a block whose messages are those of tensor parallelism."""
    hidden = block.beside_weights(case, passes)
    messages = passes.forward_messages + passes.backward_messages - hidden
    return Turn(passes.forward, passes.backward, again, messages, 0.0, 0.0)


def _again(case: Case, passes: Passes, selective: Array) -> tuple[Array, Array]:
    """Compute (seconds, messages) of recomputing a block: fully, or `selective` seconds of it."""
    mode = np.asarray(case.mesh.recompute)
    full = mode == RECOMPUTE_FULL
    chosen = np.where(mode == RECOMPUTE_SELECTIVE, selective, 0.0)
    share = case.mesh.full_share
    messages = np.where(full, share * passes.forward_messages, 0.0)
    return np.where(full, share * passes.forward, chosen), messages


def _attention_turn(case: Case) -> Turn:
    mesh = case.mesh
    passes = block.attention(case)
    core = mesh.again_core_attn * block.core_attention(case).forward
    up = mesh.again_mla_up_proj * block.latent_up(case).forward
    up = up * flag(np.asarray(case.shape.mla) > 0)
    norm = mesh.again_layernorm * block.norm(case).forward
    again, messages = _again(case, passes, core + up + norm)
    turn = _plain(case, passes, again)
    ring = block.context_messages(case)
    return turn + Turn(0.0, 0.0, 0.0, messages, ring.forward_messages + ring.backward_messages, 0.0)


def _mlp_turn(case: Case) -> Turn:
    passes = block.mlp(case)
    selective = np.where(
        np.asarray(case.mesh.again_mlp) > 0,
        passes.forward,
        case.mesh.again_layernorm * block.norm(case).forward,
    )
    again, messages = _again(case, passes, selective)
    return _plain(case, passes, again) + Turn(0.0, 0.0, 0.0, messages, 0.0, 0.0)


def _moe_turn(case: Case) -> Turn:
    mesh, passes, sent = case.mesh, block.moe(case), block.dispatch_messages(case)
    activation = mesh.again_moe_act * block.expert_activation(case).forward
    part = activation + mesh.again_layernorm * block.norm(case).forward
    everything = np.asarray(mesh.again_moe) > 0
    again, _ = _again(case, passes, np.where(everything, passes.forward, part))
    mode = np.asarray(mesh.recompute)
    twice = np.logical_and(mode == RECOMPUTE_SELECTIVE, everything)
    turns = 1 + np.where(mode == RECOMPUTE_FULL, mesh.full_share, 1.0 * twice)
    # the shared expert's time hides messages of its own pass
    shared, beside = block.shared_expert(case), case.software.shared_overlap
    there = np.maximum(sent.forward_messages - beside * shared.forward, 0.0)
    back = np.maximum(sent.backward_messages - beside * shared.backward, 0.0)
    messages = there * turns + back
    return Turn(passes.forward, passes.backward, again, 0.0, 0.0, messages)


# -- The step: schedule, data parallel traffic, optimizer ----------------------------------------


# Bytes that Adam moves per parameter: fp32 gradient, main weight and two moments in; the last
# three out; the 16-bit weight out.
ADAM_TRAFFIC = 30.0
# Of a microbatch's time: two of three products are those of the backward pass.
BACKWARD_SHARE = 2 / 3


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step; the parts add up to `total`."""

    compute: Array  # forward and backward of all microbatches of the slowest stage
    recompute: Array
    tensor_messages: Array
    context_messages: Array
    expert_messages: Array
    pipeline_messages: Array
    bubble: Array
    data_messages: Array
    optimizer: Array
    overhead: Array
    straggling: Array
    activation_messages: Array = 0.0  # copies to and from the host that compute does not hide

    @property
    def total(self) -> Array:
        return sum((getattr(self, name) for name in type(self).__dataclass_fields__), start=0.0)


def step_seconds(case: Case) -> StepTime:
    """Compute the seconds of one step of every case."""
    transfer, turns = transfer_seconds(case), case.mesh.accumulation
    stages, weights = stages_of(case, shown_transfer(case, transfer)), weights_of(case)
    slow = stages.slowest
    bubble = bubble_seconds(case, stages, transfer)
    smooth = StepTime(
        compute=turns * (slow.forward + slow.backward) + late_gradients(case, bubble),
        recompute=turns * slow.again,
        tensor_messages=turns * slow.tensor,
        context_messages=turns * slow.context,
        expert_messages=turns * slow.experts,
        pipeline_messages=turns * stages.messages,
        bubble=bubble,
        data_messages=data_messages(case, weights, stages),
        optimizer=optimizer_seconds(case, weights),
        overhead=case.software.step_overhead * layers_of_rank(case) + 0.0 * slow.forward,
        straggling=0.0,
        activation_messages=turns * host_copies(case, stages),
    )
    return replace(smooth, straggling=straggling_share(case) * smooth.total)


def layers_of_rank(case: Case) -> Array:
    """Count the layers of the fullest stage: each has weights of its own to update."""
    mesh = case.mesh
    return np.maximum(np.maximum(mesh.layers_first, mesh.layers_middle), mesh.layers_last)


def straggling_share(case: Case) -> Array:
    """Return how much longer than the mean the slowest of all ranks takes, as a share of a step.

    The largest of n draws of a normal distribution is sqrt(2 ln n) deviations above its mean
    (Gumbel 1958, Statistics of Extremes, section 4.2), and every step waits for it.
    """
    deviations: Array = np.sqrt(2 * np.log(np.maximum(1.0, case.mesh.gpus)))
    return case.machine.straggling * deviations


def late_gradients(case: Case, bubble: Array) -> Array:
    """Price deferred weight gradients of the output layer beyond the gap at the end of a step.

    The last stage is done with its last microbatch p - 1 backward passes before the first one, two
    thirds of the bubble, and computes them meanwhile (megatron-core:
    pipeline_parallel/schedules.py, finish_embedding_wgrad_compute).
    """
    heads = 1 + case.shape.mtp_layers
    waiting = case.mesh.waiting_outputs * heads * output_gradient(case)
    return np.maximum(waiting - BACKWARD_SHARE * bubble, 0.0)


def host_copies(case: Case, stages: Stages) -> Array:
    """Price copies of one microbatch's activations to the host and back beyond compute.

    TransformerEngine spreads the copies of the chosen layers over all layers (cpu_offload.py,
    layer_window_map), so that each pass hides as much as it lasts.
    """
    copied = host_bytes(case) / case.machine.host_bandwidth
    shown = np.maximum(copied - stages.first_forward, 0.0)
    return shown + np.maximum(copied - stages.last_backward, 0.0)


def bubble_seconds(case: Case, stages: Stages, transfer: Array) -> Array:
    """Compute the time of the other stages before and after the slowest one works, over vpp.

    (p - 1) / v microbatches for equal stages: Narayanan et al. 2021 (arXiv 2104.04473), section
    2.2. Zero-bubble schedules fill it with weight gradients: ZB-1p leaves a third, ZB-2p hardly
    any (Qi et al. 2023, arXiv 2401.10241, table 2).
    """
    mesh = case.mesh
    others = np.maximum(stages.everything - stages.slowest.total, 0.0) / mesh.vpp
    zero = np.asarray(case.software.zero_bubble)
    left = np.where(zero == 1, 1 / 3, np.where(zero == 2, 0.05, 1.0))
    fill = others + (mesh.pp - 1) * 2 * transfer
    return np.where(np.asarray(mesh.pp) > 1, fill * left, 0.0)


def shown_transfer(case: Case, transfer: Array) -> Array:
    """Price what no chunk hides of a message; between whole passes of a stage nothing hides."""
    interleaved = np.asarray(case.mesh.vpp) > 1
    hidden = np.where(interleaved, case.software.overlaps_stages * case.software.pp_overlap, 0.0)
    return transfer * (1 - hidden)


def transfer_seconds(case: Case) -> Array:
    """One activation [T, h] to the next stage; split over t with SP or scatter-gather.

    Scatter-gather: Narayanan et al. 2021, section 4.1.
    """
    mesh = case.mesh
    gathered = np.logical_and(
        np.asarray(case.software.scatter_gather) > 0, np.asarray(mesh.sequence_parallel) == 0
    )
    split = np.where(gathered, mesh.tp, 1)
    stride = mesh.tp * mesh.cp * np.where(np.asarray(mesh.pipeline_outside) > 0, mesh.dp, 1)
    sent = mesh.element_bytes * split_tokens(case) * case.shape.hidden / split
    return blocks.send_seconds(case, sent, stride)


def data_messages(case: Case, weights: Weights, stages: Stages) -> Array:
    """Price gradient reduction and parameter gathering that compute does not hide.

    Gradients can hide behind the backward pass of the last microbatch, parameters behind the
    first forward pass (megatron-core: overlap_grad_reduce, overlap_param_gather). Behind a pipeline
    ZeRO-2 too reduces gradients once a step (Llama 3, arXiv 2407.21783, section 3.3.2).
    """
    mesh, overlap = case.mesh, case.software.dp_overlap
    outside = np.where(np.asarray(mesh.pipeline_outside) > 0, 1, mesh.pp)
    dense = _data_seconds(case, weights.dense, mesh.replicas, mesh.tp * outside)
    routed = _data_seconds(
        case, weights.routed, mesh.expert_replicas, mesh.ep * mesh.expert_tp * outside
    )
    gradients, parameters = dense[0] + routed[0], dense[1] + routed[1]
    late = (np.asarray(mesh.pp) > 1) * np.asarray(case.software.late_sums)
    in_time = overlap * case.software.overlaps_gradients * (1 - late)
    ahead = overlap * case.software.overlaps_parameters
    hidden = np.minimum(in_time * gradients, in_time * stages.last_backward)
    hidden_gather = np.minimum(ahead * parameters, ahead * stages.first_forward)
    once = (gradients - hidden) + (parameters - hidden_gather)
    every = np.asarray(mesh.zero) + (np.asarray(mesh.pp) == 1) >= 3
    return np.where(every, sharded_messages(case, weights, stages), once)


def _data_seconds(case: Case, parameters: Array, size: Array, stride: Array) -> tuple[Array, Array]:
    """Price (gradient reduction, parameter gathering); an all-reduce is both at once.

    Of several instances of the optimizer the ranks of one scatter and gather
    (param_and_grad_buffer.py, start_grad_sync). With `whole_sums` gradients are reduced by an
    all-reduce although each rank updates its shard alone.
    """
    mesh = case.mesh
    size = np.where(parameters > 0, size, 1)  # a model without experts sends none
    each = np.where(np.asarray(mesh.summed_bytes) > 0, mesh.summed_bytes, mesh.gradient_bytes)
    copies = np.minimum(mesh.instances, size)  # instances sum the shards that they share
    size = size / copies
    shared = blocks.reduce_seconds(case, each * parameters / size, copies, stride * size)
    gradients = blocks.gather_seconds(case, each * parameters, size, stride)
    node = blocks.members_inside(case, size, stride)
    inside = blocks.gather_seconds(case, mesh.summed_inside * parameters, node, stride)
    gradients = np.maximum(gradients, inside)
    gathered = blocks.gather_seconds(case, mesh.gather_bytes * parameters, size, stride)
    sharded = np.asarray(mesh.zero) >= 1
    sums = np.where(sharded, 1 + np.asarray(mesh.whole_sums), 1) * gradients + shared
    return sums, np.where(sharded, gathered, gradients)


def sharded_messages(case: Case, weights: Weights, stages: Stages) -> Array:
    """ZeRO-2 and 3 (FSDP): traffic of every microbatch, beyond what its compute hides.

    ZeRO-3 gathers the weights forward and backward and reduces gradients each microbatch
    (Rajbhandari et al. 2020, arXiv 1910.02054, section 7.2.2).
    """
    mesh, software = case.mesh, case.software
    ahead = software.dp_overlap * software.overlaps_parameters
    in_time = software.dp_overlap * software.overlaps_gradients
    gather = _sharded_seconds(case, weights, mesh.element_bytes)
    reduce = _sharded_seconds(case, weights, mesh.gradient_bytes)
    third = np.asarray(mesh.zero) >= 3
    forward = np.where(third, gather, 0.0)
    backward = reduce + forward
    room, room_back = ahead * stages.first_forward, in_time * stages.last_backward
    shown = np.maximum(forward - room, (1 - ahead) * forward)
    shown_back = np.maximum(backward - room_back, (1 - in_time) * backward)
    return mesh.accumulation * (shown + shown_back) + np.where(third, 0.0, gather)


def _sharded_seconds(case: Case, weights: Weights, parameter_bytes: Array) -> Array:
    """Price one gathering or reduction of all weights of a rank over its shard group."""
    mesh = case.mesh
    size = np.where(np.asarray(mesh.shard_gpus) > 0, mesh.shard_gpus, mesh.replicas)
    dense = blocks.gather_seconds(case, parameter_bytes * weights.dense, size, mesh.tp)
    stride = mesh.ep * mesh.expert_tp
    routed = blocks.gather_seconds(
        case, parameter_bytes * weights.routed, mesh.expert_replicas, stride
    )
    whole = dense + np.where(np.asarray(weights.routed) > 0, routed, 0.0)
    return whole / case.software.sharding_efficiency


def optimizer_seconds(case: Case, weights: Weights) -> Array:
    """Price Adam: bound by memory, or by the host link when its state is offloaded.

    Muon has products, too. On NVMe the state is read and written besides, in turn with the update
    on the host.
    """
    mesh, machine = case.mesh, case.machine
    sharded = np.asarray(mesh.zero) >= 1
    own = weights.dense / np.where(sharded, mesh.replicas / mesh.instances, 1)
    own = own + weights.routed / np.where(sharded, mesh.expert_replicas / mesh.instances, 1)
    trainable = own * case.shape.trainable  # bytes of gradients and state are averages over all
    sent = mesh.gradient_bytes * own + mesh.element_bytes * trainable
    on_host = (
        sent / machine.host_bandwidth + ADAM_TRAFFIC * trainable / machine.host_memory_bandwidth
    )
    moved = (ADAM_TRAFFIC - 2 * mesh.saved_state) * trainable
    products = mesh.orthogonal_flops / (mesh.tp * mesh.pp) / machine.peak
    at_rest = products / machine.product_efficiency + moved / (
        machine.memory_bandwidth * machine.memory_efficiency
    )
    drives = 2 * case.software.main_bytes * own / machine.nvme_bandwidth
    away = on_host + np.where(np.asarray(mesh.offload) > 1, drives, 0.0)
    return np.where(np.asarray(mesh.offload) > 0, away, at_rest)
