"""Formats what `serve` prints: plans, what was started and ended, states, measurements.

Belongs here: labels, columns and units. Does not belong here: any figure or reason that is not in
the documents.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from hpctrain.base.units import short_bytes, short_duration
from hpctrain.page.text import LINE_WIDTH, Whole, columns_text, facts, or_dash, paragraph
from hpctrain.serve.plan.documents import seconds_text

if TYPE_CHECKING:
    from hpctrain.runs.service_status import ServiceStatus
    from hpctrain.serve.control import EndingService
    from hpctrain.serve.load.measurement import ServiceTest
    from hpctrain.serve.make_plan import PlannedService
    from hpctrain.serve.plan.documents import Clarification, ServicePlan
    from hpctrain.serve.up import StartedService

_MOST_ALTERNATIVES = 5


def planned_lines(planned: PlannedService, width: int = LINE_WIDTH) -> list[str]:
    """Format what `serve plan` prints: all clusters in columns, then the cheapest plan."""
    lines: list[str] = []
    for clarification in planned.clarifications:
        lines += [*_clarification_lines(clarification, width), ""]
    if len(planned.plans) + len(planned.refused) > 1:
        lines += [*_cluster_rows(planned.plans), ""]
    if planned.chosen is not None:
        lines += _service_plan_lines(planned.chosen, width)
    for refused in planned.refused:
        lines += ["", *facts(("Refused", f"{refused.profile}:"), width=width)]
        for line in refused.reason.splitlines()[:_MOST_ALTERNATIVES]:
            lines += paragraph(line, " " * 10 + "- ", width=width)
        if refused.hint is not None:
            lines += paragraph(refused.hint, " " * 10 + "hint: ", hang=10, width=width)
    return lines


def _clarification_lines(clarification: Clarification, width: int) -> list[str]:
    """Format the price of each reading of a limit that does not name its latency."""
    limit = seconds_text(clarification.limit_seconds).replace(" ", "")
    lines = paragraph(
        f"{clarification.profile}: `objectives.p99: {limit}` does not say of which latency. It "
        "costs:",
        width=width,
    )
    for one in clarification.readings:
        what = f"nothing holds: {one.reason}"
        if one.holds:
            price = _money(one.cost_per_hour, clarification.currency)
            what = f"{one.summary}, {price} an hour; {one.reason}"
        lines += facts((f"  {one.latency}", what), width=width)
    lines += paragraph(
        f"Say which one, such as `--set objectives.ttft.p99={limit}` without `objectives.p99`: "
        "ttft is what users of a chat wait for, tpot how fast they read, e2e what programs wait "
        "for.",
        width=width,
    )
    return lines


def _cluster_rows(plans: Sequence[ServicePlan]) -> list[str]:
    """Tabulate one plan per cluster, the cheapest first."""
    headers = ["PROFILE", "GPU", "REPLICAS", "GPUS", "AN HOUR", "1M TOKENS"]
    promises = plans[0].promises if plans else ()
    headers += [f"{one.percentile.upper()} {one.latency.upper()}" for one in promises]
    rows = [
        [
            plan.profile or "-",
            plan.replica.gpu,
            f"{_count(plan)} x {plan.replica.gpus}",
            str(plan.gpus),
            _money(plan.cost_per_hour, plan.currency),
            _money(plan.cost_per_million_output_tokens, plan.currency),
            *(seconds_text(one.predicted_seconds) for one in plan.promises),
        ]
        for plan in plans
    ]
    return columns_text(headers, rows, numeric=False)


def _service_plan_lines(plan: ServicePlan, width: int) -> list[str]:
    """Format one plan: what is started, what it costs, what it promises, and what else there is."""
    replica, currency = plan.replica, plan.currency
    where = f"{plan.profile}: " if plan.profile else ""
    ranks = f"tp {replica.tp}" + (f", pp {replica.pp}" if replica.pp > 1 else "")
    gpus = f"{plan.gpus:,} GPU{'s' if plan.gpus != 1 else ''}"
    hours = plan.gpu_hours_per_hour
    paid = "" if hours is None else f", {hours:,.1f} GPU-hours an hour"
    costs = f"{gpus}{paid} (the profile has no prices)"
    if plan.cost_per_hour is not None:
        costs = (
            f"{_money(plan.cost_per_hour, currency)} an hour{paid}; "
            f"{_money(plan.cost_per_million_output_tokens, currency)} for a million tokens of "
            "answers"
        )
    keys = replica.kv_capacity_tokens * replica.kv_bytes_per_token
    memory = (
        ("weights", replica.weight_bytes),
        (f"keys and values of {replica.kv_capacity_tokens:,} tokens", keys),
        ("activations", replica.activation_bytes),
        ("the engine itself", replica.overhead_bytes),
    )
    used, whole = short_bytes(sum(size for _, size in memory)), ""
    if replica.gpu_memory_bytes is not None:
        whole = f" of {short_bytes(replica.gpu_memory_bytes)}"
    listed = ", ".join(f"{name} {short_bytes(size)}" for name, size in memory)
    finished = "all of it"
    if plan.lost_per_preemption >= 0.05:
        finished = f"all but {plan.lost_per_preemption:,.1f} requests"
    promises = [
        [
            f"{one.percentile} {one.latency}",
            seconds_text(one.limit_seconds),
            seconds_text(one.predicted_seconds),
            f"{seconds_text(one.low_seconds)} to {seconds_text(one.high_seconds)}",
            "yes" if one.holds else "NO",
        ]
        for one in plan.promises
    ]
    headers = ["", "LIMIT", "PREDICTED", "95 OF 100 WITHIN", "HOLDS"]
    others: dict[str, list[str]] = {}
    for other in plan.alternatives[:_MOST_ALTERNATIVES]:
        own, theirs = plan.cost_per_hour, other.cost_per_hour
        label = "Cheaper" if theirs is not None and own is not None and theirs < own else "Others"
        price = f", {_money(theirs, currency)}" if theirs else ""
        others.setdefault(label, []).append(f"{other.summary}{price}: {other.reason}")
    return [
        *facts(
            (
                "Plan",
                f"{where}{_count(plan)} replica{'s' if plan.count > 1 else ''} of {replica.gpus} x "
                f"{replica.gpu} ({ranks}), {gpus}; {replica.engine}, {replica.precision} "
                f"weights, {replica.kv_precision} keys and values",
            ),
            ("Costs", costs),
            ("Promises", map(Whole, columns_text(headers, promises, numeric=False))),
            (
                "Carries",
                f"{plan.rate:,.4g} requests/s, up to {plan.capacity_rate:,.4g} within the limits; "
                f"enough replicas answer {plan.availability:.3%} of the time",
            ),
            ("Memory", f"{used}{whole} a GPU: {listed}"),
            (
                "Engine",
                f"{replica.max_sequences} sequences and {replica.batch_tokens:,} tokens an "
                f"iteration, requests of up to {replica.max_length:,} tokens",
            ),
            (
                "Leaves",
                f"a replica that is taken has {short_duration(plan.drain_seconds)} for what it has "
                f"begun, which is enough for {finished}; the next one answers after "
                f"{short_duration(plan.load_seconds)}",
            ),
            *others.items(),
            width=width,
        ),
        "",
        *(line for reason in plan.reasons for line in paragraph(reason, "- ", width=width)),
    ]


def _count(plan: ServicePlan) -> str:
    return f"{plan.replicas} + {plan.spare} spare" if plan.spare else str(plan.replicas)


def _money(amount: float | None, currency: str | None) -> str:
    return "-" if amount is None or currency is None else f"{amount:,.2f} {currency}"


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
    address, load, seen = None, [], one.traffic
    if one.address is not None:
        address = one.address.url + (" (with a token)" if one.address.needs_token else "")
    if seen is not None:
        load.append(f"{_rate(seen.rate)} in the last minute")
        if seen.running is not None and seen.waiting is not None:
            load.append(f"{seen.running:.0f} computed, {seen.waiting:.0f} wait")
        if seen.kv_share is not None:
            load.append(f"at most {seen.kv_share:.0%} of a KV cache used")
        for label, seconds in (("ttft", seen.ttft_p99_seconds), ("e2e", seen.e2e_p99_seconds)):
            if seconds is not None:
                load.append(f"p99 {label} {short_duration(seconds)}")
        load.append(f"{seen.requests:,} requests in all, {seen.failed:,} failed")
        for label, count in (("refused", seen.refused), ("over the rate limit", seen.limited)):
            if count:
                load.append(f"{count:,} {label}")
    yield from facts(
        ("Service", f"{one.service_id}: {one.state}"),
        ("Address", address),
        ("Replicas", f"{one.ready} ready, {one.wanted} wanted: {one.reason}"),
        ("Load", ", ".join(load)),
        ("Restart", one.restart),
        *(("Waits", wait) for wait in one.waits),
        *(("Problem", problem) for problem in one.problems),
        width=width,
    )
    if one.replicas:
        yield ""
        headers = ["REPLICA", "PHASE", "JOB", "NODE", "FOR", "LEFT", ""]
        rows = [
            [
                replica.name,
                replica.phase,
                or_dash(replica.job_id),
                or_dash(replica.node),
                short_duration(replica.age_seconds),
                "-"
                if replica.walltime_seconds is None
                else short_duration(max(0.0, replica.walltime_seconds)),
                replica.reason,
            ]
            for replica in one.replicas
        ]
        yield from columns_text(headers, rows, numeric=False)


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.1f}/s"


def measured_lines(found: ServiceTest, width: int = LINE_WIDTH) -> Iterator[str]:
    """Format promise and measurement side by side."""

    def reached(seconds: float | None) -> str:
        return "never" if seconds is None else seconds_text(seconds)

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
    rows = []
    for one in found.objectives:
        seconds, within = "-", "-"
        if one.measured is not None:
            seconds = reached(one.measured.seconds)
            low, high = one.measured.low_seconds, one.measured.high_seconds
            within = f"{seconds_text(low)} to {reached(high)}"
        low, high = one.promised_low_seconds, one.promised_high_seconds
        promised = f"{seconds_text(low)} to {seconds_text(high)}"
        limit = seconds_text(one.limit_seconds)
        name = f"{one.percentile} {one.latency}"
        rows.append([name, limit, promised, seconds, within, one.verdict])
    headers = ["", "LIMIT", "PROMISED", "MEASURED", "95 OF 100 WITHIN", ""]
    yield from columns_text(headers, rows, numeric=False)
    yield ""
    missed = [one for one in found.objectives if one.verdict != "met"]
    yield from facts(
        *((f"{one.percentile} {one.latency}", one.reason) for one in missed),
        *(("Client", reason) for reason in measured.refused),
        ("Verdict", found.verdict),
        width=width,
    )
