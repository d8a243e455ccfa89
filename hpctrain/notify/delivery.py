"""Make one pass over a run: send what is to be told and has not been told yet, and record it.

The supervisor makes a pass after each event, and `hpctrain watch --act` over all runs. Both may do
so at the same time, on different hosts: `hpctrain.records.notices` gives each notice to one of
them. Belongs here: choosing (quiet hours, rates), claiming, sending and recording. Does not belong
here: when a pass is made, any thread.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import BaseModel, ConfigDict

from hpctrain.base.errors import HpctrainError
from hpctrain.notify.channels import OutcomeUnknownError, send
from hpctrain.notify.message_text import Message, compose
from hpctrain.notify.notices import FINAL_KINDS, Notice, NoticeKind, RunFacts, notices_of
from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import Event
from hpctrain.records.notices import (
    EXPIRES_SECONDS,
    LOST_SECONDS,
    Outbox,
    SendRecord,
    SendState,
    pause_seconds,
    read_outbox,
)
from hpctrain.records.requests import user_name
from hpctrain.records.supervise_config import ChannelSettings, NotifySettings, SuperviseConfig

Send = Callable[[ChannelSettings, Message, Mapping[str, str]], None]
# Somebody else has just begun to send: look again what its record says.
_LOOK_AGAIN_SECONDS = 1.0


class NoticeResult(BaseModel):
    """How a channel has taken notices of a run; `problem` is None if it has.

    `unrecorded`: the channel was not asked, because the try could not be recorded.
    """

    model_config = ConfigDict(frozen=True)

    run_id: str
    channel: str
    kinds: tuple[str, ...]
    problem: str | None = None
    unrecorded: bool = False


@dataclass(frozen=True)
class Delivery:
    """The result of a pass; `next_time` (seconds since the epoch): when to make another one.

    `next_time` is None if nothing waits.
    """

    results: tuple[NoticeResult, ...] = ()
    next_time: float | None = None


@dataclass(frozen=True)
class Sender:
    """Who makes passes: `name` for the record, `environment` for programs that send.

    `grace_seconds`: events of a supervisor that are younger are left to it. `told`: the notices and
    channels that this process has told, for one that lives as long as its run. It tells that the
    run has failed also where that cannot be recorded, once: a disk that is full or away may be the
    reason, and nobody else could tell. None: nothing is sent that cannot be recorded.
    """

    name: str
    environment: Mapping[str, str]
    send: Send = send
    grace_seconds: float = 0.0
    told: set[tuple[str, str]] | None = None


def sender_name(what: str) -> str:
    """Name a sender with its host, such as `watch on login1`."""
    return f"{what} on {socket.gethostname()}"


def facts_of(run: RunLayout, config: SuperviseConfig) -> RunFacts:
    return RunFacts(
        run_id=config.run_id,
        runs=str(run.directory.parent),
        user=user_name(),
        cluster=config.cluster,
        target_step=config.target_step,
    )


def is_wanted(notice: Notice, settings: NotifySettings, now: float) -> bool:
    """Whether the run tells such a notice, and it is still news."""
    return notice.kind in settings.on and now - notice.event_time <= EXPIRES_SECONDS


def deliver(
    run: RunLayout,
    config: SuperviseConfig,
    events: Sequence[Event],
    sender: Sender,
    now: float,
    unusable: frozenset[str] = frozenset(),
) -> Delivery:
    """Send what is due on every channel but those of `unusable`."""
    settings = config.notify
    if settings is None:
        return Delivery()
    facts = facts_of(run, config)
    wanted = [
        notice
        for notice in notices_of(events, facts)
        if is_wanted(notice, settings, now)
        and (notice.by_watch or now - notice.event_time >= sender.grace_seconds)
    ]
    if not wanted:
        return Delivery()
    try:
        outbox = read_outbox(run)
    except OSError as error:
        outbox = Outbox(run, error=error)
    results: list[NoticeResult] = []
    times: list[float] = []
    for channel in settings.channels:
        if channel.name in unusable:
            continue
        found, next_time = _deliver_on(channel, settings, facts, wanted, outbox, sender, now)
        results += found
        times += [next_time] if next_time is not None else []
    return Delivery(tuple(results), min(times, default=None))


def _deliver_on(
    channel: ChannelSettings,
    settings: NotifySettings,
    facts: RunFacts,
    wanted: Sequence[Notice],
    outbox: Outbox,
    sender: Sender,
    now: float,
) -> tuple[list[NoticeResult], float | None]:
    """Send what is due on one channel; the second value is when to look again."""
    open_tries = [
        (notice, tries)
        for notice in wanted
        if not (tries := outbox.tries(notice.notice_id, channel.name)).sent and not tries.given_up
        if (notice.notice_id, channel.name) not in (sender.told or ())
    ]
    due = [notice for notice, tries in open_tries if tries.next_time <= now]
    again = [tries.next_time for _, tries in open_tries if tries.next_time > now]
    records = outbox.of_channel(channel.name)
    sent_times = {
        one.message: one.try_time for one in records if one.state == "sent" or one.unconfirmed
    }
    chosen = select(due, settings, now, list(sent_times.values()))
    again += [chosen.next_time] if chosen.next_time is not None else []
    claims = _claim(chosen.now, channel, outbox, sender, now)
    results = []
    if claims.error is not None and claims.left:
        words = claims.error.strerror or str(claims.error)
        results.append(
            NoticeResult(
                run_id=facts.run_id,
                channel=channel.name,
                kinds=tuple(notice.kind for notice in claims.left),
                problem=f"this cannot be recorded in its directory: {words}",
                unrecorded=True,
            )
        )
    elif claims.left:
        again.append(now + _LOOK_AGAIN_SECONDS)
    told = [notice for notice, _ in (*claims.recorded, *claims.unrecorded)]
    if not told:
        return results, min(again, default=None)
    earlier = [outbox.tries(notice.notice_id, channel.name) for notice in told]
    repeated = bool(claims.unrecorded) or any(tries.lost for tries in earlier)
    message = compose(told, facts, repeated=repeated)
    problem = None
    state: SendState = "sent"
    try:
        sender.send(channel, message, sender.environment)
    except OutcomeUnknownError as error:
        problem, state = str(error), "sending"
        again.append(now + LOST_SECONDS)
    except HpctrainError as error:
        problem, state = str(error), "failed"
        again.append(now + pause_seconds(1 + min(len(tries.records) for tries in earlier)))
    if sender.told is not None and state != "failed":
        recorded = claims.recorded if state == "sent" else []
        mine = (*recorded, *claims.unrecorded)
        sender.told.update((notice.notice_id, channel.name) for notice, _ in mine)
    for records_of, write in (
        (claims.recorded, outbox.finish),
        (claims.unrecorded, outbox.claim),  # the disk may be back
    ):
        for _, claim in records_of:
            # Without this line the try counts as one whose end is unknown, and is repeated once.
            with contextlib.suppress(OSError):
                write(claim.model_copy(update={"state": state, "problem": problem}))
    results.append(
        NoticeResult(
            run_id=facts.run_id,
            channel=channel.name,
            kinds=tuple(notice.kind for notice in told),
            problem=problem,
        )
    )
    return results, min(again, default=None)


@dataclass(frozen=True)
class _Claims:
    """Which notices this sender may send, with their records; the others are `left`.

    `unrecorded`: it may although that could not be recorded, because of `error`.
    """

    recorded: list[tuple[Notice, SendRecord]]
    unrecorded: list[tuple[Notice, SendRecord]]
    left: list[Notice]
    error: OSError | None


def _claim(
    notices: Sequence[Notice], channel: ChannelSettings, outbox: Outbox, sender: Sender, now: float
) -> _Claims:
    """Claim each notice for this sender."""
    message_id = f"{now:.3f}-{os.getpid()}"
    claims, failure = _Claims([], [], [], None), None
    for notice in notices:
        record = SendRecord(
            notice=notice.notice_id,
            channel=channel.name,
            kind=notice.kind,
            state="sending",
            try_time=now,
            message=message_id,
            by=sender.name,
        )
        try:
            if outbox.claim(record):
                claims.recorded.append((notice, record))
            else:
                claims.left.append(notice)
        except OSError as error:
            failure = error
            if sender.told is not None and notice.kind is NoticeKind.FAILED:
                claims.unrecorded.append((notice, record))
            else:
                claims.left.append(notice)
    return replace(claims, error=failure)


# -- Choose which notices of a channel are sent now, and when to look again. Pure ---------------


_DAY = timedelta(days=1)


@dataclass(frozen=True)
class Selection:
    """The notices to send now; `next_time` (seconds since the epoch) is when to look again.

    `next_time` is None where nothing is held back.
    """

    now: tuple[Notice, ...]
    next_time: float | None = None


def select(
    notices: Sequence[Notice],
    settings: NotifySettings,
    now: float,
    message_times: Sequence[float],
) -> Selection:
    """Choose among the notices that are not sent yet.

    `message_times`: when the channel's earlier messages were sent. In quiet hours only the kinds of
    `even_at_night` are sent. A message that ends a run is sent whatever the rate is, and takes
    along what the rate has held back. Times later than `now`, of before a clock was put back, count
    for nothing.
    """
    until = quiet_until(settings, now)
    loud = [n for n in notices if until is None or n.kind in settings.even_at_night]
    quiet_time = until if len(loud) < len(notices) else None
    if not loud:
        return Selection((), quiet_time)
    recent = sorted(t for t in message_times if now - settings.window_seconds < t <= now)
    full = len(recent) >= settings.most_messages
    if full and not any(notice.kind in FINAL_KINDS for notice in loud):
        free_time = recent[-settings.most_messages] + settings.window_seconds
        return Selection((), free_time if quiet_time is None else min(free_time, quiet_time))
    return Selection(tuple(loud), quiet_time)


def quiet_until(settings: NotifySettings, now: float) -> float | None:
    """When the quiet hours end in which `now` is; None outside of them.

    They are times of the clock on the wall: on the day of a change of the clocks they last an hour
    more or less.
    """
    if settings.quiet_minutes is None:
        return None
    try:
        zone = ZoneInfo(settings.time_zone)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        return None  # unknown on this machine, as on some nodes: better told than kept
    begin, end = settings.quiet_minutes
    local = datetime.fromtimestamp(now, zone)
    minute = local.hour * 60 + local.minute
    inside = begin <= minute < end if begin < end else minute >= begin or minute < end
    if not inside:
        return None
    day = local.date() + (_DAY if minute >= end else timedelta())
    wall = datetime(day.year, day.month, day.day, end // 60, end % 60, tzinfo=zone)
    # Where the clock is put back in the quiet hours, their end may come twice, once before now.
    ends = (wall.replace(fold=fold).astimezone(UTC).timestamp() for fold in (0, 1))
    return next((one for one in ends if one > now), now + 60.0)
