"""Compare one plan on preemptible nodes with the same plan on others.

Belongs here: the comparison and its reason. Does not belong here: either forecast.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from hpctrain.base.errors import DoesNotFitError
from hpctrain.base.units import Duration
from hpctrain.plan.forecast.documents import (
    Budget,
    Forecast,
    RunFacts,
    SpotComparison,
    Tariff,
)
from hpctrain.plan.forecast.interruptions import node_mtbf_seconds
from hpctrain.plan.forecast.predict import forecast
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.profile.hardware import ReliabilityProfile
from hpctrain.spec.run import RunSpec

# Shortest interval of the search for the break-even preemption interval, and its bisections.
_SHORTEST_SECONDS, _BISECTIONS = 60.0, 40


def compare_spot(
    spec: RunSpec,
    profile: ClusterProfile,
    facts: RunFacts,
    budget: Budget | None = None,
    predict: Callable[[RunFacts], Forecast] | None = None,
) -> SpotComparison | None:
    """Forecast both with `predict` and recommend one; None where the profile has no spot price.

    The closed forms predict where `predict` is None, and the break-even in any case. The cheaper
    one that meets the deadline of `budget` is recommended; where neither meets it, the faster one.
    """
    if profile.prices is None or profile.prices.spot is None:
        return None
    predict = predict or partial(forecast, spec, profile)
    safe = predict(facts.model_copy(update={"spot": False}))
    deadline = budget.deadline if budget else None
    taken: Forecast | None
    recommended: Tariff
    try:
        taken = predict(facts.model_copy(update={"spot": True}))
    except DoesNotFitError as error:
        taken, recommended, reason = None, "on demand", f"on spot, {error}"
    else:
        recommended, reason = _recommendation(safe, taken, deadline)
    return SpotComparison(
        on_demand=safe,
        spot=taken,
        recommended=recommended,
        reason=reason,
        break_even_preemption_seconds=_break_even(spec, profile, facts),
    )


def _recommendation(
    safe: Forecast, taken: Forecast, deadline: Duration | None
) -> tuple[Tariff, str]:
    currency, slower = safe.cost.currency if safe.cost else "", taken.days - safe.days
    saved = _amount(safe) - _amount(taken)
    late = deadline is not None and taken.most_seconds > deadline
    if late and deadline is not None and safe.most_seconds <= deadline:
        return "on demand", (
            f"spot may end {_days(taken.most_seconds - deadline)} after the deadline"
        )
    if late and taken.days > safe.days:
        return "on demand", "neither meets the deadline, and on demand ends earlier"
    if saved <= 0:
        return "on demand", (
            f"{taken.preemptions:.1f} preemptions cost more than the lower price saves "
            f"({-saved:,.0f} {currency} more on spot)"
        )
    return "spot", (
        f"it saves {saved:,.0f} {currency} ({saved / _amount(safe):.0%}) and takes "
        f"{_days(slower * 86400)} longer"
    )


def _break_even(spec: RunSpec, profile: ClusterProfile, facts: RunFacts) -> float | None:
    """Find the preemption interval, in seconds, at which spot and on demand cost the same.

    By bisection of its logarithm, because the cost on spot falls as preemptions become rarer. 0
    where spot is cheaper even with one a minute, None where it is dearer even with one in ten
    years.
    """
    reliability = profile.reliability or ReliabilityProfile(
        node_mtbf=Duration(node_mtbf_seconds(profile))
    )

    on_demand = _amount(forecast(spec, profile, facts.model_copy(update={"spot": False})))

    def dearer(mtbf_seconds: float) -> bool:
        changed = reliability.model_copy(update={"preemption_mtbf": Duration(mtbf_seconds)})
        changed_profile = profile.model_copy(update={"reliability": changed})
        try:
            spot = forecast(spec, changed_profile, facts.model_copy(update={"spot": True}))
        except DoesNotFitError:
            return True
        return _amount(spot) > on_demand

    low, high = _SHORTEST_SECONDS, 3650 * 86400.0
    if not dearer(low):
        return 0.0
    if dearer(high):
        return None
    for _ in range(_BISECTIONS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if dearer(middle) else (low, middle)
    return high


def _amount(forecast: Forecast) -> float:
    assert forecast.cost is not None
    return forecast.cost.amount


def _days(seconds: float) -> str:
    return f"{seconds / 86400:.1f} d" if abs(seconds) >= 2 * 86400 else f"{seconds / 3600:.1f} h"
