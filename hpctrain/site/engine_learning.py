"""What measured runs of one engine teach the planner about one cluster.

Belongs here: planning the measured layout again, refusing what no constant explains, and the
lesson as a document. Does not belong here: reading runs (`own_runs`), the update
(`hpctrain.plan.uncertainty`), files of a site (`calibrate`, `calibrate_runs`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.site.own_runs import MeasuredRun
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.uncertainty import LearnedMultiplier, OwnRun, SiteLearning

if TYPE_CHECKING:
    from hpctrain.plan.request import Knowledge
    from hpctrain.plan.uncertainty.learning import Lesson, SeenRun

# Measured over planned, or the other way round: beyond it something else was slow, or the run is
# not what its plan says.
_IMPLAUSIBLE = 3.0
_ODD = 2.5  # deviations of the next step time: one run in eighty is further off


class EngineLearning(BaseModel):
    """What the runs of one engine have taught."""

    model_config = ConfigDict(frozen=True)

    engine: str
    learned: SiteLearning
    multipliers: tuple[LearnedMultiplier, ...]


def planned_again(run: MeasuredRun, profile: ClusterProfile, knowledge: Knowledge) -> SeenRun:
    """Plan a run's own layout with the constants as they are.

    Raises what planning raises, and InvalidInputError for a time that no constant explains.
    """
    from hpctrain.plan.planner import decide
    from hpctrain.plan.request import PlanRequest
    from hpctrain.plan.uncertainty.learning import SeenRun

    partition = run.spec.resources.partition
    decision = decide(PlanRequest(run.spec, profile.for_partition(partition), knowledge))
    if decision.plan.step_seconds is None:
        raise InvalidInputError([Problem("the planner predicts no step time")])
    ratio = run.seconds / decision.plan.step_seconds
    if abs(math.log(ratio)) > math.log(_IMPLAUSIBLE):
        message = f"its steps took {ratio:.2g} times as long as planned, which no constant explains"
        raise InvalidInputError([Problem(message, run.run)])
    return SeenRun(
        run=run.run,
        request=decision.request,
        candidate=decision.found.candidate(decision.row),
        plan=decision.plan,
        seconds=run.seconds,
        allocated_bytes=run.allocated_bytes,
        reserved_bytes=run.reserved_bytes,
        pass_seconds=run.pass_seconds,
    )


def engine_learning(
    engine: str,
    runs: Sequence[tuple[MeasuredRun, SeenRun]],
    rates: dict[str, float],
    constants: str,
) -> EngineLearning:
    """Update the beliefs about one engine, and say what that changes for each run."""
    from hpctrain.plan.uncertainty.learning import learn

    lesson = learn([seen for _, seen in runs], rates)
    learned = SiteLearning(
        time=lesson.time,
        memory=lesson.memory,
        runs=tuple(_own_run(run, seen, lesson, number) for number, (run, seen) in enumerate(runs)),
        error=float(f"{lesson.error:.3g}"),
        constants=constants,
    )
    return EngineLearning(engine=engine, learned=learned, multipliers=lesson.multipliers)


def unexplained(learned: Iterable[SiteLearning]) -> list[str]:
    """Name runs that are still far from what is planned with what they have taught."""
    return [
        f"{run.run} still measures {run.measured_seconds / run.after_seconds:.2f} times what is "
        "planned, which own runs hardly ever do: find out why, or calibrate without it"
        for one in learned
        for run in one.runs
        if abs(math.log(run.measured_seconds / run.after_seconds)) > _ODD * one.error
    ]


def _own_run(run: MeasuredRun, seen: SeenRun, lesson: Lesson, number: int) -> OwnRun:
    after = lesson.reserved_bytes[number]
    return OwnRun(
        run=run.run,
        day=run.day,
        nodes=run.nodes,
        steps=run.steps,
        hpctrain=run.hpctrain,
        software=run.software,
        measured_seconds=_rounded(run.seconds),
        before_seconds=_rounded(seen.planned_seconds),
        after_seconds=_rounded(lesson.seconds[number]),
        measured_bytes=run.reserved_bytes if after is not None else None,
        before_bytes=seen.planned_bytes if after is not None else None,
        after_bytes=round(after) if after is not None else None,
    )


def _rounded(number: float) -> float:
    return float(f"{number:.5g}")
