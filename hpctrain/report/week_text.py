"""Formats what the GPU-hours of a team have bought, in lines of at most 80 columns.

Belongs here: tables and labels. Does not belong here: any number that is not in the document.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpctrain.base.printable_text import printable_line
from hpctrain.base.units import short_duration, short_hours
from hpctrain.page.text import LINE_WIDTH, columns_text, facts, paragraph, shortened
from hpctrain.report.team_report import PeriodSpending, RunSpending, TeamReport
from hpctrain.report.team_tally import Cost, Spending
from hpctrain.report.week_page import amount, causes_table, groups_table, is_weekly, money

_NAME = 20
_BAR = 24
_MARGIN = 11
_MOMENT = "%Y-%m-%d %H:%M"
_MOST_RUNS, _MOST_UNREAD = 20, 5


def team_lines(report: TeamReport) -> Iterator[str]:
    """Format the window, its totals, and tables by cause, user, project, cluster, day and run."""
    yield from _head(report)
    whole = report.total
    if not whole.runs:
        yield from _notes(report)
        return
    if report.by_cause:
        yield ""
        yield from causes_table(report, "Lost by", _before).text(_NAME)
    for word, groups in (
        ("user", report.by_user),
        ("project", report.by_project),
        ("cluster", report.by_cluster),
    ):
        table = groups_table(word, groups, report, _before)
        yield ""
        yield from table.without("Steps", "Tokens", "Queue").text(_NAME)
    yield ""
    yield from _days(report.by_period)
    yield ""
    yield from _runs(report)
    yield from _notes(report)


def _head(report: TeamReport) -> Iterator[str]:
    whole = report.total
    begin, end = (moment.strftime(_MOMENT) for moment in (report.begin, report.end))
    so_far = ", so far" if report.in_progress else ""
    yield from paragraph(
        f"GPU-hours of {report.title}{so_far}: {begin} to {end}, {report.zone}", "", hang=2
    )
    if not whole.runs:
        yield "No run had nodes or waited for them in this time"
        return
    change = _change(whole.gpu_hours, report.previous.gpu_hours)
    before = f"{change}, {short_hours(report.previous.gpu_hours)} in the same time before"
    share = "-" if whole.productive_share is None else f"{whole.productive_share:.1%}"
    productive = f"{short_hours(whole.productive_gpu_hours)} GPU-hours ({share})"
    lost = (
        ("redone steps", whole.redone_gpu_hours),
        ("saving", whole.saving_gpu_hours),
        ("between steps", whole.between_gpu_hours),
        ("starting", whole.starting_gpu_hours),
        ("detecting and restarting", whole.restarting_gpu_hours),
    )
    waited = (
        ("in the queue", whole.queue_hours),
        ("held or stopped", whole.held_hours),
        ("down", whole.down_hours),
    )
    waits = ", ".join(f"{name} {_time(hours)}" for name, hours in waited)
    yield from facts(
        ("Used", f"{short_hours(whole.gpu_hours)} GPU-hours ({before})"),
        ("Productive", f"{productive}, {short_hours(whole.lost_gpu_hours)} lost"),
        ("Lost", ", ".join(f"{name} {short_hours(hours)}" for name, hours in lost)),
        *(("Money", _costs(cost)) for cost in whole.costs),
        ("Bought", _bought(whole)),
        ("No nodes", f"{waits} (time of runs, which costs no GPU-hours)"),
        margin=_MARGIN,
    )


def _costs(cost: Cost) -> str:
    parts = f"{money(cost.productive)} productive, {money(cost.lost)} lost"
    return f"{money(cost.total)} {cost.currency}: {parts}"


def _bought(spending: Spending) -> str:
    """Count the steps that are in final weights, and what they were trained on."""
    words = [f"{spending.steps:,} steps"]
    words += [f"{amount(spending.tokens)} tokens"] if spending.tokens else []
    words += [f"{amount(spending.images)} images"] if spending.images else []
    words += [f"{spending.redone_steps:,} steps trained again"] if spending.redone_steps else []
    return ", ".join(words)


def _before(hours: float) -> str:
    return short_hours(hours) if hours else "-"


def _days(periods: Sequence[PeriodSpending]) -> Iterator[str]:
    """Draw a bar per day (or week): `#` is productive, `.` lost."""
    most = max((one.spending.gpu_hours for one in periods), default=0.0)
    title, legend = "WEEK OF" if is_weekly(periods) else "DAY", "# productive  . lost"
    yield f"{title:<15}{legend:<{_BAR}}  GPU-HOURS  PRODUCTIVE"
    for one in periods:
        spending = one.spending
        used = round(spending.gpu_hours / most * _BAR) if most else 0
        filled = min(used, round(spending.productive_gpu_hours / most * _BAR)) if most else 0
        bar = "#" * filled + "." * (used - filled)
        share = spending.productive_share
        percent = "-" if share is None else f"{share:.1%}"
        day = one.first_day.strftime("%a %Y-%m-%d")
        hours = short_hours(spending.gpu_hours)
        yield f"{day:<15}{bar:<{_BAR}}  {hours:>9}  {percent:>10}"


def _runs(report: TeamReport) -> Iterator[str]:
    """List the runs with most GPU-hours; names take the columns that the figures leave."""
    shown = report.runs[:_MOST_RUNS]
    figures = [_figures(run) for run in shown]
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


def _figures(run: RunSpending) -> tuple[str, str, str, str]:
    """Write the figures of one run; its money is of one currency."""
    spent = run.spending
    share = spent.productive_share
    return (
        "?" if run.gpus is None else short_hours(spent.gpu_hours),
        "-" if share is None else f"{share:.1%}",
        f"{spent.steps:,}",
        " + ".join(f"{money(cost.total)} {cost.currency}" for cost in spent.costs) or "-",
    )


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
        yield from paragraph(printable_line(note), "", hang=4)


def _time(hours: float) -> str:
    return short_duration(hours * 3600) if hours > 0 else "-"


def _change(now: float, before: float) -> str:
    """Write by how much an amount has changed: `+12%`."""
    return f"{now / before - 1:+.0%}" if before else "new"
