"""Compare the model that megatron-core builds with the plan: the documents of `plan --verify`.

`BuiltModel` is printed by the process `hpctrain.train.engines.megatron.verify`; `Verification`
compares it with the plan, and with the activations that the plan expects one microbatch to keep.
Belongs here: these documents, their comparison, and the formulas of `hpctrain.plan.cost.memory`
combined for that measurement. Does not belong here: building (see
`hpctrain.train.engines.megatron.verify`), starting the process (see `hpctrain.job.verify`), new
formulas.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

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
from hpctrain.plan.documents import RECOMPUTES, Plan
from hpctrain.plan.job import TrainingJob
from hpctrain.spec.document import Document
from hpctrain.spec.engines.abilities import MODEL_AXES


class BuiltStage(Document):
    """One rank of one pipeline stage, all its chunks, as megatron-core built it.

    `kept_bytes`: memory that the forward passes of one microbatch through all chunks keep for the
    backward passes, with flash attention if the plan assumes it; None: not measured.
    """

    index: int
    rank: int
    parameters: int
    kept_bytes: int | None


class BuiltModel(Document):
    """All measurements of the process; `remarks` explain deviations from the plan."""

    schema_version: Literal[1] = 1
    megatron_core_version: str
    torch_version: str
    stages: tuple[BuiltStage, ...]
    remarks: tuple[str, ...] = ()


class VerifiedStage(Document):
    """One stage, planned and built. Bytes are those that one microbatch keeps.

    `equal` is about parameters, which must agree exactly.
    """

    index: int
    rank: int
    planned_parameters: int
    built_parameters: int
    equal: bool
    planned_kept_bytes: int | None
    measured_kept_bytes: int | None

    @property
    def kept_error(self) -> float | None:
        """(planned - measured) / measured; None if one is unknown or nothing is kept."""
        planned, measured = self.planned_kept_bytes, self.measured_kept_bytes
        if planned is None or not measured:
            return None
        return planned / measured - 1


class Verification(Document):
    """The verdict of `plan --verify`: `equal` when every stage has the planned parameters."""

    schema_version: Literal[1] = 1
    run_name: str
    megatron_core_version: str
    torch_version: str
    equal: bool
    stages: tuple[VerifiedStage, ...]
    remarks: tuple[str, ...]


def compare(plan: Plan, kept_bytes: tuple[int | None, ...], built: BuiltModel) -> Verification:
    """Compare `built` with `plan`; `kept_bytes` are the planned ones of each stage."""
    pairs = zip(plan.stages, built.stages, strict=True)
    assert all(stage.index == real.index for stage, real in pairs)
    stages = tuple(
        VerifiedStage(
            index=stage.index,
            rank=real.rank,
            planned_parameters=stage.parameters_per_gpu,
            built_parameters=real.parameters,
            equal=stage.parameters_per_gpu == real.parameters,
            planned_kept_bytes=None if real.kept_bytes is None else kept,
            measured_kept_bytes=real.kept_bytes,
        )
        for stage, kept, real in zip(plan.stages, kept_bytes, built.stages, strict=True)
    )
    return Verification(
        run_name=plan.run_name,
        megatron_core_version=built.megatron_core_version,
        torch_version=built.torch_version,
        equal=all(stage.equal for stage in stages),
        stages=stages,
        remarks=built.remarks,
    )


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
    outside = float(outside_bytes(case))
    mask = outside / float(mesh.element_bytes) if spec.model.dropout else 0.0
    logits = float(logit_bytes(case))
    return tuple(
        round(
            float(kept_bytes(case, Blocks(layers=n, attention=n, mlp=n, moe=0, mamba=0)))
            + stage.embedding * mask
            + stage.loss * (2 * outside + logits)
        )
        for stage, n in zip(plan.stages, layers, strict=True)
    )
