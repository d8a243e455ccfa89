"""Queries Slurm for the jobs of runs: one query for all of a cluster, whatever their number.

Belongs here: the query, refusing jobs of another cluster by name, recording jobs that are missing
in a ledger. Does not belong here: assigning jobs to runs (`hpctrain.records.jobs`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from hpctrain.base.errors import SlurmError, SlurmUnreachableError, UsageError
from hpctrain.records.find import RunFiles
from hpctrain.records.jobs import cluster_of, generation, job_ids, slurm_cluster_of
from hpctrain.records.ledger import Event, EventKind
from hpctrain.records.run_jobs import RunJobs, identity_of, select_jobs
from hpctrain.slurm.client import SlurmClient
from hpctrain.slurm.records import JobRecord


def find_jobs(
    runs: Sequence[RunFiles],
    slurm: SlurmClient,
    events: Mapping[str, Sequence[Event]] | None = None,
    *,
    silent: bool = True,
) -> dict[str, RunJobs]:
    """Find the jobs of each run, by run id: one query for each cluster that their ledgers name.

    `events` are the ledgers by run id; without them they are read. When the Slurm of a run does not
    answer, the run is unanswered, or SlurmError is raised if not `silent`.
    """
    known = events or {run.run_id: run.ledger.events() for run in runs}
    found: dict[str, RunJobs] = {}
    for cluster, group in _by_cluster(runs, known):
        there = slurm.at(cluster=cluster)
        try:
            records = there.jobs_of_users({run.owner_id for run in group})
            # The cluster that answered, from its jobs or else its configuration.
            here = next((record.cluster for record in records.values() if record.cluster), cluster)
            if here is None and any(cluster_of(known[run.run_id]) for run in group):
                here = there.cluster_name()
        except SlurmError:
            if not silent:
                raise
            found |= {run.run_id: RunJobs(answered=False) for run in group}
            continue
        for run in group:
            identity = identity_of(run.layout.directory)
            found[run.run_id] = select_jobs(identity, known[run.run_id], records.values(), here)
    return found


def _by_cluster(
    runs: Sequence[RunFiles], events: Mapping[str, Sequence[Event]]
) -> Iterator[tuple[str | None, list[RunFiles]]]:
    """Group runs by the cluster that Slurm's commands have to name."""
    groups: dict[str | None, list[RunFiles]] = {}
    for run in runs:
        groups.setdefault(slurm_cluster_of(events[run.run_id]), []).append(run)
    yield from groups.items()


def slurm_of(run: RunFiles, slurm: SlurmClient) -> SlurmClient:
    """Return the client that reaches the jobs of a run, on whatever cluster its ledger names."""
    return slurm.at(cluster=slurm_cluster_of(run.ledger.events()))


def with_past_jobs(
    runs: Sequence[RunFiles],
    found: Mapping[str, RunJobs],
    slurm: SlurmClient,
    events: Mapping[str, Sequence[Event]],
) -> dict[str, RunJobs]:
    """Add the jobs of accounting for those of `runs` that have none in squeue: one query for each
    cluster. Raises SlurmError.
    """
    missing = [run for run in runs if found[run.run_id].answered and not found[run.run_id].jobs]
    all_found = dict(found)
    for cluster, group in _by_cluster(missing, events):
        gone = {one for run in group for one in job_ids(generation(events[run.run_id]))}
        past = slurm.at(cluster=cluster).past_jobs(gone)
        for run in group:
            known, own = found[run.run_id], events[run.run_id]
            all_found[run.run_id] = _with_past(known, run.run_id, own, past)
    return all_found


def _with_past(
    found: RunJobs, run_id: str, events: Sequence[Event], past: Mapping[int, JobRecord]
) -> RunJobs:
    ids, home = job_ids(generation(events)), cluster_of(events)
    mine = (
        record
        for record in past.values()
        if record.belongs_to(ids)
        and record.name in (None, run_id)
        and (home is None or record.cluster in (None, home))
    )
    return replace(found, jobs=tuple(mine))


def jobs_of(run: RunFiles, slurm: SlurmClient) -> RunJobs:
    """Find the jobs of one run. Raises UsageError if they are on another cluster."""
    found = find_jobs([run], slurm)[run.run_id]
    if found.elsewhere is not None:
        raise UsageError(
            f"the jobs of run `{run.run_id}` are on cluster `{found.elsewhere}`, and this is "
            f"cluster `{found.here}`: nothing was done",
            hint=f"use a login node of `{found.elsewhere}`; where commands may name clusters, "
            "`slurm.cluster` of the profile makes later runs known from everywhere",
        )
    return found


def why_in_use(run: RunFiles, slurm: SlurmClient) -> str | None:
    """Describe the job that may change the run's files; None if there is none.

    Raises SlurmUnreachableError when nobody can tell, UsageError if its jobs are on another
    cluster.
    """
    found = jobs_of(run, slurm)
    if not found.answered:
        raise SlurmUnreachableError(
            f"Slurm does not answer, so nobody knows whether run `{run.run_id}` has a job: nothing "
            "was done",
            hint="try again where squeue answers",
        )
    job = found.active or next(iter(found.live), None)
    if job is None:
        return None
    return f"job {job.job_id} is {job.state.value.lower()}"


def record_found(run: RunFiles, found: RunJobs) -> None:
    """Record jobs of the run that the ledger does not contain.

    The client that submitted them died, or a person called sbatch.
    """
    for job in found.unrecorded:
        run.ledger.append(
            EventKind.ADOPTED,
            job_id=job.submitted_id,
            cluster=job.cluster or found.here,
            reason="found in the queue by its comment or directory",
        )
