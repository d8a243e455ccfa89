"""Lists the requests of people to a run with their results, from its ledger and saves. Pure.

Belongs here: finding the result of a request. Does not belong here: making requests (`requests`,
`control`).
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from hpctrain.actions.requests import TAKE_BACK
from hpctrain.store.ledger import Event, EventKind
from hpctrain.store.run_records import SaveRecord
from hpctrain.supervise.judge.documents import ActionKind

# What a person has accepted, as options of the command line.
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
    """List all requests, and everything accepted, in the order of the ledger."""
    stories = []
    for number, event in enumerate(events):
        if event.event is not EventKind.CONTROL and event.event not in _ACCEPTED:
            continue
        time, answer = _answer(event, events[number + 1 :], saves) or (None, None)
        stories.append(
            AskedStory(
                asked_time=event.time,
                user=event.user,
                action=_ACCEPTED.get(event.event, event.action or ""),
                reason=event.reason,
                answer=answer,
                answer_seconds=None if time is None else max(0.0, time - event.time),
            )
        )
    return stories


def _answer(
    event: Event, later: Sequence[Event], saves: Sequence[SaveRecord]
) -> tuple[float, str] | None:
    """Find when and how a request was answered; None if it has not been followed yet."""
    if event.event in _ACCEPTED:
        return event.time, "; ".join(event.evidence) or f"{event.last_step or 0:,} steps given up"
    if event.action == TAKE_BACK:
        return event.time, "withdrawn"
    if event.action == "save":
        after = [save for save in saves if save.time >= event.time]
        return (after[0].time, f"step {after[0].step:,} is saved") if after else None
    resumes = event.action == "resume"
    for one in later:
        if one.event is EventKind.CONTROL and one.action != "save":
            return one.time, f"asked to {one.action} instead"
        if resumes and one.event is EventKind.SUBMITTED:
            return one.time, f"submitted as job {one.job_id}"
        if resumes and one.event is EventKind.ATTEMPT_STARTED:
            return one.time, "started again"
        if not resumes and one.event is EventKind.ACTION and one.action in _ENDS:
            return one.time, f"{one.action}: {one.reason}"
    return None
