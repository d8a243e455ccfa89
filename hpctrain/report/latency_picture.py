"""The picture of a service's latencies through everything that happened to it. Pure.

One chart of a load test, and below it the lives of the replicas on the same axis of time. Belongs
here: that picture, and the Gantt chart of replicas. Does not belong here: windows of requests
(`hpctrain.serve.load.summary`), other sections of the page (`service_page`).
"""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from hpctrain.page.charts import Axis, Entry, Level, Line, Part, Row, Rule, line_chart, timeline
from hpctrain.page.scales import clock
from hpctrain.page.words import duration
from hpctrain.report.service_report import MarkKind, ServiceMark, TestedLatency
from hpctrain.serve.load.summary import LatencyOverTime
from hpctrain.serve.replica_lives import LifePhase, ReplicaLife

LATENCY_WORDS = {
    "ttft": "time to the first token",
    "tpot": "time per further token",
    "e2e": "time of a request",
}
# Phases of a replica: words, class of the colour.
PHASES: dict[LifePhase, tuple[str, str]] = {
    "queued": ("in the queue", "pale"),
    "loading": ("loading", "c4"),
    "ready": ("answering", "c3"),
    "draining": ("draining", "c6"),
    "failed": ("failed", "c8"),
}
_MARK_COLOURS: dict[MarkKind, str] = {
    "failure": "c8",
    "leave": "c7",
    "ready": "c3",
    "person": "c5",
}
# Beside both charts, so that a moment has one place in both.
_LEFT_PIXELS = 92
_MOST_ROWS = 60
# From here on a linear axis would show nothing but the highest point.
_LOGARITHMIC_FROM = 30.0


def latency_chart(
    tested: TestedLatency, latency: LatencyOverTime, marks: Sequence[ServiceMark]
) -> Markup:
    """Draw median and 99th percentile of windows, slow and failed requests, limits and events."""
    began = tested.test.measurement.began_seconds
    end = max((one.begin for one in latency.windows), default=0.0) + latency.window_seconds
    half = latency.window_seconds / 2
    medians = [(one.begin + half, one.p50_seconds) for one in latency.windows]
    tails = [(one.begin + half, one.p99_seconds) for one in latency.windows]
    slow, within = (
        [(one.planned_seconds, one.seconds) for one in requests]
        for requests in (latency.slow, latency.within)
    )
    known = [v for _, v in (*medians, *tails, *slow, *within) if v is not None]
    limits = latency.limits.items()
    top = max([*known, *(limit for _, limit in limits)], default=1.0)
    lowest = min((value for value in known if value > 0), default=top)
    lines = [Line("median", medians), Line("99th percentile", tails, "c2")]
    if within:
        lines.insert(0, Line("a request", within, "neutral", dots=True, faint=True))
    if slow:
        lines.insert(0, Line("slower than promised", slow, "c2", dots=True, faint=True))
    if tested.failed:
        failed = [(one.planned_seconds, top) for one in tested.failed]
        lines.append(Line("failed", failed, "c8", dots=True))
    inside = [mark for mark in marks if 0 <= mark.event_time - began <= end]
    words = LATENCY_WORDS[latency.latency]
    return line_chart(
        lines,
        label=f"{words[0].upper()}{words[1:]} over the test",
        x=Axis("", clock, "seconds", values=(0.0, end)),
        y=Axis(
            f"{words}, windows of {clock(latency.window_seconds)}",
            _latency,
            "seconds",
            from_zero=True,
            logarithmic=top / lowest > _LOGARITHMIC_FROM,
            values=[limit for _, limit in limits],
        ),
        rules=[
            Rule(one.event_time - began, one.words, one.label, _MARK_COLOURS[one.kind])
            for one in inside
        ],
        levels=[Level(limit, f"promised {name}") for name, limit in limits],
        height=300,
        left=_LEFT_PIXELS,
    )


def replica_chart(
    lives: Sequence[ReplicaLife], begin: float, end: float, unit: str
) -> tuple[Markup, int]:
    """Draw the lives of replicas from begin to end; returns how many are left out as well."""
    lived = [
        (life, [span for span in life.spans if span.end > begin and span.begin < end])
        for life in lives
    ]
    shown = [(life, spans) for life, spans in lived if spans]
    rows = []
    for life, spans in shown[-_MOST_ROWS:]:
        parts = [
            Part(
                max(span.begin, begin) - begin,
                min(span.end, end) - max(span.begin, begin),
                PHASES[span.phase][1],
                f"{life.name} {PHASES[span.phase][0]}: {duration(span.end - span.begin)}",
                always=span.phase != "ready",
            )
            for span in spans
        ]
        rows.append(Row(life.name, parts, f"{life.name}, job {life.job_id}, {life.nodes}"))
    present = {span.phase for _, spans in shown for span in spans}
    entries = [Entry(*PHASES[phase]) for phase in PHASES if phase in present]
    chart = timeline(
        rows,
        label="Replicas over time",
        end=end - begin,
        entries=entries,
        unit=unit,
        left=_LEFT_PIXELS,
    )
    return chart, len(shown) - len(rows)


def picture_of_test(
    tested: TestedLatency, marks: Sequence[ServiceMark], lives: Sequence[ReplicaLife]
) -> Markup:
    """Draw every promised latency of a test, and the replicas below on the same axis of time."""
    began = tested.test.measurement.began_seconds
    last = max((one.windows[-1].begin + one.window_seconds for one in tested.latencies), default=0)
    charts = [latency_chart(tested, one, marks) for one in tested.latencies]
    replicas, _ = replica_chart(lives, began, began + last, "time since the start of the test")
    return Markup("").join([*charts, replicas])


def note_of_test(tested: TestedLatency) -> str:
    """Say how many requests were slow or failed, and what a gap means."""
    slow = ", ".join(
        f"{one.slow_count:,} above the promised {LATENCY_WORDS[one.latency]}"
        for one in tested.latencies
        if one.limits
    )
    note = f"{tested.records_read:,} requests" + (f": {slow}. " if slow else ". ")
    if tested.failed:
        note += f"{len(tested.failed):,} failed, drawn at the top. A failed request never ends: "
        note += "where more than one of a hundred failed, the 99th percentile has a gap."
    return note


def _latency(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if 0 < seconds < 1 else f"{seconds:.3g} s"
