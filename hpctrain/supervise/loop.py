"""The supervisor inside the job: launch, watch, judge, act, until the attempt is over.

Every action is in the ledger before it is taken. Belongs here: the order of things. Does not
belong here: one launch (`launching`), reading evidence (`classify`), choosing (`policy`), doing
(`acting`), what the run directory looks like (`hpctrain.store`), or how Slurm is spoken to
(`hpctrain.slurm`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from hpctrain.errors import InvalidInputError, Problem, SlurmError
from hpctrain.slurm.client import SlurmClient
from hpctrain.store.epochs import current_epoch
from hpctrain.store.layout import RunLayout
from hpctrain.store.ledger import Event, EventKind, Ledger
from hpctrain.supervise.acting import act
from hpctrain.supervise.allocation import Allocation, place
from hpctrain.supervise.attempt import attempt_from, unfinished_attempt, why_lost
from hpctrain.supervise.causes import Cause
from hpctrain.supervise.context import AttemptContext, say
from hpctrain.supervise.control import Request, requested
from hpctrain.supervise.documents import (
    Action,
    ActionKind,
    History,
    SuperviseConfig,
    Verdict,
)
from hpctrain.supervise.gather import job_facts
from hpctrain.supervise.guard import Guard
from hpctrain.supervise.launching import Ended, Launcher
from hpctrain.supervise.lost import why_ended
from hpctrain.supervise.past import history
from hpctrain.supervise.policy import STOPPED_EXIT_CODE, decide
from hpctrain.supervise.postmortem import Prober, ask_nodes
from hpctrain.supervise.process import Signals
from hpctrain.supervise.situation import allocation_of, assess
from hpctrain.supervise.succession import ensure_successor, must_leave
from hpctrain.supervise.time_limit import Outlook, look_ahead, why_no_launch

_SLURM_TIMEOUT_SECONDS = 8.0


class Supervisor:
    """Owns the `srun` of one attempt."""

    def __init__(
        self,
        directory: Path,
        argv: list[str],
        environment: Mapping[str, str],
        slurm: SlurmClient | None = None,
        ask: Prober = ask_nodes,
    ) -> None:
        run_layout = RunLayout(directory.resolve())
        self.context = AttemptContext(
            run_layout=run_layout,
            config=read_supervise_config(run_layout.supervise_config),
            attempt=attempt_from(environment),
            ledger=Ledger(run_layout.ledger),
            slurm=slurm or SlurmClient(timeout_seconds=_SLURM_TIMEOUT_SECONDS, shielded=True),
            signals=Signals(),
        )
        self.launcher = Launcher(self.context, argv, environment, ask)
        self.guard = Guard(self.context)

    def run(self) -> int:
        """Supervise this attempt to its end; returns the exit code of the job.

        In a thread, because a file system that hangs holds up whoever reads: the main thread
        goes on receiving signals, see `guard`.
        """
        self.context.signals.install()
        worker = _Worker(self._work)
        worker.start()
        self.guard.wait_for(worker)
        return worker.result()

    def _work(self) -> int:
        try:
            return self._supervise()
        except Exception as error:
            reason = f"the supervisor itself failed: {type(error).__name__}: {error}"
            with contextlib.suppress(OSError):  # a full disk may be why it failed
                act(self.context, Action(ActionKind.STOP, reason, STOPPED_EXIT_CODE))
            raise

    def _supervise(self) -> int:
        words = self._why_leave()
        if words is not None:
            return act(self.context, Action(ActionKind.LEAVE, words))
        lost = self._open_attempt()
        action = self._why_not_begin(lost)
        if action is not None:
            return act(self.context, action)
        ensure_successor(self.context)
        allocation = allocation_of(self.context)
        while True:
            outlook = look_ahead(self.context)
            forbidden = self._why_not_now(outlook)
            if forbidden is not None:
                return act(self.context, forbidden)
            ended = self._launch(allocation, outlook)
            allocation, action = self._decide(allocation, ended)
            exit_code = act(self.context, action, ended.verdict)
            if action.kind is not ActionKind.RELAUNCH:
                return exit_code
            self._pause(action.delay_seconds)
            forbidden = self._why_not_again()
            if forbidden is not None:
                return act(self.context, forbidden)

    # -- before the first launch -----------------------------------------------------------

    def _why_leave(self) -> str | None:
        """Another job of the run lives or was cancelled: this one has no say, not even a start."""
        return None if self.context.run_layout.done.exists() else must_leave(self.context)

    def _open_attempt(self) -> Verdict | None:
        """Open this attempt in the ledger, and close one that has left no word."""
        events = self.context.ledger.events()
        lost = unfinished_attempt(events, self.context.attempt)
        verdict = self._close_lost(lost, events) if lost is not None else None
        attempt = self.context.attempt
        self.context.note(EventKind.ATTEMPT_STARTED, nodes=attempt.nodes, cluster=attempt.cluster)
        say(f"attempt {attempt} of run {self.context.config.run_id} on {attempt.nodes}")
        return verdict

    def _close_lost(self, lost: Event, events: list[Event]) -> Verdict:
        cause, reason = self._why_lost(lost, events)
        self.context.ledger.append(
            EventKind.ATTEMPT_LOST,
            job_id=lost.job_id,
            restart_count=lost.restart_count,
            cause=cause,
            reason=reason,
        )
        return Verdict(cause, reason)

    def _why_lost(self, lost: Event, events: list[Event]) -> tuple[Cause, str]:
        """Of another job Slurm may still know how it ended; of our own we are the next attempt."""
        context = self.context
        if lost.job_id is not None and lost.job_id != context.job_id:
            with contextlib.suppress(SlurmError):
                found = why_ended(context.slurm.jobs([lost.job_id]).get(lost.job_id), begun=True)
                if found is not None:
                    return found
        return why_lost(lost, events, context.attempt)

    def _why_not_begin(self, lost: Verdict | None) -> Action | None:
        """The run is done, a person wants it to stop, or attempts are lost again and again without
        a new checkpoint."""
        context = self.context
        if context.run_layout.done.exists():
            return Action(ActionKind.FINISH, "the run was done before this attempt")
        wish = requested(context.run_layout)
        if wish is not None:
            return self._as_wished(wish)
        if lost is not None:
            situation = assess(context, allocation_of(context), lost)
            action = decide(lost, self._history(), situation, context.config)
            return action if action.kind is ActionKind.STOP else None
        return None

    def _as_wished(self, wish: Request) -> Action:
        words = f"asked to {wish.kind} by {wish.by} before this attempt"
        verdict = Verdict(Cause.YIELDED, words, hold=wish.kind == "hold")
        situation = assess(self.context, allocation_of(self.context), verdict)
        return decide(verdict, self._history(), situation, self.context.config)

    # -- launch after launch ---------------------------------------------------------------

    def _launch(self, allocation: Allocation, outlook: Outlook | None) -> Ended:
        placement = place(self.context.config, allocation)
        if placement is None:
            words = f"{len(allocation.healthy)} of {len(allocation.nodes)} nodes answer"
            return Ended(Verdict(Cause.NODE_FAILURE, words))
        # The step of a lost node stays in Slurm's list until it gives the node up.
        placement = replace(placement, overlap=bool(allocation.lost))
        return self.launcher.launch(placement, allocation.nodes, outlook)

    def _decide(self, allocation: Allocation, ended: Ended) -> tuple[Allocation, Action]:
        """What follows, and the nodes that are left for it."""
        config, verdict = self.context.config, ended.verdict
        probe = ended.probe
        if probe is not None and not probe.trouble:
            allocation = allocation.with_lost(probe.unfit)
        situation = assess(self.context, allocation, verdict, ended)
        action = decide(verdict, self._history(), situation, config)
        doubtful = probe.doubtful if probe is not None else ()
        return allocation.avoiding({*action.exclude, *doubtful}), action

    def _history(self) -> History:
        window_seconds = self.context.config.storm_window_seconds
        return history(self.context.ledger.events(), window_seconds)

    def _why_not_now(self, outlook: Outlook | None) -> Action | None:
        """Too little time is left for a launch: the next attempt has more.

        An attempt that has not launched anything counts as one that met its time limit, so that a
        limit that is too short for any launch is named in the end.
        """
        verdict = why_no_launch(self.context, outlook)
        if verdict is None:
            return None
        if self.launcher.launches == 0:
            self.launcher.note_not_begun(verdict)
        situation = assess(self.context, allocation_of(self.context), verdict)
        return decide(verdict, self._history(), situation, self.context.config)

    def _pause(self, delay_seconds: float) -> None:
        """Wait before a relaunch, but not once a signal has come or somebody asks."""
        deadline = time.monotonic() + delay_seconds
        while time.monotonic() < deadline and not self.context.signals.names:
            if requested(self.context.run_layout) is not None:
                break
            time.sleep(0.1)

    def _why_not_again(self) -> Action | None:
        """A supervisor that outlived its attempt must not take the run from its successor."""
        if self.context.signals.final:
            facts = job_facts(self.context, patient=False)
            if facts is None or facts.state != "RUNNING":
                return Action(ActionKind.LEAVE, "the job is being ended", STOPPED_EXIT_CODE)
            reason = f"signal {self.context.signals.names[-1]}, which did not come from Slurm"
            return Action(ActionKind.STOP, f"the supervisor got {reason}", STOPPED_EXIT_CODE)
        if current_epoch(self.context.run_layout.epochs) > self.launcher.epoch:
            return Action(ActionKind.LEAVE, "a newer launch of this run has taken over")
        wish = requested(self.context.run_layout)
        return self._as_wished(wish) if wish is not None else None


class _Worker(threading.Thread):
    """Does the work, and keeps how it ended for whoever waits."""

    def __init__(self, work: Callable[[], int]) -> None:
        super().__init__(name="supervisor")
        self._work = work
        self._code: int | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._code = self._work()
        except BaseException as error:
            self._error = error

    def result(self) -> int:
        """The exit code. Raises what the work has raised."""
        if self._error is not None:
            raise self._error
        assert self._code is not None, "asked before it has ended"
        return self._code


def read_supervise_config(path: Path) -> SuperviseConfig:
    """The supervisor's own file. Raises InvalidInputError when it cannot be read."""
    try:
        return SuperviseConfig.model_validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a supervise.json"
        problem = Problem(f"cannot be read: {reason}", str(path))
        raise InvalidInputError([problem]) from error
