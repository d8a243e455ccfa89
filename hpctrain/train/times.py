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
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeVar, get_args

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


class _CoreTimer:
    """The part of megatron-core's timer interface (timers.py) that its schedules use.

    Forward and backward passes both count as computing. Without a clock it measures nothing.
    """

    def __init__(self, clock: StepClock | None) -> None:
        self._clock = clock

    def start(self, barrier: bool = False) -> None:
        if self._clock is not None:
            self._clock.start("compute")

    def stop(self, barrier: bool = False) -> None:
        if self._clock is not None:
            self._clock.stop("compute")


class ComputeTimers:
    """Replaces megatron-core's Timers: measures computing, ignores everything else."""

    def __init__(self, clock: StepClock) -> None:
        self._passes, self._ignored = _CoreTimer(clock), _CoreTimer(None)

    def __call__(self, name: str, log_level: int | None = None) -> _CoreTimer:
        return self._passes if name in _MEGATRON_PASSES else self._ignored


class GatheringClock(ABC):
    """Gathers a row of numbers of each rank beside training, and tells rank 0 of them.

    A row is sent after one step and received after the next, so that no rank waits for the slowest
    one. `interval_steps` None: nothing is measured.
    """

    def __init__(
        self,
        control: Control,
        rank: int,
        nodes: tuple[str, ...],
        epoch: int,
        interval_steps: int | None,
        tell: Callable[[Any], None],
    ) -> None:
        self.control, self.rank, self.nodes, self.epoch = control, rank, nodes, epoch
        self.interval_steps, self.tell = interval_steps, tell
        self._sent: tuple[Any, Any, Any] | None = None  # the table, its handle, what it is about

    def _send(self, row: Sequence[float], about: Any) -> None:
        table = torch.zeros(len(self.nodes), len(row), dtype=torch.float64)
        table[self.rank] = torch.tensor(row, dtype=torch.float64)
        self._sent = table, self.control.start_sum(table), about

    def _receive(self) -> None:
        if self._sent is not None:
            (table, work, about), self._sent = self._sent, None
            work.wait()
            self._received(table.tolist(), about)

    @abstractmethod
    def _received(self, table: list[list[float]], about: Any) -> None:
        """Report a table with a row per rank; called on all ranks."""


class RankClock(GatheringClock):
    """Gathers means per step of all ranks every `interval_steps` steps; `tell` runs on rank 0.

    The first step of a launch (warm-up) and steps without `counts` are in no window. All ranks must
    call `finished_step` after the same steps, with the same `counts`.
    """

    def __init__(
        self,
        clock: StepClock,
        control: Control,
        rank: int,
        nodes: tuple[str, ...],
        epoch: int,
        interval_steps: int,
        tell: Callable[[RankTimes], None],
    ) -> None:
        super().__init__(control, rank, nodes, epoch, interval_steps, tell)
        self.clock = clock
        self._warm = False
        self._sums: dict[str, float] = {}
        self._steps = self._first_step = 0

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
            means = [self._sums[name] / self._steps for name in _TIMES]
            memory = [float(peak_memory_bytes()), float(reserved_memory_bytes())]
            self._send([*means, *memory], (self._first_step, step))
            self._sums, self._steps = {}, 0

    def _received(self, table: list[list[float]], about: tuple[int, int]) -> None:
        if self.rank != 0:
            return
        columns = dict(zip(_COLUMNS, zip(*table, strict=True), strict=True))
        self.tell(
            RankTimes(
                epoch=self.epoch,
                first_step=about[0],
                last_step=about[1],
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
