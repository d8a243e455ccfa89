"""Watch what comes in and how the engines bear it, and write it down for everybody.

Belongs here: `traffic.json` and the load that scaling is decided by; reading the metrics of engines
and adding them up. Does not belong here: counting requests (the router), what follows (`scaling`),
metrics for people (`hpctrain.observe`).
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http import HTTPStatus

from hpctrain.records.run_records import read_record, write_record
from hpctrain.records.service_layout import ReplicaName, ServiceLayout
from hpctrain.records.service_records import Traffic
from hpctrain.serve.engines.contract import EngineMetrics
from hpctrain.serve.http_request import address_of, http_request
from hpctrain.serve.router.programs import RouterProgram
from hpctrain.serve.router.scaling import Load
from hpctrain.telemetry.scraped_text import ScrapedText

_ASK_SECONDS = 5.0
# So long a refused request keeps a service awake that had gone to zero.
_REFUSED_SECONDS = 900.0


class TrafficWatch:
    """Counts of the router and figures of the engines, together."""

    def __init__(self, service: ServiceLayout, router: RouterProgram, engines: Engines) -> None:
        self._service, self._router, self._engines = service, router, engines
        self._rate = ArrivalRate()
        self._ttft, self._e2e = Percentiles(), Percentiles()
        self._figures: dict[str, EngineFigures] = {}
        self._next_ask = 0.0
        self._refused, self._refused_at = 0, -_REFUSED_SECONDS
        before = read_record(service.traffic, Traffic)
        self._last_request = before.last_request if before is not None else None
        self._begun_at = before.begun if before is not None else None
        self._last_rate: float | None = None

    def load(self, urls: dict[ReplicaName, str], now: float) -> Load:
        """The load at `now`; engines are asked, and the record is written, every few seconds.

        Raises OSError when the record cannot be written.
        """
        self._begun_at = now if self._begun_at is None else self._begun_at
        counts = self._router.counts()
        if counts.refused > self._refused:
            self._refused_at = now
        self._refused = counts.refused
        known = (counts.last_request, self._last_request)
        self._last_request = max((one for one in known if one is not None), default=None)
        if now >= self._next_ask:
            self._next_ask = now + _ASK_SECONDS
            self._ask(urls, now)
        figures = self._figures.values()
        begun = (self._last_request, self._begun_at)
        return Load(
            arrival_rate=self._last_rate,
            waiting=sum(one.waiting for one in figures) if figures else None,
            kv_share=max((one.kv_share for one in figures), default=None),
            idle_since=max(one for one in begun if one is not None),
            refused_lately=now - self._refused_at < _REFUSED_SECONDS,
        )

    def load_of(self, url: str) -> float:
        """Requests that one replica computes or holds back; 0 if it has not said."""
        figures = self._figures.get(url)
        return figures.running + figures.waiting if figures is not None else 0.0

    def _ask(self, urls: dict[ReplicaName, str], now: float) -> None:
        counts = self._router.counts()
        self._figures = self._engines.ask(urls.values())
        self._last_rate = self._rate.add(now, counts.requests)
        figures = self._figures.values()
        traffic = Traffic(
            time=now,
            begun=self._begun_at if self._begun_at is not None else now,
            requests=counts.requests,
            failed=counts.failed,
            refused=counts.refused,
            limited=counts.limited,
            rate=self._last_rate,
            last_request=self._last_request,
            running=sum(one.running for one in figures) if figures else None,
            waiting=sum(one.waiting for one in figures) if figures else None,
            kv_share=max((one.kv_share for one in figures), default=None),
            ttft_p99_seconds=self._ttft.add(now, {u: f.ttft for u, f in self._figures.items()}),
            e2e_p99_seconds=self._e2e.add(now, {u: f.e2e for u, f in self._figures.items()}),
        )
        write_record(self._service.traffic, traffic, durable=False)


# -- the figures of engines: load, queues, and how long requests take ----------------------------

# Beyond it an engine is too busy to be waited for: the others' figures are used.
_TIMEOUT_SECONDS = 3.0
_MOST_BYTES = 8 * 2**20
# Percentiles are over requests that ended within the last so many seconds.
WINDOW_SECONDS = 300.0
_PERCENTILE = 0.99


@dataclass(frozen=True)
class EngineFigures:
    """One engine at one moment. Histograms are cumulative counts by the upper end of a bucket."""

    running: float
    waiting: float
    kv_share: float
    ttft: Mapping[float, float] = field(default_factory=dict)
    e2e: Mapping[float, float] = field(default_factory=dict)


def figures_of(text: str, names: EngineMetrics) -> EngineFigures:
    """Read the figures of one engine; its parts with labels of their own are added up.

    Raises ValueError for what is no such text.
    """
    wanted = (
        *(names.requests_running, names.requests_waiting, names.kv_cache_used_fraction),
        *(names.ttft_seconds, names.e2e_seconds),
    )
    shown = ScrapedText(text, wanted)
    ttft, e2e = shown.histogram(names.ttft_seconds), shown.histogram(names.e2e_seconds)
    return EngineFigures(
        running=shown.total(names.requests_running) or 0.0,
        waiting=shown.total(names.requests_waiting) or 0.0,
        kv_share=shown.largest(names.kv_cache_used_fraction) or 0.0,
        ttft=dict(ttft.buckets) if ttft is not None else {},
        e2e=dict(e2e.buckets) if e2e is not None else {},
    )


class Engines:
    """Asks all engines at once, again and again; nothing where they show no metrics."""

    def __init__(self, names: EngineMetrics | None) -> None:
        self._names = names
        self._pool = ThreadPoolExecutor(8, thread_name_prefix="metrics")

    def ask(self, urls: Iterable[str]) -> dict[str, EngineFigures]:
        """The figures by URL of those that answer."""
        names = self._names
        if names is None:
            return {}

        def one(url: str) -> EngineFigures | None:
            status, text = http_request(
                address_of(url), "GET", names.path, _TIMEOUT_SECONDS, most_bytes=_MOST_BYTES
            )
            with contextlib.suppress(ValueError):
                if status == HTTPStatus.OK:
                    return figures_of(text.decode(errors="replace"), names)
            return None

        wanted = list(urls)
        found = zip(wanted, self._pool.map(one, wanted), strict=True)
        return {url: figures for url, figures in found if figures is not None}

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class Percentiles:
    """The 99th percentile of requests that ended lately, from cumulative histograms of engines."""

    def __init__(self) -> None:
        self._past: dict[str, deque[tuple[float, Mapping[float, float]]]] = {}

    def add(self, now: float, histograms: Mapping[str, Mapping[float, float]]) -> float | None:
        """Take the histograms of all engines at `now`; seconds, or None without any request."""
        counts: dict[float, float] = {}
        for url, histogram in histograms.items():
            past = self._past.setdefault(url, deque())
            past.append((now, histogram))
            while len(past) > 1 and past[1][0] <= now - WINDOW_SECONDS:
                past.popleft()
            before = past[0][1]
            for end, count in histogram.items():
                change = count - before.get(end, 0.0)
                counts[end] = counts.get(end, 0.0) + max(0.0, change)
        self._past = {url: past for url, past in self._past.items() if url in histograms}
        return percentile(counts, _PERCENTILE)


def percentile(counts: Mapping[float, float], share: float) -> float | None:
    """A percentile of a cumulative histogram, linear within its bucket.

    As Prometheus' histogram_quantile: beyond the last finite end it is that end.
    """
    ends = sorted(counts)
    if not ends or counts[ends[-1]] <= 0:
        return None
    wanted, low, below = share * counts[ends[-1]], 0.0, 0.0
    for end in ends:
        if counts[end] >= wanted:
            if math.isinf(end):
                return low
            inside = counts[end] - below
            return low + (end - low) * ((wanted - below) / inside if inside else 1.0)
        low, below = end, counts[end]
    return low


class ArrivalRate:
    """Requests per second over the last minute, from a count that only grows."""

    def __init__(self, window_seconds: float = 60.0) -> None:
        self._window_seconds = window_seconds
        self._past: deque[tuple[float, int]] = deque()

    def add(self, now: float, requests: int) -> float | None:
        """Take the count at `now`; None until there are two."""
        if self._past and requests < self._past[-1][1]:
            self._past.clear()  # the router was started anew
        self._past.append((now, requests))
        while len(self._past) > 2 and self._past[1][0] <= now - self._window_seconds:
            self._past.popleft()
        begin, count = self._past[0]
        return (requests - count) / (now - begin) if now > begin else None
