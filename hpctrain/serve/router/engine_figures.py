"""What the engines of the replicas say of themselves: load, queues, and how long requests take.

Belongs here: reading their metrics and adding them up. Does not belong here: what follows from them
(`scaling`), metrics for people (`hpctrain.observe`).
"""

from __future__ import annotations

import http.client
import math
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from hpctrain.serve.engines.contract import EngineMetrics

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
    """Read the figures of one engine; its parts with labels of their own are added up."""
    from prometheus_client.parser import text_string_to_metric_families

    wanted = {names.requests_running: 0.0, names.requests_waiting: 0.0}
    kv_share = 0.0
    buckets: dict[str, dict[float, float]] = {names.ttft_seconds: {}, names.e2e_seconds: {}}
    lines = (line for line in text.split("\n") if _is_of(line, names))
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            base = sample.name.removesuffix("_bucket")
            if sample.name in wanted:
                wanted[sample.name] += sample.value
            elif sample.name == names.kv_cache_used_fraction:
                kv_share = max(kv_share, sample.value)
            elif base in buckets and base != sample.name:
                end = float(sample.labels["le"])
                buckets[base][end] = buckets[base].get(end, 0.0) + sample.value
    return EngineFigures(
        running=wanted[names.requests_running],
        waiting=wanted[names.requests_waiting],
        kv_share=kv_share,
        ttft=buckets[names.ttft_seconds],
        e2e=buckets[names.e2e_seconds],
    )


def _is_of(line: str, names: EngineMetrics) -> bool:
    """Whether a line is of interest: an engine shows thousands, and reading them costs a core."""
    prefixes = (names.requests_running, names.requests_waiting, names.kv_cache_used_fraction)
    return line.startswith((*prefixes, f"{names.ttft_seconds}_b", f"{names.e2e_seconds}_b"))


class Engines:
    """Asks all engines at once, again and again; nothing where they show no metrics."""

    def __init__(self, names: EngineMetrics | None) -> None:
        self._names = names
        self._pool = ThreadPoolExecutor(8, thread_name_prefix="metrics")

    def ask(self, urls: Iterable[str]) -> dict[str, EngineFigures]:
        """The figures by URL of those that answer."""
        wanted = list(urls) if self._names is not None else []
        found = self._pool.map(self._one, wanted)
        return {url: one for url, one in zip(wanted, found, strict=True) if one is not None}

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _one(self, url: str) -> EngineFigures | None:
        names = self._names
        assert names is not None, "asked only then"
        parts = urlsplit(url)
        connection = http.client.HTTPConnection(
            parts.hostname or "", parts.port, timeout=_TIMEOUT_SECONDS
        )
        try:
            connection.request("GET", names.path)
            answer = connection.getresponse()
            text = answer.read(_MOST_BYTES).decode(errors="replace")
            return figures_of(text, names) if answer.status == http.client.OK else None
        except (OSError, http.client.HTTPException, ValueError):
            return None
        finally:
            connection.close()


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
