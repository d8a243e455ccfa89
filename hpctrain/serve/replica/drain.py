"""Leave in order: out of the router, then what has begun, then the engine.

    1. the endpoint is removed
    2. the router no longer names the replica, or `notice_seconds` are over
    3. the engine computes what it has begun, at most `drain_seconds`; new requests of a router
       that is late are answered meanwhile, because the engine is not asked to end yet
    4. the engine is asked to end, with its own drain for what no metric shows, and killed at last

Belongs here: this order and its times. Does not belong here: why a replica leaves (`lifecycle`).
"""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.base import clock
from hpctrain.records.service_records import DrainRecord
from hpctrain.serve.plan.leaving import ENGINE_END_SECONDS
from hpctrain.serve.replica.answers import EngineAnswers
from hpctrain.serve.replica.engine_process import EngineProcess
from hpctrain.serve.replica.lease import Lease
from hpctrain.serve.replica.life import Life
from hpctrain.serve.replica.log import say

_POLL_SECONDS = 0.2
# Looks in a row that find no request: one may be between the router and the engine's count.
_IDLE_LOOKS = 3
# Of the whole time, for the engine's end.
_LEAST_END_SECONDS = 2.0


@dataclass(frozen=True)
class DrainTimes:
    """How long the router and the requests may take, and the whole of it, in seconds."""

    notice_seconds: float
    drain_seconds: float
    whole_seconds: float


@dataclass
class Drain:
    """One drain, with what it works on."""

    times: DrainTimes
    life: Life
    lease: Lease
    engine: EngineProcess
    answers: EngineAnswers

    def run(self, reason: str) -> DrainRecord:
        """Carry it out and return its record, which is kept up to date in its file."""
        began, deadline = clock.now(), clock.monotonic() + self.times.whole_seconds
        self.life.enter("draining")
        self.lease.withdraw()
        record = DrainRecord(epoch=self.life.launch.epoch, reason=reason, withdrawn_at=began)
        record = self._note(record, in_flight=self._in_flight())
        say(f"drain ({reason}): withdrawn, {_counted(record.in_flight)} in flight")
        notice_ends = min(deadline, clock.monotonic() + self.times.notice_seconds)
        while not self.lease.is_out_of_rotation(began) and clock.monotonic() < notice_ends:
            self._wait()
        seen = self.lease.is_out_of_rotation(began)
        record = self._note(record, router_left_at=clock.now() if seen else None)
        say("drain: out of the router" if seen else "drain: no router has confirmed it")
        drain_ends = clock.monotonic() + self.times.drain_seconds
        record = self._await_idle(record, min(deadline - _LEAST_END_SECONDS, drain_ends))
        # What no metric shows is left to the engine's own drain, which takes as long as it may.
        own_end = drain_ends if record.in_flight is None else clock.monotonic() + ENGINE_END_SECONDS
        left_seconds = min(own_end, deadline) - clock.monotonic()
        self.engine.end(max(_LEAST_END_SECONDS, left_seconds))
        record = self._note(record, broken_off=record.in_flight, ended_at=clock.now())
        say(f"drain: the engine has ended, {_counted(record.in_flight)} broken off")
        return record

    def _await_idle(self, record: DrainRecord, until: float) -> DrainRecord:
        """Wait until nothing is computed, as far as the engine's metrics show it.

        An engine that shows nothing any more still has what it had: it may have ended over it.
        """
        idle = 0
        while record.in_flight is not None and self.engine.failure() is None:
            if idle >= _IDLE_LOOKS or clock.monotonic() >= until:
                break
            self._wait()
            counted = self._in_flight()
            if counted is not None:
                idle = idle + 1 if counted == 0 else 0
                record = self._note(record, in_flight=counted)
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
