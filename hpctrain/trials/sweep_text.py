"""Formats sweeps: the points before they are submitted, and the table of results.

Belongs here: columns and sentences. Does not belong here: states and results
(`hpctrain.trials.sweep_table`).
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from hpctrain.base.units import short_hours
from hpctrain.page.text import columns_text, or_dash, paragraph

if TYPE_CHECKING:
    from hpctrain.trials.sweep_plans import PlannedPoint, SweepPlan
    from hpctrain.trials.sweep_table import SweepRow, SweepSummary, SweepTable

_GAP = "  "
_RESULTS = ("STATE", "STEP", "LOSS", "EVAL", "GPU-H")


def plan_lines(plan: SweepPlan, at_a_time: int | None, width: int) -> Iterator[str]:
    """List the points, why some cannot run, and what the others are forecast to take."""
    heads = ("RUN", "LAYOUT", "GPU-H")
    yield from columns_text(heads, [_planned_cells(one) for one in plan.points])
    for one in plan.refused:
        text = f"{one.point.name}: left out: {str(one.error).splitlines()[0]}"
        yield from paragraph(text, "", hang=2, width=width)
    runnable = [one for one in plan.points if one.runs]
    total = plan.gpu_hours
    hours = "GPU-hours unknown" if total is None else f"{short_hours(total)} GPU-hours by forecast"
    limit = at_a_time or plan.record.at_a_time
    pace = f", {limit} at a time" if limit is not None and limit < len(runnable) else ""
    text = f"sweep `{plan.layout.directory.name}`: {len(runnable)} runs{pace}, {hours}"
    yield from paragraph(text, "", hang=2, width=width)


def _planned_cells(one: PlannedPoint) -> list[str]:
    if one.prepared is not None:
        plan = one.prepared.plan
        return [one.prepared.run_id, f"{plan.layout} on {plan.nodes}", _hours(one.gpu_hours)]
    if one.existing:
        return [one.run_id or one.point.name, "there already", _hours(one.gpu_hours)]
    if one.removed:
        return [one.run_id or one.point.name, "removed", "-"]
    return [one.point.name, "cannot run", "-"]


def table_lines(shown: SweepTable, width: int) -> Iterator[str]:
    """Show the table on so many columns. Names of runs are never cut.

    Where it is too wide, the values are left out, because the names of the runs contain them;
    where that is not enough, each run has two lines.
    """
    metrics = metric_names(shown)
    fields = tuple(name.upper() for name in shown.short_fields)
    heads = (*_RESULTS, *metrics)
    rows = [[_name(row), *row.values, *_results(row, metrics)] for row in shown.rows]
    lines = columns_text(("RUN", *fields, *heads), rows)
    named = all(value in row.name for row in shown.rows for value in row.values)
    if _widest(lines) > width and named:
        rows = [[_name(row), *_results(row, metrics)] for row in shown.rows]
        lines = columns_text(("RUN", *heads), rows)
    while _widest(lines) > width:
        rows = [[*row.values, *_results(row, metrics)] for row in shown.rows]
        body = columns_text((*fields, *_RESULTS, *metrics), rows)
        lines = ["RUN", f"{_GAP}{body[0]}"]
        for row, line in zip(shown.rows, body[1:], strict=True):
            lines += [_name(row), f"{_GAP}{line}"]
        if not metrics:
            break
        metrics = metrics[:-1]
    yield from lines
    for row in shown.rows:
        if row.reason and row.state not in ("RUNNING", "PENDING", "DONE"):
            text = f"{_name(row)}: {row.state}: {row.reason}"
            yield from paragraph(text, "", hang=2, width=width)
    yield from paragraph(_sum(shown), "", hang=2, width=width)


def _sum(shown: SweepTable) -> str:
    counts: dict[str, int] = {}
    for row in shown.rows:
        counts[row.state] = counts.get(row.state, 0) + 1
    states = ", ".join(f"{count} {state.lower()}" for state, count in counts.items())
    forecast = shown.forecast_gpu_hours
    of = "" if forecast is None else f" of {short_hours(forecast)} by forecast"
    return (
        f"{states}; {short_hours(shown.gpu_hours)} GPU-hours used{of}; sorted by {shown.sorted_by}"
    )


def _name(row: SweepRow) -> str:
    return row.run_id or row.name


def metric_names(shown: SweepTable) -> tuple[str, ...]:
    """List the metrics of all evaluation jobs of the sweep."""
    return tuple(sorted({name for row in shown.rows for name in row.metrics}))


def _results(row: SweepRow, metrics: Sequence[str]) -> list[str]:
    step = None if row.step is None else f"{row.step:,}/{row.target_step or 0:,}"
    used = _hours(row.gpu_hours)
    if row.forecast_gpu_hours is not None and row.gpu_hours is not None:
        used = f"{used}/{_hours(row.forecast_gpu_hours)}"
    return [
        row.state,
        or_dash(step),
        or_dash(None if row.loss is None else f"{row.loss:.4f}"),
        or_dash(None if row.eval_loss is None else f"{row.eval_loss:.4f}"),
        used,
        *(or_dash(_number(row.metrics.get(name))) for name in metrics),
    ]


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:.5g}"


def _hours(hours: float | None) -> str:
    return "-" if hours is None else short_hours(hours)


def _widest(lines: Sequence[str]) -> int:
    return max(map(len, lines))


def summary_cells(one: SweepSummary) -> list[str]:
    """Format one line of the list of sweeps."""
    states = ", ".join(f"{count} {state.lower()}" for state, count in one.states.items())
    return [one.sweep_id, str(one.points), ",".join(one.fields), states]


def csv_text(shown: SweepTable) -> str:
    """Write the table as comma-separated values, with all columns and full numbers."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    others = ("values", "metrics")
    columns = [name for name in type(shown.rows[0]).model_fields if name not in others]
    metrics = metric_names(shown)
    writer.writerow([*shown.fields, *columns, *metrics])
    for row in shown.rows:
        cells = [getattr(row, name) for name in columns]
        cells += [row.metrics.get(name) for name in metrics]
        writer.writerow([*row.values, *("" if cell is None else cell for cell in cells)])
    return text.getvalue()
