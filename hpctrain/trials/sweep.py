"""Submits a sweep: one run for each point of a grid, at most so many of them at a time.

    sweep = hpctrain.sweep("gpt.yaml", "a100x64", {"optimizer.lr": ["1e-4", "3e-4"]})
    print(sweep.table().rows[0].run_id)

The record is on disk before the first run directory, and all run directories before the first
sbatch. Whoever repeats the command continues: a point whose run has a job, or had one, is not
submitted again. `at_a_time` makes as many lanes: the run of a point waits for the end of the run
before it in its lane (sbatch(1), `--dependency=afterany`), however that ends. A requeue is no end,
so that preemptions change neither the order nor the number.

Belongs here: that order, and the Python API. Does not belong here: planning the points
(`sweep_plans`), their states (`sweep_table`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base import clock
from hpctrain.base.errors import (
    SlurmError,
    SlurmUnreachableError,
    UsageError,
)
from hpctrain.job.data_records import record_data
from hpctrain.job.job_queries import find_jobs, record_found
from hpctrain.job.job_submission import JobsBefore, after_of_spec, submit_jobs
from hpctrain.job.prepare import with_free_run_id, with_run_id
from hpctrain.job.run_directory import (
    RunExistsError,
    reading_group,
    remove_half_written,
    write_run_directory,
)
from hpctrain.job.submit import refuse_unsubmittable
from hpctrain.records.find import runs_directory
from hpctrain.records.jobs import generation, submitted_ids
from hpctrain.records.layout import RunLayout
from hpctrain.records.sweeps import SweepLayout, SweepRecord, find_sweep
from hpctrain.runs.control import cancel
from hpctrain.runs.state import RunState
from hpctrain.slurm.client import SlurmClient
from hpctrain.spec.loader import load_run_spec
from hpctrain.trials.sweep_plans import SweepPlan, SweepRequest, is_written, plan_sweep
from hpctrain.trials.sweep_table import REMOVED, SweepTable, runs_of_sweep, sweep_table

Report = Callable[[str], None]
# For one sbatch, which a slow controller may keep waiting.
_SECONDS_TO_STOP = 120
_OVER = {REMOVED, *(state.value for state in RunState if state.over)}


@dataclass(frozen=True)
class SubmittedSweep:
    """How many points have a job now; `new` of them since this call."""

    layout: SweepLayout
    record: SweepRecord
    submitted: int
    new: int


@dataclass(frozen=True)
class Sweep:
    """The handle of a sweep for programs."""

    layout: SweepLayout
    slurm: SlurmClient

    @property
    def name(self) -> str:
        return self.layout.directory.name

    def table(self) -> SweepTable:
        """Collect the state and the results of all points, the best first."""
        return sweep_table(self.layout, self.slurm)

    def cancel(self) -> tuple[str, ...]:
        """Cancel all runs that are not over; returns their ids."""
        return cancel_sweep(self.layout, self.slurm).cancelled


def sweep(
    spec: str | Path,
    profile: str,
    grid: Mapping[str, Iterable[object]],
    overrides: Iterable[str] = (),
    *,
    name: str | None = None,
    at_a_time: int | None = None,
    max_gpu_hours: float | None = None,
    skip_refused: bool = False,
    runs: Path | None = None,
    slurm: SlurmClient | None = None,
) -> Sweep:
    """Submit a run for each point of the grid. Raises what `hpctrain sweep` reports."""
    request = SweepRequest(
        spec=Path(spec),
        profile=profile,
        grid=tuple(f"{field}={','.join(map(str, values))}" for field, values in grid.items()),
        overrides=tuple(overrides),
        name=name,
        at_a_time=at_a_time,
        most_gpu_hours=max_gpu_hours,
        skip_refused=skip_refused,
    )
    client = slurm or SlurmClient()
    plan = plan_sweep(request, runs_directory(runs))
    return Sweep(submit_sweep(plan, client, at_a_time).layout, client)


def open_sweep(name: str, *, runs: Path | None = None, slurm: SlurmClient | None = None) -> Sweep:
    """Open the sweep of that name or unique start of a name. Raises NoSuchRunError."""
    return Sweep(find_sweep(runs_directory(runs), name), slurm or SlurmClient())


def submit_sweep(
    plan: SweepPlan,
    slurm: SlurmClient,
    at_a_time: int | None = None,
    report: Report = lambda line: None,
) -> SubmittedSweep:
    """Write what is missing, and submit the points that have no job.

    Raises UsageError while another process submits this sweep; SlurmRefusedError and
    SlurmUnreachableError when a point was not accepted: those before it stay submitted, and the
    same call continues with it.
    """
    layout = plan.layout
    for one in plan.new:
        assert one.prepared is not None
        refuse_unsubmittable(one.prepared, slurm)
    example = next((one.prepared for one in plan.new), None)
    group = reading_group(example, layout.runs) if example is not None else None
    layout.create(group)
    lock = layout.try_lock()
    if lock is None:
        raise UsageError(f"another process submits sweep `{layout.directory.name}` at the moment")
    try:
        begun = layout.record.exists()
        record = layout.read() if begun else plan.record
        if layout.is_cancelled(record):
            raise UsageError(f"sweep `{record.sweep_id}` was cancelled: nothing was submitted")
        if at_a_time is not None:
            record = record.model_copy(update={"at_a_time": at_a_time})
        layout.write(record)
        return _submit(layout, _write_runs(plan, record, begun=begun), slurm, report)
    finally:
        os.close(lock)


def _write_runs(plan: SweepPlan, record: SweepRecord, *, begun: bool) -> SweepRecord:
    """Write the run directories that are missing; returns the record with the ids they have.

    `begun`: an earlier call has written the record, and may have died within a run directory.
    """
    layout = plan.layout
    prepared = {one.point.name: one.prepared for one in plan.new}
    for number, point in enumerate(record.points):
        if point.run_id is None:
            continue
        run, own = RunLayout(layout.runs / point.run_id), prepared.get(point.name)
        if own is None and not is_written(layout, point.run_id):
            continue  # removed
        if own is not None and not is_written(layout, point.run_id):
            own = with_run_id(own, point.run_id)
            if begun and os.path.lexists(run.directory):
                remove_half_written(own, run)
            while True:
                try:
                    run = write_run_directory(own, layout.runs)
                    break
                except RunExistsError:  # another submission has just taken the run id
                    own = with_free_run_id(own, layout.runs)
                    record = record.with_point(number, run_id=own.run_id)
                    layout.write(record)
        if not run.data_identity.exists():
            record_data(run)
    return record


def _submit(
    layout: SweepLayout, record: SweepRecord, slurm: SlurmClient, report: Report
) -> SubmittedSweep:
    every = runs_of_sweep(layout, record)
    runs = {run_id: run for run_id, run in every.items() if is_written(layout, run_id)}
    found = find_jobs(list(runs.values()), slurm)
    if not all(one.answered for one in found.values()):
        raise SlurmUnreachableError(
            "Slurm does not answer, so it is unknown which points have jobs: nothing was submitted",
            hint="the same command continues",
        )
    needed = set()
    for run_id, run in runs.items():
        if found[run_id].unrecorded:  # sbatch had accepted it, but its client died before recording
            record_found(run, found[run_id])
        if not generation(run.ledger.events()):
            needed.add(run_id)
    record = _with_submitted(layout, record, runs.keys() - needed)
    after: tuple[JobsBefore, ...] = ()
    if needed:
        spec = next(iter(runs.values())).layout.spec
        after = after_of_spec(load_run_spec(spec), layout.runs, slurm)
    live: list[tuple[int, ...]] = []
    new = 0
    for number, run_id in enumerate(point.run_id for point in record.points if point.run_id):
        if run_id not in needed:  # it has had a job; its directory may be gone
            jobs = found[run_id].live if run_id in found else ()
            live.append(tuple(dict.fromkeys(job.submitted_id for job in jobs)))
            continue
        run, before = runs[run_id], None
        if record.at_a_time is not None:
            lane = live[number % record.at_a_time :: record.at_a_time]
            newest = next((ids for ids in reversed(lane) if ids), ())
            before = JobsBefore("afterany", newest) if newest else None
        done = len(runs) - len(needed) + new
        if layout.is_cancelled(record):
            raise UsageError(
                f"sweep `{record.sweep_id}` was cancelled: {done} of {len(runs)} runs were "
                "submitted, and no more are"
            )
        waits = (*after, *([before] if before is not None else []))
        try:
            job_id = submit_jobs(run, slurm, *waits)
        except SlurmError as error:
            text = f"{done} of {len(runs)} runs are submitted, `{run_id}` is not: {error}"
            raise type(error)(text, hint="the same command continues with it") from error
        new += 1
        record = _with_submitted(layout, record, {run_id})
        live.append(tuple(submitted_ids(generation(run.ledger.events()))) or (job_id,))
        behind = f", after {', '.join(map(str, before.job_ids))}" if before else ""
        report(f"{run_id}: job {job_id}{behind}")
    return SubmittedSweep(layout, record, len(runs), new)


def _with_submitted(
    layout: SweepLayout, record: SweepRecord, run_ids: Collection[str]
) -> SweepRecord:
    """Record that these runs have had a job: what is removed later is not submitted again."""
    changed = record
    for number, point in enumerate(record.points):
        if point.run_id in run_ids and not point.submitted:
            changed = changed.with_point(number, submitted=True)
    if changed is not record:
        layout.write(changed)
    return changed


# Cancelling --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CancelledSweep:
    """The runs that were cancelled, those that were over before, and those that could not be."""

    cancelled: tuple[str, ...]
    over: tuple[str, ...]
    failed: tuple[tuple[str, str], ...]


def cancel_sweep(layout: SweepLayout, slurm: SlurmClient) -> CancelledSweep:
    """Cancel every run that is not over, those that wait first, and submit no further point.

    A process that submits points stops at the next one, and this waits for that. Raises UsageError
    for a sweep of somebody else and when that process does not stop, SlurmUnreachableError when
    Slurm is away.
    """
    record = layout.read()
    if not os.access(layout.directory, os.W_OK):
        raise UsageError(f"you cannot cancel sweep `{record.sweep_id}`, which you may only read")
    layout.cancel_request.touch(mode=0o600)
    lock, waited_seconds = layout.try_lock(), 0
    while lock is None:
        if waited_seconds == _SECONDS_TO_STOP:
            raise UsageError(
                f"another process submits a run of sweep `{layout.directory.name}`, and has not "
                f"ended within {_SECONDS_TO_STOP} s: nothing was cancelled, and no further run is "
                "submitted",
                hint="the same command tries again",
            )
        clock.sleep(1.0)
        waited_seconds += 1
        lock = layout.try_lock()
    try:
        record = layout.read()
        rows = sweep_table(layout, slurm).rows
        if record.cancelled_time is None:
            layout.write(record.model_copy(update={"cancelled_time": clock.now()}))
        runs = runs_of_sweep(layout, record)
        states = {row.run_id: row.state for row in rows if row.run_id is not None}
        cancelled, over, failed = [], [], []
        for run_id in reversed(list(runs)):  # else the end of one would start the next of its lane
            if states[run_id] in _OVER:
                over.append(run_id)
                continue
            try:
                cancel(runs[run_id], slurm)
                cancelled.append(run_id)
            except UsageError:  # it has just ended
                over.append(run_id)
            except SlurmError as error:
                failed.append((run_id, str(error)))
        return CancelledSweep(tuple(cancelled), tuple(over), tuple(failed))
    finally:
        os.close(lock)
