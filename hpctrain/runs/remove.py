"""Removes a run with everything in its directory, and nothing behind its links.

Belongs here: what forbids it, and removing. Does not belong here: asking (`files_command`),
removing only what a run does not need (`clean`).
"""

from __future__ import annotations

import os

from hpctrain.base.disk_usage import DiskUsage, remove_tree, usage_of
from hpctrain.base.errors import UsageError
from hpctrain.job.job_queries import why_in_use
from hpctrain.records.find import RunFiles
from hpctrain.records.jobs import being_submitted
from hpctrain.records.requests import read_request
from hpctrain.slurm.client import SlurmClient

# Hidden names are no runs (see `runs.all_runs`), so half of a run is never taken for one.
_PREFIX = ".removed-"


def refuse_to_remove(run: RunFiles, slurm: SlurmClient) -> None:
    """Raise UsageError if a job, a hold or a submission of the run forbids to remove it.

    Raises SlurmUnreachableError when nobody can tell whether it has a job.
    """
    run.refuse_unless_removable("rm")
    parent = run.layout.directory.parent
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UsageError(f"run `{run.run_id}` cannot be removed: you may not write into {parent}")
    job = why_in_use(run, slurm)
    if job is not None:
        hint = f"`{run.command('cancel')}` ends it for good"
        raise UsageError(f"run `{run.run_id}` cannot be removed: {job}", hint=hint)
    request = read_request(run.layout)
    if request is not None and request.kind == "hold":
        hint = f"`{run.command('cancel')}` first"
        raise UsageError(f"run `{run.run_id}` cannot be removed: {request.by} holds it", hint=hint)
    if being_submitted(run.ledger.events()):
        raise UsageError(
            f"run `{run.run_id}` cannot be removed: somebody is submitting it",
            hint=f"`{run.command('why')}` says whether that client is gone",
        )


def size_of(run: RunFiles) -> DiskUsage:
    """Count the files of a run and the bytes in them."""
    try:
        return usage_of(run.layout.directory)
    except OSError as error:
        raise UsageError(f"run `{run.run_id}` cannot be read: {error}") from error


def remove(run: RunFiles, slurm: SlurmClient) -> None:
    """Remove the run's directory. Raises what `refuse_to_remove` raises, and UsageError for files
    that cannot be removed, which then lie in a hidden directory beside the runs."""
    refuse_to_remove(run, slurm)
    directory = run.layout.directory
    hidden = directory.with_name(f"{_PREFIX}{directory.name}")
    try:
        if hidden.exists():  # what an earlier attempt could not remove
            remove_tree(hidden)
        os.rename(directory, hidden)
        remove_tree(hidden)
    except OSError as error:
        raise UsageError(f"run `{run.run_id}` cannot be removed completely: {error}") from error
