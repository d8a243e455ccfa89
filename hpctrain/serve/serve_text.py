"""Formats what `serve status` and `serve test` print. Does not belong here: the documents."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hpctrain.base.units import short_duration
from hpctrain.page.text import LINE_WIDTH, columns_text, facts, or_dash

if TYPE_CHECKING:
    from hpctrain.records.service_records import Traffic
    from hpctrain.runs.service_status import ReplicaStatus, ServiceStatus
    from hpctrain.serve.down import EndingService
    from hpctrain.serve.load.service_test import ObjectiveResult, ServiceTest
    from hpctrain.serve.up import StartedService


def started_lines(started: StartedService, *, updated: bool) -> Iterator[str]:
    """Say what was submitted, and what to type next."""
    if updated:
        yield f"{started.service_id} is up: what starts from now on follows the new spec"
        yield f"for the replicas that run: hpctrain serve restart {started.service_id}"
        return
    jobs = ", ".join(map(str, started.replicas)) or "none"
    yield f"replicas: jobs {jobs}"
    if started.router_job is not None:
        yield f"router: job {started.router_job}"
    if started.url is not None:
        yield f"router: {started.url}, on this machine"
    yield f"next: hpctrain serve status {started.service_id}"


def ending_line(ending: EndingService) -> str:
    """Say who ends the service."""
    if ending.controller:
        return f"{ending.service_id}: its controller drains all replicas and leaves"
    if ending.cancelled:
        jobs = ", ".join(map(str, ending.cancelled))
        return f"{ending.service_id}: cancelled jobs {jobs}"
    if ending.drained:
        return f"{ending.service_id} has no controller: asked {', '.join(ending.drained)} to leave"
    return f"{ending.service_id}: no job of it is left"


def status_row(one: ServiceStatus) -> list[str]:
    """One line of the list of services."""
    rate = None if one.traffic is None else one.traffic.rate
    address = "-" if one.address is None else one.address.url
    return [one.service_id, one.state, f"{one.ready}/{one.wanted}", _rate(rate), address]


def status_lines(one: ServiceStatus, width: int = LINE_WIDTH) -> Iterator[str]:
    """Format the page of one service."""
    address = load = None
    if one.address is not None:
        address = one.address.url + (" (with a token)" if one.address.needs_token else "")
    if one.traffic is not None:
        load = _traffic(one.traffic)
    yield from facts(
        ("Service", f"{one.service_id}: {one.state}"),
        ("Address", address),
        ("Replicas", f"{one.ready} ready, {one.wanted} wanted: {one.reason}"),
        ("Load", load),
        ("Restart", one.restart),
        *(("Waits", wait) for wait in one.waits),
        *(("Problem", problem) for problem in one.problems),
        width=width,
    )
    if one.replicas:
        yield ""
        headers = ["REPLICA", "PHASE", "JOB", "NODE", "FOR", "LEFT", ""]
        rows = [_replica_row(replica) for replica in one.replicas]
        yield from columns_text(headers, rows, numeric=False)


def _traffic(seen: Traffic) -> str:
    parts = [f"{_rate(seen.rate)} in the last minute"]
    if seen.running is not None and seen.waiting is not None:
        parts.append(f"{seen.running:.0f} computed, {seen.waiting:.0f} wait")
    if seen.kv_share is not None:
        parts.append(f"at most {seen.kv_share:.0%} of a KV cache used")
    for label, seconds in (("ttft", seen.ttft_p99_seconds), ("e2e", seen.e2e_p99_seconds)):
        if seconds is not None:
            parts.append(f"p99 {label} {short_duration(seconds)}")
    parts.append(f"{seen.requests:,} requests in all, {seen.failed:,} failed")
    for label, count in (("refused", seen.refused), ("over the rate limit", seen.limited)):
        if count:
            parts.append(f"{count:,} {label}")
    return ", ".join(parts)


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.1f}/s"


def _replica_row(one: ReplicaStatus) -> list[str]:
    left = "-" if one.walltime_seconds is None else short_duration(max(0.0, one.walltime_seconds))
    job = or_dash(one.job_id)
    since = short_duration(one.age_seconds)
    return [one.name, one.phase, job, or_dash(one.node), since, left, one.reason]


def measured_lines(found: ServiceTest, width: int = LINE_WIDTH) -> Iterator[str]:
    """Format promise and measurement side by side."""
    measured = found.measurement
    what = (
        f"{measured.counted:,} of {measured.requests:,} requests after the first "
        f"{short_duration(measured.warm_up_seconds)}, {measured.rate:g}/s planned, "
        f"{measured.answered_rate:.2f}/s answered, {measured.failed:,} failed"
    )
    failed = [
        f"{one.count:,} x {one.kind} (such as {', '.join(one.request_ids[:3])}): {one.detail}"
        for one in measured.failures
    ]
    yield from facts(("Measured", what), *(("Failed", one) for one in failed), width=width)
    yield ""
    headers = ["", "LIMIT", "PROMISED", "MEASURED", "95 OF 100 WITHIN", ""]
    rows = [_objective_row(one) for one in found.objectives]
    yield from columns_text(headers, rows, numeric=False)
    yield ""
    missed = [one for one in found.objectives if one.verdict != "met"]
    yield from facts(
        *((f"{one.percentile} {one.latency}", one.reason) for one in missed),
        *(("Client", reason) for reason in measured.refused),
        ("Verdict", found.verdict),
        width=width,
    )


def _objective_row(one: ObjectiveResult) -> list[str]:
    from hpctrain.serve.plan.sentences import seconds_text

    measured, within = "-", "-"
    if one.measured is not None:
        seconds, high = one.measured.seconds, one.measured.high_seconds
        measured = "never" if seconds is None else seconds_text(seconds)
        upper = "never" if high is None else seconds_text(high)
        within = f"{seconds_text(one.measured.low_seconds)} to {upper}"
    promised = (
        f"{seconds_text(one.promised_low_seconds)} to {seconds_text(one.promised_high_seconds)}"
    )
    limit = seconds_text(one.limit_seconds)
    return [f"{one.percentile} {one.latency}", limit, promised, measured, within, one.verdict]
