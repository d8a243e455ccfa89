"""Budgets: what is read, what is refused, what is chosen, and what is said to be missing."""

from __future__ import annotations

from typing import Any

import forecast_specimens as specimen
import pytest

from hpctrain.base.errors import UsageError
from hpctrain.base.units import Duration
from hpctrain.plan.forecast.documents import Budget, Forecast, Spread
from hpctrain.plan.forecast.options import cheapest_plan, check_currency, parse_budget
from hpctrain.plan.forecast.predict import forecast

PRICES = {"currency": "USD", "on_demand": 2.0, "spot": 1.0}


def option(gpus: int, efficiency: float = 1.0, spot: bool = False) -> Forecast:
    """64 GPUs take 100 s for a step; speed grows with GPUs as `efficiency` says."""
    facts = specimen.facts(
        gpus=gpus,
        nodes=gpus // 8,
        step_seconds=100 * 64 / gpus / efficiency,
        train_steps=50_000,
        parameters=7_000_000_000,
        spot=spot,
    )
    profile = specimen.profile(node_mtbf="1000d", preemption_mtbf="12h", prices=PRICES)
    return forecast(specimen.spec(), profile, facts)


OPTIONS = [option(64), option(128, 0.95), option(256, 0.85), option(512, 0.7)]


def test_reads_both_options() -> None:
    budget = parse_budget("200000usd", "30d")
    assert (budget.money, budget.currency, budget.deadline) == (200_000, "USD", 30 * 86400)
    assert parse_budget("1.5M EUR", None) == Budget(money=1.5e6, currency="EUR")
    assert parse_budget(None, None) == Budget()


@pytest.mark.parametrize(
    ("money", "deadline", "said"),
    [
        ("200000", None, "--budget: expected an amount with its currency"),
        ("$200000", None, "got `$200000`"),
        ("0usd", None, "--budget: expected"),
        ("1,5kusd", None, "--budget: expected"),
        (None, "30", "--deadline: expected a duration"),
        (None, "0d", "--deadline: must be above 0"),
    ],
)
def test_refuses(money: str | None, deadline: str | None, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_budget(money, deadline)
    assert said in str(refused.value)


def test_currencies_must_be_the_same() -> None:
    euros = Budget(money=5, currency="EUR")
    with pytest.raises(UsageError, match=r"EUR cannot be compared .* testbed, which are in USD"):
        check_currency(euros, specimen.profile(prices=PRICES))
    with pytest.raises(UsageError, match="profile testbed has no prices") as refused:
        check_currency(euros, specimen.profile())
    assert "currency: EUR" in str(refused.value.hint)
    check_currency(Budget(money=5, currency="USD"), specimen.profile(prices=PRICES))
    check_currency(Budget(deadline=Duration(5)), specimen.profile())


def choose(options: list[Forecast] = OPTIONS, **budget: Any) -> Any:
    if "money" in budget:
        budget["currency"] = "USD"
    return cheapest_plan(options, Budget(**budget))


def test_options_are_what_the_tests_below_need() -> None:
    """Days fall and money grows with GPUs."""
    days, money = [one.days for one in OPTIONS], [one.cost.amount for one in OPTIONS if one.cost]
    assert days == sorted(days, reverse=True) and money == sorted(money)
    assert days[0] == pytest.approx(58, abs=1) and money[0] == pytest.approx(179_000, rel=0.01)


def test_takes_the_cheapest_that_meets_both() -> None:
    decision = choose(money=200_000, deadline="32d")
    assert (decision.chosen, decision.meets) == (1, (1,))
    assert "128 GPUs" in decision.lines[0] and "200,000 USD and 32 d" in decision.lines[0]
    assert choose(deadline="60d").meets == (0, 1, 2, 3)
    assert choose(deadline="60d").chosen == 0
    assert choose(money=1e9).chosen == 0


def test_names_the_fastest_that_meets_the_limits_too() -> None:
    """Money alone says nothing of time: 512 GPUs are paid for as well."""
    decision = choose(money=1e9)
    assert decision.chosen == 0 and decision.lines[1].startswith("the fastest of those")
    assert (
        f"512 GPUs ({OPTIONS[3].days:.1f} d, " in decision.lines[1] and "USD" in decision.lines[1]
    )
    assert not any("fastest" in line for line in choose(money=200_000, deadline="32d").lines)


@pytest.mark.parametrize(
    "limits", [{"money": 40_000}, {"deadline": "5d"}, {"money": 185_000, "deadline": "20d"}]
)
def test_an_option_is_told_once_where_nothing_meets_the_limits(limits: dict[str, Any]) -> None:
    text = "\n".join(choose(**limits).lines)
    for one in OPTIONS:
        assert text.count(f"{one.gpus} GPUs (") <= 1, text


def test_spot_is_one_more_option() -> None:
    both = [option(128), option(128, spot=True)]
    assert choose(both, deadline="60d").chosen == 1
    assert "on spot" in choose(both, deadline="60d").lines[0]


def test_says_what_a_mean_is_worth() -> None:
    limit = f"{OPTIONS[1].times.total_seconds * 1.01:.0f}s"
    assert any("no run was played" in line for line in choose(deadline=limit).lines)


def test_a_limit_is_met_where_95_of_100_runs_keep_it() -> None:
    """The mean is below both limits, and some runs are above them."""
    mean = OPTIONS[1]
    seconds, hours = mean.times.total_seconds, mean.gpu_hours
    spread = Spread(
        trials=200,
        seed=1,
        least_seconds=0.9 * seconds,
        most_seconds=1.2 * seconds,
        least_gpu_hours=0.95 * hours,
        most_gpu_hours=1.1 * hours,
        stopped=0.0,
        stop_reason=None,
    )
    assert mean.cost is not None
    amount = mean.cost.amount
    ends = {"least_amount": 0.95 * amount, "most_amount": 1.1 * amount}
    cost = mean.cost.model_copy(update=ends)
    played = mean.model_copy(update={"spread": spread, "cost": cost})
    early, later = (f"{factor * seconds:.0f}s" for factor in (1.19, 1.21))
    assert choose([played], deadline=early).chosen is None
    assert choose([mean], deadline=early).chosen == 0
    decision = choose([played], deadline=later)
    assert decision.chosen == 0 and "95 of 100 played runs" in decision.lines[1]
    assert choose([played], money=2 * hours * 1.09).chosen is None
    assert choose([played], money=2 * hours * 1.11).chosen == 0


def test_figures_of_what_is_hopeless_are_left_out() -> None:
    text = "\n".join(choose(OPTIONS[3:], deadline="1s").lines)
    assert "more than 100 times as long" in text and "%" not in text and "GPUs even if" not in text
    assert "meets 1 s" in text


def test_deadline_and_money_met_by_different_options() -> None:
    decision = choose(money=185_000, deadline="20d")
    assert decision.chosen is None and decision.meets == ()
    text = "\n".join(decision.lines)
    assert "no plan of 4 options meets 185,000 USD and 20 d" in text
    assert "the deadline needs 256 GPUs" in text and "the budget pays for 64 GPUs" in text
    late = OPTIONS[0].days - 20
    assert f"{late:.1f} d late ({late / 20:.0%})" in text
    over = OPTIONS[2].cost.amount - 185_000 if OPTIONS[2].cost else 0
    assert f"{over:,.0f} USD over ({over / 185_000:.0%})" in text
    assert decision.nearest == 2 and decision.lines[-1] == "nearest: 256 GPUs"


def test_deadline_that_nothing_meets() -> None:
    text = "\n".join(choose(deadline="5d").lines)
    needed = -(-512 * OPTIONS[3].days // 5)
    assert f"needs at least {needed:,.0f} GPUs" in text and "the fastest is 512 GPUs" in text


def test_money_that_pays_for_nothing() -> None:
    cost = OPTIONS[0].cost.amount if OPTIONS[0].cost else 0
    text = "\n".join(choose(money=cost / 4).lines)
    assert "pays for 25% of the run (50,000,000,000 of 200,000,000,000 tokens)" in text


def test_nearest_is_the_one_with_the_smaller_overrun() -> None:
    """1% over in money is nearer than 80% over in time."""
    cheap, quick = option(64), option(256)
    money = quick.cost.amount / 1.01 if quick.cost else 0
    decision = choose([cheap, quick], money=money, deadline=f"{cheap.days / 1.8:.3f}d")
    assert decision.chosen is None and decision.nearest == 1


def test_nearest_counts_money_as_well_as_time() -> None:
    """Twice the money is farther away than a tenth more time."""
    cheap, quick = option(64), option(512, 0.4)
    money = quick.cost.amount / 2 if quick.cost else 0
    decision = choose([cheap, quick], money=money, deadline=f"{cheap.days / 1.1:.3f}d")
    assert decision.chosen is None and decision.nearest == 0


def test_missing_one_a_little_more_is_nearer_than_missing_both() -> None:
    both, one = option(64), option(64, 0.98, spot=True)
    money = both.cost.amount / 1.2 if both.cost else 0
    decision = choose([both, one], money=money, deadline=f"{both.days / 1.2:.3f}d")
    assert one.days > both.days and decision.nearest == 1


def test_without_prices_gpu_hours_decide() -> None:
    bare = [one.model_copy(update={"cost": None}) for one in OPTIONS]
    assert choose(bare, deadline="32d").chosen == 1
