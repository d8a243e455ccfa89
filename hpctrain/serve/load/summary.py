"""From records of requests to a measurement, or to the reasons why it is none. Pure.

Belongs here: counting, quantiles, and judging the client. Does not belong here: order statistics
(see `order_statistics`), the promise (see `service_test`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from hpctrain.serve.load.measurement import (
    ClientLoad,
    ClientUse,
    FailureKind,
    Failures,
    MeasuredLatency,
    MeasuredQuantile,
    Measurement,
    RequestRecord,
)
from hpctrain.serve.load.order_statistics import sample_at, sample_quantile

if TYPE_CHECKING:
    from hpctrain.serve.load.sending import LoadPlan, LoadResult, LoadTarget

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
    quantiles = tuple(_quantiles(counted))
    client = _client_load(counted, result.use)
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
        prompt_tokens_mean=_mean(one.prompt_tokens for one in counted),
        output_tokens_mean=_mean(one.answered_tokens for one in answered),
        output_tokens_rate=(
            sum(one.answered_tokens for one in answered) / duration if duration > 0 else 0.0
        ),
        quantiles=quantiles,
        failures=tuple(_failures(counted)),
        client=client,
        refused=tuple(_reasons_to_refuse(client, quantiles, len(counted))),
    )


def _mean(numbers: Iterable[int]) -> float:
    given = list(numbers)
    return statistics.fmean(given) if given else 0.0


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


def _client_load(counted: Sequence[RequestRecord], use: ClientUse) -> ClientLoad:
    late = [one.sent_seconds - one.planned_seconds for one in counted]
    return ClientLoad(
        cpu_share=use.cpu_share,
        late_p50_seconds=sample_at(late, 0.5),
        late_p99_seconds=sample_at(late, 0.99),
        late_max_seconds=max(late, default=0.0),
        lag_p99_seconds=sample_at(use.lag_seconds, 0.99),
        most_outstanding=use.most_outstanding,
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
