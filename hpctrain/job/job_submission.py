"""Gives the stored script of a run to Slurm, for the first time or again.

Belongs here: sbatch, its options, what the ledger says about it. Does not belong here: making a run
(`submit`, `run_directory`), jobs that exist already (`job_queries`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpctrain.base import clock
from hpctrain.base.errors import (
    HpctrainError,
    InvalidInputError,
    NoSuchRunError,
    RunFailedError,
    SlurmError,
    SlurmRefusedError,
    SlurmUnreachableError,
    UsageError,
)
from hpctrain.base.frozen import Frozen
from hpctrain.base.units import short_duration
from hpctrain.job.job_queries import find_jobs, jobs_of, record_found
from hpctrain.records.find import RunFiles, all_runs, find_run
from hpctrain.records.jobs import (
    SiteAnswer,
    awaited_run,
    generation,
    sbatch_options,
    site_answer,
    slurm_cluster_of,
    submitted_ids,
    was_put_back,
)
from hpctrain.records.kept_code import keep_script
from hpctrain.records.ledger import EventKind
from hpctrain.records.requests import take_back
from hpctrain.records.supervise_config import SuperviseConfig, read_supervise_config
from hpctrain.slurm.client import SlurmClient
from hpctrain.slurm.job_changes import JobSetting, job_changes, requested_job
from hpctrain.spec.loader import Loaded, load_any_run_spec, load_profile
from hpctrain.spec.run import RunSpec
from hpctrain.spec.trainer import TrainerRunSpec

# A supervisor finds within seconds that the run it waits for is not done.
_SECONDS_TO_PUT_BACK = 30


class Submitted(Frozen):
    """A run that Slurm has accepted, and what the site has answered beside the job's id."""

    run_id: str
    job_id: int
    directory: Path
    answer: SiteAnswer


def submitted_run(run: RunFiles, job_id: int) -> Submitted:
    """Return the submission with what the ledger has about it."""
    answer = site_answer(run.ledger.events())
    return Submitted(
        run_id=run.run_id, job_id=job_id, directory=run.layout.directory, answer=answer
    )


def resubmit(run: RunFiles, slurm: SlurmClient) -> Submitted:
    """Submit the stored script of a stopped run again; it resumes from its newest checkpoint.

    Raises RunFailedError when the run is done, UsageError while a job of it is in the queue or on
    another cluster, SlurmUnreachableError when Slurm does not answer,
    InvalidInputError when the run directory cannot be read.
    """
    if run.layout.done.exists():
        raise RunFailedError(f"run `{run.run_id}` is done: there is nothing left to train")
    run.refuse_unless_writable("submit")
    found = jobs_of(run, slurm)
    if not found.answered:
        raise SlurmUnreachableError(
            f"Slurm does not answer, so it is unknown whether run `{run.run_id}` has a job"
        )
    record_found(run, found)
    if found.live:
        job = found.live[0]
        raise UsageError(
            f"run `{run.run_id}` has job {job.job_id} in state {job.state.name}",
            hint=f"`{run.command('cancel')}` first",
        )
    take_back(run.layout)  # an old request must not stop the new job
    after: tuple[JobsBefore, ...] = ()
    if not generation(run.ledger.events()):  # `submit --prepare` has left it to somebody
        after = after_of_spec(
            load_any_run_spec(run.layout.spec), run.layout.directory.parent, slurm
        )
    return submitted_run(run, submit_jobs(run, slurm, *after))


@dataclass(frozen=True)
class JobsBefore:
    """Jobs that have to end before a run begins: well (`afterok`), or anyhow (`afterany`).

    A requeue of such a job is no end (sbatch(1), --dependency). `run_id`: the run that has to be
    done, whatever job brings it there.
    """

    how: Literal["afterok", "afterany"]
    job_ids: tuple[int, ...]
    run_id: str | None = None

    def __str__(self) -> str:
        return ":".join([self.how, *map(str, self.job_ids)])


def submit_jobs(run: RunFiles, slurm: SlurmClient, *after: JobsBefore) -> int:
    """Submit the stored script, once or once per singleton, without any check.

    Slurm starts it when the jobs of all `after` have ended, and not before. Runs that wait for this
    one wait for its new job from now on.
    Returns the id of the first job, which begins a generation of jobs (see `records.jobs`). Raises
    SlurmRefusedError or SlurmUnreachableError when there is not even one, InvalidInputError when
    the run directory cannot be read.
    """
    config = read_supervise_config(run.layout.supervise_config)
    wanted = config.submission
    slurm = slurm.at(cluster=wanted.cluster, submit_command=wanted.words)
    first = _sbatch(run, slurm, config, after=after)
    if config.continuation == "requeue":
        _lead_followers(run, slurm, first)
    jobs = config.continuation_jobs if config.continuation == "singleton" else 1
    for _ in range(1, jobs):
        try:
            _sbatch(run, slurm, config, successor_of=first)
        except SlurmError:
            break  # the ledger has it; a site may limit the number of jobs
    return first


def job_to_wait_for(run: RunFiles, slurm: SlurmClient) -> JobsBefore | None:
    """Return the job whose good end is the end of `run`; None if it is done already.

    Raises UsageError for a run that has no job any more or goes on in other jobs, whose ends say
    nothing; SlurmUnreachableError when Slurm does not answer.
    """
    if run.layout.done.exists():
        return None
    config = read_supervise_config(run.layout.supervise_config)
    if config.continuation != "requeue":
        raise UsageError(
            f"run `{run.run_id}` goes on in other jobs (continuation {config.continuation}), and "
            "Slurm can wait for one job only",
            hint="submit it when that run is done",
        )
    found = jobs_of(run, slurm)
    if not found.answered:
        raise SlurmUnreachableError("Slurm does not answer, so there is nothing to wait for")
    if not found.live:
        raise UsageError(
            f"run `{run.run_id}` is not done and has no job to wait for",
            hint=f"`{run.command('resume')}` first",
        )
    return JobsBefore("afterok", (found.live[0].job_id,), run.run_id)


def after_of_spec(
    spec: Loaded[RunSpec] | Loaded[TrainerRunSpec], runs: Path, slurm: SlurmClient
) -> tuple[JobsBefore, ...]:
    """Return what `after` of a spec waits for; nothing if it is absent, or that run is done.

    Raises InvalidInputError, at the field, for what `job_to_wait_for` refuses and for no such run;
    SlurmUnreachableError.
    """
    name = spec.document.after
    if name is None:
        return ()
    try:
        before = job_to_wait_for(find_run(runs, name), slurm)
    except (NoSuchRunError, UsageError) as error:
        raise InvalidInputError([spec.problem("after", f"`after`: {error}", error.hint)]) from None
    return (before,) if before is not None else ()


def _lead_followers(run: RunFiles, slurm: SlurmClient, job_id: int) -> None:
    """Have runs that wait for an earlier job of `run` wait for this one.

    Without that they would never begin: their job waits for one that has ended, or it has begun
    too early and holds itself in the queue. What cannot be changed is recorded in the ledger of
    the follower; the submission itself has succeeded.
    """
    old = {*submitted_ids(run.ledger.events())} - {job_id}
    if not old:
        return
    for other in all_runs(run.layout.directory.parent):
        if other.unreadable or other.layout.done.exists() or other.owner_id != os.getuid():
            continue
        events = other.ledger.events()
        ids = submitted_ids(generation(events))
        if awaited_run(events) != run.run_id or not ids:
            continue
        try:
            # Make a waiting job wait for another one instead of `old`, and for what else it waits
            # for
            waiting_id, there = ids[0], slurm.at(cluster=slurm_cluster_of(events))
            waiting = there.show_job(waiting_id)
            before = {f":{one}" for one in old}
            kept = [
                term
                for term in (waiting.dependencies if waiting is not None else ())
                if not any(term.endswith(one) for one in before)
            ]
            for last in (False,) * _SECONDS_TO_PUT_BACK + (True,):
                try:
                    there.update_job(waiting_id, dependency=",".join([f"afterok:{job_id}", *kept]))
                    break
                except SlurmRefusedError:
                    job = there.jobs([waiting_id]).get(waiting_id)
                    if last or job is None or not job.state.is_active:
                        raise
                    clock.sleep(1.0)
            if was_put_back(other.ledger.events()):
                there.release(waiting_id)
            reason = f"waits for job {job_id} of run {run.run_id} now"
        except SlurmError as error:
            reason = f"could not be made to wait for job {job_id} of run {run.run_id}: {error}"
        other.ledger.append(EventKind.OBSERVED, job_id=ids[0], reason=reason)


def _sbatch(
    run: RunFiles,
    slurm: SlurmClient,
    config: SuperviseConfig,
    successor_of: int | None = None,
    after: Sequence[JobsBefore] = (),
) -> int:
    cluster = config.submission.cluster
    after_run = next((one.run_id for one in after if one.run_id), None)
    with contextlib.suppress(SlurmError):  # the error of sbatch is clearer
        cluster = cluster or slurm.cluster_name()
    if successor_of is None:
        run.ledger.append(
            EventKind.SUBMITTING,
            cluster=cluster,
            after_run=after_run,
            slurm_cluster=config.submission.cluster,
        )
    try:
        options = sbatch_options(run.layout.directory, array=config.continuation == "array")
        options += [f"--dependency={','.join(map(str, after))}"] if after else []
        digest = keep_script(run.layout)
        submitted = slurm.submit(run.layout.script, options, variables=config.submit_variables)
    except SlurmUnreachableError as error:
        if successor_of is None:  # the controller may have accepted it without an answer in time
            found = find_jobs([run], slurm)[run.run_id]
            if found.unrecorded:
                record_found(run, found)
                return found.unrecorded[0].submitted_id
        run.ledger.append(
            EventKind.SUBMIT_FAILED, reason=str(error), successor_of=successor_of, answered=False
        )
        raise
    except SlurmError as error:
        run.ledger.append(EventKind.SUBMIT_FAILED, reason=str(error), successor_of=successor_of)
        raise
    run.ledger.append(
        EventKind.SUBMITTED,
        job_id=submitted.job_id,
        successor_of=successor_of,
        cluster=submitted.cluster or cluster,
        after_run=after_run,
        script_sha256=digest,
        slurm_cluster=config.submission.cluster,
        site_messages=submitted.messages,
    )
    if successor_of is None:
        _record_changes(run, slurm, config, submitted.job_id, options)
    return submitted.job_id


# -- What Slurm has made of a new job -----------------------------------------------------------


def _record_changes(
    run: RunFiles,
    slurm: SlurmClient,
    config: SuperviseConfig,
    job_id: int,
    options: Sequence[str],
) -> None:
    """Record what the new job has otherwise than its script asks for, and what follows.

    One query. Without an answer, and for a job that is gone already, nothing is recorded.
    """
    try:
        made = next(iter(slurm.jobs([job_id]).values()), None)
        asked = requested_job(run.layout.script.read_text(errors="replace"), options)
    except (SlurmError, OSError):
        return
    changes = job_changes(asked, made) if made is not None else ()
    if made is None or not changes:
        return
    settings = {change.setting for change in changes}
    follows = {**_CONSEQUENCES, "partition": _preemption_there(run, made.partition)}
    if made.time_limit_seconds is not None and made.time_limit_seconds <= config.warning_seconds:
        lead = short_duration(config.warning_seconds)
        follows["time limit"] = (
            f"Slurm's warning comes {lead} before that: no time is left to train"
        )
    if {"comment", "job name"} <= settings:
        follows["comment"] = "hpctrain knows the job by neither comment nor name, and may lose it"
    if config.continuation == "requeue" and made.requeue is False:
        follows["requeue flag"] = (
            "Slurm does not start it again after a preemption or its time limit: "
            "`hpctrain watch --act` submits the run again"
        )
    sentences = [
        f"{change}; {then}" if (then := follows.get(change.setting)) else str(change)
        for change in changes
    ]
    run.ledger.append(EventKind.JOB_CHANGED, job_id=job_id, evidence=sentences)


_PLANNED = "the run was planned for what was asked"
_CONSEQUENCES: dict[JobSetting, str] = {
    "time limit": "each attempt has that long, and the forecast took the other",
    "comment": "hpctrain finds the job by its name and directory",
    "job name": "hpctrain finds the job by its comment",
    "number of nodes": _PLANNED,
    "GPUs per node": _PLANNED,
    "CPUs": _PLANNED,
}


def _preemption_there(run: RunFiles, name: str | None) -> str:
    """Describe how jobs of another partition are preempted, by the profile of the run."""
    try:
        partition = load_profile(run.layout.profile).document.slurm.partition(name or "")
    except HpctrainError:  # a replica of a service keeps none
        return ""
    if partition is None:
        return "the profile does not describe it, so the plan knows nothing of its preemption"
    if partition.preemption.mode == "off":
        return "jobs there are not preempted"
    grace = partition.preemption.grace
    return f"jobs there are preempted ({partition.preemption.mode}), with {grace} of grace"
