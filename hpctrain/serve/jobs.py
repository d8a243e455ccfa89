"""The jobs of all replicas of a service, for its controller: one squeue for all of them.

Belongs here: what run directories and Slurm show of a replica's job. Does not belong here: starting
and draining one (`serve_replicas`), what is done about it (`hpctrain.serve.router`).
"""

from __future__ import annotations

from collections.abc import Sequence

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
from hpctrain.serve.router.replica_jobs import JobState, JobView
from hpctrain.slurm.client import SlurmClient
from hpctrain.slurm.records import JobRecord

# A start that has no job after so long was interrupted, and counts as failed.
_SUBMITTING_SECONDS = 120.0
# What is over for so long stays so: its run directory is not read again.
_OVER_SECONDS = 60.0
_EARLY_SECONDS = 60.0


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
        settled = {
            name: view
            for name, (since, view) in self._over.items()
            if now - since > _OVER_SECONDS and name in set(names)
        }
        runs = {
            name: RunFiles(self._service.replica(name)) for name in names if name not in settled
        }
        events = {name: run.ledger.events() for name, run in runs.items()}
        found = find_jobs(
            list(runs.values()),
            self._slurm,
            {run.run_id: events[name] for name, run in runs.items()},
        )
        views = dict(settled)
        for name, run in runs.items():
            jobs = found[run.run_id]
            if not jobs.answered:
                return None
            record_found(run, jobs)
            views[name] = view = _view(
                name, run, events[name], jobs, self._warning_seconds(name), now
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
        """Submit a generation and return its job id. Raises HpctrainError."""
        return start_replica(self._service, name, self._slurm)

    def drain(self, name: ReplicaName) -> None:
        """Ask a generation to leave: a waiting job ends at once. Raises HpctrainError."""
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
    job = jobs.active or next(iter(jobs.live), None) or next(iter(jobs.jobs), None)
    drained = read_request(run.layout) is not None or _was_followed(events)
    state = _state(events, jobs, submitted_at, now)
    return JobView(
        name=name,
        state=state,
        submitted_at=submitted_at,
        job_id=job.job_id if job is not None else next(iter(submitted_ids(events)), None),
        node=job.node_list if job is not None and state == "running" else None,
        started_at=_started_at(events),
        ends_at=_ends_at(jobs.active, warning_seconds),
        drain_asked=drained,
        well=drained,
        problem=_problem(events) if state == "over" else "",
    )


def _state(events: Sequence[Event], jobs: RunJobs, submitted_at: float, now: float) -> JobState:
    if jobs.active is not None:
        return "running"
    if jobs.live:
        return "pending"
    last = last_submission(events)
    refused = last is not None and last.event is EventKind.SUBMIT_FAILED and last.answered
    if (
        not refused
        and not submitted_ids(generation(events))
        and now - submitted_at < _SUBMITTING_SECONDS
    ):
        return "submitting"
    return "over"


def _was_followed(events: Sequence[Event]) -> bool:
    """Whether a stop or a cancellation was asked for and followed: its file is gone by then."""
    asked = cancel_requested(events)
    for event in events:
        stopped = event.event is EventKind.CONTROL and event.action == "stop"
        asked = asked or (stopped and _acted_since(events, event))
    return asked


def _acted_since(events: Sequence[Event], asked: Event) -> bool:
    """Whether the job has ended since: its supervisor has said so, or it never had one."""
    acted = (event for event in events if event.event is EventKind.ACTION)
    started = any(event.event is EventKind.ATTEMPT_STARTED for event in events)
    return not started or any(event.time >= asked.time for event in acted)


def _started_at(events: Sequence[Event]) -> float | None:
    """When the first attempt began: a wait for a place in the queue after that is another one."""
    started = (event.time for event in events if event.event is EventKind.ATTEMPT_STARTED)
    return next(started, None)


def _ends_at(job: JobRecord | None, warning_seconds: float) -> float | None:
    """When a running replica will leave because of its time limit: at Slurm's warning.

    The warning may come as much as a minute early (sbatch(1), --signal).
    """
    if job is None or job.start_time is None or job.time_limit_seconds is None:
        return None
    ends = job.start_time + job.time_limit_seconds - warning_seconds - _EARLY_SECONDS
    return max(ends, job.start_time) if ends != float("inf") else None


def _problem(events: Sequence[Event]) -> str:
    """Why the job is over, in the supervisor's words; else what is known."""
    for event in reversed(events):
        if event.event in (EventKind.LAUNCH_ENDED, EventKind.ATTEMPT_LOST) and event.reason:
            return f"{event.cause}: {event.reason}" if event.cause else event.reason
        if event.event is EventKind.SUBMIT_FAILED:
            return f"not submitted: {event.reason or 'Slurm refused it'}"
    return "its job is gone"
