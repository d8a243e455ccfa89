"""Read from a ledger which attempts and launches a run had, and how they ended. Pure.

Everybody who shows or counts them reads them here, so that an event means the same everywhere.
Belongs here: what the events of attempts, launches and actions mean. Does not belong here: the
state of a run (`hpctrain.runs.state`), its jobs (`hpctrain.records.jobs`), counts for the policy
(`launch_history`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from hpctrain.judge.causes import FAILURE_CAUSES, Cause
from hpctrain.judge.documents import ActionKind
from hpctrain.records.jobs import generation
from hpctrain.records.ledger import Event, EventKind
from hpctrain.telemetry.timeline import Mark, MarkKind

# After these actions nothing follows until a person asks for it.
ENDS_RUN = frozenset({ActionKind.STOP, ActionKind.HOLD, ActionKind.FINISH})
_ON_REQUEST = frozenset({Cause.CANCELLED, Cause.YIELDED})
_OF_NO_ATTEMPT = frozenset({EventKind.SUBMITTED, EventKind.ADOPTED})


def _selection(*kinds: EventKind) -> Callable[[Sequence[Event]], list[Event]]:
    """Make a function that lists the events of some kinds, in the order of the ledger."""
    return lambda events: [event for event in events if event.event in kinds]


# Starts of attempts and of launches; ends of launches that their supervisor has recorded, and these
# with the attempts that were lost; what was done about ends.
starts = _selection(EventKind.ATTEMPT_STARTED)
launch_starts = _selection(EventKind.LAUNCH_STARTED)
launch_ends = _selection(EventKind.LAUNCH_ENDED)
ends = _selection(EventKind.LAUNCH_ENDED, EventKind.ATTEMPT_LOST)
actions = _selection(EventKind.ACTION)
# Signals that supervisors got, what the times of stops were computed from, refused checkpoints.
signals = _selection(EventKind.SIGNAL)
timed_stops = _selection(EventKind.STOP_TIMED)
rejections = _selection(EventKind.CHECKPOINT_REJECTED)


def own_time(events: Sequence[Event]) -> float | None:
    """Return the time of the newest event that is no word of `hpctrain watch`."""
    return max((one.time for one in events if one.event is not EventKind.WATCH), default=None)


# -- attempts --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Launch:
    """The start of one launch, and its end if a supervisor has recorded it."""

    start: Event
    end: Event | None = None

    @property
    def ended_early(self) -> bool:
        """Whether its trainer has ended well, and before its target."""
        return self.end is not None and self.end.cause == Cause.ENDED_EARLY


@dataclass(frozen=True)
class Attempt:
    """One start of the run by Slurm: its own events, and the record of its loss."""

    start: Event
    events: tuple[Event, ...]
    lost: Event | None

    @cached_property
    def newest(self) -> dict[EventKind, Event]:
        """The newest of its events of each kind."""
        return {event.event: event for event in self.events}

    @property
    def last(self) -> Event | None:
        """The action that ended it or was taken last, else the record of its loss."""
        return self.newest.get(EventKind.ACTION) or self.lost

    @property
    def launches(self) -> list[Launch]:
        """Its launches in their order."""
        return launches(self.events)


def launches(events: Sequence[Event]) -> list[Launch]:
    """List the launches whose starts are recorded, in their order."""
    known = {event.epoch: event for event in launch_ends(events)}
    begun = (event for event in launch_starts(events) if event.epoch is not None)
    return [Launch(event, known.get(event.epoch)) for event in begun]


def attempts(events: Sequence[Event]) -> list[Attempt]:
    """List the attempts in their order.

    A supervisor that outlives its attempt still writes after the next one has begun, and the end of
    a lost one is recorded when a later attempt starts.
    """
    places = [n for n, event in enumerate(events) if event.event is EventKind.ATTEMPT_STARTED]
    found = []
    for begin, end in zip(places, [*places[1:], len(events)], strict=False):
        start = events[begin]
        own = [
            one
            for one in events[begin:end]
            if one.job_id is None or one.event in _OF_NO_ATTEMPT or one.attempt == start.attempt
        ]
        lost = (
            one
            for one in (*own, *events[end:])
            if one.event is EventKind.ATTEMPT_LOST and one.attempt == start.attempt
        )
        found.append(Attempt(start, tuple(own), next(lost, None)))
    return found


def open_launch(events: Sequence[Event]) -> Event | None:
    """Return the start of the launch that has no end yet; None if none runs."""
    begun = launch_starts(events)
    return begun[-1] if begun and not ends(events[events.index(begun[-1]) :]) else None


# -- actions ---------------------------------------------------------------------------------


def standing_action(events: Sequence[Event]) -> Event | None:
    """Return how the newest attempt was ended; None while it goes on, also by a relaunch."""
    for event in reversed(generation(events)[1:]):
        if event.event is EventKind.ATTEMPT_STARTED:
            return None
        if event.event is EventKind.ACTION and event.action != ActionKind.RELAUNCH:
            return event
    return None


def ended_on_request(stop: Event, cause: str | None) -> bool:
    """Whether an action that ends the run does what somebody has asked for."""
    return stop.exit_code == 0 or cause in _ON_REQUEST


@dataclass(frozen=True)
class TakenAction:
    """An action, Slurm's answer to it, and what would have been done if the spec allowed it."""

    action: Event
    answer: str | None
    observed: tuple[str, ...]


def last_action(events: Sequence[Event]) -> TakenAction | None:
    """Return the last action.

    None, too, where the last end was the loss of an attempt, about which nothing was done yet: what
    was done about earlier attempts explains nothing. The attempt that tells of the loss may have
    begun before it did.
    """
    ended = ends(events)
    if ended and ended[-1].event is EventKind.ATTEMPT_LOST:
        last = ended[-1]
        begun = [
            number
            for number, event in enumerate(events[: events.index(last)])
            if event.event is EventKind.ATTEMPT_STARTED and event.attempt == last.attempt
        ]
        events = events[begun[-1] :] if begun else events
    numbers = [n for n, event in enumerate(events) if event.event is EventKind.ACTION]
    if not numbers:
        return None
    later = events[numbers[-1] + 1 :]
    answers = (event.reason for event in later if event.event is EventKind.ACTION_RESULT)
    observed = tuple(one.reason or "" for one in later if one.event is EventKind.OBSERVED)
    return TakenAction(events[numbers[-1]], next(answers, None), observed)


# -- time ------------------------------------------------------------------------------------

_MARKS = {
    EventKind.SUBMITTED: MarkKind.SUBMITTED,
    EventKind.ADOPTED: MarkKind.SUBMITTED,
    EventKind.ATTEMPT_STARTED: MarkKind.ATTEMPT_STARTED,
    EventKind.ATTEMPT_LOST: MarkKind.ATTEMPT_LOST,
    EventKind.LAUNCH_STARTED: MarkKind.LAUNCH_STARTED,
    EventKind.LAUNCH_ENDED: MarkKind.LAUNCH_ENDED,
    EventKind.CANCEL_REQUESTED: MarkKind.CANCELLED,
    EventKind.CANCELLED: MarkKind.CANCELLED,
}
# A job that leaves a chain is followed by the next job of the chain, which waits in the queue.
_MARKS_OF_ACTIONS = {
    ActionKind.RELAUNCH: MarkKind.RELAUNCHING,
    ActionKind.REQUEUE: MarkKind.QUEUED,
    ActionKind.LEAVE: MarkKind.QUEUED,
    ActionKind.STOP: MarkKind.STOPPED,
    ActionKind.HOLD: MarkKind.STOPPED,
    ActionKind.FINISH: MarkKind.FINISHED,
}


def marks_of(events: Sequence[Event]) -> list[Mark]:
    """List the events of a ledger that change the category of time."""
    marks = []
    for event in events:
        kind = _MARKS.get(event.event)
        if event.event is EventKind.ACTION and event.action in tuple(ActionKind):
            kind = _MARKS_OF_ACTIONS[ActionKind(event.action)]
        if kind is not None:
            failure = event.cause in FAILURE_CAUSES
            resumed = event.resume_step if kind is MarkKind.LAUNCH_STARTED else None
            marks.append(
                Mark(kind, event.time, event.attempt, event.epoch, event.cause, failure, resumed)
            )
    return marks
