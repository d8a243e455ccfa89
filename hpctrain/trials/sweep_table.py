"""Collects the table of a sweep: state, results and cost of every point, the best first; its text.

Belongs here: one query of Slurm for all runs, reading their directories, the order of the rows,
columns and sentences. Does not belong here: submitting (`sweep`), planning (`sweep_plans`).
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.base.errors import InvalidInputError
from hpctrain.base.frozen import Frozen
from hpctrain.base.units import short_hours
from hpctrain.page.text import columns_text, paragraph
from hpctrain.records.find import RunFiles
from hpctrain.records.layout import RunLayout
from hpctrain.records.run_records import lineage, read_evaluations
from hpctrain.records.sweeps import SweepLayout, SweepPoint, SweepRecord, all_sweeps
from hpctrain.runs.evaluations import evaluation_rows, newest_metrics
from hpctrain.runs.goodput import goodput
from hpctrain.runs.state import RunState
from hpctrain.runs.status import RunStatus, statuses
from hpctrain.slurm.client import SlurmClient
from hpctrain.trials.sweep_grid import short_fields

if TYPE_CHECKING:
    from hpctrain.trials.sweep_plans import SweepPlan


_REFUSED = "REFUSED"
REMOVED = "REMOVED"


class SweepRow(Frozen):
    """One point. Losses and hours are absent where they are not known.

    `eval_loss` is the best evaluation, `eval_step` its step. `gpu_hours` were used so far,
    `forecast_gpu_hours` is the forecast from before the submission. `metrics` are the newest
    results of its evaluation jobs, as `NAME/METRIC`.
    """

    values: tuple[str, ...]
    name: str
    run_id: str | None
    state: str
    reason: str
    job_id: int | None = None
    step: int | None = None
    target_step: int | None = None
    loss: float | None = None
    eval_loss: float | None = None
    eval_step: int | None = None
    gpu_hours: float | None = None
    forecast_gpu_hours: float | None = None
    metrics: Mapping[str, float] = {}


class SweepTable(Frozen):
    """All points of a sweep, in the order of their results."""

    sweep_id: str
    run_name: str
    profile_name: str
    fields: tuple[str, ...]
    short_fields: tuple[str, ...]
    at_a_time: int | None
    cancelled: bool
    sorted_by: str
    gpu_hours: float
    forecast_gpu_hours: float | None
    rows: tuple[SweepRow, ...]


class SweepSummary(Frozen):
    """One line of the list of sweeps."""

    sweep_id: str
    points: int
    fields: tuple[str, ...]
    states: dict[str, int]


def runs_of_sweep(layout: SweepLayout, record: SweepRecord) -> dict[str, RunFiles]:
    """Open the runs of all points that have one, in the order of the points, by id."""
    ids = [point.run_id for point in record.points if point.run_id is not None]
    return {run_id: RunFiles(RunLayout((layout.runs / run_id).absolute())) for run_id in ids}


def sweep_table(layout: SweepLayout, slurm: SlurmClient) -> SweepTable:
    """Read the record and the runs; at most one squeue and one sacct for all of them."""
    record = layout.read()
    runs = _present(runs_of_sweep(layout, record))
    found = {row.run_id: row for row in statuses(list(runs.values()), slurm)}
    rows = []
    for point in record.points:
        refused = point.run_id is None
        run, status = runs.get(point.run_id or ""), found.get(point.run_id or "")
        row = SweepRow(
            values=point.values,
            name=point.name,
            run_id=point.run_id,
            state=_REFUSED if refused else _without_directory(point),
            reason=point.refusal or "" if refused else "its run directory is not there",
            forecast_gpu_hours=None if refused else point.gpu_hours,
        )
        rows.append(row if run is None or status is None else _filled(row, run, status))
    evaluated = any(row.eval_loss is not None for row in rows)
    # by the best evaluation, those without one behind by their training loss
    rows.sort(
        key=lambda row: (
            row.eval_loss is None,
            row.eval_loss or 0.0,
            row.loss is None,
            row.loss or 0.0,
        )
    )
    forecasts = [point.gpu_hours for point in record.points if point.run_id is not None]
    known = [hours for hours in forecasts if hours is not None]
    return SweepTable(
        sweep_id=record.sweep_id,
        run_name=record.run_name,
        profile_name=record.profile_name,
        fields=record.fields,
        short_fields=tuple(short_fields(record.fields)),
        at_a_time=record.at_a_time,
        cancelled=layout.is_cancelled(record),
        sorted_by="evaluation loss" if evaluated else "training loss",
        gpu_hours=sum(row.gpu_hours or 0.0 for row in rows),
        forecast_gpu_hours=sum(known) if len(known) == len(forecasts) else None,
        rows=tuple(rows),
    )


def sweep_summaries(runs: Path, slurm: SlurmClient) -> list[SweepSummary]:
    """List the sweeps of a directory of runs with the states of their points; one squeue."""
    records = []
    for layout in all_sweeps(runs):
        try:
            records.append((layout, layout.read()))
        except InvalidInputError:
            continue  # `sweep status NAME` says what is wrong with it
    every: dict[str, RunFiles] = {}
    for layout, record in records:
        every |= _present(runs_of_sweep(layout, record))
    states = {row.run_id: row.state.value for row in statuses(list(every.values()), slurm)}
    return [
        SweepSummary(
            sweep_id=record.sweep_id,
            points=len(record.points),
            fields=record.fields,
            states=Counter(
                _REFUSED
                if point.run_id is None
                else states.get(point.run_id, _without_directory(point))
                for point in record.points
            ),
        )
        for _, record in records
    ]


def _without_directory(point: SweepPoint) -> str:
    """Name the state of a point whose run directory is not there."""
    return REMOVED if point.submitted else RunState.NOT_SUBMITTED.value


def _present(runs: dict[str, RunFiles]) -> dict[str, RunFiles]:
    """Leave out runs whose directories were removed or not written yet."""
    return {run_id: run for run_id, run in runs.items() if run.layout.ledger.exists()}


def _filled(row: SweepRow, run: RunFiles, status: RunStatus) -> SweepRow:
    """Add what the run directory and Slurm say about the run of a point."""
    best = min(
        lineage(read_evaluations(run.layout)),
        key=lambda one: float("inf") if one.eval_loss is None else one.eval_loss,
        default=None,
    )
    metrics, gpu_hours = {}, None
    if status.readable:
        metrics = newest_metrics(evaluation_rows(run))
        gpu_hours = goodput(run).gpu_hours
    return row.model_copy(
        update={
            "state": status.state.value,
            "reason": status.reason,
            "job_id": status.job_id,
            "step": status.step,
            "target_step": status.target_step,
            "loss": status.loss,
            "eval_loss": best.eval_loss if best else None,
            "eval_step": best.step if best else None,
            "metrics": metrics,
            "gpu_hours": gpu_hours,
        }
    )


# -- Formats sweeps: the points before they are submitted, and the table of results -------------


def plan_lines(plan: SweepPlan, at_a_time: int | None, width: int) -> Iterator[str]:
    """List the points, why some cannot run, and what the others are forecast to take."""
    rows = []
    for one in plan.points:
        name = one.run_id or one.point.name
        hours = "-" if one.gpu_hours is None else short_hours(one.gpu_hours)
        if one.prepared is not None:
            rows.append([name, f"{one.prepared.plan.layout} on {one.prepared.plan.nodes}", hours])
        elif one.existing:
            rows.append([name, "there already", hours])
        else:
            rows.append([name, "removed" if one.removed else "cannot run", "-"])
    yield from columns_text(("RUN", "LAYOUT", "GPU-H"), rows)
    for one in plan.refused:
        text = f"{one.point.name}: left out: {str(one.error).splitlines()[0]}"
        yield from paragraph(text, hang=2, width=width)
    runnable = [one for one in plan.points if one.runs]
    total = plan.gpu_hours
    forecast = (
        "GPU-hours unknown" if total is None else f"{short_hours(total)} GPU-hours by forecast"
    )
    limit = at_a_time or plan.record.at_a_time
    pace = f", {limit} at a time" if limit is not None and limit < len(runnable) else ""
    text = f"sweep `{plan.layout.directory.name}`: {len(runnable)} runs{pace}, {forecast}"
    yield from paragraph(text, hang=2, width=width)


def table_lines(shown: SweepTable, width: int) -> Iterator[str]:
    """Show the table on so many columns. Names of runs are never cut.

    Where it is too wide, the values are left out, because the names of the runs contain them;
    where that is not enough, each run has two lines.
    """
    metrics = metric_names(shown)
    fields = tuple(name.upper() for name in shown.short_fields)
    heads = ("STATE", "STEP", "LOSS", "EVAL", "GPU-H")
    names = [row.run_id or row.name for row in shown.rows]
    results = [_results(row, metrics) for row in shown.rows]
    rows = [
        [name, *row.values, *cells]
        for name, row, cells in zip(names, shown.rows, results, strict=True)
    ]
    lines = columns_text(("RUN", *fields, *heads, *metrics), rows)
    named = all(value in row.name for row in shown.rows for value in row.values)
    if max(map(len, lines)) > width and named:
        rows = [[name, *cells] for name, cells in zip(names, results, strict=True)]
        lines = columns_text(("RUN", *heads, *metrics), rows)
    while max(map(len, lines)) > width:
        rows = [[*row.values, *_results(row, metrics)] for row in shown.rows]
        body = columns_text((*fields, *heads, *metrics), rows)
        lines = ["RUN", f"  {body[0]}"]
        for name, line in zip(names, body[1:], strict=True):
            lines += [name, f"  {line}"]
        if not metrics:
            break
        metrics = metrics[:-1]
    yield from lines
    for name, row in zip(names, shown.rows, strict=True):
        if row.reason and row.state not in ("RUNNING", "PENDING", "DONE"):
            text = f"{name}: {row.state}: {row.reason}"
            yield from paragraph(text, hang=2, width=width)
    forecast = shown.forecast_gpu_hours
    of = "" if forecast is None else f" of {short_hours(forecast)} by forecast"
    text = (
        f"{states_text(Counter(row.state for row in shown.rows))}; "
        f"{short_hours(shown.gpu_hours)} GPU-hours used{of}; sorted by {shown.sorted_by}"
    )
    yield from paragraph(text, hang=2, width=width)


def states_text(states: Mapping[str, int]) -> str:
    """Write how many points have which state."""
    return ", ".join(f"{count} {state.lower()}" for state, count in states.items())


def _results(row: SweepRow, metrics: Sequence[str]) -> list[str]:
    used = "-" if row.gpu_hours is None else short_hours(row.gpu_hours)
    if row.forecast_gpu_hours is not None and row.gpu_hours is not None:
        used = f"{used}/{short_hours(row.forecast_gpu_hours)}"
    measured = [row.metrics.get(name) for name in metrics]
    return [
        row.state,
        "-" if row.step is None else f"{row.step:,}/{row.target_step or 0:,}",
        "-" if row.loss is None else f"{row.loss:.4f}",
        "-" if row.eval_loss is None else f"{row.eval_loss:.4f}",
        used,
        *("-" if value is None else f"{value:.5g}" for value in measured),
    ]


def metric_names(shown: SweepTable) -> tuple[str, ...]:
    """List the metrics of all evaluation jobs of the sweep."""
    return tuple(sorted({name for row in shown.rows for name in row.metrics}))


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
