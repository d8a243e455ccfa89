"""The settings of the check of GPUs and links before training: a part of `train.json`.

Belongs here: the document, and the pure function that fills it. Does not belong here: measuring
(see `hpctrain.train.speed_check`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from hpctrain.plan.layout_words import Axis
from hpctrain.spec.document import Document
from hpctrain.spec.engines.registry import abilities_of

if TYPE_CHECKING:
    from hpctrain.plan.cost.prediction import ExpectedSpeed
    from hpctrain.plan.job import TrainingJob

_MIB = 2**20
# An all-reduce over NVLink or InfiniBand reaches its bandwidth from some tens of MiB on
# (nccl-tests); above the upper bound it only takes longer.
_GPU_BYTES = (64 * _MIB, 256 * _MIB)
# gloo on CPUs copies through main memory.
_CPU_BYTES = (_MIB, 4 * _MIB)


class CheckedAxis(Document):
    """The message that is sent along an axis, and the bandwidth that the plan assumes there."""

    axis: Axis
    message_bytes: int
    expected_bytes_per_second: float | None = None


class SpeedCheckConfig(Document):
    """What the check compares: thresholds as shares, the fabric, and the plan's assumptions."""

    slow_gpu: float
    slow_link: float
    fabric: Literal["infiniband", "roce", "efa", "slingshot", "ethernet"]
    expected_flops_per_second: float | None = None
    axes: tuple[CheckedAxis, ...] = ()


def speed_check_mode(job: TrainingJob) -> Literal["off", "report", "exclude"]:
    """Choose the mode of the check: the spec's, or the profile's for `auto`.

    An external program opens process groups of its own, which the check cannot use.
    """
    mode = job.spec.supervise.speed_check.mode
    chosen = job.profile.usual_speed_check if mode == "auto" else mode
    return "off" if abilities_of(job.spec.engine.name).program is not None else chosen


def speed_check_config(job: TrainingJob, expected: ExpectedSpeed | None) -> SpeedCheckConfig | None:
    """Fill the settings of the check; None where it is off."""
    if speed_check_mode(job) == "off":
        return None
    plan, given = job.plan, job.spec.supervise.speed_check
    known = expected.bytes_per_second if expected is not None else {}
    least, most = _GPU_BYTES if plan.accelerator == "cuda" else _CPU_BYTES
    axes = []
    for place in plan.placements:
        if place.size == 1:
            continue
        wanted = _message_bytes(place.axis, job)
        axes.append(
            CheckedAxis(
                axis=place.axis,
                message_bytes=max(least, min(wanted, most)),
                expected_bytes_per_second=known.get(place.axis),
            )
        )
    compares = expected is not None and plan.precision != "fp32"
    return SpeedCheckConfig(
        slow_gpu=given.slow_gpu,
        slow_link=given.slow_link,
        fabric=job.profile.network.fabric,
        expected_flops_per_second=expected.product_flops_per_second
        if expected is not None and compares
        else None,
        axes=tuple(axes),
    )


def _message_bytes(axis: Axis, job: TrainingJob) -> int:
    """Estimate the plan's message: gradients on dp, the activations of a microbatch elsewhere."""
    if axis == "dp":
        return 4 * max(stage.parameters_per_gpu for stage in job.plan.stages)
    tokens = job.plan.batch.micro_batch * job.spec.model.seq // job.plan.layout.cp
    return 2 * tokens * job.spec.model.hidden
