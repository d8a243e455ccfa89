"""Priced options of a run: their words, a choice by budget and deadline, spot or on demand.

Belongs here: text that the forecast's own sentences and the command line share, choosing, and
reporting what is missing. Does not belong here: forecasts (`predict`), paragraphs and columns
(`hpctrain.job.plan_text`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from hpctrain.base.errors import DoesNotFitError, UsageError
from hpctrain.base.units import Duration, Money, short_duration
from hpctrain.plan.forecast.documents import (
    Budget,
    BudgetDecision,
    Forecast,
    RunFacts,
    SpotComparison,
    Tariff,
)
from hpctrain.plan.forecast.predict import forecast
from hpctrain.plan.forecast.rates import node_mtbf_seconds
from hpctrain.plan.job import JobSpec
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.profile.hardware import ReliabilityProfile

# -- Words: means with the range of the played runs ---------------------------------------------


_DAY_SECONDS = 86400


def describe(option: Forecast) -> str:
    """Format an option: `512 GPUs on spot (26-31 d, 310,000 USD)`."""
    money = f", {option.cost.amount:,.0f} {option.cost.currency}" if option.cost else ""
    tariff = " on spot" if option.tariff == "spot" else ""
    return f"{option.gpus:,} GPUs{tariff} ({days_range(option)}{money})"


def days_range(forecast: Forecast) -> str:
    """Format the wall-clock time: `52-63 d`; one figure where both ends are alike."""
    spread = forecast.spread
    if spread is None:
        return days(forecast.times.total_seconds)
    return span(spread.least_seconds, spread.most_seconds)


def days_column(forecast: Forecast) -> str:
    """Format days for a column, without the unit: `52-63`, `1.8-2.2`, `0.011`."""
    spread = forecast.spread
    ends = (
        (spread.least_seconds, spread.most_seconds) if spread else (forecast.times.total_seconds,)
    )
    digits = max(0, 1 - math.floor(math.log10(max(ends) / _DAY_SECONDS)))  # two significant ones
    texts = [f"{seconds / _DAY_SECONDS:,.{digits}f}" for seconds in ends]
    return "-".join(dict.fromkeys(texts))


def span(low: float, high: float) -> str:
    """Format two times in the unit of the longer one: `44-58 d`, `1.8-2.2 d`, `90-110 min`."""
    first, last = days(low), days(high)
    unit = last.rpartition(" ")[2]
    scale = {"d": _DAY_SECONDS, "h": 3600.0, "min": 60.0, "s": 1.0}.get(unit)
    if first == last or scale is None:
        return last
    digits = 0 if high / scale >= 20 else 1
    low_text, high_text = (f"{value / scale:,.{digits}f}" for value in (low, high))
    return f"{high_text} {unit}" if low_text == high_text else f"{low_text}-{high_text} {unit}"


def money_range(forecast: Forecast) -> str | None:
    """Format the money with its range, `930,000-998,000 USD`; None without prices."""
    cost = forecast.cost
    if cost is None:
        return None
    if cost.least_amount is None or cost.most_amount is None:
        return f"{cost.amount:,.0f} {cost.currency}"
    low, high = f"{cost.least_amount:,.0f}", f"{cost.most_amount:,.0f}"
    return f"{high} {cost.currency}" if low == high else f"{low}-{high} {cost.currency}"


def days(seconds: float) -> str:
    """Format as `short_duration`, but days without exponent and with a thousands separator."""
    if seconds >= 2 * _DAY_SECONDS:
        number = seconds / _DAY_SECONDS
        return f"{number:,.1f} d" if number < 100 else f"{number:,.0f} d"
    return short_duration(seconds)


# -- A budget of money and a deadline -------------------------------------------------------------


Value = TypeVar("Value")

# Where nothing comes near the limit, figures of what is missing say nothing.
_ABSURD = 100


def parse_budget(money: str | None, deadline: str | None) -> Budget:
    """Parse `--budget` and `--deadline`; raises UsageError with the option's name."""
    amount = _read("--budget", Money.parse, money)
    limit = _read("--deadline", Duration.parse, deadline)
    if limit is not None and limit <= 0:
        raise UsageError("--deadline: must be above 0", "write for example `--deadline 30d`")
    return Budget(
        money=amount.amount if amount else None,
        currency=amount.currency if amount else None,
        deadline=limit,
    )


def _read(option: str, parse: Callable[[str], Value], text: str | None) -> Value | None:
    try:
        return None if text is None else parse(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None


def check_currency(budget: Budget, profile: ClusterProfile) -> None:
    """Raise UsageError where the budget's money cannot be compared with the profile's prices."""
    if budget.money is None:
        return
    if profile.prices is None:
        raise UsageError(
            f"--budget: profile {profile.name} has no prices",
            "add to the profile: `prices: {currency: "
            f"{budget.currency}, on_demand: PRICE_OF_A_GPU_HOUR}}`",
        )
    currency = profile.prices.currency
    if budget.currency != currency:
        raise UsageError(
            f"--budget: {budget.currency} cannot be compared with the prices of profile "
            f"{profile.name}, which are in {currency}",
            f"give the budget in {currency}, for example `--budget {budget.money:.0f}"
            f"{currency.lower()}` if it is worth that much",
        )


def cheapest_plan(options: Sequence[Forecast], budget: Budget) -> BudgetDecision:
    """Choose the cheapest option that meets money and deadline, else report what is missing.

    A limit is met where 95 of 100 played runs keep within it; without played runs, by the mean.
    `options` must not be empty, and must have costs in the budget's currency where the budget has
    money (`check_currency`). Without money the cheapest that meets the deadline is taken; where
    nothing has a price, the one with the fewest GPU-hours. Without any, the nearest option is the
    one with the smallest sum of both overruns, each as a share of the limit.
    """
    assert options and (budget.money is None or all(option.cost for option in options))
    count = f"{len(options)} option{'s' if len(options) != 1 else ''}"
    meets = tuple(
        number
        for number, option in enumerate(options)
        if _in_time(option, budget) and _paid(option, budget)
    )
    if meets:
        chosen = min(meets, key=lambda number: (_price(options[number]), options[number].days))
        fastest = min(meets, key=lambda number: options[number].times.total_seconds)
        best, quick = options[chosen], options[fastest]
        lines = [f"{describe(best)} is the cheapest of {count} that meets {_limits(budget)}"]
        if quick.times.total_seconds < best.times.total_seconds:
            lines.append(f"the fastest of those that meet it: {describe(quick)}")
        if best.spread is not None:
            also = "failures and the error of the step time are in them"
            if not best.spread.step_deviation:
                also = "the step time is taken as predicted"
            lines.append(f"met in 95 of 100 played runs; {also}")
        elif budget.deadline is not None:
            lines.append("the forecast is a mean, no run was played: some runs take longer")
        return BudgetDecision(chosen=chosen, nearest=chosen, meets=meets, lines=tuple(lines))

    def excess(option: Forecast) -> float:
        late = option.most_seconds / budget.deadline - 1 if budget.deadline else 0.0
        over = _most_money(option) / budget.money - 1 if budget.money else 0.0
        return max(0.0, late) + max(0.0, over)

    nearest = min(
        range(len(options)), key=lambda number: (excess(options[number]), _price(options[number]))
    )
    missing = [f"no plan of {count} meets {_limits(budget)}"]
    if budget.deadline is not None:
        missing.append(_deadline_line(options, budget, budget.deadline))
    if budget.money is not None:
        missing.append(_money_line(options, budget, budget.money))
    named = describe(options[nearest])
    if len(options) > 1 and not any(named in line for line in missing):
        missing.append(f"nearest: {named}, {_overruns(options[nearest], budget)}")
    elif budget.deadline is not None and budget.money is not None:
        missing.append(f"nearest: {named.partition(' (')[0]}")
    return BudgetDecision(chosen=None, nearest=nearest, meets=(), lines=tuple(missing))


def _price(option: Forecast) -> float:
    return option.cost.amount if option.cost else option.gpu_hours


def _in_time(option: Forecast, budget: Budget) -> bool:
    return budget.deadline is None or option.most_seconds <= budget.deadline


def _paid(option: Forecast, budget: Budget) -> bool:
    return budget.money is None or _most_money(option) <= budget.money


def _most_money(option: Forecast) -> float:
    assert option.most_cost is not None, "`check_currency` has seen prices"
    return option.most_cost


def _deadline_line(options: Sequence[Forecast], budget: Budget, deadline: Duration) -> str:
    """Report the GPUs that the deadline needs; with perfect scaling if no option meets it."""
    quick = [option for option in options if _in_time(option, budget)]
    if quick:
        least = min(quick, key=lambda option: (option.gpus, _price(option)))
        return (
            f"the deadline needs {least.gpus:,} GPUs: {describe(least)}, {_overruns(least, budget)}"
        )
    fastest = min(options, key=lambda option: option.most_seconds)
    times = fastest.most_seconds / deadline
    if times > _ABSURD:
        return f"the fastest, {describe(fastest)}, takes more than {_ABSURD} times as long"
    needed = math.ceil(fastest.gpus * times)
    return (
        f"the deadline needs at least {needed:,} GPUs even if speed grew with their number; "
        f"the fastest is {describe(fastest)}, {_overruns(fastest, budget)}"
    )


def _money_line(options: Sequence[Forecast], budget: Budget, money: float) -> str:
    """Report how many GPUs the money pays for, or what share of the run."""
    affordable = [option for option in options if _paid(option, budget)]
    if affordable:
        most = max(affordable, key=lambda option: (option.gpus, -_price(option)))
        return (
            f"the budget pays for {most.gpus:,} GPUs: {describe(most)}, {_overruns(most, budget)}"
        )
    cheapest = min(options, key=_price)
    share = money / _most_money(cheapest)
    whole, unit = (cheapest.tokens, "tokens") if cheapest.tokens else (cheapest.steps, "steps")
    return (
        f"the budget pays for {share:.0%} of the run ({int(share * whole):,} of {whole:,} {unit}); "
        f"the cheapest is {describe(cheapest)}, {_overruns(cheapest, budget)}"
    )


def _overruns(option: Forecast, budget: Budget) -> str:
    parts, up_to = [], "" if option.spread is None else "up to "

    def share(overrun: float) -> str:
        return f" ({overrun:.0%})" if overrun <= _ABSURD else ""

    if budget.deadline is not None and not _in_time(option, budget):
        late = option.most_seconds - budget.deadline
        parts.append(f"{up_to}{days(late)} late{share(late / budget.deadline)}")
    if budget.money is not None and not _paid(option, budget):
        over = _most_money(option) - budget.money
        parts.append(f"{up_to}{over:,.0f} {budget.currency} over{share(over / budget.money)}")
    return " and ".join(parts) or "which is within it"


def _limits(budget: Budget) -> str:
    parts = []
    if budget.money is not None:
        parts.append(f"{budget.money:,.0f} {budget.currency}")
    if budget.deadline is not None:
        long = budget.deadline >= 2 * _DAY_SECONDS
        text = f"{budget.deadline / _DAY_SECONDS:,.4g} d" if long else days(budget.deadline)
        parts.append(text)
    return " and ".join(parts) or "no limit"


# -- One plan on preemptible nodes, and on others --------------------------------------------------


# Shortest interval of the search for the break-even preemption interval, and its bisections.
_SHORTEST_SECONDS, _BISECTIONS = 60.0, 40


def compare_spot(
    spec: JobSpec,
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


def _break_even(spec: JobSpec, profile: ClusterProfile, facts: RunFacts) -> float | None:
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
