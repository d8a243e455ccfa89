"""Choose among priced options by a budget of money and a deadline.

Belongs here: parsing `--budget` and `--deadline`, choosing, and reporting what is missing.
Does not belong here: how options are found or priced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from hpctrain.base.errors import UsageError
from hpctrain.base.units import Duration, Money
from hpctrain.plan.forecast.documents import Budget, BudgetDecision, Forecast
from hpctrain.plan.forecast.sentences import days, describe
from hpctrain.spec.profile import ClusterProfile

Value = TypeVar("Value")

# Where nothing comes near the limit, figures of what is missing say nothing.
_ABSURD = 100
_DAY_SECONDS = 86400


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
    meets = tuple(
        number
        for number, option in enumerate(options)
        if _in_time(option, budget) and _paid(option, budget)
    )
    if meets:
        chosen = min(meets, key=lambda number: (_price(options[number]), options[number].days))
        fastest = min(meets, key=lambda number: options[number].times.total_seconds)
        lines = _chosen_lines(options, chosen, fastest, budget)
        return BudgetDecision(chosen=chosen, nearest=chosen, meets=meets, lines=lines)

    def excess(option: Forecast) -> float:
        late = option.most_seconds / budget.deadline - 1 if budget.deadline else 0.0
        over = _most_money(option) / budget.money - 1 if budget.money else 0.0
        return max(0.0, late) + max(0.0, over)

    nearest = min(
        range(len(options)), key=lambda number: (excess(options[number]), _price(options[number]))
    )
    missing = [f"no plan of {_options(len(options))} meets {_limits(budget)}"]
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


def _chosen_lines(
    options: Sequence[Forecast], chosen: int, fastest: int, budget: Budget
) -> tuple[str, ...]:
    best, quick = options[chosen], options[fastest]
    lines = [
        f"{describe(best)} is the cheapest of {_options(len(options))} that meets {_limits(budget)}"
    ]
    if quick.times.total_seconds < best.times.total_seconds:
        lines.append(f"the fastest of those that meet it: {describe(quick)}")
    if best.spread is not None:
        taken = " the step time is taken as predicted" if not best.spread.step_deviation else ""
        also = taken or " failures and the error of the step time are in them"
        lines.append(f"met in 95 of 100 played runs;{also}")
    elif budget.deadline is not None:
        lines.append("the forecast is a mean, no run was played: some runs take longer")
    return tuple(lines)


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
    return (
        f"the budget pays for {share:.0%} of the run ({int(share * cheapest.tokens):,} of "
        f"{cheapest.tokens:,} tokens); the cheapest is {describe(cheapest)}, "
        f"{_overruns(cheapest, budget)}"
    )


def _overruns(option: Forecast, budget: Budget) -> str:
    parts = []
    if budget.deadline is not None and not _in_time(option, budget):
        late = option.most_seconds - budget.deadline
        parts.append(f"{_up_to(option)}{days(late)} late{_share(late / budget.deadline)}")
    if budget.money is not None and not _paid(option, budget):
        over = _most_money(option) - budget.money
        share = _share(over / budget.money)
        parts.append(f"{_up_to(option)}{over:,.0f} {budget.currency} over{share}")
    return " and ".join(parts) or "which is within it"


def _up_to(option: Forecast) -> str:
    return "" if option.spread is None else "up to "


def _share(overrun: float) -> str:
    return f" ({overrun:.0%})" if overrun <= _ABSURD else ""


def _limits(budget: Budget) -> str:
    parts = []
    if budget.money is not None:
        parts.append(f"{budget.money:,.0f} {budget.currency}")
    if budget.deadline is not None:
        long = budget.deadline >= 2 * _DAY_SECONDS
        text = f"{budget.deadline / _DAY_SECONDS:,.4g} d" if long else days(budget.deadline)
        parts.append(text)
    return " and ".join(parts) or "no limit"


def _options(count: int) -> str:
    return f"{count} option{'s' if count != 1 else ''}"
