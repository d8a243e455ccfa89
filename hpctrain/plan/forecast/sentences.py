"""Words for the figures of a forecast: means with the range of the played runs.

Belongs here: text that the forecast's own sentences and the command line share. Does not belong
here: paragraphs and columns (`hpctrain.job.plan_text`).
"""

from __future__ import annotations

import math

from hpctrain.base.units import short_duration
from hpctrain.plan.forecast.documents import Forecast

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
