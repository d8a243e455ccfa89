"""Compute seconds of single kernels: matrix products, attention, elementwise passes.

Belongs here: rooflines. Does not belong here: which kernels a layer runs (`blocks`).
"""

from __future__ import annotations

import numpy as np

from hpctrain.plan.cost.case import Array, Case, once

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
