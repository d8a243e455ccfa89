"""Collects what the page about a service shows, from its directory alone.

Belongs here: which facts the page has, each with the reason where it cannot be read; how much of
its time a service had the replicas that it needs; what happened to it, as marks in time. Does not
belong here: lives of replicas (`replica_lives`), windows of latencies (`latency_windows`), HTML
(`hpctrain.report`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from hpctrain.base import clock
from hpctrain.page.words import words_of
from hpctrain.plan.job import gpu_price
from hpctrain.records.run_records import read_record
from hpctrain.records.service_records import (
    Address,
    ServiceEvent,
    ServiceEventKind,
    ServiceState,
    Traffic,
)
from hpctrain.report.collect import PartReader, Unread
from hpctrain.serve.load.measurement import RequestRecord, ServiceTest
from hpctrain.serve.load.summary import (
    FailedRequest,
    LatencyOverTime,
    failed_requests,
    latencies_over_time,
)
from hpctrain.serve.plan.documents import Promise, ServicePlan
from hpctrain.serve.replica_lives import (
    ASKED_FOR,
    ReplicaLife,
    held_timeline,
    job_records,
    replica_life,
)
from hpctrain.serve.service_files import ServiceFiles
from hpctrain.spec.loader import load_profile, load_service_spec
from hpctrain.spec.service import ServiceSpec
from hpctrain.telemetry.goodput import OCCUPYING
from hpctrain.telemetry.timeline import Category, seconds

_STEERED: dict[ServiceEventKind, str] = {
    ServiceEventKind.RESTART_REQUESTED: "rolling restart",
    ServiceEventKind.RESTART_DONE: "restart done",
    ServiceEventKind.RESTART_STOPPED: "restart stopped",
    ServiceEventKind.SCALE_REQUESTED: "scale",
    ServiceEventKind.ROUTER_STARTED: "router",
}

_SPENT_ON = {Category.PRODUCTIVE: "answering", Category.STARTING: "starting"}
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
    now, layout, parts = clock.now() if now is None else now, service.layout, PartReader()
    spec = parts.read("spec", lambda: load_service_spec(layout.spec).document)
    profile = parts.read("profile", lambda: load_profile(layout.profile).document)
    plan = parts.read("plan", lambda: ServicePlan.model_validate_json(layout.plan.read_bytes()))
    state = parts.read("state", lambda: service.state)
    events = parts.read("ledger", service.ledger.events) or []
    names = layout.replica_names
    jobs = parts.read("replicas", lambda: [job_records(service, one) for one in names()]) or []
    lives = [replica_life(job, events, state, now) for job in jobs]
    tests = [
        _test(parts, path, plan.promises if plan else ())
        for path in sorted(layout.tests.glob("*.json"))
    ]
    spending = None
    if plan is not None:
        held = {"answering": 0.0, "starting": 0.0, "other": 0.0}
        for life, job in zip(lives, jobs, strict=True):
            for segment in held_timeline(life, job.events, now).segments:
                if segment.category in OCCUPYING:
                    kind = _SPENT_ON.get(segment.category, "other")
                    held[kind] += seconds(segment.end - segment.start) * plan.replica.gpus / 3600
        price = gpu_price(spec, profile) if spec and profile else None
        spending = ServiceSpending(
            answering_gpu_hours=held["answering"],
            starting_gpu_hours=held["starting"],
            other_gpu_hours=held["other"],
            cost=sum(held.values()) * price.per_gpu_hour if price else None,
            currency=price.currency if price else None,
        )
    return ServiceReport(
        service_id=service.service_id,
        directory=str(layout.directory),
        made_time=now,
        owner=service.owner_name,
        asked_down=service.asked_down,
        spec=spec,
        cluster=profile.name if profile else None,
        plan=plan,
        state=state,
        address=parts.read("address", lambda: service.address),
        traffic=parts.read("traffic", lambda: read_record(layout.traffic, Traffic)),
        ready=len(parts.read("endpoints", lambda: service.endpoints(now)) or ()),
        lives=tuple(lives),
        events=tuple(events),
        marks=marks_of_service(events, lives),
        tests=tuple(one for one in tests if one is not None),
        spending=spending,
        coverage=coverage(lives, plan.replicas if plan else 1, now),
        unread=tuple(parts.unread),
    )


def _test(parts: PartReader, path: Path, promises: Sequence[Promise]) -> TestedLatency | None:
    """Read a result of `serve test`, and beside it the records of its requests."""
    test = parts.read(path.name, lambda: ServiceTest.model_validate_json(path.read_bytes()))
    if test is None:
        return None
    file = path.with_suffix(".jsonl")

    def requests() -> list[RequestRecord]:
        with file.open(encoding="utf-8") as lines:
            return [RequestRecord.from_line(line) for line in lines]

    records = parts.read(file.name, requests) or []
    return TestedLatency(
        name=path.stem,
        test=test,
        records_read=len(records),
        latencies=latencies_over_time(records, promises),
        failed=failed_requests(records),
    )


def marks_of_service(
    events: Sequence[ServiceEvent], lives: Sequence[ReplicaLife]
) -> tuple[ServiceMark, ...]:
    """Tell what happened to a service: ends of replicas, drains, first answers, people's wishes."""
    marks: list[ServiceMark] = []

    def mark(event_time: float, kind: MarkKind, label: str, words: str, reason: str) -> None:
        words = ": ".join(filter(None, (words, reason)))
        marks.append(ServiceMark(event_time=event_time, kind=kind, label=label, words=words))

    for event in events:
        if (label := _STEERED.get(event.event)) is not None:
            if event.event is ServiceEventKind.SCALE_REQUESTED and event.replicas is not None:
                label = f"{label} to {event.replicas}"
            mark(event.time, "person", label, label, event.reason or "")
    for life in lives:  # when a replica began and ceased to answer, and why
        for number, span in enumerate(life.spans):
            if span.phase != "ready":
                continue
            instead = f", instead of {life.instead_of}" if life.instead_of is not None else ""
            mark(
                span.begin,
                "ready",
                "successor" if instead else "ready",
                f"{life.name} answers{instead}",
                "",
            )
            following = life.spans[number + 1] if number + 1 < len(life.spans) else None
            if following is not None and following.phase == "draining":
                asked = life.cause if life.cause in ASKED_FOR else None
                label = words_of(asked) if asked else "drain"
                mark(span.end, "leave", label, f"{life.name} leaves: {label}", "")
            elif following is not None or life.over_since is not None:
                failed = following is not None and following.phase == "failed"
                end = following if following is not None and failed else life
                label = words_of(end.cause or "lost")
                mark(span.end, "failure", label, f"{life.name} is lost: {label}", end.reason or "")
    return tuple(sorted(marks, key=lambda mark: mark.event_time))


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
