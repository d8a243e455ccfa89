"""Records of a service: endpoints, rotation, address, requests of people, state of the controller.

Belongs here: the formats and who writes them. Times are seconds since the epoch. Does not belong
here: paths (`service_layout`), the settings (`service_settings`), what follows from a record.
"""

from __future__ import annotations

from typing import Literal

from hpctrain.store.run_records import Record, RecordPart


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
    """A rolling restart that a person wants: of all generations started before `time`."""

    user: str
    time: float
    reason: str = ""


class ReplicaState(RecordPart):
    """One job of one replica as the controller last saw it.

    `since`: when it entered this phase. `reason`: why it waits, leaves or has failed.
    """

    name: str
    phase: Literal["queued", "loading", "ready", "draining", "ended", "failed"]
    job_id: int | None
    node: str | None
    since: float
    reason: str = ""


class ServiceState(Record):
    """What the controller wants and last saw; `reason` says why it wants so many replicas."""

    epoch: int
    time: float
    wanted: int
    reason: str
    replicas: tuple[ReplicaState, ...] = ()
    restart: str | None = None
