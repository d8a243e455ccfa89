"""Summarizes the requests of a load test over time: percentiles of windows, slow ones, failures.

The picture of a test has to show single requests as well: what one preemption costs is lost in the
percentile of an hour. Belongs here: windows and which requests are shown by themselves. Does not
belong here: percentiles of the whole test (`hpctrain.serve.load.summary`), drawing
(`hpctrain.report.service_page`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from pydantic import BaseModel, ConfigDict

from hpctrain.serve.load.measurement import RequestRecord
from hpctrain.serve.load.order_statistics import sample_at
from hpctrain.serve.plan.documents import Promise
from hpctrain.spec.service import LATENCY_NAMES, LatencyName

# A 99th percentile of fewer requests is their largest.
_LEAST_REQUESTS = 100
_MOST_WINDOWS = 120
# Each is a mark of its own on the page.
_MOST_SLOW = 1500
# Of a test with so few requests all are shown: windows of a hundred would hide when they came.
_ALL_UP_TO = 3000
_WINDOW_SECONDS = (0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600)


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)


class LatencyWindow(_Frozen):
    """Requests that were planned in one window; seconds are since the start of the test.

    A failed request counts as one that never ends: None is such a time, and that of no request.
    """

    begin: float
    requests: int
    failed: int
    p50_seconds: float | None
    p99_seconds: float | None


class ShownRequest(_Frozen):
    """A request that is shown by itself, at its planned time."""

    planned_seconds: float
    seconds: float


class FailedRequest(_Frozen):
    """A request without a whole answer, at its planned time."""

    planned_seconds: float
    request_id: str
    kind: str
    detail: str


class LatencyOverTime(_Frozen):
    """One latency of all requests of a test. `slow` are slower than every limit of it.

    `slow_count`: how many these are; the slowest of them are shown. `within`: all others, of a
    short test only.
    """

    latency: LatencyName
    window_seconds: float
    limits: dict[str, float]
    windows: tuple[LatencyWindow, ...]
    slow: tuple[ShownRequest, ...]
    slow_count: int
    within: tuple[ShownRequest, ...] = ()


def latencies_over_time(
    records: Sequence[RequestRecord], promises: Sequence[Promise]
) -> tuple[LatencyOverTime, ...]:
    """Summarize the latencies that are promised, or the time to the first token if none is."""
    limits: dict[LatencyName, dict[str, float]] = defaultdict(dict)
    for one in promises:
        limits[one.latency][one.percentile] = one.limit_seconds
    names = [name for name in LATENCY_NAMES if name in limits] or ["ttft"]
    if not records:
        return ()
    return tuple(_over_time(records, name, limits.get(name, {})) for name in names)


def failed_requests(records: Sequence[RequestRecord]) -> tuple[FailedRequest, ...]:
    """List the requests without a whole answer, in the order of their plan."""
    return tuple(
        FailedRequest(
            planned_seconds=one.planned_seconds,
            request_id=one.request_id,
            kind=one.failure,
            detail=one.detail,
        )
        for one in sorted(records, key=lambda record: record.planned_seconds)
        if one.failure is not None
    )


def _over_time(
    records: Sequence[RequestRecord], name: LatencyName, limits: Mapping[str, float]
) -> LatencyOverTime:
    duration = max(one.planned_seconds for one in records)
    width = _window_seconds(duration, len(records))
    windows: dict[int, list[float]] = defaultdict(list)
    slow: list[ShownRequest] = []
    within: list[ShownRequest] = []
    longest = max(limits.values(), default=math.inf)
    for one in records:
        seconds = _latency(one, name)
        if seconds is None and one.failure is None:
            continue  # one token: it has no time per further token
        windows[int(one.planned_seconds // width)].append(math.inf if seconds is None else seconds)
        if seconds is not None:
            shown = ShownRequest(planned_seconds=one.planned_seconds, seconds=seconds)
            (slow if seconds > longest else within).append(shown)
    slow.sort(key=lambda one: -one.seconds)
    slowest = sorted(slow[:_MOST_SLOW], key=lambda one: one.planned_seconds)
    return LatencyOverTime(
        latency=name,
        window_seconds=width,
        limits=dict(limits),
        windows=tuple(
            _window(number * width, windows.get(number, []))
            for number in range(int(duration // width) + 1)
        ),
        slow=tuple(slowest),
        slow_count=len(slow),
        within=tuple(within) if len(records) <= _ALL_UP_TO else (),
    )


def _window_seconds(duration: float, requests: int) -> float:
    """Choose windows with enough requests for a percentile, and not more than can be drawn."""
    least = max(duration / _MOST_WINDOWS, duration * _LEAST_REQUESTS / max(1, requests))
    return float(next((one for one in _WINDOW_SECONDS if one >= least), _WINDOW_SECONDS[-1]))


def _window(begin: float, seconds: Sequence[float]) -> LatencyWindow:
    p50, p99 = (sample_at(seconds, share) if seconds else math.inf for share in (0.5, 0.99))
    return LatencyWindow(
        begin=begin,
        requests=len(seconds),
        failed=sum(map(math.isinf, seconds)),
        p50_seconds=p50 if math.isfinite(p50) else None,
        p99_seconds=p99 if math.isfinite(p99) else None,
    )


def _latency(record: RequestRecord, name: LatencyName) -> float | None:
    values = {
        "ttft": record.ttft_seconds,
        "tpot": record.tpot_seconds,
        "e2e": record.e2e_seconds,
    }
    return values[name]
