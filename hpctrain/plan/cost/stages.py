"""Compute seconds of one microbatch in the first, a middle and the last pipeline stage.

Belongs here: adding up blocks, ends of the model and recomputation. Does not belong here: single
blocks (`blocks`), the schedule (`step`).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace

import numpy as np

from hpctrain.plan.cost import blocks as block
from hpctrain.plan.cost.blocks import Passes
from hpctrain.plan.cost.case import RECOMPUTE_FULL, RECOMPUTE_SELECTIVE, Array, Case, Mask, flag
from hpctrain.plan.cost.composition import (
    Blocks,
    all_blocks,
    first_blocks,
    later_blocks,
    prediction_blocks,
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
    adapters: Turn
    start: Turn
    end: Turn

    @classmethod
    def of(cls, case: Case) -> _Kinds:
        nothing = Turn(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        mamba_turn, adapters = nothing, nothing
        if np.any(case.shape.mamba_blocks):
            mamba = block.mamba(case)
            again, messages = _again(case, mamba, 0.0)
            mamba_turn = _plain(case, mamba, again) + Turn(0.0, 0.0, 0.0, messages, 0.0, 0.0)
        if np.any(case.shape.adapters):
            passes = block.adapters(case)
            adapters = _plain(case, passes, _again(case, passes, 0.0)[0])
        moe_turn = _moe_turn(case) if np.any(case.shape.moe_blocks) else nothing
        each = (_attention_turn(case), _mlp_turn(case), moe_turn, mamba_turn, adapters)
        head = _plain(case, block.output_layer(case), 0.0)
        share = case.mesh.waiting_outputs / case.mesh.accumulation
        waiting = share * block.output_gradient(case)
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
