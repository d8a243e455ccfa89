"""The profile section of a run spec: traces of chosen steps and ranks, and FLOP counts.

Belongs here: the fields of `profile`, and contradictions with other fields. Does not belong here:
taking a trace (see `hpctrain.train.profiling`), reading one (see `hpctrain.diagnose`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from hpctrain.spec.contradiction import Contradiction
from hpctrain.spec.document import Document
from hpctrain.spec.engines.registry import ENGINES, abilities_of
from hpctrain.units import ByteSize

# A step of a large model is some hundred MB of events; more of them are of no use.
MOST_STEPS = 20
MOST_RANKS = 16
StepNumber = Annotated[int, Field(ge=1)]
RankNumber = Annotated[int, Field(ge=0)]


class ProfileSpec(Document):
    """Which steps of which ranks, and what of them. Losses stay the same."""

    steps: tuple[StepNumber, ...] = Field(
        (), max_length=MOST_STEPS, description="Steps to look into, such as `[10, 12]`"
    )
    start: int | None = Field(None, ge=1, description="Instead of `steps`: the first one ...")
    count: int = Field(1, ge=1, le=MOST_STEPS, description="... and how many in a row")
    ranks: tuple[RankNumber, ...] = Field(
        (0,), min_length=1, max_length=MOST_RANKS, description="Ranks to look into"
    )
    tool: Literal["torch", "nsys", "none"] = Field(
        "torch", description="torch: Chrome traces; nsys: Nsight Systems, with GPUs only"
    )
    shapes: bool = Field(False, description="torch: shapes of the tensors of each operation")
    allocations: bool = Field(False, description="torch: every piece of memory taken")
    stacks: bool = Field(False, description="torch: lines of Python for each operation, slow")
    largest: ByteSize = Field(
        ByteSize(512 * 2**20), gt=0, description="torch: a larger trace file is not kept"
    )
    flops: bool = Field(
        False, description="deepspeed: count FLOPs module by module, into `flops-0000012.txt`"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if bool(self.steps) == (self.start is not None):
            raise ValueError("give exactly one of `steps` and `start`")
        if self.start is None and self.count != 1:
            raise ValueError("`count` goes with `start`")
        if self.tool != "torch" and (self.shapes or self.allocations or self.stacks):
            raise ValueError("shapes, allocations and stacks are for `tool: torch`")
        if self.tool == "none" and not self.flops:
            raise ValueError("nothing would be looked at: set `tool`, or `flops: true`")
        if self.tool == "nsys" and len(self.windows) > 1:
            raise ValueError("nsys takes one range of steps: give `start` and `count`")
        return self

    @property
    def chosen(self) -> tuple[int, ...]:
        """The steps, ascending."""
        if self.start is None:
            return tuple(sorted(set(self.steps)))
        return tuple(range(self.start, self.start + self.count))

    @property
    def windows(self) -> tuple[tuple[int, int], ...]:
        """First and last step of each contiguous range; a trace contains one range."""
        found: list[tuple[int, int]] = []
        for step in self.chosen:
            if found and found[-1][1] == step - 1:
                found[-1] = (found[-1][0], step)
            else:
                found.append((step, step))
        return tuple(found)


def profile_contradictions(
    profile: ProfileSpec, *, engine: str, gpus: int, steps: int
) -> Iterator[Contradiction]:
    """Find settings without effect; `gpus` and `steps` are those of the run."""
    abilities = abilities_of(engine)
    if abilities.own_profiler is not None:
        message = f"{abilities.title} is not looked into from outside"
        hint = f"remove it, and give {abilities.own_profiler(profile.chosen)}"
        yield Contradiction(("profile",), message, hint)
    if profile.flops and not abilities.counts_flops:
        counting = " or ".join(one.title for one in ENGINES.values() if one.counts_flops)
        message = f"FLOPs are counted by {counting}, and {engine} would not read this"
        yield Contradiction(
            ("profile", "flops"), message, "remove it; `hpctrain plan` shows the model's FLOPs"
        )
    if max(profile.ranks) >= gpus:
        message = f"there is no rank {max(profile.ranks)} among {gpus} GPUs"
        yield Contradiction(("profile", "ranks"), message, f"ranks are 0 to {gpus - 1}")
    if profile.chosen[-1] > steps:
        message = f"step {profile.chosen[-1]} is after the last one, {steps}"
        field = "steps" if profile.start is None else "start"
        yield Contradiction(("profile", field), message, "choose earlier steps")
