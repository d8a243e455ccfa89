"""Finds the window of wall time that a report about a team is about, in local time.

A day is a day of the calendar, also where clocks change: 23 or 25 hours long. Belongs here: from
what somebody asks for to moments. Does not belong here: what happened in the window
(`team_report`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import date, datetime, timedelta, tzinfo

from hpctrain.base.errors import UsageError

LAST_DAYS = 7
_WEEK = re.compile(r"([0-9]{4})-?[Ww]([0-9]{2})")
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_MOST_DAYS = 366
# A longer window is divided into weeks.
_MOST_SINGLE_DAYS = 35
_HINT = "expected an ISO week such as `2026-W47`"


@dataclass(frozen=True)
class ReportWindow:
    """What is reported: moments in seconds since the epoch, and the same time before to compare.

    `bounds` are the begins of its parts (days, or weeks of a long window) and its end; `days` the
    dates on which its parts begin. `title` names it, `zone` is that of its days. `part`: the
    window is not over, and what is compared ends at the same time of its own. `local_zone`: None
    is that of this machine.
    """

    title: str
    zone: str
    bounds: tuple[float, ...]
    days: tuple[date, ...]
    previous: tuple[float, float]
    part: bool
    local_zone: tzinfo | None = None

    @property
    def begin(self) -> float:
        return self.bounds[0]

    @property
    def end(self) -> float:
        return self.bounds[-1]

    def local(self, moment: float) -> datetime:
        """Convert a moment to the time of the window's zone, with its offset."""
        return _local(moment, self.local_zone)


def last_days(now: float, zone: tzinfo | None = None) -> ReportWindow:
    """Return the last seven full days. `zone`: default that of this machine."""
    today = datetime.fromtimestamp(now, zone).date()
    return _window(f"the last {LAST_DAYS} days", today - timedelta(LAST_DAYS), today, now, zone)


def iso_week(text: str, now: float, zone: tzinfo | None = None) -> ReportWindow:
    """Return an ISO week such as `2026-W47`, Monday to Sunday; one that is not over ends now."""
    found = _WEEK.fullmatch(text)
    if found is None:
        raise UsageError(f"--week: `{text}` is no week", hint=_HINT)
    year, week = int(found[1]), int(found[2])
    try:
        monday = date.fromisocalendar(year, week, 1)
        last = date.fromisocalendar(year, week, 7)
    except ValueError:
        weeks = date(year, 12, 28).isocalendar().week if year else 0
        hint = f"{year} has the weeks 01 to {weeks}" if weeks else _HINT
        raise UsageError(f"--week: `{text}` is no week", hint=hint) from None
    title = f"{year:04d}-W{week:02d}"
    return _window(f"week {title}", monday, last + timedelta(1), now, zone, option="--week")


def between_dates(
    since: str | None, until: str | None, now: float, zone: tzinfo | None = None
) -> ReportWindow:
    """Return the days from `since` to `until`, both included.

    Without `until` it ends now; without `since` it has seven days.
    """
    today = datetime.fromtimestamp(now, zone).date()
    last = today if until is None else _date("--until", until)
    first = last - timedelta(LAST_DAYS - 1) if since is None else _date("--since", since)
    if first > last:
        raise UsageError(f"--since {first} is after --until {last}" if until else
                         f"--since {first} is in the future")  # fmt: skip
    if (last - first).days >= _MOST_DAYS:
        raise UsageError(f"{first} to {last} are more than {_MOST_DAYS} days")
    option = "--since" if since is not None else "--until"
    return _window(f"{first} to {last}", first, last + timedelta(1), now, zone, option)


def _date(option: str, text: str) -> date:
    try:
        if _DATE.fullmatch(text):
            return date.fromisoformat(text)
    except ValueError:
        pass
    raise UsageError(f"{option}: `{text}` is no date", hint="expected a date such as `2026-11-16`")


def _window(
    title: str, first: date, after: date, now: float, zone: tzinfo | None, option: str = ""
) -> ReportWindow:
    """Make the window from the begin of one date to the begin of another, or to now."""

    def midnight(day: date) -> float:
        return datetime(day.year, day.month, day.day, tzinfo=zone).timestamp()

    try:
        begin = midnight(first)
        previous = midnight(first - (after - first))
        end = min(midnight(after), now)
    except (ValueError, OverflowError, OSError) as error:
        raise UsageError(f"{option}: {title} is no time of this machine") from error
    if begin >= now:
        raise UsageError(
            f"{option}: {title} is in the future", hint=f"today is {_local(now, zone).date()}"
        )
    step = 1 if (after - first).days <= _MOST_SINGLE_DAYS else 7
    days = [first + timedelta(n) for n in range(0, (after - first).days, step)]
    days = [day for day in days if midnight(day) < end]
    # The time zone with its offset, both if clocks change in the window: `CET (+01:00)`.
    ends = [_local(begin, zone), _local(end - 1, zone)]
    offsets = [(one.tzname(), one.strftime("%z")) for one in ends]
    zones = dict.fromkeys(f"{name} ({offset[:3]}:{offset[3:5]})" for name, offset in offsets)
    return ReportWindow(
        title=title,
        zone=" and ".join(zones),
        bounds=(*(midnight(day) for day in days), end),
        days=tuple(days),
        previous=(previous, begin - (midnight(after) - end)),
        part=end < midnight(after),
        local_zone=zone,
    )


def _local(moment: float, zone: tzinfo | None) -> datetime:
    return datetime.fromtimestamp(moment, zone).astimezone(zone)
