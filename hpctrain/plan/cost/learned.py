"""Put what a site's own runs have taught into the constants of a case.

Belongs here: the mean of the multipliers of one request. Does not belong here: how it was learned
(`hpctrain.plan.uncertainty`), what a multiplier changes (`multipliers`).
"""

from __future__ import annotations

import numpy as np

from hpctrain.plan.cost.case import Array, Case, Floats
from hpctrain.plan.cost.classes import CLASSES, classes_of
from hpctrain.plan.cost.multipliers import MEMORY, TIME, scaled
from hpctrain.plan.cost.places import places_of, weights_of
from hpctrain.plan.request import PlanRequest
from hpctrain.spec.calibration import LearnedRest, SiteLearning


def learning_of(request: PlanRequest) -> SiteLearning | None:
    """Return what runs of the request's engine have taught on this cluster."""
    return request.knowledge.learned.get(request.spec.engine.name) if request.knowledge else None


def knows_gpu(request: PlanRequest) -> bool:
    """Tell whether constants were fitted to measurements of the cluster's kind of GPU."""
    knowledge = request.knowledge
    if knowledge is None or knowledge.uncertainty is None or knowledge.gpu is None:
        return True
    return knowledge.gpu.name in knowledge.uncertainty.measured_gpus


def corrected(case: Case, request: PlanRequest) -> Case:
    """Scale the constants of a case by the mean of what runs have taught."""
    found = learning_of(request)
    if found is None:
        return case
    logs: dict[str, Array] = dict(zip(found.time.names, found.time.mean, strict=True))
    belongs = classes_of(case, knows_gpu(request))[0]  # alike in all layouts of a spec
    for name, share in zip(CLASSES, belongs, strict=True):
        logs["everything"] += float(share) * logs[name]
    if found.time.rest is not None and found.time.rest.places:
        logs["everything"] = logs["everything"] + _rest(case, found.time.rest, found.time.mean)
    if found.memory is not None:
        logs |= dict(zip(found.memory.names, found.memory.mean, strict=True))
    return scaled(case, {name: logs[name] for name in (*TIME, *MEMORY) if name in logs})


def _rest(case: Case, rest: LearnedRest, mean: tuple[float, ...]) -> Floats:
    """Compute what runs of configurations like each case have left to correct: [cases]."""
    weights = weights_of(places_of(case, rest.axes), np.array(rest.places), rest.reach)
    return np.asarray(weights @ np.array(mean[-len(rest.places) :]))
