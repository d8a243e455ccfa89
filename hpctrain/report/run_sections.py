"""The sections of the page about one run, and its head. Pure.

Belongs here: which sections there are, the figures that are seen first. Does not belong here:
collecting them (`hpctrain.report.collect`), drawing (`charts`), several runs beside each other
(`side_by_side`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hpctrain.diagnose.facts import TopicFinding
from hpctrain.page.elements import (
    Card,
    Fact,
    Head,
    Section,
    Table,
    Tile,
    code,
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
    moment,
    number,
    ratio,
    size,
)
from hpctrain.plan.documents import Plan
from hpctrain.report.collect import RunReport
from hpctrain.report.curve_sections import learning, speed
from hpctrain.report.missing import missing
from hpctrain.report.rank_sections import memory, messages
from hpctrain.report.record_sections import events, saved, software
from hpctrain.report.time_sections import time_spent

Known = float | None
Write = Callable[[Known], str]
STATE_COLOURS = {"RUNNING": "c1", "DONE": "c3", "FAILED": "c8", "PENDING": "c4"}


def sections_of(report: RunReport, prefix: str = "") -> list[Section]:
    """Build all sections of a run; anchors begin with `prefix`."""
    built = (
        overview(report),
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
    row, plan = report.status, report.plan
    facts = [Fact("Owner", row.owner or UNKNOWN)]
    if report.account or report.partition:
        where = " · ".join(word for word in (report.account, report.partition) if word)
        facts.append(Fact("Account, partition", where))
    facts.append(Fact("Cluster", report.cluster or (plan.profile_name if plan else UNKNOWN)))
    facts.append(Fact("Job", UNKNOWN if row.job_id is None else str(row.job_id)))
    if plan is not None:
        facts.append(Fact("Engine", plan.engine))
        facts.append(Fact("Parameters", compact_number(plan.parameters)))
        facts.append(Fact("Layout", str(plan.layout)))
        facts.append(Fact("Nodes", str(plan.nodes)))
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


def overview(report: RunReport) -> Section:
    cards = [_plan_card(report)]
    if report.diagnosis is not None:
        cards.append(_diagnosis_card(report))
    return Section("overview", "Overview", cards, tiles_of(report))


def _plan_card(report: RunReport) -> Card:
    plan = report.plan
    if plan is None:
        return missing("Plan and reality", report, "plan", "The plan is not known.")
    columns = {"": "", "Planned": "number", "Measured": "number", "Difference": "number"}
    note = "Medians of steps that count; the first step of each launch is left out."
    return Card("Plan and reality", Table(columns, _plan_rows(report, plan)), note)


def _plan_rows(report: RunReport, plan: Plan) -> list[list[str]]:
    """Compare what was planned with what was measured, row by row."""
    speed, spent, expected = report.speed, report.goodput, plan.prediction

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
    found = [one.allocated_bytes for one in report.window.stages] if report.window else []
    if any(found) and plan.accelerator == "cuda":
        largest = plan.memory[plan.peak_stage].total_bytes
        fullest = max(filter(None, found))
        rows.append(row("Memory of the fullest GPU", size, largest, fullest, False))
    rows.append(["Steps", count(plan.batch.train_steps), count(report.status.step), UNKNOWN])
    return rows


def _diagnosis_card(report: RunReport) -> Card:
    diagnosis = report.diagnosis
    assert diagnosis is not None
    if not diagnosis.stands_out:
        unsure = [one.question for one in diagnosis.findings if one.answer == "unknown"]
        more = f" Not known: {' '.join(unsure)}" if unsure else ""
        return Card("What stands out", paragraph(f"Nothing does.{more}", "nothing"))
    body = Table.of(
        diagnosis.stands_out,
        {
            "Question": ("", lambda one: one.question),
            "Answer": ("words", lambda one: one.words),
            "Gain at most": ("number", _gain),
        },
    )
    note = "Answers of `hpctrain diagnose`, which also names remedies."
    return Card("What stands out", body, note)


def _gain(one: TopicFinding) -> str:
    return "" if one.gain_seconds is None else f"{duration(one.gain_seconds)} a step"
