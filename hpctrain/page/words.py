"""Numbers, times and names as the page writes them. Pure.

Belongs here: formats. Does not belong here: units of files and specs (`hpctrain.base.units`).
"""

from __future__ import annotations

from datetime import UTC, datetime

from markupsafe import Markup

from hpctrain.base.units import short_bytes, short_duration
from hpctrain.version import __version__

UNKNOWN = "\N{EN DASH}"
# Smaller differences are noise of a cluster.
_NOTABLE = 0.05


def moment(seconds: float) -> str:
    """Write a time: `2026-11-26 08:15:02 UTC`."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return UNKNOWN


def made_line(seconds: float) -> str:
    """Say when a page was made, and by which version."""
    return f"Made {moment(seconds)} by hpctrain {__version__}. Times are UTC."


def duration(seconds: float | None) -> str:
    if seconds is None:
        return UNKNOWN
    return short_duration(seconds) if seconds > 0 else "0 s"


def size(count: float | None) -> str:
    return UNKNOWN if count is None else short_bytes(count)


def count(number: float | None) -> str:
    return UNKNOWN if number is None else f"{number:,.0f}"


def ratio(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.1%}"


def hours(value: float | None) -> str:
    """Write GPU-hours: three digits below 100."""
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def number(value: float | None, digits: int = 4) -> str:
    return UNKNOWN if value is None else f"{value:,.{digits}g}"


def counted(amount: int, one: str, several: str = "") -> str:
    """Write an amount with its noun: `1 launch`, `3 launches`."""
    return f"{amount:,} {one if amount == 1 else several or f'{one}s'}"


def words_of(name: str) -> str:
    """Write a name of a record for people: `node_failure` as `node failure`."""
    return name.replace("_", " ")


def difference(planned: float | None, measured: float | None, *, more_is_better: bool) -> Markup:
    """Write by how much a measured value differs from the planned one; notable ones stand out."""
    if planned is None or measured is None or planned == 0:
        return Markup(UNKNOWN)
    change = measured / planned - 1
    better = (change > 0) == more_is_better
    style = "same" if abs(change) < _NOTABLE else "better" if better else "worse"
    return Markup('<span class="{}">{}</span>').format(style, f"{change:+.1%}")
