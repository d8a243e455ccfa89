"""What a load test asks and leaves: records of requests, the measurement, promises beside it. Pure.

Belongs here: these documents, and deciding whether an objective is met. Does not belong here:
measuring (see `sending`, `summary`), promising (see `hpctrain.serve.plan`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

from hpctrain.serve.plan.documents import Promise
from hpctrain.serve.plan.traffic import Traffic
from hpctrain.spec.document import Document
from hpctrain.spec.service import LatencyName

MeasuredLatency = Literal["ttft", "tpot", "e2e", "itl"]
FailureKind = Literal[
    "refused", "reset", "timeout", "http 429", "http 4xx", "http 5xx", "error event", "cut short"
]


@dataclass(frozen=True)
class LoadTarget:
    """Whom to ask: the address of a router or an engine, without a path."""

    url: str
    model: str
    token: str | None = field(default=None, repr=False)
    ca_path: str | None = None
    timeout_seconds: float = 600.0


@dataclass(frozen=True)
class LoadPlan:
    """What is sent: `requests` of the traffic at `rate` per second.

    Those planned in the first `warm_up_seconds` are not counted. The same seed sends the same.
    """

    traffic: Traffic
    rate: float
    requests: int = 10_000
    warm_up_seconds: float = 10.0
    seed: int = 0


@dataclass(frozen=True)
class RequestRecord:
    """One request of a load test; seconds are since the start of the test.

    `planned_seconds` is when it had to be sent, whatever became of those before it; latencies count
    from there. `gap_seconds`: between pieces of the answer, which are tokens where the engine sends
    each by itself (a busy front end sends several at once). `failure` is None for a whole answer.
    """

    request_id: str
    planned_seconds: float
    sent_seconds: float
    prompt_tokens: int
    asked_tokens: int
    first_token_seconds: float | None = None
    last_token_seconds: float | None = None
    answered_tokens: int = 0
    gap_seconds: tuple[float, ...] = ()
    failure: FailureKind | None = None
    detail: str = ""

    @property
    def ttft_seconds(self) -> float | None:
        """Time to the first token, from the planned time; None for a failed request."""
        if self.failure is not None or self.first_token_seconds is None:
            return None
        return self.first_token_seconds - self.planned_seconds

    @property
    def e2e_seconds(self) -> float | None:
        """Time to the last token, from the planned time; None for a failed request."""
        if self.failure is not None or self.last_token_seconds is None:
            return None
        return self.last_token_seconds - self.planned_seconds

    @property
    def tpot_seconds(self) -> float | None:
        """Time per further token; None for a failed request, and for an answer of one token."""
        if self.ttft_seconds is None or self.e2e_seconds is None or self.answered_tokens < 2:
            return None
        return (self.e2e_seconds - self.ttft_seconds) / (self.answered_tokens - 1)

    def to_line(self) -> str:
        """Write the record as one line of JSON, with microseconds."""
        fields = {
            key: round(value, 6) if isinstance(value, float) else value
            for key, value in asdict(self).items()
        }
        fields["gap_seconds"] = [round(gap, 6) for gap in self.gap_seconds]
        return json.dumps(fields, separators=(",", ":"))

    @classmethod
    def from_line(cls, line: str) -> RequestRecord:
        """Read the line again. Raises ValueError or TypeError for anything else."""
        fields = json.loads(line)
        return cls(**{**fields, "gap_seconds": tuple(fields["gap_seconds"])})


@dataclass(frozen=True)
class ClientUse:
    """What the load generator took of its machine while it sent and waited.

    `lag_seconds`: by how much sleeps of the event loop were longer than asked.
    """

    cpu_share: float
    lag_seconds: tuple[float, ...]
    most_outstanding: int


@dataclass(frozen=True)
class LoadResult:
    """All requests in the order in which they were planned, and what the client used for them.

    `began_seconds` is the zero of the records' times, since the epoch.
    """

    records: tuple[RequestRecord, ...]
    use: ClientUse
    began_seconds: float


class MeasuredQuantile(Document):
    """One percentile of one latency with its interval of 95 %.

    A failed request counts as one that never ends: None is such a time, and a bound that the
    samples are too few for. `independent`: how many independent samples say as much as `samples`.
    """

    latency: MeasuredLatency
    percentile: str
    seconds: float | None
    low_seconds: float
    high_seconds: float | None
    samples: int
    independent: int


class Failures(Document):
    """Requests that failed in the same way, with some of them by id and planned time."""

    kind: FailureKind
    count: int
    request_ids: tuple[str, ...]
    planned_seconds: tuple[float, ...]
    detail: str


class ClientLoad(Document):
    """What the load generator itself did, to tell whether it measured the service or itself.

    `late`: sending after the planned time. `lag`: how much longer than asked the event loop slept.
    """

    cpu_share: float
    late_p50_seconds: float
    late_p99_seconds: float
    late_max_seconds: float
    lag_p99_seconds: float
    most_outstanding: int


class Measurement(Document):
    """A load test: what was asked, what came back, and whether the client could keep up.

    `requests` were sent in all, `counted` of them after the warm-up; quantiles and failures are of
    the counted ones. Rates are per second. Times of records count from `began_seconds` since the
    epoch. `refused`: why this is no measurement of the service.
    """

    schema_version: Literal[1] = 1
    url: str
    model: str
    began_seconds: float
    rate: float
    burstiness: float
    seed: int
    requests: int
    counted: int
    warm_up_seconds: float
    duration_seconds: float
    answered_rate: float
    prompt_tokens_mean: float
    output_tokens_mean: float
    output_tokens_rate: float
    quantiles: tuple[MeasuredQuantile, ...]
    failures: tuple[Failures, ...]
    client: ClientLoad
    refused: tuple[str, ...] = ()

    @property
    def failed(self) -> int:
        """Counted requests without a whole answer."""
        return sum(one.count for one in self.failures)

    def quantile(self, latency: MeasuredLatency, percentile: str) -> MeasuredQuantile | None:
        """Look up a percentile such as `p99`; None if it was not measured."""
        wanted = (latency, percentile)
        return next((q for q in self.quantiles if (q.latency, q.percentile) == wanted), None)


# -- promise and measurement side by side: what `hpctrain serve test` prints ---------------------

Verdict = Literal["met", "not met", "cannot tell"]


class ObjectiveResult(Document):
    """One objective: its limit, what the plan promised, what was measured, and the verdict.

    `met`: even the upper bound of the measured interval is within the limit; `not met`: even the
    lower bound is above. `as_promised`: the measured interval and the promised one overlap; None
    where nothing was measured. Seconds of None are those of requests that never end.
    """

    latency: LatencyName
    percentile: str
    limit_seconds: float
    promised_seconds: float
    promised_low_seconds: float
    promised_high_seconds: float
    measured: MeasuredQuantile | None
    verdict: Verdict
    reason: str
    as_promised: bool | None


class ServiceTest(Document):
    """The result of a load test of a service, kept in its directory."""

    schema_version: Literal[1] = 1
    objectives: tuple[ObjectiveResult, ...]
    measurement: Measurement

    @property
    def verdict(self) -> Verdict:
        """The worst of all objectives."""
        verdicts = {one.verdict for one in self.objectives}
        if "not met" in verdicts:
            return "not met"
        return "cannot tell" if "cannot tell" in verdicts or not verdicts else "met"


def compare(promises: Sequence[Promise], measurement: Measurement) -> ServiceTest:
    """Put each promise beside what was measured."""
    results = []
    for promise in promises:
        measured = measurement.quantile(promise.latency, promise.percentile)
        verdict, reason = _verdict(promise.limit_seconds, measured, measurement)
        overlap = None
        if measurement.refused:
            measured = None
        if measured is not None:
            high = measured.high_seconds
            below = high is not None and high < promise.low_seconds
            overlap = not below and measured.low_seconds <= promise.high_seconds
        results.append(
            ObjectiveResult(
                latency=promise.latency,
                percentile=promise.percentile,
                limit_seconds=promise.limit_seconds,
                promised_seconds=promise.predicted_seconds,
                promised_low_seconds=promise.low_seconds,
                promised_high_seconds=promise.high_seconds,
                measured=measured,
                verdict=verdict,
                reason=reason,
                as_promised=overlap,
            )
        )
    return ServiceTest(objectives=tuple(results), measurement=measurement)


def _verdict(
    limit_seconds: float, measured: MeasuredQuantile | None, measurement: Measurement
) -> tuple[Verdict, str]:
    if measurement.refused:
        return "cannot tell", "; ".join(measurement.refused)
    if measured is None:
        return "cannot tell", "it was not measured"
    if measured.seconds is None:
        return "not met", f"{measurement.failed} of {measurement.counted} requests failed"
    if measured.low_seconds > limit_seconds:
        return "not met", "the whole interval is above the limit"
    if measured.high_seconds is not None and measured.high_seconds <= limit_seconds:
        return "met", "the whole interval is within the limit"
    if measured.high_seconds is None:
        return "cannot tell", f"{measured.independent} independent requests are too few"
    return "cannot tell", "the limit is inside the interval: measure more requests"
