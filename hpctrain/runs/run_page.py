"""Collects the first page about one run: state, plan against reality, loss, time, what to read.

Belongs here: which facts the page has. Does not belong here: finding them (`status`, `goodput`,
`logs`), text.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Protocol

from pydantic import BaseModel, ConfigDict

from hpctrain.base.formats import NewerFormatError
from hpctrain.records.find import RunFiles
from hpctrain.records.run_records import StepRow, lineage, read_metrics
from hpctrain.records.tracking import tracking_commands
from hpctrain.runs.evaluations import EvaluationRow, evaluation_rows
from hpctrain.runs.goodput import goodput
from hpctrain.runs.logs import job_logs
from hpctrain.runs.notify import NoticeState, notice_states
from hpctrain.runs.run_documents import known_plan
from hpctrain.runs.status import RunStatus
from hpctrain.telemetry.goodput import Goodput

# More points than any terminal has columns of dots.
_CURVE_POINTS = 400


class CurvePoint(BaseModel):
    """The mean loss of the steps up to and including `step`, since the point before."""

    model_config = ConfigDict(frozen=True)

    step: int
    loss: float


class Planned(BaseModel):
    """What the plan promised: seconds of a step, and GPU-hours of all steps without any loss.

    `low_step_seconds` and `high_step_seconds`: the ends of the 80 % interval, None without one.
    """

    model_config = ConfigDict(frozen=True)

    layout: str
    nodes: str
    step_seconds: float | None
    gpu_hours: float | None
    low_step_seconds: float | None = None
    high_step_seconds: float | None = None


class LossRow(StepRow, Protocol):
    """The row of a step, of which only the loss is read."""

    @property
    def loss(self) -> float | None: ...


class RunPage(BaseModel):
    """The page of one run; `log` is the newest log of the job, None before it has started.

    `tracking`: the commands that show its curves elsewhere. `untold`: what people should have been
    told and were not.
    """

    model_config = ConfigDict(frozen=True)

    status: RunStatus
    directory: str
    planned: Planned | None = None
    goodput: Goodput | None = None
    curve: tuple[CurvePoint, ...] = ()
    log: str | None = None
    tracking: tuple[str, ...] = ()
    evaluations: tuple[EvaluationRow, ...] = ()
    untold: tuple[NoticeState, ...] = ()


def run_page(run: RunFiles, row: RunStatus) -> RunPage:
    """Collect the page around the row of `status`; what cannot be read is left out."""
    page = RunPage(status=row, directory=str(run.layout.directory))
    if not row.readable:
        return page
    update: dict[str, object] = {}
    with contextlib.suppress(NewerFormatError, OSError):
        update["planned"] = _planned(run)
        update["goodput"] = goodput(run)
        update["curve"] = loss_curve(run)
        update["evaluations"] = evaluation_rows(run)
    with contextlib.suppress(OSError):
        update["log"] = next((str(path) for path in reversed(job_logs(run))), None)
        update["tracking"] = tuple(tracking_commands(run.layout))
        update["untold"] = tuple(
            one for one in notice_states(run) if one.problem and one.state != "sent"
        )
    return page.model_copy(update=update)


def loss_curve(run: RunFiles, points: int = _CURVE_POINTS) -> tuple[CurvePoint, ...]:
    """Summarize the losses of the steps that count, in at most so many points."""
    return curve_of([row for row in read_metrics(run.layout) if row.loss is not None], points)


def curve_of(rows: Sequence[LossRow], points: int = _CURVE_POINTS) -> tuple[CurvePoint, ...]:
    """Summarize rows that have a loss, in at most so many points of the steps that count."""
    counting = lineage(rows)
    size = max(1, -(-len(counting) // points))
    parts = [counting[start : start + size] for start in range(0, len(counting), size)]
    return tuple(
        CurvePoint(
            step=part[-1].step,
            loss=sum(row.loss for row in part if row.loss is not None) / len(part),
        )
        for part in parts
    )


def _planned(run: RunFiles) -> Planned | None:
    plan = known_plan(run.layout)
    if plan is None:
        return None
    gpu_hours = None
    if plan.step_seconds is not None:
        gpu_hours = plan.step_seconds * plan.batch.train_steps * plan.layout.world_size / 3600
    return Planned(
        layout=str(plan.layout),
        nodes=str(plan.nodes),
        step_seconds=plan.step_seconds,
        gpu_hours=gpu_hours,
        low_step_seconds=plan.certainty.low_step_seconds if plan.certainty else None,
        high_step_seconds=plan.certainty.high_step_seconds if plan.certainty else None,
    )
