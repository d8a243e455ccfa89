"""Collects what the page about a service shows, from its directory alone.

Belongs here: which facts the page has, each with the reason where it cannot be read; how much of
its time a service had the replicas that it needs; what happened to it, as marks in time. Does not
belong here: lives of replicas (`replica_lives`), windows of latencies (`latency_windows`), HTML
(`hpctrain.report`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict

from hpctrain.base import clock
from hpctrain.base.errors import HpctrainError
from hpctrain.plan.gpu_price import GpuPrice, gpu_price
from hpctrain.records.run_records import read_record
from hpctrain.records.service_records import (
    Address,
    ServiceEvent,
    ServiceEventKind,
    ServiceState,
    Traffic,
)
from hpctrain.report.collect import Unread
from hpctrain.serve.latency_windows import (
    FailedRequest,
    LatencyOverTime,
    failed_requests,
    latencies_over_time,
)
from hpctrain.serve.load.measurement import RequestRecord
from hpctrain.serve.load.service_test import ServiceTest
from hpctrain.serve.plan.documents import Promise, ServicePlan
from hpctrain.serve.replica_lives import (
    ASKED_FOR,
    JobRecords,
    ReplicaLife,
    held_timeline,
    job_records,
    replica_life,
)
from hpctrain.serve.service_files import ServiceFiles
from hpctrain.spec.loader import load_profile, load_service_spec
from hpctrain.spec.service import ServiceSpec
from hpctrain.telemetry.clock_repair import seconds
from hpctrain.telemetry.goodput import OCCUPYING
from hpctrain.telemetry.time_categories import Category

_PartT = TypeVar("_PartT")
_STEERED: dict[ServiceEventKind, str] = {
    ServiceEventKind.RESTART_REQUESTED: "rolling restart",
    ServiceEventKind.RESTART_DONE: "restart done",
    ServiceEventKind.RESTART_STOPPED: "restart stopped",
    ServiceEventKind.SCALE_REQUESTED: "scale",
    ServiceEventKind.ROUTER_STARTED: "router",
}

MarkKind = Literal["failure", "leave", "ready", "person"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)


class ServiceMark(_Frozen):
    """Something that happened to a service, at seconds since the epoch."""

    event_time: float
    kind: MarkKind
    label: str
    words: str


class TestedLatency(_Frozen):
    """One load test of the service. `records_read`: requests whose own records could be read."""

    name: str
    test: ServiceTest
    records_read: int
    latencies: tuple[LatencyOverTime, ...]
    failed: tuple[FailedRequest, ...]


class ServiceSpending(_Frozen):
    """GPU-hours of all replicas: answering, loading, and what else their jobs were.

    `cost` is None without a price.
    """

    answering_gpu_hours: float
    starting_gpu_hours: float
    other_gpu_hours: float
    cost: float | None
    currency: str | None

    @property
    def gpu_hours(self) -> float:
        return self.answering_gpu_hours + self.starting_gpu_hours + self.other_gpu_hours


class Coverage(_Frozen):
    """How much of the time since the first answer had replicas, as shares of it."""

    wall_seconds: float
    with_any: float
    with_needed: float


class ServiceReport(_Frozen):
    """Everything that the page about one service shows; None and empty: not known.

    `made_time`: when it was collected, in seconds since the epoch.
    """

    service_id: str
    directory: str
    made_time: float
    owner: str | None
    asked_down: bool
    spec: ServiceSpec | None = None
    cluster: str | None = None
    plan: ServicePlan | None = None
    state: ServiceState | None = None
    address: Address | None = None
    traffic: Traffic | None = None
    ready: int = 0
    lives: tuple[ReplicaLife, ...] = ()
    events: tuple[ServiceEvent, ...] = ()
    marks: tuple[ServiceMark, ...] = ()
    tests: tuple[TestedLatency, ...] = ()
    spending: ServiceSpending | None = None
    coverage: Coverage | None = None
    unread: tuple[Unread, ...] = ()


def collect_service_report(service: ServiceFiles, now: float | None = None) -> ServiceReport:
    """Collect the page of a service; what cannot be read is left out with its reason."""
    return _Collector(service, clock.now() if now is None else now).report()


class _Collector:
    """Reads the parts of one service; a part that cannot be read takes no other one with it."""

    def __init__(self, service: ServiceFiles, now: float) -> None:
        self._service, self._now = service, now
        self._unread: list[Unread] = []

    def _part(self, name: str, read: Callable[[], _PartT]) -> _PartT | None:
        try:
            return read()
        except (HpctrainError, OSError, ValueError, TypeError, KeyError) as error:
            reason = error.strerror if type(error) is OSError and error.strerror else str(error)
            self._unread.append(Unread(part=name, reason=reason))
            return None

    def report(self) -> ServiceReport:
        """Read everything."""
        service, layout = self._service, self._service.layout
        spec = self._part("spec", lambda: load_service_spec(layout.spec).document)
        profile = self._part("profile", lambda: load_profile(layout.profile).document)
        plan = self._part("plan", self._plan)
        state = self._part("state", lambda: service.state)
        events = self._part("ledger", service.ledger.events) or []
        jobs = self._part("replicas", self._jobs) or []
        lives = [replica_life(job, events, state, self._now) for job in jobs]
        promises = plan.promises if plan else ()
        tests = (self._test(path, promises) for path in sorted(layout.tests.glob("*.json")))
        price = gpu_price(spec, profile) if spec and profile else None
        return ServiceReport(
            service_id=service.service_id,
            directory=str(layout.directory),
            made_time=self._now,
            owner=service.owner_name,
            asked_down=service.asked_down,
            spec=spec,
            cluster=profile.name if profile else None,
            plan=plan,
            state=state,
            address=self._part("address", lambda: service.address),
            traffic=self._part("traffic", lambda: read_record(layout.traffic, Traffic)),
            ready=len(self._part("endpoints", lambda: service.endpoints(self._now)) or ()),
            lives=tuple(lives),
            events=tuple(events),
            marks=marks_of_service(events, lives),
            tests=tuple(one for one in tests if one is not None),
            spending=_spending(lives, jobs, plan, price, self._now),
            coverage=coverage(lives, plan.replicas if plan else 1, self._now),
            unread=tuple(self._unread),
        )

    def _plan(self) -> ServicePlan:
        return ServicePlan.model_validate_json(self._service.layout.plan.read_bytes())

    def _jobs(self) -> list[JobRecords]:
        return [job_records(self._service, one) for one in self._service.layout.replica_names()]

    def _test(self, path: Path, promises: Sequence[Promise]) -> TestedLatency | None:
        """Read a result of `serve test`, and beside it the records of its requests."""
        test = self._part(path.name, lambda: ServiceTest.model_validate_json(path.read_bytes()))
        if test is None:
            return None
        file = path.with_suffix(".jsonl")
        records = self._part(file.name, lambda: read_requests(file)) or []
        return TestedLatency(
            name=path.stem,
            test=test,
            records_read=len(records),
            latencies=latencies_over_time(records, promises),
            failed=failed_requests(records),
        )


def read_requests(path: Path) -> list[RequestRecord]:
    """Read the records of a test's requests. Raises OSError or ValueError."""
    with path.open(encoding="utf-8") as lines:
        return [RequestRecord.from_line(line) for line in lines]


def marks_of_service(
    events: Sequence[ServiceEvent], lives: Sequence[ReplicaLife]
) -> tuple[ServiceMark, ...]:
    """Tell what happened to a service: ends of replicas, drains, first answers, people's wishes."""
    marks: list[ServiceMark] = []
    for event in events:
        if (label := _STEERED.get(event.event)) is not None:
            if event.event is ServiceEventKind.SCALE_REQUESTED and event.replicas is not None:
                label = f"{label} to {event.replicas}"
            words = ": ".join(filter(None, (label, event.reason)))
            marks.append(
                ServiceMark(event_time=event.time, kind="person", label=label, words=words)
            )
    for life in lives:
        marks += _marks_of_life(life)
    return tuple(sorted(marks, key=lambda mark: mark.event_time))


def _marks_of_life(life: ReplicaLife) -> Iterator[ServiceMark]:
    """Tell when a replica began and ceased to answer, and why."""
    for number, span in enumerate(life.spans):
        if span.phase != "ready":
            continue
        label, words = "ready", f"{life.name} answers"
        if life.instead_of is not None:
            label, words = "successor", f"{words}, instead of {life.instead_of}"
        yield ServiceMark(event_time=span.begin, kind="ready", label=label, words=words)
        following = life.spans[number + 1] if number + 1 < len(life.spans) else None
        if following is not None and following.phase == "draining":
            asked = life.cause in ASKED_FOR
            label = words_of_cause(life.cause) if life.cause and asked else "drain"
            words = f"{life.name} leaves: {label}"
            yield ServiceMark(event_time=span.end, kind="leave", label=label, words=words)
        elif following is not None or life.over_since is not None:
            failed = following is not None and following.phase == "failed"
            cause = following.cause if following is not None and failed else life.cause
            reason = following.reason if following is not None and failed else life.reason
            label = words_of_cause(cause or "lost")
            words = ": ".join(filter(None, (f"{life.name} is lost", label, reason)))
            yield ServiceMark(event_time=span.end, kind="failure", label=label, words=words)


def words_of_cause(cause: str) -> str:
    return cause.replace("_", " ")


def coverage(lives: Sequence[ReplicaLife], needed: int, now: float) -> Coverage | None:
    """Compute how much of the time since the first answer had any replica, and all needed ones."""
    turns = sorted(
        (moment, change)
        for life in lives
        for begin, end in life.answering
        for moment, change in ((begin, 1), (end, -1))
    )
    if not turns:
        return None
    last = max(now, turns[-1][0])
    answering, with_any, with_needed = 0, 0.0, 0.0
    for (moment, change), (following, _) in zip(turns, [*turns[1:], (last, 0)], strict=True):
        answering += change
        with_any += following - moment if answering else 0.0
        with_needed += following - moment if answering >= needed else 0.0
    wall = last - turns[0][0]
    if wall <= 0:
        return None
    return Coverage(wall_seconds=wall, with_any=with_any / wall, with_needed=with_needed / wall)


def _spending(
    lives: Sequence[ReplicaLife],
    jobs: Sequence[JobRecords],
    plan: ServicePlan | None,
    price: GpuPrice | None,
    now: float,
) -> ServiceSpending | None:
    if plan is None:
        return None
    held: dict[str, float] = {"answering": 0.0, "starting": 0.0, "other": 0.0}
    for life, job in zip(lives, jobs, strict=True):
        for segment in held_timeline(life, job.events, now).segments:
            if segment.category not in OCCUPYING:
                continue
            kind = {Category.PRODUCTIVE: "answering", Category.STARTING: "starting"}
            hours = seconds(segment.end - segment.start) * plan.replica.gpus / 3600
            held[kind.get(segment.category, "other")] += hours
    total = sum(held.values())
    return ServiceSpending(
        answering_gpu_hours=held["answering"],
        starting_gpu_hours=held["starting"],
        other_gpu_hours=held["other"],
        cost=total * price.per_gpu_hour if price else None,
        currency=price.currency if price else None,
    )
