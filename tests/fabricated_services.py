"""Service directories as they look after hours of serving, made in no time.

The files are written by the same code as in a real service; only what they contain is made up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from hpctrain.base.durable import append_line, replace_text
from hpctrain.records.ledger import Event, EventKind
from hpctrain.records.run_records import write_record
from hpctrain.records.service_layout import ReplicaName, ServiceLayout
from hpctrain.records.service_records import (
    Address,
    DrainRecord,
    Endpoint,
    ReplicaState,
    Rotation,
    ServiceEvent,
    ServiceEventKind,
    ServiceState,
    Traffic,
)
from hpctrain.serve.load.measurement import (
    ClientUse,
    FailureKind,
    LoadPlan,
    LoadResult,
    LoadTarget,
    RequestRecord,
    compare,
)
from hpctrain.serve.load.summary import summarize
from hpctrain.serve.plan.documents import Promise, ReplicaPlan, ServicePlan
from hpctrain.serve.plan.traffic import Traffic as PlannedTraffic
from hpctrain.serve.service_files import ServiceFiles
from hpctrain.serve.service_job import service_settings
from hpctrain.spec.loader import load_profile, load_service_spec

NOW = 1_800_000_000.0
PROFILE = Path(__file__).resolve().parents[1] / "cluster_profiles" / "a100x1.yaml"
GPUS_PER_REPLICA = 4
_SPEC = """kind: service
name: chat
weights: {path: /models/llama-3-70b, name: llama}
traffic: {rate: 100, prompt_tokens: {p50: 400, p99: 3000}, output_tokens: 128}
objectives:
  ttft: {p50: 200ms, p99: 450ms}
  tpot: {p99: 40ms}
"""


@dataclass(frozen=True)
class Life:
    """One job of a replica: seconds from the start of the service, None for what did not happen.

    `cause`: why its engine ended; `told`: its controller asked it to leave.
    """

    name: str
    submitted: float = 0.0
    started: float | None = 30.0
    ready: float | None = 150.0
    told: float | None = None
    ended: float | None = None
    cause: str | None = None
    instead_of: str | None = None
    broken_off: int = 0


LIVES = (
    Life("r001-g001", told=3600, ended=3640, cause="preempted"),
    Life("r001-g002", submitted=3300, started=3360, ready=3500, instead_of="r001-g001"),
    Life("r002-g001", ended=5400, cause="engine_exit"),
    Life("r002-g002", submitted=5420, started=5450, ready=5600),
    Life("r003-g001", told=6000, ended=6120, cause="time_limit", broken_off=2),
    Life("r003-g002", submitted=6100, started=6200, ready=None),
)


def promise(latency: str, percentile: str, limit: float, predicted: float) -> Promise:
    return Promise.model_validate(
        {
            "latency": latency,
            "percentile": percentile,
            "limit_seconds": limit,
            "predicted_seconds": predicted,
            "low_seconds": 0.9 * predicted,
            "high_seconds": 1.2 * predicted,
            "holds": predicted < limit,
        }
    )


def service_plan(engine: str = "vllm") -> ServicePlan:
    """Plan two replicas and one spare."""
    replica = ReplicaPlan.model_validate(
        {
            "engine": engine,
            "gpu": "a100-80gb",
            "gpus": GPUS_PER_REPLICA,
            "nodes": 1,
            "tp": GPUS_PER_REPLICA,
            "pp": 1,
            "precision": "bf16",
            "kv_precision": "bf16",
            "max_sequences": 256,
            "batch_tokens": 8192,
            "max_length": 8192,
            "weight_bytes": 35.3e9,
            "activation_bytes": 2e9,
            "overhead_bytes": 3e9,
            "kv_bytes_per_token": 81920.0,
            "kv_capacity_tokens": 400_000,
        }
    )
    return ServicePlan(
        replica=replica,
        replicas=2,
        spare=1,
        rate=100.0,
        capacity_rate=118.0,
        availability=0.99,
        promises=(
            promise("ttft", "p50", 0.2, 0.11),
            promise("ttft", "p99", 0.45, 0.36),
            promise("tpot", "p99", 0.04, 0.031),
        ),
        currency="USD",
        cost_per_hour=21.48,
        cost_per_million_output_tokens=0.47,
        load_seconds=120.0,
        drain_seconds=60.0,
        lost_per_preemption=0.2,
    )


def fabricate_service(
    runs: Path,
    service_id: str = "chat-7f3a",
    lives: Sequence[Life] = LIVES,
    *,
    age: float = 7200.0,
    urls: Sequence[str] = (),
    engine: str = "vllm",
    wanted: int = 3,
) -> ServiceFiles:
    """Make a service that began `age` seconds before NOW; ready replicas answer at `urls`."""
    layout = ServiceLayout(runs / service_id)
    layout.create()
    replace_text(layout.spec, _SPEC)
    replace_text(layout.profile, PROFILE.read_text())
    plan = service_plan(engine)
    replace_text(layout.plan, plan.model_dump_json())
    spec, profile = load_service_spec(layout.spec).document, load_profile(PROFILE).document
    settings = service_settings(spec, profile, plan, service_id)
    replace_text(layout.settings, settings.model_dump_json())
    begin = NOW - age
    events = [_line(ServiceEventKind.CONTROLLER_STARTED, begin, epoch=1)]
    for life in lives:
        events += _service_lines(life, begin)
        _write_job(layout, life, begin)
    events.sort(key=lambda event: event.time)
    for event in events:
        append_line(layout.ledger, event.model_dump_json(exclude_defaults=True))
    ready = [one for one in lives if one.ready is not None and one.ended is None]
    for number, life in enumerate(ready):
        _write_endpoint(layout, life, begin, urls[number] if number < len(urls) else None, engine)
    names = tuple(life.name for life in ready)
    write_record(layout.rotation, Rotation(epoch=1, time=NOW - 2, replicas=names))
    address = Address(
        epoch=1, job_id=90, node="n900", url="http://n900:8080", needs_token=False, time=begin
    )
    write_record(layout.address, address)
    write_record(layout.state, _state(lives, begin, wanted))
    traffic = Traffic(
        begun=begin,
        time=NOW - 3,
        requests=700_000,
        failed=3,
        refused=2,
        limited=1,
        rate=97.4,
        ttft_p99_seconds=0.38,
    )
    write_record(layout.traffic, traffic)
    return ServiceFiles(layout)


def _line(kind: ServiceEventKind, time: float, **fields: object) -> ServiceEvent:
    return ServiceEvent.model_validate({"event": kind, "time": time, **fields})


def _service_lines(life: Life, begin: float) -> list[ServiceEvent]:
    kind, name = ServiceEventKind, life.name
    lines = [_line(kind.START_REPLICA, begin + life.submitted, replica=name)]
    if life.instead_of is not None:
        lines = [lines[0].model_copy(update={"instead_of": life.instead_of})]
    if life.ready is not None:
        lines.append(_line(kind.REPLICA_READY, begin + life.ready, replica=name, node="n001"))
    if life.told is not None:
        reason = "its successor answers"
        lines.append(_line(kind.DRAIN_REPLICA, begin + life.told, replica=name, reason=reason))
    if life.ended is not None:
        if life.broken_off:
            reason = f"{life.broken_off} requests were broken off"
            lines.append(_line(kind.DRAIN_FAILED, begin + life.ended, replica=name, reason=reason))
        ended = kind.REPLICA_ENDED if life.told is not None else kind.REPLICA_FAILED
        lines.append(_line(ended, begin + life.ended + 5, replica=name, reason=life.cause))
    return lines


def _write_job(layout: ServiceLayout, life: Life, begin: float) -> None:
    """Write the ledger of the job, as its supervisor does."""
    parsed = ReplicaName.parse(life.name)
    assert parsed is not None
    run = layout.replica(parsed)
    run.create()
    job_id = 100 * parsed.number + parsed.generation

    def say(kind: EventKind, seconds: float, **fields: object) -> None:
        event = Event.model_validate(
            {
                "event": kind,
                "time": begin + seconds,
                "job_id": job_id,
                "restart_count": 0,
                **fields,
            }
        )
        append_line(run.ledger, event.model_dump_json(exclude_defaults=True))

    say(EventKind.SUBMITTED, life.submitted)
    if life.started is None:
        return
    say(EventKind.ATTEMPT_STARTED, life.started, nodes=f"n{parsed.number:03}")
    say(EventKind.LAUNCH_STARTED, life.started + 4, epoch=1)
    if life.told is not None and life.ended is not None:
        drain = DrainRecord(
            epoch=1,
            reason="its successor answers",
            withdrawn_at=begin + life.told + 1,
            router_left_at=begin + life.told + 2,
            in_flight=life.broken_off,
            broken_off=life.broken_off,
            ended_at=begin + life.ended,
        )
        write_record(run.drain, drain)
    if life.ended is not None:
        say(EventKind.LAUNCH_ENDED, life.ended, epoch=1, cause=life.cause, reason="it was its time")
        say(EventKind.ACTION, life.ended, action="stop")


def _write_endpoint(
    layout: ServiceLayout, life: Life, begin: float, url: str | None, engine: str
) -> None:
    name = ReplicaName.parse(life.name)
    assert name is not None and life.ready is not None and life.started is not None
    endpoint = Endpoint(
        replica=life.name,
        epoch=1,
        job_id=100 * name.number + name.generation,
        node=f"n{name.number:03}",
        url=url or "http://127.0.0.1:9",
        served_name="llama",
        engine=engine,
        weights_digest="ab" * 32,
        ready_since=begin + life.ready,
        load_seconds=life.ready - life.started,
        lease_until=NOW + 20,
        walltime_ends=begin + life.started + 86400,
    )
    write_record(layout.endpoint(name), endpoint)


def _state(lives: Sequence[Life], begin: float, wanted: int) -> ServiceState:
    return ServiceState(
        epoch=1,
        time=NOW - 4,
        wanted=wanted,
        reason="the plan: 2 for 100 requests/s, 1 spare",
        replicas=tuple(
            ReplicaState.model_validate(
                {
                    "name": one.name,
                    "phase": _phase(one),
                    "job_id": 1,
                    "node": None,
                    "since": begin + (one.ended or one.ready or one.started or one.submitted),
                }
            )
            for one in lives
        ),
    )


def _phase(life: Life) -> str:
    if life.ended is not None:
        return "ended" if life.told is not None else "failed"
    if life.told is not None:
        return "draining"
    if life.ready is not None:
        return "ready"
    return "loading" if life.started is not None else "queued"


def start_engine_again(service: ServiceFiles, name: ReplicaName, time: float) -> None:
    """The engine of a ready replica ends by itself, and answers again 100 s later."""
    for seconds, kind, more in (
        (0.0, EventKind.LAUNCH_ENDED, {"cause": "engine_exit", "reason": "exit 0 unasked"}),
        (0.5, EventKind.ACTION, {"action": "relaunch"}),
        (10.0, EventKind.LAUNCH_STARTED, {"epoch": 2}),
        (100.0, EventKind.SERVING, {"served_seconds": 0.0}),
        (700.0, EventKind.SERVING, {"served_seconds": 600.0}),
    ):
        event = Event.model_validate({"event": kind, "time": time + seconds, **more})
        line = event.model_dump_json(exclude_defaults=True)
        append_line(service.layout.replica(name).ledger, line)


def fabricate_test(
    service: ServiceFiles,
    name: str = "test-1",
    *,
    began: float = NOW - 2200,
    seconds: float = 1500.0,
    rate: float = 12.0,
    lost: Sequence[float] = (400.0,),
    slow: Sequence[float] = (400.0, 1010.0),
) -> None:
    """A load test as `serve test` leaves it: some requests are lost at `lost`, slow after `slow`.

    Times are since the start of the test.
    """
    random = Random(7)
    records = []
    planned = 0.0
    while (planned := planned + random.expovariate(rate)) < seconds:
        behind = [planned - one for one in slow if 0 <= planned - one < 60]
        factor = 1 + 9 * (1 - behind[0] / 60) if behind else 1.0
        ttft = 0.13 * factor * random.lognormvariate(0, 0.35)
        tpot = 0.021 * (1 + 0.15 * factor) * random.lognormvariate(0, 0.1)
        number = len(records)
        failure: FailureKind | None = None
        if any(0 <= planned - one < 0.3 for one in lost):
            failure = "reset"
        records.append(
            RequestRecord(
                request_id=f"{name}-{number:06}",
                planned_seconds=planned,
                sent_seconds=planned + 0.0004,
                prompt_tokens=400,
                asked_tokens=128,
                first_token_seconds=None if failure else planned + ttft,
                last_token_seconds=None if failure else planned + ttft + 127 * tpot,
                answered_tokens=0 if failure else 128,
                failure=failure,
                detail="connection reset by peer" if failure else "",
            )
        )
    use = ClientUse(cpu_share=0.2, lag_seconds=(0.0004,), most_outstanding=40)
    sent = LoadPlan(PlannedTraffic(), rate, warm_up_seconds=10.0, seed=7)
    measured = summarize(
        LoadTarget("http://n900:8080", "llama"), sent, LoadResult(tuple(records), use, began)
    )
    plan = service.plan()
    assert plan is not None
    result = compare(plan.promises, measured)
    layout = service.layout
    replace_text(layout.tests / f"{name}.json", result.model_dump_json())
    replace_text(layout.tests / f"{name}.jsonl", "".join(f"{one.to_line()}\n" for one in records))
