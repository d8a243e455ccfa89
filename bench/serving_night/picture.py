"""The picture of a night: latency of each request, its running percentiles, events, replicas.

Belongs here: drawing with matplotlib. Does not belong here: figures (`account`).
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.serving_night.account import Asked, Event, NightRequest, percentile

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BLUE, _ORANGE, _RED = "#1f6fb4", "#d2691e", "#c0182b"
_DRAIN, _NO_DRAIN = "#2f9e58", _RED
_LANES = ("#2b7bba", "#7fb8de")
# A percentile of the requests that were planned in the window before a time.
_WINDOW_SECONDS = 30.0
_LEAST_IN_WINDOW = 20


def draw(
    requests: Sequence[NightRequest],
    events: Sequence[Event],
    asked: Sequence[Asked],
    title: str,
    paths: Iterable[Path],
) -> None:
    """Draw it into all these files; the format is that of the suffix."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "serving-night"  # the same picture, the same bytes
    begin = requests[0].planned
    end = max(one.ended for one in requests)
    figure, (top, below) = plt.subplots(
        2, 1, figsize=(11, 6.6), sharex=True, height_ratios=(3.2, 1), layout="constrained"
    )
    _draw_events(top, below, events, begin)
    _draw_latencies(top, requests, begin)
    _draw_replicas(below, asked, begin, end)
    top.set_title(title, fontsize=10, loc="left", pad=30)
    below.set_xlabel("minutes since the first request")
    below.set_xlim(-0.1, (end - begin) / 60 + 0.1)
    for path in paths:
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, dpi=140, metadata=metadata)
    plt.close(figure)


def _draw_events(top: Axes, below: Axes, events: Sequence[Event], begin: float) -> None:
    """Shade the time of each event, and mark when replicas were withdrawn or died."""
    for number, event in enumerate(events):
        colour = _DRAIN if event.drain_possible else _NO_DRAIN
        start, stop = ((at - begin) / 60 for at in (event.began, event.ended))
        for axes in (top, below):
            axes.axvspan(start, stop, color=colour, alpha=0.10, linewidth=0)
            for moment in event.moments:
                axes.axvline((moment.time - begin) / 60, color=colour, linewidth=0.8, alpha=0.7)
        # Two heights, so that the words of short events lie beside each other.
        top.annotate(
            event.name,
            ((start + stop) / 2, 1.0),
            xytext=(0, 4 + 11 * (number % 2)),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="center",
            fontsize=8,
            color=colour,
        )


def _draw_latencies(axes: Axes, requests: Sequence[NightRequest], begin: float) -> None:
    answered = [one for one in requests if one.failure is None]
    failed = [one for one in requests if one.failure is not None]
    ttft = [(one.planned, one.ttft_seconds) for one in answered if one.ttft_seconds is not None]
    e2e = [(one.planned, one.e2e_seconds) for one in answered if one.e2e_seconds is not None]
    for points, colour, name in ((e2e, _ORANGE, "e2e"), (ttft, _BLUE, "TTFT")):
        axes.scatter(
            [(at - begin) / 60 for at, _ in points],
            [seconds * 1e3 for _, seconds in points],
            s=4,
            color=colour,
            alpha=0.28,
            linewidths=0,
            rasterized=True,
            label=f"{name} of a request",
        )
        for share, style in ((0.99, "-"), (0.5, ":")):
            times, values = running_percentile(points, share)
            axes.plot(
                [(at - begin) / 60 for at in times],
                [seconds * 1e3 for seconds in values],
                style,
                color=colour,
                linewidth=1.3,
                label=f"{name} P{share * 100:.0f} of the last {_WINDOW_SECONDS:.0f} s",
            )
    axes.scatter(
        [(one.planned - begin) / 60 for one in failed],
        [(one.ended - one.planned) * 1e3 for one in failed],
        s=55,
        marker="x",
        color=_RED,
        linewidths=1.8,
        zorder=5,
        label=f"failed ({len(failed)} of {len(requests)})",
    )
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_ylabel("milliseconds from the planned time")
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * (high / low) ** 0.22)  # room for the legend above the points
    axes.grid(alpha=0.2)
    axes.legend(fontsize=7, loc="upper right", ncols=3, framealpha=0.85)


def running_percentile(
    points: Sequence[tuple[float, float]], share: float
) -> tuple[list[float], list[float]]:
    """At each request, the percentile of those in the window before it, if they are enough."""
    ordered = sorted(points)
    times = [at for at, _ in ordered]
    found: tuple[list[float], list[float]] = ([], [])
    for index, at in enumerate(times):
        first = bisect.bisect_left(times, at - _WINDOW_SECONDS)
        window = sorted(seconds for _, seconds in ordered[first : index + 1])
        if len(window) >= _LEAST_IN_WINDOW:
            found[0].append(at)
            found[1].append(percentile(window, share))
    return found


def _draw_replicas(axes: Axes, asked: Sequence[Asked], begin: float, end: float) -> None:
    """One lane for each replica number, a bar for each time in which the router asks it."""
    lanes = sorted({_number(name) for one in asked for name in one.replicas})
    for name in sorted({name for one in asked for name in one.replicas}):
        generation = int(name.rpartition("g")[2])
        for start, stop in spans(asked, name, end):
            if stop > begin:
                start = max(start, begin)
                lane = lanes.index(_number(name))
                axes.barh(
                    lane,
                    (stop - start) / 60,
                    left=(start - begin) / 60,
                    height=0.62,
                    color=_LANES[generation % 2],
                )
                if stop - start > (end - begin) / 18:
                    axes.text(
                        (start - begin) / 60 + 0.03,
                        lane,
                        f"g{generation:03d}",
                        va="center",
                        fontsize=6.5,
                        color="white" if generation % 2 == 0 else "black",
                    )
    axes.set_yticks(range(len(lanes)), [f"r{number:03d}" for number in lanes], fontsize=8)
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.set_ylabel("asked by\nthe router", fontsize=8)


def spans(asked: Sequence[Asked], name: str, end: float) -> list[tuple[float, float]]:
    """The times in which the router asked one replica."""
    found: list[tuple[float, float]] = []
    since: float | None = None
    for one in asked:
        if name in one.replicas and since is None:
            since = one.time
        elif name not in one.replicas and since is not None:
            found.append((since, one.time))
            since = None
    return found if since is None else [*found, (since, max(end, since))]


def _number(name: str) -> int:
    match = re.match(r"r(\d+)-", name)
    assert match is not None, name
    return int(match[1])
