"""Submits a prepared run, or checks it with Slurm.

The run directory is complete before sbatch is called, and the ledger records it. The run id is in
the job's comment. By it every command finds a job whose client died before it could record the job
(`job_queries`); the job's own supervisor records it when it starts. Singletons are submitted all at
once; the first job of a chain submits the others itself.
"""

from __future__ import annotations

import contextlib
import shutil
from datetime import datetime
from pathlib import Path

from hpctrain.base import clock
from hpctrain.base.errors import (
    SlurmRefusedError,
    UsageError,
)
from hpctrain.job.data_records import record_data
from hpctrain.job.job_submission import (
    JobsBefore,
    Submitted,
    after_of_spec,
    job_to_wait_for,
    submit_jobs,
    submitted_run,
)
from hpctrain.job.preflight import Examined, checks_of
from hpctrain.job.prepare import PreparedRun, with_free_run_id
from hpctrain.job.run_directory import RunExistsError, write_run_directory
from hpctrain.records.find import RunFiles
from hpctrain.records.first_starts import (
    FirstStart,
    has_trained,
    read_first_starts,
    record_first_start,
)
from hpctrain.records.rehearsals import RehearsalRecord, read_rehearsals, record_rehearsal
from hpctrain.slurm.client import SlurmClient
from hpctrain.slurm.records import TestOnlyAnswer

_FIRST_WITH_SEGMENTS = (24, 5)  # of Slurm


def submit(
    prepared: PreparedRun, runs: Path, slurm: SlurmClient, after: RunFiles | None = None
) -> Submitted:
    """Write the run directory and hand the script to Slurm, which starts it `after` another run.

    Without `after` the field of that name in the spec counts.

    Raises InvalidInputError when data files are missing, UsageError for a directory in which Slurm
    cannot write logs or a Slurm without segments. Raises SlurmRefusedError when Slurm does not take
    the job, and then there is no run; SlurmUnreachableError when it has not answered, and then the
    directory stays, because the job may exist.
    """
    Examined(checks_of(prepared, runs), prepared).refuse()  # now, not after hours in the queue
    slurm = slurm.at(cluster=prepared.supervise.submission.cluster)
    refuse_unsubmittable(prepared, slurm)
    waits: tuple[JobsBefore, ...]
    if after is not None:
        before = job_to_wait_for(after, slurm)
        waits = () if before is None else (before,)
    else:
        waits = after_of_spec(prepared.spec, runs, slurm)
    run = _written(prepared, runs)
    try:
        job_id = submit_jobs(run, slurm, *waits)
    except SlurmRefusedError:
        shutil.rmtree(run.layout.directory)
        raise
    return submitted_run(run, job_id)


def prepare_only(prepared: PreparedRun, runs: Path) -> RunFiles:
    """Write the run directory for somebody who will look at it, and start it by hand.

    Raises what `submit` raises before it asks Slurm.
    """
    Examined(checks_of(prepared, runs), prepared).refuse()
    return _written(prepared, runs)


def _written(prepared: PreparedRun, runs: Path) -> RunFiles:
    while True:
        try:
            run = RunFiles(write_run_directory(prepared, runs))
            break
        except RunExistsError:  # another submission has just taken the run id
            prepared = with_free_run_id(prepared, runs)
    record_data(run.layout)
    return run


def first_start_note(prepared: PreparedRun, runs: Path) -> str | None:
    """Return that the first start of a profile has not been proved, and record that it was told.

    None where it was told before, proved in this partition, or shown by a run that has trained a
    step. Emulated GPUs are those of a sandbox, of which nothing is to be proved.
    """
    profile, digest = prepared.profile.document, prepared.profile.digest
    partition = prepared.job.partition.name
    known = [one for one in read_first_starts(runs) if one.profile_digest == digest]
    if profile.gpu.emulated or any(
        one.event == "told" or one.partition == partition for one in known
    ):
        return None
    if has_trained(runs, profile.name, digest):
        return None
    with contextlib.suppress(OSError):  # then it is told again
        told = FirstStart(
            event="told",
            profile=profile.name,
            profile_digest=digest,
            event_time=clock.now(),
        )
        record_first_start(runs, told)
    return f"The first start of profile {profile.name} has not been proved"


def rehearsal_note(prepared: PreparedRun, runs: Path) -> tuple[str, bool] | None:
    """Return what a rehearsal of this run has proved, and whether there was one.

    That there was none is told once for a name and a profile, and recorded. None where that was
    told, and where GPUs are emulated, as in a sandbox.
    """
    spec, profile = prepared.spec, prepared.profile
    name = (spec.document.name, profile.document.name)
    known = [one for one in read_rehearsals(runs) if (one.spec_name, one.profile) == name]
    for one in reversed(known):
        same = (one.spec_digest, one.profile_digest) == (spec.digest, profile.digest)
        if one.event == "rehearsed" and same:
            day = datetime.fromtimestamp(one.event_time).strftime("%Y-%m-%d")
            return f"Rehearsed on {day}: {one.level_words}", True
    if profile.document.gpu.emulated or any(one.event == "told" for one in known):
        return None
    with contextlib.suppress(OSError):  # then it is told again
        told = RehearsalRecord(
            event="told",
            spec_name=name[0],
            spec_digest=spec.digest,
            profile=name[1],
            profile_digest=profile.digest,
            event_time=clock.now(),
        )
        record_rehearsal(runs, told)
    return "This run has not been rehearsed", False


def check(prepared: PreparedRun, slurm: SlurmClient) -> TestOnlyAnswer:
    """Validate the script with Slurm (`sbatch --test-only`); nothing is submitted."""
    wanted = prepared.supervise.submission
    slurm = slurm.at(cluster=wanted.cluster, submit_command=wanted.words)
    refuse_unsubmittable(prepared, slurm)
    return slurm.test_only(prepared.script)


def refuse_unsubmittable(prepared: PreparedRun, slurm: SlurmClient) -> None:
    """Raise UsageError for a script that this Slurm would not run as it is meant."""
    _refuse_shared_name(prepared, slurm)
    segment = prepared.plan.nodes.segment
    if segment is None:
        return
    settings = slurm.config()
    if settings.version and settings.version < _FIRST_WITH_SEGMENTS:
        raise UsageError(
            f"the script has `--segment={segment}`, which Slurm has since 24.05; this is "
            f"{settings.get('SLURM_VERSION')}",
            hint="`network.switches.segment: forbid` in the profile, and no `resources.segment`",
        )


def _refuse_shared_name(prepared: PreparedRun, slurm: SlurmClient) -> None:
    """Singletons wait for every job of the same name and user, whatever run it is of.

    Raises UsageError when there is one: a run of the same id in another directory of runs.
    """
    if prepared.supervise.continuation != "singleton":
        return
    others = slurm.live_jobs_named(prepared.run_id)
    if others:
        raise UsageError(
            f"job {others[0]} of another directory of runs is named `{prepared.run_id}`, too, and "
            "continuation singleton would wait for it",
            hint="give the run another `name`",
        )
