"""Count the blocks of a group of layers.

Belongs here: counts of attention, MLP, MoE and Mamba blocks in a stage. Does not belong here: what
a block costs (`blocks`, `plan_memory`, `weights`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpctrain.plan.cost.case import Array, Case, once


@dataclass(frozen=True)
class Blocks:
    """Numbers of blocks, not always whole: layers of a kind may be spread evenly."""

    layers: Array
    attention: Array
    mlp: Array
    moe: Array
    mamba: Array

    @property
    def count(self) -> Array:
        """Blocks with a norm in front."""
        return self.attention + self.mlp + self.moe + self.mamba


@once
def all_blocks(case: Case) -> Blocks:
    """Count the blocks of the whole model, without multi-token prediction layers."""
    shape = case.shape
    return Blocks(
        shape.layers,
        shape.attention_blocks,
        shape.mlp_blocks,
        shape.moe_blocks,
        shape.mamba_blocks,
    )


@once
def first_blocks(case: Case) -> Blocks:
    """Count the blocks of the first stage: with `dense_first` its first layers are dense."""
    shape, layers = case.shape, case.mesh.layers_first
    even = _spread(case, layers)
    dense = np.minimum(shape.mlp_blocks, layers)
    first = np.asarray(shape.dense_first) > 0
    return Blocks(
        layers,
        even.attention,
        np.where(first, dense, even.mlp),
        np.where(first, layers - dense, even.moe),
        even.mamba,
    )


def later_blocks(case: Case, layers: Array) -> Blocks:
    """Count the blocks of a stage behind the first one."""
    shape, mesh = case.shape, case.mesh
    even = _spread(case, layers)
    behind = np.maximum(shape.layers - mesh.layers_first, 1)
    left = np.maximum(shape.mlp_blocks - mesh.layers_first, 0)
    dense = left * layers / behind
    first = np.asarray(shape.dense_first) > 0
    return Blocks(
        layers,
        even.attention,
        np.where(first, dense, even.mlp),
        np.where(first, layers - dense, even.moe),
        even.mamba,
    )


@once
def prediction_blocks(case: Case) -> Blocks:
    """The multi-token prediction layers: as the model's last layer, so with experts if it has."""
    shape, layers = case.shape, case.shape.mtp_layers
    routed = np.asarray(shape.moe_blocks) > 0
    return Blocks(
        layers, layers, np.where(routed, 0, layers), np.where(routed, layers, 0), 0 * layers
    )


def _spread(case: Case, layers: Array) -> Blocks:
    shape = case.shape
    share = layers / shape.layers
    return Blocks(
        layers,
        shape.attention_blocks * share,
        shape.mlp_blocks * share,
        shape.moe_blocks * share,
        shape.mamba_blocks * share,
    )
