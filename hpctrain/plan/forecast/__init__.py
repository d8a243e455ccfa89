"""What a run costs: days, failures, checkpoints, money; and what a budget can pay for.

Belongs here: everything that follows from a step time, a number of GPUs and what the profile says
of prices and failures. Does not belong here: how long a step takes (the cost model's business),
layouts, sentences for the terminal (`hpctrain.cli.forecast_text`).
"""

from __future__ import annotations

from hpctrain.plan.forecast.budget import cheapest_plan, check_currency, parse_budget
from hpctrain.plan.forecast.documents import (
    Budget,
    BudgetDecision,
    Forecast,
    RunFacts,
    SpotComparison,
)
from hpctrain.plan.forecast.predict import forecast
from hpctrain.plan.forecast.spot import compare_spot

__all__ = [
    "Budget",
    "BudgetDecision",
    "Forecast",
    "RunFacts",
    "SpotComparison",
    "cheapest_plan",
    "check_currency",
    "compare_spot",
    "forecast",
    "parse_budget",
]
