"""Profile selected steps of selected ranks, for every engine.

All ranks know the profiled steps: they exclude them from timing statistics, and wait together while
traces are written. Belongs here: when a profiler runs, and where its trace is written. Does not
belong here: starting a rank under Nsight Systems (`launchers.nsight`), reading traces
(`hpctrain.diagnose`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from hpctrain.base.durable import make_private_directory
from hpctrain.train.device import on_cpu
from hpctrain.train.job import Job
from hpctrain.train.report import Reporter
from hpctrain.train.step_agreement import Control
from hpctrain.train.times import StepClock

_MOST_TRACE_BYTES = 512 << 20  # a larger file is more than any viewer opens
_BUSY_HINT = "is another profiler at work on this GPU?"


class TorchTrace:
    """torch.profiler: a Chrome trace for each range of steps."""

    def __init__(self) -> None:
        self._profiler: Any = None

    def prepare(self) -> None:
        """Warm up before the step in front of the range, so that warm-up is not recorded."""
        kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (not on_cpu())
        self._profiler = profile(activities=kinds, acc_events=True)
        self._profiler.prepare_trace()

    def start(self) -> None:
        if self._profiler is None:  # the launch began inside the range
            self.prepare()
        self._profiler.start_trace()

    def mark(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager that marks a named range in the recording."""
        return record_function(name)

    def stop(self, path: Path) -> str:
        """Stop and write to `path`; returns a message about what was written, or why not."""
        profiler, self._profiler = self._profiler, None
        profiler.stop_trace()
        make_private_directory(path.parent)
        # torch compresses because the name ends in .gz
        unfinished = path.with_name(f"unfinished-{path.name}")
        try:
            profiler.export_chrome_trace(str(unfinished))
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
        size = unfinished.stat().st_size
        if size > _MOST_TRACE_BYTES:
            unfinished.unlink()
            return f"trace of {size} bytes not kept: {_MOST_TRACE_BYTES} are the most"
        unfinished.replace(path)
        return f"trace {path.name} of {size} bytes"

    def discard(self) -> None:
        """Stop without writing."""
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            with contextlib.suppress(RuntimeError):
                profiler.stop_trace()


class NsightRange:
    """Nsight Systems, under which this rank was started: it records from `start` to `stop`."""

    def prepare(self) -> None:
        pass

    def start(self) -> None:
        torch.cuda.profiler.start()

    def mark(self, name: str) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.nvtx.range(name)

    def stop(self, path: Path) -> str:
        torch.cuda.profiler.stop()
        return f"Nsight Systems writes {path.parent.name}"

    def discard(self) -> None:
        torch.cuda.profiler.stop()


Tool = TorchTrace | NsightRange


@dataclass
class StepProfiler:
    """Starts and stops a tool around the ranges of steps; `tool` None: not on this rank."""

    windows: tuple[tuple[int, int], ...]
    tool: Tool | None
    path_of: Callable[[int, int], Path]
    clock: StepClock
    reporter: Reporter
    control: Control
    rank: int
    _first: int | None = field(default=None, init=False)
    _marks: contextlib.ExitStack = field(default_factory=contextlib.ExitStack, init=False)

    def covers(self, step: int) -> bool:
        """Check whether profiling distorts the time of a step; the same on all ranks."""
        return any(first - 1 <= step <= last for first, last in self.windows)

    def begin(self, step: int) -> None:
        """Start or prepare the tool before a step, if needed."""

        def start(tool: Tool) -> None:
            tool.start()
            self.clock.mark = tool.mark

        window = self._window(step)
        if window is not None and self._first is None:
            self._first = step
            self.reporter.phase("profiling")
            self._attempt(start)
        elif self._window(step + 1) is not None and self._first is None:
            self._attempt(lambda tool: tool.prepare())
        if window is not None and self.tool is not None:
            self._marks.enter_context(self.tool.mark(f"hpctrain: step {step}"))

    def end(self, step: int, *, stopping: bool = False) -> None:
        """Write the trace after the last step of a range, while all ranks wait.

        When the launch is `stopping`, writing would delay the last save: see `leave`.
        """
        self._marks.close()
        window = self._window(step)
        if window is None or step < window[1] or stopping:
            return
        first, self._first = self._first or window[0], None
        self.clock.mark = None
        self._attempt(lambda tool: self._log(tool.stop(self.path_of(first, step))))
        self.control.barrier()
        self.reporter.phase("training")

    def leave(self) -> None:
        """Discard an incomplete range at the end of training, because time may be short."""
        self._marks.close()
        self.clock.mark = None
        if self._first is not None:
            self._attempt(lambda tool: tool.discard())

    def _attempt(self, work: Callable[[Tool], None]) -> None:
        """Run `work`; a profiler that fails is reported and disabled, and training continues."""
        if self.tool is None:
            return
        try:
            work(self.tool)
        except (OSError, RuntimeError, AssertionError) as error:
            self.tool, self.clock.mark = None, None
            self._log(f"profiling given up, {_BUSY_HINT} {type(error).__name__}: {error}")

    def _log(self, message: str) -> None:
        print(f"event=profile rank={self.rank} {message}", flush=True)

    def _window(self, step: int) -> tuple[int, int] | None:
        return next((window for window in self.windows if window[0] <= step <= window[1]), None)


def step_profiler(job: Job, clock: StepClock, reporter: Reporter, control: Control) -> StepProfiler:
    """Build the profiler of this rank by the run's `profile`; without one it does nothing."""
    settings, launch = job.config.profile, job.launch
    tool: Tool | None = None
    if settings is not None and launch.rank in settings.ranks:
        tool = NsightRange() if settings.tool == "nsys" else TorchTrace()
    return StepProfiler(
        windows=() if settings is None else settings.windows,
        tool=tool,
        path_of=lambda first, last: job.run.trace(launch.epoch, launch.rank, first, last),
        clock=clock,
        reporter=reporter,
        control=control,
        rank=launch.rank,
    )
