"""From records of requests to a measurement, or to the reasons why it is none. Pure.

Belongs here: counting, quantiles with intervals that assume no distribution, judging the client,
and the requests of a test over time: windows, slow ones, failures. Does not belong here: the
promise (see `measurement`), drawing (`hpctrain.report.service_page`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hpctrain.base.frozen import Frozen
from hpctrain.serve.load.measurement import (
    ClientLoad,
    FailureKind,
    Failures,
    LoadPlan,
    LoadResult,
    LoadTarget,
    MeasuredLatency,
    MeasuredQuantile,
    Measurement,
    RequestRecord,
)
from hpctrain.serve.plan.documents import Promise
from hpctrain.serve.plan.promises import variance_ratio
from hpctrain.serve.plan.traffic import Floats
from hpctrain.spec.service import LATENCY_NAMES, LatencyName

PERCENTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
_NAMED_FAILURES = 20
# A client above this share of its core queues by itself: waiting grows as 1 / (1 - share).
MOST_CPU_SHARE = 0.8
# Requests that leave later than this, or than a tenth of the median time to the first token,
# measure the client. 5 ms is what epoll and a busy machine make of a timer.
_LATE_SECONDS, _LATE_SHARE = 0.005, 0.1


def summarize(target: LoadTarget, plan: LoadPlan, result: LoadResult) -> Measurement:
    """Measure the requests that were planned after the warm-up, in the order of their plan."""
    ordered = sorted(result.records, key=lambda record: record.planned_seconds)
    counted = [one for one in ordered if one.planned_seconds >= plan.warm_up_seconds]
    answered = [one for one in counted if one.failure is None]
    ends = [one.last_token_seconds or one.planned_seconds for one in counted]
    duration = max(ends, default=0.0) - plan.warm_up_seconds
    output_tokens = sum(one.answered_tokens for one in answered)
    quantiles = tuple(_quantiles(counted))
    late = [one.sent_seconds - one.planned_seconds for one in counted]
    client = ClientLoad(
        cpu_share=result.use.cpu_share,
        late_p50_seconds=sample_at(late, 0.5),
        late_p99_seconds=sample_at(late, 0.99),
        late_max_seconds=max(late, default=0.0),
        lag_p99_seconds=sample_at(result.use.lag_seconds, 0.99),
        most_outstanding=result.use.most_outstanding,
    )
    return Measurement(
        url=target.url,
        model=target.model,
        began_seconds=result.began_seconds,
        rate=plan.rate,
        burstiness=plan.traffic.burstiness,
        seed=plan.seed,
        requests=len(result.records),
        counted=len(counted),
        warm_up_seconds=plan.warm_up_seconds,
        duration_seconds=max(0.0, duration),
        answered_rate=len(answered) / duration if duration > 0 else 0.0,
        prompt_tokens_mean=sum(one.prompt_tokens for one in counted) / max(1, len(counted)),
        output_tokens_mean=output_tokens / max(1, len(answered)),
        output_tokens_rate=output_tokens / duration if duration > 0 else 0.0,
        quantiles=quantiles,
        failures=tuple(_failures(counted)),
        client=client,
        refused=tuple(_reasons_to_refuse(client, quantiles, len(counted))),
    )


def _quantiles(counted: Sequence[RequestRecord]) -> Iterable[MeasuredQuantile]:
    """Compute all percentiles of all latencies that have samples."""
    samples: dict[MeasuredLatency, list[float]] = {
        "ttft": [_or_never(one.ttft_seconds) for one in counted],
        "tpot": [
            _or_never(one.tpot_seconds)
            for one in counted
            if one.failure is not None or one.answered_tokens > 1
        ],
        "e2e": [_or_never(one.e2e_seconds) for one in counted],
        "itl": [gap for one in counted if one.failure is None for gap in one.gap_seconds],
    }
    for latency, seconds in samples.items():
        if not seconds:
            continue
        for percentile, share in PERCENTILES.items():
            found = sample_quantile(seconds, share)
            yield MeasuredQuantile(
                latency=latency,
                percentile=percentile,
                seconds=_finite(found.value),
                low_seconds=found.low if math.isfinite(found.low) else 0.0,
                high_seconds=_finite(found.high),
                samples=found.samples,
                independent=found.independent,
            )


def _or_never(seconds: float | None) -> float:
    return math.inf if seconds is None else seconds


def _finite(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) else None


def _failures(counted: Sequence[RequestRecord]) -> Iterable[Failures]:
    """Group failed requests by kind, most frequent first."""
    by_kind: dict[FailureKind, list[RequestRecord]] = {}
    for one in counted:
        if one.failure is not None:
            by_kind.setdefault(one.failure, []).append(one)
    for kind, failed in sorted(by_kind.items(), key=lambda item: -len(item[1])):
        yield Failures(
            kind=kind,
            count=len(failed),
            request_ids=tuple(one.request_id for one in failed[:_NAMED_FAILURES]),
            planned_seconds=tuple(one.planned_seconds for one in failed[:_NAMED_FAILURES]),
            detail=failed[0].detail,
        )


def _reasons_to_refuse(
    client: ClientLoad, quantiles: Sequence[MeasuredQuantile], counted: int
) -> Iterable[str]:
    """Say why the numbers would be the client's, not the service's."""
    if counted == 0:
        yield "no request was planned after the warm-up"
        return
    if client.cpu_share > MOST_CPU_SHARE:
        yield (
            f"the load generator used {client.cpu_share:.0%} of a core, above "
            f"{MOST_CPU_SHARE:.0%}: it queued by itself"
        )
    medians = [one.seconds for one in quantiles if (one.latency, one.percentile) == ("ttft", "p50")]
    bearable = _LATE_SECONDS
    if medians and medians[0] is not None:
        bearable = max(bearable, _LATE_SHARE * medians[0])
    if client.late_p99_seconds > bearable:
        yield (
            f"1 of 100 requests left {client.late_p99_seconds * 1e3:.1f} ms late or more, above "
            f"{bearable * 1e3:.1f} ms: the machine of the load generator was busy"
        )


# -- Quantiles of measured latencies, with intervals that assume no distribution ----------------
# The interval of a quantile is a pair of order statistics (H. A. David and H. N. Nagaraja, "Order
# Statistics", 3rd edition, section 7.1): the number of n independent samples below the quantile of
# share p is binomial(n, p), whatever the samples are distributed as.


CONFIDENCE = 0.95
# Standard deviations beyond which binomial probabilities are nothing beside the tails asked for.
_REACH_DEVIATIONS = 9.0


@dataclass(frozen=True)
class RankInterval:
    """Ranks from 1 between which a quantile lies; None: the samples do not bound it there."""

    low: int | None
    high: int | None


def rank_interval(samples: int, share: float, confidence: float = CONFIDENCE) -> RankInterval:
    """Return the ranks whose samples bound a quantile of independent samples.

    The quantile is below the sample of rank `low`, and above that of rank `high`, with a
    probability of at most (1 - confidence) / 2 each.
    """
    if samples < 1:
        return RankInterval(None, None)
    tail = (1 - confidence) / 2
    centre = samples * share
    reach = math.ceil(_REACH_DEVIATIONS * math.sqrt(centre * (1 - share))) + 20
    first, last = max(0, math.floor(centre) - reach), min(samples, math.ceil(centre) + reach)
    # binomial probabilities, by logarithms of the gamma function
    logs = math.log(share), math.log1p(-share)
    chances = []
    for count in range(first, last + 1):
        others = samples - count
        chosen = math.lgamma(samples + 1) - math.lgamma(count + 1) - math.lgamma(others + 1)
        chances.append(math.exp(chosen + count * logs[0] + others * logs[1]))
    below, low = 0.0, first
    for low, chance in enumerate(chances, first):  # noqa: B007
        if below + chance > tail:
            break
        below += chance
    above, high = 0.0, last
    for high in range(last, first - 1, -1):
        if above + chances[high - first] > tail:
            break
        above += chances[high - first]
    high += 1
    return RankInterval(low if low >= 1 else None, high if high <= samples else None)


@dataclass(frozen=True)
class SampleQuantile:
    """A quantile of samples and its interval; infinite where requests failed or samples are few.

    `independent`: how many independent samples say as much as these.
    """

    value: float
    low: float
    high: float
    samples: int
    independent: int


def sample_quantile(
    samples: Sequence[float], share: float, confidence: float = CONFIDENCE
) -> SampleQuantile:
    """Estimate a quantile of latencies that stand in the order of their requests.

    Neighbouring requests wait in the same queue, so that n of them say less than n independent
    ones: their number is divided by how much more the share of slow ones varies between batches
    than it would by chance (`variance_ratio`), and ranks are those of that number.
    """
    count = len(samples)
    if count == 0:
        return SampleQuantile(math.nan, math.nan, math.nan, 0, 0)
    given = np.asarray(samples, dtype=np.float64)
    ordered = np.sort(given)
    value = _at(ordered, share)
    independent = max(1, round(count / variance_ratio(given > value, share)))
    ranks = rank_interval(independent, share, confidence)
    low, high = 0.0, math.inf
    if ranks.low is not None:
        low = float(ordered[max(0, math.floor(ranks.low * count / independent) - 1)])
    if ranks.high is not None:
        high = float(ordered[min(count, math.ceil(ranks.high * count / independent)) - 1])
    return SampleQuantile(value, low, high, count, independent)


def sample_at(samples: Sequence[float], share: float) -> float:
    """Return the least sample that a share of them does not exceed; 0 without samples."""
    return _at(sorted(samples), share) if samples else 0.0


def _at(ordered: Sequence[float] | Floats, share: float) -> float:
    return float(ordered[max(0, math.ceil(share * len(ordered)) - 1)])


# -- the requests of a test over time --------------------------------------------------------------
# Its picture has to show single requests as well: what one preemption costs is lost in the
# percentile of an hour.

# A 99th percentile of fewer requests is their largest.
_LEAST_REQUESTS = 100
_MOST_WINDOWS = 120
# Each is a mark of its own on the page.
_MOST_SLOW = 1500
# Of a test with so few requests all are shown: windows of a hundred would hide when they came.
_ALL_UP_TO = 3000
_WINDOW_SECONDS = (0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600)


class LatencyWindow(Frozen):
    """Requests that were planned in one window; seconds are since the start of the test.

    A failed request counts as one that never ends: None is such a time, and that of no request.
    """

    begin: float
    requests: int
    failed: int
    p50_seconds: float | None
    p99_seconds: float | None


class ShownRequest(Frozen):
    """A request that is shown by itself, at its planned time."""

    planned_seconds: float
    seconds: float


class FailedRequest(Frozen):
    """A request without a whole answer, at its planned time."""

    planned_seconds: float
    request_id: str
    kind: str
    detail: str


class LatencyOverTime(Frozen):
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
    # windows with enough requests for a percentile, and not more than can be drawn
    least = max(duration / _MOST_WINDOWS, duration * _LEAST_REQUESTS / max(1, len(records)))
    width = float(next((one for one in _WINDOW_SECONDS if one >= least), _WINDOW_SECONDS[-1]))
    windows: dict[int, list[float]] = defaultdict(list)
    slow: list[ShownRequest] = []
    within: list[ShownRequest] = []
    longest = max(limits.values(), default=math.inf)
    for one in records:
        seconds: float | None = getattr(one, f"{name}_seconds")
        if seconds is None and one.failure is None:
            continue  # one token: it has no time per further token
        windows[int(one.planned_seconds // width)].append(math.inf if seconds is None else seconds)
        if seconds is not None:
            shown = ShownRequest(planned_seconds=one.planned_seconds, seconds=seconds)
            (slow if seconds > longest else within).append(shown)
    slow.sort(key=lambda one: -one.seconds)
    slowest = sorted(slow[:_MOST_SLOW], key=lambda one: one.planned_seconds)
    shown_windows = []
    for number in range(int(duration // width) + 1):
        values = windows.get(number, [])
        p50, p99 = (sample_at(values, share) if values else math.inf for share in (0.5, 0.99))
        shown_windows.append(
            LatencyWindow(
                begin=number * width,
                requests=len(values),
                failed=sum(map(math.isinf, values)),
                p50_seconds=_finite(p50),
                p99_seconds=_finite(p99),
            )
        )
    return LatencyOverTime(
        latency=name,
        window_seconds=width,
        limits=dict(limits),
        windows=tuple(shown_windows),
        slow=tuple(slowest),
        slow_count=len(slow),
        within=tuple(within) if len(records) <= _ALL_UP_TO else (),
    )
