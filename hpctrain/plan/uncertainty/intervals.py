"""Intervals of predictions, the probability of fitting, and of one layout being the faster one.

Belongs here: from a belief to probabilities. Does not belong here: the belief (`belief`), what the
effects are (`cost.multipliers`).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import erf, sqrt
from statistics import NormalDist

import numpy as np

from hpctrain.plan.cost.case import Array, Case, Floats, Mask
from hpctrain.plan.cost.classes import CLASSES, classes_of
from hpctrain.plan.cost.memory import peak_bytes
from hpctrain.plan.cost.multipliers import (
    TIME,
    memory_sensitivities,
    sensitivities,
)
from hpctrain.plan.cost.places import AXES, places_of
from hpctrain.plan.cost.step import step_seconds
from hpctrain.plan.uncertainty.belief import TAILS, Belief, Rest
from hpctrain.spec.calibration import Doubt, Uncertainty

COVERED = 0.8  # share of unseen runs that the intervals of a plan promise to hold
TIME_NAMES: tuple[str, ...] = (*TIME, *CLASSES)
_EDGE = NormalDist().inv_cdf((1 + COVERED) / 2)
# Deviations beyond which the normal distribution is 0 or 1 to the last bit of a float.
_SURE = 9.0


def _probit(deviations: Floats) -> Floats:
    """Compute the normal distribution. Few rows are near enough to need the error function."""
    found = np.asarray(deviations > 0, dtype=float)
    near = np.asarray(~(np.abs(deviations) >= _SURE))
    found[near] = [0.5 * (1 + erf(z / sqrt(2))) for z in np.asarray(deviations)[near].tolist()]
    return found


@dataclass(frozen=True)
class Spread:
    """A quantity with its lognormal doubt: median and deviation of the logarithm, [cases]."""

    median: Floats
    deviation: Floats

    @property
    def low(self) -> Floats:
        """The end that a tenth of all runs stay below."""
        return np.asarray(self.median * np.exp(-_EDGE * self.deviation))

    @property
    def high(self) -> Floats:
        """The end that a tenth of all runs exceed."""
        return np.asarray(self.median * np.exp(_EDGE * self.deviation))

    def within(self, limit: Array) -> Floats:
        """Compute the probability of being at most `limit`."""
        with np.errstate(divide="ignore"):  # nothing stays within 0
            margin = np.log(np.asarray(limit, dtype=float) / self.median)
        return _probit(np.asarray(margin / np.maximum(self.deviation, 1e-9)))


def prior_of(doubt: Doubt, names: tuple[str, ...]) -> Belief:
    """Build the belief before any own run: mean 0, all of `names` independent.

    `names`: multipliers, and classes, whose common factor moves all runs of a site.
    """
    known = {**doubt.multipliers, **doubt.classes}
    deviations = np.array([known[name] for name in names])
    rest = Rest(doubt.rest, doubt.reach, np.zeros((0, len(AXES)))) if doubt.rest else None
    return Belief(np.zeros(len(names)), np.diag(deviations**2), rest=rest)


def time_effects(case: Case, known_gpu: Mask = True) -> Floats:
    """Compute how each of `TIME_NAMES` moves the step time: [cases, names]."""
    return np.column_stack([sensitivities(case), classes_of(case, known_gpu)])


def noise_of(doubt: Doubt, classes: Floats) -> Floats:
    """Compute the deviation of one configuration that belongs to `classes`: [cases]."""
    extra = np.square([doubt.class_noise.get(name, 0.0) for name in CLASSES])
    return np.asarray(np.sqrt(doubt.noise**2 + classes @ extra))


def time_spread(
    case: Case, belief: Belief, doubt: Doubt, known_gpu: Mask = True, seconds: Array | None = None
) -> Spread:
    """Widen step times, in whose constants the belief's mean is already, to what to expect."""
    effects = time_effects(case, known_gpu)
    median = step_seconds(case).total if seconds is None else seconds
    return _spread(median, effects, effects[:, len(TIME) :], belief, doubt, places_of(case))


def doubt_parts(case: Case, belief: Belief, doubt: Doubt, known_gpu: Mask) -> dict[str, float]:
    """Compute which share of the variance of one step's logarithm each multiplier is behind.

    Besides those of `TIME_NAMES`: `alike` and `noise`. The largest first; they add up to 1.
    """
    effects = time_effects(case, known_gpu)
    noise = noise_of(doubt, effects[:, len(TIME) :])
    parts = belief.parts(effects[:1], noise[:1], places_of(case)[:1])
    named = dict(zip((*TIME_NAMES, "alike", "noise"), parts / parts.sum(), strict=True))
    return dict(sorted(named.items(), key=lambda part: -part[1]))


def memory_spread(
    case: Case, belief: Belief, doubt: Doubt, known_gpu: Mask = True, peak: Array | None = None
) -> Spread:
    """Widen peaks, in whose constants the belief's mean is already, to what to expect."""
    estimate = peak_bytes(case)
    effects = memory_sensitivities(case, estimate)
    median = estimate if peak is None else peak
    return _spread(median, effects, classes_of(case, known_gpu), belief, doubt)


def memory_deviation(
    case: Case, peaks: Floats, belief: Belief, doubt: Doubt, known_gpu: Mask = True
) -> Floats:
    """Compute the deviation of the logarithms of peaks that the cost model has given: [cases]."""
    noise = noise_of(doubt, classes_of(case, known_gpu))
    effects = memory_sensitivities(case, peaks)
    return np.asarray(doubt.widening * belief.deviation(effects, noise))


def _spread(
    median: Array,
    effects: Floats,
    classes: Floats,
    belief: Belief,
    doubt: Doubt,
    places: Floats | None = None,
) -> Spread:
    deviation = doubt.widening * belief.deviation(effects, noise_of(doubt, classes), places)
    return Spread(np.broadcast_to(np.asarray(median, dtype=float), deviation.shape), deviation)


def interval_of(
    case: Case, uncertainty: Uncertainty, known_gpu: Mask = True
) -> tuple[Floats, Floats]:
    """Compute the ends between which 80 of 100 unseen sites measure a step: seconds, [cases]."""
    spread = time_spread(case, prior_of(uncertainty.time, TIME_NAMES), uncertainty.time, known_gpu)
    return spread.low, spread.high


def layout_deviation(belief: Belief, doubt: Doubt) -> float:
    """Compute the deviation of the logarithm of two layouts' times that multipliers move alike."""
    noise = sqrt(2 * TAILS * belief.noise_factor) * doubt.layout_noise
    return doubt.widening * noise


def probability_faster(
    seconds: Floats, effects: Floats, places: Floats, belief: Belief, doubt: Doubt
) -> Floats:
    """Compute the probability that the first of some layouts has a shorter step than each: [rows].

    What both share cancels out: their difference has the variance of the difference of their
    effects, and of the noise that layouts of one model do not share.
    """
    deviation = belief.difference(effects, doubt.layout_noise, places)
    margin = np.log(seconds / seconds[0]) / np.maximum(deviation, 1e-9)
    return np.asarray(_probit(margin / doubt.widening))
