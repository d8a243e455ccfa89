"""Choose which notices of a channel are sent now, and when to look again. Pure.

Belongs here: quiet hours with time zones, and the rate of messages. Does not belong here: which
tries there were (`hpctrain.records.notices`), sending (`delivery`).

What is held back stays unsent, and whoever looks next sends all of it in one message. So nothing
has to be kept for it, and the job may end meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from hpctrain.notify.notices import FINAL_KINDS, Notice
from hpctrain.records.supervise_config import NotifySettings

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
