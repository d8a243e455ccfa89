"""Publish a replica by a lease, and leave in order: router, what has begun, engine.

    1. the endpoint is removed
    2. the router no longer names the replica, or `notice_seconds` are over
    3. the engine computes what it has begun, at most `drain_seconds`; new requests of a router
       that is late are answered meanwhile, because the engine is not asked to end yet
    4. the engine is asked to end, with its own drain for what no metric shows, and killed at last

Belongs here: the endpoint's file, the fence, this order and its times. Does not belong here: when a
replica is published and why it leaves (`lifecycle`).
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from hpctrain.base import clock
from hpctrain.base.errors import StorageError
from hpctrain.records.epochs import current_epoch
from hpctrain.records.layout import RunLayout
from hpctrain.records.run_records import read_record, write_record
from hpctrain.records.service_layout import ReplicaName, ServiceLayout
from hpctrain.records.service_records import DrainRecord, Endpoint, Rotation
from hpctrain.serve.plan.leaving import ENGINE_END_SECONDS
from hpctrain.serve.replica.engine_process import EngineAnswers, EngineProcess
from hpctrain.serve.replica.life import Life, SupersededError, say

_POLL_SECONDS = 0.2
# Looks in a row that find no request: one may be between the router and the engine's count.
_IDLE_LOOKS = 3
# Of the whole time, for the engine's end.
_LEAST_END_SECONDS = 2.0


@dataclass
class Lease:
    """The endpoint of one launch of a replica; `endpoint` is what stands in its file."""

    service: ServiceLayout
    run: RunLayout
    endpoint: Endpoint
    lease_seconds: float

    @property
    def _path_name(self) -> ReplicaName:
        name = ReplicaName.parse(self.endpoint.replica)
        assert name is not None, "the settings were written with a replica's name"
        return name

    def renew(self) -> None:
        """Move the lease on; the first call publishes the replica.

        A directory that is away costs the lease, not the replica: it is renewed when it is back.
        Raises SupersededError if a newer launch owns the replica.
        """
        self.check_fence()
        until = clock.now() + self.lease_seconds
        self.endpoint = self.endpoint.model_copy(update={"lease_until": until})
        path = self.service.endpoint(self._path_name)
        with contextlib.suppress(OSError):
            write_record(path, self.endpoint, durable=False)

    def check_fence(self) -> None:
        """Raise SupersededError if a newer launch owns the replica."""
        with contextlib.suppress(OSError, StorageError):
            newest = current_epoch(self.run.epochs)
            if newest > self.endpoint.epoch:
                raise SupersededError(
                    f"launch {newest} of this replica has taken over from {self.endpoint.epoch}"
                )

    def withdraw(self) -> None:
        """Remove the endpoint, unless a newer launch has written it."""
        path = self.service.endpoint(self._path_name)
        standing = read_record(path, Endpoint)
        if standing is not None and standing.epoch > self.endpoint.epoch:
            return
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)

    def is_out_of_rotation(self, withdrawn_at: float) -> bool:
        """Whether the router has seen that the replica is withdrawn, and asks it no more.

        False without a router, which nobody can tell from one that is away.
        """
        rotation = read_record(self.service.rotation, Rotation)
        if rotation is None or rotation.time < withdrawn_at:
            return False
        return self.endpoint.replica not in rotation.replicas


@dataclass
class Drain:
    """One drain, with what it works on.

    `notice_seconds`, `drain_seconds`: how long the router and the requests may take;
    `whole_seconds`: the whole of it, with the engine's end.
    """

    notice_seconds: float
    drain_seconds: float
    whole_seconds: float
    life: Life
    lease: Lease
    engine: EngineProcess
    answers: EngineAnswers

    def run(self, reason: str) -> DrainRecord:
        """Carry it out and return its record, which is kept up to date in its file."""
        began, deadline = clock.now(), clock.monotonic() + self.whole_seconds
        self.life.enter("draining")
        self.lease.withdraw()
        record = DrainRecord(epoch=self.life.launch.epoch, reason=reason, withdrawn_at=began)
        record = self._note(record, in_flight=self._in_flight())
        say(f"drain ({reason}): withdrawn, {_counted(record.in_flight)} in flight")
        notice_ends = min(deadline, clock.monotonic() + self.notice_seconds)
        while not self.lease.is_out_of_rotation(began) and clock.monotonic() < notice_ends:
            self._wait()
        seen = self.lease.is_out_of_rotation(began)
        record = self._note(record, router_left_at=clock.now() if seen else None)
        say("drain: out of the router" if seen else "drain: no router has confirmed it")
        drain_ends = clock.monotonic() + self.drain_seconds
        # Wait until nothing is computed, as far as the engine's metrics show it. An engine that
        # shows nothing any more still has what it had: it may have ended over it.
        until, idle = min(deadline - _LEAST_END_SECONDS, drain_ends), 0
        while record.in_flight is not None and self.engine.failure() is None:
            if idle >= _IDLE_LOOKS or clock.monotonic() >= until:
                break
            self._wait()
            counted = self._in_flight()
            if counted is not None:
                idle = idle + 1 if counted == 0 else 0
                record = self._note(record, in_flight=counted)
        # What no metric shows is left to the engine's own drain, which takes as long as it may.
        own_end = drain_ends if record.in_flight is None else clock.monotonic() + ENGINE_END_SECONDS
        left_seconds = min(own_end, deadline) - clock.monotonic()
        self.engine.end(max(_LEAST_END_SECONDS, left_seconds))
        record = self._note(record, broken_off=record.in_flight, ended_at=clock.now())
        say(f"drain: the engine has ended, {_counted(record.in_flight)} broken off")
        return record

    def _in_flight(self) -> int | None:
        load = self.answers.load()
        return None if load is None else load.in_flight

    def _wait(self) -> None:
        self.life.beat()
        clock.sleep(_POLL_SECONDS)

    def _note(self, record: DrainRecord, **changes: object) -> DrainRecord:
        changed = record.model_copy(update=changes)
        self.life.drained(changed)
        return changed


def _counted(requests: int | None) -> str:
    if requests is None:
        return "an unknown number of requests"
    return "1 request" if requests == 1 else f"{requests} requests"
