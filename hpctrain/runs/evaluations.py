"""Shows what evaluation jobs have found, and submits them from a login node.

Belongs here: rows for the commands, one pass for `watch`. Does not belong here: the records
(`hpctrain.records.evaluations`), submitting itself (`hpctrain.supervise.evaluation_jobs`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer

from hpctrain.base import clock
from hpctrain.base.errors import HpctrainError, SlurmError, SlurmUnreachableError
from hpctrain.checkpoints.discover import saving_epochs
from hpctrain.job.job_queries import find_jobs
from hpctrain.page.text import aligned, is_numeric, or_dash, paragraph
from hpctrain.records.evaluations import (
    Evaluation,
    EvaluationState,
    newest_of_each_step,
    read_evaluations_of,
    read_settings,
    waiting_evaluations,
)
from hpctrain.records.find import RunFiles
from hpctrain.records.jobs import slurm_cluster_of
from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import Event
from hpctrain.records.run_records import Progress, read_record
from hpctrain.slurm.client import SlurmClient
from hpctrain.supervise.evaluation_jobs import EvaluationPass

# A supervisor that lives makes its own passes; a trainer that is silent for longer has none.
_SUPERVISED_SECONDS = 300.0


class EvaluationRow(EvaluationState):
    """One evaluation of one checkpoint; `log` is that of its newest job, if it has begun."""

    log: str | None


class EvaluatedDocument(BaseModel):
    """A document about a run, with the results of its evaluation jobs if it has some."""

    model_config = ConfigDict(frozen=True)

    evaluations: tuple[EvaluationRow, ...] = ()

    @model_serializer(mode="wrap")
    def _without_empty(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        document: dict[str, Any] = serialize(self)
        return (
            document
            if self.evaluations
            else {name: value for name, value in document.items() if name != "evaluations"}
        )


def evaluation_rows(run: RunFiles) -> tuple[EvaluationRow, ...]:
    """List results and states by step and name, those of checkpoints that wait as well."""
    try:
        settings = read_settings(run.layout)
    except OSError:  # of another user, or for a moment: nothing is decided by these rows
        return ()
    if settings is None:
        return ()
    known = read_evaluations_of(run.layout)
    waiting = waiting_evaluations(settings, known, saving_epochs(run.layout.checkpoints))
    every = {(one.name, one.step, one.epoch): one for _, one in waiting} | known
    return tuple(_row(run.layout, one) for one in newest_of_each_step(list(every.values())))


def _row(layout: RunLayout, one: Evaluation) -> EvaluationRow:
    log = None
    if one.job_id is not None:
        path = layout.evaluation_log(one.name, one.step, one.attempt, one.job_id)
        log = str(path) if path.exists() else None
    state = one.state
    if one.state in ("failed", "refused") and not one.settled:
        state = "waiting"
    elif one.state == "refused":
        state = "failed"
    return EvaluationRow.model_validate({**vars(one), "state": state, "log": log})


def newest_metrics(rows: Sequence[EvaluationRow]) -> dict[str, float]:
    """Return the newest value of each metric, as `NAME/METRIC`."""
    found: dict[str, float] = {}
    for row in rows:
        for metric, value in (row.metrics or {}).items():
            found[f"{row.name}/{metric}"] = value
    return found


def submit_evaluations(
    runs: Sequence[RunFiles], slurm: SlurmClient, *, act: bool
) -> tuple[str, ...]:
    """Submit what no supervisor submits any more, and record lost jobs; returns lines for people.

    Evaluations of another cluster are left to a pass there. Without `act` the lines say what would
    be done. Raises SlurmUnreachableError.
    """
    lines: list[str] = []
    waiting: list[tuple[RunFiles, list[EvaluationRow]]] = []
    events: dict[str, Sequence[Event]] = {}
    for run in runs:
        if run.unreadable or not run.layout.evaluation_config.exists():
            continue
        if run.owner_id != os.getuid() or _is_supervised(run.layout):
            continue
        try:
            waits = [row for row in evaluation_rows(run) if row.state not in ("done", "failed")]
            if waits:
                events[run.run_id] = run.ledger.events()
                waiting.append((run, waits))
        except (HpctrainError, OSError) as error:
            lines.append(f"{run.run_id}  evaluations: {error}")
    found = find_jobs([run for run, _ in waiting], slurm, events, silent=False)
    for run, waits in waiting:
        jobs = found[run.run_id]
        if not act:
            new = [row for row in waits if row.state == "waiting" and jobs.elsewhere is None]
            lines += [
                f"{run.run_id}  evaluation {row.name} of step {row.step}: would submit"
                for row in new
            ]
            continue
        try:
            there = slurm.at(cluster=slurm_cluster_of(events[run.run_id]))
            here = jobs.here or there.cluster_name()
            home = jobs.elsewhere or here
            one = EvaluationPass(run.layout, there, "watch", cluster=here, home=home)
            one.make()
            lines += [f"{run.run_id}  {line}" for line in one.lines]
        except SlurmUnreachableError:
            raise
        except (SlurmError, HpctrainError, OSError) as error:
            lines.append(f"{run.run_id}  evaluations: {error}")
    return tuple(lines)


def _is_supervised(layout: RunLayout) -> bool:
    """Return True while the training job lives and sbatch works there."""
    if layout.done.exists():
        return False
    progress = read_record(layout.progress, Progress)
    if progress is None or clock.now() - progress.time > _SUPERVISED_SECONDS:
        return False
    return not any(
        one.state == "refused" and one.refused_by == "supervisor"
        for one in read_evaluations_of(layout).values()
    )


def evaluations_of_runs(runs: Path) -> list[RunFiles]:
    """List the runs that have evaluation jobs, finished ones too; none that others keep private."""
    from hpctrain.records.find import all_runs

    return [
        run
        for run in all_runs(runs)
        if not run.unreadable and run.layout.evaluation_config.exists()
    ]


# -- Formats results of evaluation jobs, for the pages of runs ----------------------------------


def evaluation_lines(rows: Sequence[EvaluationRow], most: int | None = None) -> Iterator[str]:
    """List evaluations, newest step first, at most so many; failures with reason and log."""
    ordered = sorted(rows, key=lambda row: (-row.step, row.name))
    shown = ordered[:most]
    cells = [[f"{row.step:,}", row.name, row.state, or_dash(row.job_id)] for row in shown]
    grid = [("STEP", "EVALUATION", "STATE", "JOB"), *cells]
    numeric = [is_numeric([line[column] for line in cells]) for column in range(4)]
    metrics = ["METRICS"]
    for row in shown:
        numbers = (f"{name} {value:.6g}" for name, value in (row.metrics or {}).items())
        metrics.append("-" if row.metrics is None else ", ".join(numbers))
    for line, words in zip(aligned(grid, numeric), metrics, strict=True):
        first = "  ".join(line)
        yield from paragraph(words, f"{first}  ") or [first.rstrip()]
    for row in shown:
        if row.state != "done" and row.reason:
            text = f"{row.name} of step {row.step:,}, attempt {row.attempt}: {row.reason}"
            yield from paragraph(text, hang=2)
            if row.log is not None:
                yield f"  {row.log}"
    if len(ordered) > len(shown):
        yield f"and {len(ordered) - len(shown)} of older checkpoints"
