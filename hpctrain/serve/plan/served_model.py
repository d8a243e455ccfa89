"""Describe a model as inference sees it: its shape, and bytes and operand width of each part.

Belongs here: formats of weights and of the KV cache, and counts of weights per GPU. Does not
belong here: seconds (`step_time`), bytes of the cache (`step_time`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hpctrain.plan.cost.case import Array, Case, Machine, Mesh, Shape, Software, stack
from hpctrain.plan.cost.weights import (
    attention_weights,
    mamba_weights,
    mlp_weights,
    moe_weights,
    table_weights,
)
from hpctrain.spec.catalogue import Gpu

# Bytes of one stored weight with its scales. `fp8-blocks`, as DeepSeek and Qwen publish it: one
# fp32 number for each block of 128 x 128 (DeepSeek-V3, arXiv 2412.19437, section 3.3.2). `fp4` is
# NVFP4, one FP8 number for 16; MXFP4 one byte for 32 (OCP Microscaling v1.0); int4 one 16-bit scale
# with a 4-bit zero for 128 (AWQ, arXiv 2306.00978, group size 128).
STORED_BYTES = {
    "fp32": 4.0,
    "bf16": 2.0,
    "fp16": 2.0,
    "fp8": 1.0,
    "fp8-blocks": 1.0 + 4 / 128**2,
    "int8": 1.0,
    "fp4": 0.5 + 1 / 16,
    "nvfp4": 0.5 + 1 / 16,
    "mxfp4": 0.5 + 1 / 32,
    "int4": 0.5 + 2.5 / 128,
}
# How products compute: the operands, and what becomes of stored weights on the way to them.
WIDE, EIGHT, EIGHT_BLOCKS, FOUR, EXPANDED = range(5)
OPERANDS = {
    **dict.fromkeys(("fp32", "bf16", "fp16"), WIDE),
    **dict.fromkeys(("fp8", "int8"), EIGHT),
    "fp8-blocks": EIGHT_BLOCKS,
    **dict.fromkeys(("fp4", "nvfp4", "mxfp4"), FOUR),
    "int4": EXPANDED,  # to 16 bits in front of the products (AWQ, section 4)
}
PEAKS = {EIGHT: "fp8", EIGHT_BLOCKS: "fp8", FOUR: "fp4"}  # what a data sheet needs for them


@dataclass(frozen=True)
class ServedModel:
    """A model in the formats that it is served in. All fields broadcast."""

    shape: Shape
    attention_bytes: Array  # per weight of attention blocks
    mlp_bytes: Array  # per weight of dense MLPs and of shared experts
    expert_bytes: Array  # per weight of routed experts
    head_bytes: Array  # per weight of embeddings and of the output matrix
    attention_operands: Array  # of the products: WIDE, EIGHT, EIGHT_BLOCKS, FOUR or EXPANDED
    mlp_operands: Array
    expert_operands: Array
    cache_bytes: Array  # per number of the KV cache
    recurrent_blocks: Array = 0  # linear attention blocks: a state per sequence, no cache
    recurrent_weights: Array = 0  # weights of one such block
    recurrent_state: Array = 0  # bytes of its state, per sequence
    sparse_keys: Array = 0  # keys that a query reads at most (sparse attention); 0: all


@dataclass(frozen=True)
class ReplicaLayout:
    """How the GPUs of one replica share the model."""

    tp: Array  # ranks that share attention's heads
    pp: Array = 1
    ep: Array = 1  # ranks that share whole experts; the other tp x dp / ep split each expert
    dp: Array = 1  # attention data parallel ranks inside the replica (DeepSeek-style)

    @property
    def group(self) -> Array:
        """GPUs of one pipeline stage."""
        return self.tp * self.dp

    @property
    def gpus(self) -> Array:
        return self.group * self.pp

    @property
    def expert_tp(self) -> Array:
        """Ranks that split one expert."""
        return np.maximum(1, self.group / np.maximum(1, self.ep))


@dataclass(frozen=True)
class PartFormats:
    """The number formats of a model's parts, by the names of `STORED_BYTES`."""

    attention: str
    mlp: str
    experts: str
    cache: str = "bf16"
    head: str = "bf16"


def served_model(
    shape: Shape,
    formats: PartFormats,
    gpu: Gpu,
    *,
    recurrent: tuple[float, float, float] = (0, 0, 0),
    sparse_keys: int = 0,
) -> ServedModel:
    """Describe a model on a GPU: products use a low precision only where the GPU has its peak.

    `recurrent`: blocks of linear attention, weights and bytes of state of each.
    """
    return ServedModel(
        shape=shape,
        attention_bytes=STORED_BYTES[formats.attention],
        mlp_bytes=STORED_BYTES[formats.mlp],
        expert_bytes=STORED_BYTES[formats.experts],
        head_bytes=STORED_BYTES[formats.head],
        attention_operands=operands(formats.attention, gpu),
        mlp_operands=operands(formats.mlp, gpu),
        expert_operands=operands(formats.experts, gpu),
        cache_bytes=STORED_BYTES[formats.cache],
        recurrent_blocks=recurrent[0],
        recurrent_weights=recurrent[1],
        recurrent_state=recurrent[2],
        sparse_keys=sparse_keys,
    )


def operands(stored: str, gpu: Gpu) -> int:
    """Return the operands of products: stored weights are expanded where the GPU has no peak."""
    own = OPERANDS[stored]
    return own if own not in PEAKS or PEAKS[own] in gpu.peak else EXPANDED


def stack_served(models: Sequence[ServedModel]) -> ServedModel:
    """Stack models into one whose fields are arrays of shape [len(models)]."""
    shape = stack([model.shape for model in models])
    flat = stack([replace(model, shape=0.0) for model in models])  # type: ignore[arg-type]
    return replace(flat, shape=shape)


@dataclass(frozen=True)
class BlockWeights:
    """Weights on one GPU: of one block of each kind, and of one table of embeddings."""

    attention: Array
    recurrent: Array
    mlp: Array
    shared: Array  # shared experts and router of one MoE block
    expert: Array  # one routed expert's part
    mamba: Array
    table: Array


def block_weights(served: ServedModel, layout: ReplicaLayout) -> BlockWeights:
    """Count the weights that one GPU holds, with the counts of the training cost model.

    Dense MLPs and shared experts are split over the whole group, attention over tp only.
    """
    case = layout_case(served.shape, layout)
    wide = layout_case(served.shape, replace(layout, tp=layout.group, dp=1))
    shared, routed = moe_weights(wide)
    own = np.maximum(served.shape.experts / layout.ep, 1e-9)
    return BlockWeights(
        attention=attention_weights(case),
        recurrent=served.recurrent_weights / layout.tp,
        mlp=mlp_weights(wide),
        shared=shared,
        expert=routed / own,
        mamba=mamba_weights(case),
        table=table_weights(case),
    )


def weight_bytes(served: ServedModel, layout: ReplicaLayout) -> Array:
    """Return the bytes of weights on the fullest GPU; pipeline stages share blocks evenly."""
    shape, own = served.shape, block_weights(served, layout)
    experts = shape.moe_blocks * own.expert * shape.experts / layout.ep
    blocks = (
        shape.attention_blocks * own.attention * served.attention_bytes
        + served.recurrent_blocks * own.recurrent * served.attention_bytes
        + shape.mamba_blocks * own.mamba * served.attention_bytes
        + shape.mlp_blocks * own.mlp * served.mlp_bytes
        + shape.moe_blocks * own.shared * served.mlp_bytes
        + experts * served.expert_bytes
    )
    tables = np.where(np.asarray(layout.pp) > 1, 1, 2 - np.asarray(shape.tied))
    return blocks / layout.pp + tables * own.table * served.head_bytes


def layout_case(shape: Shape, layout: ReplicaLayout, machine: Machine | None = None) -> Case:
    """Build the training cost model's case of one replica: its weights and links are used here."""
    mesh = Mesh(tp=layout.tp, pp=layout.pp, ep=layout.ep, dp=layout.dp, etp=layout.expert_tp)
    return Case(shape, mesh, machine or WITHOUT_LINKS, WITHOUT_OVERHEADS)


NO_SHAPE = Shape(*(0.0 for _ in range(9)))  # for links, which no shape enters
WITHOUT_LINKS = Machine(*(1.0 for _ in range(13)))  # for counts, which no rate enters
WITHOUT_OVERHEADS = Software(*(0.0 for _ in range(12)))  # training's software plays no part here
