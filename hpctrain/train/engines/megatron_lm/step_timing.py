"""Measure the time shares of each rank's steps in an external Megatron-LM.

Megatron-LM starts and stops timers around its passes, around making a batch and around the
optimizer (`megatron.core.timers`), at any log level; below the program's own level they do
nothing. Here they also run our clock, which does not synchronize with the GPU. A step lasts from
`train_step` to the end of `training_log`, which waits for the GPU and for all ranks. A fork that
lacks one of these functions trains as before and has no times. Belongs here: what is measured, and
when. Does not belong here: clocks and sharing (see `hpctrain.train.times`).
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from hpctrain.records.run_records import RankTimes, write_record
from hpctrain.train.device import on_cpu
from hpctrain.train.engines.megatron_lm.import_hooks import patch_on_import
from hpctrain.train.job import Job
from hpctrain.train.step_agreement import Control
from hpctrain.train.times import Part, RankClock, StepClock

_PARTS: dict[str, Part] = {
    "forward-compute": "compute",
    "backward-compute": "compute",
    "batch-generator": "data",
    "optimizer": "optimizer",
}


def measure_steps(job: Job) -> AbstractContextManager[None]:
    """Measure the program's steps inside the block, if it has the functions needed for it."""
    timing = _StepTiming(job)
    return patch_on_import(
        {
            "megatron.core.timers": timing.patch_timers,
            "megatron.core.rerun_state_machine": timing.patch_data_iterator,
            "megatron.training.training": timing.patch_steps,
        }
    )


class _WorldControl(Control):
    """All ranks in the program's own process group, which every step synchronizes anyway."""

    def __init__(self) -> None:
        super().__init__(None)

    def start_sum(self, vector: Any) -> Any:
        if on_cpu():
            return super().start_sum(vector)
        sent = vector.to(torch.device("cuda", torch.cuda.current_device()))
        return _SumToHost(vector, sent, dist.all_reduce(sent, async_op=True))


class _SumToHost:
    """A sum that is computed on the GPU and needed on the host."""

    def __init__(self, vector: Any, sent: Any, work: Any) -> None:
        self._vector, self._sent, self._work = vector, sent, work

    def wait(self) -> None:
        self._work.wait()
        self._vector.copy_(self._sent)


class _NestedParts:
    """The parts of a step between the program's timers, which may be nested.

    An inner part does not count for the outer one: a batch is made within a forward pass. A timer
    that is started twice or stopped without a start belongs to a fork, and is ignored. So is a
    timer that would be captured in a CUDA graph.
    """

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock
        self._open: list[tuple[str, Part]] = []

    def start(self, name: str, part: Part) -> None:
        capturing = not on_cpu() and torch.cuda.is_current_stream_capturing()
        if any(name == other for other, _ in self._open) or capturing:
            return
        self._switch(self._part, part)
        self._open.append((name, part))

    def stop(self, name: str) -> None:
        if not self._open or self._open[-1][0] != name:
            return
        before = self._part
        self._open.pop()
        self._switch(before, self._part)

    def close(self) -> None:
        """Stop what is still open at the end of the step."""
        while self._open:
            self.stop(self._open[-1][0])

    @property
    def _part(self) -> Part | None:
        return self._open[-1][1] if self._open else None

    def _switch(self, before: Part | None, after: Part | None) -> None:
        if before == after:
            return
        if before is not None:
            self._clock.stop(before)
        if after is not None:
            self._clock.start(after)


class _DoubleTimer:
    """The program's timer, which runs our clock as well."""

    def __init__(self, timer: Any, start: Callable[[], None], stop: Callable[[], None]) -> None:
        self._timer, self._start, self._stop = timer, start, stop

    def start(self, *arguments: Any, **keywords: Any) -> Any:
        result = self._timer.start(*arguments, **keywords)
        self._start()
        return result

    def stop(self, *arguments: Any, **keywords: Any) -> Any:
        self._stop()
        return self._timer.stop(*arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._timer, name)


class _StepTiming:
    """Times the steps of this rank, from the program's functions to the record of all ranks."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._clock: RankClock | None = None
        self._parts: _NestedParts | None = None  # while a step is measured
        self._began_at = 0.0

    def patch_timers(self, module: ModuleType) -> None:
        timers, original = _method(module, "Timers", "__call__")
        if original is None:
            return

        @functools.wraps(original)
        def call(group: Any, name: str, *arguments: Any, **keywords: Any) -> Any:
            timer, part = original(group, name, *arguments, **keywords), _PARTS.get(name)
            if part is None or self._parts is None:
                return timer
            parts = self._parts
            start = functools.partial(parts.start, name, part)
            return _DoubleTimer(timer, start, functools.partial(parts.stop, name))

        timers.__call__ = call

    def patch_data_iterator(self, module: ModuleType) -> None:
        """Time reading where the program has no timer around making a batch."""
        iterator_class, original = _method(module, "RerunDataIterator", "__next__")
        if original is None:
            return

        @functools.wraps(original)
        def read(iterator: Any) -> Any:
            parts = self._parts
            if parts is None:
                return original(iterator)
            parts.start("reading", "data")
            try:
                return original(iterator)
            finally:
                parts.stop("reading")

        iterator_class.__next__ = read

    def patch_steps(self, module: ModuleType) -> None:
        train_step: Any = getattr(module, "train_step", None)
        training_log: Any = getattr(module, "training_log", None)
        if not (inspect.isfunction(train_step) and inspect.isfunction(training_log)):
            return
        signature = inspect.signature(training_log)
        if "iteration" not in signature.parameters:
            return

        @functools.wraps(train_step)
        def step(*arguments: Any, **keywords: Any) -> Any:
            if self._clock is None:
                self._clock = self._open_clock()
            self._parts = _NestedParts(self._clock.clock)
            self._began_at = time.perf_counter()
            return train_step(*arguments, **keywords)

        @functools.wraps(training_log)
        def log(*arguments: Any, **keywords: Any) -> Any:
            result = training_log(*arguments, **keywords)
            if self._parts is not None and self._clock is not None:
                number = int(signature.bind(*arguments, **keywords).arguments["iteration"])
                parts, self._parts = self._parts, None
                parts.close()
                if not on_cpu():
                    torch.cuda.synchronize()  # has no effect unless a fork prints no time
                self._clock.finished_step(number, time.perf_counter() - self._began_at)
            return result

        vars(module).update(train_step=step, training_log=log)

    def _open_clock(self) -> RankClock:
        """Make the clock at the first step, which all ranks begin together."""
        job, control = self._job, _WorldControl()

        def write_times(times: RankTimes) -> None:
            # without timers around the passes there is nothing to report
            if all(times.compute_seconds):
                write_record(job.run.rank_times, times, durable=False)

        return RankClock(
            clock=StepClock(),
            control=control,
            rank=job.launch.rank,
            nodes=tuple(control.everywhere(job.launch.node)),
            epoch=job.launch.epoch,
            interval_steps=job.config.rank_times_interval_steps,
            tell=write_times,
        )


def _method(module: ModuleType, class_name: str, name: str) -> tuple[Any, Any]:
    """Return a class and a method that it defines itself; None in place of what is missing."""
    owner = getattr(module, class_name, None)
    method = vars(owner).get(name) if inspect.isclass(owner) else None
    return owner, method if inspect.isfunction(method) else None
