"""Learn from the runs of one engine on one cluster: the update, and what it changes for each run.

Belongs here: from measured seconds and bytes to beliefs. Does not belong here: reading runs
(`hpctrain.site.own_runs`), the update's arithmetic (`belief`), files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hpctrain.plan.cost.case import Case, Floats
from hpctrain.plan.cost.from_spec import case_of
from hpctrain.plan.cost.multipliers import (
    MEMORY,
    TIME,
    memory_sensitivities,
    pass_seconds,
    pass_sensitivities,
    places_of,
)
from hpctrain.plan.documents import Plan
from hpctrain.plan.mesh.candidate import Candidate, columns_of
from hpctrain.plan.request import PlanRequest
from hpctrain.plan.uncertainty.belief import Belief, Observations, updated
from hpctrain.plan.uncertainty.intervals import (
    TIME_NAMES,
    SiteBelief,
    as_learned,
    belief_of,
    noise_of,
    time_effects,
    widened,
    with_rates,
)
from hpctrain.spec.calibration import Learned, LearnedMultiplier

_UNKNOWN = 1.0  # deviation of a multiplier's logarithm before its rate was measured
_LEAST_TOLD = 0.005  # of a multiplier's logarithm, or a twentieth of its deviation


@dataclass(frozen=True)
class SeenRun:
    """A run with what is planned of its own layout, on constants that no run has corrected.

    Bytes are PyTorch's peaks on the fullest GPU; `pass_seconds` those of the passes of the slowest
    stage in one step. None where they were not reported.
    """

    run: str
    request: PlanRequest
    candidate: Candidate
    plan: Plan
    seconds: float
    allocated_bytes: int | None
    reserved_bytes: int | None
    pass_seconds: float | None = None

    @property
    def case(self) -> Case:
        return case_of(self.request, columns_of(self.candidate))

    @property
    def planned_seconds(self) -> float:
        assert self.plan.step_seconds is not None, "only plans with a step time teach"
        return self.plan.step_seconds

    @property
    def planned_bytes(self) -> int:
        """Peak of what PyTorch allocates on the fullest GPU."""
        peak = self.plan.memory[self.plan.peak_stage]
        return peak.total_bytes - peak.reserved_bytes


@dataclass(frozen=True)
class Lesson:
    """What runs have taught; `seconds` and `reserved_bytes`: of each run, as planned with it.

    `error`: deviation to expect of the logarithm of the next step time.
    """

    time: Learned
    memory: Learned | None
    error: float
    seconds: tuple[float, ...]
    reserved_bytes: tuple[float | None, ...]
    multipliers: tuple[LearnedMultiplier, ...]


def learn(runs: Sequence[SeenRun], rates: Mapping[str, float]) -> Lesson:
    """Update the beliefs about one engine on one cluster by its runs.

    `rates`: multipliers that a check before training has measured one by one, as logarithms.
    """
    before = belief_of(runs[0].request)
    assert before is not None, "the caller knows the GPU and the packaged prior"
    cases = [run.case for run in runs]
    effects = np.concatenate([time_effects(case, before.known_gpu) for case in cases])
    places = np.concatenate([places_of(case) for case in cases])
    noise = noise_of(before.time_doubt, effects[:, len(TIME) :])
    errors = np.log([run.seconds / run.planned_seconds for run in runs])
    # what other sites have is no reason to doubt what was measured here
    prior = with_rates(widened(before.time, rates, _UNKNOWN), rates)
    time = updated(prior, _with_passes(runs, Observations(errors, effects, noise, places)))
    memory, reserved = _memory(runs, before, effects[:, len(TIME) :])
    factors = np.exp(time.shift(effects, places))
    alike = _told_rest(runs, places, time)
    told = [*_told(TIME_NAMES, before.time, time), *alike]
    told += [] if memory is None else _told(MEMORY, before.memory, memory)
    return Lesson(
        time=as_learned(time, (*TIME_NAMES, *(one.name for one in alike))),
        memory=None if memory is None else as_learned(memory, MEMORY),
        error=before.time_doubt.learned_widening
        * float(np.median(time.deviation(effects, noise, places))),
        seconds=tuple(
            float(run.planned_seconds * factor) for run, factor in zip(runs, factors, strict=True)
        ),
        reserved_bytes=reserved,
        multipliers=tuple(told),
    )


def _with_passes(runs: Sequence[SeenRun], steps: Observations) -> Observations:
    """Add what ranks have measured of their passes: it tells computation from waiting.

    Passes are most of a step, and err with it: a second witness that counts a quarter.
    """
    errors, effects, noise = [steps.errors], [steps.effects], [steps.noise]
    assert steps.places is not None
    places = [steps.places]
    for number, run in enumerate(runs):
        if run.pass_seconds is None:
            continue
        case = run.case
        planned = float(np.asarray(pass_seconds(case)).reshape(-1)[0])
        classes = steps.effects[[number], len(TIME) :]
        errors.append(np.log([run.pass_seconds / planned]))
        effects.append(np.column_stack([pass_sensitivities(case), classes]))
        noise.append(2 * steps.noise[[number]])
        places.append(steps.places[[number]])
    return Observations(*(np.concatenate(part) for part in (errors, effects, noise, places)))


def _memory(
    runs: Sequence[SeenRun], before: SiteBelief, classes: Floats
) -> tuple[Belief | None, tuple[float | None, ...]]:
    """Update the belief about memory by PyTorch's peaks, and correct each run's reserved bytes.

    What was allocated knows nothing of the allocator; neither knows what is outside of it.
    """
    noise = noise_of(before.memory_doubt, classes)
    errors, effects, noises = [], [], []
    moved = []
    for number, run in enumerate(runs):
        case = run.case
        software = replace(case.software, context_bytes=0.0, communicator_bytes=0.0)
        inside = replace(case, software=software)
        own = memory_sensitivities(inside)[0]
        moved.append(own * (1.0, 1.0, 0.0))
        seen = (run.allocated_bytes, own * (1.0, 0.0, 0.0)), (run.reserved_bytes, moved[-1])
        for measured, by in seen:
            if measured is not None:
                errors.append(float(np.log(measured / run.planned_bytes)))
                effects.append(by)
                noises.append(float(noise[number]))
    if not errors:
        return None, (None,) * len(runs)
    seen_bytes = Observations(np.array(errors), np.array(effects), np.array(noises))
    belief = updated(before.memory, seen_bytes)
    factors = np.exp(belief.shift(np.array(moved)))
    reserved = tuple(
        None if run.reserved_bytes is None else float(run.planned_bytes * factor)
        for run, factor in zip(runs, factors, strict=True)
    )
    return belief, reserved


def _told_rest(runs: Sequence[SeenRun], places: Floats, belief: Belief) -> list[LearnedMultiplier]:
    """List what is left at each place that was seen, named by the first run there."""
    rest, found = belief.rest, []
    for number, place in enumerate([] if rest is None else rest.seen):
        assert rest is not None
        first = int(np.flatnonzero((places == place).all(axis=1))[0])
        at = number - len(rest.seen)
        factor, now = np.exp(belief.mean[at]), np.sqrt(belief.covariance[at, at])
        name = f"like {runs[first].run}"
        found.append(
            LearnedMultiplier(
                name=name, factor=float(factor), before=rest.deviation, after=float(now)
            )
        )
    return found


def _told(names: Sequence[str], before: Belief, after: Belief) -> list[LearnedMultiplier]:
    """List multipliers that the runs have said something about."""
    found = []
    for number, name in enumerate(names):
        old, new = (float(np.sqrt(one.covariance[number, number])) for one in (before, after))
        if abs(after.mean[number]) >= _LEAST_TOLD or new < 0.95 * old:
            factor = float(np.exp(after.mean[number]))
            found.append(LearnedMultiplier(name=name, factor=factor, before=old, after=new))
    return found
