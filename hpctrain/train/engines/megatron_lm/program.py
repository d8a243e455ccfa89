"""Run one launch of Megatron-LM on one rank, from the command line to the outcome.

The program runs in this process, as `python pretrain_gpt.py ...` would run it, so that signals,
stacks and exit codes need no second process. Belongs here: the order of steps, and what an exit
means. Does not belong here: records and exit codes (see `hpctrain.train.entry`).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import multiprocessing
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, TextIO

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.checkpoints.publish import TRACKER_NAME, point_tracker_to, published_steps
from hpctrain.engines.megatron_lm import MegatronLmConfig, Places, arguments
from hpctrain.records.run_records import Outcome
from hpctrain.train.engines.megatron_lm.checkpoint_publisher import CheckpointPublisher
from hpctrain.train.engines.megatron_lm.log_reporter import LogReporter
from hpctrain.train.engines.megatron_lm.program_hooks import (
    StopForwarder,
    StopHooks,
    patch_on_import,
)
from hpctrain.train.job import Job, Keeper
from hpctrain.train.rank_environment import Launch
from hpctrain.train.saving.digest_check import DigestCheck
from hpctrain.train.storage import outlast

# What arguments.py of core_v0.16 asserts with --deterministic-mode.
DETERMINISTIC_VARIABLES = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
}


def run(job: Job, status: Keeper, digests: DigestCheck | None = None) -> tuple[Outcome, int]:
    """Train until Megatron-LM ends; returns the outcome and the step of its last checkpoint.

    Raises InvalidInputError for a wrong checkout or wrong arguments, and BadCheckpointError if
    `digests` finds this rank's share of the checkpoint changed. Anything that Megatron-LM raises
    passes unchanged, SystemExit 16 and 17 included.
    """
    config = job.config
    assert isinstance(config, MegatronLmConfig)
    resume_step = job.launch.resume_step
    if resume_step >= config.train_steps:
        return "done", resume_step
    program = Path(config.checkout, config.entry)
    if not program.is_file():
        hint = "set `engine.checkout` to a directory that every node, and the container, sees"
        missing = Problem("no such program", str(program), hint=hint, node_dependent=True)
        raise InvalidInputError([missing])
    reporter = LogReporter(job)
    if job.launch.leads:
        # The tracker names the checkpoint to resume, because Megatron-LM's own tools read it.
        if resume_step:
            point_tracker_to(job.run.checkpoints, resume_step)
        else:
            (job.run.checkpoints / TRACKER_NAME).unlink(missing_ok=True)
        reporter.phase("loading" if resume_step else "starting")
    _prepare_environment(config, job.launch)
    from hpctrain.train.software_agreement import agree_on_software  # imports torch

    agree_on_software(job)
    publisher = CheckpointPublisher(job)
    places = Places(
        save=str(publisher.directory),
        data_cache=str(job.data_cache),
        load=str(job.run.checkpoints) if resume_step > 0 else None,
        load_step=resume_step if resume_step > 0 else None,
    )
    command_line = arguments(
        config, places, on_cpu=_install_cpu_stand_ins(config), ramps_up=_ramps_up(config)
    )
    if digests is not None:
        # Before the program's own process groups: no rank can make a step without this one.
        digests.wait()
    publisher.start()
    try:
        try:
            _execute(job, status, publisher, reporter, program, command_line)
        except SystemExit:
            publisher.finish()  # all ranks exit together, and the last checkpoint is to be resumed
            raise
        if job.launch.leads:
            reporter.phase("leaving", publisher.newest_step or resume_step)
        outcome, step = _outcome(job, publisher, resume_step)
        if job.launch.leads:
            reporter.phase("leaving", step)  # with the checkpoint that was published meanwhile
        return outcome, step
    except SystemExit:
        raise
    except BaseException:  # also the interrupt by the publisher's thread, wherever it comes
        publisher.abandon()
        if publisher.problem is not None:
            raise publisher.problem from None
        raise


def _ramps_up(config: MegatronLmConfig) -> bool:
    """Check whether the checkout follows `--rampup-batch-size`; newer ones accept and ignore it."""
    if config.rampup_batch_size is None:
        return True
    source = Path(config.checkout, "megatron/core/num_microbatches_calculator.py")
    try:
        return "class RampupBatchsize" in source.read_text()
    except OSError as error:
        missing = Problem(f"cannot be read: {error.strerror}", str(source), node_dependent=True)
        raise InvalidInputError([missing]) from error


def _prepare_environment(config: MegatronLmConfig, launch: Launch) -> None:
    """Set the variables that Megatron-LM expects of a launcher, and put its modules first."""
    # With `--gpus-per-task` Slurm shows each task one GPU only, which is then number 0.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    one_gpu = len(visible) == 1 and visible[0]
    os.environ["RANK"] = str(launch.rank)
    os.environ["WORLD_SIZE"] = str(launch.world_size)
    os.environ["LOCAL_RANK"] = str(0 if one_gpu else launch.local_rank)
    if config.deterministic_mode:
        for name, value in DETERMINISTIC_VARIABLES.items():
            os.environ.setdefault(name, value)
    sys.path.insert(0, config.checkout)


def _install_cpu_stand_ins(config: MegatronLmConfig) -> bool:
    """Return True on a machine without GPUs, after CUDA has been replaced there for a trial."""
    from hpctrain.train.device import on_cpu  # imports torch

    if not on_cpu():
        return False
    if config.async_save:
        # its writer is a process that gets live tensors, if these are on the CPU
        message = "Megatron-LM saves asynchronously from GPUs only"
        hint = "set `checkpoint.asynchronous: false`"
        raise InvalidInputError([Problem(message, hint=hint)])
    from hpctrain.train.engines.megatron_lm import cpu_stand_ins

    cpu_stand_ins.install()
    return True


def _execute(
    job: Job,
    status: Keeper,
    publisher: CheckpointPublisher,
    reporter: LogReporter,
    program: Path,
    command_line: tuple[str, ...],
) -> None:
    """Run the program in this process until it ends by itself or on request."""
    launch = job.launch
    status.step = lambda: reporter.step

    def handle_line(line: str) -> bool:
        if launch.leads:
            publisher.handle_line(line)
        return not reporter.hears or reporter.handle_line(line)

    sys.argv = [str(program), *command_line]
    gc.enable()  # `hpctrain.train.__main__` has disabled it for the start
    from hpctrain.train.datasets.npz_arrays import complete_files
    from hpctrain.train.engines.megatron_lm.program_hooks import measure_steps

    hooks = StopHooks(lambda: forwarder.stop_requested, status.begin)
    status.asked = hooks.signal_received

    def handler_installed() -> None:
        """End the start: the program now saves and exits after its next step.

        With a hook on its steps, a stop before the first step is still recognised as one during
        the start.
        """
        if not hooks.patches_steps:
            status.begin()

    forwarder = StopForwarder(job, handler_installed)
    with (
        filter_stdout(handle_line),
        forwarder,
        convert_argument_errors(),
        complete_files(),
        hooks.installed(),
        measure_steps(job),
        patch_on_import({"megatron.training.checkpointing": _load_recorder(status, launch)}),
    ):
        try:
            runpy.run_path(str(program), run_name="__main__")
        except SystemExit as error:
            if error.code not in (0, None):
                raise
        finally:
            reporter.close()
            # The saver's queue and the data loader's workers are processes that would outlive a
            # rank which exits without Python's own cleanup (`hpctrain.train.stop.leave`).
            for child in multiprocessing.active_children():
                child.kill()


def _load_recorder(status: Keeper, launch: Launch) -> Callable[[ModuleType], None]:
    """Return a patch that records in `status` when the program is loading the checkpoint.

    A fork without the function `load_checkpoint` loads as before.
    """

    def patch(module: ModuleType) -> None:
        load = getattr(module, "load_checkpoint", None)
        if load is None or not launch.resume_step:
            return

        @functools.wraps(load)
        def load_recorded(*arguments: Any, **keywords: Any) -> Any:
            status.loading_step = launch.resume_step  # stays set if this raises
            loaded = load(*arguments, **keywords)
            status.loading_step = None
            return loaded

        # The training loop has its own name for it, if it was imported before.
        for user in (module, sys.modules.get("megatron.training.training")):
            if getattr(user, "load_checkpoint", None) is load:
                vars(user).update(load_checkpoint=load_recorded)

    return patch


def _outcome(job: Job, publisher: CheckpointPublisher, resume_step: int) -> tuple[Outcome, int]:
    """Return the outcome by the step of the newest checkpoint.

    Megatron-LM exits with 0 both when it has finished and when it was stopped on request.
    """
    publisher.finish()
    outlast(job.run, job.run.require)
    steps = published_steps(job.run.checkpoints)
    newest = steps[-1] if steps else 0
    if newest >= job.config.train_steps:
        return "done", newest
    if newest == resume_step:
        message = "Megatron-LM ended by itself without an error and without a checkpoint"
        hint = "its log has the reason; it exits with code 0 after some argument errors"
        raise InvalidInputError([Problem(message, hint=hint)])
    return "yielded", newest


# -- Report arguments that Megatron-LM rejects as invalid input, not as a failure of the run ----


# Where Megatron-LM parses and checks, and turns arguments into configurations.
_CHECKS = ("megatron/training/arguments.py", "megatron/training/argument_utils.py")
_CHECK_ERRORS = (AssertionError, ValueError, TypeError, RuntimeError)


@contextlib.contextmanager
def convert_argument_errors() -> Iterator[None]:
    """Raise InvalidInputError for rejected arguments; other errors pass unchanged."""
    before = argparse.ArgumentParser.error

    def error(parser: argparse.ArgumentParser, message: str) -> NoReturn:
        raise InvalidInputError([_problem(message)])

    argparse.ArgumentParser.error = error  # type: ignore[method-assign,assignment]
    try:
        yield
    except _CHECK_ERRORS as failure:
        frames = traceback.extract_tb(failure.__traceback__)
        if any(frame.filename.endswith(_CHECKS) for frame in frames):
            reason = str(failure).strip() or type(failure).__name__
            raise InvalidInputError([_problem(reason)]) from failure
        raise
    finally:
        argparse.ArgumentParser.error = before  # type: ignore[method-assign]


def _problem(reason: str) -> Problem:
    hint = "`engine.arguments` and the fields of the spec become its arguments"
    return Problem(f"Megatron-LM refuses its arguments: {reason}", hint=hint)


# -- Standard output of this process, with every line shown to a function that may drop it ------


# A longer line without an end is written at once and not kept.
_LONGEST_LINE_CHARACTERS = 1 << 16


class LineFilter:
    """Wraps a text stream; calls `handle_line` with every line, in the thread that wrote it.

    A complete line is written to the stream if `handle_line` returns True, or if a part of it has
    been flushed before.
    """

    def __init__(self, stream: TextIO, handle_line: Callable[[str], bool]) -> None:
        self._stream = stream
        self._handle_line = handle_line
        self._line = ""
        self._written_characters = 0

    def write(self, text: str) -> int:
        *lines, rest = (self._line + text).split("\n")
        for line in lines:
            written, self._line, self._written_characters = self._written_characters, "", 0
            if self._handle_line(line) or written:
                self._stream.write(f"{line[written:]}\n")
        self._line = rest
        if len(rest) > _LONGEST_LINE_CHARACTERS:
            self._write_unfinished_line()
            self._line, self._written_characters = "", 0
        return len(text)

    def flush(self) -> None:
        """Flush the stream, together with a line that has no end yet, such as a progress bar."""
        self._write_unfinished_line()
        self._stream.flush()

    def _write_unfinished_line(self) -> None:
        self._stream.write(self._line[self._written_characters :])
        self._written_characters = len(self._line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def filter_stdout(handle_line: Callable[[str], bool]) -> Iterator[None]:
    """Replace `sys.stdout` by a `LineFilter` inside the block."""
    before = sys.stdout
    line_filter = LineFilter(before, handle_line)
    sys.stdout = line_filter
    try:
        yield
    finally:
        line_filter.flush()
        sys.stdout = before
