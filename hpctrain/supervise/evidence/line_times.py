"""Parse when a line of a log was written.

Nodes of a cluster share their time, and lines have local time. Belongs here: the formats of torch,
Python's logging, the kernel and syslog. Does not belong here: what a line means.
"""

from __future__ import annotations

import re
import time

_DAY_SECONDS = 86400.0
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_NAME = rf"(?P<name>{'|'.join(_MONTHS)})"
_CLOCK = r"(?P<clock>\d\d:\d\d:\d\d)(?:[.,](?P<part>\d{1,9}))?"
_FORMATS = tuple(
    re.compile(text)
    for text in (
        # torch, c10/util/Logging.cpp: [rank3]:[E1121 05:33:37.123456789 Process...; May 6 is `506`
        rf"\[[EWIF](?P<month>\d{{1,2}})(?P<day>\d\d) {_CLOCK}",
        # Python's logging, ISO 8601, slurmstepd: 2026-11-21 05:33:37,123
        rf"(?P<year>\d{{4}})-(?P<month>\d\d)-(?P<day>\d\d)[T ]{_CLOCK}",
        # dmesg -T: [Fri Nov 21 05:33:37 2026]
        rf"\[\w{{3}} {_NAME} {{1,2}}(?P<day>\d{{1,2}}) {_CLOCK} (?P<year>\d{{4}})\]",
        # syslog: Nov 21 05:33:37 host kernel:
        rf"^{_NAME} {{1,2}}(?P<day>\d{{1,2}}) {_CLOCK} ",
    )
)
# A time further into a line belongs to the message, or to another machine.
_WITHIN = 120


def line_time(line: str, near: float) -> float | None:
    """Parse the time of a line in seconds since the epoch; None if it has none.

    A missing year is the one that brings the time next to `near` (seconds since the epoch).
    """
    matches = (expression.search(line[:_WITHIN]) for expression in _FORMATS)
    match = next((match for match in matches if match is not None), None)
    if match is None:
        return None
    parts: dict[str, str | None] = match.groupdict()
    name = parts.get("name")
    month = _MONTHS.index(name) + 1 if name else int(parts["month"] or 0)
    hour, minute, second = map(int, (parts["clock"] or "").split(":"))
    day = int(parts["day"] or 0)
    if not (1 <= month <= 12 and 1 <= day <= 31):
        return None
    year = int(parts.get("year") or time.localtime(near).tm_year)
    seconds = time.mktime((year, month, day, hour, minute, second, 0, 0, -1))
    if not parts.get("year") and seconds > near + _DAY_SECONDS:  # the turn of the year
        seconds = time.mktime((year - 1, month, day, hour, minute, second, 0, 0, -1))
    return seconds + float(f"0.{parts.get('part') or 0}")
