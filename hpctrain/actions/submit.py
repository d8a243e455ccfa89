"""Submitting a prepared run, checking it with Slurm, and submitting a stopped run again.

The run directory is complete before sbatch is called, and the ledger says so. The run id is in
the job's comment: by it every verb finds a job whose client died before it could record the job
(`run_jobs`), which the job's own supervisor does when it starts. Singletons are submitted all at
once; the first job of a chain submits the others itself.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from hpctrain.actions.prepare import Prepared, with_free_run_id
from hpctrain.actions.pretrained import check_pretrained
from hpctrain.actions.run_data import record_data
from hpctrain.actions.run_jobs import find_jobs, jobs_of, record_found
from hpctrain.actions.runs import RunFiles
from hpctrain.actions.samples import check_samples
from hpctrain.durable import replace_text
from hpctrain.errors import RunFailedError, SlurmError, SlurmUnreachableError, UsageError
from hpctrain.slurm.client import SlurmClient
from hpctrain.slurm.records import TestOnlyAnswer
from hpctrain.spec.resolved import write_resolved
from hpctrain.store.jobs import sbatch_options
from hpctrain.store.layout import RunLayout
from hpctrain.store.ledger import EventKind
from hpctrain.store.requests import take_back
from hpctrain.store.supervise_config import read_supervise_config


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
    cannot write logs, SlurmRefusedError or SlurmUnreachableError when Slurm does not take the job;
    the directory then stays, with the reason in its ledger.
    """
    check_data(prepared)
    _refuse_shared_name(prepared, slurm)
    run = RunFiles(_own_directory(prepared, runs))
    record_data(run.layout)
    job_id = submit_jobs(run, slurm)
    return Submitted(run.run_id, job_id, run.layout.directory)


def _own_directory(prepared: Prepared, runs: Path) -> RunLayout:
    """The written run directory; under another id if somebody has just taken that of `prepared`."""
    while True:
        try:
            return write_run_directory(prepared, runs)
        except RunExistsError:
            prepared = with_free_run_id(prepared, runs)


def check_data(prepared: Prepared) -> None:
    """Find missing data files and weights now, not after hours in the queue."""
    check_pretrained(prepared.spec)
    check_samples(prepared.spec)


def check(prepared: Prepared, slurm: SlurmClient) -> TestOnlyAnswer:
    """Have Slurm validate the script (`sbatch --test-only`); nothing is submitted."""
    _refuse_shared_name(prepared, slurm)
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


def write_run_directory(prepared: Prepared, runs: Path) -> RunLayout:
    """Create the complete run directory.

    Raises RunExistsError when it exists already, UsageError for a path that Slurm cannot take or
    that cannot be written.
    """
    layout = RunLayout((runs / prepared.run_id).absolute())
    _refuse_path(layout.directory)
    try:
        layout.create()
    except FileExistsError as error:
        raise RunExistsError(f"run directory {layout.directory} exists already") from error
    except OSError as error:
        raise UsageError(f"{layout.directory} cannot be made: {error.strerror}") from error
    for path, text in (
        (layout.spec, write_resolved(prepared.spec)),
        (layout.profile, write_resolved(prepared.profile)),
        (layout.plan, prepared.plan.model_dump_json(indent=1)),
        (layout.train_config, prepared.train.model_dump_json(indent=1)),
        (layout.supervise_config, prepared.supervise.model_dump_json(indent=1)),
        (layout.signatures, prepared.signatures),
        (layout.script, prepared.script),
        *_smaller_configs(layout, prepared),
        *_library_configs(layout, prepared),
    ):
        replace_text(path, text, mode=0o600)
    digest = hashlib.sha256(prepared.script.encode()).hexdigest()
    RunFiles(layout).ledger.append(EventKind.RENDERED, script_sha256=digest)
    return layout


def _refuse_path(directory: Path) -> None:
    """Slurm takes the backslashes out of the path of a log and then expands no pattern in it
    (sbatch(1), FILENAME PATTERN), so the job would die at once, with signal 53."""
    if "\\" in str(directory):
        raise UsageError(
            f"Slurm cannot write the log of a job below a directory with a backslash: {directory}",
            hint="choose another directory: `--runs` or $HPCTRAIN_RUNS",
        )


def _smaller_configs(layout: RunLayout, prepared: Prepared) -> list[tuple[Path, str]]:
    """What the trainer is told when it is launched on fewer nodes."""
    return [
        (layout.train_config_for(size.shape.nodes), size.train.model_dump_json(indent=1))
        for size in prepared.smaller
    ]


def _library_configs(layout: RunLayout, prepared: Prepared) -> list[tuple[Path, str]]:
    """Render the configuration of the engine's own library, if it has one, for each size."""
    configs = [
        (layout.ds_config, prepared.train),
        *((layout.ds_config_for(size.shape.nodes), size.train) for size in prepared.smaller),
    ]
    return [
        (path, json.dumps(config.library_config, indent=1) + "\n")
        for path, config in configs
        if config.library_config is not None
    ]


def resubmit(run: RunFiles, slurm: SlurmClient) -> Submitted:
    """Submit the stored script of a stopped run again; it resumes from its newest checkpoint.

    Raises RunFailedError when the run is done, UsageError while a job of it is in the queue or on
    another cluster, SlurmUnreachableError when Slurm does not tell whether there is one,
    InvalidInputError when the run directory cannot be read.
    """
    if run.layout.done.exists():
        raise RunFailedError(f"run `{run.run_id}` is done: there is nothing left to train")
    run.refuse_unless_writable("submit")
    found = jobs_of(run, slurm)
    if not found.answered:
        raise SlurmUnreachableError(f"Slurm does not tell whether run `{run.run_id}` has a job")
    record_found(run, found)
    if found.live:
        job = found.live[0]
        raise UsageError(
            f"run `{run.run_id}` has job {job.job_id} in state {job.state.name}",
            hint=f"`hpctrain cancel {run.run_id}` first",
        )
    take_back(run.layout)  # what somebody asked of the run before must not stop it now
    return Submitted(run.run_id, submit_jobs(run, slurm), run.layout.directory)


def submit_jobs(run: RunFiles, slurm: SlurmClient) -> int:
    """Submit the stored script, as often as the mode of continuation wants; looks at nothing.

    Returns the id of the first job, which begins a generation of jobs (see `store.jobs`). Raises
    SlurmRefusedError or SlurmUnreachableError when there is not even one, InvalidInputError when
    the run directory cannot be read.
    """
    config = read_supervise_config(run.layout.supervise_config)
    array = config.continuation == "array"
    first = _sbatch(run, slurm, array=array)
    jobs = config.continuation_jobs if config.continuation == "singleton" else 1
    for _ in range(1, jobs):
        try:
            _sbatch(run, slurm, array=array, successor_of=first)
        except SlurmError:
            break  # the ledger has it; fewer jobs go on less often, and a site may limit them
    return first


def _sbatch(
    run: RunFiles, slurm: SlurmClient, *, array: bool, successor_of: int | None = None
) -> int:
    cluster = _cluster(slurm)
    if successor_of is None:
        run.ledger.append(EventKind.SUBMITTING, cluster=cluster)
    try:
        submitted = slurm.submit(
            run.layout.script, sbatch_options(run.layout.directory, array=array)
        )
    except SlurmUnreachableError as error:
        if successor_of is None and (accepted := _accepted_all_the_same(run, slurm)) is not None:
            return accepted
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


def _cluster(slurm: SlurmClient) -> str | None:
    try:
        return slurm.cluster_name()
    except SlurmError:
        return None  # sbatch will say it better


def _accepted_all_the_same(run: RunFiles, slurm: SlurmClient) -> int | None:
    """The job of an sbatch that had no answer in time: the controller may have taken it."""
    found = find_jobs([run], slurm)[run.run_id]
    if not found.unrecorded:
        return None
    record_found(run, found)
    return found.unrecorded[0].submitted_id
