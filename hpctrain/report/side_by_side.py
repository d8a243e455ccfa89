"""The sections that show several runs side by side. Pure.

Belongs here: common curves, tables of figures and of differences. Does not belong here: the
sections of each run (`run_sections`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from markupsafe import Markup

from hpctrain.page.charts import Axis, Bar, Entry, Line, bar_chart, line_chart
from hpctrain.page.charts import stacked_bar as stacked
from hpctrain.page.elements import Card, Fact, Head, Section, Table, key
from hpctrain.page.scales import compact_number
from hpctrain.page.words import UNKNOWN, count, counted, duration, hours, number, ratio, size
from hpctrain.plan.documents import Plan
from hpctrain.report.collect import RunReport
from hpctrain.report.time_sections import CATEGORIES
from hpctrain.telemetry.thinning import Point

_COLOURS = ("c1", "c2", "c3", "c5", "c4", "c7", "c6", "c8")
# Of runs of different names these always differ, or say nothing.
_NOT_COMPARED = {"name"}


def run_anchor(index: int) -> str:
    return f"run-{index + 1}"


def colour_of(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]


def head_of_several(reports: Sequence[RunReport]) -> Head:
    """Build the top of a page about several runs."""
    states: dict[str, int] = {}
    for report in reports:
        states[report.status.state.value.lower()] = (
            states.get(report.status.state.value.lower(), 0) + 1
        )
    facts = [Fact(report.run_id, report.status.state.value.lower()) for report in reports]
    lead = ", ".join(f"{number} {state}" for state, number in states.items())
    return Head(title=f"{counted(len(reports), 'run')} side by side", facts=facts, lead=lead)


def sections_of_several(reports: Sequence[RunReport]) -> list[Section]:
    """Build the common sections: results, curves, time, differences."""
    return [
        Section("results", "Results", [_results(reports)]),
        Section("curves", "Curves", _curves(reports)),
        Section("shares", "Time", _time(reports)),
        Section("differences", "Differences", [_differences(reports)]),
    ]


def _names(reports: Sequence[RunReport]) -> list[Markup]:
    return [key(colour_of(index), report.run_id) for index, report in enumerate(reports)]


def _results(reports: Sequence[RunReport]) -> Card:
    """One row per run, the figures that runs are compared by."""
    columns = {"Run": "name", "State": "name", "Layout": "name"}
    columns |= dict.fromkeys(("GPUs", "Steps", "Loss", "Step time", "Planned", "MFU"), "number")
    columns |= dict.fromkeys(("Tokens/s per GPU", "Memory", "Productive", "GPU-hours"), "number")
    columns |= dict.fromkeys(("Failures", "Steps redone"), "number")
    rows = []
    for name, report in zip(_names(reports), reports, strict=True):
        plan, speed, spent, row = report.plan, report.speed, report.goodput, report.status
        fullest = (
            [one.allocated_bytes for one in report.window.stages if one.allocated_bytes]
            if report.window
            else []
        )
        rows.append(
            [
                name,
                row.state.value.lower(),
                str(plan.layout) if plan else UNKNOWN,
                count(plan.layout.world_size if plan else None),
                count(row.step),
                number(row.loss),
                duration(speed.step_seconds if speed else None),
                duration(plan.step_seconds if plan else None),
                ratio(speed.mfu if speed else None),
                number(speed.tokens_per_second_per_gpu if speed else None),
                size(max(fullest, default=None)),
                ratio(spent.ettr if spent else None),
                hours(spent.gpu_hours if spent else None),
                count(spent.failures if spent else None),
                count(spent.lost_steps if spent else None),
            ]
        )
    return Card("Results", Table(columns, rows), wide=True)


def _curves(reports: Sequence[RunReport]) -> list[Card]:
    steps = Axis("step")

    def chart(
        title: str, y: Axis, choose: Callable[[RunReport], Sequence[Point]], wide: bool
    ) -> Card:
        lines = [
            Line(report.run_id, choose(report), colour_of(index))
            for index, report in enumerate(reports)
        ]
        height = 280 if wide else 200
        drawn = line_chart(lines, label=f"{title} over steps", x=steps, y=y, height=height)
        return Card(title, drawn, wide=wide)

    def loss(report: RunReport) -> Sequence[Point]:
        return (report.curves.loss_mean or report.curves.loss) if report.curves else ()

    return [
        chart("Loss", Axis("loss"), loss, True),
        chart(
            "Step time",
            Axis("seconds", from_zero=True),
            lambda report: report.curves.step_seconds if report.curves else (),
            False,
        ),
        chart(
            "Throughput",
            Axis("per second, whole run", from_zero=True),
            lambda report: report.curves.tokens_per_second if report.curves else (),
            False,
        ),
    ]


def _time(reports: Sequence[RunReport]) -> list[Card]:
    bars = [
        Bar(report.run_id, report.goodput.ettr if report.goodput else None, colour=colour_of(index))
        for index, report in enumerate(reports)
    ]
    cards = [
        Card(
            "Productive share of the wall time",
            bar_chart(
                bars, label="Productive share", x=Axis("productive (ETTR)", ratio, values=(1.0,))
            ),
        )
    ]
    parts = []
    for report in reports:
        spent = report.goodput
        shares = (
            [(Entry(*CATEGORIES[name]), spent.seconds.get(name, 0.0)) for name in CATEGORIES]
            if spent
            else []
        )
        parts.append(Markup("<p class='note'>{}</p>").format(report.run_id))
        parts.append(stacked(shares, label=f"Time of {report.run_id}", format=duration))
    cards.append(Card("Where the time went", Markup("").join(parts)))
    return cards


def _differences(reports: Sequence[RunReport]) -> Card:
    """List what differs in spec and plan; equal values are left out."""
    compared = (*_spec_differences(reports), *_plan_differences(reports))
    rows = [[name, *values] for name, values in compared]
    columns = {"": "name", **{report.run_id: "words" for report in reports}}
    unread = [one.run_id for one in reports if not one.spec]
    note = f"The spec of {', '.join(unread)} cannot be read." if unread else ""
    body = Table(columns, rows).or_nothing("There are none.")
    return Card("Differences of spec and plan", body, note, wide=True)


def _spec_differences(reports: Sequence[RunReport]) -> list[tuple[str, list[str]]]:
    specs = [{one.name: one.value for one in report.spec} for report in reports]
    names = dict.fromkeys(name for spec in specs for name in spec)
    found = []
    for name in names:
        values = [spec.get(name, "") for spec in specs]
        if name not in _NOT_COMPARED and len(set(values)) > 1:
            found.append((name, [value or UNKNOWN for value in values]))
    return found


def _plan_differences(reports: Sequence[RunReport]) -> list[tuple[str, list[str]]]:
    written: dict[str, Callable[[Plan], str]] = {
        "cluster profile": lambda plan: plan.profile_name,
        "engine": lambda plan: plan.engine,
        "layout": lambda plan: str(plan.layout),
        "nodes": lambda plan: str(plan.nodes),
        "micro-batch": lambda plan: count(plan.batch.micro_batch),
        "accumulation": lambda plan: count(plan.batch.accumulation),
        "recompute": lambda plan: plan.recompute,
        "parameters": lambda plan: compact_number(plan.parameters),
        "step time": lambda plan: duration(plan.step_seconds),
        "memory": lambda plan: size(plan.memory[plan.peak_stage].total_bytes),
    }
    plans = [report.plan for report in reports]
    found = []
    for name, write in written.items():
        values = [write(plan) if plan else UNKNOWN for plan in plans]
        if len(set(values)) > 1:
            found.append((f"plan: {name}", values))
    return found
