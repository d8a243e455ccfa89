"""Reports what a service is doing: address, replicas, rotation, load, what is wanted and why.

Everything is read from the service directory, so it costs Slurm nothing and works where Slurm does
not answer; ages show how old it is. Belongs here: the document, and the line of `status`.
Does not belong here: finding a service (`hpctrain.records.find`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

from hpctrain.base import clock
from hpctrain.base.errors import HpctrainError
from hpctrain.base.units import short_duration
from hpctrain.page.text import or_dash
from hpctrain.records.run_records import Record, RecordPart, read_record
from hpctrain.records.service_layout import ReplicaName, ServiceLayout
from hpctrain.records.service_records import (
    Address,
    Endpoint,
    ReplicaJob,
    ReplicaState,
    Rotation,
    ServiceEvent,
    ServiceLedger,
    ServiceState,
    Traffic,
    read_service_settings,
)

# A controller writes its state every few seconds, a router its rotation every two.
_STALE_SECONDS = 30.0
_LAST_EVENTS = 8
_OVER = ("ended", "failed")


class ReplicaStatus(ReplicaJob):
    """One job of one replica; ages in seconds.

    `lease_seconds`: how long its endpoint counts yet; None without one. `in_rotation`: the router
    asks it. `walltime_seconds`: what is left of its time limit, where that is known.
    """

    age_seconds: float
    in_rotation: bool
    lease_seconds: float | None = None
    load_seconds: float | None = None
    walltime_seconds: float | None = None
    url: str | None = None
    reason: str = ""


class ServiceStatus(BaseModel):
    """What a service is doing.

    `state`: `serving` with at least one replica in rotation, `starting` before any, `idle` where
    none is wanted, `stale` without a controller that lives, `ending` and `down`. `problems` are
    sentences for people. `events`: the last lines of the ledger, oldest first.
    """

    model_config = ConfigDict(frozen=True)

    service_id: str
    state: Literal["starting", "serving", "idle", "unready", "stale", "ending", "down"]
    address: Address | None
    wanted: int
    reason: str
    ready: int
    replicas: tuple[ReplicaStatus, ...]
    traffic: Traffic | None
    restart: str | None
    waits: tuple[str, ...]
    problems: tuple[str, ...]
    controller_age_seconds: float | None
    rotation_age_seconds: float | None
    load_seconds: float | None
    queue_seconds: float | None
    events: tuple[ServiceEvent, ...]


def service_status(service: ServiceLayout, now: float | None = None) -> ServiceStatus:
    """Report what a service is doing at `now` (default: the present).

    Raises StorageError, InvalidInputError or OSError where it cannot be read.
    """
    now = clock.now() if now is None else now
    read_service_settings(service.settings)
    seen = read_record(service.state, ServiceState)
    rotation = read_record(service.rotation, Rotation)
    events = ServiceLedger(service.ledger).events()
    asked = frozenset(rotation.replicas if rotation is not None else ())
    state = seen or ServiceState(epoch=0, time=now, wanted=0, reason="the controller has not begun")
    replicas = tuple(_replica(service, one, asked, now) for one in state.replicas)
    controller_age = None if seen is None else _age(seen.time, now)
    rotation_age = None if rotation is None else _age(rotation.time, now)
    down = service.down_request.exists()
    live = [one for one in replicas if one.phase not in _OVER]
    problems = _problems(replicas, controller_age, rotation_age, down=down and not live)
    found = {
        "service_id": service.service_id,
        "state": _state(replicas, state.wanted, controller_age, down=down),
        "address": read_record(service.address, Address),
        "ready": sum(one.in_rotation for one in replicas),
        "replicas": replicas,
        "traffic": read_record(service.traffic, Traffic),
        "problems": problems,
        "controller_age_seconds": controller_age,
        "rotation_age_seconds": rotation_age,
        "events": events[-_LAST_EVENTS:],
    }
    # What is wanted and why, as the controller has recorded it.
    return ServiceStatus.model_validate({**vars(state), **found})


def _replica(
    service: ServiceLayout, one: ReplicaState, asked: frozenset[str], now: float
) -> ReplicaStatus:
    name = ReplicaName.parse(one.name)
    endpoint = None
    if name is not None and one.phase not in _OVER:
        endpoint = read_record(service.endpoint(name), Endpoint)
    found: dict[str, object] = {
        "age_seconds": max(0.0, now - one.since),
        "in_rotation": one.name in asked and one.phase not in _OVER,
    }
    if endpoint is not None:
        ends = endpoint.walltime_ends
        found["lease_seconds"] = endpoint.lease_until - now
        found["load_seconds"] = endpoint.load_seconds
        found["walltime_seconds"] = ends - now if ends is not None else None
        found["url"] = endpoint.url
    return ReplicaStatus.model_validate({**vars(one), **found})


def _state(
    replicas: tuple[ReplicaStatus, ...], wanted: int, controller_age: float | None, *, down: bool
) -> Literal["starting", "serving", "idle", "unready", "stale", "ending", "down"]:
    live = any(one.phase not in _OVER for one in replicas)
    if down:
        return "ending" if live else "down"
    if controller_age is None:
        return "starting"
    if controller_age > _STALE_SECONDS:
        return "stale"
    if any(one.in_rotation for one in replicas):
        return "serving"
    if wanted == 0:
        return "idle"
    return "unready" if any(one.phase in _OVER for one in replicas) else "starting"


def _problems(
    replicas: tuple[ReplicaStatus, ...],
    controller_age: float | None,
    rotation_age: float | None,
    *,
    down: bool,
) -> tuple[str, ...]:
    if down:
        return ()
    found = []
    if controller_age is not None and controller_age > _STALE_SECONDS:
        found.append(f"no controller has been seen for {controller_age:.0f} s")
    if rotation_age is not None and rotation_age > _STALE_SECONDS:
        found.append(f"no router has been seen for {rotation_age:.0f} s")
    for one in replicas:
        if one.lease_seconds is not None and one.lease_seconds < 0:
            found.append(f"{one.name} has not renewed its lease for {-one.lease_seconds:.0f} s")
    failed = [one for one in replicas if one.phase == "failed"]
    if failed:
        last = min(failed, key=lambda one: one.age_seconds)
        found.append(f"{last.name} has failed: {last.reason or 'its job is gone'}")
    return tuple(found)


def _age(then: float, now: float) -> float:
    return max(0.0, now - then)


# -- One line about each service, for `hpctrain status` -----------------------------------------


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


# -- Formats services as lines below the runs of `hpctrain status` ------------------------------


SERVICE_HEADERS = ("SERVICE", "STATE", "READY", "REQ/S", "P99", "ADDRESS", "PROBLEM")


def service_cells(row: ServiceRow) -> list[str]:
    """Format one service; `-` for what is not known."""
    p99 = None
    if row.p99_seconds is not None:
        p99 = f"{row.latency} {short_duration(row.p99_seconds)}"
        if row.promised_seconds is not None:
            p99 += f" of {short_duration(row.promised_seconds)}"
    return [
        row.service_id,
        row.state.upper(),
        f"{row.ready}/{row.wanted}",
        or_dash(None if row.rate is None else f"{row.rate:.3g}"),
        or_dash(p99),
        or_dash(row.url),
        or_dash(row.problem),
    ]
