"""How long each rank computes: the wall time inside forward and backward passes.

megatron-core's schedules start and stop a timer around each of them (schedules.py, forward_step
and backward_step), so that waiting for pipeline neighbours and for the sums of gradients lies
outside. Waiting for tensor and expert parallel neighbours lies inside: a slow rank shows as its
whole tensor-parallel group. Once per window of steps the means of all ranks are added up into one
vector, beside training. Belongs here: measuring and sharing. Does not belong here: who is slow
(the supervisor's business).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from hpctrain.store.signs import RankTimes
from hpctrain.train.control import Control
from hpctrain.train.device import on_cpu

_COMPUTE = ("forward-compute", "backward-compute")


class Stopwatch(Protocol):
    """What megatron-core expects a timer to be (timers.py), as far as its schedules use it."""

    def start(self, barrier: bool = False) -> None: ...

    def stop(self, barrier: bool = False) -> None: ...


class _Ignored:
    """A timer of something else than computing."""

    def start(self, barrier: bool = False) -> None:
        pass

    def stop(self, barrier: bool = False) -> None:
        pass


class WallClock:
    """On a CPU: the time between start and stop, by the process's own clock."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._started_at = 0.0

    def start(self, barrier: bool = False) -> None:
        self._started_at = time.perf_counter()

    def stop(self, barrier: bool = False) -> None:
        self._seconds += time.perf_counter() - self._started_at

    def take_seconds(self) -> float:
        """The seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class EventClock:
    """On a GPU: the time between two events in the stream, which nobody waits for.

    `take_seconds` is called after the step's loss was read, hence after all of its events.
    """

    def __init__(self, make_event: Callable[[], Any] | None = None) -> None:
        self._make = make_event or (lambda: torch.cuda.Event(enable_timing=True))
        self._free: list[tuple[Any, Any]] = []
        self._used: list[tuple[Any, Any]] = []

    def start(self, barrier: bool = False) -> None:
        pair = self._free.pop() if self._free else (self._make(), self._make())
        self._used.append(pair)
        pair[0].record()

    def stop(self, barrier: bool = False) -> None:
        self._used[-1][1].record()

    def take_seconds(self) -> float:
        """The seconds since the last call; elapsed_time is in milliseconds."""
        used, self._used = self._used, []
        self._free += used
        return sum(begin.elapsed_time(end) for begin, end in used) / 1e3


class ComputeTimers:
    """In the place of megatron-core's Timers: measures computing, ignores everything else."""

    def __init__(self) -> None:
        kind: Callable[[], WallClock | EventClock] = WallClock if on_cpu() else EventClock
        self._clocks = {name: kind() for name in _COMPUTE}
        self._ignored = _Ignored()

    def __call__(self, name: str, log_level: int | None = None) -> Stopwatch:
        return self._clocks.get(name, self._ignored)

    def take_seconds(self) -> float:
        """Seconds of computing since the last call."""
        return sum(clock.take_seconds() for clock in self._clocks.values())


class StepClock:
    """Measures the blocks of code that compute, on the device of this rank."""

    def __init__(self) -> None:
        self._clock = WallClock() if on_cpu() else EventClock()

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        self._clock.start()
        try:
            yield
        finally:
            self._clock.stop()

    def take_seconds(self) -> float:
        """Seconds of computing since the last call."""
        return self._clock.take_seconds()


@dataclass
class _Window:
    """Steps whose times are on their way to rank 0."""

    first_step: int
    last_step: int
    vector: Any
    work: Any


@dataclass
class RankClock:
    """Means per step of all ranks, every `interval_steps` steps; `tell` is called on rank 0.

    The first step of a launch, which warms up, is in no window. All ranks must call
    `finished_step` after the same steps.
    """

    take_seconds: Callable[[], float]
    control: Control
    rank: int
    nodes: tuple[str, ...]
    epoch: int
    interval_steps: int
    tell: Callable[[RankTimes], None]
    _warm: bool = False
    _seconds: float = 0.0
    _steps: int = 0
    _sent: _Window | None = field(default=None)

    def finished_step(self, step: int) -> None:
        """Count a step; at the end of a window begin to share, and tell at the next step."""
        seconds = self.take_seconds()
        self._receive()
        if not self._warm:
            self._warm = True
            return
        self._seconds += seconds
        self._steps += 1
        if self._steps == self.interval_steps:
            self._send(step)

    def _send(self, step: int) -> None:
        vector = torch.zeros(len(self.nodes), dtype=torch.float64)
        vector[self.rank] = self._seconds / self._steps
        work = self.control.start_sum(vector)
        self._sent = _Window(step - self._steps + 1, step, vector, work)
        self._seconds, self._steps = 0.0, 0

    def _receive(self) -> None:
        """A step later everybody has sent: nobody waits for the slowest rank here."""
        if self._sent is None:
            return
        sent, self._sent = self._sent, None
        sent.work.wait()
        if self.rank == 0:
            self.tell(
                RankTimes(
                    epoch=self.epoch,
                    first_step=sent.first_step,
                    last_step=sent.last_step,
                    time=time.time(),
                    compute_seconds=tuple(sent.vector.tolist()),
                    nodes=self.nodes,
                )
            )
