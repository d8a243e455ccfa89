"""When messages are sent: quiet hours with changes of the clock, and the rate."""

from __future__ import annotations

from datetime import datetime
from zoneinfo import ZoneInfo

import pytest

from hpctrain.notify.delivery import quiet_until, select
from hpctrain.notify.notices import Notice, NoticeKind
from hpctrain.records.supervise_config import NotifySettings

BERLIN = ZoneInfo("Europe/Berlin")
NIGHT = NotifySettings(
    channels=(),
    on=("failed", "restarted"),
    quiet_minutes=(22 * 60, 7 * 60),
    time_zone="Europe/Berlin",
    even_at_night=("failed",),
    most_messages=2,
)


def clock(text: str, fold: int = 0, zone: ZoneInfo = BERLIN) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=zone, fold=fold).timestamp()


def quiet(*hours: int) -> NotifySettings:
    begin, end = hours
    return NIGHT.model_copy(update={"quiet_minutes": (begin * 60, end * 60)})


@pytest.mark.parametrize(
    ("now", "until"),
    [
        ("2026-01-10T21:59:59", None),
        ("2026-01-10T22:00:00", "2026-01-11T07:00:00"),
        ("2026-01-11T00:00:00", "2026-01-11T07:00:00"),
        ("2026-01-11T06:59:59", "2026-01-11T07:00:00"),
        ("2026-01-11T07:00:00", None),
        # the night has 8 hours, and the one with the clock put back 10
        ("2026-03-28T23:00:00", "2026-03-29T07:00:00"),
        ("2026-10-24T23:00:00", "2026-10-25T07:00:00"),
        ("2026-12-31T23:59:59", "2027-01-01T07:00:00"),
    ],
)
def test_the_end_of_the_quiet_hours(now: str, until: str | None) -> None:
    expected = None if until is None else clock(until)
    assert quiet_until(NIGHT, clock(now)) == expected


def test_the_length_of_a_night_follows_the_clock_on_the_wall() -> None:
    spring, autumn = clock("2026-03-28T22:00"), clock("2026-10-24T22:00")
    assert quiet_until(NIGHT, spring) == spring + 8 * 3600
    assert quiet_until(NIGHT, autumn) == autumn + 10 * 3600


def test_quiet_hours_within_one_day() -> None:
    noon = quiet(12, 14)
    assert quiet_until(noon, clock("2026-01-10T11:59")) is None
    assert quiet_until(noon, clock("2026-01-10T13:00")) == clock("2026-01-10T14:00")


def test_an_end_that_the_clock_has_twice_or_never() -> None:
    """At 3:00 the clock of 25 October goes back to 2:00; on 29 March 2:00 is followed by 3:00."""
    settings = NIGHT.model_copy(update={"quiet_minutes": (60, 150)})  # until 2:30
    first, second = clock("2026-10-25T02:30", 0), clock("2026-10-25T02:30", 1)
    assert second == first + 3600
    assert quiet_until(settings, first - 60) == first
    assert quiet_until(settings, first) is None
    again = clock("2026-10-25T02:10", 1)
    assert quiet_until(settings, again) == second
    spring = quiet_until(settings, clock("2026-03-29T01:30"))
    assert spring is not None and quiet_until(settings, spring) is None


@pytest.mark.parametrize("zone", ["America/New_York", "Australia/Lord_Howe", "UTC", "Asia/Kolkata"])
def test_quiet_hours_end_once_a_day_in_every_zone(zone: str) -> None:
    settings = NIGHT.model_copy(update={"time_zone": zone})
    now = clock("2026-01-01T12:00", zone=ZoneInfo(zone))
    for hour in range(0, 366 * 24, 3):
        until = quiet_until(settings, now + 3600 * hour)
        if until is not None:
            assert now + 3600 * hour < until <= now + 3600 * (hour + 10)
            assert quiet_until(settings, until) is None


def test_a_zone_that_this_machine_does_not_know_keeps_nothing_back() -> None:
    settings = NIGHT.model_copy(update={"time_zone": "Mars/Base"})
    assert quiet_until(settings, clock("2026-01-10T23:00")) is None


def notice(kind: str, time: float = 0.0) -> Notice:
    return Notice(f"{time}-{kind}", NoticeKind(kind), time)


def test_at_night_only_what_may_wake_people() -> None:
    now = clock("2026-01-10T23:00")
    crash, failed = notice("restarted"), notice("failed")
    found = select([crash, failed], NIGHT, now, ())
    assert (found.now, found.next_time) == ((failed,), clock("2026-01-11T07:00"))
    assert select([crash], NIGHT, now, ()).now == ()
    morning = select([crash, crash], NIGHT, clock("2026-01-11T07:00"), ())
    assert (morning.now, morning.next_time) == ((crash, crash), None), "all of it at once"


def test_the_rate_holds_back_and_the_next_message_has_it_all() -> None:
    now = clock("2026-01-10T12:00")
    crash = notice("restarted")
    assert select([crash], NIGHT, now, (now - 10,)).now == (crash,)
    full = select([crash], NIGHT, now, (now - 3000, now - 10))
    assert (full.now, full.next_time) == ((), now + 600)
    assert full.next_time is not None
    later = select([crash, crash], NIGHT, full.next_time, (now - 3000, now - 10))
    assert later.now == (crash, crash)


def test_the_end_of_a_run_is_told_whatever_the_rate_is() -> None:
    now = clock("2026-01-10T12:00")
    crash, failed = notice("restarted"), notice("failed")
    assert select([crash, failed], NIGHT, now, (now - 1,) * 50).now == (crash, failed)
