"""Promise and measurement side by side: what `hpctrain serve test` prints.

Belongs here: the document, and deciding whether an objective is met. Does not belong here:
measuring (see `sending`), promising (see `hpctrain.serve.plan`). Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

from hpctrain.serve.load.measurement import MeasuredQuantile, Measurement
from hpctrain.serve.plan.documents import Promise
from hpctrain.spec.service import LatencyName

Verdict = Literal["met", "not met", "cannot tell"]


class ObjectiveResult(BaseModel):
    """One objective: its limit, what the plan promised, what was measured, and the verdict.

    `met`: even the upper bound of the measured interval is within the limit; `not met`: even the
    lower bound is above. `as_promised`: the measured interval and the promised one overlap; None
    where nothing was measured. Seconds of None are those of requests that never end.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

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


class ServiceTest(BaseModel):
    """The result of a load test of a service, kept in its directory."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

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
    results = tuple(_result(promise, measurement) for promise in promises)
    return ServiceTest(objectives=results, measurement=measurement)


def _result(promise: Promise, measurement: Measurement) -> ObjectiveResult:
    measured = measurement.quantile(promise.latency, promise.percentile)
    if measurement.refused:
        measured = None
    verdict, reason = _verdict(promise.limit_seconds, measured, measurement)
    return ObjectiveResult(
        latency=promise.latency,
        percentile=promise.percentile,
        limit_seconds=promise.limit_seconds,
        promised_seconds=promise.predicted_seconds,
        promised_low_seconds=promise.low_seconds,
        promised_high_seconds=promise.high_seconds,
        measured=measured,
        verdict=verdict,
        reason=reason,
        as_promised=None if measured is None else _overlap(promise, measured),
    )


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


def _overlap(promise: Promise, measured: MeasuredQuantile) -> bool:
    high = measured.high_seconds
    below = high is not None and high < promise.low_seconds
    return not below and measured.low_seconds <= promise.high_seconds
