"""Hook into a running Megatron-LM: requests to stop, and the times of each rank's steps.

A fork that lacks one of the patched functions trains as before. Belongs here: what is patched, and
when. Does not belong here: what follows from a stop (Megatron-LM saves and exits), clocks (see
`hpctrain.train.times`).
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import inspect
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from hpctrain.records.requests import is_requested, remove_request
from hpctrain.records.run_records import RankTimes, write_record
from hpctrain.train.device import on_cpu
from hpctrain.train.job import Job
from hpctrain.train.step_agreement import Control
from hpctrain.train.times import Part, RankClock, StepClock

# -- Patch a module of an external program right after the program itself has imported it --------
# Nothing is imported earlier than without the patch: the order of imports belongs to the program.


Patch = Callable[[ModuleType], None]


class _PatchingFinder(importlib.abc.MetaPathFinder):
    """Adds a patch to the loader that another finder has found for a module."""

    def __init__(self, patches: Mapping[str, Patch]) -> None:
        self._patches = patches

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        patch = self._patches.get(fullname)
        if patch is None:
            return None
        # The finders behind this one; another of this class among them may patch the same module.
        finders = sys.meta_path[sys.meta_path.index(self) + 1 :]
        specs = (finder.find_spec(fullname, path, target) for finder in finders)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_patch(module: ModuleType) -> None:
            load(module)
            patch(module)

        spec.loader.exec_module = load_and_patch  # type: ignore[method-assign]
        return spec


@contextmanager
def patch_on_import(patches: Mapping[str, Patch]) -> Iterator[None]:
    """Apply `patches`, keyed by module name, inside the block: now, or on the module's import."""
    for name, patch in patches.items():
        if name in sys.modules:
            patch(sys.modules[name])
    finder = _PatchingFinder(patches)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


# -- Forward stop requests, from our signals and the stop file, to Megatron-LM's signal handler --
# Megatron-LM installs a handler for SIGTERM while it starts (dist_signal_handler.py), and checks
# it after each step on all ranks together. It ignores other signals and reads no files. It cannot
# be made to save without ending the launch.


_POLL_SECONDS = 0.5


class StopForwarder:
    """A thread that sends this process SIGTERM once, when a stop is requested and can be handled.

    `on_handler_installed` is called once, when Megatron-LM's own handler has replaced ours.
    """

    def __init__(self, job: Job, on_handler_installed: Callable[[], None] = lambda: None) -> None:
        self._job = job
        self._on_handler_installed = on_handler_installed
        self._our_handler = signal.getsignal(signal.SIGTERM)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="stop forwarder", daemon=True)

    def __enter__(self) -> StopForwarder:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """End the thread and restore our own handler: later signals do not concern Megatron-LM."""
        self._closed.set()
        self._thread.join()
        signal.signal(signal.SIGTERM, self._our_handler)

    @property
    def stop_requested(self) -> bool:
        if self._job.stop.requested:
            return True
        return self._job.launch.leads and is_requested(self._job.run, "stop")

    def _poll(self) -> None:
        reported = False
        while not self._closed.wait(_POLL_SECONDS):
            if self._job.launch.leads and is_requested(self._job.run, "save"):
                # Made by hand, because `hpctrain save` refuses; its author would wait for it.
                remove_request(self._job.run, "save")
                message = (
                    "control/save: Megatron-LM saves by steps only; control/stop saves and ends"
                )
                print(message, file=sys.stderr, flush=True)
            handled = signal.getsignal(signal.SIGTERM) != self._our_handler
            if handled and not reported:
                reported = True
                self._on_handler_installed()
            if self.stop_requested and handled:
                os.kill(os.getpid(), signal.SIGTERM)
                return


# ------------------------------------------------------------------------------------------------
# Stops that Megatron-LM does not check for by itself: during its start and during an evaluation.
# It checks its signal handler after each step, evaluation included. Its evaluation checks a time
# limit after each batch, on all ranks together (`--exit-duration-in-mins`). Here that limit
# expires when a stop is requested; the signal handler then makes the program save and exit.


class MinutesUntilStop:
    """Replaces a number of minutes: any time is longer once `stop_requested` returns True.

    Megatron-LM evaluates `train_time > args.exit_duration_in_mins` (training.py).
    """

    def __init__(self, stop_requested: Callable[[], bool]) -> None:
        self._stop_requested = stop_requested

    def __bool__(self) -> bool:
        return True

    def __lt__(self, minutes: float) -> bool:
        return self._stop_requested()


class StopHooks:
    """Patches the first training step and every evaluation of the program.

    `stop_requested` returns whether this rank has a request to stop. `begin` is called before the
    first training step. `patches_steps`: the program has the function of a training step.
    """

    def __init__(self, stop_requested: Callable[[], bool], begin: Callable[[], None]) -> None:
        self.patches_steps = False
        self._stop_requested = stop_requested
        self._begin = begin
        self._begun = False
        self._module: ModuleType | None = None

    def signal_received(self) -> bool:
        """Return whether Megatron-LM's own handler has the signal (dist_signal_handler.py)."""
        try:
            handler = getattr(self._module, "get_signal_handler", lambda: None)()
        except AssertionError:  # global_vars.py: there is none yet
            return False
        return bool(getattr(handler, "_signal_received", False))

    def installed(self) -> AbstractContextManager[None]:
        """Patch the program's functions inside the block, once it has imported them."""

        def patch(module: ModuleType) -> None:
            self._module = module
            self._patch_train_step(module)
            self._patch_evaluate(module)

        return patch_on_import({"megatron.training.training": patch})

    def _patch_train_step(self, module: ModuleType) -> None:
        train_step: Any = getattr(module, "train_step", None)
        if not inspect.isfunction(train_step):
            return

        @functools.wraps(train_step)
        def step(*arguments: Any, **keywords: Any) -> Any:
            if not self._begun:
                self._begun = True
                self._begin()
            return train_step(*arguments, **keywords)

        self.patches_steps = True
        vars(module).update(train_step=step)

    def _patch_evaluate(self, module: ModuleType) -> None:
        evaluate: Any = getattr(module, "evaluate", None)
        get_args: Any = getattr(module, "get_args", None)
        if not (inspect.isfunction(evaluate) and inspect.isfunction(get_args)):
            return

        def stops() -> bool:
            return self._stop_requested() or self.signal_received()

        @functools.wraps(evaluate)
        def evaluate_until_stop(*arguments: Any, **keywords: Any) -> Any:
            args = get_args()
            limit = getattr(args, "exit_duration_in_mins", None)
            first = getattr(args, "consumed_valid_samples", None)
            args.exit_duration_in_mins = MinutesUntilStop(stops)
            try:
                result = evaluate(*arguments, **keywords)
            finally:
                args.exit_duration_in_mins = limit
            # training.py, evaluate: `return None, None, True` when the time is up
            triple = isinstance(result, tuple) and len(result) == 3
            if triple and result[0] is None and result[2] is True and isinstance(first, int):
                # Each evaluation continues in the validation data where the one before ended, and
                # the position is saved with the checkpoint: set it to the end, so that later
                # evaluations read the same samples as in a run that was never stopped.
                batches = keywords.get("eval_iters")
                batches = batches if isinstance(batches, int) else args.eval_iters
                size = getattr(args, "eval_global_batch_size", None) or args.global_batch_size
                if isinstance(batches, int):
                    args.consumed_valid_samples = first + batches * size
            return result

        vars(module).update(evaluate=evaluate_until_stop)


# -- Measure the time shares of each rank's steps in an external Megatron-LM ---------------------
# Megatron-LM starts and stops timers around its passes, around making a batch and around the
# optimizer (`megatron.core.timers`), at any log level; below the program's own level they do
# nothing. Here they also run our clock, which does not synchronize with the GPU. A step lasts from
# `train_step` to the end of `training_log`, which waits for the GPU and for all ranks. A fork that
# lacks one of these functions trains as before and has no times.


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
        # computed on the GPU, and needed on the host
        sent = vector.to(torch.device("cuda", torch.cuda.current_device()))
        work = dist.all_reduce(sent, async_op=True)

        def wait() -> None:
            work.wait()
            vector.copy_(sent)

        return SimpleNamespace(wait=wait)


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
