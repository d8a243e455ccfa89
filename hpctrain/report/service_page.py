"""The page about one service. Pure.

Belongs here: promise beside measurement, replicas, money, what happened, the plan. Does not belong
here: collecting them (`hpctrain.report.service_report`), the picture of latencies
(`latency_picture`).
"""

from __future__ import annotations

from collections.abc import Callable

from markupsafe import Markup

from hpctrain.page.charts import Entry, nothing, stacked_bar
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
from hpctrain.report.latency_picture import (
    LATENCY_WORDS,
    PHASES,
    note_of_test,
    picture_of_test,
    replica_chart,
)
from hpctrain.report.service_report import ServiceReport, TestedLatency
from hpctrain.serve.load.measurement import MeasuredQuantile, ObjectiveResult
from hpctrain.serve.plan.documents import Promise
from hpctrain.serve.replica_lives import ReplicaLife

_MOST_ROWS = 200
_VERDICTS = {"met": "better", "not met": "worse", "cannot tell": "same"}


def write_service_page(report: ServiceReport) -> str:
    """Write the page about one service."""
    sections = [
        _overview(report),
        _latencies(report),
        _replicas(report),
        _money(report),
        _happenings(report),
        _plan(report),
    ]
    footer = [made_line(report.made_time), f"Read from {report.directory}"]
    footer += [f"{one.part} cannot be read: {one.reason}" for one in report.unread]
    return Page(report.service_id, _head(report), sections, footer).html()


def _head(report: ServiceReport) -> Head:
    """Build the top of the page: what the service is, and how many replicas answer."""
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
    if report.asked_down:
        return Head(report.service_id, facts, "ended", "neutral")
    state = f"{report.ready} of {UNKNOWN if wanted is None else wanted} ready"
    colour = "c8" if not report.ready else "c4" if report.ready < (wanted or 0) else "c3"
    return Head(
        report.service_id, facts, state, colour, report.state.reason if report.state else ""
    )


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
    rows = [(one, by_name.get((one.latency, one.percentile))) for one in report.plan.promises]
    body = Table.of(
        rows,
        {
            "Latency": ("name", lambda row: LATENCY_WORDS[row[0].latency]),
            "Percentile": ("name", lambda row: row[0].percentile),
            "Promised": ("number", lambda row: _seconds(row[0].limit_seconds)),
            "Planned": ("number", lambda row: _seconds(row[0].predicted_seconds)),
            "Planned, 95 %": ("number", lambda row: _range(row[0])),
            "Measured": ("number", lambda row: _measured(row[1], lambda m: _seconds(m.seconds))),
            "Measured, 95 %": ("number", lambda row: _measured(row[1], _range)),
            "Verdict": ("name", lambda row: _verdict(row[1])),
            "Because": ("words", lambda row: row[1].reason if row[1] else ""),
        },
    )
    note = "No load test has been made yet: `hpctrain serve test` makes one."
    if newest is not None:
        asked = newest.test.measurement
        note = f"Measured by {newest.name}: {count(asked.counted)} requests at {asked.rate:g} a "
        note += (
            f"second from {moment(asked.began_seconds)}, {count(asked.failed)} failed. Latencies "
        )
        note += "count from the planned time of a request; a failed one never ends."
    return Card("Promise and measurement", body, note, wide=True)


def _measured(result: ObjectiveResult | None, write: Callable[[MeasuredQuantile], str]) -> str:
    return UNKNOWN if result is None or result.measured is None else write(result.measured)


def _range(one: Promise | MeasuredQuantile) -> str:
    return f"{_seconds(one.low_seconds)} to {_seconds(one.high_seconds)}"


def _verdict(result: ObjectiveResult | None) -> str:
    return styled(_VERDICTS[result.verdict], result.verdict) if result else UNKNOWN


def _seconds(value: float | None) -> str:
    if value is None:
        return "never"
    return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s"


# -- latencies -------------------------------------------------------------------------------------


def _latencies(report: ServiceReport) -> Section:
    """Draw every test whose requests have records, the newest first."""
    drawn = [one for one in reversed(report.tests) if one.latencies]
    if not drawn:
        empty = nothing("No test has left records of its requests.")
        return Section("latency", "Latency", [Card("Latency through events", empty, wide=True)])
    cards = []
    for one in drawn:
        picture = picture_of_test(one, report.marks, report.lives)
        cards.append(Card(f"Latency in {one.name}", picture, note_of_test(one), wide=True))
        if one.failed:
            cards.append(_failed_card(one))
    return Section("latency", "Latency", cards)


def _failed_card(tested: TestedLatency) -> Card:
    began = tested.test.measurement.began_seconds
    body = Table.of(
        tested.failed[:_MOST_ROWS],
        {
            "Planned": ("name", lambda one: moment(began + one.planned_seconds)),
            "Request": ("name", lambda one: one.request_id),
            "Failed by": ("name", lambda one: one.kind),
            "Detail": ("words", lambda one: one.detail),
        },
    )
    left = len(tested.failed) - len(body.rows)
    note = f"The first {_MOST_ROWS} of {len(tested.failed):,}." if left > 0 else ""
    return Card(f"Failed requests in {tested.name}", body, note, wide=True)


# -- replicas --------------------------------------------------------------------------------------


def _replicas(report: ServiceReport) -> Section:
    if not report.lives:
        card = Card("Lives of replicas", nothing("No replica has been started yet."), wide=True)
        return Section("replicas", "Replicas", [card])
    begin = min((life.spans[0].begin for life in report.lives if life.spans), default=0.0)
    end = max((life.spans[-1].end for life in report.lives if life.spans), default=begin)
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
            "Now": ("name", _now),
            "Broken off": ("number", lambda life: count(life.broken_off) if life.drain else ""),
            "Reason": ("words", lambda life: life.reason),
        },
    )
    cards = [
        Card("Lives of replicas", chart, note, wide=True),
        Card("Jobs of replicas", jobs, wide=True),
    ]
    return Section("replicas", "Replicas", cards)


def _now(life: ReplicaLife) -> str:
    if life.over_since is not None:
        ended = words_of(life.cause) if life.cause else "ended"
        drained = {"finished": ", drained", "broken_off": ", drain not finished", None: ""}
        return f"{ended}{drained[life.drain]}"
    if not life.spans:
        return UNKNOWN
    words, colour = PHASES[life.spans[-1].phase]
    return key(colour, words)


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
        rows.append([name, planned, _per_million(report, hourly)])
    columns = {"Cost": "name", "Planned": "number", "So far, or in the newest test": "number"}
    cards = [Card("GPU-hours of replicas", chart), Card("Money", Table(columns, rows))]
    return Section("cost", "Cost", cards)


def _per_million(report: ServiceReport, hourly: float) -> str:
    rate = report.tests[-1].test.measurement.output_tokens_rate if report.tests else 0.0
    return number(hourly / (rate * 3600 / 1e6), 3) if rate > 0 else UNKNOWN


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
