"""The Slurm jobs of a run: which records of Slurm are jobs of this run and which are not.

A job id alone proves nothing. Another cluster on the same file system has a job of that id, and a
controller that lost its state gives the id away again; a job that was started by hand, or whose
client died, has an id that nobody has recorded. So a job of a run is an id of its ledger on the
cluster of its ledger with the name or comment of the run, or a job with the run's comment and
directory. Belongs here: telling them apart. Does not belong here: what a run is doing
(`hpctrain.actions.state`), acting on jobs.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.slurm.records import JobIdentity, JobRecord
from hpctrain.store.jobs import cluster_of, generation, job_ids, run_comment
from hpctrain.store.ledger import Event


def identity_of(directory: Path) -> JobIdentity:
    """What the script of a run directory tells sbatch, with both spellings of the directory."""
    spellings = frozenset({os.path.abspath(directory), os.path.realpath(directory)})
    run_id = directory.name
    return JobIdentity(name=run_id, comment=run_comment(run_id), directories=spellings)


@dataclass(frozen=True)
class RunJobs:
    """What Slurm says about the jobs of one run's newest generation.

    `jobs` are the run's, ended ones included; `unrecorded` are those of them that are missing in
    the ledger. `answered` is False if Slurm was not asked or did not answer. `elsewhere` is the
    cluster that has the jobs, if this is another one, which then cannot know about them; `here` is
    the cluster that was asked, None if not known.
    """

    jobs: tuple[JobRecord, ...] = ()
    unrecorded: tuple[JobRecord, ...] = ()
    answered: bool = True
    elsewhere: str | None = None
    here: str | None = None

    @property
    def live(self) -> tuple[JobRecord, ...]:
        """Jobs that wait or hold nodes, and those in a state that is not known."""
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
    """The records that are jobs of the run, out of all that Slurm has told.

    `here` is the cluster that was asked, None if nobody knows. Ids of earlier generations count as
    recorded, but only jobs of the newest generation and unrecorded live ones are in the result.
    """
    home, told = cluster_of(events), list(records)
    asked = {here, *(record.cluster for record in told)}  # SLURM_CLUSTERS may name several
    if home is not None and here is not None and home not in asked:
        return RunJobs(answered=False, elsewhere=home, here=here)
    recent, ever = set(job_ids(generation(events))), set(job_ids(events))
    jobs, unrecorded = [], []
    for record in told:
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
