"""Compute the seconds of one optimizer step and their parts.

Belongs here: the pipeline schedule, data parallel traffic, the optimizer, straggling. Does not
belong here: what a single microbatch costs in a block (`blocks`) or in a stage (`stages`), bytes
(`plan_memory`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hpctrain.plan.cost import links
from hpctrain.plan.cost.blocks import output_gradient, split_tokens
from hpctrain.plan.cost.case import Array, Case
from hpctrain.plan.cost.memory import host_bytes
from hpctrain.plan.cost.stages import Stages, stages_of
from hpctrain.plan.cost.weights import Weights, weights_of

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
    return links.send_seconds(case, sent, stride)


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

    With `whole_sums` gradients are reduced by it although each rank updates its shard alone.
    """
    mesh = case.mesh
    size = np.where(parameters > 0, size, 1)  # a model without experts sends none
    each = np.where(np.asarray(mesh.summed_bytes) > 0, mesh.summed_bytes, mesh.gradient_bytes)
    gradients = links.gather_seconds(case, each * parameters, size, stride)
    node = links.members_inside(case, size, stride)
    inside = links.gather_seconds(case, mesh.summed_inside * parameters, node, stride)
    gradients = np.maximum(gradients, inside)
    gathered = links.gather_seconds(case, mesh.gather_bytes * parameters, size, stride)
    sharded = np.asarray(mesh.zero) >= 1
    sums = np.where(sharded, 1 + np.asarray(mesh.whole_sums), 1) * gradients
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
    dense = links.gather_seconds(case, parameter_bytes * weights.dense, size, mesh.tp)
    stride = mesh.ep * mesh.expert_tp
    routed = links.gather_seconds(
        case, parameter_bytes * weights.routed, mesh.expert_replicas, stride
    )
    whole = dense + np.where(np.asarray(weights.routed) > 0, routed, 0.0)
    return whole / case.software.sharding_efficiency


def optimizer_seconds(case: Case, weights: Weights) -> Array:
    """Price Adam: bound by memory, or by the host link when its state is offloaded.

    On NVMe the state is read and written besides, in turn with the update on the host.
    """
    mesh, machine = case.mesh, case.machine
    sharded = np.asarray(mesh.zero) >= 1
    own = weights.dense / np.where(sharded, mesh.replicas, 1)
    own = own + weights.routed / np.where(sharded, mesh.expert_replicas, 1)
    trainable = own * case.shape.trainable  # bytes of gradients and state are averages over all
    sent = mesh.gradient_bytes * own + mesh.element_bytes * trainable
    on_host = (
        sent / machine.host_bandwidth + ADAM_TRAFFIC * trainable / machine.host_memory_bandwidth
    )
    at_rest = ADAM_TRAFFIC * trainable / (machine.memory_bandwidth * machine.memory_efficiency)
    drives = 2 * case.software.main_bytes * own / machine.nvme_bandwidth
    away = on_host + np.where(np.asarray(mesh.offload) > 1, drives, 0.0)
    return np.where(np.asarray(mesh.offload) > 0, away, at_rest)
