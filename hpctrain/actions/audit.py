"""What people have asked of a run, and what came of it: from its ledger and its saves. Pure.

Belongs here: finding the answer to a request. Does not belong here: making requests (`requests`,
`control`).
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from hpctrain.actions.requests import TAKE_BACK
from hpctrain.store.ledger import Event, EventKind
from hpctrain.store.run_records import SaveRecord
from hpctrain.supervise.judge.documents import ActionKind

# What a person has accepted, in the words of the command line.
_ACCEPTED = {
    EventKind.FRESH_START_ACCEPTED: "resume --from-scratch",
    EventKind.DATA_ACCEPTED: "resume --accept-data",
}
_ENDS = frozenset({ActionKind.STOP, ActionKind.FINISH, ActionKind.HOLD})


class AskedStory(BaseModel):
    """One request: who asked for what and when (seconds since the epoch), and the answer (None:
    not followed yet)."""

    model_config = ConfigDict(frozen=True)

    asked_time: float
    user: str | None
    action: str
    reason: str | None = None
    answer: str | None = None
    answer_seconds: float | None = None


def asked(events: Sequence[Event], saves: Sequence[SaveRecord]) -> list[AskedStory]:
    """All requests, and what was accepted, in the order of the ledger."""
    return [
        _story(event, events[number + 1 :], saves)
        for number, event in enumerate(events)
        if event.event is EventKind.CONTROL or event.event in _ACCEPTED
    ]


def _story(event: Event, later: Sequence[Event], saves: Sequence[SaveRecord]) -> AskedStory:
    time, answer = _answer(event, later, saves) or (None, None)
    return AskedStory(
        asked_time=event.time,
        user=event.user,
        action=_ACCEPTED.get(event.event, event.action or ""),
        reason=event.reason,
        answer=answer,
        answer_seconds=None if time is None else max(0.0, time - event.time),
    )


def _answer(
    event: Event, later: Sequence[Event], saves: Sequence[SaveRecord]
) -> tuple[float, str] | None:
    if event.event in _ACCEPTED:
        return event.time, "; ".join(event.evidence) or f"{event.last_step or 0:,} steps given up"
    if event.action == TAKE_BACK:
        return event.time, "withdrawn"
    return _saved(event, saves) if event.action == "save" else _done(event.action or "", later)


def _saved(event: Event, saves: Sequence[SaveRecord]) -> tuple[float, str] | None:
    """The first checkpoint that counts after the request."""
    after = [save for save in saves if save.time >= event.time]
    return (after[0].time, f"step {after[0].step:,} is saved") if after else None


def _done(action: str, later: Sequence[Event]) -> tuple[float, str] | None:
    """What the supervisor has done about it, or a later request that takes its place."""
    for event in later:
        if event.event is EventKind.CONTROL and event.action != "save":
            return event.time, f"asked to {event.action} instead"
        if action == "resume" and event.event is EventKind.SUBMITTED:
            return event.time, f"submitted as job {event.job_id}"
        if action == "resume" and event.event is EventKind.ATTEMPT_STARTED:
            return event.time, "started again"
        if action != "resume" and event.event is EventKind.ACTION and event.action in _ENDS:
            return event.time, f"{event.action}: {event.reason}"
    return None
