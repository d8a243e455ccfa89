"""What is believed of one site and engine: the packaged prior, its own rates, its own runs.

Belongs here: choosing among them. Does not belong here: the update (`belief`), intervals
(`intervals`), what a case gets of it (`hpctrain.plan.cost.learned`), files.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from hpctrain.plan.cost.learned import knows_gpu, learning_of
from hpctrain.plan.cost.multipliers import MEMORY
from hpctrain.plan.cost.places import AXES
from hpctrain.plan.request import PlanRequest
from hpctrain.plan.uncertainty.belief import Belief, Observations, Rest, updated
from hpctrain.plan.uncertainty.intervals import TIME_NAMES, prior_of
from hpctrain.spec.calibration import Doubt, Learned, LearnedRest

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
    time = with_rates(prior, knowledge.measured)
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


def with_rates(prior: Belief, measured: tuple[str, ...]) -> Belief:
    """Narrow multipliers whose rates were measured: the constants are those rates already."""
    effects = np.array([[float(name == one) for name in TIME_NAMES] for one in measured])
    if not measured:
        return prior
    noise = np.full(len(measured), RATE_NOISE)
    seen = Observations(np.zeros(len(measured)), effects, noise)
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
