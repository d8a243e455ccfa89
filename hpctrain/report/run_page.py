"""The page about one run or several side by side. Pure.

Belongs here: which parts it has, its head and footer, the overview, what several runs share.
Does not belong here: the other sections of each run (`run_sections`), collecting (`collect`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from markupsafe import Markup

from hpctrain.diagnose.of_run import Diagnosis
from hpctrain.page.charts import Axis, Bar, Entry, Line, bar_chart, line_chart, stacked_bar
from hpctrain.page.elements import (
    Card,
    Chapter,
    Fact,
    Head,
    Page,
    Section,
    Table,
    Tile,
    code,
    key,
    paragraph,
)
from hpctrain.page.scales import compact_number
from hpctrain.page.words import (
    UNKNOWN,
    count,
    counted,
    difference,
    duration,
    hours,
    made_line,
    moment,
    number,
    ratio,
    size,
)
from hpctrain.plan.documents import Plan
from hpctrain.plan.trainer_plan import TrainerPlan
from hpctrain.report.collect import RunReport
from hpctrain.report.measures import Curves
from hpctrain.report.run_sections import (
    CATEGORIES,
    events,
    learning,
    memory,
    messages,
    missing,
    saved,
    software,
    speed,
    time_spent,
)
from hpctrain.telemetry.thinning import Point


def write_page(reports: Sequence[RunReport]) -> str:
    """Write the page about one run, or about several side by side and then one after the other."""
    footer = [made_line(reports[0].made_time)]
    for report in reports:
        footer.append(f"Read from {report.directory}")
        several = f"{report.run_id}: " if len(reports) > 1 else ""
        footer += [f"{several}{one.part} cannot be read: {one.reason}" for one in report.unread]
    if len(reports) == 1:
        title, head = reports[0].run_id, head_of(reports[0])
        return Page(title, head, sections_of(reports[0]), footer).html()
    parts: list[Section | Chapter] = [*sections_of_several(reports)]
    for place, report in enumerate(reports, 1):
        anchor = f"run-{place}"
        parts.append(Chapter(anchor, head_of(report), sections_of(report, f"{anchor}-")))
    return Page(f"{len(reports)} runs", head_of_several(reports), parts, footer).html()


# -- The sections of the page about one run, and its head ---------------------------------------


Known = float | None
Write = Callable[[Known], str]
STATE_COLOURS = {"RUNNING": "c1", "DONE": "c3", "FAILED": "c8", "PENDING": "c4"}


def sections_of(report: RunReport, prefix: str = "") -> list[Section]:
    """Build all sections of a run; anchors begin with `prefix`."""
    cards = [_plan_card(report)]
    if report.diagnosis is not None:
        cards.append(_diagnosis_card(report.diagnosis))
    built = (
        Section("overview", "Overview", cards, tiles_of(report)),
        learning(report),
        time_spent(report),
        speed(report),
        memory(report),
        messages(report),
        saved(report),
        events(report),
        software(report),
    )
    return [replace(one, anchor=f"{prefix}{one.anchor}") for one in built if one]


def head_of(report: RunReport) -> Head:
    """Build the top of the page: what the run is, and in which state."""
    row, plan, trainer = report.status, report.plan, report.trainer
    facts = [Fact("Owner", row.owner or UNKNOWN)]
    if report.account or report.partition:
        where = " · ".join(word for word in (report.account, report.partition) if word)
        facts.append(Fact("Account, partition", where))
    named = plan or trainer
    facts.append(Fact("Cluster", report.cluster or (named.profile_name if named else UNKNOWN)))
    facts.append(Fact("Job", UNKNOWN if row.job_id is None else str(row.job_id)))
    if plan is not None:
        facts.append(Fact("Engine", plan.engine))
        facts.append(Fact("Parameters", compact_number(plan.parameters)))
        facts.append(Fact("Layout", str(plan.layout)))
    if trainer is not None:
        facts.append(Fact("Trainer", trainer.title.removeprefix("trainer ")))
    if named is not None:
        facts.append(Fact("Nodes", str(named.nodes)))
    if report.goodput is not None and report.goodput.wall_seconds > 0:
        facts.append(Fact("Submitted", moment(report.goodput.start_time)))
    if report.scripts:
        facts.append(Fact("Script (SHA-256)", code(report.scripts[-1].sha256[:12])))
    return Head(
        title=report.run_id,
        facts=facts,
        state=row.state.value.lower(),
        colour=STATE_COLOURS.get(row.state.value, "neutral"),
        lead=row.reason,
    )


def tiles_of(report: RunReport) -> list[Tile]:
    """Choose the figures that are seen first."""
    row, spent, plan = report.status, report.goodput, report.plan
    shown = []
    if row.step is not None:
        target = row.target_step
        more = f"of {target:,} ({row.step / target:.1%})" if target else ""
        shown.append(Tile("Step", f"{row.step:,}", more))
    if row.loss is not None:
        shown.append(Tile("Loss", f"{row.loss:.4f}", "last step"))
    if report.speed is not None:
        planned = plan.step_seconds if plan else None
        more = f"{duration(planned)} planned" if planned else "median"
        shown.append(Tile("Step time", duration(report.speed.step_seconds), more))
        if report.speed.mfu is not None:
            expected = plan.prediction.mfu if plan and plan.prediction else None
            more = f"{expected:.1%} planned" if expected else "median"
            shown.append(Tile("MFU", f"{report.speed.mfu:.1%}", more))
        unit = (plan.unit if plan else "tokens").capitalize()
        if report.speed.tokens_per_second is not None:
            rate = compact_number(report.speed.tokens_per_second)
            shown.append(Tile(f"{unit}/s", rate, "median"))
    if spent is not None and spent.wall_seconds > 0:
        shown.append(Tile("Productive", ratio(spent.ettr), f"of {duration(spent.wall_seconds)}"))
        if spent.gpu_hours is not None:
            gpus = "" if spent.gpus is None else f"on {counted(spent.gpus, 'GPU')}"
            shown.append(Tile("GPU-hours", hours(spent.gpu_hours), gpus))
        more = f"one per {duration(spent.mttf_seconds)}" if spent.mttf_seconds else ""
        shown.append(
            Tile("Failures", f"{spent.failures:,}", more or counted(spent.attempts, "attempt"))
        )
    return shown


def _plan_card(report: RunReport) -> Card:
    """Compare what was planned with what was measured, row by row."""
    plan, speed, spent = report.plan, report.speed, report.goodput
    if report.trainer is not None:
        return _trainer_card(report, report.trainer)
    if plan is None:
        return missing("Plan and reality", report, "plan", "The plan is not known.")
    expected = plan.prediction

    def row(name: str, write: Write, planned: Known, measured: Known, more: bool) -> list[str]:
        changed = difference(planned, measured, more_is_better=more)
        return [name, write(planned), write(measured), changed]

    seconds = speed.step_seconds if speed else None
    rows = [row("Step time", duration, plan.step_seconds, seconds, False)]
    mfu, planned_mfu = (speed.mfu if speed else None), (expected.mfu if expected else None)
    if mfu is not None or planned_mfu is not None:
        rows.append(row("MFU", ratio, planned_mfu, mfu, True))
    rate = speed.tokens_per_second_per_gpu if speed else None
    planned_rate = expected.tokens_per_second_per_gpu if expected else None
    rows.append(row(f"{plan.unit.capitalize()}/s per GPU", number, planned_rate, rate, True))
    used = spent.gpu_hours if spent else None
    needed = expected.gpu_hours if expected else None
    hours_row = row("GPU-hours", hours, needed, used, False)
    if report.status.state.value != "DONE":
        hours_row[2:] = [hours(used) + ("" if used is None else " so far"), UNKNOWN]
    rows.append(hours_row)
    fullest = report.fullest_bytes
    if fullest and plan.accelerator == "cuda":
        largest = plan.memory[plan.peak_stage].total_bytes
        rows.append(row("Memory of the fullest GPU", size, largest, fullest, False))
    rows.append(["Steps", count(plan.batch.train_steps), count(report.status.step), UNKNOWN])
    columns = {"": "", "Planned": "number", "Measured": "number", "Difference": "number"}
    note = "Medians of steps that count; the first step of each launch is left out."
    return Card("Plan and reality", Table(columns, rows), note)


def _trainer_card(report: RunReport, trainer: TrainerPlan) -> Card:
    """Show what was measured of a trainer of its own, and what its run was told of it."""
    status, spent, speed = report.status, report.goodput, report.speed
    until = report.spec.get("trainer.done.file") or UNKNOWN
    if trainer.target_step is not None:
        until = f"step {trainer.target_step:,}"
    words = report.spec.get("trainer.command") or report.spec.get("trainer.script") or UNKNOWN
    used = spent.gpu_hours if spent else None
    rows = [
        ["Command", words.replace(", ", " ")],
        ["Done", until],
        ["Steps", count(status.step)],
        ["Step time", duration(speed.step_seconds if speed else None)],
        ["GPU-hours", hours(used)],
    ]
    note = "Nothing is predicted of a trainer that hpctrain does not know."
    return Card("Trainer", Table({"": "name", "Told or measured": "words"}, rows), note)


def _diagnosis_card(diagnosis: Diagnosis) -> Card:
    if not diagnosis.stands_out:
        unsure = [one.question for one in diagnosis.findings if one.answer == "unknown"]
        more = f" Not known: {' '.join(unsure)}" if unsure else ""
        return Card("What stands out", paragraph(f"Nothing does.{more}", "nothing"))
    rows = [
        [
            one.question,
            one.words,
            "" if one.gain_seconds is None else f"{duration(one.gain_seconds)} a step",
        ]
        for one in diagnosis.stands_out
    ]
    columns = {"Question": "", "Answer": "words", "Gain at most": "number"}
    note = "Answers of `hpctrain diagnose`, which also names remedies."
    return Card("What stands out", Table(columns, rows), note)


# -- The sections that show several runs side by side -------------------------------------------


_COLOURS = ("c1", "c2", "c3", "c5", "c4", "c7", "c6", "c8")
# Curves that several runs share: title, axis, height in pixels, and which they are.
_COMMON_CURVES: tuple[tuple[str, Axis, int, Callable[[Curves], Sequence[Point]]], ...] = (
    ("Loss", Axis("loss"), 280, lambda curves: curves.loss_mean or curves.loss),
    ("Step time", Axis("seconds", from_zero=True), 200, lambda curves: curves.step_seconds),
    (
        "Throughput",
        Axis("per second, whole run", from_zero=True),
        200,
        lambda curves: curves.tokens_per_second,
    ),
)
_COMPARED_OF_PLANS: dict[str, Callable[[Plan], str]] = {
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
# Of runs of different names these always differ, or say nothing.
_NOT_COMPARED = {"name"}


def colour_of(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]


def head_of_several(reports: Sequence[RunReport]) -> Head:
    """Build the top of a page about several runs."""
    states = [report.status.state.value.lower() for report in reports]
    facts = [Fact(report.run_id, state) for report, state in zip(reports, states, strict=True)]
    lead = ", ".join(f"{amount} {state}" for state, amount in Counter(states).items())
    return Head(title=f"{counted(len(reports), 'run')} side by side", facts=facts, lead=lead)


def sections_of_several(reports: Sequence[RunReport]) -> list[Section]:
    """Build the common sections: results, curves, time, differences."""
    return [
        Section("results", "Results", [_results(reports)]),
        Section("curves", "Curves", _curves(reports)),
        Section("shares", "Time", _time(reports)),
        Section("differences", "Differences", [_differences(reports)]),
    ]


def _results(reports: Sequence[RunReport]) -> Card:
    """One row per run, the figures that runs are compared by."""
    columns = {"Run": "name", "State": "name", "Layout": "name"}
    columns |= dict.fromkeys(("GPUs", "Steps", "Loss", "Step time", "Planned", "MFU"), "number")
    columns |= dict.fromkeys(("Tokens/s per GPU", "Memory", "Productive", "GPU-hours"), "number")
    columns |= dict.fromkeys(("Failures", "Steps redone"), "number")
    rows = []
    for index, report in enumerate(reports):
        plan, speed, spent, row = report.plan, report.speed, report.goodput, report.status
        planned = plan or report.trainer
        rows.append(
            [
                key(colour_of(index), report.run_id),
                row.state.value.lower(),
                str(plan.layout) if plan else UNKNOWN,
                count(planned.nodes.nodes * planned.nodes.gpus_per_node if planned else None),
                count(row.step),
                number(row.loss),
                duration(speed.step_seconds if speed else None),
                duration(plan.step_seconds if plan else None),
                ratio(speed.mfu if speed else None),
                number(speed.tokens_per_second_per_gpu if speed else None),
                size(report.fullest_bytes),
                ratio(spent.ettr if spent else None),
                hours(spent.gpu_hours if spent else None),
                count(spent.failures if spent else None),
                count(spent.lost_steps if spent else None),
            ]
        )
    return Card("Results", Table(columns, rows), wide=True)


def _curves(reports: Sequence[RunReport]) -> list[Card]:
    cards = []
    for title, y, height, choose in _COMMON_CURVES:
        lines = [
            Line(report.run_id, choose(report.curves) if report.curves else (), colour_of(index))
            for index, report in enumerate(reports)
        ]
        chart = line_chart(lines, label=f"{title} over steps", x=Axis("step"), y=y, height=height)
        cards.append(Card(title, chart, wide=title == "Loss"))
    return cards


def _time(reports: Sequence[RunReport]) -> list[Card]:
    bars = [
        Bar(report.run_id, report.goodput.ettr if report.goodput else None, colour=colour_of(index))
        for index, report in enumerate(reports)
    ]
    share = Axis("productive (ETTR)", ratio, values=(1.0,))
    parts = []
    for report in reports:
        spent = report.goodput.seconds if report.goodput else {}
        shares = [(Entry(*CATEGORIES[name]), spent.get(name, 0.0)) for name in CATEGORIES]
        label = f"Time of {report.run_id}"
        parts += [paragraph(report.run_id), stacked_bar(shares, label=label, format=duration)]
    return [
        Card(
            "Productive share of the wall time",
            bar_chart(bars, label="Productive share", x=share),
        ),
        Card("Where the time went", Markup("").join(parts)),
    ]


def _differences(reports: Sequence[RunReport]) -> Card:
    """List what differs in spec and plan; equal values are left out."""
    specs = [report.spec for report in reports]
    compared = [
        (name, [spec.get(name, "") or UNKNOWN for spec in specs])
        for name in dict.fromkeys(name for spec in specs for name in spec)
        if name not in _NOT_COMPARED
    ]
    plans = [report.plan for report in reports]
    for name, write in _COMPARED_OF_PLANS.items():
        compared.append((f"plan: {name}", [write(plan) if plan else UNKNOWN for plan in plans]))
    rows = [[name, *values] for name, values in compared if len(set(values)) > 1]
    columns = {"": "name", **{report.run_id: "words" for report in reports}}
    unread = [one.run_id for one in reports if not one.spec]
    note = f"The spec of {', '.join(unread)} cannot be read." if unread else ""
    body = Table(columns, rows).or_nothing("There are none.")
    return Card("Differences of spec and plan", body, note, wide=True)
