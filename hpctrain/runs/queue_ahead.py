"""Estimates how long a run will still wait in the queue, from its own starts. Pure.

Belongs here: the estimate. Does not belong here: Slurm's own forecast of the next start
(`hpctrain.runs.why`), a forecast before submission (`hpctrain.plan.forecast`).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from hpctrain.judge.documents import ActionKind
from hpctrain.records.ledger import Event, EventKind

_ASKS = (EventKind.SUBMITTED, EventKind.ADOPTED)
_QUEUES_AGAIN = (ActionKind.REQUEUE, ActionKind.LEAVE)
# A stop or a hold between two starts was a person's wish, and no wait for nodes.
_PERSONS = (ActionKind.STOP, ActionKind.HOLD, ActionKind.FINISH)


def queue_ahead_seconds(
    events: Sequence[Event], left_seconds: float, time_limit_seconds: float | None
) -> float | None:
    """Estimate the time in the queue before `left_seconds` more of training are done.

    The mean wait of the starts so far, times the further starts: one for each length of an attempt
    that is left. An attempt is as long as those that have ended were on the average, and before one
    has ended, as its job may be. None where the run has never started or that is not known.
    """
    waits, lengths = _waits_and_lengths(events)
    if not waits:
        return None
    length = statistics.mean(lengths) if lengths else time_limit_seconds
    if not length:
        return None
    return statistics.mean(waits) * (left_seconds // length)


def _waits_and_lengths(events: Sequence[Event]) -> tuple[list[float], list[float]]:
    """Collect how long the run waited for each start, and how long the ended attempts were."""
    waits: list[float] = []
    lengths: list[float] = []
    asked: float | None = None
    started: float | None = None
    for event in events:
        if event.event is EventKind.ATTEMPT_STARTED:
            if asked is not None:
                waits.append(max(0.0, event.time - asked))
            asked, started = None, event.time
            continue
        if event.event in _ASKS and started is None:
            asked = event.time if asked is None else asked
            continue
        if event.event is EventKind.ATTEMPT_LOST:  # written when the next one starts
            asked = started = None
        elif event.event is EventKind.ACTION and event.action in (*_QUEUES_AGAIN, *_PERSONS):
            if started is not None:
                lengths.append(max(0.0, event.time - started))
            asked = None if event.action in _PERSONS else event.time
            started = None
    return waits, lengths
