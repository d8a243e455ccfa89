"""The ledger of a service: what its controller, its commands and its people have done to it.

A line is written and flushed *before* the action it announces, as in the ledger of a run, because
the controller may end in the middle of one. Each job of the service has a ledger of its own
(`ledger`). Belongs here: the format, appending and reading. Does not belong here: deciding
anything.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from hpctrain.base import clock
from hpctrain.base.durable import append_line
from hpctrain.records.run_records import Record, parse_record


class ServiceEventKind(StrEnum):
    """What happened; the fields of `ServiceEvent` that are set depend on it."""

    CONTROLLER_STARTED = "controller_started"
    CONTROLLER_LEFT = "controller_left"
    WANTED = "wanted"
    START_REPLICA = "start_replica"
    START_FAILED = "start_failed"
    DRAIN_REPLICA = "drain_replica"
    DRAIN_FAILED = "drain_failed"
    REPLICA_READY = "replica_ready"
    REPLICA_FAILED = "replica_failed"
    REPLICA_ENDED = "replica_ended"
    GIVEN_UP = "given_up"
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
