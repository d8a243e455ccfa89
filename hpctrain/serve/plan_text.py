"""Formats the plan of a service as sentences and columns, wrapped at a width that the caller knows.

Belongs here: labels, columns and units. Does not belong here: any figure or reason that is not in
the documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hpctrain.base.units import short_bytes, short_duration
from hpctrain.job.plan_text import entry, wrapped
from hpctrain.page.text import LINE_WIDTH, columns_text

if TYPE_CHECKING:
    from hpctrain.serve.make_plan import PlannedService
    from hpctrain.serve.plan.documents import (
        Alternative,
        Clarification,
        Promise,
        ServicePlan,
    )

_MOST_ALTERNATIVES = 5
_INDENT = " " * 10


def planned_lines(planned: PlannedService, width: int = LINE_WIDTH) -> list[str]:
    """Format what `serve plan` prints: all clusters in columns, then the cheapest plan."""
    lines: list[str] = []
    for clarification in planned.clarifications:
        lines += [*clarification_lines(clarification, width), ""]
    if len(planned.plans) + len(planned.refused) > 1:
        lines += [*cluster_rows(planned.plans), ""]
    if planned.chosen is not None:
        lines += service_plan_lines(planned.chosen, width)
    for refused in planned.refused:
        lines.append("")
        lines += entry("Refused", f"{refused.profile}:", width)
        for line in refused.reason.splitlines()[:_MOST_ALTERNATIVES]:
            lines += wrapped(line, f"{_INDENT}- ", f"{_INDENT}  ", width)
        if refused.hint is not None:
            lines += wrapped(refused.hint, f"{_INDENT}hint: ", _INDENT, width)
    return lines


def cluster_rows(plans: Sequence[ServicePlan]) -> list[str]:
    """Tabulate one plan per cluster, the cheapest first."""
    headers = ["PROFILE", "GPU", "REPLICAS", "GPUS", "AN HOUR", "1M TOKENS"]
    names = (
        [f"{one.percentile.upper()} {one.latency.upper()}" for one in plans[0].promises]
        if plans
        else []
    )
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
    return columns_text([*headers, *names], rows, numeric=False)


def service_plan_lines(plan: ServicePlan, width: int = LINE_WIDTH) -> list[str]:
    """Format one plan: what is started, what it costs, what it promises, and what else there is."""
    replica = plan.replica
    where = f"{plan.profile}: " if plan.profile else ""
    ranks = f"tp {replica.tp}" + (f", pp {replica.pp}" if replica.pp > 1 else "")
    lines = [
        *entry(
            "Plan",
            f"{where}{_count(plan)} replica{'s' if plan.count > 1 else ''} of {replica.gpus} x "
            f"{replica.gpu} ({ranks}), {_gpus(plan.gpus)}; {replica.engine}, {replica.precision} "
            f"weights, {replica.kv_precision} keys and values",
            width,
        ),
        *entry("Costs", _costs(plan), width),
        *promise_lines(plan.promises),
        *entry(
            "Carries",
            f"{plan.rate:,.4g} requests/s, up to {plan.capacity_rate:,.4g} within the limits; "
            f"enough replicas answer {plan.availability:.3%} of the time",
            width,
        ),
        *entry("Memory", _memory(plan), width),
        *entry(
            "Engine",
            f"{replica.max_sequences} sequences and {replica.batch_tokens:,} tokens an iteration, "
            f"requests of up to {replica.max_length:,} tokens",
            width,
        ),
        *entry(
            "Leaves",
            f"a replica that is taken has {short_duration(plan.drain_seconds)} for what it has "
            f"begun, which is enough for {_all_but(plan.lost_per_preemption)}; the next one "
            f"answers after {short_duration(plan.load_seconds)}",
            width,
        ),
    ]
    for number, other in enumerate(plan.alternatives[:_MOST_ALTERNATIVES]):
        lines += entry("" if number else _label(other, plan), _alternative(other, plan), width)
    lines.append("")
    for reason in plan.reasons:
        lines += wrapped(reason, "- ", "  ", width)
    return lines


def promise_lines(promises: Sequence[Promise]) -> list[str]:
    """Tabulate limits and predictions with their intervals."""
    headers = ["", "LIMIT", "PREDICTED", "95 OF 100 WITHIN", "HOLDS"]
    rows = [
        [
            f"{one.percentile} {one.latency}",
            seconds_text(one.limit_seconds),
            seconds_text(one.predicted_seconds),
            f"{seconds_text(one.low_seconds)} to {seconds_text(one.high_seconds)}",
            "yes" if one.holds else "NO",
        ]
        for one in promises
    ]
    lines = columns_text(headers, rows, numeric=False)
    return [f"{'Promises' if not n else '':<10}{line}" for n, line in enumerate(lines)]


def clarification_lines(clarification: Clarification, width: int = LINE_WIDTH) -> list[str]:
    """Format the price of each reading of a limit that does not name its latency."""
    limit = seconds_text(clarification.limit_seconds)
    lines = wrapped(
        f"{clarification.profile}: `objectives.p99: {limit.replace(' ', '')}` does not say of "
        "which latency. It costs:",
        "",
        "",
        width,
    )
    for one in clarification.readings:
        price = _money(one.cost_per_hour, clarification.currency)
        what = f"{one.summary}, {price} an hour; {one.reason}" if one.holds else one.reason
        lines += entry(f"  {one.latency}", what if one.holds else f"nothing holds: {what}", width)
    example = f"`--set objectives.ttft.p99={limit.replace(' ', '')}`"
    return [
        *lines,
        *wrapped(
            f"Say which one, such as {example} without `objectives.p99`: ttft is what users of a "
            "chat wait for, tpot how fast they read, e2e what programs wait for.",
            "",
            "",
            width,
        ),
    ]


def seconds_text(seconds: float) -> str:
    """Format a latency with three digits: `36.1 ms`, `378 ms`, `6.54 s`."""
    from hpctrain.serve.plan.sentences import seconds_text as text  # with NumPy

    return text(seconds)


def _gpus(count: int) -> str:
    return f"{count:,} GPU{'s' if count != 1 else ''}"


def _count(plan: ServicePlan) -> str:
    return f"{plan.replicas} + {plan.spare} spare" if plan.spare else str(plan.replicas)


def _money(amount: float | None, currency: str | None) -> str:
    if amount is None or currency is None:
        return "-"
    return f"{amount:,.2f} {currency}"


def _all_but(lost_requests: float) -> str:
    return "all of it" if lost_requests < 0.05 else f"all but {lost_requests:,.1f} requests"


def _costs(plan: ServicePlan) -> str:
    hours = plan.gpu_hours_per_hour
    paid = "" if hours is None else f", {hours:,.1f} GPU-hours an hour"
    if plan.cost_per_hour is None:
        return f"{_gpus(plan.gpus)}{paid} (the profile has no prices)"
    return (
        f"{_money(plan.cost_per_hour, plan.currency)} an hour{paid}; "
        f"{_money(plan.cost_per_million_output_tokens, plan.currency)} for a million tokens of "
        "answers"
    )


def _memory(plan: ServicePlan) -> str:
    replica = plan.replica
    keys = replica.kv_capacity_tokens * replica.kv_bytes_per_token
    parts = (
        ("weights", replica.weight_bytes),
        (f"keys and values of {replica.kv_capacity_tokens:,} tokens", keys),
        ("activations", replica.activation_bytes),
        ("the engine itself", replica.overhead_bytes),
    )
    used = sum(size for _, size in parts)
    whole = (
        "" if replica.gpu_memory_bytes is None else f" of {short_bytes(replica.gpu_memory_bytes)}"
    )
    listed = ", ".join(f"{name} {short_bytes(size)}" for name, size in parts)
    return f"{short_bytes(used)}{whole} a GPU: {listed}"


def _label(other: Alternative, plan: ServicePlan) -> str:
    costs = other.cost_per_hour, plan.cost_per_hour
    cheaper = costs[0] is not None and costs[1] is not None and costs[0] < costs[1]
    return "Cheaper" if cheaper else "Others"


def _alternative(other: Alternative, plan: ServicePlan) -> str:
    price = f", {_money(other.cost_per_hour, plan.currency)}" if other.cost_per_hour else ""
    return f"{other.summary}{price}: {other.reason}"
