"""From what is believed of a site to intervals, and to probabilities of fitting and being faster.

Belongs here: the packaged prior, a site's rates and runs for one request, and what follows for its
figures. Does not belong here: the update (`belief`), effects (`cost.multipliers`), files, text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import erf, sqrt
from statistics import NormalDist

import numpy as np

from hpctrain.plan.cost.case import Array, Case, Floats, Mask
from hpctrain.plan.cost.from_spec import case_of
from hpctrain.plan.cost.memory import peak_bytes
from hpctrain.plan.cost.multipliers import (
    AXES,
    CLASSES,
    MEMORY,
    TIME,
    classes_of,
    knows_gpu,
    learning_of,
    memory_sensitivities,
    places_of,
    sensitivities,
)
from hpctrain.plan.cost.step import step_seconds
from hpctrain.plan.documents import Certainty, DoubtPart, MemoryBreakdown, Prediction
from hpctrain.plan.mesh.candidate import Candidate, columns_of
from hpctrain.plan.request import PlanRequest
from hpctrain.plan.uncertainty.belief import TAILS, Belief, Observations, Rest, updated
from hpctrain.spec.calibration import Doubt, Learned, LearnedRest, SiteLearning, Uncertainty

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


# -- What is believed of one site and engine: the packaged prior, its own rates, its own runs -----


# A rate that was measured alone, in large pieces, against the same work inside a step: clocks,
# neighbouring kernels and smaller pieces are between the two.
RATE_NOISE = 0.06


@dataclass(frozen=True)
class SiteBelief:
    """Beliefs about time and memory with what single runs add, for one request."""

    time: Belief
    memory: Belief
    time_doubt: Doubt
    memory_doubt: Doubt
    known_gpu: bool


def belief_of(request: PlanRequest) -> SiteBelief | None:
    """Return what is believed of the request's site and engine; None without packaged prior."""
    knowledge = request.knowledge
    if knowledge is None or knowledge.uncertainty is None or knowledge.gpu is None:
        return None
    packaged, learned = knowledge.uncertainty, learning_of(request)
    prior = prior_of(packaged.time, TIME_NAMES)
    if request.profile.network.fabric not in packaged.measured_fabrics:
        prior = widened(prior, ("network",), packaged.other_network)
    # where a rate was measured the constants are that rate already
    time = with_rates(prior, dict.fromkeys(knowledge.measured, 0.0))
    memory = prior_of(packaged.memory, MEMORY)
    time_doubt, memory_doubt = packaged.time, packaged.memory
    if learned is not None:
        time, time_doubt = _as_belief(learned.time, TIME_NAMES), with_own_runs(time_doubt)
        if learned.memory is not None:
            memory = _as_belief(learned.memory, MEMORY)
            memory_doubt = with_own_runs(memory_doubt)
    return SiteBelief(time, memory, time_doubt, memory_doubt, knows_gpu(request))


def with_own_runs(doubt: Doubt) -> Doubt:
    """Widen intervals as they have to be once own runs have taught."""
    return doubt.model_copy(update={"widening": doubt.learned_widening})


def widened(prior: Belief, names: Iterable[str], deviation: float) -> Belief:
    """Know no more of these multipliers of time than a deviation, each apart from the others."""
    covariance = prior.covariance.copy()
    for one in map(TIME_NAMES.index, names):
        covariance[one, :] = covariance[:, one] = 0.0
        covariance[one, one] = deviation**2
    return replace(prior, covariance=covariance)


def with_rates(prior: Belief, rates: Mapping[str, float]) -> Belief:
    """Update multipliers by rates that were measured one by one, as logarithms."""
    if not rates:
        return prior
    effects = np.array([[float(name == one) for name in TIME_NAMES] for one in rates])
    noise = np.full(len(rates), RATE_NOISE)
    seen = Observations(np.array(list(rates.values())), effects, noise)
    return updated(prior, seen, freedom=np.inf, trust=np.inf)


def as_learned(belief: Belief, names: tuple[str, ...]) -> Learned:
    """Turn a belief into its document, with six digits.

    `names`: of the multipliers, then of the places that were seen.
    """
    rest = belief.rest
    return Learned(
        names=names,
        mean=tuple(_rounded(value) for value in belief.mean),
        covariance=tuple(tuple(_rounded(value) for value in row) for row in belief.covariance),
        noise_factor=_rounded(belief.noise_factor),
        rest=None
        if rest is None
        else LearnedRest(
            deviation=rest.deviation,
            reach=rest.reach,
            axes=AXES,
            places=tuple(tuple(_rounded(value) for value in place) for place in rest.seen),
        ),
    )


def _as_belief(learned: Learned, names: tuple[str, ...]) -> Belief:
    """Turn a document into a belief about `names`, in whatever order it has them, and places."""
    known = learned.multipliers
    order = [*map(known.index, names), *range(len(known), len(learned.names))]
    mean, covariance = np.array(learned.mean)[order], np.array(learned.covariance)
    covariance, rest = covariance[np.ix_(order, order)], learned.rest
    if rest is None:
        return Belief(mean, covariance, learned.noise_factor)
    seen = np.array(rest.places).reshape(-1, len(rest.axes))
    return Belief(mean, covariance, learned.noise_factor, Rest(rest.deviation, rest.reach, seen))


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


# -- How sure the figures of one plan are, as the document that `plan` shows ----------------------


_NAMED = 3  # of the runs that a plan leans on


def certainty_of(
    request: PlanRequest,
    candidate: Candidate,
    prediction: Prediction | None,
    memory: Sequence[MemoryBreakdown],
) -> Certainty | None:
    """Compute the intervals of one candidate; None where nothing is known of errors."""
    belief = belief_of(request)
    if belief is None:
        return None
    case = case_of(request, columns_of(candidate))
    peak = float(max(stage.total_bytes for stage in memory))
    bytes_ = memory_spread(case, belief.memory, belief.memory_doubt, belief.known_gpu, peak)
    found = Certainty(
        low_peak_bytes=round(float(bytes_.low[0])),
        high_peak_bytes=round(float(bytes_.high[0])),
        fit_probability=float(bytes_.within(float(request.profile.gpu.memory))[0]),
        calibrated=_told(learning_of(request)),
        measured=request.knowledge.measured if request.knowledge else (),
    )
    if prediction is None:
        return found
    total = prediction.parts.total_seconds
    seconds = time_spread(case, belief.time, belief.time_doubt, belief.known_gpu, total)
    parts = doubt_parts(case, belief.time, belief.time_doubt, belief.known_gpu)
    return found.model_copy(
        update={
            "low_step_seconds": float(seconds.low[0]),
            "high_step_seconds": float(seconds.high[0]),
            "step_deviation": float(seconds.deviation[0]),
            "layout_deviation": layout_deviation(belief.time, belief.time_doubt),
            "doubt": tuple(
                DoubtPart(name=name, share=round(share, 3))
                for name, share in parts.items()
                if share > 0.01
            ),
        }
    )


def _told(learning: SiteLearning | None) -> str | None:
    """Format `6 runs of this cluster until 2026-11-20 (a, b, c, ...), error 3 %`."""
    if learning is None:
        return None
    runs = learning.runs
    names = ", ".join(run.run for run in runs[:_NAMED]) + (", ..." if len(runs) > _NAMED else "")
    count = f"{len(runs)} run{'s' if len(runs) > 1 else ''}"
    last = max(run.day for run in runs)
    until = f" until {last}" if last else ""
    return f"{count} of this cluster{until} ({names}): ±{learning.error:.0%} on the next one"
