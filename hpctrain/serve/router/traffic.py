"""Watch what comes in and how the engines bear it, and write it down for everybody.

Belongs here: `traffic.json` and the load that scaling is decided by. Does not belong here: counting
requests (the router), reading one engine (`engine_figures`).
"""

from __future__ import annotations

from hpctrain.records.run_records import read_record, write_record
from hpctrain.records.service_layout import ReplicaName, ServiceLayout
from hpctrain.records.service_records import Traffic
from hpctrain.serve.router.engine_figures import (
    ArrivalRate,
    EngineFigures,
    Engines,
    Percentiles,
)
from hpctrain.serve.router.programs import RouterProgram
from hpctrain.serve.router.scaling import Load

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
