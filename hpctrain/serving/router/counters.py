"""Counts that the processes of the gate share: a small file in memory, one row for each process.

All numbers are float64 at fixed places, written by one process and read by others without a lock:
a store of eight aligned bytes is seen whole or not at all. Belongs here: the places, and the rate
of one client, which all processes of the gate share. Does not belong here: requests (`gate`).
"""

from __future__ import annotations

import hashlib
import mmap
import os
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

MOST_PROCESSES = 16
# Clients that are told apart; two that share a place share a rate.
_CLIENT_PLACES = 1 << 15
# Seconds to the first byte of an answer and to its last: upper ends of the buckets.
BUCKETS = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0),
    *(1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 600.0),
)


class Count(IntEnum):
    """What each process counts.

    `IN_FLIGHT` goes down again, `LAST_ARRIVAL` is a time, `LISTENING` is 1 or 0.
    """

    ARRIVALS = 0
    ANSWERED = 1
    FAILED = 2
    REFUSED = 3
    LIMITED = 4
    DENIED = 5
    ABANDONED = 6
    IN_FLIGHT = 7
    LAST_ARRIVAL = 8
    LISTENING = 9


_HISTOGRAM = len(BUCKETS) + 2  # the last bucket is +Inf, then the sum of seconds
_ROW = len(Count) + 2 * _HISTOGRAM
_READY = 0
_FIRST_ROW = 1
_FIRST_CLIENT = _FIRST_ROW + MOST_PROCESSES * _ROW
_PLACES = _FIRST_CLIENT + _CLIENT_PLACES


@dataclass(frozen=True)
class Histogram:
    """Requests by bucket (not cumulative; the last one is beyond all ends), and seconds in all."""

    counts: tuple[float, ...]
    sum_seconds: float


class Counters:
    """The shared numbers, as one process of the gate (`row`) or a reader of all sees them."""

    def __init__(self, path: Path, row: int = 0, *, create: bool = False) -> None:
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0)
        descriptor = os.open(path, flags, 0o600)
        try:
            if create:
                os.ftruncate(descriptor, 8 * _PLACES)
            self._map = mmap.mmap(descriptor, 8 * _PLACES)
        finally:
            os.close(descriptor)
        self._numbers = memoryview(self._map).cast("d")
        self._row = _FIRST_ROW + row * _ROW

    # -- what the loop over endpoints tells the gate ---------------------------------------

    @property
    def ready(self) -> int:
        """How many replicas the router can ask."""
        return int(self._numbers[_READY])

    @ready.setter
    def ready(self, count: int) -> None:
        self._numbers[_READY] = float(count)

    @property
    def listening(self) -> int:
        """How many processes of the gate have come to accept."""
        return int(self.total(Count.LISTENING))

    # -- what one process of the gate counts -----------------------------------------------

    def begin(self) -> None:
        """Say that this process accepts; forget what an earlier one of this row had in flight."""
        self._numbers[self._row + Count.IN_FLIGHT] = 0.0
        self._numbers[self._row + Count.LISTENING] = 1.0

    def add(self, count: Count, change: float = 1.0) -> None:
        self._numbers[self._row + count] += change

    def arrived(self, now: float) -> None:
        """Count a request; `now` in seconds since the epoch."""
        self.add(Count.ARRIVALS)
        self._numbers[self._row + Count.LAST_ARRIVAL] = now

    def answered_after(self, first_byte_seconds: float, seconds: float) -> None:
        """Count an answer that went out to its end."""
        begin = self._row + len(Count)
        for place, value in ((begin, first_byte_seconds), (begin + _HISTOGRAM, seconds)):
            bucket = next((n for n, end in enumerate(BUCKETS) if value <= end), len(BUCKETS))
            self._numbers[place + bucket] += 1
            self._numbers[place + _HISTOGRAM - 1] += value

    def too_fast(self, client: bytes, rate: float, now: float) -> float | None:
        """Take one request of a client into account; seconds to wait if it is one too many.

        The generic cell rate algorithm (ITU-T I.371, annex A): one time per client, up to which
        its requests are paid for. A burst of one second's requests is let through. `now` is of a
        clock that all processes of this machine share.
        """
        place = int.from_bytes(hashlib.blake2b(client, digest_size=8).digest(), "little")
        place = _FIRST_CLIENT + place % _CLIENT_PLACES
        burst_seconds = max(1.0, 1 / rate)
        paid_until = max(self._numbers[place], now)
        if paid_until + 1 / rate - now > burst_seconds + 1e-9:
            return paid_until + 1 / rate - now - burst_seconds
        self._numbers[place] = paid_until + 1 / rate
        return None

    # -- what readers see ------------------------------------------------------------------

    def total(self, count: Count) -> float:
        """The sum over all processes; of `LAST_ARRIVAL` the newest."""
        rows = range(_FIRST_ROW, _FIRST_CLIENT, _ROW)
        values = [self._numbers[row + count] for row in rows]
        return max(values) if count is Count.LAST_ARRIVAL else sum(values)

    def first_bytes(self) -> Histogram:
        """Seconds to the first byte of answers."""
        return self._histogram(len(Count))

    def durations(self) -> Histogram:
        """Seconds to the last byte of answers."""
        return self._histogram(len(Count) + _HISTOGRAM)

    def _histogram(self, offset: int) -> Histogram:
        rows = range(_FIRST_ROW + offset, _FIRST_CLIENT, _ROW)
        sums = [sum(self._numbers[row + n] for row in rows) for n in range(_HISTOGRAM)]
        return Histogram(tuple(sums[:-1]), sums[-1])

    def close(self) -> None:
        self._numbers.release()
        self._map.close()
