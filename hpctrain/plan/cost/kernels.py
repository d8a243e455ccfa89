"""Compute seconds of single kernels: matrix products, attention, elementwise passes.

Belongs here: rooflines. Does not belong here: which kernels a layer runs (`blocks`).
"""

from __future__ import annotations

import numpy as np

from hpctrain.plan.cost.case import Array, Case

# Elements: tensor cores take 16-bit operands in multiples of 16 bytes (NVIDIA, Matrix
# Multiplication Background User's Guide, "Tensor Core Requirements").
ALIGNMENT = 8


def product_seconds(case: Case, m: Array, n: Array, k: Array) -> Array:
    """Price one matrix product [m, k] x [k, n] of a linear layer.

    Additive roofline: the operations at the rate a large product reaches, plus the time to move
    both operands and the result once. The second term is what makes small products slower per
    operation; adding instead of taking the maximum stands for tiles that wait for memory at
    their start and end.
    """
    mesh, machine = case.mesh, case.machine
    low = np.asarray(mesh.low) > 0
    rate = np.where(
        low,
        machine.peak_low * machine.low_efficiency,
        machine.peak * machine.product_efficiency,
    )
    width = np.where(low, 1.5, mesh.element_bytes)  # 8-bit operands, 16-bit result
    moved = width * (m * k + k * n + m * n)
    tail = 2.0 * machine.tail_products * k / rate
    return 2.0 * m * n * k / rate + tail + stream(case, moved)


def flash_seconds(case: Case, pairs: Array, heads: Array, factor: Array) -> Array:
    """Fused attention: `pairs` of query and key per head, `factor` products of size d per pair.

    Dao et al. 2022 (arXiv 2205.14135), Dao 2023 (arXiv 2307.08691): two products forward, five
    backward, causal halves the pairs.
    """
    shape, machine = case.shape, case.machine
    flops = 2.0 * factor * pairs * heads * (shape.qk_dim + shape.value_dim) / 2
    return flops / (machine.peak * machine.flash_efficiency * case.software.flash_speed)


def unfused_seconds(case: Case, pairs: Array, heads: Array, products: Array) -> Array:
    """Price attention as batched products with s x s matrices in memory; no causal saving."""
    shape, machine, element = case.shape, case.machine, case.mesh.element_bytes
    flops = 2.0 * products * pairs * heads * (shape.qk_dim + shape.value_dim) / 2
    aligned = np.asarray(shape.qk_dim) % ALIGNMENT == 0
    penalty = np.where(aligned, 1.0, machine.misaligned_cost)
    moved = case.software.softmax_passes * products / 2 * element * pairs * heads
    return penalty * flops / (machine.peak * machine.batched_efficiency) + stream(case, moved)


def stream(case: Case, moved_bytes: Array) -> Array:
    """Price elementwise kernels by the bytes that they move."""
    machine = case.machine
    return moved_bytes / (machine.memory_bandwidth * machine.memory_efficiency)
