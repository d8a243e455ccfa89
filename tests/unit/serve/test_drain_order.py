"""The order in which a replica leaves, with an engine, a lease and a life that are played."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from virtual_clock import VirtualClock

from hpctrain.base import clock
from hpctrain.records.service_records import DrainRecord
from hpctrain.serve.replica.drain import Drain
from hpctrain.serve.replica.engine_process import EngineLoad


class Played:
    """Everything that a drain works on; `done` is what was done, in its order.

    `loads` are the engine's answers about its requests, one after the other; the last one stays.
    After `ends_after` looks the engine has ended by itself.
    """

    def __init__(self, loads: list[int | None], ends_after: int | None = None) -> None:
        self.done: list[str] = []
        self._loads, self._ends_after, self._looks = loads, ends_after, 0
        self.record: DrainRecord | None = None
        self.launch = SimpleNamespace(epoch=1)

    def enter(self, state: str) -> None:
        self.done.append(state)

    def drained(self, record: DrainRecord) -> None:
        self.record = record

    def beat(self) -> None: ...

    def withdraw(self) -> None:
        self.done.append("withdrawn")

    def is_out_of_rotation(self, _: float) -> bool:
        self.done.append("asked the router")
        return True

    def load(self) -> EngineLoad | None:
        count = self._loads[min(self._looks, len(self._loads) - 1)]
        self._looks += 1
        if "looked" not in self.done[-1:]:
            self.done.append("looked")
        return None if count is None else EngineLoad(count, 0.0)

    def failure(self) -> Exception | None:
        ended = self._ends_after is not None and self._looks > self._ends_after
        return RuntimeError("ended") if ended else None

    def end(self, _: float) -> None:
        self.done.append("engine ended")


def drained(played: Played, seconds: float = 60.0) -> DrainRecord:
    parts: Any = played
    drain = Drain(3.0, seconds, 2 * seconds, parts, parts, parts, parts)
    with clock.replaced(VirtualClock()):
        return drain.run("a test")


def test_the_engine_ends_last() -> None:
    played = Played([2, 2, 1, 0])
    record = drained(played)
    order = ["draining", "withdrawn", "looked", "asked the router", "asked the router", "looked"]
    assert played.done == [*order, "engine ended"]
    assert record.broken_off == 0 and record == played.record


def test_one_look_that_finds_nothing_is_not_enough() -> None:
    """A request may be between the router and the engine's count."""
    assert drained(Played([0, 0, 1, 1, 0])).broken_off == 0
    assert drained(Played([0, 0, 1]), seconds=5.0).broken_off == 1


def test_an_engine_that_ends_by_itself_has_broken_off_what_it_had() -> None:
    """Seen with vLLM when its own drain was over: its metrics are away, then it is."""
    record = drained(Played([3, 3, None], ends_after=6))
    assert (record.in_flight, record.broken_off) == (3, 3)


def test_of_an_engine_without_metrics_nothing_is_known() -> None:
    record = drained(Played([None]))
    assert record.broken_off is None and record.ended_at is not None
