"""Select the Slurm jobs of a run from all records of Slurm.

A job id alone proves nothing. Another cluster on the same file system has a job of that id, and a
controller that lost its state assigns the id again. A job that was started by hand, or whose client
died, has an id that is not recorded. So a job belongs to a run if its id and cluster are in the
ledger and it has the run's name or comment, or if it has one of them and the run's directory.
Belongs here: telling them apart. Does not belong here: what a run is doing
(`hpctrain.runs.state`), acting on jobs.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.records.jobs import cluster_of, generation, job_ids, run_comment
from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import Event
from hpctrain.slurm.records import JobIdentity, JobRecord


def identity_of(directory: Path) -> JobIdentity:
    """Return the name, comment and directory (both spellings) of the run's jobs."""
    spellings = frozenset({os.path.abspath(directory), os.path.realpath(directory)})
    run_id = RunLayout(directory).run_id
    return JobIdentity(name=run_id, comment=run_comment(run_id), directories=spellings)


@dataclass(frozen=True)
class RunJobs:
    """Slurm's records of the jobs of one run's newest generation.

    `jobs` includes ended ones; `unrecorded` are those of them that are missing in the ledger.
    `answered` is False if Slurm was not queried or did not answer. `here` is the queried cluster,
    None if not known. `elsewhere` is the cluster that has the jobs, if it is another one.
    """

    jobs: tuple[JobRecord, ...] = ()
    unrecorded: tuple[JobRecord, ...] = ()
    answered: bool = True
    elsewhere: str | None = None
    here: str | None = None

    @property
    def live(self) -> tuple[JobRecord, ...]:
        """The jobs that are pending or hold nodes, and those in an unknown state."""
        return tuple(job for job in self.jobs if not job.state.is_ended)

    @property
    def active(self) -> JobRecord | None:
        """The job that holds nodes."""
        return next((job for job in self.jobs if job.state.is_active), None)

    @property
    def waiting(self) -> tuple[JobRecord, ...]:
        return tuple(job for job in self.jobs if job.state.is_pending)


def select_jobs(
    identity: JobIdentity,
    events: Sequence[Event],
    records: Iterable[JobRecord],
    here: str | None,
) -> RunJobs:
    """Select the records that are jobs of the run.

    `here` is the queried cluster, None if not known. Ids of earlier generations count as recorded,
    but only jobs of the newest generation and unrecorded live ones are in the result.
    """
    home, records = cluster_of(events), list(records)
    queried = {here, *(record.cluster for record in records)}  # SLURM_CLUSTERS may name several
    if home is not None and here is not None and home not in queried:
        return RunJobs(answered=False, elsewhere=home, here=here)
    recent, ever = set(job_ids(generation(events))), set(job_ids(events))
    jobs, unrecorded = [], []
    for record in records:
        if home is not None and record.cluster not in (None, home):
            continue
        if record.belongs_to(recent):
            if identity.confirms(record):
                jobs.append(record)
        elif identity.finds(record) and not record.state.is_ended:
            jobs.append(record)
            if not record.belongs_to(ever):
                unrecorded.append(record)
    return RunJobs(tuple(jobs), tuple(unrecorded), here=here)
