"""Where a number lies on an axis, which ticks it has, and how it is written. Pure.

Belongs here: ranges, ticks, number formats of axes. Does not belong here: what is drawn (`charts`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

Format = Callable[[float], str]
Quantity = Literal["number", "bytes", "seconds"]
# The units that numbers are written in, as in `hpctrain.base.units`; time from two of a unit on.
_UNITS: dict[Quantity, tuple[float, ...]] = {
    "number": (1.0,),
    "bytes": (1.0, 2.0**10, 2.0**20, 2.0**30, 2.0**40),
    "seconds": (1.0, 60.0, 3600.0, 86400.0),
}

# A number beyond it has no ticks: the distance of two would not be a finite number.
_LARGEST = 1e300


def is_drawable(value: float | None) -> bool:
    """Whether a value has a place on an axis: it is known, finite and not absurdly large."""
    return value is not None and math.isfinite(value) and abs(value) <= _LARGEST


def compact_number(value: float) -> str:
    """Write a number in at most four digits: `0.0012`, `950`, `12.5k`, `3M`, `1.2e20`."""
    size = abs(value)
    if size >= 1e15 or 0 < size < 1e-4:
        mantissa, _, power = f"{value:.2g}".partition("e")
        return f"{mantissa}e{int(power)}"
    for suffix, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if size >= scale:
            return f"{value / scale:.4g}{suffix}"
    return f"{value:.4g}"


def percent(value: float) -> str:
    """Write a ratio as percent: `0.5%`, `42%`, `99.2%`."""
    return f"{value * 100:.3g}%"


@dataclass(frozen=True)
class Scale:
    """A range of numbers as 0 to 1, linear or logarithmic; its ends are ticks or the data's."""

    low: float
    high: float
    ticks: tuple[float, ...]
    logarithmic: bool = False

    def place(self, value: float) -> float:
        """Compute where the value lies: 0 at the low end, 1 at the high end, never outside."""
        if self.logarithmic:
            if value <= 0:
                return 0.0
            low, high, value = math.log(self.low), math.log(self.high), math.log(value)
        else:
            low, high = self.low, self.high
        return min(1.0, max(0.0, (value - low) / (high - low)))


def nice_step(span: float, ticks: int) -> float:
    """Choose a distance of ticks, 1, 2 or 5 times a power of ten, for about so many of them."""
    raw = span / max(1, ticks)
    power = 10.0 ** math.floor(math.log10(raw))
    return next(power * factor for factor in (1, 2, 5, 10) if raw <= power * factor * 1.000001)


def _multiples(low: float, high: float, step: float) -> tuple[float, ...]:
    """List the multiples of the step from low to high; rounding leaves none out at the ends."""
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return tuple(number * step for number in range(first, last + 1))


def scale_of(
    values: Iterable[float | None],
    *,
    ticks: int = 5,
    from_zero: bool = False,
    whole_ticks: bool = True,
    quantity: Quantity = "number",
) -> Scale:
    """Choose the range of an axis for the values; without any, from 0 to 1.

    `whole_ticks`: the axis begins and ends at a tick. Otherwise it ends where the data end.
    `quantity`: ticks are round in the unit that such numbers are written in.
    """
    known = [value for value in values if value is not None and is_drawable(value)]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    # One value, or values that only rounding tells apart.
    if high - low <= max(abs(low), abs(high)) * 1e-9:
        room = abs(high) * 0.1 or 1.0
        low, high = (low if from_zero else low - room), high + room
    least = 2 if quantity == "seconds" else 1
    unit = max((one for one in _UNITS[quantity] if one * least <= high - low), default=1.0)
    step = nice_step((high - low) / unit, ticks) * unit
    if whole_ticks:
        low = math.floor(low / step + 1e-9) * step
        high = math.ceil(high / step - 1e-9) * step
    return Scale(low, high, _multiples(low, high, step))


def log_scale(values: Iterable[float | None]) -> Scale:
    """Choose a logarithmic range with a tick at each power of ten; of positive values only."""
    known = [value for value in values if value is not None and is_drawable(value) and value > 0]
    if not known:
        return scale_of(())
    first, last = math.floor(math.log10(min(known))), math.ceil(math.log10(max(known)))
    last = max(last, first + 1)
    every = max(1, -(-(last - first) // 6))
    ticks = tuple(10.0**power for power in range(first, last + 1, every))
    return Scale(10.0**first, 10.0**last, ticks, logarithmic=True)


# Distances of ticks of a time axis, in seconds.
_TIME_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200)
_DAY_SECONDS = 86400


def time_scale(seconds: float, ticks: int = 6) -> Scale:
    """Choose the axis of elapsed time from 0, with ticks at whole seconds, minutes, hours, days."""
    span = seconds if is_drawable(seconds) and seconds > 0 else 1.0
    fitting = (step for step in _TIME_STEPS if span / step <= ticks)
    days = max(1.0, nice_step(span / _DAY_SECONDS, ticks))
    step = next(fitting, days * _DAY_SECONDS)
    return Scale(0.0, span, _multiples(0.0, span, step))


def clock(seconds: float) -> str:
    """Write elapsed time with its two largest units: `45 s`, `5 min`, `1 h 30 min`, `2 d 6 h`."""
    left = round(seconds)
    if left == 0 and seconds > 0:
        return f"{seconds:.2g} s"
    words = []
    for suffix, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, left = divmod(left, size)
        if count:
            words.append(f"{count} {suffix}")
        elif words:
            break
    return " ".join(words[:2]) or "0 s"
