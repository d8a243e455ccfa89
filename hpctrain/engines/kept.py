"""Predict the activations that one microbatch keeps for its backward pass.

The counterpart of `hpctrain/train/engines/megatron/verify.py`, which measures them on
megatron-core. Belongs here: the formulas of `hpctrain.plan.cost.memory` combined for that
measurement. Does not belong here: new formulas, the number of microbatches in flight.
"""

from __future__ import annotations

from dataclasses import replace

from hpctrain.plan.cost.case import Case, Mesh
from hpctrain.plan.cost.from_spec import (
    ELEMENT_BYTES,
    NO_MACHINE,
    PLAIN,
    shape_of,
    uses_flash_attention,
)
from hpctrain.plan.cost.memory import kept_bytes, logit_bytes, outside_bytes
from hpctrain.plan.cost.weights import Blocks
from hpctrain.plan.documents import RECOMPUTES
from hpctrain.plan.job import TrainingJob
from hpctrain.spec.engines.abilities import MODEL_AXES


def planned_kept_bytes(job: TrainingJob) -> tuple[int, ...]:
    """Predict the bytes that one microbatch of a dense model keeps on each stage, by `cost.memory`.

    One forward pass through all chunks of a stage: without the allocator's slack, without the
    layer that is being recomputed, with one dropout mask behind the embedding and the logits.
    """
    spec, plan = job.spec, job.plan
    layout, batch = plan.layout, plan.batch
    layers = [sum(stage.chunk_layers) for stage in plan.stages]
    mesh = Mesh(
        **{axis: getattr(layout, axis) for axis in (*MODEL_AXES, "dp")},
        micro_batch=batch.micro_batch,
        accumulation=batch.accumulation,
        sequence_parallel=int(layout.sequence_parallel),
        zero=plan.zero,
        recompute=RECOMPUTES.index(plan.recompute),
        layers_first=layers[0],
        layers_middle=layers[len(layers) // 2],
        layers_last=layers[-1],
        element_bytes=ELEMENT_BYTES[plan.precision],
    )
    # attention and rotary positions as in megatron-core
    software = replace(
        PLAIN,
        flash=int(plan.implementation != "local" and uses_flash_attention(spec)),
        turned_copy=1,
    )
    shape = replace(shape_of(spec.model), vocab=plan.padded_vocab)
    case = Case(shape, mesh, NO_MACHINE, software)
    dense = [Blocks(layers=n, attention=n, mlp=n, moe=0, mamba=0) for n in layers]
    outside = float(outside_bytes(case))
    element = float(case.mesh.element_bytes)
    ends = (outside / element if spec.model.dropout else 0.0, 2 * outside)
    logits = float(logit_bytes(case))
    return tuple(
        round(
            float(kept_bytes(case, blocks))
            + stage.embedding * ends[0]
            + stage.loss * (ends[1] + logits)
        )
        for stage, blocks in zip(plan.stages, dense, strict=True)
    )
