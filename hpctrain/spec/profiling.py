"""The profile section of a run spec: traces of chosen steps and ranks.

Belongs here: the fields of `profile`, and contradictions with other fields. Does not belong here:
taking a trace (see `hpctrain.train.profiling`), reading one (see `hpctrain.diagnose`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from hpctrain.spec.document import Contradiction, Document
from hpctrain.spec.engines.registry import abilities_of

# A step of a large model is some hundred MB of events; more of them are of no use.
MOST_STEPS = 20
MOST_RANKS = 16
StepNumber = Annotated[int, Field(ge=1)]
RankNumber = Annotated[int, Field(ge=0)]


class ProfileSpec(Document):
    """Which steps of which ranks, and by which tool. Losses stay the same."""

    steps: tuple[StepNumber, ...] = Field(
        min_length=1,
        max_length=MOST_STEPS,
        description="Steps to look into, such as `[10, 12]`; those in a row are one trace",
    )
    ranks: tuple[RankNumber, ...] = Field(
        (0,), min_length=1, max_length=MOST_RANKS, description="Ranks to look into"
    )
    tool: Literal["torch", "nsys"] = Field(
        "torch", description="torch: Chrome traces; nsys: Nsight Systems, with GPUs only"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.tool == "nsys" and len(self.windows) > 1:
            raise ValueError("nsys takes one range of steps, such as `[10, 11, 12]`")
        return self

    @property
    def chosen(self) -> tuple[int, ...]:
        """The steps, ascending."""
        return tuple(sorted(set(self.steps)))

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
    if max(profile.ranks) >= gpus:
        message = f"there is no rank {max(profile.ranks)} among {gpus} GPUs"
        yield Contradiction(("profile", "ranks"), message, f"ranks are 0 to {gpus - 1}")
    if profile.chosen[-1] > steps:
        message = f"step {profile.chosen[-1]} is after the last one, {steps}"
        yield Contradiction(("profile", "steps"), message, "choose earlier steps")
