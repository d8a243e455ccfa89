"""What the GPU-hours of a team have bought: as a page of HTML, as lines of text, as CSV. Pure.

Belongs here: sections, charts, tables and rows of `TeamReport`. Does not belong here: any number
that is not in the document, the parts of pages (`elements`, `charts`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from itertools import pairwise
from typing import TypeVar

from hpctrain.base.errors import UsageError
from hpctrain.base.printable_text import printable_line
from hpctrain.base.units import TokenCount, short_duration, short_hours
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
from hpctrain.page.text import LINE_WIDTH, columns_text, facts, shortened
from hpctrain.page.text import paragraph as wrapped
from hpctrain.page.words import UNKNOWN, count, counted, duration, ratio, words_of
from hpctrain.report.run_sections import CATEGORIES
from hpctrain.report.team_report import GroupSpending, PeriodSpending, TeamReport
from hpctrain.report.team_tally import Cost, Spending
from hpctrain.version import __version__

Record = TypeVar("Record")
_MOST_ROWS = 500
# Less would be shown as 0.00.
_LEAST_SHOWN = 0.005
# Parts of a bar: what the GPU-hours of a spending are, in the words and colours of all pages.
_AXIS = Axis("GPU-hours")
_RESTARTING = Entry("detecting and restarting", "c5")
_NOT_REPORTED = "GPU-hours of trainers that do not report their steps"


def write_week_page(report: TeamReport) -> str:
    """Write the page."""
    whole = report.total
    head = Head(
        f"GPU-hours of {report.title}",
        [
            Fact("From", _moment(report.begin)),
            Fact("To", _moment(report.end)),
            Fact("Time zone", report.zone),
            Fact(
                "Runs", f"{count(whole.runs)} with time in it, {count(report.quiet_runs)} without"
            ),
            Fact("Directories", ", ".join(report.directories)),
        ],
        state="so far" if report.in_progress else "",
        colour="c1",
    )
    parts = [_overview(report)]
    if whole.runs:
        parts += [_losses(report), _teams(report), _runs(report)]
    if report.unreadable:
        columns = {"Run": "name", "Directory": "words", "Reason": "words"}
        rows = [(one.run_id, one.directory, one.reason) for one in report.unreadable[:_MOST_ROWS]]
        title = f"{counted(len(report.unreadable), 'run')} could not be read and are not counted"
        unread = Card(title, Table(columns, rows), wide=True)
        parts.append(Section("unread", "Not counted", [unread]))
    begin, end = _moment(report.previous_begin), _moment(report.previous_end)
    footer = [
        f"Made {_moment(report.made)} by hpctrain {__version__}.",
        f"The time before is {begin} to {end}.",
    ]
    if report.runs_without_gpus:
        names = ", ".join(report.runs_without_gpus[:20])
        footer.append(f"GPU-hours are unknown of {names}.")
    if whole.unpriced_gpu_hours:
        unpriced = short_hours(whole.unpriced_gpu_hours)
        footer.append(f"{unpriced} GPU-hours have no price in their profiles.")
    return Page(head.title, head, parts, footer).html()


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
        Tile(
            "Steps",
            count(whole.known_steps),
            f"{count(whole.redone_steps)} more were trained again",
        ),
        Tile("In the queue", duration(whole.queue_hours * 3600), "summed over runs, without GPUs"),
    ]
    if whole.tokens:
        figures.append(Tile("Tokens", amount(whole.tokens), "of the steps that are kept"))
    if whole.images:
        figures.append(Tile("Images", amount(whole.images), "of the steps that are kept"))
    days = [_stack(one.first_day.strftime("%a %d %b"), one.spending) for one in report.by_period]
    title = "GPU-hours by week" if is_weekly(report.by_period) else "GPU-hours by day"
    note = "Productive steps are in the final weights; everything else is lost."
    if whole.unreported_gpu_hours:
        note += f" Not known: {short_hours(whole.unreported_gpu_hours)} {_NOT_REPORTED}."
    chart = stacked_rows(days, label=title, x=_AXIS)
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
    chart = Card(title, bar_chart(bars, label=title, x=_AXIS), note)
    return Section("losses", "Losses", [chart, Card("Cost of each cause", causes_table(report))])


def causes_table(
    report: TeamReport, heading: str = "Cause", before: Callable[[float], str] = short_hours
) -> Table:
    """Tabulate what each cause has cost: all of its GPU-hours are lost."""
    whole = report.total.gpu_hours
    return Table.of(
        [one for one in report.by_cause if one.gpu_hours >= _LEAST_SHOWN],
        {
            heading: ("name", lambda one: words_of(one.cause)),
            "GPU-hours": ("number", lambda one: short_hours(one.gpu_hours)),
            "Of all": ("number", lambda one: ratio(one.gpu_hours / whole if whole else None)),
            **_money_columns(report, lambda one: one.costs),
            "Before": ("number", lambda one: before(one.gpu_hours_before)),
            "Mostly": ("name", lambda one: CATEGORIES[one.mostly][0]),
        },
    )


def _teams(report: TeamReport) -> Section:
    cards = []
    for word, groups in _groupings(report):
        stacks = [_stack(one.name, one.spending) for one in groups[:_MOST_ROWS]]
        chart = stacked_rows(stacks, label=f"GPU-hours by {word}", x=_AXIS)
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
            "Steps": ("number", lambda one: count(one.spending.known_steps)),
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
            "GPU-hours": (
                "number",
                lambda run: UNKNOWN if run.gpus is None else short_hours(run.spending.gpu_hours),
            ),
            "Productive": ("number", lambda run: ratio(run.spending.productive_share)),
            "Redone": ("number", lambda run: short_hours(run.spending.redone_gpu_hours)),
            "Saving": ("number", lambda run: short_hours(run.spending.saving_gpu_hours)),
            "Starting": ("number", lambda run: short_hours(run.spending.starting_gpu_hours)),
            "Restarting": ("number", lambda run: short_hours(run.spending.restarting_gpu_hours)),
            "Down": ("number", lambda run: duration(run.spending.down_hours * 3600)),
            "Queue": ("number", lambda run: duration(run.spending.queue_hours * 3600)),
            **_money_columns(report, lambda run: run.spending.costs),
            "Steps": ("number", lambda run: count(run.spending.known_steps)),
            "Tokens": (
                "number",
                lambda run: (
                    UNKNOWN if (tokens := run.spending.known_tokens) is None else amount(tokens)
                ),
            ),
        },
    )
    left = len(report.runs) - len(table.rows)
    note = (
        "GPU-hours, but for the time down and in the queue, in which a run has no GPUs. "
        "Restarting includes detecting."
    )
    note += f" {left:,} runs with fewer GPU-hours are left out." if left > 0 else ""
    return Section("runs", "Runs", [Card("Runs", table, note, wide=True)])


def _moment(moment: datetime) -> str:
    """Write a time of the report's zone."""
    return moment.strftime("%Y-%m-%d %H:%M")


def is_weekly(periods: Sequence[PeriodSpending]) -> bool:
    """Tell whether the window is divided into weeks, not days."""
    return any((after.first_day - one.first_day).days > 1 for one, after in pairwise(periods))


def _groupings(report: TeamReport) -> tuple[tuple[str, Sequence[GroupSpending]], ...]:
    return (
        ("user", report.by_user),
        ("project", report.by_project),
        ("cluster", report.by_cluster),
    )


def _stack(name: str, spending: Spending) -> Stack:
    """Divide GPU-hours into the parts of a bar, with the productive share at its end."""
    parts = (
        (Entry(*CATEGORIES["productive"]), spending.productive_gpu_hours),
        (Entry(*CATEGORIES["redone"]), spending.redone_gpu_hours),
        (Entry(*CATEGORIES["saving"]), spending.saving_gpu_hours),
        (Entry(*CATEGORIES["between"]), spending.between_gpu_hours),
        (Entry(*CATEGORIES["starting"]), spending.starting_gpu_hours),
        (_RESTARTING, spending.restarting_gpu_hours),
        (Entry(*CATEGORIES["unreported"]), spending.unreported_gpu_hours),
    )
    share = spending.productive_share
    return Stack(name, parts, "" if share is None else f"{share:.0%}")


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


# -- Formats what the GPU-hours of a team have bought, in lines of at most 80 columns -----------


_NAME = 20
_BAR = 24
_MARGIN = 11
_MOST_RUNS, _MOST_UNREAD = 20, 5


def team_lines(report: TeamReport) -> Iterator[str]:
    """Format the window, its totals, and tables by cause, user, project, cluster, day and run.

    Lines have at most 80 columns.
    """
    whole, used_before = report.total, report.previous.gpu_hours
    so_far = ", so far" if report.in_progress else ""
    span = f"{_moment(report.begin)} to {_moment(report.end)}, {report.zone}"
    yield from wrapped(f"GPU-hours of {report.title}{so_far}: {span}", "", hang=2)
    if not whole.runs:
        yield "No run had nodes or waited for them in this time"
        yield from _notes(report)
        return
    change = f"{whole.gpu_hours / used_before - 1:+.0%}" if used_before else "new"
    before = f"{change}, {short_hours(used_before)} in the same time before"
    productive = f"{short_hours(whole.productive_gpu_hours)} GPU-hours ({_share(whole)})"
    lost = (
        ("redone steps", whole.redone_gpu_hours),
        ("saving", whole.saving_gpu_hours),
        ("between steps", whole.between_gpu_hours),
        ("starting", whole.starting_gpu_hours),
        ("detecting and restarting", whole.restarting_gpu_hours),
    )
    waited = ", ".join(
        f"{name} {short_duration(hours * 3600) if hours > 0 else '-'}"
        for name, hours in (
            ("in the queue", whole.queue_hours),
            ("held or stopped", whole.held_hours),
            ("down", whole.down_hours),
        )
    )
    # The steps that are in final weights, and what they were trained on.
    steps = whole.known_steps
    bought = ["steps were not reported" if steps is None else f"{steps:,} steps"]
    bought += [f"{amount(whole.tokens)} tokens"] if whole.tokens else []
    bought += [f"{amount(whole.images)} images"] if whole.images else []
    bought += [f"{whole.redone_steps:,} steps trained again"] if whole.redone_steps else []
    yield from facts(
        ("Used", f"{short_hours(whole.gpu_hours)} GPU-hours ({before})"),
        ("Productive", f"{productive}, {short_hours(whole.lost_gpu_hours)} lost"),
        ("Lost", ", ".join(f"{name} {short_hours(hours)}" for name, hours in lost)),
        *(
            [("Unknown", f"{short_hours(whole.unreported_gpu_hours)} {_NOT_REPORTED}")]
            if whole.unreported_gpu_hours
            else []
        ),
        *(
            (
                "Money",
                f"{money(cost.total)} {cost.currency}: {money(cost.productive)} productive, "
                f"{money(cost.lost)} lost",
            )
            for cost in whole.costs
        ),
        ("Bought", ", ".join(bought)),
        ("No nodes", f"{waited} (time of runs, which costs no GPU-hours)"),
        margin=_MARGIN,
    )

    def or_dash(hours: float) -> str:
        return short_hours(hours) if hours else "-"

    if report.by_cause:
        yield ""
        yield from causes_table(report, "Lost by", or_dash).text(_NAME)
    for word, groups in _groupings(report):
        table = groups_table(word, groups, report, or_dash)
        yield ""
        yield from table.without("Steps", "Tokens", "Queue").text(_NAME)
    yield ""
    yield from _days(report.by_period)
    yield ""
    yield from _run_lines(report)
    yield from _notes(report)


def _share(spending: Spending) -> str:
    return "-" if spending.productive_share is None else f"{spending.productive_share:.1%}"


def _days(periods: Sequence[PeriodSpending]) -> Iterator[str]:
    """Draw a bar per day (or week): `#` is productive, `.` lost or unknown."""
    most = max((one.spending.gpu_hours for one in periods), default=0.0)
    title, legend = "WEEK OF" if is_weekly(periods) else "DAY", "# productive  . lost"
    if any(one.spending.unreported_gpu_hours for one in periods):
        legend = "# productive  . the rest"
    yield f"{title:<15}{legend:<{_BAR}}  GPU-HOURS  PRODUCTIVE"
    for one in periods:
        spending = one.spending
        used = round(spending.gpu_hours / most * _BAR) if most else 0
        filled = min(used, round(spending.productive_gpu_hours / most * _BAR)) if most else 0
        bar = "#" * filled + "." * (used - filled)
        day, hours = one.first_day.strftime("%a %Y-%m-%d"), short_hours(spending.gpu_hours)
        yield f"{day:<15}{bar:<{_BAR}}  {hours:>9}  {_share(spending):>10}"


def _run_lines(report: TeamReport) -> Iterator[str]:
    """List the runs with most GPU-hours; names take the columns that the figures leave."""
    shown = report.runs[:_MOST_RUNS]
    figures = [
        (
            "?" if run.gpus is None else short_hours(run.spending.gpu_hours),
            _share(run.spending),
            "-" if run.spending.known_steps is None else f"{run.spending.known_steps:,}",
            " + ".join(f"{money(cost.total)} {cost.currency}" for cost in run.spending.costs)
            or "-",
        )
        for run in shown
    ]
    headers = ("GPU-HOURS", "PRODUCTIVE", "STEPS", "COST")
    used = sum(2 + max(map(len, column)) for column in zip(headers, *figures, strict=True))
    left = LINE_WIDTH - used - 4
    user, project = min(10, left // 4), min(12, left // 4)
    rows = [
        (
            shortened(run.run_id, left - user - project),
            shortened(run.user, user),
            shortened(run.project, project),
            *of_run,
        )
        for run, of_run in zip(shown, figures, strict=True)
    ]
    columns = ("RUN", "USER", "PROJECT", *headers)
    yield from columns_text(columns, rows, [False] * 3 + [True] * len(headers))
    if len(report.runs) > len(shown):
        more = len(report.runs) - len(shown)
        yield f"and {more:,} more with fewer GPU-hours (`--csv -` has all)"


def _notes(report: TeamReport) -> Iterator[str]:
    """Say what is not counted."""
    notes = []
    if report.runs_without_gpus:
        names = ", ".join(report.runs_without_gpus[:_MOST_UNREAD])
        notes.append(f"GPU-hours of {len(report.runs_without_gpus)} runs are unknown: {names}")
    if report.total.unpriced_gpu_hours:
        hours = short_hours(report.total.unpriced_gpu_hours)
        notes.append(f"{hours} GPU-hours have no price: their profiles have no `prices`")
    if report.unreadable:
        notes.append(f"{len(report.unreadable):,} runs could not be read and are not counted:")
        notes += [f"  {one.run_id}: {one.reason}" for one in report.unreadable[:_MOST_UNREAD]]
        left = len(report.unreadable) - _MOST_UNREAD
        notes += [f"  and {left:,} more"] if left > 0 else []
    if notes:
        yield ""
    for note in notes:
        yield from wrapped(printable_line(note), "", hang=4)


# -- Writes the report about a team as CSV: one row per run, category and cause -----------------


COLUMNS = (
    "begin",
    "end",
    "run",
    "directory",
    "user",
    "project",
    "cluster",
    "engine",
    "gpus",
    "category",
    "cause",
    "hours",
    "gpu_hours",
    "cost",
    "currency",
)
# A spreadsheet takes a cell that begins so for a formula.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def csv_text(report: TeamReport) -> str:
    """Write the table; numbers with all their digits, unknown ones empty.

    Raises UsageError where pandas is not installed.
    """
    try:
        import pandas  # type: ignore[import-untyped]
    except ImportError as error:
        raise UsageError(
            "--csv is written by pandas, which is not installed",
            hint="`pip install pandas`, or `--json` for the same figures",
        ) from error
    begin, end = (moment.isoformat(timespec="seconds") for moment in (report.begin, report.end))
    rows = [
        (
            begin,
            end,
            _text(run.run_id),
            _text(run.directory),
            _text(run.user),
            _text(run.project),
            _text(run.cluster),
            run.engine,
            run.gpus,
            str(part.category),
            _text(part.cause or ""),
            part.hours,
            part.gpu_hours if run.gpus is not None else None,
            part.cost if run.gpus is not None else None,
            part.currency,
        )
        for run in report.runs
        for part in run.parts
    ]
    table = pandas.DataFrame(rows, columns=list(COLUMNS)).astype({"gpus": "Int64"})
    return str(table.to_csv(index=False, lineterminator="\n"))


def _text(text: str) -> str:
    return f"'{text}" if text.startswith(_FORMULA) else text
