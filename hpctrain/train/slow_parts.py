"""Compare the measurements of all ranks: which GPU or link is slow, and where it is. Pure.

A part is compared with its peers of the same launch, because a data sheet is no measurement; the
plan's assumption only shows that all of them are slow. Belongs here: suspicion after the first
round, naming after the second. Does not belong here: measuring (`speed_check`), what follows
for a node (`hpctrain.judge.slow_nodes`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median_high

from hpctrain.records.speed_checks import AxisName, AxisSpeed, PartName, SlowPart, SpeedCheck

# Memory that others hold: more than the spread of contexts and libraries between equal GPUs.
_HELD_SHARE, _HELD_BYTES = 0.05, 2**30
# Median and reference of links need others to compare with.
_LEAST_GROUPS = 3
# Where more than this share of the nodes is slow, something that they share is at fault.
_MOST_NODES_SHARE = 0.25
_TCP = "Socket"


@dataclass(frozen=True)
class Thresholds:
    """A GPU, or a link, below this share of its reference is slow. `fabric` is the profile's."""

    slow_gpu: float
    slow_link: float
    fabric: str = "ethernet"


@dataclass(frozen=True)
class Suspects:
    """What has to be measured a second time."""

    gpus: bool = False
    axes: tuple[AxisName, ...] = ()

    def __bool__(self) -> bool:
        return self.gpus or bool(self.axes)


def suspects_of(check: SpeedCheck, limits: Thresholds) -> Suspects:
    """Find what the first round shows to be slow, which may be chance."""
    slow = [*_slow_gpus(check, limits)]
    axes = tuple(axis.axis for axis in check.axes if _slow_groups(axis, limits))
    return Suspects(bool(slow), axes)


def slow_parts(check: SpeedCheck, limits: Thresholds) -> tuple[SlowPart, ...]:
    """Name what is slow, after the second round. The most certain and slowest parts come first.

    A speed that was measured once, because time was over, blames nobody: it may be chance.
    """
    found = [
        *_slow_gpus(check, limits),
        *_held_memory(check),
        *(part for axis in check.axes for part in _slow_links(check, axis, limits)),
        *_networks(check, limits),
    ]
    nodes = {node for part in found if part.certain for node in part.nodes}
    all_nodes = set(check.nodes)
    if len(nodes) > max(1, int(_MOST_NODES_SHARE * len(all_nodes))):
        found = [part.model_copy(update={"certain": False}) for part in found]
    return tuple(sorted(found, key=lambda part: (not part.certain, part.share or 0.0)))


def better_of(first: SpeedCheck, second: SpeedCheck) -> SpeedCheck:
    """Take the better of two rounds for each rank: noise only slows a measurement down.

    Pairs are those of the second round, where they were measured.
    """
    again = {axis.axis: axis for axis in second.axes}
    axes = []
    for axis in first.axes:
        other = again.get(axis.axis)
        if other is None:
            axes.append(axis)
            continue
        rates = _better(axis.bus_bytes_per_second, other.bus_bytes_per_second)
        pairs = _better(axis.best_pair_bytes_per_second, other.best_pair_bytes_per_second)
        update = {"bus_bytes_per_second": rates, "best_pair_bytes_per_second": pairs}
        axes.append(axis.model_copy(update=update))
    products = _better(first.product_flops_per_second, second.product_flops_per_second)
    twice: list[PartName | AxisName] = [*again]
    if any(rate is not None for rate in second.product_flops_per_second):
        twice.append("gpu")
    return first.model_copy(
        update={
            "product_flops_per_second": products,
            "copy_bytes_per_second": _better(
                first.copy_bytes_per_second, second.copy_bytes_per_second
            ),
            "axes": tuple(axes),
            "rounds": 2,
            "twice": tuple(twice),
            "seconds": second.seconds,
            "skipped": second.skipped,
        }
    )


def _better(
    first: Sequence[float | None], second: Sequence[float | None]
) -> tuple[float | None, ...]:
    if not first or not second:
        return tuple(first or second)
    return tuple(
        max((rate for rate in pair if rate is not None), default=None)
        for pair in zip(first, second, strict=True)
    )


def _where(check: SpeedCheck, rank: int) -> str:
    return f"rank {rank} on {check.nodes[rank]}"


# -- GPUs --------------------------------------------------------------------------------------


def _slow_gpus(check: SpeedCheck, limits: Thresholds) -> Iterator[SlowPart]:
    """Compare matrix products, and copies in memory, of all ranks."""
    yield from _below_peers(
        check, check.product_flops_per_second, limits.slow_gpu, "matrix products", "FLOP/s"
    )
    yield from _below_peers(
        check, check.copy_bytes_per_second, limits.slow_gpu, "copies in its memory", "B/s"
    )
    known = [rate for rate in check.product_flops_per_second if rate]
    expected = check.expected_flops_per_second
    if known and expected and (middle := median_high(known)) < limits.slow_gpu * expected:
        yield SlowPart(
            part="gpu",
            message=f"all GPUs: matrix products at {_rate(middle, 'FLOP/s')}, "
            f"{middle / expected:.0%} of the {_rate(expected, 'FLOP/s')} that the plan assumes",
            share=middle / expected,
        )


def _below_peers(
    check: SpeedCheck, rates: Sequence[float | None], limit: float, what: str, unit: str
) -> Iterator[SlowPart]:
    known = [rate for rate in rates if rate]
    if len(known) < 2:
        return
    middle = median_high(known)  # of two ranks the slower one is the slow one
    for rank, rate in enumerate(rates):
        if rate is None or rate >= limit * middle:
            continue
        yield SlowPart(
            part="gpu",
            message=f"{_where(check, rank)}: {what} at {_rate(rate, unit)}, "
            f"{rate / middle:.0%} of its peers' {_rate(middle, unit)}{_clock(check, rank)}",
            nodes=(check.nodes[rank],),
            rank=rank,
            share=rate / middle,
            certain="gpu" in check.twice,
        )


def _clock(check: SpeedCheck, rank: int) -> str:
    clocks = check.clock_hz[rank : rank + 1]
    if not clocks or clocks[0] is None:
        return ""
    highest = check.highest_clock_hz[rank]
    most = f" of {highest / 1e6:,.0f}" if highest else ""
    slowdown = check.slowdowns[rank] if check.slowdowns else ""
    return f"; clock {clocks[0] / 1e6:,.0f}{most} MHz" + (f" ({slowdown})" if slowdown else "")


def _held_memory(check: SpeedCheck) -> Iterator[SlowPart]:
    """Find GPUs in whose memory other processes lie."""
    known = [(free, rank) for rank, free in enumerate(check.free_memory_bytes) if free is not None]
    if len(known) < 2:
        return
    middle = median_high(free for free, _ in known)
    for free, rank in known:
        missing = middle - free
        if missing > _HELD_BYTES and missing > _HELD_SHARE * middle:
            yield SlowPart(
                part="memory",
                message=f"{_where(check, rank)}: {free / 2**30:.1f} GiB of its GPU's memory are "
                f"free, {middle / 2**30:.1f} GiB of its peers': another process holds memory there",
                nodes=(check.nodes[rank],),
                rank=rank,
                share=free / middle,
                certain=True,
            )


# -- links -------------------------------------------------------------------------------------


def _slow_groups(axis: AxisSpeed, limits: Thresholds) -> dict[int, tuple[float, float, bool]]:
    """Find the slow groups of an axis: by their first rank the rate, its reference, peers or not.

    A group is as slow as its slowest rank reports. The reference is the median of at least three
    groups, or else the bandwidth that the plan assumes.
    """
    rates = _group_rates(axis)
    if not rates:
        return {}
    slow = {}
    middle = median_high(rates.values()) if len(rates) >= _LEAST_GROUPS else None
    expected = axis.expected_bytes_per_second
    for leader, rate in rates.items():
        if middle is not None and rate < limits.slow_link * middle:
            slow[leader] = (rate, middle, True)
        elif expected is not None and rate < limits.slow_link * expected:
            slow[leader] = (rate, expected, False)
    return slow


def _group_rates(axis: AxisSpeed) -> dict[int, float]:
    rates: dict[int, float] = {}
    for leader, rate in zip(axis.groups, axis.bus_bytes_per_second, strict=True):
        if rate is not None:
            rates[leader] = min(rate, rates.get(leader, rate))
    return rates


def _slow_links(check: SpeedCheck, axis: AxisSpeed, limits: Thresholds) -> Iterator[SlowPart]:
    """Name the slow links of an axis: those of single ranks where pairs show them.

    A rank both of whose pairs are slow has a slow link; its neighbours have one fast pair.
    """
    slow = _slow_groups(axis, limits)
    if not slow:
        return
    named = list(_slow_ends(check, axis, slow, limits))
    yield from named
    explained = {axis.groups[part.rank] for part in named if part.rank is not None}
    rest = {leader: found for leader, found in slow.items() if leader not in explained}
    if rest and len(rest) == len(_group_rates(axis)):
        rate, reference, _ = min(rest.values())
        yield SlowPart(
            part="link",
            message=f"axis {axis.axis}: {_rate(rate, 'B/s')} in all {len(rest)} groups, "
            f"{rate / reference:.0%} of the {_rate(reference, 'B/s')} that the plan assumes",
            share=rate / reference,
        )
        return
    for leader, (rate, reference, peers) in rest.items():
        members = [rank for rank, one in enumerate(axis.groups) if one == leader]
        nodes = tuple(dict.fromkeys(check.nodes[rank] for rank in members))
        whose = "of other groups" if peers else "that the plan assumes"
        shown = ", ".join(nodes[:4]) + (f" and {len(nodes) - 4} more" if len(nodes) > 4 else "")
        yield SlowPart(
            part="link",
            message=f"axis {axis.axis}, ranks {members[0]} to {members[-1]} on {shown}: "
            f"{_rate(rate, 'B/s')}, {rate / reference:.0%} of the {_rate(reference, 'B/s')} "
            f"{whose}",
            nodes=nodes,
            share=rate / reference,
            certain=peers and len(nodes) == 1 and axis.axis in check.twice,
        )


def _slow_ends(
    check: SpeedCheck,
    axis: AxisSpeed,
    slow: dict[int, tuple[float, float, bool]],
    limits: Thresholds,
) -> Iterator[SlowPart]:
    """Find the ranks of slow groups whose faster pair is slow, too."""
    if axis.ranks_per_group < 3:
        return  # a pair has two ends, and either may be slow
    for leader in slow:
        pairs = {
            rank: best
            for rank, best in enumerate(axis.best_pair_bytes_per_second)
            if axis.groups[rank] == leader and best is not None
        }
        if len(pairs) < 3:
            continue
        middle = median_high(pairs.values())
        for rank, best in pairs.items():
            if best < limits.slow_link * middle:
                yield SlowPart(
                    part="link",
                    message=f"{_where(check, rank)}: its link on axis {axis.axis} carries "
                    f"{_rate(best, 'B/s')}, {best / middle:.0%} of its peers' "
                    f"{_rate(middle, 'B/s')}",
                    nodes=(check.nodes[rank],),
                    rank=rank,
                    share=best / middle,
                    certain=axis.axis in check.twice,
                )


def _networks(check: SpeedCheck, limits: Thresholds) -> Iterator[SlowPart]:
    """Find nodes on which NCCL has fallen back to TCP between nodes."""
    nodes = list(dict.fromkeys(check.nodes))
    if limits.fabric == "ethernet" or len(nodes) < 2:
        return
    tcp = {n for n, found in zip(check.nodes, check.networks, strict=False) if found == _TCP}
    if not tcp:
        return
    everywhere = len(tcp) == len(nodes)
    where = "all nodes" if everywhere else ", ".join(sorted(tcp)[:4])
    yield SlowPart(
        part="network",
        message=f"NCCL uses TCP (network {_TCP}) on {where}, and the profile's fabric is "
        f"{limits.fabric}: see NCCL_IB_HCA, NCCL_NET_PLUGIN, and devices in containers",
        nodes=() if everywhere else tuple(sorted(tcp)),
        certain=not everywhere,
    )


_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))


def _rate(value: float, unit: str) -> str:
    for factor, prefix in _PREFIXES:
        if value >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"
