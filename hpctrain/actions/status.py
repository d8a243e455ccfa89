"""The status of runs: one Slurm query for all of them, then the run directories.

Belongs here: asking, and putting the answers together. Does not belong here: tables.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from hpctrain.actions.runs import RunFiles
from hpctrain.actions.state import Judged, RunState, counted, judge, last_job_id
from hpctrain.errors import SlurmError
from hpctrain.slurm.client import SlurmClient
from hpctrain.slurm.records import JobRecord, by_submission
from hpctrain.store.jobs import generation, submitted_ids
from hpctrain.store.ledger import Event, EventKind
from hpctrain.store.signs import Progress, StepMetrics, read_record, tail_metrics
from hpctrain.supervise.documents import SuperviseConfig
from hpctrain.telemetry.rates import Row, recent_rates

# What `recent_rates` looks at, and the first step of a launch, which it leaves out.
_RECENT_STEPS = 21


class RunStatus(BaseModel):
    """One row of `hpctrain status`; times in seconds, None when unknown."""

    model_config = ConfigDict(frozen=True, defer_build=True)

    run_id: str
    state: RunState
    reason: str
    job_id: int | None
    attempts: int
    step: int | None
    target_step: int | None
    loss: float | None
    step_seconds: float | None
    tokens_per_second: float | None
    mfu: float | None
    checkpoint_step: int | None
    updated_seconds_ago: float | None
    eta_seconds: float | None
    stale: bool


def statuses(runs: Sequence[RunFiles], slurm: SlurmClient) -> list[RunStatus]:
    """The status of each run, in the given order; at most one squeue and one look back."""
    events = {run.run_id: run.ledger.events() for run in runs}
    ids = {
        run.run_id: _ids(events[run.run_id]) if not run.layout.done.exists() else [] for run in runs
    }
    queued, past, asked = _ask(slurm, ids)
    return [
        _status(
            run,
            events[run.run_id],
            _counted(ids[run.run_id], queued),
            asked,
            _counted(ids[run.run_id], past),
        )
        for run in runs
    ]


def _ids(events: Sequence[Event]) -> list[int]:
    """The jobs since the run was last submitted, or submitted again."""
    return submitted_ids(generation(events))


Jobs = dict[int, list[JobRecord]]


def _ask(slurm: SlurmClient, ids: dict[str, list[int]]) -> tuple[Jobs, Jobs, bool]:
    """(jobs in the queue, jobs of the past, whether Slurm answered at all), by submitted id.

    The past of a run that has a job in the queue is of no interest.
    """
    asked_for = [job_id for of_run in ids.values() for job_id in of_run]
    if not asked_for:
        return {}, {}, True
    try:
        queued = by_submission(slurm.jobs(asked_for).values())
    except SlurmError:
        return {}, {}, False
    gone = [
        job_id
        for of_run in ids.values()
        if not any(job_id in queued for job_id in of_run)
        for job_id in of_run
    ]
    try:
        past = by_submission(slurm.history(gone).values()) if gone else {}
    except SlurmError:
        past = {}
    return queued, past, True


def _counted(ids: Sequence[int], jobs: Jobs) -> JobRecord | None:
    """The job of one run that says what it is doing."""
    return counted([job for job_id in ids for job in jobs.get(job_id, [])])


def _status(
    run: RunFiles,
    events: Sequence[Event],
    queued: JobRecord | None,
    asked: bool,
    past: JobRecord | None,
) -> RunStatus:
    done = run.layout.done.exists()
    judged = judge(events, done=done, queued=queued, asked=asked, past=past)
    progress = read_record(run.layout.progress, Progress)
    config = _config(run)
    rates = recent_rates([_row(metrics) for metrics in tail_metrics(run.layout, _RECENT_STEPS)])
    age = None if progress is None else max(0.0, time.time() - progress.time)
    step = progress.step if progress else None
    target = config.target_step if config else progress.target_step if progress else None
    left = None if target is None or step is None else max(0, target - step)
    running = judged.state is RunState.RUNNING
    return RunStatus(
        run_id=run.run_id,
        state=judged.state,
        reason=judged.reason,
        job_id=queued.job_id if queued else last_job_id(events),
        attempts=sum(event.event is EventKind.ATTEMPT_STARTED for event in events),
        step=step,
        target_step=target,
        loss=rates.loss,
        step_seconds=rates.step_seconds,
        tokens_per_second=rates.tokens_per_second,
        mfu=rates.mfu,
        checkpoint_step=progress.checkpoint_step if progress else None,
        updated_seconds_ago=age,
        eta_seconds=left * rates.step_seconds if running and left and rates.step_seconds else None,
        stale=_is_stale(judged, age, config),
    )


def _is_stale(judged: Judged, age: float | None, config: SuperviseConfig | None) -> bool:
    """A running job without a sign of life for longer than a step may take."""
    if judged.state is not RunState.RUNNING or age is None or config is None:
        return False
    return age > config.stall_seconds


def _config(run: RunFiles) -> SuperviseConfig | None:
    try:
        return SuperviseConfig.model_validate_json(run.layout.supervise_config.read_bytes())
    except (OSError, ValueError):
        return None


def _row(metrics: StepMetrics) -> Row:
    return Row(
        metrics.step,
        metrics.epoch,
        metrics.loss,
        metrics.step_seconds,
        metrics.tokens_per_second,
        metrics.mfu,
        metrics.profiled,
    )
