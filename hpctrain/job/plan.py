"""Plans one spec on one profile, or on several numbers of GPUs.

Belongs here: loading, measuring the search, combining plan and forecast, and choosing among sizes.
Does not belong here: planning itself (`hpctrain.plan`), text.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpctrain.base.errors import (
    DoesNotFitError,
    HpctrainError,
    LimitError,
    RefusedPlanError,
    UsageError,
)
from hpctrain.job.prepare import load_inputs, load_knowledge
from hpctrain.plan.alternatives import explain
from hpctrain.plan.documents import Explanation, Goal, Plan
from hpctrain.plan.forecast.documents import (
    Budget,
    BudgetDecision,
    Forecast,
    RunFacts,
    SpotComparison,
)
from hpctrain.plan.forecast.options import cheapest_plan, check_currency, compare_spot
from hpctrain.plan.forecast.predict import run_facts
from hpctrain.plan.limits import usable_gpus
from hpctrain.plan.planner import Decision, decide
from hpctrain.plan.request import Knowledge, PlanRequest
from hpctrain.simulate.forecasts import forecast_run
from hpctrain.spec.loader import Loaded
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.run import RunSpec


@dataclass(frozen=True)
class Inputs:
    """Documents that are loaded once for any number of plans; `source` knows places in the file."""

    spec: RunSpec
    profile: ClusterProfile
    knowledge: Knowledge
    source: Loaded[RunSpec] | None = None

    def placed(self, refusal: HpctrainError) -> HpctrainError:
        """Return a refusal with the places of its fields, where the spec's file is known."""
        if self.source is None or not isinstance(refusal, RefusedPlanError):
            return refusal
        return refusal.at(self.source.problem)


@dataclass(frozen=True)
class Option:
    """One number of GPUs: the decision, the time of the search, and the forecast.

    `refusal` is the reason for a missing plan, `remark` that for a missing forecast.
    """

    gpus: int
    decision: Decision | None = None
    search_seconds: float = 0.0
    forecast: Forecast | None = None
    refusal: HpctrainError | None = None
    remark: str | None = None

    @property
    def plan(self) -> Plan | None:
        return self.decision.plan if self.decision else None


def load(spec: Path, profile: str, overrides: Sequence[str] = ()) -> Inputs:
    """Read everything. Raises InvalidInputError with the problems of both files at once."""
    loaded_spec, loaded_profile = load_inputs(spec, profile, overrides)
    knowledge = load_knowledge(loaded_profile)
    return Inputs(loaded_spec.document, loaded_profile.document, knowledge, loaded_spec)


def plan_option(
    inputs: Inputs, goal: Goal, gpus: int | None = None, before_seconds: float = math.inf
) -> Option:
    """Plan on `gpus` GPUs (default: those of the spec), or record why that is impossible.

    No forecast is made of a plan that trains for longer than `before_seconds`.
    """
    spec = inputs.spec if gpus is None else with_gpus(inputs.spec, gpus)
    start = time.perf_counter()
    try:
        decision = decide(PlanRequest(spec, inputs.profile, inputs.knowledge, goal))
    except (DoesNotFitError, LimitError) as error:
        return Option(spec.resources.gpus, refusal=error)
    seconds = time.perf_counter() - start
    facts = run_facts(decision.job)
    if facts is None or facts.step_seconds * facts.train_steps > before_seconds:
        return Option(spec.resources.gpus, decision, seconds)
    try:
        predicted = forecast_run(decision.job, facts)
    except DoesNotFitError as error:
        return Option(spec.resources.gpus, decision, seconds, remark=str(error))
    return Option(spec.resources.gpus, decision, seconds, predicted)


def explanation(inputs: Inputs, option: Option, goal: Goal, top: int) -> Explanation:
    """Explain why the plan of `option` wins.

    A layout that the spec gives is compared with the one that `parallel: auto` would choose. Raises
    what planning raises.
    """
    decision = option.decision
    assert decision is not None
    if decision.request.spec.parallel == "auto":
        explained = explain(decision, top)
        return explained.model_copy(update={"search_seconds": option.search_seconds})
    free = decision.request.spec.model_copy(update={"parallel": "auto"})
    start = time.perf_counter()
    other = decide(PlanRequest(free, inputs.profile, inputs.knowledge, goal))
    seconds = time.perf_counter() - start
    explained = explain(other, top, given=decision.found.candidate(decision.row))
    return explained.model_copy(update={"search_seconds": seconds})


def freed(spec: RunSpec, given: Sequence[str] = ()) -> RunSpec:
    """Leave layout and micro-batch to the search, but for the fields `given` by `--set`."""
    changes: dict[str, object] = {}
    if not any(field.partition(".")[0] == "parallel" for field in given):
        changes["parallel"] = "auto"
    if "batch.micro" not in given:
        changes["batch"] = spec.batch.model_copy(update={"micro": "auto"})
    return spec.model_copy(update=changes)


def with_gpus(spec: RunSpec, gpus: int) -> RunSpec:
    """Copy a spec with another number of GPUs."""
    return spec.model_copy(update={"resources": spec.resources.model_copy(update={"gpus": gpus})})


def spot_comparison(inputs: Inputs, option: Option, budget: Budget | None) -> SpotComparison | None:
    """Compare spot with on demand for one option; None without spot price or forecast."""
    if option.decision is None or option.forecast is None:
        return None
    job, known = option.decision.job, option.forecast
    facts = run_facts(job)
    assert facts is not None

    def predict(facts: RunFacts) -> Forecast:
        same = facts.spot is (known.tariff == "spot")
        return known if same else forecast_run(job, facts)

    try:
        return compare_spot(job.spec, job.profile, facts, budget, predict)
    except DoesNotFitError:
        return None


def sizes_to_try(inputs: Inputs) -> tuple[int, ...]:
    """List halvings and doublings of the requested GPUs, in whole nodes, up to a run's limit."""
    wanted, per_node = inputs.spec.resources.gpus, inputs.profile.gpu.per_node
    limit = usable_gpus(inputs.spec, inputs.profile)
    smaller = [wanted >> n for n in range(wanted.bit_length()) if wanted % 2**n == 0]
    larger = [wanted << n for n in range(1, 12) if wanted << n <= limit]
    sizes = sorted({*smaller, *larger})
    return tuple(n for n in sizes if n <= limit and (n <= per_node or n % per_node == 0))


def best_option(options: Sequence[Option], goal: Goal) -> Option:
    """Choose the option to show: it ends first, has the fewest GPU-hours, or most free memory.

    Where some have no forecast, the steps of all are compared.
    Raises the refusal of the last option when no size has a plan.
    """
    planned = [option for option in options if option.plan is not None]
    if not planned:
        refusal = options[-1].refusal
        assert refusal is not None
        raise refusal

    known = all(option.forecast is not None for option in planned)

    def cost(option: Option) -> float:
        plan, forecast = option.plan, option.forecast
        assert plan is not None
        if known and forecast is not None and goal != "memory":
            return forecast.gpu_hours if goal == "gpu-hours" else forecast.days
        if goal == "memory" or plan.step_seconds is None:
            return float(max(stage.total_bytes for stage in plan.memory))
        return plan.step_seconds * (option.gpus if goal == "gpu-hours" else 1)

    return min(planned, key=cost)


def within_budget(
    inputs: Inputs, options: Sequence[Option], budget: Budget
) -> tuple[BudgetDecision, Option]:
    """Choose the cheapest option that meets the budget, on demand or spot; else the nearest.

    Raises UsageError for a currency that the profile does not have or where no option has a
    forecast.
    """
    check_currency(budget, inputs.profile)
    priced: list[tuple[Forecast, Option]] = []
    for option in options:
        comparison = spot_comparison(inputs, option, budget)
        forecasts = [option.forecast, comparison.spot if comparison else None]
        forecasts += [comparison.on_demand] if comparison else []
        for one in {f.tariff: f for f in forecasts if f is not None}.values():
            priced.append((one, option))
    if not priced:
        reason = next((str(o.refusal or o.remark) for o in options if o.refusal or o.remark), "")
        raise UsageError(
            "--budget and --deadline need a predicted step time, and there is none",
            hint=reason or "add `gpu.peak` and `gpu.memory_bandwidth` to the profile",
        )
    decision = cheapest_plan([one for one, _ in priced], budget)
    chosen, option = priced[decision.nearest if decision.chosen is None else decision.chosen]
    return decision, replace(option, forecast=chosen, refusal=None)
