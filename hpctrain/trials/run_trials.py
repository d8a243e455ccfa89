"""Runs the trials of a comparison: writes them once, submits them as jobs, waits, reads results.

The run directories of all trials are complete before the record is written, and the record before
the first sbatch. A later `hpctrain compare DIRECTORY` submits only what has not been submitted
according to the ledgers, so that nothing runs twice. Belongs here: that order, and the results of
the trials from their run directories. Does not belong here: planning trials (`trial_plans`),
judging them (`judging`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from hpctrain.base import clock
from hpctrain.base.durable import replace_text
from hpctrain.base.errors import InvalidInputError, NoSuchRunError, Problem, SlurmRefusedError
from hpctrain.job.job_queries import find_jobs, record_found
from hpctrain.job.job_submission import submit_jobs
from hpctrain.job.run_directory import write_run_directory
from hpctrain.judge.attempts import launch_ends, launch_starts
from hpctrain.judge.causes import FAILURE_CAUSES, FINAL_CAUSES, SCHEDULER_CAUSES
from hpctrain.records.find import RunFiles, new_run_id
from hpctrain.records.jobs import ever_submitting, refusals
from hpctrain.records.layout import RunLayout
from hpctrain.records.run_jobs import RunJobs
from hpctrain.records.run_records import RankTimes, lineage, read_metrics, read_record
from hpctrain.records.sweeps import ComparisonLayout
from hpctrain.runs.state import RunState
from hpctrain.runs.status import RunStatus, poll_interval, statuses
from hpctrain.slurm.client import SlurmClient
from hpctrain.trials.documents import (
    Comparison,
    ComparisonRecord,
    Stability,
    TrialRecord,
    TrialResult,
)
from hpctrain.trials.judging import (
    agreement,
    bound_of,
    measure,
    recommend,
    recommend_size,
    scale_points,
    warm_up_steps,
)
from hpctrain.trials.trial_plans import (
    Subject,
    TrialRequest,
    comparison_record,
    predicted_record,
    prepared_trial,
)

# A job that Slurm does not know and whose supervisor is silent for so long has ended.
_FORGOTTEN_SECONDS = 600.0
Report = Callable[[str], None]


def start(subject: Subject, request: TrialRequest, runs: Path) -> ComparisonLayout:
    """Write the run directories of all trials and then the record; nothing is submitted yet."""
    found = [prepared_trial(subject, request, variant, runs) for variant in request.variants]
    for _, prepared in found:
        if prepared is not None:
            write_run_directory(prepared, runs)
    digests = (subject.loaded_spec.digest, subject.loaded_profile.digest)
    comparison_id = new_run_id(runs, f"compare-{subject.run.name}", *digests)
    layout = ComparisonLayout((runs / comparison_id).absolute())
    layout.directory.mkdir(parents=True, mode=0o700)
    record = comparison_record(subject, request, tuple(one for one, _ in found), comparison_id)
    replace_text(layout.record, record.model_dump_json(indent=1) + "\n", mode=0o600)
    return layout


def predict(subject: Subject, request: TrialRequest) -> Comparison:
    """Predict every variant; no job, no file."""
    return read_comparison(predicted_record(subject, request), Path(), {})


def read_record_of(directory: Path) -> ComparisonRecord:
    """Read the record of a comparison. Raises NoSuchRunError or InvalidInputError."""
    path = ComparisonLayout(directory).record
    try:
        return ComparisonRecord.model_validate_json(path.read_bytes())
    except FileNotFoundError as error:
        hint = "a comparison is a directory with `comparison.json`, below that of the runs"
        raise NoSuchRunError(f"no comparison in {directory}", hint=hint) from error
    except (OSError, ValidationError) as error:
        message = f"is no record of a comparison: {type(error).__name__}"
        raise InvalidInputError([Problem(message, file=path.name)]) from error


def look(layout: ComparisonLayout, slurm: SlurmClient) -> Comparison:
    """Read the present state of a comparison; with at most one Slurm query for all trials."""
    record = read_record_of(layout.directory)
    rows = {row.run_id: row for row in statuses(_run_files(layout, record), slurm)}
    return read_comparison(record, layout.runs, rows)


def _run_files(layout: ComparisonLayout, record: ComparisonRecord) -> list[RunFiles]:
    ids = [one.run_id for one in record.trials if one.run_id is not None]
    return [RunFiles(RunLayout((layout.runs / run_id).absolute())) for run_id in ids]


@dataclass
class TrialRunner:
    """Submits trials, at most `at_a_time` at once (None: all), and waits for them.

    `report` gets a line for every change of a trial. `wait` False: submit once and return.
    `poll_seconds` None: as often as the profile allows (`limits.poll`).
    """

    layout: ComparisonLayout
    slurm: SlurmClient
    report: Report = lambda line: None
    at_a_time: int | None = None
    wait: bool = True
    keep_checkpoints: bool = False
    poll_seconds: float | None = None
    _lock: int | None = None
    _watches: bool = False
    _tried: set[str] = field(default_factory=set)
    _reported: dict[str, str] = field(default_factory=dict)
    _silent_since: dict[str, float] = field(default_factory=dict)

    def run(self) -> Comparison:
        """Submit and wait until every trial is over; a later call continues.

        Raises SlurmUnreachableError when nothing can be submitted.
        """
        record = read_record_of(self.layout.directory)
        pause_seconds = poll_interval(_run_files(self.layout, record), self.poll_seconds)
        names = {one.run_id: one.name for one in record.trials if one.run_id}
        runs = {run.run_id: run for run in _run_files(self.layout, record)}
        try:
            while True:
                rows = {row.run_id: row for row in statuses(list(runs.values()), self.slurm)}
                if self._is_mine() and self._submit(rows, runs):
                    continue  # query again at once: some may have been refused
                for run_id, row in rows.items():
                    self._report_change(names[run_id], row)
                if not self.wait or all(self._is_over(row) for row in rows.values()):
                    break
                clock.sleep(pause_seconds)  # squeue(1), PERFORMANCE: no queries in a tight loop
            found = read_comparison(record, self.layout.runs, rows)
            if found.over and not self.keep_checkpoints:
                # Nobody resumes a trial, and checkpoints of large models fill a quota.
                for run in runs.values():
                    if run.layout.done.exists():
                        for path in run.layout.checkpoints.iterdir():
                            shutil.rmtree(path, ignore_errors=True)
            return found
        finally:
            if self._lock is not None:
                os.close(self._lock)

    def _is_mine(self) -> bool:
        """Return True if this process submits: one at a time, the next when that has ended."""
        if self._lock is None:
            self._lock = self.layout.try_lock()
            if self._lock is None and not self._watches:
                self._watches = True
                self.report("another process submits these trials; this one watches")
        return self._lock is not None

    def _submit(self, rows: dict[str, RunStatus], runs: dict[str, RunFiles]) -> int:
        """Submit waiting trials as far as `at_a_time` allows; returns how many were tried."""
        live = sum(not row.state.over for row in rows.values())
        room = len(rows) if self.at_a_time is None else self.at_a_time - live
        waiting = [run_id for run_id, row in rows.items() if self._waits(row)]
        chosen = waiting[: max(0, room)]
        for run_id in chosen:
            self._tried.add(run_id)
            run = runs[run_id]
            begun = ever_submitting(run.ledger.events())
            found = find_jobs([run], self.slurm)[run_id] if begun else RunJobs()
            if found.unrecorded:  # sbatch had accepted it, but its client died before recording it
                record_found(run, found)
                continue
            with contextlib.suppress(SlurmRefusedError):  # it is in the ledger, and in the result
                submit_jobs(run, self.slurm)
        return len(chosen)

    def _waits(self, row: RunStatus) -> bool:
        return row.state.without_job and row.run_id not in self._tried

    def _is_over(self, row: RunStatus) -> bool:
        if row.state.without_job:
            return row.run_id in self._tried
        if row.state is not RunState.UNKNOWN:
            self._silent_since.pop(row.run_id, None)
            return row.state.over
        since = self._silent_since.setdefault(row.run_id, clock.monotonic())
        return clock.monotonic() - since > _FORGOTTEN_SECONDS

    def _report_change(self, name: str, row: RunStatus) -> None:
        """Report a change of state, and the first step."""
        state = "trains" if row.state is RunState.RUNNING and row.step else row.state.value.lower()
        if self._reported.get(name) == state or self._waits(row):
            return
        self._reported[name] = state
        reason = f": {row.reason}" if row.reason and self._is_over(row) else ""
        job = f" (job {row.job_id}, {row.run_id})" if row.job_id else ""
        self.report(f"{name}: {state}{job}{reason}")


# -- Reads the results of the trials of a comparison from their run directories -----------------


def read_comparison(
    record: ComparisonRecord, runs: Path, rows: Mapping[str, RunStatus]
) -> Comparison:
    """Build a comparison from the run directories, or from the predictions of one without runs.

    `rows` maps run ids to statuses.
    """
    trials = []
    for one in record.trials:
        if one.run_id is None:
            state = "REFUSED" if one.refusal or record.comparison_id is not None else "PREDICTED"
            seconds = one.predicted.step_seconds if one.predicted else None
            result = TrialResult(record=one, state=state, reason=one.refusal or "", over=True)
        else:
            run = RunFiles(RunLayout((runs / one.run_id).absolute()))
            result = _read_trial(one, record.steps, run, rows[one.run_id])
            seconds = result.measured.step_seconds.mean if result.measured else None
        if seconds is not None:
            # the whole budget at this pace, training alone
            gpu_hours = one.train_steps * seconds * one.gpus / 3600
            price = record.price_per_gpu_hour
            cost = (gpu_hours * price[0], price[1]) if price else None
            result = result.model_copy(update={"gpu_hours": gpu_hours, "cost": cost})
        trials.append(result)
    return judged(record, trials)


def _read_trial(one: TrialRecord, steps: int, run: RunFiles, row: RunStatus) -> TrialResult:
    written = read_metrics(run.layout)
    kept = lineage(written)
    events = run.ledger.events()
    ranks = read_record(run.layout.rank_times, RankTimes)
    waits = row.state.without_job and not refusals(events)
    ends = [str(end.cause) for end in launch_ends(events)]
    return TrialResult(
        record=one,
        state=row.state.value,
        reason=row.reason,
        over=row.state.over and not waits,
        measured=measure(kept, warm_up_steps(steps), one.global_batch, ranks),
        stability=Stability(
            launches=len(launch_starts(events)),
            failures=tuple(cause for cause in ends if cause in FAILURE_CAUSES | FINAL_CAUSES),
            preemptions=sum(cause in SCHEDULER_CAUSES for cause in ends),
            steps_again=len(written) - len(kept),
        ),
        losses=tuple((step.step, step.loss) for step in kept if step.loss is not None),
        step_times=tuple(
            (step.step, step.step_seconds) for step in kept if step.step_seconds is not None
        ),
    )


def judged(record: ComparisonRecord, trials: Sequence[TrialResult]) -> Comparison:
    """Add the agreement with the first trial that has trained, and the recommendation."""
    measured = record.comparison_id is not None
    first = next((trial for trial in trials if trial.losses), None)
    agreed = []
    for trial in trials:
        found = None
        if first is not None and trial is not first:
            found = agreement(
                first.name,
                dict(first.losses),
                dict(trial.losses),
                bound_of(first.record.precision, trial.record.precision),
                same=first.record.training == trial.record.training,
            )
        agreed.append(trial.model_copy(update={"agreement": found}))
    if record.kind == "sizes":
        points = scale_points(agreed, measured=measured)
        advice = recommend_size(agreed, points, weak=record.weak)
    else:
        points = ()
        advice = recommend(agreed, record.gpu_memory_bytes, measured=measured)
    return Comparison(record=record, trials=tuple(agreed), recommendation=advice, points=points)
