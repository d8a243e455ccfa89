"""The jobs of all replicas of a service, for its controller: one squeue for all of them.

Belongs here: what run directories and Slurm show of a replica's job. Does not belong here: starting
and draining one (`replicas`), what is done about it (`hpctrain.serve.router`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hpctrain.base import clock
from hpctrain.job.job_queries import find_jobs, record_found
from hpctrain.records.find import RunFiles
from hpctrain.records.jobs import cancel_requested, generation, last_submission, submitted_ids
from hpctrain.records.ledger import Event, EventKind
from hpctrain.records.requests import read_request
from hpctrain.records.run_jobs import RunJobs
from hpctrain.records.service_layout import ReplicaName, ServiceLayout
from hpctrain.records.supervise_config import known_supervise_config
from hpctrain.serve.replicas import drain_replica, start_replica
from hpctrain.slurm.client import SlurmClient

# A start that has no job after so long was interrupted, and counts as failed.
_SUBMITTING_SECONDS = 120.0
# What is over for so long stays so: its run directory is not read again.
_OVER_SECONDS = 60.0
# Slurm's warning may come as much as a minute early (sbatch(1), --signal).
EARLY_SECONDS = 60.0

JobState = Literal["submitting", "pending", "running", "over"]


@dataclass(frozen=True)
class JobView:
    """The newest job of one generation; times in seconds since the epoch.

    `state`: `submitting` has no job yet, `over` has none any more. `ends_at`: when its walltime
    makes it leave, of a running one. `drain_asked`: the replica was asked to leave, or its job to
    end. `problem`: why it has failed, as its supervisor says.
    """

    name: ReplicaName
    state: JobState
    submitted_at: float
    job_id: int | None = None
    node: str | None = None
    started_at: float | None = None
    ends_at: float | None = None
    drain_asked: bool = False
    problem: str = ""


class SlurmReplicaJobs:
    """The jobs of one service's replicas."""

    def __init__(self, service: ServiceLayout, slurm: SlurmClient) -> None:
        self._service, self._slurm = service, slurm
        self._over: dict[ReplicaName, tuple[float, JobView]] = {}
        self._warnings: dict[ReplicaName, float] = {}

    def look(self) -> tuple[JobView, ...] | None:
        """All generations, oldest first; None if Slurm does not answer. Raises OSError."""
        now = clock.now()
        names = self._service.replica_names()
        views = {
            name: view
            for name, (since, view) in self._over.items()
            if now - since > _OVER_SECONDS and name in set(names)
        }
        runs = {name: RunFiles(self._service.replica(name)) for name in names if name not in views}
        events = {run.run_id: run.ledger.events() for run in runs.values()}
        found = find_jobs(list(runs.values()), self._slurm, events)
        for name, run in runs.items():
            jobs = found[run.run_id]
            if not jobs.answered:
                return None
            record_found(run, jobs)
            views[name] = view = _view(
                name, run, events[run.run_id], jobs, self._warning_seconds(name), now
            )
            if view.state == "over":
                self._over.setdefault(name, (now, view))
            else:
                self._over.pop(name, None)
        return tuple(views[name] for name in sorted(views))

    def _warning_seconds(self, name: ReplicaName) -> float:
        """How long before its time limit Slurm warns a generation; read once, it never changes."""
        if name not in self._warnings:
            config = known_supervise_config(self._service.replica(name).supervise_config)
            if config is None:
                return 0.0
            self._warnings[name] = config.warning_seconds
        return self._warnings[name]

    def start(self, name: ReplicaName) -> int:
        """Submit a generation and return its job id.

        One that was begun and not submitted is submitted now. Raises HpctrainError, OSError.
        """
        return start_replica(self._service, name, self._slurm)

    def drain(self, name: ReplicaName) -> None:
        """Ask a generation to leave: a waiting job ends at once. Raises HpctrainError, OSError."""
        drain_replica(self._service, name, self._slurm, "by the controller")


def _view(
    name: ReplicaName,
    run: RunFiles,
    events: Sequence[Event],
    jobs: RunJobs,
    warning_seconds: float,
    now: float,
) -> JobView:
    submitted_at = next(
        (event.time for event in events if event.event is EventKind.SUBMITTING),
        events[0].time if events else now,
    )
    last, active = last_submission(events), jobs.active
    refused = last is not None and last.event is EventKind.SUBMIT_FAILED and last.answered
    state: JobState = "over"
    if active is not None:
        state = "running"
    elif jobs.live:
        state = "pending"
    elif not refused and not submitted_ids(generation(events)):
        state = "submitting" if now - submitted_at < _SUBMITTING_SECONDS else "over"
    ends_at = None
    if active is not None and active.start_time is not None:
        ends = active.start_time + (active.time_limit_seconds or math.inf)
        ends -= warning_seconds + EARLY_SECONDS
        ends_at = max(ends, active.start_time) if ends < math.inf else None
    problem = "its job is gone" if state == "over" else ""
    for event in reversed(events) if state == "over" else ():
        if event.event in (EventKind.LAUNCH_ENDED, EventKind.ATTEMPT_LOST) and event.reason:
            problem = f"{event.cause}: {event.reason}" if event.cause else event.reason
            break
        if event.event is EventKind.SUBMIT_FAILED:
            problem = f"not submitted: {event.reason or 'Slurm refused it'}"
            break
    job = active or next(iter((*jobs.live, *jobs.jobs)), None)
    started = (event.time for event in events if event.event is EventKind.ATTEMPT_STARTED)
    return JobView(
        name=name,
        state=state,
        submitted_at=submitted_at,
        job_id=job.job_id if job is not None else next(iter(submitted_ids(events)), None),
        node=job.node_list if job is not None and state == "running" else None,
        # The first attempt: a wait for a place in the queue after that is another one.
        started_at=next(started, None),
        ends_at=ends_at,
        drain_asked=read_request(run.layout) is not None or _was_followed(events),
        problem=problem,
    )


def _was_followed(events: Sequence[Event]) -> bool:
    """Whether a stop or a cancellation was asked for and followed: its file is gone by then.

    A stop was followed if the job's supervisor has acted since, or if the job never had one.
    """
    actions = [event.time for event in events if event.event is EventKind.ACTION]
    started = any(event.event is EventKind.ATTEMPT_STARTED for event in events)
    return cancel_requested(events) or any(
        event.event is EventKind.CONTROL
        and event.action == "stop"
        and (not started or any(time >= event.time for time in actions))
        for event in events
    )
