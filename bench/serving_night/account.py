"""What the events of a night did to its requests: who was hit, what failed, how late answers were.

Pure: records in, figures and objections out. Does not belong here: doing anything to a service
(`events`), asking it (`load`), pictures.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# From looking at the clock to the kernel's kill, and from a death until the client hears of it.
_MOMENT_SECONDS = 1.0


@dataclass(frozen=True)
class NightRequest:
    """One request; times are seconds since the epoch.

    `replicas` are those whose engines have begun it, more than one if it was tried again. `failure`
    is None for a whole answer.
    """

    request_id: str
    planned: float
    ended: float
    ttft_seconds: float | None
    e2e_seconds: float | None
    failure: str | None = None
    detail: str = ""
    replicas: tuple[str, ...] = ()

    def is_in_flight(self, moment: float, slack_seconds: float = 0.0) -> bool:
        return self.planned - slack_seconds <= moment <= self.ended + slack_seconds


@dataclass(frozen=True)
class Moment:
    """When one replica was withdrawn, or died; seconds since the epoch.

    `broken_off`: what the replica itself counted as lost; None if it could not count.
    """

    replica: str
    time: float
    broken_off: int | None = None


@dataclass(frozen=True)
class Event:
    """One thing done to the service, from its beginning until all wanted replicas answer again."""

    name: str
    drain_possible: bool
    began: float
    ended: float
    moments: tuple[Moment, ...]
    story: str = ""

    @property
    def replicas(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(moment.replica for moment in self.moments))


@dataclass(frozen=True)
class Asked:
    """Which replicas the router asked from a time on, until the next record."""

    time: float
    replicas: tuple[str, ...]


@dataclass(frozen=True)
class Latencies:
    """Percentiles of requests that were answered, in seconds; NaN without any."""

    answered: int
    ttft_p50: float
    ttft_p99: float
    e2e_p50: float
    e2e_p99: float


@dataclass(frozen=True)
class EventAccount:
    """What one event did: `least` is the lowest number of replicas that the router asked."""

    event: Event
    requests: int
    in_flight: tuple[NightRequest, ...]
    failed: tuple[NightRequest, ...]
    latencies: Latencies
    least: int


@dataclass(frozen=True)
class NightAccount:
    """The whole night. `objections` are sentences about what must not have happened."""

    events: tuple[EventAccount, ...]
    quiet: Latencies
    requests: int
    failed: tuple[NightRequest, ...]
    without_end: int
    objections: tuple[str, ...]


def account(
    events: Sequence[Event],
    requests: Sequence[NightRequest],
    asked: Sequence[Asked],
    *,
    sent: int,
) -> NightAccount:
    """Add everything up; `sent` is how many requests the client has sent."""
    failed = tuple(one for one in requests if one.failure is not None)
    accounts = tuple(
        _of_event(
            event, requests, asked, tuple(one for one in failed if event_of(one, events) is event)
        )
        for event in events
    )
    quiet = [
        one
        for one in requests
        if not any(event.began <= one.planned <= event.ended for event in events)
    ]
    without_end = sent - len(requests)
    objections = [words for one in failed if (words := _objection(one, events)) is not None]
    objections += [
        f"{event.name}: {moment.replica} counts {moment.broken_off} requests as broken off"
        for event in events
        for moment in event.moments
        if event.drain_possible and moment.broken_off
    ]
    if without_end:
        objections.append(f"{without_end} requests have no end at all")
    return NightAccount(
        accounts, latencies(quiet), len(requests), failed, without_end, tuple(objections)
    )


def event_of(request: NightRequest, events: Iterable[Event]) -> Event | None:
    """The event to which a failed request belongs: one in whose time it was under way.

    Of several, one that has hit its replica at that moment, or else one that allows no drain, is
    the more likely reason.
    """

    def order(event: Event) -> tuple[bool, bool]:
        has_hit = any(_was_on(request, moment) for moment in event.moments)
        return not has_hit, event.drain_possible

    during = [
        event for event in events if request.planned <= event.ended and request.ended >= event.began
    ]
    return min(during, key=order, default=None)


def _objection(request: NightRequest, events: Sequence[Event]) -> str | None:
    """Why this failure must not have happened; None for one that nothing could prevent."""
    name = f"{request.request_id} failed ({request.failure}: {request.detail})"
    event = event_of(request, events)
    if event is None:
        return f"{name} outside of all events"
    if event.drain_possible:
        return f"{name} during {event.name}, where a drain was possible"
    if not any(_was_on(request, moment) for moment in event.moments):
        return f"{name} during {event.name}, but was not on the replica that died"
    return None


def _was_on(request: NightRequest, moment: Moment) -> bool:
    """Whether the replica computed the request at that moment.

    A death may swallow the engine's line about a request, which then has no replica at all.
    """
    if not request.is_in_flight(moment.time, _MOMENT_SECONDS):
        return False
    return moment.replica in request.replicas or not request.replicas


def _of_event(
    event: Event,
    requests: Sequence[NightRequest],
    asked: Sequence[Asked],
    failed: tuple[NightRequest, ...],
) -> EventAccount:
    during = [one for one in requests if event.began <= one.planned <= event.ended]
    # A node takes a moment to die: what began in it, and failed, was in flight as well.
    hit = [
        one
        for one in requests
        if any(
            (one.is_in_flight(moment.time) and moment.replica in one.replicas)
            or (one in failed and _was_on(one, moment))
            for moment in event.moments
        )
    ]
    return EventAccount(
        event=event,
        requests=len(during),
        in_flight=tuple(hit),
        failed=failed,
        latencies=latencies(during),
        least=least_asked(asked, event.began, event.ended),
    )


def least_asked(asked: Sequence[Asked], begin: float, end: float) -> int:
    """The lowest number of replicas that the router asked between two times."""
    before = [one for one in asked if one.time <= begin][-1:]
    during = [one for one in asked if begin < one.time <= end]
    return min((len(one.replicas) for one in (*before, *during)), default=0)


def latencies(requests: Iterable[NightRequest]) -> Latencies:
    """Percentiles of those that were answered."""
    answered = [one for one in requests if one.failure is None]
    ttft = sorted(one.ttft_seconds for one in answered if one.ttft_seconds is not None)
    e2e = sorted(one.e2e_seconds for one in answered if one.e2e_seconds is not None)
    return Latencies(
        len(answered),
        percentile(ttft, 0.5),
        percentile(ttft, 0.99),
        percentile(e2e, 0.5),
        percentile(e2e, 0.99),
    )


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that this share of all does not exceed; NaN of none."""
    if not ordered:
        return math.nan
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def kinds(failed: Iterable[NightRequest]) -> str:
    """Failures by kind, as `2 reset, 1 http 5xx`."""
    counts = Counter(one.failure for one in failed)
    return ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
