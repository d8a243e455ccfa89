"""Measure where each rank spends its time: reading, forward and backward passes, optimizer.

megatron-core's schedules start and stop a timer around each pass (schedules.py, forward_step and
backward_step). Waiting for pipeline neighbours and for gradient sums is therefore excluded. Waiting
for tensor and expert parallel neighbours is included: a slow rank appears as its whole
tensor-parallel group. Once per window of steps the means of all ranks are gathered in one vector,
beside training. Belongs here: measuring and gathering. Does not belong here: finding slow ranks
(the supervisor does), advice (`hpctrain.diagnose`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar, get_args

import torch

from hpctrain.records.run_records import RankTimes
from hpctrain.train.device import on_cpu, peak_memory_bytes, reserved_memory_bytes
from hpctrain.train.step_agreement import Control

Part = Literal["compute", "backward", "data", "optimizer"]
PARTS: tuple[Part, ...] = get_args(Part)
# A rank's row of the gathered vector, in this order.
_TIMES = (*PARTS, "step")
_COLUMNS = (*_TIMES, "peak_memory", "reserved_memory")
_MEGATRON_PASSES = ("forward-compute", "backward-compute")
# Functions of this file in which a rank waits for others, as the supervisor recognises them in
# stacks (`hpctrain.judge.odd_stacks`; its unit test compares the two).
WAITS_FOR_RANKS = ("_receive",)
_UNMARKED = contextlib.nullcontext()
Item = TypeVar("Item")


class Stopwatch(Protocol):
    """The part of megatron-core's timer interface (timers.py) that its schedules use."""

    def start(self, barrier: bool = False) -> None: ...

    def stop(self, barrier: bool = False) -> None: ...


class _Ignored:
    """A timer that measures nothing."""

    def start(self, barrier: bool = False) -> None:
        pass

    def stop(self, barrier: bool = False) -> None:
        pass


class WallClock:
    """Measures the time between start and stop on a CPU, by the process's own clock."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._started_at = 0.0

    def start(self, barrier: bool = False) -> None:
        self._started_at = time.perf_counter()

    def stop(self, barrier: bool = False) -> None:
        self._seconds += time.perf_counter() - self._started_at

    def take_seconds(self) -> float:
        """Return the seconds accumulated since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class EventClock:
    """Measures the time between two CUDA events in the stream, without waiting for them.

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
        """Return the seconds accumulated since the last call."""
        used, self._used = self._used, []
        self._free += used
        return sum(begin.elapsed_time(end) for begin, end in used) / 1e3  # milliseconds


class StepClock:
    """Measures the parts of a step, on the device of this rank.

    On a GPU, waiting for data counts only while the GPU is idle.
    """

    def __init__(self) -> None:
        kind: Callable[[], WallClock | EventClock] = WallClock if on_cpu() else EventClock
        self._clocks = {part: kind() for part in PARTS}
        self._computing = False
        # marks the parts for a profiler while one is running
        self.mark: Callable[[str], contextlib.AbstractContextManager[Any]] | None = None
        self._marked = contextlib.ExitStack()

    def start(self, part: Part = "compute") -> None:
        if self.mark is not None:
            self._marked.enter_context(self.mark(f"hpctrain: {part}"))
        self._clocks[part].start()
        self._computing = part == "compute"

    def stop(self, part: Part = "compute") -> None:
        self._clocks[part].stop()
        self._computing = False
        self._marked.close()

    @contextlib.contextmanager
    def timing(self, part: Part) -> Iterator[None]:
        self.start(part)
        try:
            yield
        finally:
            self.stop(part)

    def computing(self) -> contextlib.AbstractContextManager[None]:
        """Time a block as computing."""
        return self.timing("compute")

    def reading(self, items: Iterator[Item]) -> Iterator[Item]:
        """Yield the same items; time spent waiting for them counts as data, not as computing."""
        passes, data = self._clocks["compute"], self._clocks["data"]
        nothing = object()
        while True:
            if self._computing:
                passes.stop()
            data.start()
            with _UNMARKED if self.mark is None else self.mark("hpctrain: data"):
                item: Any = next(items, nothing)
            data.stop()
            if self._computing:
                passes.start()
            if item is nothing:
                return
            yield item

    def take(self) -> dict[str, float]:
        """Return the seconds by part since the last call."""
        return {part: clock.take_seconds() for part, clock in self._clocks.items()}


class _Passes:
    """megatron-core's timer of forward and backward passes; both count as computing."""

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock

    def start(self, barrier: bool = False) -> None:
        self._clock.start("compute")

    def stop(self, barrier: bool = False) -> None:
        self._clock.stop("compute")


class ComputeTimers:
    """Replaces megatron-core's Timers: measures computing, ignores everything else."""

    def __init__(self, clock: StepClock) -> None:
        self._passes = _Passes(clock)
        self._ignored = _Ignored()

    def __call__(self, name: str, log_level: int | None = None) -> Stopwatch:
        return self._passes if name in _MEGATRON_PASSES else self._ignored


@dataclass
class _Window:
    """A window of steps whose times are being gathered: a row per rank, see `_COLUMNS`."""

    first_step: int
    last_step: int
    vector: Any
    work: Any


@dataclass
class RankClock:
    """Gathers means per step of all ranks every `interval_steps` steps; `tell` runs on rank 0.

    The first step of a launch (warm-up) and steps without `counts` are in no window. All ranks must
    call `finished_step` after the same steps, with the same `counts`.
    """

    clock: StepClock
    control: Control
    rank: int
    nodes: tuple[str, ...]
    epoch: int
    interval_steps: int
    tell: Callable[[RankTimes], None]
    _warm: bool = False
    _sums: dict[str, float] = field(default_factory=dict)
    _steps: int = 0
    _first_step: int = 0
    _sent: _Window | None = field(default=None)

    def finished_step(self, step: int, step_seconds: float, *, counts: bool = True) -> None:
        """Add a step; at the end of a window start to gather, and report at the next step."""
        seconds = {"step": step_seconds, **self.clock.take()}
        self._receive()
        if not self._warm or not counts:
            self._warm = True
            return
        if self._steps == 0:
            self._first_step = step
        self._sums = {name: self._sums.get(name, 0.0) + value for name, value in seconds.items()}
        self._steps += 1
        if self._steps == self.interval_steps:
            self._send(step)

    def _send(self, step: int) -> None:
        vector = torch.zeros(len(self.nodes), len(_COLUMNS), dtype=torch.float64)
        means = [self._sums[name] / self._steps for name in _TIMES]
        memory = [float(peak_memory_bytes()), float(reserved_memory_bytes())]
        vector[self.rank] = torch.tensor([*means, *memory], dtype=torch.float64)
        work = self.control.start_sum(vector)
        self._sent = _Window(self._first_step, step, vector, work)
        self._sums, self._steps = {}, 0

    def _receive(self) -> None:
        """Finish gathering, one step later, so that no rank waits for the slowest one."""
        if self._sent is None:
            return
        sent, self._sent = self._sent, None
        sent.work.wait()
        if self.rank != 0:
            return
        columns = dict(zip(_COLUMNS, zip(*sent.vector.tolist(), strict=True), strict=True))
        self.tell(
            RankTimes(
                epoch=self.epoch,
                first_step=sent.first_step,
                last_step=sent.last_step,
                time=time.time(),
                compute_seconds=columns["compute"],
                nodes=self.nodes,
                backward_seconds=columns["backward"],
                data_seconds=columns["data"],
                optimizer_seconds=columns["optimizer"],
                step_seconds=columns["step"],
                peak_memory_bytes=tuple(map(int, columns["peak_memory"])),
                reserved_memory_bytes=tuple(map(int, columns["reserved_memory"])),
            )
        )
