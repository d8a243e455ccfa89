"""Which candidates a prediction cannot tell apart from the chosen one.

What makes one layout of a model slower than planned mostly makes its neighbours slower too: the
difference of two predictions is surer than either. Belongs here: the probability that one candidate
is faster than another. Does not belong here: beliefs (`plan.uncertainty`), choosing (`ranking`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpctrain.plan.cost.case import Floats
from hpctrain.plan.cost.from_spec import case_of
from hpctrain.plan.cost.places import places_of
from hpctrain.plan.documents import TOLD_APART
from hpctrain.plan.mesh.columns import Columns
from hpctrain.plan.request import PlanRequest
from hpctrain.plan.search.layouts import Found
from hpctrain.plan.uncertainty.intervals import probability_faster, time_effects
from hpctrain.plan.uncertainty.site import belief_of

_MOST_LOOKED_AT = 16
_NEAR = 1.15  # of the best step: slower ones are not looked at


@dataclass(frozen=True)
class Rivals:
    """Other meshes that may be faster: how many, and the one that is nearest."""

    count: int
    nearest: str
    slower: float
    probability: float


def rivals(found: Found, row: int) -> Rivals | None:
    """Find meshes whose best candidate cannot be told apart from the chosen one.

    None where nothing is known of errors, or where something else than time was chosen by.
    """
    request, columns, seconds = found.request, found.columns, found.step_seconds
    if belief_of(request) is None or not found.timed or request.goal == "memory":
        return None
    near = np.flatnonzero(found.roomy & (seconds <= _NEAR * seconds[row]))
    near = near[columns.mesh[near] != columns.mesh[row]]
    near = near[np.argsort(seconds[near], kind="stable")]
    _, first = np.unique(columns.mesh[near], return_index=True)
    others = near[np.sort(first)][:_MOST_LOOKED_AT]
    if not len(others):
        return Rivals(0, "", 0.0, 0.0)
    rows = np.concatenate([[row], others]).astype(np.intp)
    odds = winner_faster(request, columns.take(rows), seconds[rows])[1:]
    open_ = np.flatnonzero(odds < TOLD_APART)
    if not len(open_):
        return Rivals(0, "", 0.0, 0.0)
    best = int(others[open_[0]])
    return Rivals(
        count=len(open_),
        nearest=str(found.candidate(best).layout),
        slower=float(seconds[best] / seconds[row] - 1),
        probability=1 - float(odds[open_[0]]),
    )


def winner_faster(request: PlanRequest, columns: Columns, seconds: NDArray[np.float64]) -> Floats:
    """Compute the probability that the first row has a shorter step than each row: [rows]."""
    belief = belief_of(request)
    assert belief is not None
    case = case_of(request, columns)
    effects, places = (
        np.broadcast_to(found, (len(columns), found.shape[1]))
        for found in (time_effects(case, belief.known_gpu), places_of(case))
    )
    return probability_faster(seconds, effects, places, belief.time, belief.time_doubt)
