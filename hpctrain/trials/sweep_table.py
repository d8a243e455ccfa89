"""Collects the table of a sweep: state, results and cost of every point, the best first.

Belongs here: one query of Slurm for all runs, reading their directories, the order of the rows.
Does not belong here: submitting (`sweep`), columns (`hpctrain.trials.sweep_text`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from hpctrain.base import clock
from hpctrain.base.errors import InvalidInputError
from hpctrain.records.find import RunFiles
from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import Event, EventKind
from hpctrain.records.run_records import lineage, read_evaluations
from hpctrain.records.supervise_config import known_supervise_config
from hpctrain.records.sweeps import SweepLayout, SweepPoint, SweepRecord, all_sweeps
from hpctrain.runs.evaluations import evaluation_rows, newest_metrics
from hpctrain.runs.run_documents import known_plan
from hpctrain.runs.state import ENDS_ATTEMPT, RunState
from hpctrain.runs.status import RunStatus, statuses
from hpctrain.slurm.client import SlurmClient
from hpctrain.trials.sweep_grid import short_fields

_REFUSED = "REFUSED"
REMOVED = "REMOVED"


class SweepRow(BaseModel):
    """One point. Losses and hours are absent where they are not known.

    `eval_loss` is the best evaluation, `eval_step` its step. `gpu_hours` were used so far,
    `forecast_gpu_hours` is the forecast from before the submission. `metrics` are the newest
    results of its evaluation jobs, as `NAME/METRIC`.
    """

    model_config = ConfigDict(frozen=True)

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
    metrics: dict[str, float] = {}


class SweepTable(BaseModel):
    """All points of a sweep, in the order of their results."""

    model_config = ConfigDict(frozen=True)

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


class SweepSummary(BaseModel):
    """One line of the list of sweeps."""

    model_config = ConfigDict(frozen=True)

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
    rows.sort(key=_rank)
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
    found = []
    for _, record in records:
        counts: dict[str, int] = {}
        for point in record.points:
            state = _REFUSED
            if point.run_id is not None:
                state = states.get(point.run_id, _without_directory(point))
            counts[state] = counts.get(state, 0) + 1
        found.append(
            SweepSummary(
                sweep_id=record.sweep_id,
                points=len(record.points),
                fields=record.fields,
                states=counts,
            )
        )
    return found


def _without_directory(point: SweepPoint) -> str:
    """Name the state of a point whose run directory is not there."""
    return REMOVED if point.submitted else RunState.NOT_SUBMITTED.value


def _present(runs: dict[str, RunFiles]) -> dict[str, RunFiles]:
    """Leave out runs whose directories were removed or not written yet."""
    return {run_id: run for run_id, run in runs.items() if run.layout.ledger.exists()}


def _rank(row: SweepRow) -> tuple[bool, float, bool, float]:
    """Order rows: by the best evaluation, those without one behind by their training loss."""
    return (
        row.eval_loss is None,
        row.eval_loss or 0.0,
        row.loss is None,
        row.loss or 0.0,
    )


def _filled(row: SweepRow, run: RunFiles, status: RunStatus) -> SweepRow:
    """Add what the run directory and Slurm say about the run of a point."""
    best = min(
        lineage(read_evaluations(run.layout)),
        key=lambda one: float("inf") if one.eval_loss is None else one.eval_loss,
        default=None,
    )
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
            "metrics": newest_metrics(evaluation_rows(run)) if status.readable else {},
            "gpu_hours": _used_gpu_hours(run, running=status.state is RunState.RUNNING)
            if status.readable
            else None,
        }
    )


def _used_gpu_hours(run: RunFiles, *, running: bool) -> float | None:
    """Multiply the time in which jobs held nodes by the GPUs of these, spare nodes included."""
    plan, config = known_plan(run.layout), known_supervise_config(run.layout.supervise_config)
    if plan is None:
        return None
    nodes = plan.nodes.nodes + (config.spare_nodes if config else 0)
    seconds = held_seconds(run.ledger.events(), clock.now() if running else None)
    return nodes * plan.nodes.gpus_per_node * seconds / 3600


def held_seconds(events: Sequence[Event], now: float | None) -> float:
    """Add up the attempts; one without an end lasts until the last event before the next one.

    `now` is the end of the newest attempt if that still runs, else None.
    """
    held, began, last = 0.0, None, 0.0
    for event in events:
        if event.event is EventKind.ATTEMPT_STARTED:
            if began is not None:
                held += last - began
            began = event.time
        elif began is not None and event.event is EventKind.ACTION and event.action in ENDS_ATTEMPT:
            held += event.time - began
            began = None
        if event.event not in (EventKind.ATTEMPT_LOST, EventKind.WATCH):
            last = event.time
    if began is not None:
        held += (last if now is None else now) - began
    return held
