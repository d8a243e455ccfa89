"""Bytes on one GPU of each pipeline stage, by component.

Belongs here: weights, gradients, optimizer state, buffers, and the sum. Does not belong here:
what a microbatch keeps (`activations`) or what to do when it is too much (`planner`, `search`).
"""

from __future__ import annotations

from collections.abc import Iterable

from hpctrain.plan.activations import Microbatch, logits_bytes, stage_activation_bytes
from hpctrain.plan.candidate import Candidate
from hpctrain.plan.documents import Layout, MemoryBreakdown, Stage
from hpctrain.plan.parameters import pad_vocab
from hpctrain.plan.stages import build_stage
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.run import RunSpec

ELEMENT_BYTES = {"bf16": 2, "fp32": 4}
GRADIENT_BYTES = 4  # one fp32 buffer (DistributedDataParallelConfig.grad_reduce_in_fp32)
# Two fp32 moments of Adam; bf16 weights have an fp32 main copy besides
# (megatron/core/optimizer/optimizer.py, Float16OptimizerWithFloat16Params and FP32Optimizer).
OPTIMIZER_BYTES = {"bf16": 12, "fp32": 8}
TIGHT_SHARE = 0.94  # above this, fragmentation of PyTorch's allocator alone can end a run


def uses_flash_attention(spec: RunSpec) -> bool:
    """True when TransformerEngine computes attention without s x s tensors.

    `implementation: auto` counts as TransformerEngine: clusters with GPUs have it, and where it
    is missing (the sandbox) models are tiny. fp32 has no flash kernel.
    """
    return spec.engine.implementation != "local" and spec.precision == "bf16"


def microbatch(spec: RunSpec, candidate: Candidate) -> Microbatch:
    """The microbatch of `candidate` as the formulas for activations want it."""
    return Microbatch(
        model=spec.model,
        layout=candidate.layout,
        sequences=candidate.micro_batch,
        element_bytes=ELEMENT_BYTES[spec.precision],
        flash=uses_flash_attention(spec),
    )


def stage_memory(
    spec: RunSpec, profile: ClusterProfile, candidate: Candidate, stage: Stage
) -> MemoryBreakdown:
    """Bytes on one GPU of `stage`.

    The distributed optimizer shards its state over dp x cp (Megatron's optimizer groups include
    context parallel ranks; ZeRO-1, Rajbhandari et al. 2020, arXiv 1910.02054, section 5.1).
    """
    layout, micro = candidate.layout, microbatch(spec, candidate)
    parameters, element = stage.parameters_per_gpu, ELEMENT_BYTES[spec.precision]
    shards = layout.dp * layout.cp if spec.optimizer.distributed else 1
    padded_vocab = pad_vocab(spec.model.vocab, layout.tp)
    return MemoryBreakdown(
        weights_bytes=element * parameters,
        gradients_bytes=GRADIENT_BYTES * parameters,
        optimizer_bytes=OPTIMIZER_BYTES[spec.precision] * -(-parameters // shards),
        activations_bytes=stage_activation_bytes(
            micro, candidate.recompute, stage.index, stage.chunk_layers, candidate.accumulation
        ),
        logits_bytes=logits_bytes(micro, padded_vocab) if stage.loss else 0,
        communication_bytes=communication_bytes(micro),
        reserved_bytes=int(profile.gpu.reserved),
    )


def communication_bytes(micro: Microbatch) -> int:
    """Buffers that exist only to talk to other GPUs.

    Pipeline: one received activation and one received gradient (schedules.py). Sequence
    parallelism: the gathered input [T, h] of a column-parallel layer, once
    (megatron/core/tensor_parallel/layers.py, global memory buffer `mpu`). Gradient buckets are
    views of the gradient buffer and cost nothing more.
    """
    layout = micro.layout
    pipeline = 2 * micro.hidden_bytes if layout.pp > 1 else 0
    gathered = micro.hidden_bytes * layout.tp if layout.sequence_parallel else 0
    return pipeline + gathered


def peak_bytes(spec: RunSpec, profile: ClusterProfile, candidate: Candidate) -> int:
    """Bytes on the fullest GPU.

    Looks only at stages that can be the fullest: both ends, and of equal stages in between the
    first, which has the most microbatches in flight.
    """
    stages = (
        build_stage(spec.model, candidate.layout, candidate.split, index)
        for index in _distinct_stages(candidate)
    )
    return max(stage_memory(spec, profile, candidate, stage).total_bytes for stage in stages)


def _distinct_stages(candidate: Candidate) -> Iterable[int]:
    pp, split = candidate.layout.pp, candidate.split
    middle = {split[index::pp]: index for index in range(pp - 2, 0, -1)}
    return sorted({0, pp - 1, *middle.values()})


def floor_bytes(spec: RunSpec, layout: Layout, parameters: int) -> float:
    """What the fullest GPU holds at the very least: its equal share of weights and states.

    `parameters` is `total_parameters` of the model. Cheap, to sort out hopeless layouts: padding,
    replicated norms, copies of tied embeddings and uneven stages only add to it.
    """
    shards = layout.dp * layout.cp if spec.optimizer.distributed else 1
    state = OPTIMIZER_BYTES[spec.precision] / shards
    per_parameter = ELEMENT_BYTES[spec.precision] + GRADIENT_BYTES + state
    return per_parameter * parameters / (layout.tp * layout.pp)


def used_share(spec: RunSpec, profile: ClusterProfile, candidate: Candidate) -> float:
    """Memory of the fullest GPU over what it has; above 1 the candidate does not fit."""
    return peak_bytes(spec, profile, candidate) / int(profile.gpu.memory)
