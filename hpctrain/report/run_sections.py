"""The sections of the page about one run, and its head. Pure.

Belongs here: which sections there are, the figures that are seen first. Does not belong here:
collecting them (`hpctrain.actions.report`), drawing (`charts`), several runs beside each other
(`side_by_side`).
"""

from __future__ import annotations

from markupsafe import Markup

from hpctrain.actions.report import RunReport
from hpctrain.report.curve_sections import learning, speed
from hpctrain.report.elements import (
    Card,
    Fact,
    Head,
    Section,
    Tile,
    code,
    paragraph,
    table,
    tiles,
)
from hpctrain.report.missing import missing
from hpctrain.report.rank_sections import memory, messages
from hpctrain.report.record_sections import events, saved, software
from hpctrain.report.scales import compact_number
from hpctrain.report.time_sections import time_spent
from hpctrain.report.words import (
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
    return [
        Section(f"{prefix}{one.anchor}", one.title, one.cards, one.tiles) for one in built if one
    ]


def head_of(report: RunReport) -> Head:
    """Build the top of the page: what the run is, and in which state."""
    row, plan = report.status, report.plan
    facts = [Fact("Owner", row.owner or UNKNOWN)]
    if report.account or report.partition:
        facts.append(
            Fact(
                "Account, partition",
                " · ".join(word for word in (report.account, report.partition) if word),
            )
        )
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
        shown.append(
            Tile(
                "Step time",
                duration(report.speed.step_seconds),
                f"{duration(planned)} planned" if planned else "median",
            )
        )
        if report.speed.mfu is not None:
            expected = plan.prediction.mfu if plan and plan.prediction else None
            more = f"{expected:.1%} planned" if expected else "median"
            shown.append(Tile("MFU", f"{report.speed.mfu:.1%}", more))
        unit = plan.unit if plan else "tokens"
        shown.append(
            Tile(
                f"{unit.capitalize()}/s",
                compact_number(report.speed.tokens_per_second),
                "median",
            )
        )
    if spent is not None and spent.wall_seconds > 0:
        shown.append(Tile("Productive", ratio(spent.ettr), f"of {duration(spent.wall_seconds)}"))
        if spent.gpu_hours is not None:
            shown.append(Tile("GPU-hours", hours(spent.gpu_hours), _gpus(spent.gpus)))
        more = f"one per {duration(spent.mttf_seconds)}" if spent.mttf_seconds else ""
        shown.append(
            Tile("Failures", f"{spent.failures:,}", more or counted(spent.attempts, "attempt"))
        )
    return shown


def _gpus(gpus: int | None) -> str:
    return "" if gpus is None else f"on {counted(gpus, 'GPU')}"


def overview(report: RunReport) -> Section:
    cards = [_plan_card(report)]
    if report.diagnosis is not None:
        cards.append(_diagnosis_card(report))
    return Section("overview", "Overview", cards, tiles(tiles_of(report)))


def _plan_card(report: RunReport) -> Card:
    plan = report.plan
    if plan is None:
        return missing("Plan and reality", report, "plan", "The plan is not known.")
    rows = plan_rows(report)
    columns = {"": "", "Planned": "number", "Measured": "number", "Difference": "number"}
    note = "Medians of steps that count; the first step of each launch is left out."
    return Card("Plan and reality", table(columns, rows), note)


def plan_rows(report: RunReport) -> list[list[str | Markup]]:
    """Compare what was planned with what was measured, row by row."""
    plan, speed, spent = report.plan, report.speed, report.goodput
    assert plan is not None
    expected = plan.prediction
    measured = speed.step_seconds if speed else None
    rows: list[list[str | Markup]] = [
        [
            "Step time",
            duration(plan.step_seconds),
            duration(measured),
            difference(plan.step_seconds, measured, more_is_better=False),
        ],
    ]
    mfu, planned_mfu = (speed.mfu if speed else None), (expected.mfu if expected else None)
    if mfu is not None or planned_mfu is not None:
        rows.append(
            [
                "MFU",
                ratio(planned_mfu),
                ratio(mfu),
                difference(planned_mfu, mfu, more_is_better=True),
            ]
        )
    rate = speed.tokens_per_second_per_gpu if speed else None
    planned_rate = expected.tokens_per_second_per_gpu if expected else None
    rows.append(
        [
            f"{plan.unit.capitalize()}/s per GPU",
            number(planned_rate),
            number(rate),
            difference(planned_rate, rate, more_is_better=True),
        ]
    )
    used = spent.gpu_hours if spent else None
    needed = expected.gpu_hours if expected else None
    done = report.status.state.value == "DONE"
    rows.append(
        [
            "GPU-hours",
            hours(needed),
            hours(used) + ("" if done or used is None else " so far"),
            difference(needed, used, more_is_better=False) if done else UNKNOWN,
        ]
    )
    if report.window is not None and report.window.stages:
        found = [one.allocated_bytes for one in report.window.stages if one.allocated_bytes]
        largest = plan.memory[plan.peak_stage].total_bytes
        if found and plan.accelerator == "cuda":
            rows.append(
                [
                    "Memory of the fullest GPU",
                    size(largest),
                    size(max(found)),
                    difference(largest, max(found), more_is_better=False),
                ]
            )
    trained = report.status.step
    rows.append(["Steps", count(plan.batch.train_steps), count(trained), UNKNOWN])
    return rows


def _diagnosis_card(report: RunReport) -> Card:
    diagnosis = report.diagnosis
    assert diagnosis is not None
    if not diagnosis.stands_out:
        unsure = [one.question for one in diagnosis.findings if one.answer == "unknown"]
        more = f" Not known: {' '.join(unsure)}" if unsure else ""
        return Card("What stands out", paragraph(f"Nothing does.{more}", "nothing"))
    rows: list[list[str | Markup]] = [
        [
            one.question,
            one.words,
            "" if one.gain_seconds is None else f"{duration(one.gain_seconds)} a step",
        ]
        for one in diagnosis.stands_out
    ]
    columns = {"Question": "", "Answer": "words", "Gain at most": "number"}
    return Card(
        "What stands out",
        table(columns, rows),
        "Answers of `hpctrain diagnose`, which also names remedies.",
    )
