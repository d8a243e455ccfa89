"""Submits a prepared run, checks it with Slurm, and submits a stopped run again.

The run directory is complete before sbatch is called, and the ledger records it. The run id is in
the job's comment. By it every command finds a job whose client died before it could record the job
(`job_queries`); the job's own supervisor records it when it starts. Singletons are submitted all at
once; the first job of a chain submits the others itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from hpctrain.actions.data_records import record_data
from hpctrain.actions.input_checks import check_inputs
from hpctrain.actions.job_queries import find_jobs, jobs_of, record_found
from hpctrain.actions.prepare import Prepared, with_free_run_id
from hpctrain.actions.runs import RunFiles
from hpctrain.actions.striping import stripe
from hpctrain.durable import replace_text
from hpctrain.errors import RunFailedError, SlurmError, SlurmUnreachableError, UsageError
from hpctrain.slurm.client import SlurmClient
from hpctrain.slurm.records import TestOnlyAnswer
from hpctrain.spec.resolved import write_resolved
from hpctrain.store.jobs import sbatch_options
from hpctrain.store.layout import RunLayout
from hpctrain.store.ledger import EventKind
from hpctrain.store.requests import take_back
from hpctrain.store.supervise_config import SuperviseConfig, read_supervise_config

_FIRST_WITH_SEGMENTS = (24, 5)  # of Slurm


class RunExistsError(UsageError):
    """Somebody has made the run directory already."""


@dataclass(frozen=True)
class Submitted:
    """A run that Slurm has accepted."""

    run_id: str
    job_id: int
    directory: Path


def submit(prepared: Prepared, runs: Path, slurm: SlurmClient) -> Submitted:
    """Write the run directory and hand the script to Slurm.

    Raises InvalidInputError when data files are missing, UsageError for a directory in which Slurm
    cannot write logs or a Slurm without segments, SlurmRefusedError or SlurmUnreachableError when
    Slurm does not take the job; the directory then stays, with the reason in its ledger.
    """
    check_inputs(prepared.spec)  # now, not after hours in the queue
    _refuse_shared_name(prepared, slurm)
    _refuse_segment(prepared, slurm)
    while True:
        try:
            run = RunFiles(write_run_directory(prepared, runs))
            break
        except RunExistsError:  # another submission has just taken the run id
            prepared = with_free_run_id(prepared, runs)
    record_data(run.layout)
    job_id = submit_jobs(run, slurm)
    return Submitted(run.run_id, job_id, run.layout.directory)


def check(prepared: Prepared, slurm: SlurmClient) -> TestOnlyAnswer:
    """Validate the script with Slurm (`sbatch --test-only`); nothing is submitted."""
    _refuse_shared_name(prepared, slurm)
    _refuse_segment(prepared, slurm)
    return slurm.test_only(prepared.script)


def _refuse_shared_name(prepared: Prepared, slurm: SlurmClient) -> None:
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


def _refuse_segment(prepared: Prepared, slurm: SlurmClient) -> None:
    """Raise UsageError where the script requests a segment and this Slurm has no such option."""
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


def write_run_directory(prepared: Prepared, runs: Path) -> RunLayout:
    """Create the complete run directory.

    Raises RunExistsError when it exists already, UsageError for a path that Slurm cannot take or
    that cannot be written.
    """
    layout = RunLayout((runs / prepared.run_id).absolute())
    if "\\" in str(layout.directory):
        # Slurm takes the backslashes out of the path of a log and then expands no pattern in it
        # (sbatch(1), FILENAME PATTERN), so the job would die at once, with signal 53.
        raise UsageError(
            f"Slurm cannot write the log of a job below a directory with a backslash: "
            f"{layout.directory}",
            hint="choose another directory: `--runs` or $HPCTRAIN_RUNS",
        )
    try:
        layout.create()
    except FileExistsError as error:
        raise RunExistsError(f"run directory {layout.directory} exists already") from error
    except OSError as error:
        raise UsageError(f"{layout.directory} cannot be made: {error.strerror}") from error
    try:
        stripe(layout.checkpoints, prepared.profile.document)
    except UsageError:
        shutil.rmtree(layout.directory)
        raise
    sizes = [(layout.ds_config, prepared.train)]
    sizes += [(layout.ds_config_for(one.shape.nodes), one.train) for one in prepared.smaller]
    for path, text in (
        (layout.spec, write_resolved(prepared.spec)),
        (layout.profile, write_resolved(prepared.profile)),
        (layout.plan, prepared.plan.model_dump_json(indent=1)),
        (layout.train_config, prepared.train.model_dump_json(indent=1)),
        (layout.supervise_config, prepared.supervise.model_dump_json(indent=1)),
        (layout.signatures, prepared.signatures),
        (layout.script, prepared.script),
        *([] if prepared.prologue is None else [(layout.prologue, prepared.prologue)]),
        *(
            (layout.train_config_for(one.shape.nodes), one.train.model_dump_json(indent=1))
            for one in prepared.smaller
        ),
        *(  # the configuration of the engine's own library, if it has one
            (path, json.dumps(config.library_config, indent=1) + "\n")
            for path, config in sizes
            if config.library_config is not None
        ),
    ):
        replace_text(path, text, mode=0o600)
    digest = hashlib.sha256(prepared.script.encode()).hexdigest()
    RunFiles(layout).ledger.append(EventKind.RENDERED, script_sha256=digest)
    return layout


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
            hint=f"`hpctrain cancel {run.run_id}` first",
        )
    take_back(run.layout)  # an old request must not stop the new job
    return Submitted(run.run_id, submit_jobs(run, slurm), run.layout.directory)


def submit_jobs(run: RunFiles, slurm: SlurmClient) -> int:
    """Submit the stored script, once or once per singleton, without any check.

    Returns the id of the first job, which begins a generation of jobs (see `store.jobs`). Raises
    SlurmRefusedError or SlurmUnreachableError when there is not even one, InvalidInputError when
    the run directory cannot be read.
    """
    config = read_supervise_config(run.layout.supervise_config)
    first = _sbatch(run, slurm, config)
    jobs = config.continuation_jobs if config.continuation == "singleton" else 1
    for _ in range(1, jobs):
        try:
            _sbatch(run, slurm, config, successor_of=first)
        except SlurmError:
            break  # the ledger has it; a site may limit the number of jobs
    return first


def _sbatch(
    run: RunFiles, slurm: SlurmClient, config: SuperviseConfig, successor_of: int | None = None
) -> int:
    cluster = None
    with contextlib.suppress(SlurmError):  # the error of sbatch is clearer
        cluster = slurm.cluster_name()
    if successor_of is None:
        run.ledger.append(EventKind.SUBMITTING, cluster=cluster)
    try:
        options = sbatch_options(run.layout.directory, array=config.continuation == "array")
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
    )
    return submitted.job_id
