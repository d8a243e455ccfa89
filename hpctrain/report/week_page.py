"""The page about the GPU-hours of a team as HTML: one file, no script, nothing loaded. Pure.

Belongs here: sections, charts and tables of `TeamReport`. Does not belong here: any number that is
not in the document, the parts of pages (`elements`, `charts`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from itertools import pairwise
from typing import TypeVar

from hpctrain.base.units import TokenCount, short_hours
from hpctrain.page.charts import Axis, Bar, Entry, Stack, bar_chart, stacked_rows
from hpctrain.page.elements import (
    Card,
    Fact,
    Head,
    Page,
    Section,
    Table,
    Tile,
)
from hpctrain.page.words import UNKNOWN, count, counted, duration, ratio, words_of
from hpctrain.report.team_report import GroupSpending, PeriodSpending, RunSpending, TeamReport
from hpctrain.report.team_tally import CauseSpending, Cost, Spending
from hpctrain.report.time_sections import CATEGORIES
from hpctrain.version import __version__

Record = TypeVar("Record")
_MOST_ROWS = 500
# Less would be shown as 0.00.
_LEAST_SHOWN = 0.005
# Parts of a bar: what the GPU-hours of a spending are, in the words and colours of all pages.
_RESTARTING = Entry("detecting and restarting", "c5")


def write_week_page(report: TeamReport) -> str:
    """Write the page."""
    parts = [_overview(report)]
    if report.total.runs:
        parts += [_losses(report), _teams(report), _runs(report)]
    if report.unreadable:
        parts.append(_unreadable(report))
    return Page(f"GPU-hours of {report.title}", _head(report), parts, _footer(report)).html()


def _head(report: TeamReport) -> Head:
    whole = report.total
    facts = [
        Fact("From", _moment(report.begin)),
        Fact("To", _moment(report.end)),
        Fact("Time zone", report.zone),
        Fact("Runs", f"{count(whole.runs)} with time in it, {count(report.quiet_runs)} without"),
        Fact("Directories", ", ".join(report.directories)),
    ]
    state = "so far" if report.in_progress else ""
    return Head(f"GPU-hours of {report.title}", facts, state=state, colour="c1")


def _overview(report: TeamReport) -> Section:
    whole, before = report.total, report.previous
    used = _compared(whole.gpu_hours, before.gpu_hours)
    lost = _compared(whole.lost_gpu_hours, before.lost_gpu_hours)
    productive = f"{short_hours(whole.productive_gpu_hours)} GPU-hours, before "
    productive += ratio(before.productive_share)
    figures = [
        Tile("GPU-hours", short_hours(whole.gpu_hours), used),
        Tile("Productive", ratio(whole.productive_share), productive),
        Tile("Lost", short_hours(whole.lost_gpu_hours), lost),
    ]
    figures += [
        Tile(f"Cost in {cost.currency}", money(cost.total), f"{money(cost.lost)} of it lost")
        for cost in whole.costs
    ]
    figures += [
        Tile("Steps", count(whole.steps), f"{count(whole.redone_steps)} more were trained again"),
        Tile("In the queue", duration(whole.queue_hours * 3600), "summed over runs, without GPUs"),
    ]
    if whole.tokens:
        figures.append(Tile("Tokens", amount(whole.tokens), "of the steps that are kept"))
    if whole.images:
        figures.append(Tile("Images", amount(whole.images), "of the steps that are kept"))
    days = [
        Stack(one.first_day.strftime("%a %d %b"), _parts(one.spending), _end(one.spending))
        for one in report.by_period
    ]
    title = "GPU-hours by week" if is_weekly(report.by_period) else "GPU-hours by day"
    note = "Productive steps are in the final weights; everything else is lost."
    chart = stacked_rows(days, label=title, x=_axis())
    return Section("overview", "Overview", [Card(title, chart, note, wide=True)], figures)


def _losses(report: TeamReport) -> Section:
    bars = [
        Bar(
            words_of(one.cause),
            one.gpu_hours,
            f"{words_of(one.cause)}: {short_hours(one.gpu_hours)} GPU-hours, mostly "
            f"{CATEGORIES[one.mostly][0]}; before {short_hours(one.gpu_hours_before)}",
            colour=CATEGORIES[one.mostly][1],
            mark=one.gpu_hours_before,
        )
        for one in report.by_cause
        if one.gpu_hours >= _LEAST_SHOWN
    ]
    note = "The short line is the time before. A bar has the colour of what it mostly consists of."
    title = "GPU-hours lost by cause"
    chart = Card(title, bar_chart(bars, label=title, x=_axis()), note)
    return Section("losses", "Losses", [chart, Card("Cost of each cause", causes_table(report))])


def causes_table(
    report: TeamReport, heading: str = "Cause", before: Callable[[float], str] = short_hours
) -> Table:
    """Tabulate what each cause has cost: all of its GPU-hours are lost."""
    whole = report.total.gpu_hours
    return Table.of(
        _shown_causes(report),
        {
            heading: ("name", lambda one: words_of(one.cause)),
            "GPU-hours": ("number", lambda one: short_hours(one.gpu_hours)),
            "Of all": ("number", lambda one: ratio(one.gpu_hours / whole if whole else None)),
            **_money_columns(report, lambda one: one.costs),
            "Before": ("number", lambda one: before(one.gpu_hours_before)),
            "Mostly": ("name", lambda one: CATEGORIES[one.mostly][0]),
        },
    )


def _shown_causes(report: TeamReport) -> list[CauseSpending]:
    return [one for one in report.by_cause if one.gpu_hours >= _LEAST_SHOWN]


def _teams(report: TeamReport) -> Section:
    cards = []
    for word, groups in (
        ("user", report.by_user),
        ("project", report.by_project),
        ("cluster", report.by_cluster),
    ):
        stacks = [Stack(one.name, _parts(one.spending), _end(one.spending)) for one in groups][
            :_MOST_ROWS
        ]
        chart = stacked_rows(stacks, label=f"GPU-hours by {word}", x=_axis())
        note = "The Slurm account, or the project of W&B." if word == "project" else ""
        body = chart + groups_table(word, groups[:_MOST_ROWS], report).__html__()
        cards.append(Card(f"By {word}", body, note, wide=True))
    return Section("teams", "Users and projects", cards)


def groups_table(
    word: str,
    groups: Sequence[GroupSpending],
    report: TeamReport,
    before: Callable[[float], str] = short_hours,
) -> Table:
    """Tabulate what users, projects or clusters have used, and what it has bought."""
    return Table.of(
        groups,
        {
            word.capitalize(): ("name", lambda one: one.name),
            "Runs": ("number", lambda one: count(one.spending.runs)),
            "GPU-hours": ("number", lambda one: short_hours(one.spending.gpu_hours)),
            "Productive": ("number", lambda one: ratio(one.spending.productive_share)),
            "Lost": ("number", lambda one: short_hours(one.spending.lost_gpu_hours)),
            **_money_columns(report, lambda one: one.spending.costs),
            "Before": ("number", lambda one: before(one.gpu_hours_before)),
            "Steps": ("number", lambda one: count(one.spending.steps)),
            "Tokens": ("number", lambda one: amount(one.spending.tokens)),
            "Queue": ("number", lambda one: duration(one.spending.queue_hours * 3600)),
        },
    )


def _runs(report: TeamReport) -> Section:
    table = Table.of(
        report.runs[:_MOST_ROWS],
        {
            "Run": ("name", lambda run: run.run_id),
            "User": ("name", lambda run: run.user),
            "Project": ("name", lambda run: run.project),
            "Cluster": ("name", lambda run: run.cluster),
            "Engine": ("name", lambda run: run.engine),
            "GPUs": ("number", lambda run: count(run.gpus)),
            "GPU-hours": ("number", _used),
            "Productive": ("number", lambda run: ratio(run.spending.productive_share)),
            "Redone": ("number", lambda run: short_hours(run.spending.redone_gpu_hours)),
            "Saving": ("number", lambda run: short_hours(run.spending.saving_gpu_hours)),
            "Starting": ("number", lambda run: short_hours(run.spending.starting_gpu_hours)),
            "Restarting": ("number", lambda run: short_hours(run.spending.restarting_gpu_hours)),
            "Down": ("number", lambda run: duration(run.spending.down_hours * 3600)),
            "Queue": ("number", lambda run: duration(run.spending.queue_hours * 3600)),
            **_money_columns(report, lambda run: run.spending.costs),
            "Steps": ("number", lambda run: count(run.spending.steps)),
            "Tokens": ("number", lambda run: amount(run.spending.tokens or run.spending.images)),
        },
    )
    left = len(report.runs) - len(table.rows)
    note = (
        "GPU-hours, but for the time down and in the queue, in which a run has no GPUs. "
        "Restarting includes detecting."
    )
    note += f" {left:,} runs with fewer GPU-hours are left out." if left > 0 else ""
    return Section("runs", "Runs", [Card("Runs", table, note, wide=True)])


def _used(run: RunSpending) -> str:
    return UNKNOWN if run.gpus is None else short_hours(run.spending.gpu_hours)


def _unreadable(report: TeamReport) -> Section:
    columns = {"Run": "name", "Directory": "words", "Reason": "words"}
    rows = [(one.run_id, one.directory, one.reason) for one in report.unreadable[:_MOST_ROWS]]
    title = f"{counted(len(report.unreadable), 'run')} could not be read and are not counted"
    return Section("unread", "Not counted", [Card(title, Table(columns, rows), wide=True)])


def _footer(report: TeamReport) -> list[str]:
    begin, end = _moment(report.previous_begin), _moment(report.previous_end)
    lines = [
        f"Made {_moment(report.made)} by hpctrain {__version__}.",
        f"The time before is {begin} to {end}.",
    ]
    if report.runs_without_gpus:
        names = ", ".join(report.runs_without_gpus[:20])
        lines.append(f"GPU-hours are unknown of {names}.")
    if report.total.unpriced_gpu_hours:
        unpriced = short_hours(report.total.unpriced_gpu_hours)
        lines.append(f"{unpriced} GPU-hours have no price in their profiles.")
    return lines


def _moment(moment: datetime) -> str:
    """Write a time of the report's zone."""
    return moment.strftime("%Y-%m-%d %H:%M")


def is_weekly(periods: Sequence[PeriodSpending]) -> bool:
    """Tell whether the window is divided into weeks, not days."""
    return any((after.first_day - one.first_day).days > 1 for one, after in pairwise(periods))


def _parts(spending: Spending) -> tuple[tuple[Entry, float], ...]:
    """Divide GPU-hours for a bar."""
    return (
        (Entry(*CATEGORIES["productive"]), spending.productive_gpu_hours),
        (Entry(*CATEGORIES["redone"]), spending.redone_gpu_hours),
        (Entry(*CATEGORIES["saving"]), spending.saving_gpu_hours),
        (Entry(*CATEGORIES["between"]), spending.between_gpu_hours),
        (Entry(*CATEGORIES["starting"]), spending.starting_gpu_hours),
        (_RESTARTING, spending.restarting_gpu_hours),
    )


def _end(spending: Spending) -> str:
    share = spending.productive_share
    return "" if share is None else f"{share:.0%}"


def _axis() -> Axis:
    return Axis("GPU-hours")


def _compared(now: float, before: float) -> str:
    """Write the change to the time before; more GPU-hours are neither good nor bad."""
    return f"{now / before - 1:+.0%}, before {short_hours(before)}" if before else "nothing before"


def _money_columns(
    report: TeamReport, costs: Callable[[Record], Sequence[Cost]]
) -> dict[str, tuple[str, Callable[[Record], str]]]:
    """Write money in a column per currency; of causes all of it is lost."""

    def column(currency: str) -> tuple[str, Callable[[Record], str]]:
        def cell(one: Record) -> str:
            found = (cost.total for cost in costs(one) if cost.currency == currency)
            return next(map(money, found), UNKNOWN)

        return "number", cell

    return {cost.currency: column(cost.currency) for cost in report.total.costs}


def money(amount: float) -> str:
    """Write an amount of money: cents below 100."""
    return f"{amount:,.0f}" if amount >= 100 else f"{amount:,.2f}"


def amount(number: int) -> str:
    """Write a large number with three digits: `13.2B`."""
    return str(TokenCount(float(f"{number:.3g}"))) if number else "0"
