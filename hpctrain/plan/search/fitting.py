"""How likely candidates fit into a GPU's memory.

Belongs here: the deviation of predicted peaks, and the bounds on the probability. Does not belong
here: peaks (`cost.memory`), choosing (`ranking`).
"""

from __future__ import annotations

import numpy as np

from hpctrain.plan.cost.case import Case, Floats
from hpctrain.plan.request import PlanRequest
from hpctrain.plan.uncertainty.intervals import Spread, memory_deviation
from hpctrain.plan.uncertainty.site import belief_of

COMFORTABLE = 0.9  # a layout that fits with this probability is preferred to less sure ones
# Without a known deviation: what PyTorch's allocator wastes is a few percent of the memory, and a
# layout that fills less than 94 % of it fits with 90 % (see `deviations`).
PLAIN_DEVIATION = 0.048


def deviations(request: PlanRequest, case: Case, peaks: Floats) -> Floats:
    """Compute the deviation of the logarithm of each peak of the cost model: [rows]."""
    belief = belief_of(request)
    if belief is None:
        return np.full(len(peaks), PLAIN_DEVIATION)
    return memory_deviation(case, peaks, belief.memory, belief.memory_doubt, belief.known_gpu)


def probabilities(peaks: Floats, deviation: Floats, capacity_bytes: float) -> Floats:
    """Compute the probability that a GPU has enough memory: [rows]."""
    return Spread(peaks, deviation).within(capacity_bytes)


def comfortable(request: PlanRequest) -> float:
    """Return the probability from which on layouts are as good as sure, as the spec allows."""
    return max(COMFORTABLE, request.spec.fit_probability)
