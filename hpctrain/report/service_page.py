"""The page about one service. Pure.

Belongs here: promise beside measurement, the picture of its latencies through everything that
happened to it, replicas, money, the plan. Does not belong here: collecting them
(`hpctrain.report.service_report`), windows of requests (`hpctrain.serve.load.summary`).
"""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from hpctrain.page.charts import (
    Axis,
    Entry,
    Level,
    Line,
    Part,
    Row,
    Rule,
    line_chart,
    nothing,
    stacked_bar,
    timeline,
)
from hpctrain.page.elements import (
    Card,
    Fact,
    Head,
    Page,
    Section,
    Table,
    Tile,
    code,
    key,
    paragraph,
    styled,
)
from hpctrain.page.scales import clock
from hpctrain.page.words import (
    UNKNOWN,
    count,
    counted,
    duration,
    hours,
    made_line,
    moment,
    number,
    ratio,
    size,
    words_of,
)
from hpctrain.report.service_report import MarkKind, ServiceMark, ServiceReport, TestedLatency
from hpctrain.serve.load.measurement import MeasuredQuantile
from hpctrain.serve.load.summary import LatencyOverTime
from hpctrain.serve.plan.documents import Promise
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
_MOST_LIVES = 60
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
            _seconds,
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
    for life, spans in shown[-_MOST_LIVES:]:
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


# -- The page about one service -----------------------------------------------------------------


_MOST_ROWS = 200
_VERDICTS = {"met": "better", "not met": "worse", "cannot tell": "same"}


def write_service_page(report: ServiceReport) -> str:
    """Write the page about one service: what it is, and how many replicas answer."""
    plan, spec, wanted = report.plan, report.spec, report.state.wanted if report.state else None
    facts = [Fact("Owner", report.owner or UNKNOWN), Fact("Cluster", report.cluster or UNKNOWN)]
    if spec is not None:
        facts.append(Fact("Model", spec.served_name))
        facts.append(Fact("Router", spec.router.name))
    if plan is not None:
        one = plan.replica
        facts.append(Fact("Engine", one.engine))
        shape = f"{one.gpus} x {one.gpu}, tp {one.tp}" + (f", pp {one.pp}" if one.pp > 1 else "")
        facts.append(Fact("One replica", f"{shape}, {one.precision}"))
    facts.append(Fact("Address", code(report.address.url) if report.address else UNKNOWN))
    state, colour, lead = "ended", "neutral", ""
    if not report.asked_down:
        state = f"{report.ready} of {UNKNOWN if wanted is None else wanted} ready"
        colour = "c8" if not report.ready else "c4" if report.ready < (wanted or 0) else "c3"
        lead = report.state.reason if report.state else ""
    head = Head(report.service_id, facts, state, colour, lead)
    sections = [
        _overview(report),
        _latencies(report),
        _replicas(report),
        _money(report),
        _happenings(report),
        _plan(report),
    ]
    footer = [made_line(report.made_time), f"Read from {report.directory}"]
    footer += [f"{part.part} cannot be read: {part.reason}" for part in report.unread]
    return Page(report.service_id, head, sections, footer).html()


# -- overview --------------------------------------------------------------------------------------


def _overview(report: ServiceReport) -> Section:
    traffic, covered = report.traffic, report.coverage
    drains = [life for life in report.lives if life.drain is not None]
    broken = sum(life.broken_off or 0 for life in drains)
    lost = sum(life.over_since is not None and life.drain is None for life in report.lives)
    figures = [
        Tile(
            "Answering",
            ratio(covered.with_any) if covered else UNKNOWN,
            f"of {duration(covered.wall_seconds)} since the first answer" if covered else "",
        ),
        Tile(
            "With all needed replicas",
            ratio(covered.with_needed) if covered else UNKNOWN,
            f"wanted {ratio(report.plan.availability)}" if report.plan else "",
        ),
        Tile(
            "Requests",
            count(traffic.requests) if traffic else UNKNOWN,
            f"{count(traffic.failed + traffic.refused)} failed, "
            f"{count(traffic.limited)} over their limit"
            if traffic
            else "",
        ),
        Tile(
            "Replicas left on purpose",
            count(len(drains)),
            f"{counted(broken, 'request')} broken off",
        ),
        Tile("Replicas lost", count(lost), "without a drain"),
    ]
    if report.spending is not None:
        spent = report.spending
        money = (
            f"{spent.cost:,.2f} {spent.currency}"
            if spent.cost is not None
            else "the profile has no prices"
        )
        figures.append(Tile("GPU-hours", hours(spent.gpu_hours), money))
    newest = report.tests[-1] if report.tests else None
    cards = [_promise_card(report, newest)]
    if report.plan is not None and report.plan.warnings:
        body = Markup("").join(paragraph(one, "words") for one in report.plan.warnings)
        cards.append(Card("What the plan warns of", body, wide=True))
    return Section("overview", "Overview", cards, figures)


def _promise_card(report: ServiceReport, newest: TestedLatency | None) -> Card:
    """Put each promise beside its prediction and the newest test."""
    if report.plan is None:
        return Card("Promise and measurement", nothing("The plan cannot be read."), wide=True)
    results = newest.test.objectives if newest else ()
    by_name = {(one.latency, one.percentile): one for one in results}

    def interval(one: Promise | MeasuredQuantile) -> str:
        return f"{_seconds(one.low_seconds)} to {_seconds(one.high_seconds)}"

    rows = []
    for promise in report.plan.promises:
        result = by_name.get((promise.latency, promise.percentile))
        measured = result.measured if result else None
        rows.append(
            [
                LATENCY_WORDS[promise.latency],
                promise.percentile,
                _seconds(promise.limit_seconds),
                _seconds(promise.predicted_seconds),
                interval(promise),
                _seconds(measured.seconds) if measured else UNKNOWN,
                interval(measured) if measured else UNKNOWN,
                styled(_VERDICTS[result.verdict], result.verdict) if result else UNKNOWN,
                result.reason if result else "",
            ]
        )
    columns = {"Latency": "name", "Percentile": "name"}
    columns |= dict.fromkeys(("Promised", "Planned", "Planned, 95 %", "Measured"), "number")
    columns |= {"Measured, 95 %": "number", "Verdict": "name", "Because": "words"}
    body = Table(columns, rows)
    note = "No load test has been made yet: `hpctrain serve test` makes one."
    if newest is not None:
        asked = newest.test.measurement
        note = f"Measured by {newest.name}: {count(asked.counted)} requests at {asked.rate:g} a "
        note += (
            f"second from {moment(asked.began_seconds)}, {count(asked.failed)} failed. Latencies "
        )
        note += "count from the planned time of a request; a failed one never ends."
    return Card("Promise and measurement", body, note, wide=True)


def _seconds(value: float | None) -> str:
    if value is None:
        return "never"
    return f"{value * 1000:.3g} ms" if 0 < value < 1 else f"{value:.3g} s"


# -- latencies -------------------------------------------------------------------------------------


def _latencies(report: ServiceReport) -> Section:
    """Draw every test whose requests have records, the newest first.

    Below the promised latencies of a test are the replicas, on the same axis of time.
    """
    drawn = [one for one in reversed(report.tests) if one.latencies]
    if not drawn:
        empty = nothing("No test has left records of its requests.")
        return Section("latency", "Latency", [Card("Latency through events", empty, wide=True)])
    cards = []
    for one in drawn:
        began, failed = one.test.measurement.began_seconds, one.failed
        last = max(of.windows[-1].begin + of.window_seconds for of in one.latencies)
        charts = [latency_chart(one, of, report.marks) for of in one.latencies]
        unit = "time since the start of the test"
        charts.append(replica_chart(report.lives, began, began + last, unit)[0])
        slow = ", ".join(
            f"{of.slow_count:,} above the promised {LATENCY_WORDS[of.latency]}"
            for of in one.latencies
            if of.limits
        )
        note = f"{one.records_read:,} requests" + (f": {slow}. " if slow else ". ")
        if failed:
            note += f"{len(failed):,} failed, drawn at the top. A failed request never ends: "
            note += "where more than one of a hundred failed, the 99th percentile has a gap."
        cards.append(Card(f"Latency in {one.name}", Markup("").join(charts), note, wide=True))
        if failed:
            rows = [
                [
                    moment(began + request.planned_seconds),
                    *(request.request_id, request.kind, request.detail),
                ]
                for request in failed[:_MOST_ROWS]
            ]
            columns = {"Planned": "name", "Request": "name", "Failed by": "name", "Detail": "words"}
            left = len(failed) > _MOST_ROWS
            note = f"The first {_MOST_ROWS} of {len(failed):,}." if left else ""
            cards.append(
                Card(f"Failed requests in {one.name}", Table(columns, rows), note, wide=True)
            )
    return Section("latency", "Latency", cards)


# -- replicas --------------------------------------------------------------------------------------


def _replicas(report: ServiceReport) -> Section:
    if not report.lives:
        card = Card("Lives of replicas", nothing("No replica has been started yet."), wide=True)
        return Section("replicas", "Replicas", [card])
    begin = min((life.spans[0].begin for life in report.lives if life.spans), default=0.0)
    end = max((life.spans[-1].end for life in report.lives if life.spans), default=begin)

    def now(life: ReplicaLife) -> str:
        if life.over_since is not None:
            ended = words_of(life.cause) if life.cause else "ended"
            drained = {"finished": ", drained", "broken_off": ", drain not finished", None: ""}
            return f"{ended}{drained[life.drain]}"
        if not life.spans:
            return UNKNOWN
        words, colour = PHASES[life.spans[-1].phase]
        return key(colour, words)

    chart, left = replica_chart(report.lives, begin, end, "time since the first replica")
    note = f"The {left:,} oldest jobs are left out." if left else ""
    jobs = Table.of(
        report.lives[: -_MOST_ROWS - 1 : -1],
        {
            "Replica": ("name", lambda life: life.name),
            "Job": ("number", lambda life: UNKNOWN if life.job_id is None else str(life.job_id)),
            "Node": ("name", lambda life: life.nodes or UNKNOWN),
            "Began": ("name", lambda life: moment(life.spans[0].begin) if life.spans else UNKNOWN),
            "Queue": ("number", lambda life: duration(life.seconds_in("queued"))),
            "Load": ("number", lambda life: duration(life.load_seconds)),
            "Answered": ("number", lambda life: duration(life.seconds_in("ready"))),
            "Now": ("name", now),
            "Broken off": ("number", lambda life: count(life.broken_off) if life.drain else ""),
            "Reason": ("words", lambda life: life.reason),
        },
    )
    cards = [
        Card("Lives of replicas", chart, note, wide=True),
        Card("Jobs of replicas", jobs, wide=True),
    ]
    return Section("replicas", "Replicas", cards)


# -- money -----------------------------------------------------------------------------------------


def _money(report: ServiceReport) -> Section:
    spent, plan = report.spending, report.plan
    if spent is None or plan is None:
        card = Card("GPU-hours", nothing("The plan cannot be read."))
        return Section("cost", "Cost", [card])
    parts = [
        (Entry("answering", "c3"), spent.answering_gpu_hours),
        (Entry("loading", "c4"), spent.starting_gpu_hours),
        (Entry("between launches", "c8"), spent.other_gpu_hours),
    ]
    chart = stacked_bar(parts, label="GPU-hours of replicas", format=hours)
    rows = [["GPU-hours", "", hours(spent.gpu_hours)]]
    if spent.cost is not None and spent.gpu_hours > 0:
        currency = str(spent.currency)
        gpu_price = spent.cost / spent.gpu_hours
        rows.append([f"Money in {currency}", "", f"{spent.cost:,.2f}"])
        hourly = gpu_price * plan.gpus
        planned = number(plan.cost_per_hour)
        rows.append([f"{currency} per hour of all replicas", planned, number(hourly)])
        planned = number(plan.cost_per_million_output_tokens, 3)
        name = f"{currency} per million tokens of answers"
        rate = report.tests[-1].test.measurement.output_tokens_rate if report.tests else 0.0
        measured = number(hourly / (rate * 3600 / 1e6), 3) if rate > 0 else UNKNOWN
        rows.append([name, planned, measured])
    columns = {"Cost": "name", "Planned": "number", "So far, or in the newest test": "number"}
    cards = [Card("GPU-hours of replicas", chart), Card("Money", Table(columns, rows))]
    return Section("cost", "Cost", cards)


# -- ledger and plan -------------------------------------------------------------------------------


def _happenings(report: ServiceReport) -> Section:
    rows = []
    for one in reversed(report.events[-_MOST_ROWS:]):
        parts = (
            one.reason,
            f"instead of {one.instead_of}" if one.instead_of else "",
            f"{one.replicas} replicas" if one.replicas is not None else "",
            f"by {one.user}" if one.user else "",
            one.url or "",
        )
        detail = " ".join(filter(None, parts))
        rows.append([moment(one.time), words_of(one.event), one.replica or "", detail])
    columns = {"Time": "name", "Event": "name", "Replica": "name", "Detail": "words"}
    left = len(report.events) - len(rows)
    note = f"The newest {_MOST_ROWS} of {len(report.events):,} lines." if left > 0 else ""
    body = Table(columns, rows).or_nothing("The ledger has no line yet.")
    return Section("events", "Events", [Card("Ledger of the service", body, note, wide=True)])


def _plan(report: ServiceReport) -> Section:
    plan = report.plan
    if plan is None:
        return Section("plan", "Plan", [Card("Plan", nothing("The plan cannot be read."))])
    one = plan.replica
    values = (
        ("Replicas", f"{plan.replicas} for the traffic, {plan.spare} spare"),
        ("Requests per second", f"{plan.rate:g}, at most {plan.capacity_rate:g}"),
        ("Weights on a GPU", size(one.weight_bytes)),
        ("Activations on a GPU", size(one.activation_bytes)),
        ("Engine's overhead on a GPU", size(one.overhead_bytes)),
        ("KV cache of a replica", f"{count(one.kv_capacity_tokens)} tokens, {one.kv_precision}"),
        ("Requests at once", count(one.max_sequences)),
        ("Tokens of an iteration", count(one.batch_tokens)),
        ("Time to load", duration(plan.load_seconds)),
        ("Time to drain", duration(plan.drain_seconds)),
        ("Requests lost by a preemption", number(plan.lost_per_preemption, 2)),
    )
    cards = [Card("As planned", Table({"Of the plan": "name", "Value": "words"}, values))]
    others = Table.of(
        plan.alternatives,
        {
            "Plan": ("name", lambda other: other.summary),
            "Per hour": ("number", lambda other: number(other.cost_per_hour)),
            "Promise": ("name", lambda other: "holds" if other.holds else "breaks"),
            "Why not": ("words", lambda other: other.reason),
        },
    )
    cards.append(Card("Other plans", others.or_nothing("The plan names no other one.")))
    if plan.reasons:
        reasons = Markup("").join(paragraph(reason, "words") for reason in plan.reasons)
        cards.append(Card("Reasons", reasons, wide=True))
    return Section("plan", "Plan", cards)
