"""What megatron-core really builds, beside what the plan says: the documents of `plan --verify`.

`Built` is what the process `hpctrain.train.engines.megatron.verify` prints; `Verification` sets it
beside the plan. Belongs here: these documents and their comparison. Does not belong here: building
(see `hpctrain.train.engines.megatron.verify`), starting the process (see
`hpctrain.actions.verify`).
"""

from __future__ import annotations

from typing import Literal

from hpctrain.plan.documents import Plan, Stage
from hpctrain.spec.document import Document


class BuiltStage(Document):
    """One rank of one pipeline stage, all its chunks, as megatron-core built it.

    `kept_bytes`: what the forward passes of one microbatch through all chunks leave behind for
    the backward passes, with flash attention where the plan counts on it; None: not measured.
    """

    index: int
    rank: int
    parameters: int
    kept_bytes: int | None


class Built(Document):
    """Everything the process found; `remarks` say what was built or measured otherwise, and why."""

    schema_version: Literal[1] = 1
    megatron_core_version: str
    torch_version: str
    stages: tuple[BuiltStage, ...]
    remarks: tuple[str, ...] = ()


class VerifiedStage(Document):
    """One stage: planned beside built. Bytes are of one microbatch, between forward and backward.

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
        """(planned - measured) / measured; None where one of them is unknown or nothing is kept."""
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


def compare(plan: Plan, kept_bytes: tuple[int | None, ...], built: Built) -> Verification:
    """Compare `built` with `plan`; `kept_bytes` are the planned ones of each stage."""
    stages = tuple(
        _verified(stage, kept, real)
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


def _verified(stage: Stage, kept_bytes: int | None, real: BuiltStage) -> VerifiedStage:
    assert stage.index == real.index
    return VerifiedStage(
        index=stage.index,
        rank=real.rank,
        planned_parameters=stage.parameters_per_gpu,
        built_parameters=real.parameters,
        equal=stage.parameters_per_gpu == real.parameters,
        planned_kept_bytes=None if real.kept_bytes is None else kept_bytes,
        measured_kept_bytes=real.kept_bytes,
    )
