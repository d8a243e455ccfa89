"""Reads the results of the trials of a comparison from their run directories.

Belongs here: reading, and combining figures, agreement and recommendation. Does not belong here:
judging them (`hpctrain.trials`), or Slurm queries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from hpctrain.judge.causes import FAILURE_CAUSES, FINAL_CAUSES, SCHEDULER_CAUSES
from hpctrain.records.find import RunFiles
from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import EventKind
from hpctrain.records.run_records import RankTimes, lineage, read_metrics, read_record
from hpctrain.runs.status import RunStatus
from hpctrain.trials.agreement import agreement_of
from hpctrain.trials.documents import (
    Comparison,
    ComparisonRecord,
    Price,
    Stability,
    TrialRecord,
    TrialResult,
)
from hpctrain.trials.measure import measure, warm_up_steps
from hpctrain.trials.recommend import recommend
from hpctrain.trials.scaling import recommend_size, scale_points

REFUSED, PREDICTED = "REFUSED", "PREDICTED"


def predicted_comparison(record: ComparisonRecord) -> Comparison:
    """Build a comparison from predictions alone."""
    return judged(record, [_without_run(one, record, PREDICTED) for one in record.trials])


def read_comparison(
    record: ComparisonRecord, runs: Path, rows: Mapping[str, RunStatus]
) -> Comparison:
    """Build a comparison from the run directories; `rows` maps run ids to statuses."""
    trials = []
    for one in record.trials:
        if one.run_id is None:
            trials.append(_without_run(one, record, REFUSED))
        else:
            run = RunFiles(RunLayout((runs / one.run_id).absolute()))
            trials.append(_read_trial(one, record, run, rows[one.run_id]))
    return judged(record, trials)


def judged(record: ComparisonRecord, trials: Sequence[TrialResult]) -> Comparison:
    """Add the agreement with the first trial that has trained, and the recommendation."""
    measured = record.comparison_id is not None
    first = next((trial for trial in trials if trial.losses), None)
    agreed = []
    for trial in trials:
        agreement = None if first is None or trial is first else agreement_of(first, trial)
        agreed.append(trial.model_copy(update={"agreement": agreement}))
    if record.kind == "sizes":
        points = scale_points(agreed, measured=measured)
        advice = recommend_size(agreed, points, weak=record.weak)
    else:
        points = ()
        advice = recommend(agreed, record.gpu_memory_bytes, measured=measured)
    return Comparison(record=record, trials=tuple(agreed), recommendation=advice, points=points)


def _without_run(one: TrialRecord, record: ComparisonRecord, state: str) -> TrialResult:
    seconds = one.predicted.step_seconds if one.predicted else None
    gpu_hours, cost = _costs(one, record, seconds)
    return TrialResult(
        record=one,
        state=REFUSED if one.refusal else state,
        reason=one.refusal or "",
        over=True,
        gpu_hours=gpu_hours,
        cost=cost,
    )


def _read_trial(
    one: TrialRecord, record: ComparisonRecord, run: RunFiles, row: RunStatus
) -> TrialResult:
    written = read_metrics(run.layout)
    kept = lineage(written)
    events = run.ledger.events()
    ranks = read_record(run.layout.rank_times, RankTimes)
    refused = any(event.event is EventKind.SUBMIT_FAILED for event in events)
    waits = row.state.without_job and not refused
    ends = [str(e.cause) for e in events if e.event is EventKind.LAUNCH_ENDED]
    measured = measure(kept, warm_up_steps(record.steps), one.global_batch, ranks)
    gpu_hours, cost = _costs(one, record, measured.step_seconds.mean if measured else None)
    return TrialResult(
        record=one,
        state=row.state.value,
        reason=row.reason,
        over=row.state.over and not waits,
        measured=measured,
        stability=Stability(
            launches=sum(e.event is EventKind.LAUNCH_STARTED for e in events),
            failures=tuple(cause for cause in ends if cause in FAILURE_CAUSES | FINAL_CAUSES),
            preemptions=sum(cause in SCHEDULER_CAUSES for cause in ends),
            steps_again=len(written) - len(kept),
        ),
        losses=tuple((step.step, step.loss) for step in kept if step.loss is not None),
        step_times=tuple((step.step, step.step_seconds) for step in kept),
        gpu_hours=gpu_hours,
        cost=cost,
    )


def _costs(
    one: TrialRecord, record: ComparisonRecord, step_seconds: float | None
) -> tuple[float | None, Price | None]:
    """Price the whole budget at this pace, training alone: GPU-hours, and money if known."""
    if step_seconds is None:
        return None, None
    gpu_hours = one.train_steps * step_seconds * one.gpus / 3600
    price = record.price_per_gpu_hour
    return gpu_hours, (gpu_hours * price[0], price[1]) if price else None
