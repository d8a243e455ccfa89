"""Where the time of each rank goes in somebody's own Megatron-LM, of which no file is changed.

Megatron-LM starts and stops timers around its passes, around making a batch and around the
optimizer (`megatron.core.timers`), at any log level; below the level of the program they do
nothing. Here they also run our clock, which asks no GPU to be waited for. A step lasts from
`train_step` to the end of `training_log`, which waits for the GPU and for all ranks. A fork without
one of these functions trains as ever and has no times. Belongs here: what is measured, and when.
Does not belong here: clocks and sharing (see `hpctrain.train.times`).
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

from hpctrain.store.run_records import RankTimes, write_record
from hpctrain.train.device import on_cpu
from hpctrain.train.engines.megatron_lm.on_import import changed_on_import
from hpctrain.train.job import Job
from hpctrain.train.step_agreement import Control
from hpctrain.train.times import Part, RankClock, StepClock

_PARTS: dict[str, Part] = {
    "forward-compute": "compute",
    "backward-compute": "compute",
    "batch-generator": "data",
    "optimizer": "optimizer",
}


def measuring(job: Job) -> AbstractContextManager[None]:
    """Inside the block the program's steps are measured, if it has what they are measured by."""
    steps = _Steps(job)
    return changed_on_import(
        {
            "megatron.core.timers": steps.follow_timers,
            "megatron.core.rerun_state_machine": steps.follow_reading,
            "megatron.training.training": steps.follow_steps,
        }
    )


class _World(Control):
    """All ranks by the program's own group, on which they meet in every step anyway."""

    def __init__(self) -> None:
        super().__init__(None)

    def start_sum(self, vector: Any) -> Any:
        if on_cpu():
            return super().start_sum(vector)
        sent = vector.to(torch.device("cuda", torch.cuda.current_device()))
        return _Returning(vector, sent, dist.all_reduce(sent, async_op=True))


class _Returning:
    """A sum that was made on the GPU and is wanted on the host."""

    def __init__(self, vector: Any, sent: Any, work: Any) -> None:
        self._vector, self._sent, self._work = vector, sent, work

    def wait(self) -> None:
        self._work.wait()
        self._vector.copy_(self._sent)


class _Stretches:
    """Parts of a step as the program's timers bound them, one inside another.

    What lies inside counts for itself only: a batch is made within a forward pass. A timer that is
    started twice or stopped without a start is one of a fork's, and left alone; so is one that
    would become a part of a CUDA graph.
    """

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock
        self._open: list[tuple[str, Part]] = []

    def start(self, name: str, part: Part) -> None:
        if any(name == other for other, _ in self._open) or _capturing():
            return
        self._switch(self._part, part)
        self._open.append((name, part))

    def stop(self, name: str) -> None:
        if not self._open or self._open[-1][0] != name:
            return
        before = self._part
        self._open.pop()
        self._switch(before, self._part)

    def leave(self) -> None:
        """The step is over; what is open now was never closed."""
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


class _Timer:
    """The program's timer, which runs our clock besides."""

    def __init__(self, timer: Any, start: Callable[[], None], stop: Callable[[], None]) -> None:
        self._timer, self._start, self._stop = timer, start, stop

    def start(self, *given: Any, **keywords: Any) -> Any:
        done = self._timer.start(*given, **keywords)
        self._start()
        return done

    def stop(self, *given: Any, **keywords: Any) -> Any:
        self._stop()
        return self._timer.stop(*given, **keywords)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._timer, name)


class _Steps:
    """The steps of this rank, from the program's functions to the record of all ranks."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._clock: RankClock | None = None
        self._stretches: _Stretches | None = None  # while a step is measured
        self._began_at = 0.0

    def follow_timers(self, module: ModuleType) -> None:
        timers, original = _method(module, "Timers", "__call__")
        if original is None:
            return

        @functools.wraps(original)
        def call(group: Any, name: str, *given: Any, **keywords: Any) -> Any:
            timer, part = original(group, name, *given, **keywords), _PARTS.get(name)
            if part is None or self._stretches is None:
                return timer
            stretches = self._stretches
            start = functools.partial(stretches.start, name, part)
            return _Timer(timer, start, functools.partial(stretches.stop, name))

        timers.__call__ = call

    def follow_reading(self, module: ModuleType) -> None:
        """Programs without a timer around making a batch still read by this."""
        reader, original = _method(module, "RerunDataIterator", "__next__")
        if original is None:
            return

        @functools.wraps(original)
        def read(iterator: Any) -> Any:
            stretches = self._stretches
            if stretches is None:
                return original(iterator)
            stretches.start("reading", "data")
            try:
                return original(iterator)
            finally:
                stretches.stop("reading")

        reader.__next__ = read

    def follow_steps(self, module: ModuleType) -> None:
        train_step: Any = getattr(module, "train_step", None)
        training_log: Any = getattr(module, "training_log", None)
        if not (inspect.isfunction(train_step) and inspect.isfunction(training_log)):
            return
        shape = inspect.signature(training_log)
        if "iteration" not in shape.parameters:
            return

        @functools.wraps(train_step)
        def step(*given: Any, **keywords: Any) -> Any:
            self._begin()
            return train_step(*given, **keywords)

        @functools.wraps(training_log)
        def log(*given: Any, **keywords: Any) -> Any:
            told = training_log(*given, **keywords)
            if self._stretches is not None:
                self._end(int(shape.bind(*given, **keywords).arguments["iteration"]))
            return told

        vars(module).update(train_step=step, training_log=log)

    def _begin(self) -> None:
        if self._clock is None:
            self._clock = self._shared_clock()
        self._stretches = _Stretches(self._clock.clock)
        self._began_at = time.perf_counter()

    def _end(self, step: int) -> None:
        stretches, self._stretches = self._stretches, None
        assert stretches is not None and self._clock is not None
        stretches.leave()
        if not on_cpu():
            torch.cuda.synchronize()  # all has been waited for, unless a fork prints no time
        seconds = time.perf_counter() - self._began_at
        self._clock.finished_step(step, seconds)

    def _shared_clock(self) -> RankClock:
        """At the first step, which all ranks begin together."""
        world = _World()
        return RankClock(
            clock=StepClock(),
            control=world,
            rank=self._job.launch.rank,
            nodes=tuple(world.everywhere(self._job.launch.node)),
            epoch=self._job.launch.epoch,
            interval_steps=self._job.config.rank_times_interval_steps,
            tell=self._tell,
        )

    def _tell(self, times: RankTimes) -> None:
        """Nothing is told of a program whose passes no timer bounds."""
        if all(times.compute_seconds):
            write_record(self._job.run.rank_times, times, durable=False)


def _method(module: ModuleType, kind: str, name: str) -> tuple[Any, Any]:
    """A class and a method that it has itself; None in the place of what is not there."""
    found = getattr(module, kind, None)
    method = vars(found).get(name) if inspect.isclass(found) else None
    return found, method if inspect.isfunction(method) else None


def _capturing() -> bool:
    return not on_cpu() and torch.cuda.is_current_stream_capturing()
