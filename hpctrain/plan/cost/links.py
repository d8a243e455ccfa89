"""Compute seconds of collective operations over NVLink, the network, or both.

Belongs here: bandwidth of a group of ranks and ring formulas. Does not belong here: which tensors
are sent (`traffic` in `blocks`, `step`).

A group is `size` ranks, `stride` apart. `domain` consecutive ranks reach each other over NVLink.
Ring formulas: Thakur, Rabenseifner and Gropp 2005 (Int. J. High Perform. Comput. Appl. 19(1)),
as in the performance notes of nccl-tests: all-gather and reduce-scatter move (n - 1) / n of the
whole tensor through each rank, all-reduce twice that.
"""

from __future__ import annotations

import numpy as np

from hpctrain.plan.cost.case import Array, Case, once

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
