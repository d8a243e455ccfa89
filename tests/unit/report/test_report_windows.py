"""The window of a report: full days, ISO weeks, dates, where clocks change, and refusals."""

from __future__ import annotations

from datetime import UTC, date, datetime
from zoneinfo import ZoneInfo

import pytest

from hpctrain.base.errors import UsageError
from hpctrain.report.report_windows import between_dates, iso_week, last_days

BERLIN = ZoneInfo("Europe/Berlin")
NOW = datetime(2026, 11, 26, 8, 30, tzinfo=UTC).timestamp()
HOUR, DAY = 3600.0, 86400.0


def test_the_last_seven_full_days_end_at_midnight() -> None:
    window = last_days(NOW, UTC)
    assert window.local(window.begin) == datetime(2026, 11, 19, tzinfo=UTC)
    assert window.local(window.end) == datetime(2026, 11, 26, tzinfo=UTC)
    assert window.previous == (window.begin - 7 * DAY, window.begin)
    assert [day.day for day in window.days] == [19, 20, 21, 22, 23, 24, 25]
    assert not window.part and window.zone == "UTC (+00:00)"


def test_an_iso_week_is_monday_to_sunday() -> None:
    window = iso_week("2026-W47", NOW, UTC)
    assert (window.days[0], window.days[-1]) == (date(2026, 11, 16), date(2026, 11, 22))
    assert window.end - window.begin == 7 * DAY and window.title == "week 2026-W47"
    assert iso_week("2026w47", NOW, UTC) == window


def test_a_leap_week_is_between_the_years() -> None:
    later = datetime(2027, 2, 1, tzinfo=UTC).timestamp()
    window = iso_week("2026-W53", later, UTC)
    assert (window.days[0], window.days[-1]) == (date(2026, 12, 28), date(2027, 1, 3))
    assert iso_week("2027-W01", later, UTC).begin == window.end


@pytest.mark.parametrize(
    ("week", "hours"), [("2026-W43", 169), ("2026-W13", 167), ("2026-W42", 168)]
)
def test_a_week_in_which_clocks_change(week: str, hours: int) -> None:
    window = iso_week(week, NOW, BERLIN)
    assert window.end - window.begin == hours * HOUR
    days = [after - one for one, after in zip(window.bounds, window.bounds[1:], strict=False)]
    assert sum(days) == hours * HOUR
    assert days[-1] == (hours - 144) * HOUR  # clocks change on a Sunday
    assert window.previous[1] == window.begin
    both = "CEST (+02:00) and CET (+01:00)"
    assert (window.zone == both) == (hours == 169)


def test_a_week_in_progress_is_compared_with_the_same_part_of_the_week_before() -> None:
    window = iso_week("2026-W48", NOW, UTC)
    assert window.part and window.end == NOW
    assert window.previous == (window.begin - 7 * DAY, NOW - 7 * DAY)
    assert len(window.days) == 4 and len(window.bounds) == 5


def test_dates_are_both_included() -> None:
    window = between_dates("2026-11-01", "2026-11-10", NOW, UTC)
    assert window.end - window.begin == 10 * DAY and not window.part
    assert window.previous == (window.begin - 10 * DAY, window.begin)
    assert between_dates("2026-11-20", None, NOW, UTC).end == NOW
    assert len(between_dates(None, "2026-11-10", NOW, UTC).days) == 7


def test_a_long_window_has_weeks() -> None:
    window = between_dates("2026-10-01", "2026-11-25", NOW, UTC)
    assert [day.isoformat() for day in window.days[:2]] == ["2026-10-01", "2026-10-08"]
    assert list(window.bounds) == sorted(set(window.bounds))


@pytest.mark.parametrize(
    ("week", "words"),
    [
        ("2026-47", "no week"),
        ("last week", "no week"),
        ("2026-W00", "no week"),
        ("2026-W54", "no week"),
        ("2025-W53", "no week"),
        ("0000-W01", "no week"),
        ("9999-W52", "9999"),
        ("2026-W49", "in the future"),
    ],
)
def test_a_wrong_week_is_refused(week: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as refused:
        iso_week(week, NOW, UTC)
    assert refused.value.exit_code == 2


def test_the_weeks_of_the_year_are_named() -> None:
    with pytest.raises(UsageError) as refused:
        iso_week("2025-W53", NOW, UTC)
    assert refused.value.hint == "2025 has the weeks 01 to 52"


@pytest.mark.parametrize(
    ("since", "until", "words"),
    [
        ("2026-11-31", None, "no date"),
        ("yesterday", None, "no date"),
        (None, "20261116", "no date"),
        ("2026-11-20", "2026-11-10", "after"),
        ("2026-11-27", None, "in the future"),
        ("2026-11-27", "2026-11-28", "in the future"),
        ("2024-01-01", "2026-01-01", "more than"),
        ("0001-01-01", "0001-01-02", "0001"),
    ],
)
def test_wrong_dates_are_refused(since: str | None, until: str | None, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        between_dates(since, until, NOW, UTC)
