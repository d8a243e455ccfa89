"""The batch of a run, and how it grows: which step consumes which samples.

Belongs here: the section `batch` of a run spec, and the only arithmetic between steps, samples and
batches; planner, trainer and commands ask `BatchSizes`. Does not belong here: how a batch is split
over ranks and microbatches (see `hpctrain.plan.mesh.candidate`), which sample is which row of the
data.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Literal, Self

from pydantic import Field, model_validator

from hpctrain.spec.document import Document

_MOST_INCREMENTS = 1000  # each is planned for itself

# -- Steps and samples ----------------------------------------------------------------------------


@dataclass(frozen=True)
class BatchStage:
    """Steps of as many samples; `first_step` steps and `first_sample` samples come before them."""

    samples: int
    first_step: int
    first_sample: int


@dataclass(frozen=True)
class BatchSizes:
    """How many samples each step has; the last stage has no end.

    Samples are those that are trained on: data that a rollback skips makes no batch grow earlier.
    """

    stages: tuple[BatchStage, ...]

    def _stage(self, steps: int) -> BatchStage:
        return self.stages[bisect_right(self.stages, steps, key=lambda one: one.first_step) - 1]

    def size_after(self, steps: int) -> int:
        """Return the batch of the step that follows `steps` steps."""
        return self._stage(steps).samples

    def samples_after(self, steps: int) -> int:
        """Count the samples of the first `steps` steps."""
        stage = self._stage(steps)
        return stage.first_sample + (steps - stage.first_step) * stage.samples

    def steps_for(self, samples: int) -> int:
        """Count the steps that consume at least `samples` samples."""
        at = bisect_right(self.stages, samples, key=lambda one: one.first_sample) - 1
        stage = self.stages[at]
        return stage.first_step - (-(samples - stage.first_sample) // stage.samples)

    def ramp(self, steps: int) -> list[tuple[int, int]]:
        """List (size, number of steps) of all stages but the last, within `steps` steps."""
        counts = [
            (one.samples, min(after.first_step, steps) - one.first_step)
            for one, after in pairwise(self.stages)
        ]
        return [(size, count) for size, count in counts if count > 0]

    @property
    def all(self) -> tuple[int, ...]:
        """The batches that occur, in their order."""
        return tuple(stage.samples for stage in self.stages)

    @property
    def common_divisor(self) -> int:
        """The largest number that divides every batch."""
        return math.gcd(*self.all)


@cache
def batch_sizes(size: int, ramp_up: tuple[int, int, int] | None = None) -> BatchSizes:
    """Compute the stages of a run that ends with batches of `size` samples.

    `ramp_up`: the first batch, the increment, and the samples over which it grows, as
    `--rampup-batch-size`. To the bit as megatron-core 0.16.1 (num_microbatches_calculator.py,
    RampupBatchsizeNumMicroBatchesCalculator), which divides in floats.
    """
    if ramp_up is None:
        return BatchSizes((BatchStage(size, 0, 0),))
    start, increment, samples = ramp_up
    increments = (size - start) // increment
    samples_per_increment = samples / increments

    def grown(consumed: int) -> int:
        return increments if consumed > samples else int(consumed / samples_per_increment)

    stages: list[BatchStage] = []
    step = consumed = 0
    while True:
        number = grown(consumed)
        batch = start + number * increment
        stages.append(BatchStage(batch, step, consumed))
        if number == increments:
            return BatchSizes(tuple(stages))
        # an estimate, which rounding may have made one step too short or too long
        steps = max(1, math.ceil(((number + 1) * samples_per_increment - consumed) / batch))
        while grown(consumed + steps * batch) == number:
            steps += 1
        while steps > 1 and grown(consumed + (steps - 1) * batch) > number:
            steps -= 1
        step, consumed = step + steps, consumed + steps * batch


# -- The section of a run spec --------------------------------------------------------------------


class RampUpSpec(Document):
    """A batch that begins small and grows by equal increments (Megatron: rampup-batch-size)."""

    start: int = Field(ge=1, description="Sequences of the first step")
    increment: int = Field(ge=1, description="So many sequences more each time")
    samples: int = Field(
        ge=1,
        le=10**15,
        description="Sequences after which a step has `global`: each increment comes after an "
        "equal part of them",
    )


class BatchSpec(Document):
    """How many sequences make one optimizer step."""

    global_: int = Field(
        alias="global", ge=1, le=1_000_000_000, description="Sequences per step, over all GPUs"
    )
    micro: int | Literal["auto"] = Field("auto", description="Sequences per GPU and microbatch")
    ramp_up: RampUpSpec | None = Field(
        None,
        exclude_if=lambda ramp: ramp is None,  # digests of specs without one stay
        description="Begin with smaller steps; learning rates then follow samples, not steps. "
        "Absent: all steps have `global`",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.micro != "auto" and self.micro < 1:
            raise ValueError("micro must be at least 1, or `auto`")
        if self.ramp_up is None:
            return self
        start, increment = self.ramp_up.start, self.ramp_up.increment
        more = self.global_ - start
        if more < 1:
            raise ValueError(f"ramp_up.start {start} must be below global {self.global_}")
        if more % increment:
            near = self.global_ - more % increment
            raise ValueError(
                f"ramp_up leads from {start} by {increment} past global {self.global_}: "
                f"say global {near} or {near + increment}, or another increment"
            )
        if more // increment > _MOST_INCREMENTS:
            raise ValueError(
                f"ramp_up has {more // increment:,} increments, more than {_MOST_INCREMENTS:,}: "
                "say a larger increment"
            )
        return self

    @property
    def megatron_ramp_up(self) -> tuple[int, int, int] | None:
        """The three numbers of `--rampup-batch-size`."""
        ramp = self.ramp_up
        return None if ramp is None else (ramp.start, ramp.increment, ramp.samples)

    @property
    def sizes(self) -> BatchSizes:
        """How many samples each step has."""
        return batch_sizes(self.global_, self.megatron_ramp_up)
