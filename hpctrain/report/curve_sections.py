"""What changes from step to step: losses, speed, with the launches marked. Pure.

Belongs here: curves over steps. Does not belong here: time (`time_sections`), ranks
(`rank_sections`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hpctrain.judge.causes import FAILURE_CAUSES
from hpctrain.page.charts import Axis, Level, Line, Rule, line_chart
from hpctrain.page.elements import Card, Section
from hpctrain.page.scales import percent
from hpctrain.page.words import counted, duration, words_of
from hpctrain.report.collect import RunReport
from hpctrain.report.missing import missing
from hpctrain.report.rank_sections import rank_cards
from hpctrain.runs.describe import LaunchStory


def launches_of(report: RunReport) -> Iterator[tuple[int, LaunchStory, LaunchStory | None]]:
    """List the launches with the number of their attempt and the launch before."""
    before = None
    for attempt, story in enumerate(report.story.attempts if report.story else (), 1):
        for launch in story.launches:
            yield attempt, launch, before
            before = launch


def rules_of(report: RunReport) -> list[Rule]:
    """Mark where launches continue, with the cause that ended the one before."""
    rules = []
    for attempt, launch, before in launches_of(report):
        if before is None or launch.resume_step is None:
            continue
        cause = words_of(before.cause or "unknown")
        lost = lost_steps(before, launch)
        words = f"Launch {launch.epoch}, attempt {attempt}, continues from step "
        words += f"{launch.resume_step:,} after: {cause}"
        words += f". {before.reason}" if before.reason else ""
        words += f". {counted(lost, 'step')} lost" if lost else ""
        failed = before.cause in FAILURE_CAUSES
        rules.append(Rule(launch.resume_step, words, cause, "c8" if failed else "neutral"))
    return rules


def lost_steps(before: LaunchStory, launch: LaunchStory) -> int:
    """Count the steps that the launch has to train again."""
    if before.last_step is None or launch.resume_step is None:
        return 0
    return max(0, before.last_step - launch.resume_step)


def learning(report: RunReport) -> Section:
    """Draw the losses of steps that count and of those that do not, and what belongs to them."""
    curves, rules = report.curves, rules_of(report)
    if curves is None or not (curves.loss or curves.dropped):
        card = missing("Loss", report, "time", "No step has been trained yet.", wide=True)
        return Section("learning", "Learning", [card])
    noisy = bool(curves.loss_mean)
    lines = [Line("every step" if noisy else "loss", curves.loss, faint=noisy)]
    lines += [Line("mean", curves.loss_mean, "c1")] if noisy else []
    lines += [Line("dropped, trained again", one.loss, "c2", dashed=True) for one in curves.dropped]
    if curves.evaluation_loss:
        lines.append(Line("evaluation", curves.evaluation_loss, "c3"))
    lost = sum(one.count for one in curves.dropped)
    note = "Vertical lines: a launch continues from a checkpoint, and why. " if rules else ""
    note += f"{counted(lost, 'step')} dropped and trained again." if lost else ""
    chart = line_chart(
        lines, label="Loss over steps", x=Axis("step"), y=Axis("loss"), rules=rules, height=280
    )
    norm = Axis("norm before clipping", from_zero=True)
    rate = Axis("learning rate", from_zero=True)
    return Section(
        "learning",
        "Learning",
        [
            Card("Loss", chart, note, wide=True),
            _curve_card(report, "Gradient norm", Line("", curves.gradient_norm, "c7"), norm),
            _curve_card(report, "Learning rate", Line("", curves.learning_rate, "c5"), rate),
        ],
    )


def _curve_card(
    report: RunReport, title: str, line: Line, y: Axis, levels: Sequence[Level] = ()
) -> Card:
    """Draw one curve over steps, with launches as lines without words."""
    rules = [replace(rule, label="") for rule in rules_of(report)]
    chart = line_chart(
        [line],
        label=f"{title} over steps",
        x=Axis("step"),
        y=y,
        rules=rules,
        levels=levels,
        height=180,
    )
    return Card(title, chart)


def speed(report: RunReport) -> Section | None:
    """Draw how fast steps are, and where their time goes."""
    curves, plan = report.curves, report.plan
    if curves is None or not curves.step_seconds:
        return None
    planned = plan.step_seconds if plan else None
    expected = plan.prediction.mfu if plan and plan.prediction else None
    per_second = Axis(f"{plan.unit if plan else 'tokens'} per second", from_zero=True)
    cards = [
        _curve_card(
            report,
            "Step time",
            Line("", curves.step_seconds, "c1"),
            Axis("seconds", from_zero=True),
            [Level(planned, f"planned {duration(planned)}")] if planned else [],
        ),
        _curve_card(report, "Throughput", Line("", curves.tokens_per_second, "c3"), per_second),
    ]
    if any(value is not None for _, value in curves.mfu):
        cards.append(
            _curve_card(
                report,
                "Model FLOPs utilization",
                Line("", curves.mfu, "c7"),
                Axis("MFU", percent, from_zero=True),
                [Level(expected, f"planned {percent(expected)}")] if expected else [],
            )
        )
    return Section("speed", "Speed", [*cards, *rank_cards(report)])
