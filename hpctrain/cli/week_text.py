"""Formats what the GPU-hours of a team have bought, in lines of at most 80 columns.

Belongs here: tables and labels. Does not belong here: any number that is not in the document.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from hpctrain.actions.team_report import GroupSpending, PeriodSpending, RunSpending, TeamReport
from hpctrain.actions.team_tally import CauseSpending, Cost, Spending
from hpctrain.cli.output import LINE_WIDTH, aligned, paragraph
from hpctrain.printable_text import printable_line
from hpctrain.units import TokenCount, short_duration, short_hours

_NAME = 20
_BAR = 24
_MARGIN = 11
# Less would be shown as 0.00.
_LEAST_SHOWN = 0.005
_MOMENT = "%Y-%m-%d %H:%M"
_MOST_RUNS, _MOST_UNREAD = 20, 5
_LABELS = {
    "redone": "redone steps",
    "saving": "saving",
    "between": "between steps",
    "starting": "starting",
    "detecting": "detecting",
    "restarting": "restarting",
}


def team_lines(report: TeamReport) -> Iterator[str]:
    """Format the window, its totals, and tables by cause, user, project, cluster, day and run."""
    yield from _head(report)
    whole = report.total
    if not whole.runs:
        yield from _notes(report)
        return
    currencies = tuple(cost.currency for cost in whole.costs)
    if report.by_cause:
        yield ""
        yield from _table(
            ("LOST BY", "GPU-HOURS", "OF ALL", *currencies, "BEFORE", "MOSTLY"),
            [
                _cause_row(one, whole, currencies)
                for one in report.by_cause
                if one.gpu_hours >= _LEAST_SHOWN
            ],
        )
    for title, groups in (
        ("USER", report.by_user),
        ("PROJECT", report.by_project),
        ("CLUSTER", report.by_cluster),
    ):
        yield ""
        yield from _table(
            (title, "RUNS", "GPU-HOURS", "PRODUCTIVE", "LOST", *currencies, "BEFORE"),
            [_group_row(one, currencies) for one in groups],
        )
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
    yield from _fact("Used", f"{short_hours(whole.gpu_hours)} GPU-hours ({before})")
    share = "-" if whole.productive_share is None else f"{whole.productive_share:.1%}"
    yield from _fact(
        "Productive",
        f"{short_hours(whole.productive_gpu_hours)} GPU-hours ({share}), "
        f"{short_hours(whole.lost_gpu_hours)} lost",
    )
    lost = (
        ("redone steps", whole.redone_gpu_hours),
        ("saving", whole.saving_gpu_hours),
        ("between steps", whole.between_gpu_hours),
        ("starting", whole.starting_gpu_hours),
        ("detecting and restarting", whole.restarting_gpu_hours),
    )
    words = ", ".join(f"{name} {short_hours(hours)}" for name, hours in lost)
    yield from _fact("Lost", words)
    for cost in whole.costs:
        yield from _fact(
            "Money",
            f"{_money(cost.total)} {cost.currency}: {_money(cost.productive)} productive, "
            f"{_money(cost.lost)} lost",
        )
    yield from _fact("Bought", _bought(whole))
    waited = (
        ("in the queue", whole.queue_hours),
        ("held or stopped", whole.held_hours),
        ("down", whole.down_hours),
    )
    words = ", ".join(f"{name} {_time(hours)}" for name, hours in waited)
    yield from _fact("No nodes", f"{words} (time of runs, which costs no GPU-hours)")


def _bought(spending: Spending) -> str:
    """Count the steps that are in final weights, and what they were trained on."""
    words = [f"{spending.steps:,} steps"]
    words += [f"{_amount(spending.tokens)} tokens"] if spending.tokens else []
    words += [f"{_amount(spending.images)} images"] if spending.images else []
    words += [f"{spending.redone_steps:,} steps trained again"] if spending.redone_steps else []
    return ", ".join(words)


def _cause_row(one: CauseSpending, whole: Spending, currencies: Sequence[str]) -> tuple[str, ...]:
    return (
        _name(one.cause.replace("_", " ")),
        short_hours(one.gpu_hours),
        f"{one.gpu_hours / whole.gpu_hours:.1%}" if whole.gpu_hours else "-",
        *_costs(one.costs, currencies),
        short_hours(one.gpu_hours_before) if one.gpu_hours_before else "-",
        _LABELS[one.mostly],
    )


def _group_row(one: GroupSpending, currencies: Sequence[str]) -> tuple[str, ...]:
    spending = one.spending
    share = spending.productive_share
    return (
        _name(one.name),
        f"{spending.runs:,}",
        short_hours(spending.gpu_hours),
        "-" if share is None else f"{share:.1%}",
        short_hours(spending.lost_gpu_hours),
        *_costs(spending.costs, currencies),
        short_hours(one.gpu_hours_before) if one.gpu_hours_before else "-",
    )


def _days(periods: Sequence[PeriodSpending]) -> Iterator[str]:
    """Draw a bar per day (or week): `#` is productive, `.` lost."""
    most = max((one.spending.gpu_hours for one in periods), default=0.0)
    weekly = any((after.first_day - one.first_day).days > 1 for one, after in pairwise(periods))
    title, legend = "WEEK OF" if weekly else "DAY", "# productive  . lost"
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
            _name(run.run_id, left - user - project),
            _name(run.user, user),
            _name(run.project, project),
            *of_run,
        )
        for run, of_run in zip(shown, figures, strict=True)
    ]
    yield from _table(("RUN", "USER", "PROJECT", *headers), rows, left=3)
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
        " + ".join(f"{_money(cost.total)} {cost.currency}" for cost in spent.costs) or "-",
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


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> Iterator[str]:
    """Align columns: the first `left` ones and words on the left, the others on the right."""
    numeric = [number >= left and header != "MOSTLY" for number, header in enumerate(headers)]
    for line in aligned([headers, *rows], numeric):
        yield "  ".join(line).rstrip()


def _fact(name: str, words: str) -> list[str]:
    return paragraph(words, f"{name:<{_MARGIN}}", hang=_MARGIN, width=LINE_WIDTH)


def _name(text: str, longest: int = _NAME) -> str:
    """Shorten a name to its column."""
    shown = printable_line(text)
    return shown if len(shown) <= longest else f"{shown[: longest - 1]}\N{HORIZONTAL ELLIPSIS}"


def _costs(costs: Sequence[Cost], currencies: Sequence[str]) -> tuple[str, ...]:
    """Write money in a column per currency; of causes all of it is lost."""
    amounts = {cost.currency: _money(cost.total) for cost in costs}
    return tuple(amounts.get(currency, "-") for currency in currencies)


def _money(amount: float) -> str:
    return f"{amount:,.0f}" if amount >= 100 else f"{amount:,.2f}"


def _amount(number: int) -> str:
    """Write a large number with three digits: `13.2B`."""
    return str(TokenCount(float(f"{number:.3g}")))


def _time(hours: float) -> str:
    return short_duration(hours * 3600) if hours > 0 else "-"


def _change(now: float, before: float) -> str:
    """Write by how much an amount has changed: `+12%`."""
    return f"{now / before - 1:+.0%}" if before else "new"
