"""Tells the life of each replica from the ledgers of its service and of its own job.

The controller knows when a replica became ready and when it was to leave; the supervisor in the
job knows launches, signals and why an engine ended; the replica itself how it left. Belongs here:
the phases of a replica over time, and how it left. Does not belong here: phases of now
(`ServiceState`), money, pictures.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from hpctrain.base.frozen import Frozen
from hpctrain.judge.attempts import marks_of
from hpctrain.judge.causes import SCHEDULER_CAUSES, Cause
from hpctrain.judge.documents import ActionKind
from hpctrain.records.ledger import Event, EventKind, Ledger
from hpctrain.records.run_records import read_record
from hpctrain.records.service_layout import ReplicaName
from hpctrain.records.service_records import (
    DrainRecord,
    ServiceEvent,
    ServiceEventKind,
    ServiceState,
)
from hpctrain.serve.service_files import ServiceFiles
from hpctrain.telemetry.goodput import with_work
from hpctrain.telemetry.timeline import Timeline, timeline

DrainResult = Literal["finished", "broken_off"]
LifePhase = Literal["queued", "loading", "ready", "draining", "failed"]
# Ends of launches that somebody asked for: no failures of a service.
ASKED_FOR = SCHEDULER_CAUSES | {
    *(Cause.DONE, Cause.YIELDED, Cause.CANCELLED, Cause.DEADLINE, Cause.SUPERSEDED)
}
# An engine writes no steps, whose absence would mean that nobody is there.
_NEVER_QUIET_SECONDS = 1e11
_GONE = ("ended", "failed")
_OF_SERVICE: dict[ServiceEventKind, LifePhase | None] = {
    ServiceEventKind.START_REPLICA: "queued",
    ServiceEventKind.REPLICA_READY: "ready",
    ServiceEventKind.DRAIN_REPLICA: "draining",
    ServiceEventKind.REPLICA_FAILED: None,
    ServiceEventKind.REPLICA_ENDED: None,
}
_OF_JOB: dict[EventKind, LifePhase | None] = {
    EventKind.SUBMITTED: "queued",
    EventKind.ATTEMPT_STARTED: "loading",
    EventKind.LAUNCH_STARTED: "loading",
    EventKind.SERVING: "ready",
    EventKind.SIGNAL: "draining",
    EventKind.LAUNCH_ENDED: "failed",
    EventKind.ATTEMPT_LOST: None,
    EventKind.CANCELLED: None,
}
_OF_ACTION: dict[str, LifePhase | None] = {
    ActionKind.STOP: None,
    ActionKind.FINISH: None,
    ActionKind.HOLD: None,
    ActionKind.LEAVE: None,
    ActionKind.REQUEUE: "queued",
    ActionKind.RELAUNCH: "failed",
}


class LifeSpan(Frozen):
    """One phase of a replica, in seconds since the epoch; `end` is that of now while it lasts.

    `cause` and `reason`: of a failed launch.
    """

    phase: LifePhase
    begin: float
    end: float
    cause: str = ""
    reason: str = ""


class ReplicaLife(Frozen):
    """One job of one replica. `over_since` is None while it may still answer.

    `cause`: why its engine or job ended last; `ends` are all causes. `failed`: its controller gave
    this job up. `drain`: how it left on purpose; `broken_off` requests were lost then, None where
    nobody has counted them.
    """

    name: str
    spans: tuple[LifeSpan, ...] = ()
    job_id: int | None = None
    nodes: str | None = None
    instead_of: str | None = None
    over_since: float | None = None
    failed: bool = False
    drain: DrainResult | None = None
    broken_off: int | None = None
    ends: tuple[str, ...] = ()
    reason: str = ""

    @property
    def cause(self) -> str | None:
        return self.ends[-1] if self.ends else None

    @property
    def causes(self) -> tuple[str, ...]:
        """Why its launches and its job ended; a job that vanished left no word about it."""
        return self.ends or ((str(Cause.UNKNOWN),) if self.failed else ())

    @property
    def answering(self) -> tuple[tuple[float, float], ...]:
        """When it was ready, as intervals in seconds since the epoch."""
        return tuple((one.begin, one.end) for one in self.spans if one.phase == "ready")

    @property
    def working(self) -> tuple[tuple[float, float], ...]:
        """When it computed requests: while it was ready, and while it finished what it had."""
        spans = (one for one in self.spans if one.phase in ("ready", "draining"))
        return tuple((one.begin, one.end) for one in spans)

    def seconds_in(self, phase: LifePhase) -> float:
        return sum(one.end - one.begin for one in self.spans if one.phase == phase)

    @property
    def load_seconds(self) -> float | None:
        """From the start of its job to its first answer; None if it never answered."""
        ready = next((one.begin for one in self.spans if one.phase == "ready"), None)
        began = next((one.begin for one in self.spans if one.phase == "loading"), None)
        return None if ready is None or began is None else max(0.0, ready - began)


@dataclass(frozen=True)
class JobRecords:
    """What the job of a replica has recorded: its ledger, and how its newest launch left."""

    name: ReplicaName
    events: Sequence[Event]
    drain: DrainRecord | None


def job_records(service: ServiceFiles, name: ReplicaName) -> JobRecords:
    """Read the records of a replica's job. Raises OSError or NewerFormatError."""
    layout = service.layout.replica(name)
    return JobRecords(name, Ledger(layout.ledger).events(), read_record(layout.drain, DrainRecord))


def replica_life(
    job: JobRecords,
    service_events: Sequence[ServiceEvent],
    state: ServiceState | None,
    now: float,
) -> ReplicaLife:
    """Tell the life of one replica from both ledgers, and from what its controller saw last."""
    name, events = job.name, job.events
    own = [one for one in service_events if one.replica == str(name)]
    seen = next((one for one in state.replicas if one.name == str(name)), None) if state else None
    of_service = (
        _Mark(one.time, _OF_SERVICE[one.event]) for one in own if one.event in _OF_SERVICE
    )
    marks = sorted([*of_service, *_job_marks(job)], key=lambda mark: mark.event_time)
    # It ended for good at the first mark after which nothing has begun again.
    over_since: float | None = None
    for mark in marks:
        if mark.phase not in (None, "failed"):
            over_since = None
        elif mark.phase is None and over_since is None:
            over_since = mark.event_time
    if over_since is None and seen is not None and seen.phase in _GONE:
        over_since = seen.since
        marks.append(_Mark(seen.since, None))
    last = [one for one in own if one.reason]
    ends = [
        one
        for one in events
        if one.event in (EventKind.LAUNCH_ENDED, EventKind.ATTEMPT_LOST) and one.cause
    ]
    reasons = [ends[-1].reason] if ends else [last[-1].reason] if last else []
    kinds, record = {one.event for one in own}, job.drain
    drain: DrainResult | None = None
    broken_off = None
    if over_since is not None and record is not None:
        # Requests that were lost: those that were left, or those of a job that was killed before.
        broken_off = record.in_flight if record.ended_at is None else record.broken_off
    if over_since is not None and (record is not None or ServiceEventKind.DRAIN_REPLICA in kinds):
        unfinished = ServiceEventKind.DRAIN_FAILED in kinds or bool(broken_off)
        drain = "broken_off" if unfinished else "finished"
    failed = ServiceEventKind.REPLICA_FAILED in kinds
    return ReplicaLife(
        name=str(name),
        spans=tuple(_spans(marks, now)),
        job_id=next((one.job_id for one in reversed(events) if one.job_id is not None), None)
        or next((one.job_id for one in reversed(own) if one.job_id is not None), None),
        nodes=next((one.nodes for one in reversed(events) if one.nodes), None)
        or next((one.node for one in reversed(own) if one.node), None),
        instead_of=next((one.instead_of for one in own if one.instead_of), None),
        over_since=over_since,
        drain=drain,
        broken_off=broken_off,
        failed=failed or (seen is not None and seen.phase == "failed"),
        ends=tuple(str(one.cause) for one in ends),
        reason=next((one for one in reasons if one), "") or (seen.reason if seen else ""),
    )


def held_timeline(life: ReplicaLife, events: Sequence[Event], now: float) -> Timeline:
    """Cut the time of a replica's job into categories; while it works it is productive.

    A job that was ended without a last line of its own ends where the controller saw it end.
    """
    end = now if life.over_since is None else min(now, life.over_since)
    cut = timeline(marks_of(events), (), (), end, _NEVER_QUIET_SECONDS)
    return with_work(cut, life.working)


class _Mark(NamedTuple):
    """From a time on a replica is in a phase, or is not any more."""

    event_time: float
    phase: LifePhase | None
    cause: str = ""
    reason: str = ""


def _job_marks(job: JobRecords) -> Iterable[_Mark]:
    if job.drain is not None:
        yield _Mark(job.drain.withdrawn_at, "draining")
    for event in job.events:
        if event.event in _OF_JOB:
            phase = _OF_JOB[event.event]
            if phase == "failed" and event.cause in ASKED_FOR:
                phase = None
            yield _Mark(event.time, phase, event.cause or "", event.reason or "")
        elif event.event is EventKind.ACTION and event.action in _OF_ACTION:
            yield _Mark(event.time, _OF_ACTION[event.action])


def _spans(marks: Sequence[_Mark], now: float) -> Iterable[LifeSpan]:
    """Cut time at the marks; what a replica does after it was to leave is leaving."""
    known: list[_Mark] = []
    for mark in marks:
        before = known[-1].phase if known else None
        if before == "draining" and mark.phase in ("ready", "draining"):
            continue
        if mark.phase == before or (mark.phase == "failed" and before is None):
            continue
        known.append(mark)
    for mark, following in itertools.pairwise([*known, _Mark(now, None)]):
        if mark.phase is not None and following.event_time > mark.event_time:
            failed = mark.phase == "failed"
            yield LifeSpan(
                phase=mark.phase,
                begin=mark.event_time,
                end=following.event_time,
                cause=mark.cause if failed else "",
                reason=mark.reason if failed else "",
            )
