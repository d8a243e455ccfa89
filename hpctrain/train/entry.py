"""Run one rank from checks to exit code, and write the record of how it ended.

Exit codes are `hpctrain.records.run_records.TrainerExit`. Belongs here: classifying the end of a
rank, and its records. Does not belong here: training.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, cast

from hpctrain.base.errors import CheckpointError, HpctrainError, InvalidInputError, Problem
from hpctrain.checkpoints.publish import StaleEpochError
from hpctrain.engines.training import TrainConfig
from hpctrain.records.exit_records import has_left_startup
from hpctrain.records.layout import RunLayout
from hpctrain.records.manifest import (
    checkpoint_name,
    read_manifest,
    step_of,
    what_is_wrong,
)
from hpctrain.records.requests import is_requested
from hpctrain.records.run_records import (
    DoneMarker,
    Outcome,
    Progress,
    TrainerExit,
    read_record,
    write_record,
)
from hpctrain.spec.engines.registry import abilities_of, resolve
from hpctrain.train.faults import (
    BadCheckpointError,
    RefusedElsewhereError,
    UnreadableCheckpointError,
    blames_checkpoint,
    cause_of,
    is_node_dependent,
)
from hpctrain.train.job import Job, read_config
from hpctrain.train.launchers.nsight import run_under_nsight
from hpctrain.train.network_interface import set_gloo_interface
from hpctrain.train.placement import place_rank
from hpctrain.train.preflight import check
from hpctrain.train.rank_environment import (
    Launch,
    host_threads,
    quiet_defaults,
    read_launch,
)
from hpctrain.train.saving.digest_check import lost_file, start_digest_check
from hpctrain.train.stacks import StackDump, flight_recorder, open_stack_dump
from hpctrain.train.stop import StopSignals
from hpctrain.train.storage import (
    failed_below,
    fence_of,
    is_present,
    outlast,
    record_exit,
    stale_or,
)

_Checked = TypeVar("_Checked")
# Crashes with a code of their own, which Slurm shows even where no record could be written. The
# same codes leave megatron-core when it ends the process itself.
_CODES_OF_CAUSES = {
    "diverged": TrainerExit.DIVERGED,
    "suspect_numerics": TrainerExit.SUSPECT_NUMERICS,
}


def main(arguments: list[str], stop: StopSignals) -> int:
    """Run one rank; `arguments` is the path of `train.json`. Returns the exit code."""
    try:
        if len(arguments) != 1:
            usage = "usage: python -m hpctrain.train RUN_DIRECTORY/train.json"
            raise InvalidInputError([Problem(usage)])
        path = Path(arguments[0]).absolute()
        launch = read_launch(os.environ)
        run = RunLayout(path.parent)
        if read_record(run.done, DoneMarker) is not None:
            return TrainerExit.DONE
    except InvalidInputError as error:
        return _say(str(error), TrainerExit.CONFIG_ERROR)
    ending = Ending(run, launch, stop)
    stacks: StackDump | None = None
    try:
        stacks = open_stack_dump(run, launch)
    except OSError as error:  # train without stack dumps of this rank
        _say(f"stacks cannot be written: {error}", TrainerExit.CRASH)

    def read() -> TrainConfig:
        run.require()
        return read_config(path)

    def train() -> Outcome:
        # the file of a supervised launch existed before
        config = outlast(run, read) if launch.epoch else read_config(path)
        run_under_nsight(path, config, launch, run, os.environ, stop)  # may not return
        return _train(Job(config, launch, run, stop), ending)

    code = ending.of(train)
    if stacks is not None:
        stacks.discard_if_unused()
    return code


class Ending:
    """Converts the outcome of this rank into an exit code and an exit record."""

    def __init__(self, run: RunLayout, launch: Launch, stop: StopSignals) -> None:
        self._run = run
        self._launch = launch
        self._stop = stop
        self._startup = StartupStop(stop, self._is_asked_to_stop, self._leave_startup)
        self._begun = False
        self.signalled_ranks: tuple[int, ...] = ()
        self.step: Callable[[], int] = lambda: launch.resume_step
        self.loading_step: int | None = None
        self.asked: Callable[[], bool] = lambda: False

    def starting(self) -> None:
        """Let a stop end this rank without waiting for others, until `begin` is called."""
        self._startup.begin()

    def begin(self) -> None:
        """Mark the end of start-up: from now on all ranks agree on when to stop."""
        self._startup.end()
        self._begun = True

    def _is_asked_to_stop(self) -> bool:
        """Check for a signal to this rank, and on rank 0 for the stop file."""
        if self._stop.requested or self.asked():
            return True
        return self._launch.leads and is_requested(self._run, "stop")

    def _leave_startup(self) -> None:
        """End the process during start-up, unless a step of this launch has been trained.

        That can happen with an external program, which does not report the end of its start-up.
        `leave` is not used, because the main thread may be within a write to a stream.
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
        """Check whether this rank or others were stopped during start-up.

        Errors are then a consequence of missing ranks.
        """
        if self._begun:
            return False
        return self._is_asked_to_stop() or has_left_startup(self._run, self._launch.epoch)

    def of(self, work: Callable[[], Outcome]) -> int:
        try:
            outcome = work()
            self._startup.end()
            if self._launch.leads:
                self._record(outcome, None, None)
            return TrainerExit.of(outcome)
        except InvalidInputError as error:
            hints = tuple(f"hint: {one.hint}" for one in error.problems if one.hint)
            return self._bad(
                "config_error", str(error), None, node_dependent=error.node_dependent, hints=hints
            )
        except RefusedElsewhereError as error:
            # no record: ranks that have the problem leave one
            self._startup.end()
            code = TrainerExit.CONFIG_ERROR
            return _say(str(error), code) if self._launch.leads else code
        except Exception as error:
            return self._crashed(stale_or(error, self._run, self._launch))
        except BaseException as error:
            return self._crashed(error)

    def _crashed(self, error: BaseException) -> int:
        if isinstance(error, StaleEpochError):
            return self._bad("crash", f"stale epoch: {error}", None, error)
        error = self._unreadable_or(error)
        here = is_node_dependent(error, self._run.checkpoints)
        if isinstance(error, HpctrainError):
            return self._bad("crash", str(error), None, error, node_dependent=here)
        if cause_of(error) is None and self._is_leaving_startup():
            self._startup.end()
            _say(f"while the launch is stopping: {_in_one_line(error)}", TrainerExit.YIELDED)
            return self._record_left_startup()
        trace = "".join(traceback.format_exception(error))
        return self._bad("crash", _in_one_line(error), trace, error, node_dependent=here)

    def _unreadable_or(self, error: BaseException) -> BaseException:
        """Blame this node and not the checkpoint for a file that its loader has missed.

        Every file was there a moment ago, as the supervisor and one rank have seen.
        """
        if self.loading_step is None or not blames_checkpoint(error):
            return error
        directory = self._run.checkpoints / self._launch.resume
        name = lost_file(directory, error)
        if name is None:
            return error
        who = f"rank {self._launch.rank} on {self._launch.node}"
        missing = UnreadableCheckpointError(f"{who} does not see {name} of {directory.name}")
        missing.__cause__ = error
        return missing

    def _bad(
        self,
        outcome: Outcome,
        message: str,
        trace: str | None,
        error: BaseException | None = None,
        *,
        node_dependent: bool = False,
        hints: tuple[str, ...] = (),
    ) -> int:
        self._startup.end()
        cause = cause_of(error) if error is not None else None
        if error is not None and cause is None and failed_below(self._run, error):
            cause = "storage"  # the error is about a run directory that is away
        code = _CODES_OF_CAUSES.get(cause or "", TrainerExit.of(outcome))
        self._record(outcome, message, trace, cause, error, node_dependent)
        if outcome == "config_error" and not node_dependent and not self._launch.leads:
            return code  # every rank has the same problem, and rank 0 prints it
        rank = f"rank {self._launch.rank} on {self._launch.node}"
        return _say("\n".join((f"{trace or ''}{rank}: {outcome}: {message}", *hints)), code)

    def _record(
        self,
        outcome: Outcome,
        message: str | None,
        trace: str | None,
        cause: str | None = None,
        error: BaseException | None = None,
        node_dependent: bool = False,
    ) -> None:
        blamed = error is not None and blames_checkpoint(error)
        record_exit(
            self._run,
            self._launch,
            outcome,
            left_startup=outcome == "yielded" and not self._begun,
            step=self.step(),
            exit_code=_CODES_OF_CAUSES.get(cause or "", TrainerExit.of(outcome)),
            message=message,
            traceback=trace,
            cause=cause,
            consumed_samples=getattr(error, "consumed_samples", None),
            node_dependent=node_dependent,
            loading_step=self.loading_step if blamed else None,
            signal=self._stop.name,
            signalled_ranks=self.signalled_ranks,
        )


def _train(job: Job, ending: Ending) -> Outcome:
    """Run everything from the first check to the done marker."""
    ending.starting()
    if job.launch.epoch:
        # The epoch of this launch may reach this node late: nfs(5), attributes are cached for up
        # to acdirmax = 60 s. Until then the directory shows an earlier state.
        outlast(job.run, fence_of(job.run, job.launch).check)
    _confirmed(job, lambda: check(job), InvalidInputError)
    launch = job.launch
    digests = _confirmed(
        job,
        lambda: start_digest_check(
            job.resume_directory, launch.rank, launch.world_size, launch.node
        ),
        *(BadCheckpointError, UnreadableCheckpointError),
    )
    _prepare_process(job)
    program = abilities_of(job.config.engine).program
    if program is not None:
        # the engine trains with an external program
        outcome, step = resolve(program).run(job, ending, digests)
        if outcome == "done" and job.launch.leads:
            outlast(job.run, lambda: mark_done(job, step))
        return cast(Outcome, outcome)
    from hpctrain.train.startup import assemble  # imports torch and the engine

    loop = assemble(job, ending, digests)
    try:
        outcome = loop.run()
        ending.signalled_ranks = loop.signalled_ranks
    except BaseException:
        loop.saver.abandon()
        raise
    if outcome == "done" and job.launch.leads:
        outlast(job.run, lambda: mark_done(job, loop.position.step))
    loop.control.barrier()
    return outcome


def _prepare_process(job: Job) -> None:
    """Set everything that has to be set before torch is imported.

    Raises InvalidInputError where this node lacks the network interface that the profile names.
    """
    set_gloo_interface(os.environ, job.launch.node)
    config, threads = job.config, 1
    if config.accelerator == "cuda":
        threads = host_threads() if config.computes_on_host else 1
        if place_rank(job.launch.local_rank) == "far":
            cpus = len(os.sched_getaffinity(0))
            rank = f"rank {job.launch.rank} on {job.launch.node}"
            print(f"{rank}: none of its {cpus} CPUs is near its GPU: see docs/gpu.md", flush=True)
    elif config.accelerator == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # GPUs of this machine are not the run's
    os.environ.update(
        quiet_defaults(config.engine, host_threads=threads) | flight_recorder(job.run, job.launch)
    )


def _confirmed(
    job: Job, check_once: Callable[[], _Checked], *refusals: type[HpctrainError]
) -> _Checked:
    """Run a check; repeat a failed one once the run directory is reachable.

    A failed check ends the run permanently, so an outage must not cause it.
    """
    try:
        return check_once()
    except refusals:
        if is_present(job.run) and not job.launch.epoch:
            raise
        outlast(job.run, job.run.require)
        return check_once()


def mark_done(job: Job, step: int) -> None:
    """Write the done marker. Raises CheckpointError if the final checkpoint fails the check."""
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


# -- Stop a rank during start-up, when there is nothing to save yet -----------------------------
# A start takes minutes (imports, process groups, datasets, weights) and waits for other ranks, so a
# stop cannot wait for the first agreement of all ranks. A thread ends the process instead.


# Slurm signals one node after the other, and a rank that ends breaks the connections of the others.
# After this time all of them should have been signalled.
SETTLE_SECONDS = 5.0
_POLL_SECONDS = 0.2


class StartupStop:
    """Calls `leave` in a thread some seconds after a request to stop, until `end` is called.

    `stop` has caught signals until now. `asked` checks for other requests, several times a second.
    `leave` ends the process, or returns if a step has been trained. Code that holds Python's global
    lock for long blocks the thread; the supervisor then ends the step (see
    `hpctrain.supervise.evidence.launch_watch`).
    """

    def __init__(
        self, stop: StopSignals, asked: Callable[[], bool], leave: Callable[[], None]
    ) -> None:
        self._stop = stop
        self._asked = asked
        self._leave = leave
        self._over = threading.Event()
        self._arrivals, self._arriving = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="startup-stop", daemon=True)

    def begin(self) -> None:
        """Start the thread; call this in the main thread only.

        Python runs signal handlers in its main thread, which may wait for other ranks in C++; the
        pipe receives the number of a signal at once (signal.set_wakeup_fd).
        """
        signal.set_wakeup_fd(self._arriving, warn_on_full_buffer=False)
        self._thread.start()

    def end(self) -> None:
        """End the thread, because from now on all ranks agree on stops.

        Does not return if this rank is ending already. The thread has ended when this returns,
        because a launch forks later.
        """
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(-1)
        self._over.set()
        os.write(self._arriving, b"\0")
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        asked_at: float | None = None
        while not self._over.is_set():
            # wait a moment for signals, and remember those that request a stop
            if select.select([self._arrivals], [], [], _POLL_SECONDS)[0]:
                for number in os.read(self._arrivals, 64):
                    self._stop.remember(number)
            if asked_at is None:
                asked = self._stop.requested or self._asked()
                asked_at = time.monotonic() if asked else None
            elif time.monotonic() - asked_at >= SETTLE_SECONDS:
                break
        if not self._over.is_set():
            self._leave()
