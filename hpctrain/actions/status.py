"""The status of runs: one Slurm query for all of them, then the run directories.

Belongs here: asking, and putting the answers together. Does not belong here: tables.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from pydantic import BaseModel, ConfigDict

from hpctrain.actions.run_jobs import find_jobs, with_past
from hpctrain.actions.runs import RunFiles
from hpctrain.actions.state import Judged, RunState, counted, judge, last_job_id
from hpctrain.checkpoints.publish import published_steps
from hpctrain.errors import SlurmError
from hpctrain.formats import NewerFormatError
from hpctrain.slurm.client import SlurmClient
from hpctrain.store.jobs import generation, job_ids
from hpctrain.store.ledger import Event, EventKind
from hpctrain.store.run_records import Progress, StepMetrics, read_record, tail_metrics
from hpctrain.store.supervise_config import SuperviseConfig, known_supervise_config
from hpctrain.supervise.run_jobs import RunJobs
from hpctrain.telemetry.rates import MetricsRow, recent_rates

# What `recent_rates` looks at, and the first step of a launch, which it leaves out.
_RECENT_STEPS = 21


class RunStatus(BaseModel):
    """One row of `hpctrain status`; times in seconds, None when unknown. `readable` is False for a
    run that this user may not read or whose ledger is damaged."""

    model_config = ConfigDict(frozen=True, defer_build=True)

    run_id: str
    state: RunState
    reason: str
    job_id: int | None = None
    attempts: int = 0
    step: int | None = None
    target_step: int | None = None
    loss: float | None = None
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    checkpoint_step: int | None = None
    updated_seconds_ago: float | None = None
    eta_seconds: float | None = None
    stale: bool = False
    readable: bool = True


def statuses(runs: Sequence[RunFiles], slurm: SlurmClient) -> list[RunStatus]:
    """The status of each run, in the given order; at most one squeue and one look back.

    A run that cannot be read has a row that says so.
    """
    events: dict[str, list[Event]] = {}
    unreadable = {run.run_id: run.unreadable for run in runs if run.unreadable}
    for run in runs:
        if run.run_id not in unreadable:
            try:
                events[run.run_id] = run.ledger.events()
            except OSError as error:
                unreadable[run.run_id] = f"cannot be read: {error.strerror}"
            except NewerFormatError as error:
                unreadable[run.run_id] = str(error)
    open_runs = [run for run in runs if run.run_id in events and not run.layout.done.exists()]
    jobs = _with_past(slurm, find_jobs(open_runs, slurm, events), events)
    rows: list[RunStatus] = []
    for run in runs:
        reason = unreadable.get(run.run_id)
        if reason is None:
            try:
                rows.append(_status(run, events[run.run_id], jobs.get(run.run_id)))
                continue
            except NewerFormatError as error:
                reason = str(error)
        rows.append(
            RunStatus(run_id=run.run_id, state=RunState.UNKNOWN, reason=reason, readable=False)
        )
    return rows


def _with_past(
    slurm: SlurmClient, jobs: dict[str, RunJobs], events: Mapping[str, Sequence[Event]]
) -> dict[str, RunJobs]:
    """With what accounting knows about runs of which squeue knows no job, in one query."""
    gone = {
        job_id
        for run_id, found in jobs.items()
        if found.answered and not found.jobs
        for job_id in job_ids(generation(events[run_id]))
    }
    try:
        past = slurm.past_jobs(gone)
    except SlurmError:
        return jobs
    return {run_id: with_past(jobs[run_id], run_id, events[run_id], past) for run_id in jobs}


def _status(run: RunFiles, events: Sequence[Event], found: RunJobs | None) -> RunStatus:
    """`found` is None for a run that is done: nobody was asked."""
    jobs = found or RunJobs()
    queued = counted(jobs.jobs)
    judged = judge(
        events,
        done=found is None,
        queued=queued,
        asked=jobs.answered,
        elsewhere=jobs.elsewhere,
    )
    progress = read_record(run.layout.progress, Progress)
    config = known_supervise_config(run.layout.supervise_config)
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
        checkpoint_step=_checkpoint_step(run, progress),
        updated_seconds_ago=age,
        eta_seconds=left * rates.step_seconds if running and left and rates.step_seconds else None,
        stale=_is_stale(judged, age, config),
    )


def _checkpoint_step(run: RunFiles, progress: Progress | None) -> int | None:
    """The newest checkpoint that the trainer has reported and that still counts: the supervisor may
    have set it aside since."""
    if progress is None or progress.checkpoint_step is None:
        return None
    try:
        steps = published_steps(run.layout.checkpoints)
    except OSError:
        return progress.checkpoint_step
    return max((step for step in steps if step <= progress.checkpoint_step), default=None)


def _is_stale(judged: Judged, age: float | None, config: SuperviseConfig | None) -> bool:
    """A running job without a sign of life for longer than a step may take."""
    if judged.state is not RunState.RUNNING or age is None or config is None:
        return False
    return age > config.stall_seconds


def _row(metrics: StepMetrics) -> MetricsRow:
    return MetricsRow(
        metrics.step,
        metrics.epoch,
        metrics.loss,
        metrics.step_seconds,
        metrics.tokens_per_second,
        metrics.mfu,
        metrics.profiled,
    )
