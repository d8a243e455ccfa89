"""Make notices of the events in a ledger: what happened, why, what was done, what a person can do.

The causes are the words of the ledger, which `hpctrain why` and `describe` print, too. A notice has
the identity of its event, whoever makes it. Belongs here: which event is which kind of notice, and
its commands. Does not belong here: the words around them (`message_text`), choosing and sending
(`delivery`). Pure.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from hpctrain.judge.attempts import ended_on_request
from hpctrain.judge.causes import Cause
from hpctrain.judge.documents import ActionKind
from hpctrain.records.ledger import Event, EventKind

_ENDS = (EventKind.LAUNCH_ENDED, EventKind.ATTEMPT_LOST)
# Of something that can stop anew.
_BEGINNINGS = (EventKind.SUBMITTED, EventKind.ADOPTED, EventKind.LAUNCH_STARTED)
# Ends by which a run continues as it was planned to: nobody waits for that message.
_PLANNED = frozenset({Cause.TIME_LIMIT, Cause.SUPERSEDED, Cause.CONTROLLER_AWAY, Cause.YIELDED})


class NoticeKind(StrEnum):
    """What people can be told about; the names of `notify.on`."""

    STARTED = "started"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"
    HELD = "held"
    REQUEUED = "requeued"
    RESTARTED = "restarted"
    NODE_EXCLUDED = "node_excluded"
    ROLLED_BACK = "rolled_back"
    CHECKPOINT_REJECTED = "checkpoint_rejected"
    SLOW_RANK = "slow_rank"
    STALLED = "stalled"
    WAITING = "waiting"
    DISK_LOW = "disk_low"


# Told whatever the rate is: without them nobody would know that nothing happens any more.
FINAL_KINDS = frozenset({NoticeKind.DONE, NoticeKind.FAILED, NoticeKind.HELD})
# What `hpctrain watch` reports (`runs.watch_rules.Symptom`) and does nothing about; None: the
# supervisor or a person has told it already. A run that it submits again is requeued.
WATCHED: dict[str, NoticeKind | None] = {
    "orphaned": NoticeKind.FAILED,
    "chain exhausted": NoticeKind.FAILED,
    "preempted": NoticeKind.FAILED,
    "vanished": NoticeKind.FAILED,
    "launch failed, held": NoticeKind.HELD,
    "no login environment, held": NoticeKind.HELD,
    "launched too often, held": NoticeKind.HELD,
    "requeue delay": None,
    "no node left": NoticeKind.WAITING,
    "too few nodes": NoticeKind.WAITING,
    "waits long": NoticeKind.WAITING,
    "stalled": NoticeKind.STALLED,
    "storm": NoticeKind.STALLED,
    "little disk left": NoticeKind.DISK_LOW,
    "cancelled": None,
    "failed": None,
    "unrecorded job": None,
}
_TOLD, _RESUBMITTED = "tell", "resubmit"


@dataclass(frozen=True)
class RunFacts:
    """What all notices of a run share; `runs` is the directory of its directory, as text.

    `target_step`: None where the run ends with a file and not at a step.
    """

    run_id: str
    runs: str
    user: str
    cluster: str
    target_step: int | None


@dataclass(frozen=True)
class Notice:
    """One event that a person may want to know. `event_time` in seconds since the epoch.

    `cause`, `reason` and `evidence` are why the last launch ended, `done` is what was done by
    itself. Steps are those that the ledger had then. `by_watch`: no supervisor knows of it.
    """

    notice_id: str
    kind: NoticeKind
    event_time: float
    job_id: int | None = None
    cause: str | None = None
    reason: str = ""
    evidence: tuple[str, ...] = ()
    done: str = ""
    step: int | None = None
    checkpoint_step: int | None = None
    nodes: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    by_watch: bool = False


@dataclass
class _Past:
    """What the ledger had before an event."""

    end: Event | None = None
    stopped: bool = False
    step: int | None = None
    checkpoint_step: int | None = None

    def add(self, event: Event) -> None:
        if event.event in _BEGINNINGS or (event.event in _ENDS and event.cause != Cause.CANCELLED):
            self.stopped = False
        if event.event in _ENDS:
            self.end = event
            self.step = self.step if event.last_step is None else event.last_step
            if event.checkpoint_step is not None:
                self.checkpoint_step = event.checkpoint_step
        elif event.event is EventKind.LAUNCH_STARTED and event.resume_step is not None:
            self.step = event.resume_step
        elif event.event is EventKind.CANCELLED or (
            event.event is EventKind.ACTION and event.action == ActionKind.STOP
        ):
            self.stopped = True


def notices_of(events: Sequence[Event], facts: RunFacts) -> list[Notice]:
    """Make the notices of all events, of every kind, in the order of the ledger."""
    past, found = _Past(), []
    for number, event in enumerate(events):
        later = events[number + 1] if number + 1 < len(events) else None
        if event.event in _ENDS:
            past.add(event)
        found += [_notice(kind, event, past, facts) for kind in _kinds(event, past, later)]
        if event.event not in _ENDS:
            past.add(event)
    return found


def _kinds(event: Event, past: _Past, later: Event | None) -> Iterator[NoticeKind]:
    """Choose the kinds of notice that an event gives; none for most events."""
    if event.event is EventKind.LAUNCH_STARTED and event.epoch == 1:
        yield NoticeKind.STARTED
    elif event.event is EventKind.ACTION:
        yield from _kinds_of_action(event, past)
    elif event.event is EventKind.ATTEMPT_LOST:
        # A pass of `watch` closes the attempt first and then says what it does.
        if later is None or later.event is not EventKind.WATCH:
            yield NoticeKind.REQUEUED
    elif event.event is EventKind.ROLLED_BACK:
        yield NoticeKind.ROLLED_BACK
    elif event.event is EventKind.CHECKPOINT_REJECTED:
        yield NoticeKind.CHECKPOINT_REJECTED
    elif event.event is EventKind.SLOW_RANK:
        yield NoticeKind.SLOW_RANK
    elif event.event is EventKind.CANCELLED:
        if not past.stopped:
            yield NoticeKind.STOPPED
    elif event.event is EventKind.WATCH:
        if event.action == _RESUBMITTED:
            yield NoticeKind.REQUEUED
        elif event.action == _TOLD and (kind := WATCHED.get(event.symptom or "")) is not None:
            yield kind


def _kinds_of_action(event: Event, past: _Past) -> Iterator[NoticeKind]:
    if event.action == ActionKind.FINISH:
        # A later job of a chain that finds the run done says so without a cause.
        if event.cause == Cause.DONE:
            yield NoticeKind.DONE
    elif event.action == ActionKind.STOP:
        # Slurm may start a stopped job again, which then stops with the same reason.
        if not past.stopped:
            cause = event.cause or (past.end.cause if past.end is not None else None)
            yield NoticeKind.STOPPED if ended_on_request(event, cause) else NoticeKind.FAILED
    elif event.action == ActionKind.HOLD:
        yield NoticeKind.HELD
    elif event.action == ActionKind.LEAVE and event.exit_code:
        yield NoticeKind.FAILED  # no job of the chain is left
    elif event.cause is not None and event.cause not in _PLANNED:
        yield (NoticeKind.RESTARTED if event.action == ActionKind.RELAUNCH else NoticeKind.REQUEUED)
    if event.excluded:
        yield NoticeKind.NODE_EXCLUDED


def _notice(kind: NoticeKind, event: Event, past: _Past, facts: RunFacts) -> Notice:
    end = past.end
    cause, reason = (end.cause, end.reason or "") if end is not None else (None, "")
    done = f"{event.action}: {event.reason}" if event.action and event.reason else ""
    if event.event is EventKind.WATCH:
        cause, reason = None, event.reason or ""
        done = f"`hpctrain watch` submits it again: {reason}" if event.action != _TOLD else ""
    elif event.event in (EventKind.ROLLED_BACK, EventKind.CHECKPOINT_REJECTED):
        step = event.checkpoint_step
        rolled = event.event is EventKind.ROLLED_BACK
        done = f"the run goes back to step {step}" if rolled else f"step {step} is not used again"
        if event.reason:
            done, reason = (f"{done}; {event.reason}", reason) if rolled else (done, event.reason)
            cause = cause if rolled else event.cause
    elif event.event is EventKind.SLOW_RANK:
        cause, reason = None, f"rank {event.rank} on {event.node} {event.reason or 'is slow'}"
    elif event.event is EventKind.CANCELLED:
        cause, reason = None, event.reason or "cancelled"
    elif kind in (NoticeKind.STARTED, NoticeKind.DONE):
        cause, reason = None, ""
        done = ""
    # Only these come right after the end of a launch: of others nobody knows the step from here.
    follows = event.event not in (EventKind.WATCH, EventKind.SLOW_RANK, EventKind.CANCELLED)
    ended_on = (end.node,) if end is not None and end.node and cause == end.cause else ()
    seen_on = (event.node,) if event.node else ()
    return Notice(
        notice_id=f"{event.time:.3f}-{kind}",
        kind=kind,
        event_time=event.time,
        job_id=event.job_id,
        cause=cause,
        reason=reason,
        evidence=end.evidence if end is not None and cause and cause == end.cause else (),
        done=done,
        step=(0 if kind is NoticeKind.STARTED else past.step) if follows else None,
        checkpoint_step=past.checkpoint_step,
        nodes=event.excluded or (ended_on if cause else seen_on),
        commands=tuple(_commands(kind, cause, facts)),
        by_watch=event.event in (EventKind.WATCH, EventKind.CANCELLED),
    )


def _commands(kind: NoticeKind, cause: str | None, facts: RunFacts) -> Iterator[str]:
    """Yield what a person can type about a notice, the first thing first."""
    run = f"{shlex.quote(facts.run_id)} --runs {shlex.quote(facts.runs)}"
    if kind in (NoticeKind.STARTED, NoticeKind.DONE):
        yield f"hpctrain status {run}"
        return
    if kind in (NoticeKind.HELD, NoticeKind.STOPPED):
        yield f"hpctrain resume {run}"
        return
    yield f"hpctrain why {run}"
    if kind is NoticeKind.FAILED:
        yield f"hpctrain logs {run} --errors"
        if cause == Cause.DISK_FULL:
            yield f"hpctrain clean {run}"
        yield f"hpctrain resume {run}"
    elif kind is NoticeKind.DISK_LOW:
        yield f"hpctrain clean {run}"
    elif kind in (NoticeKind.NODE_EXCLUDED, NoticeKind.SLOW_RANK):
        yield f"hpctrain nodes --runs {shlex.quote(facts.runs)}"
    elif kind is NoticeKind.CHECKPOINT_REJECTED:
        yield f"hpctrain checkpoints {run}"
    elif kind is NoticeKind.ROLLED_BACK:
        yield f"hpctrain describe {run}"
