"""The page about the GPU-hours of a team as HTML: one file, no script, nothing loaded. Pure.

Belongs here: sections, charts and tables of `TeamReport`. Does not belong here: any number that is
not in the document, the parts of pages (`elements`, `charts`).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise

from markupsafe import Markup

from hpctrain.actions.team_report import GroupSpending, TeamReport
from hpctrain.actions.team_tally import CauseSpending, Cost, Spending
from hpctrain.report.charts import Axis, Bar, Entry, Stack, bar_chart, stacked_rows
from hpctrain.report.elements import (
    Card,
    Contents,
    Fact,
    Head,
    Section,
    Tile,
    fill,
    section,
    table,
    tiles,
)
from hpctrain.report.time_sections import CATEGORIES
from hpctrain.report.words import UNKNOWN, count, counted, duration, ratio, words_of
from hpctrain.units import TokenCount, short_hours
from hpctrain.version import __version__

_MOST_ROWS = 500
# Less would be shown as 0.00.
_LEAST_SHOWN = 0.005
# Parts of a bar: what the GPU-hours of a spending are, in the words and colours of all pages.
_RESTARTING = Entry("detecting and restarting", "c5")


def write_week_page(report: TeamReport) -> str:
    """Write the page."""
    sections = [_overview(report)]
    if report.total.runs:
        sections += [_losses(report), _teams(report), _runs(report)]
    if report.unreadable:
        sections.append(_unreadable(report))
    return str(
        fill(
            "page.html.j2",
            title=f"GPU-hours of {report.title} · hpctrain report",
            head=fill("head.html.j2", head=_head(report)),
            contents=[Contents(one.anchor, one.title) for one in sections],
            sections=[section(one) for one in sections],
            footer=_footer(report),
        )
    )


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
    figures = [
        Tile(
            "GPU-hours", short_hours(whole.gpu_hours), _compared(whole.gpu_hours, before.gpu_hours)
        ),
        Tile(
            "Productive",
            ratio(whole.productive_share),
            f"{short_hours(whole.productive_gpu_hours)} GPU-hours, before "
            f"{ratio(before.productive_share)}",
        ),
        Tile(
            "Lost",
            short_hours(whole.lost_gpu_hours),
            _compared(whole.lost_gpu_hours, before.lost_gpu_hours),
        ),
    ]
    figures += [
        Tile(f"Cost in {cost.currency}", _money(cost.total), f"{_money(cost.lost)} of it lost")
        for cost in whole.costs
    ]
    figures += [
        Tile("Steps", count(whole.steps), f"{count(whole.redone_steps)} more were trained again"),
        Tile("In the queue", duration(whole.queue_hours * 3600), "summed over runs, without GPUs"),
    ]
    if whole.tokens:
        figures.append(Tile("Tokens", _amount(whole.tokens), "of the steps that are kept"))
    if whole.images:
        figures.append(Tile("Images", _amount(whole.images), "of the steps that are kept"))
    days = [
        Stack(one.first_day.strftime("%a %d %b"), _parts(one.spending), _end(one.spending))
        for one in report.by_period
    ]
    weekly = any(
        (after.first_day - one.first_day).days > 1 for one, after in pairwise(report.by_period)
    )
    title = "GPU-hours by week" if weekly else "GPU-hours by day"
    note = "Productive steps are in the final weights; everything else is lost."
    chart = stacked_rows(days, label=title, x=_axis())
    return Section("overview", "Overview", [Card(title, chart, note, wide=True)], tiles(figures))


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
        for one in _shown_causes(report)
    ]
    note = "The short line is the time before. A bar has the colour of what it mostly consists of."
    cards = [
        Card(
            "GPU-hours lost by cause",
            bar_chart(bars, label="GPU-hours lost by cause", x=_axis()),
            note,
        ),
        Card("Cost of each cause", _causes_table(report)),
    ]
    return Section("losses", "Losses", cards)


def _causes_table(report: TeamReport) -> Markup:
    currencies = _currencies(report)
    columns = {"Cause": "name", "GPU-hours": "number", "Of all": "number"}
    columns |= {currency: "number" for currency in currencies}
    columns |= {"Before": "number", "Mostly": "name"}
    return table(
        columns, [_cause_row(one, report.total, currencies) for one in _shown_causes(report)]
    )


def _shown_causes(report: TeamReport) -> list[CauseSpending]:
    return [one for one in report.by_cause if one.gpu_hours >= _LEAST_SHOWN]


def _cause_row(
    one: CauseSpending, whole: Spending, currencies: Sequence[str]
) -> tuple[str | Markup, ...]:
    return (
        words_of(one.cause),
        short_hours(one.gpu_hours),
        ratio(one.gpu_hours / whole.gpu_hours) if whole.gpu_hours else UNKNOWN,
        *_amounts(one.costs, currencies),
        short_hours(one.gpu_hours_before),
        CATEGORIES[one.mostly][0],
    )


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
        body = chart + _groups_table(word, groups, report)
        cards.append(Card(f"By {word}", body, note, wide=True))
    return Section("teams", "Users and projects", cards)


def _groups_table(word: str, groups: Sequence[GroupSpending], report: TeamReport) -> Markup:
    currencies = _currencies(report)
    columns = {word.capitalize(): "name", "Runs": "number", "GPU-hours": "number"}
    columns |= {"Productive": "number", "Lost": "number"}
    columns |= {currency: "number" for currency in currencies}
    columns |= {"Before": "number", "Steps": "number", "Tokens": "number", "Queue": "number"}
    rows = [
        (
            one.name,
            count(one.spending.runs),
            short_hours(one.spending.gpu_hours),
            ratio(one.spending.productive_share),
            short_hours(one.spending.lost_gpu_hours),
            *_amounts(one.spending.costs, currencies),
            short_hours(one.gpu_hours_before),
            count(one.spending.steps),
            _amount(one.spending.tokens),
            duration(one.spending.queue_hours * 3600),
        )
        for one in groups[:_MOST_ROWS]
    ]
    return table(columns, rows)


def _runs(report: TeamReport) -> Section:
    currencies = _currencies(report)
    columns = {"Run": "name", "User": "name", "Project": "name", "Cluster": "name"}
    columns |= {"Engine": "name", "GPUs": "number", "GPU-hours": "number", "Productive": "number"}
    columns |= {"Redone": "number", "Saving": "number", "Starting": "number"}
    columns |= {"Restarting": "number", "Down": "number", "Queue": "number"}
    columns |= {currency: "number" for currency in currencies}
    columns |= {"Steps": "number", "Tokens": "number"}
    rows = []
    for run in report.runs[:_MOST_ROWS]:
        spent = run.spending
        known = run.gpus is not None
        rows.append(
            (
                run.run_id,
                run.user,
                run.project,
                run.cluster,
                run.engine,
                count(run.gpus),
                short_hours(spent.gpu_hours) if known else UNKNOWN,
                ratio(spent.productive_share),
                short_hours(spent.redone_gpu_hours),
                short_hours(spent.saving_gpu_hours),
                short_hours(spent.starting_gpu_hours),
                short_hours(spent.restarting_gpu_hours),
                duration(spent.down_hours * 3600),
                duration(spent.queue_hours * 3600),
                *_amounts(spent.costs, currencies),
                count(spent.steps),
                _amount(spent.tokens or spent.images),
            )
        )
    left = len(report.runs) - len(rows)
    note = (
        "GPU-hours, but for the time down and in the queue, in which a run has no GPUs. "
        "Restarting includes detecting."
    )
    note += f" {left:,} runs with fewer GPU-hours are left out." if left > 0 else ""
    return Section("runs", "Runs", [Card("Runs", table(columns, rows), note, wide=True)])


def _unreadable(report: TeamReport) -> Section:
    columns = {"Run": "name", "Directory": "words", "Reason": "words"}
    rows = [(one.run_id, one.directory, one.reason) for one in report.unreadable[:_MOST_ROWS]]
    title = f"{counted(len(report.unreadable), 'run')} could not be read and are not counted"
    return Section("unread", "Not counted", [Card(title, table(columns, rows), wide=True)])


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


def _currencies(report: TeamReport) -> tuple[str, ...]:
    return tuple(cost.currency for cost in report.total.costs)


def _amounts(costs: Sequence[Cost], currencies: Sequence[str]) -> tuple[str, ...]:
    """Write money in a column per currency; of causes all of it is lost."""
    known = {cost.currency: _money(cost.total) for cost in costs}
    return tuple(known.get(currency, UNKNOWN) for currency in currencies)


def _money(amount: float) -> str:
    return f"{amount:,.0f}" if amount >= 100 else f"{amount:,.2f}"


def _amount(number: int) -> str:
    """Write a large number with three digits: `13.2B`."""
    return str(TokenCount(float(f"{number:.3g}"))) if number else "0"
