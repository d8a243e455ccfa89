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

from hpctrain.checkpoints.manifest import checkpoint_name, read_manifest, step_of, what_is_wrong
from hpctrain.checkpoints.publish import StaleEpochError
from hpctrain.engines.megatron_lm import MegatronLmConfig
from hpctrain.errors import CheckpointError, HpctrainError, InvalidInputError, Problem
from hpctrain.store.epochs import current_epoch
from hpctrain.store.layout import RunLayout
from hpctrain.store.signs import (
    DoneMarker,
    ExitRecord,
    Outcome,
    Progress,
    TrainerExit,
    read_exit_records,
    read_record,
    write_record,
)
from hpctrain.train.faults import BadCheckpointError, cause_of
from hpctrain.train.job import Job, read_config
from hpctrain.train.launch import Launch, quiet_defaults, read_launch
from hpctrain.train.nsight import become_recorded
from hpctrain.train.preflight import check
from hpctrain.train.stacks import StackDump, flight_recorder, open_stack_dump
from hpctrain.train.startup_stop import StartupStop
from hpctrain.train.stop import StopSignals, file_exists

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
    config = read_config(path)
    become_recorded(path, config, launch, run, os.environ, stop)
    return Job(config, launch, run, stop)


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
        self._startup = StartupStop(stop, self._is_asked_to_stop, self._leave_startup)
        self._begun = False
        self.step: Callable[[], int] = lambda: step_of(launch.resume) or 0
        self.asked: Callable[[], bool] = lambda: False

    def starting(self) -> None:
        """Until `begin`, a stop ends this rank without waiting for any other."""
        self._startup.begin()

    def begin(self) -> None:
        """All ranks have started: from now on they agree on when to stop."""
        self._startup.end()
        self._begun = True

    def _is_asked_to_stop(self) -> bool:
        """A signal to this rank, or the stop file, which rank 0 looks for."""
        if self._stop.requested or self.asked():
            return True
        return self._launch.leads and file_exists(self._run.stop_request)

    def _leave_startup(self) -> None:
        """Not by `leave`: the main thread may be anywhere, also within a write to a stream.

        Returns if a step of this launch has been trained after all, which is not to be lost: a
        program of somebody else's may not have let us know.
        """
        progress, resumed = read_record(self._run.progress, Progress), step_of(self._launch.resume)
        ours = progress is not None and progress.epoch == self._launch.epoch
        if progress is not None and ours and progress.step > (resumed or 0):
            return
        self._record_left_startup()
        os._exit(TrainerExit.YIELDED)

    def _record_left_startup(self) -> int:
        how = self._stop.name or "control/stop"
        self._record("yielded", f"asked to stop ({how}) before its first step", None)
        return TrainerExit.YIELDED

    def _is_leaving_startup(self) -> bool:
        """Whether this rank was asked to stop before its first step, or others were and have left:
        what fails then fails because ranks are gone.
        """
        if self._begun:
            return False
        if self._is_asked_to_stop():
            return True
        records = read_exit_records(self._run, self._launch.epoch)
        return any(record.outcome == "yielded" for record in records)

    def of(self, work: Callable[[], Outcome]) -> int:
        try:
            return self._good(work())
        except InvalidInputError as error:
            return self._bad("config_error", str(error), None)
        except StaleEpochError as error:
            return self._bad("crash", f"stale epoch: {error}", None)
        except HpctrainError as error:
            return self._bad("crash", str(error), None, error)
        except BaseException as error:
            if cause_of(error) is None and self._is_leaving_startup():
                self._startup.end()
                _say(f"while the launch is stopping: {_in_one_line(error)}", TrainerExit.YIELDED)
                return self._record_left_startup()
            return self._bad("crash", _in_one_line(error), traceback.format_exc(), error)

    def _good(self, outcome: Outcome) -> int:
        self._startup.end()
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
        self._startup.end()
        message = self._stale_or(message) if outcome == "crash" else message
        stale = message.startswith("stale epoch")
        cause = "superseded" if stale else cause_of(error) if error is not None else None
        code = _CODES_OF_CAUSES.get(cause or "", _CODES[outcome])
        self._record(outcome, message, trace, cause, getattr(error, "consumed_samples", None))
        if outcome == "config_error" and not self._launch.leads:
            return code  # every rank found the same: rank 0 says it
        rank = f"rank {self._launch.rank} on {self._launch.node}"
        return _say(f"{trace or ''}{rank}: {outcome}: {message}", code)

    def _stale_or(self, message: str) -> str:
        """A newer launch takes the files of this one away, which shows as all kinds of errors."""
        owner = current_epoch(self._run.epochs)
        if owner == self._launch.epoch or message.startswith("stale epoch"):
            return message
        return f"stale epoch: epoch {owner} owns the run, not {self._launch.epoch}; {message}"

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
        )
        try:
            write_record(self._run.exit_record(record.epoch, record.rank), record)
        except OSError as error:
            _say(f"the exit record could not be written: {error}", TrainerExit.CRASH)


def _train(job: Job, ending: _Ending) -> Outcome:
    """Everything from the first check to the done marker."""
    ending.starting()
    check(job)
    _refuse_stale(job)
    _refuse_damaged(job)
    os.environ.update(quiet_defaults(job.config.engine) | flight_recorder(job.run, job.launch))
    if isinstance(job.config, MegatronLmConfig):
        return _supervise(job, ending)
    from hpctrain.train.startup import assemble  # torch and megatron-core come in here

    loop = assemble(job, ending)
    try:
        outcome = loop.run()
    except BaseException:
        loop.saver.abandon()
        raise
    if outcome == "done" and job.launch.leads:
        _mark_done(job, loop.position.step)
    loop.control.barrier()
    return outcome


def _supervise(job: Job, ending: _Ending) -> Outcome:
    """Have somebody's own program train."""
    from hpctrain.train.megatron_lm.running import run

    outcome, step = run(job, ending)
    if outcome == "done" and job.launch.leads:
        _mark_done(job, step)
    return outcome


def _refuse_stale(job: Job) -> None:
    owner = current_epoch(job.run.epochs)
    if owner != job.launch.epoch:
        raise StaleEpochError(f"epoch {owner} owns the run, not {job.launch.epoch}")


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
