"""The dashboard of one service: promise and measurement, replicas, requests, router, money. Pure.

What engines count is a rate by replica first and a sum afterwards: a sum of counters would fall
whenever a replica leaves. Belongs here: its panels and queries. Does not belong here: JSON
(`grafana`), drawing.
"""

from __future__ import annotations

from hpctrain.observe.panel_queries import CHOSEN_SERVICE, NEUTRAL, better_from, ratio, worse_from
from hpctrain.observe.panel_shapes import bars, lines, stat
from hpctrain.observe.panel_types import (
    Column,
    DashboardPlan,
    Marks,
    Panel,
    PanelRow,
    Query,
    ShownValue,
    Variable,
)
from hpctrain.observe.run_panels import MARK_SECONDS

_PERCENTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
_YES_OR_NO = (ShownValue(1, "yes", "green"), ShownValue(0, "no", "red"))
_NEEDS_ENGINES = "an engine that answers the exporter"
_NEEDS_END = "a replica that has ended"
_NEEDS_PRICE = "a profile with prices"

SERVICE_CHOICE = Variable("service", "Service", "hpctrain_service_info", "service", several=False)


def _of(name: str, *labels: str, where: str = "", ago: str = "") -> str:
    """Select a family of the chosen service: one series for each value of the labels."""
    by = ", ".join(("service", *labels))
    selector = f"{CHOSEN_SERVICE}, {where}" if where else CHOSEN_SERVICE
    offset = f" offset {ago}" if ago else ""
    return f"max by ({by}) (hpctrain_service_{name}{{{selector}}}{offset})"


def _sum_of(name: str) -> str:
    """Add up a gauge of all replicas."""
    return f"sum by (service) ({_of(name, 'replica')})"


def _rate(name: str, *labels: str, where: str = "") -> str:
    """Compute how often something happens per second, of all replicas together."""
    each = _own_rate(name, "replica", *labels, where=where)
    return f"sum by ({', '.join(('service', *labels))}) ({each})"


def _own_rate(name: str, *labels: str, where: str = "") -> str:
    """Compute how often something happens per second, for each value of the labels."""
    selector = f"{CHOSEN_SERVICE}, {where}" if where else CHOSEN_SERVICE
    by = ", ".join(("service", *labels))
    return f"max by ({by}) (rate(hpctrain_service_{name}{{{selector}}}[5m]))"


def _quantile(share: float, latency: str) -> str:
    where = f'latency="{latency}"' if latency else ""
    return (
        f"histogram_quantile({share}, "
        f"{_rate('latency_seconds_bucket', 'latency', 'le', where=where)})"
    )


def _measured() -> str:
    """What was measured of each promise, with its labels."""
    named = (
        f'label_replace({_quantile(share, "")}, "percentile", "{name}", "", "")'
        for name, share in _PERCENTILES.items()
    )
    promised = _of("promised_seconds", "latency", "percentile")
    return f"({' or '.join(named)}) and on (service, latency, percentile) {promised}"


_PROMISED = _of("promised_seconds", "latency", "percentile")
_OF_PROMISE = f"({_measured()}) / on (service, latency, percentile) {_PROMISED}"
_FINISHED = _rate("latency_seconds_bucket", where='latency="e2e", le="+Inf"')
_COUNTED = _rate("latency_seconds_bucket", "latency", where='le="+Inf"')
_SLOW = (
    f"{_rate('slow_requests_total', 'latency', 'percentile')}"
    f" / on (service, latency) group_left () ({_COUNTED} > 0)"
)
_ARRIVING = _own_rate("router_requests_total")
_FAILED = f"sum by (service) ({_own_rate('router_failed_requests_total', 'reason')})"


def _latency(title: str, latency: str, description: str) -> Panel:
    """Draw the median and the tail of a latency beside what is promised of it."""
    promised = _of("promised_seconds", "percentile", where=f'latency="{latency}"')
    return lines(
        title,
        description,
        Query(_quantile(0.5, latency), "p50"),
        Query(_quantile(0.99, latency), "p99"),
        Query(promised, "promised {{percentile}}", dashed=True),
        unit="s",
        from_zero=True,
        needs=_NEEDS_ENGINES,
    )


_NOW = PanelRow(
    "Now",
    (
        stat(
            "Ready",
            "Replicas that answer.",
            _of("replicas_ready"),
            thresholds=better_from(1, 2),
        ),
        stat("Wanted", "Replicas that the controller wants.", _of("replicas_wanted")),
        stat(
            "Worst of what is promised",
            "The percentile that is nearest to its limit, or furthest beyond it, in the last five "
            "minutes, over the limit.",
            f"max by (service) ({_OF_PROMISE})",
            "percentunit",
            worse_from(0.9, 1),
            needs=_NEEDS_ENGINES,
        ),
        stat(
            "Requests per second",
            "Requests that reach the router.",
            _ARRIVING,
        ),
        stat(
            "Failed",
            "Share of requests that clients got an error for, in the last five minutes.",
            f"{_FAILED} / ({_ARRIVING} > 0)",
            "percentunit",
            worse_from(0.0001, 0.001),
        ),
        stat(
            "In queues",
            "Requests that wait inside of engines.",
            _sum_of("waiting_requests"),
            thresholds=worse_from(1, 50),
            needs=_NEEDS_ENGINES,
        ),
        stat(
            "Fullest KV cache",
            "Of the replica with the fullest memory for keys and values. From 90 % on engines put "
            "requests back and compute them again.",
            f"max by (service) ({_of('kv_cache_used_ratio', 'replica')})",
            "percentunit",
            worse_from(0.8, 0.95),
            needs=_NEEDS_ENGINES,
        ),
        stat(
            "Router looked",
            "Since the router last compared its replicas with the endpoints.",
            f"time() - {_of('rotation_timestamp_seconds')}",
            "s",
            worse_from(15, 60),
        ),
    ),
)

_PROMISE = PanelRow(
    "Promise and measurement",
    (
        _latency(
            "Time to the first token",
            "ttft",
            "Measured in the engine, so without the router and the network.",
        ),
        _latency(
            "Time per further token",
            "tpot",
            "Of a request: from its first to its last token, over their number.",
        ),
        _latency("Time of a request", "e2e", "To the last token, measured in the engine."),
        lines(
            "Slow requests",
            "Share of requests slower than promised; dashed what may be slower.",
            Query(_SLOW, "{{latency}} {{percentile}}"),
            Query(
                _of("promised_slow_ratio", "latency", "percentile"),
                "allowed {{latency}} {{percentile}}",
                dashed=True,
            ),
            unit="percentunit",
            width=12,
            from_zero=True,
            needs=_NEEDS_ENGINES,
        ),
        Panel(
            "Every promise",
            "What is promised, what the plan predicts, and what the last five minutes were.",
            "table",
            columns=(
                Column(_PROMISED, "Promised", "s", labels=("latency", "percentile")),
                Column(_of("predicted_seconds", "latency", "percentile"), "Planned", "s"),
                Column(_measured(), "Measured", "s"),
                Column(_OF_PROMISE, "Of the limit", "percentunit", thresholds=worse_from(0.9, 1)),
            ),
            width=12,
        ),
    ),
)

_REPLICAS = PanelRow(
    "Replicas",
    (
        lines(
            "Replicas by phase",
            "As the controller sees their jobs.",
            Query(_of("replicas", "phase", where='phase!~"ended|failed"'), "{{phase}}"),
            stacked=True,
            from_zero=True,
        ),
        lines(
            "Ready and needed",
            "Replicas that answer and that the router asks; dashed those that the plan needs for "
            "its traffic, and those that it starts with spares.",
            Query(_of("replicas_ready"), "ready"),
            Query(_of("replicas_in_rotation"), "in rotation"),
            Query(_of("replicas_needed"), "needed", dashed=True),
            Query(_of("replicas_planned"), "planned", dashed=True),
            from_zero=True,
        ),
        lines(
            "Time to load",
            "From the start of a job to its first answer; dashed what was planned.",
            Query(_of("replica_load_seconds", "replica"), "{{replica}}"),
            Query(_of("planned_load_seconds"), "planned", dashed=True),
            unit="s",
            from_zero=True,
        ),
        bars(
            "Ends of replicas, by cause",
            "Engines and jobs that ended. A preemption or a time limit is no failure.",
            _of("replica_ends_total", "cause"),
            "{{cause}}",
            needs=_NEEDS_END,
        ),
        bars(
            "Drains",
            "Replicas that left on purpose: with all requests finished, or with some broken off.",
            _of("drains_total", "result"),
            "{{result}}",
        ),
        stat(
            "Requests broken off",
            "Requests that replicas had begun and could not finish before they left.",
            _of("broken_off_requests_total"),
            thresholds=worse_from(1),
            width=4,
        ),
        stat(
            "Controller looked",
            "Since the controller last wrote what it sees.",
            f"time() - {_of('controller_timestamp_seconds')}",
            "s",
            worse_from(60, 300),
            width=4,
        ),
        Panel(
            "Every replica",
            "Those that are ready.",
            "table",
            columns=(
                Column(
                    f"time() - {_of('replica_ready_timestamp_seconds', 'replica')}",
                    "Ready for",
                    "s",
                    labels=("replica",),
                ),
                Column(
                    f"{_of('replica_walltime_end_timestamp_seconds', 'replica')} - time()",
                    "Time limit in",
                    "s",
                ),
                Column(_of("replica_answers", "replica"), "Answers", shown_values=_YES_OR_NO),
                Column(_of("running_requests", "replica"), "Running"),
                Column(_of("waiting_requests", "replica"), "Waiting", thresholds=worse_from(1, 20)),
                Column(
                    _of("kv_cache_used_ratio", "replica"),
                    "KV cache",
                    "percentunit",
                    thresholds=worse_from(0.8, 0.95),
                ),
                Column(_own_rate("output_tokens_total", "replica"), "Tokens/s"),
            ),
            width=24,
            height=9,
        ),
    ),
)

_TRAFFIC = PanelRow(
    "Requests",
    (
        lines(
            "Rate of requests",
            "What reaches the router and what engines finish; dashed the planned rate, and that up "
            "to which the plan keeps its promises.",
            Query(_ARRIVING, "router"),
            Query(_FINISHED, "engines"),
            Query(_of("planned_requests_per_second"), "planned", dashed=True),
            Query(_of("capacity_requests_per_second"), "capacity", dashed=True),
            unit="reqps",
            from_zero=True,
        ),
        lines(
            "Failed requests",
            "Errors that clients got: of a replica, because none was ready, or over their limit.",
            Query(_own_rate("router_failed_requests_total", "reason"), "{{reason}}"),
            unit="reqps",
            from_zero=True,
        ),
        lines(
            "Requests in engines",
            "Requests that are computed, and those that wait.",
            Query(_sum_of("running_requests"), "running"),
            Query(_sum_of("waiting_requests"), "waiting"),
            from_zero=True,
            needs=_NEEDS_ENGINES,
        ),
        lines(
            "Time in the queue",
            "Of a request, inside of its engine.",
            Query(_quantile(0.5, "queue"), "p50"),
            Query(_quantile(0.99, "queue"), "p99"),
            unit="s",
            from_zero=True,
            width=6,
            needs=_NEEDS_ENGINES,
        ),
        lines(
            "Tokens per second",
            "Of prompts and of answers, of all replicas.",
            Query(_rate("prompt_tokens_total"), "prompts"),
            Query(_rate("output_tokens_total"), "answers"),
            from_zero=True,
            width=6,
            needs=_NEEDS_ENGINES,
        ),
        lines(
            "KV cache and prefix cache",
            "Memory for keys and values in use, of the fullest replica and the mean; tokens of "
            "prompts that were found in the prefix cache.",
            Query(f"max by (service) ({_of('kv_cache_used_ratio', 'replica')})", "fullest"),
            Query(f"avg by (service) ({_of('kv_cache_used_ratio', 'replica')})", "mean"),
            Query(
                ratio(
                    _rate("prefix_cache_hit_tokens_total"),
                    _rate("prefix_cache_queried_tokens_total"),
                ),
                "found in prefix cache",
            ),
            unit="percentunit",
            from_zero=True,
            width=6,
            needs=_NEEDS_ENGINES,
        ),
        lines(
            "Requests put back",
            "How often engines put a request back for want of memory, per second.",
            Query(_rate("recomputed_requests_total"), "put back"),
            from_zero=True,
            width=6,
            needs=_NEEDS_ENGINES,
        ),
    ),
)

_MONEY = PanelRow(
    "Time and money",
    (
        lines(
            "GPUs",
            "GPUs that jobs of replicas hold.",
            Query(_of("gpus"), "held"),
            from_zero=True,
            width=6,
        ),
        stat(
            "GPU-hours",
            "GPU time of all replicas so far.",
            f"{_of('gpu_seconds_total')} / 3600",
            thresholds=NEUTRAL,
        ),
        stat(
            "Money so far",
            "GPU time by the prices of the profile.",
            _of("cost_total", "currency"),
            width=5,
            legend="{{currency}}",
            needs=_NEEDS_PRICE,
        ),
        stat(
            "Money per hour",
            "Of the last hour.",
            "max by (service, currency) "
            f"(increase(hpctrain_service_cost_total{{{CHOSEN_SERVICE}}}[1h]))",
            width=5,
            legend="{{currency}}",
            needs=_NEEDS_PRICE,
        ),
        stat(
            "Planned per hour",
            "Money for an hour of all planned replicas.",
            _of("planned_cost_per_hour", "currency"),
            width=5,
            legend="{{currency}}",
            needs=_NEEDS_PRICE,
        ),
    ),
)

EVERY_SERVICE = Panel(
    "Every service",
    "Replicas that answer, the requests of the last five minutes and what clients got errors for.",
    "table",
    columns=(
        Column(
            "max by (service, user, model, gpu, url) (hpctrain_service_info)",
            labels=("service", "user", "model", "gpu", "url"),
        ),
        Column(
            "max by (service) (hpctrain_service_replicas_ready)",
            "Ready",
            thresholds=better_from(1, 2),
        ),
        Column("max by (service) (hpctrain_service_replicas_wanted)", "Wanted"),
        Column(
            "max by (service) (rate(hpctrain_service_router_requests_total[5m]))",
            "Requests",
            "reqps",
        ),
        Column(
            "sum by (service) (max by (service, reason) "
            "(rate(hpctrain_service_router_failed_requests_total[5m])))",
            "Failed",
            "reqps",
            thresholds=worse_from(0.001),
        ),
        Column("max by (service) (hpctrain_service_gpus)", "GPUs"),
    ),
    width=24,
    needs="a service",
)

SERVICE = DashboardPlan(
    uid="hpctrain-service",
    title="hpctrain: one service",
    description="Promise and measurement, replicas, requests, router and money of a service.",
    variables=(SERVICE_CHOICE,),
    rows=(_NOW, _PROMISE, _REPLICAS, _TRAFFIC, _MONEY),
    marks=(
        Marks(
            "Starts",
            f"{_of('replica_starts_total')} - {_of('replica_starts_total', ago=f'{MARK_SECONDS}s')}"
            " > 0",
            "A job of a replica began",
            "blue",
        ),
        Marks(
            "Ends",
            f"{_of('replica_ends_total', 'cause')} - "
            f"({_of('replica_ends_total', 'cause', ago=f'{MARK_SECONDS}s')} "
            f"or 0 * {_of('replica_ends_total', 'cause')}) > 0",
            "A replica ended: {{cause}}",
            "red",
        ),
    ),
)
