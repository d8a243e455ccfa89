"""Forecast a run with a trainer of its own: its speed is given, or an earlier run has measured it.

Belongs here: what earlier runs have measured, and the facts of a forecast. Does not belong here:
the forecast itself (`hpctrain.plan.forecast`, `hpctrain.simulate`), text of its result.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from hpctrain.base.errors import HpctrainError, UsageError
from hpctrain.engines.trainer import TrainerSettings, is_trainer, trainer_settings_of
from hpctrain.judge.attempts import launch_starts
from hpctrain.plan.forecast.documents import RunFacts, TrainerSaves
from hpctrain.plan.job import TrainerJob
from hpctrain.records.find import RunFiles, all_runs, find_run
from hpctrain.records.run_records import SaveRecord, read_saves
from hpctrain.records.step_times import StepTime, read_step_times
from hpctrain.spec.document import Document

# Fewer say little: the first ones warm up, and some of them save.
LEAST_STEPS = 20


class KnownPace(Document):
    """How fast a trainer of its own is, and who says so; None: not measured.

    `start_seconds`: from a launch to its first step. `save_seconds`: training stands still so long.
    """

    step_seconds: float
    source: str
    start_seconds: float | None = None
    save_seconds: float | None = None
    steps_between_saves: int | None = None


def known_pace(
    job: TrainerJob, runs: Path, step_seconds: float | None, like: str | None
) -> KnownPace | None:
    """Find out how fast the trainer of a job is; None where nobody has said or measured it.

    `step_seconds` is given by the user. Else it is measured: by the run named `like`, or by the
    newest run of the same name, command, profile and number of GPUs. Raises NoSuchRunError, and
    UsageError for a run that has not measured enough.
    """
    if step_seconds == 0:
        raise UsageError("--step-time: must be above 0", hint="for example `--step-time 1.9s`")
    measured = None
    if like is not None:
        found = find_run(runs, like)
        settings = _settings(found)
        if settings is None:
            raise UsageError(
                f"--like: run `{found.run_id}` has an engine of hpctrain",
                hint="name a run with a trainer of its own",
            )
        measured = _measured(found, job)
        if measured is None and step_seconds is None:
            raise UsageError(
                f"--like: no launch of run `{found.run_id}` has reported {LEAST_STEPS} steps",
                hint="give the time of a step: `--step-time 1.9s`",
            )
    else:
        for found in reversed(all_runs(runs)):
            settings = _settings(found) if found.run_id.startswith(f"{job.spec.name}-") else None
            if settings is not None and _is_alike(found, settings, job):
                measured = _measured(found, job)
                if measured is not None:
                    break
    if step_seconds is None:
        return measured
    given = {"step_seconds": step_seconds, "source": "by --step-time"}
    return KnownPace.model_validate({**dict(measured or ()), **given})


def refuse_pace(step_seconds: float | None, like: str | None) -> None:
    """Raise UsageError for options about a trainer of its own, given with a spec of an engine."""
    if step_seconds is None and like is None:
        return
    option = "--like" if step_seconds is None else "--step-time"
    raise UsageError(f"{option} is for specs with `trainer:`: of engines, the step is predicted")


def trainer_facts(job: TrainerJob, pace: KnownPace | None) -> RunFacts | None:
    """Collect the inputs of a forecast; None where its pace or its last step is not known."""
    trainer, steps = job.spec.trainer, job.plan.target_step
    if pace is None or steps is None:
        return None
    signal, seconds = trainer.signal, pace.save_seconds
    if seconds is None and signal is not None:
        seconds = float(signal.seconds)
    resumes = trainer.checkpoint is not None
    return RunFacts(
        step_seconds=pace.step_seconds,
        gpus=job.plan.world_size,
        nodes=job.plan.nodes.nodes,
        train_steps=steps,
        walltime=job.spec.resources.walltime or job.partition.max_walltime,
        saves=TrainerSaves(
            resumes=resumes,
            on_signal=resumes and (signal is not None or trainer.talks),
            seconds=seconds,
            every_steps=pace.steps_between_saves,
            measured=pace.save_seconds is not None,
        ),
        start_seconds=pace.start_seconds,
    )


def unknown_time(job: TrainerJob) -> str:
    """Say why there is no forecast, and what would give one."""
    if job.plan.target_step is None:
        return "unknown: the run ends with a file, and nobody knows at which step"
    return (
        "unknown until steps are measured; `--step-time 1.9s` gives the time of a step, "
        "`--like RUN` a run that has measured it"
    )


def _settings(run: RunFiles) -> TrainerSettings | None:
    """Read what the trainer of a run was started with; None for other and unreadable runs."""
    if run.unreadable:
        return None
    try:
        text = run.layout.train_config.read_bytes()
        return trainer_settings_of(run.layout.train_config, text) if is_trainer(text) else None
    except (OSError, HpctrainError):
        return None


def _is_alike(run: RunFiles, settings: TrainerSettings, job: TrainerJob) -> bool:
    """Whether a run has started the same command on as many GPUs of the same cluster."""
    return (
        settings.run_name == job.spec.name
        and settings.trainer.words == job.spec.trainer.words
        and _planned(run) == (job.plan.profile_name, job.plan.world_size)
    )


def _planned(run: RunFiles) -> tuple[str, int] | None:
    """Read profile and number of GPUs of a run; None where its plan cannot be read."""
    from hpctrain.plan.trainer_plan import TrainerPlan

    try:
        plan = TrainerPlan.model_validate_json(run.layout.plan.read_bytes())
    except (OSError, ValueError):
        return None
    return plan.profile_name, plan.world_size


def _measured(run: RunFiles, job: TrainerJob) -> KnownPace | None:
    """Take the pace of the newest launch that has reported enough steps; None if none has."""
    launches: dict[int, list[StepTime]] = {}
    for row in read_step_times(run.layout):
        launches.setdefault(row.epoch, []).append(row)
    for epoch in sorted(launches, reverse=True):
        rows = launches[epoch]
        timed = [row.step_seconds for row in rows[1:] if row.step_seconds is not None]
        count = rows[-1].step - rows[0].step
        if count < LEAST_STEPS or not timed or statistics.median(timed) <= 0:
            continue
        seconds = statistics.median(timed)
        planned, gpus = _planned(run), job.plan.world_size
        where = ""
        if planned is not None and planned != (job.plan.profile_name, gpus):
            where = f", which has {planned[1]} GPUs of {planned[0]}"
        saves = [save for save in read_saves(run.layout) if save.epoch == epoch]
        between = [after.step - before.step for before, after in pairwise(saves)]
        return KnownPace(
            step_seconds=seconds,
            source=f"measured by {count} steps of run {run.run_id}{where}",
            start_seconds=_start_seconds(run, epoch, rows[0], seconds),
            save_seconds=_save_seconds(rows, seconds, saves),
            steps_between_saves=max(1, round(statistics.median(between))) if between else None,
        )
    return None


def _start_seconds(run: RunFiles, epoch: int, first: StepTime, step_seconds: float) -> float | None:
    """Return the seconds from the start of a launch to its first step; None if not recorded."""
    for event in launch_starts(run.ledger.events()):
        if event.epoch == epoch:
            steps = first.step - (event.resume_step or 0)
            return max(0.0, first.time - event.time - steps * step_seconds)
    return None


def _save_seconds(
    rows: Sequence[StepTime], step_seconds: float, saves: Sequence[SaveRecord]
) -> float | None:
    """Return how long a save stops training; None without a save between the first and last step.

    As the trainer reports it, else what its steps do not take of the time between them.
    """
    first, last = rows[0], rows[-1]
    within = [save for save in saves if first.step < save.step < last.step]
    reported = [save.stall_seconds for save in within if save.stall_seconds is not None]
    if reported:
        return statistics.median(reported)
    other = last.time - first.time - (last.step - first.step) * step_seconds
    return max(0.0, other) / len(within) if within else None
