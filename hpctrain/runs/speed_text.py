"""Formats the check of GPUs and links before training, in lines of at most 80 columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median

from hpctrain.base.units import short_bytes
from hpctrain.page.text import facts
from hpctrain.records.speed_checks import SpeedCheck

_COLUMN = 20


def speed_lines(check: SpeedCheck) -> list[str]:
    """Format the measurements of one launch: medians and extremes, then what is slow."""
    nodes = len(set(check.nodes))
    second = ", in two rounds" if check.rounds > 1 else ""
    lines = [
        f"Speed before launch {check.epoch}: {len(check.nodes)} ranks on {nodes} "
        f"node{'s' * (nodes != 1)}, measured in {check.seconds:.0f} s{second}"
    ]
    named = ((f"  {name}", value) for name, value in _measurements(check))
    return lines + facts(*named, margin=_COLUMN)


def _measurements(check: SpeedCheck) -> Iterator[tuple[str, str]]:
    if check.gpu is not None:
        yield "GPU", check.gpu
    size = "x".join(map(str, check.product_mnk))
    flops = _spread(check.product_flops_per_second, 1e12, "TFLOP/s")
    yield "matrix products", f"{flops}{_planned(check.expected_flops_per_second, 1e12, 'TFLOP/s')}"
    yield "", f"{check.precision}, {size}"
    if any(check.copy_bytes_per_second):
        yield "copies in memory", _spread(check.copy_bytes_per_second, 1e9, "GB/s")
    if any(check.clock_hz):
        highest = max((clock or 0.0 for clock in check.highest_clock_hz), default=0.0)
        most = f" of {highest / 1e6:,.0f} MHz" if highest else ""
        yield "SM clock", f"{_spread(check.clock_hz, 1e6, 'MHz')}{most}"
    slowdowns = Counter(words for words in check.slowdowns if words)
    if slowdowns:
        yield "held down by", _counts(slowdowns)
    free = [bytes_ for bytes_ in check.free_memory_bytes if bytes_ is not None]
    if free:
        yield "free memory", f"{short_bytes(min(free))} at least"
    networks = Counter(found for found in check.networks if found)
    if networks:
        yield "network of NCCL", _counts(networks)
    for axis in check.axes:
        rates = _spread(axis.bus_bytes_per_second, 1e9, "GB/s")
        yield (
            f"axis {axis.axis} {axis.ranks_per_group}",
            f"{rates}{_planned(axis.expected_bytes_per_second, 1e9, 'GB/s')}",
        )
        yield "", f"{axis.operation} of {short_bytes(axis.message_bytes)}"
    for words in [part.message for part in check.slow] or ["nothing"]:
        yield "slow", words
    for skipped in check.skipped:
        yield "not measured", skipped
    if check.leaves:
        yield "then", "the launch ended, so that these nodes are replaced"


def _counts(found: Counter[str]) -> str:
    return ", ".join(f"{words}: {n} rank{'s' * (n != 1)}" for words, n in found.items())


def _spread(values: Sequence[float | None], unit: float, name: str) -> str:
    known = [value / unit for value in values if value is not None]
    if not known:
        return "unknown"
    return f"{_number(median(known))} {name}, lowest {_number(min(known))} {name}"


def _planned(expected: float | None, unit: float, name: str) -> str:
    return "" if expected is None else f", the plan has {_number(expected / unit)} {name}"


def _number(value: float) -> str:
    """Format three digits, or all digits of a whole part that has more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
