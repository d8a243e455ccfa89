"""One rank from start to exit code: checks, start-up, loop, and the records of how it ended.

Exit codes are `hpctrain.store.signs.TrainerExit`. Belongs here: which ending is which, and who
writes what about it. Does not belong here: training.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from hpctrain.checkpoints.manifest import checkpoint_name, read_manifest, what_is_wrong
from hpctrain.checkpoints.publish import StaleEpochError
from hpctrain.engines.megatron_lm import MegatronLmConfig
from hpctrain.engines.training import TrainConfig
from hpctrain.errors import CheckpointError, HpctrainError, InvalidInputError, Problem
from hpctrain.store.layout import RunLayout
from hpctrain.store.signs import (
    DoneMarker,
    ExitRecord,
    Outcome,
    TrainerExit,
    read_record,
    write_exit_record,
    write_record,
)
from hpctrain.train.faults import BadCheckpointError, cause_of
from hpctrain.train.job import Job, read_config
from hpctrain.train.launch import Launch, quiet_defaults, read_launch
from hpctrain.train.nsight import become_recorded
from hpctrain.train.preflight import check
from hpctrain.train.stacks import StackDump, flight_recorder, open_stack_dump
from hpctrain.train.stop import StopSignals
from hpctrain.train.storage import failed_below, fence_of, is_present, outlast, stale_or

# How long the record of a rank that ends waits for the run directory: Slurm may be ending the job.
_LAST_WORD_SECONDS = 10.0
_CODES: dict[Outcome, TrainerExit] = {
    "done": TrainerExit.DONE,
    "yielded": TrainerExit.YIELDED,
    "config_error": TrainerExit.CONFIG_ERROR,
    "crash": TrainerExit.CRASH,
}
# Crashes with a code of their own, which Slurm shows even where no record could be written. The
# same codes leave megatron-core when it ends the process itself.
_CODES_OF_CAUSES = {
    "diverged": TrainerExit.DIVERGED,
    "suspect_numerics": TrainerExit.SUSPECT_NUMERICS,
}


def main(arguments: list[str], stop: StopSignals) -> int:
    """Run one rank; `arguments` is the path of `train.json`. Returns the exit code."""
    try:
        path = _config_path(arguments)
        launch = read_launch(os.environ)
    except InvalidInputError as error:
        return _say(str(error), TrainerExit.CONFIG_ERROR)
    run = RunLayout(path.parent)
    if read_record(run.done, DoneMarker) is not None:
        return TrainerExit.DONE
    ending = _Ending(run, launch, stop)
    stacks = _open_stacks(run, launch)
    code = ending.of(lambda: _train(_job(path, launch, run, stop), ending))
    if stacks is not None:
        stacks.discard_if_unused()
    return code


def _job(path: Path, launch: Launch, run: RunLayout, stop: StopSignals) -> Job:
    """Does not return where this rank has to be started below a profiler."""
    config = _read_config(path, launch, run)
    become_recorded(path, config, launch, run, os.environ, stop)
    return Job(config, launch, run, stop)


def _read_config(path: Path, launch: Launch, run: RunLayout) -> TrainConfig:
    """In a supervised launch the file was there: if it is missing, its directory is away."""

    def read() -> TrainConfig:
        run.require()
        return read_config(path)

    return outlast(run, read) if launch.epoch else read_config(path)


def _open_stacks(run: RunLayout, launch: Launch) -> StackDump | None:
    """Without a file for stacks training goes on; whoever asks for them gets none of this rank."""
    try:
        return open_stack_dump(run, launch)
    except OSError as error:
        _say(f"stacks cannot be written: {error}", TrainerExit.CRASH)
        return None


def leave(code: int) -> NoReturn:
    """End the process without interpreter teardown.

    Threads of gloo and NCCL may still run; tearing down under them can hang or abort a rank that
    has done all its work.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _config_path(arguments: list[str]) -> Path:
    if len(arguments) != 1:
        raise InvalidInputError(
            [Problem("usage: python -m hpctrain.train RUN_DIRECTORY/train.json")]
        )
    return Path(arguments[0]).absolute()


class _Ending:
    """Turns what happens into an exit code and an exit record of this rank."""

    def __init__(self, run: RunLayout, launch: Launch, stop: StopSignals) -> None:
        self._run = run
        self._launch = launch
        self._stop = stop
        self.signalled_ranks: tuple[int, ...] = ()
        self.step: Callable[[], int] = lambda: 0

    def of(self, work: Callable[[], Outcome]) -> int:
        try:
            return self._good(work())
        except InvalidInputError as error:
            return self._bad("config_error", str(error), None)
        except Exception as error:
            return self._crashed(stale_or(error, self._run, self._launch))
        except BaseException as error:
            return self._crashed(error)

    def _crashed(self, error: BaseException) -> int:
        if isinstance(error, StaleEpochError):
            return self._bad("crash", f"stale epoch: {error}", None, error)
        if isinstance(error, HpctrainError):
            return self._bad("crash", str(error), None, error)
        trace = "".join(traceback.format_exception(error))
        return self._bad("crash", _in_one_line(error), trace, error)

    def _good(self, outcome: Outcome) -> int:
        if self._launch.leads:
            self._record(outcome, None, None)
        return _CODES[outcome]

    def _bad(
        self,
        outcome: Outcome,
        message: str,
        trace: str | None,
        error: BaseException | None = None,
    ) -> int:
        cause = self._cause(error) if error is not None else None
        code = _CODES_OF_CAUSES.get(cause or "", _CODES[outcome])
        self._record(outcome, message, trace, cause, getattr(error, "consumed_samples", None))
        if outcome == "config_error" and not self._launch.leads:
            return code  # every rank found the same: rank 0 says it
        rank = f"rank {self._launch.rank} on {self._launch.node}"
        return _say(f"{trace or ''}{rank}: {outcome}: {message}", code)

    def _cause(self, error: BaseException) -> str | None:
        """Where the error alone does not tell, it may be about a run directory that is away."""
        cause = cause_of(error)
        return "storage" if cause is None and failed_below(self._run, error) else cause

    def _record(
        self,
        outcome: Outcome,
        message: str | None,
        trace: str | None,
        cause: str | None = None,
        consumed_samples: int | None = None,
    ) -> None:
        record = ExitRecord(
            epoch=self._launch.epoch,
            rank=self._launch.rank,
            node=self._launch.node,
            outcome=outcome,
            step=self.step(),
            exit_code=_CODES_OF_CAUSES.get(cause or "", _CODES[outcome]),
            time=time.time(),
            message=message,
            traceback=trace,
            cause=cause,
            consumed_samples=consumed_samples,
            signal=self._stop.name,
            signalled_ranks=self.signalled_ranks,
        )
        try:
            outlast(self._run, lambda: write_exit_record(self._run, record), _LAST_WORD_SECONDS)
        except OSError as error:
            _say(f"the exit record could not be written: {error}", TrainerExit.CRASH)


def _train(job: Job, ending: _Ending) -> Outcome:
    """Everything from the first check to the done marker."""
    if job.launch.epoch:
        _refuse_stale(job)
    _twice(job, lambda: check(job), InvalidInputError)
    _twice(job, lambda: _refuse_damaged(job), BadCheckpointError)
    os.environ.update(quiet_defaults(job.config.engine) | flight_recorder(job.run, job.launch))
    if isinstance(job.config, MegatronLmConfig):
        return _supervise(job, ending)
    from hpctrain.train.startup import assemble  # torch and megatron-core come in here

    loop = assemble(job, ending)
    try:
        outcome = loop.run()
        ending.signalled_ranks = loop.signalled_ranks
    except BaseException:
        loop.saver.abandon()
        raise
    if outcome == "done" and job.launch.leads:
        outlast(job.run, lambda: _mark_done(job, loop.position.step))
    loop.control.barrier()
    return outcome


def _supervise(job: Job, ending: _Ending) -> Outcome:
    """Have somebody's own program train."""
    from hpctrain.train.megatron_lm.running import run

    outcome, step = run(job, ending)
    if outcome == "done" and job.launch.leads:
        outlast(job.run, lambda: _mark_done(job, step))
    return outcome


def _refuse_stale(job: Job) -> None:
    """The epoch of this launch may reach this node late: nfs(5), attributes are cached for up to
    acdirmax = 60 s. Until then the directory is one of before."""
    outlast(job.run, fence_of(job.run, job.launch).check)


def _twice(job: Job, refuse: Callable[[], None], refusal: type[HpctrainError]) -> None:
    """A refusal ends the run for good: it has to stand while the run directory is there, too."""
    try:
        refuse()
    except refusal:
        if is_present(job.run) and not job.launch.epoch:
            raise
        outlast(job.run, job.run.require)
        refuse()


def _refuse_damaged(job: Job) -> None:
    """Names and sizes only; whoever chose the checkpoint has read its content."""
    directory = job.resume_directory
    if directory is not None:
        problem = what_is_wrong(directory, read_manifest(directory), deep=False)
        if problem is not None:
            raise BadCheckpointError(f"cannot resume from {directory.name}: {problem}")


def _mark_done(job: Job, step: int) -> None:
    """Only a checkpoint that passes the check makes a run done."""
    directory = job.run.checkpoints / checkpoint_name(step)
    problem = what_is_wrong(directory, read_manifest(directory), deep=False)
    if problem is not None:
        raise CheckpointError(f"the final checkpoint {directory.name} is not good: {problem}")
    write_record(
        job.run.done,
        DoneMarker(step=step, epoch=job.launch.epoch, checkpoint=directory.name, time=time.time()),
    )


def _in_one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _say(message: str, code: TrainerExit) -> TrainerExit:
    print(message, file=sys.stderr, flush=True)
    return code
