"""Finds one line about each service, for `hpctrain status`: from records, without Slurm or network.

Belongs here: that line. Does not belong here: everything about one service (`serve_status`), runs
(`status`), text.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from hpctrain.base import clock
from hpctrain.base.errors import HpctrainError
from hpctrain.records.run_records import Record, RecordPart, read_record
from hpctrain.records.service_layout import ServiceLayout
from hpctrain.runs.service_status import service_status


class PlannedLimit(RecordPart):
    """What a plan says of one promise, as far as a line needs it: less to load than the plan."""

    latency: str
    percentile: str
    limit_seconds: float


class PlannedLimits(Record):
    """The promises of a `plan.json`."""

    promises: tuple[PlannedLimit, ...] = ()

    def of(self, latency: str) -> float | None:
        """The promised 99th percentile of a latency, in seconds."""
        found = (one for one in self.promises if (one.latency, one.percentile) == (latency, "p99"))
        return next((one.limit_seconds for one in found), None)


class ServiceRow(BaseModel):
    """One service. `latency` names what the 99th percentile is of; None is not known.

    `rate` is in requests per second. `problem`: why it cannot be read, or what is wrong with it.
    """

    model_config = ConfigDict(frozen=True, defer_build=True)

    service_id: str
    state: str
    ready: int = 0
    wanted: int = 0
    rate: float | None = None
    latency: str = ""
    p99_seconds: float | None = None
    promised_seconds: float | None = None
    url: str | None = None
    problem: str = ""

    @property
    def is_over(self) -> bool:
        return self.state == "down"


def service_rows(services: Sequence[ServiceLayout], now: float | None = None) -> list[ServiceRow]:
    """Find the line of each service; one that cannot be read has a line with the reason."""
    now = clock.now() if now is None else now
    rows = []
    for service in services:
        try:
            rows.append(_row(service, now))
        except (HpctrainError, OSError) as error:
            reason = str(error)
            rows.append(ServiceRow(service_id=service.service_id, state="unknown", problem=reason))
    return rows


def _row(service: ServiceLayout, now: float) -> ServiceRow:
    found = service_status(service, now)
    limits = read_record(service.plan, PlannedLimits) or PlannedLimits()
    traffic = found.traffic
    measured = {
        "ttft": traffic.ttft_p99_seconds if traffic else None,
        "e2e": traffic.e2e_p99_seconds if traffic else None,
    }
    # The one that is promised and measured, else what is measured.
    known = [name for name, value in measured.items() if value is not None]
    latency = next((name for name in known if limits.of(name) is not None), "".join(known[:1]))
    return ServiceRow(
        service_id=found.service_id,
        state=found.state,
        ready=found.ready,
        wanted=found.wanted,
        rate=traffic.rate if traffic else None,
        latency=latency,
        p99_seconds=measured.get(latency),
        promised_seconds=limits.of(latency),
        url=found.address.url if found.address else None,
        problem="; ".join(found.problems),
    )
