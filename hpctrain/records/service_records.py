"""Records of a service: endpoints, rotation, address, requests of people, state of the controller.

Belongs here: the formats and who writes them, also of its settings and of its ledger. Times are
seconds since the epoch. Does not belong here: paths (`service_layout`), what follows from a record.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Literal

from hpctrain.base import clock
from hpctrain.base.durable import append_line
from hpctrain.records.run_records import Record, RecordPart, parse_record
from hpctrain.records.supervise_config import Settings, read_settings


class Endpoint(Record):
    """A replica that answers: written by its job after a health check and one canary completion.

    It counts until `lease_until`, which its job moves on while the replica is healthy, and only if
    no record of a higher `epoch` of the same replica generation is known. A replica that leaves
    removes its file first, waits until the router no longer asks it, and only then ends its engine.
    `weights_digest`: SHA-256 (hex) of the names and sizes of the weights' files.
    """

    replica: str
    epoch: int
    job_id: int
    node: str
    url: str
    served_name: str
    engine: str
    weights_digest: str
    ready_since: float
    load_seconds: float
    lease_until: float
    walltime_ends: float | None = None


class DrainRecord(Record):
    """How a launch of a replica left; its job replaces it while it drains (`drain.json`).

    `withdrawn_at`: when its endpoint was removed. `router_left_at`: when the router was seen not to
    name it any more; None if it was not. `in_flight`: requests that were computed or waited when
    they were last counted, None where the engine does not show them. `broken_off`: those that were
    left when the engine was ended; without `ended_at` the job was killed before, and `in_flight`
    were broken off.
    """

    epoch: int
    reason: str
    withdrawn_at: float
    router_left_at: float | None = None
    in_flight: int | None = None
    broken_off: int | None = None
    ended_at: float | None = None


class Rotation(Record):
    """Which replicas the router asks: written by the router's job after each change it has made.

    `replicas` are names such as `r001-g002`. `time` is moved on by every pass over the endpoints,
    so that an old one shows a router that is away.
    """

    epoch: int
    time: float
    replicas: tuple[str, ...] = ()


class Address(Record):
    """Where clients send requests. `url` is such as `http://n001:8080`; TLS makes it https."""

    epoch: int
    job_id: int | None
    node: str
    url: str
    needs_token: bool
    time: float


class ScaleRequest(Record):
    """How many replicas a person wants; `replicas` None gives the decision back to the spec."""

    replicas: int | None
    user: str
    time: float


class RestartRequest(Record):
    """A rolling restart that a person wants: of all generations submitted before `time`.

    `compare`: new replicas have to answer as the old ones do; not after the weights have changed.
    """

    user: str
    time: float
    reason: str = ""
    compare: bool = True


class ReplicaJob(RecordPart):
    """One job of one replica, and what it is doing."""

    name: str
    phase: Literal["queued", "loading", "ready", "draining", "ended", "failed"]
    job_id: int | None
    node: str | None


class ReplicaState(ReplicaJob):
    """One job of one replica as the controller last saw it.

    `since`: when it entered this phase. `reason`: why it waits, leaves or has failed.
    """

    since: float
    reason: str = ""


class ScalingMemory(RecordPart):
    """What the controller remembers of its reaction to load, for the controller after it.

    `target`: how many replicas the load has asked for, since `changed_at`; None: it never has.
    `calm_since`: when fewer began to be enough; None: they are not.
    """

    target: int | None = None
    changed_at: float | None = None
    calm_since: float | None = None


class Traffic(Record):
    """What router and engines have counted, written by the router's job every few seconds.

    `begun`: when the first router of the service began to count. Counts are since the start of
    the router's process; `rate` is requests per second over the last
    minute. `waiting`, `running` and `kv_share` are sums and the maximum over all engines that
    answered; None if none did. `ttft_p99_seconds` and `e2e_p99_seconds` are of the last minutes,
    from the engines' histograms, so no finer than their buckets. `refused`: while no replica was
    ready; `limited`: beyond the rate of one client; `failed`: answered with 5xx.
    """

    time: float
    begun: float
    requests: int = 0
    failed: int = 0
    refused: int = 0
    limited: int = 0
    rate: float | None = None
    last_request: float | None = None
    running: float | None = None
    waiting: float | None = None
    kv_share: float | None = None
    ttft_p99_seconds: float | None = None
    e2e_p99_seconds: float | None = None


class ServiceState(Record):
    """What the controller wants and last saw; `reason` says why it wants so many replicas.

    `waits`: what it does not do yet, and why. `restart`: how far a rolling restart is, or how it
    ended. `load_seconds` and `queue_seconds` are what it expects of a new replica.
    """

    epoch: int
    time: float
    wanted: int
    reason: str
    replicas: tuple[ReplicaState, ...] = ()
    restart: str | None = None
    waits: tuple[str, ...] = ()
    scaling: ScalingMemory = ScalingMemory()
    load_seconds: float | None = None
    queue_seconds: float | None = None


# -- The ledger of a service: what its controller, its commands and its people have done to it --
# A line is written and flushed *before* the action it announces, as in the ledger of a run, because
# the controller may end in the middle of one. Each job of the service has a ledger of its own
# (`ledger`).


class ServiceEventKind(StrEnum):
    """What happened; the fields of `ServiceEvent` that are set depend on it."""

    CONTROLLER_STARTED = "controller_started"
    WANTED = "wanted"
    START_REPLICA = "start_replica"
    START_FAILED = "start_failed"
    DRAIN_REPLICA = "drain_replica"
    DRAIN_FAILED = "drain_failed"
    REPLICA_READY = "replica_ready"
    REPLICA_FAILED = "replica_failed"
    REPLICA_ENDED = "replica_ended"
    ADDRESS = "address"
    SCALE_REQUESTED = "scale_requested"
    RESTART_REQUESTED = "restart_requested"
    RESTART_STOPPED = "restart_stopped"
    RESTART_DONE = "restart_done"
    ROUTER_STARTED = "router_started"
    UP_REQUESTED = "up_requested"
    DOWN_REQUESTED = "down_requested"


class ServiceEvent(Record):
    """One line of the ledger. `time` is seconds since the epoch.

    `epoch` is that of the controller, None for a person's command. `replicas`: how many were
    wanted. `replica`: a name such as `r001-g002`; `instead_of` is the generation that it replaces
    while that one still answers.
    """

    event: ServiceEventKind
    time: float
    epoch: int | None = None
    replica: str | None = None
    instead_of: str | None = None
    replicas: int | None = None
    job_id: int | None = None
    node: str | None = None
    reason: str | None = None
    user: str | None = None
    url: str | None = None


class ServiceLedger:
    """Appends to and reads the ledger of one service."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, kind: ServiceEventKind, **fields: object) -> ServiceEvent:
        """Write one event durably and return it. Raises OSError."""
        event = ServiceEvent.model_validate({"event": kind, "time": clock.now(), **fields})
        append_line(self.path, event.model_dump_json(exclude_defaults=True), mode=0o600)
        return event

    def events(self) -> list[ServiceEvent]:
        """All readable events, oldest first; a torn line of a killed writer is left out.

        Raises OSError when the file is there and cannot be read.
        """
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return []
        found = (parse_record(self.path, line, ServiceEvent) for line in data.splitlines())
        return [event for event in found if event is not None]


# -- The settings of router and controller (`service.json`), made from spec and plan ------------


class RouterSettings(Settings):
    """The router itself; paths are absolute. See `spec.service.RouterSpec`.

    `program` and `python` say where it is looked for; `ports`: the first and the last that it may
    take, None: any. `processes`: the threads of HAProxy.
    """

    name: Literal["vllm-router", "haproxy"]
    program: str | None = None
    python: str | None = None
    policy: Literal["least_loaded", "round_robin", "cache_aware"]
    place: Literal["job", "login"]
    port: int | None = None
    ports: tuple[int, int] | None = None
    address: str | None = None
    certificate: str | None = None
    key: str | None = None
    token_file: str | None = None
    rate_limit: float | None = None
    retries: int = 2
    processes: int = 1


class ScalingSettings(Settings):
    """How many replicas; see `spec.service.ReplicasSpec` and the plan.

    `count` is for the busiest hour and contains `spare`; `capacity_rate` are requests per second of
    one replica within the objectives. `hours`: minute of the day in `time_zone`, and the share of
    the busiest hour's rate from then on, in order. `idle_seconds`: None where the last replica
    stays. `most_jobs`: how many jobs of replicas there may be at a time; None: no limit.
    """

    count: int
    spare: int
    least: int
    most: int
    capacity_rate: float
    hours: tuple[tuple[int, float], ...] = ()
    time_zone: str = "UTC"
    react: bool = False
    idle_seconds: float | None = None
    most_jobs: int | None = None


class ServiceSettings(Settings):
    """Written when the service is started; durations in seconds.

    `load_seconds` is the plan's word until a replica has been measured. Slurm is not asked more
    often than every `poll_seconds`.
    """

    schema_version: Literal[1] = 1
    service_id: str
    engine: str
    router: RouterSettings
    scaling: ScalingSettings
    load_seconds: float
    drain_seconds: float
    poll_seconds: float = 10.0


def read_service_settings(path: Path) -> ServiceSettings:
    """Read the settings of a service.

    Raises StorageError when the file cannot be read, NewerFormatError when a newer hpctrain has
    written it, InvalidInputError when it is no such file.
    """
    return read_settings(path, ServiceSettings, "service.json")
