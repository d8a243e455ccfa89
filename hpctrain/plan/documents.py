"""The plan as a document: layout, batch split, stages, memory, reasons and warnings.

Belongs here: what a plan says. Does not belong here: how it is found (see `planner`) or how an
engine is told about it (see `hpctrain.engines`).
"""

from __future__ import annotations

from typing import Literal

from hpctrain.spec.document import Document

Axis = Literal["tp", "cp", "dp", "pp"]
Recompute = Literal["none", "selective", "full"]
Span = Literal["one GPU", "inside a node", "inside an NVLink domain", "across nodes"]


class Layout(Document):
    """Sizes of the mesh axes; rank order is tp fastest, then cp, dp, pp (Megatron's default)."""

    tp: int
    pp: int
    vpp: int
    cp: int
    dp: int
    sequence_parallel: bool

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    def __str__(self) -> str:
        axes = [
            ("tp", self.tp),
            ("pp", self.pp),
            ("vpp", self.vpp),
            ("cp", self.cp),
            ("dp", self.dp),
        ]
        shown = [f"{name} {size}" for name, size in axes if size > 1 or name in ("tp", "pp", "dp")]
        return " · ".join(shown)


class BatchSplit(Document):
    """global = micro x accumulation x dp, in sequences per optimizer step."""

    global_batch: int
    micro_batch: int
    accumulation: int
    train_steps: int
    tokens_per_step: int


class Stage(Document):
    """One pipeline stage: the layers of each of its vpp chunks, and what else it has."""

    index: int
    chunk_layers: tuple[int, ...]
    embedding: bool
    loss: bool
    parameters_per_gpu: int


class MemoryBreakdown(Document):
    """Bytes on one GPU of one pipeline stage."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    logits_bytes: int
    communication_bytes: int
    reserved_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(getattr(self, name) for name in type(self).model_fields)


class AxisPlacement(Document):
    """Where the ranks of one axis group are relative to each other."""

    axis: Axis
    size: int
    stride: int
    span: Span


class NodeRequest(Document):
    """How the GPUs are spread over nodes."""

    nodes: int
    gpus_per_node: int


class Plan(Document):
    """Everything that was decided for one spec on one profile."""

    schema_version: Literal[1] = 1
    run_name: str
    profile_name: str
    engine: Literal["megatron"]
    layout: Layout
    layout_origin: Literal["spec", "auto"]
    nodes: NodeRequest
    batch: BatchSplit
    recompute: Recompute
    precision: Literal["bf16", "fp32"]
    padded_vocab: int
    parameters: int
    stages: tuple[Stage, ...]
    memory: tuple[MemoryBreakdown, ...]
    gpu_memory_bytes: int
    placements: tuple[AxisPlacement, ...]
    step_seconds: float | None = None
    model_flops_per_step: float
    reasons: tuple[str, ...]
    warnings: tuple[str, ...] = ()

    @property
    def peak_stage(self) -> int:
        """Index of the stage that needs the most memory."""
        return max(range(len(self.memory)), key=lambda index: self.memory[index].total_bytes)
