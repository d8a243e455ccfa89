"""The supervisor inside the job: launch, watch, judge, act, until the attempt is over.

Every action is in the ledger before it is taken. Belongs here: the order of things. Does not
belong here: one launch (`launching`), reading evidence (`classify`), choosing (`policy`), doing
(`execute`), what the run directory looks like (`hpctrain.store`), or how Slurm is spoken to
(`hpctrain.slurm`).
"""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from hpctrain.durable import FULL_ERRNOS
from hpctrain.errors import SlurmError
from hpctrain.slurm.client import SlurmClient
from hpctrain.store.epochs import is_superseded
from hpctrain.store.jobs import generation
from hpctrain.store.layout import RunLayout
from hpctrain.store.ledger import BufferedLedger, Event, EventKind
from hpctrain.store.requests import Request, read_request
from hpctrain.store.supervise_config import read_supervise_config
from hpctrain.supervise.act.execute import act
from hpctrain.supervise.act.successor import adopt_own_job, ensure_successor, must_leave
from hpctrain.supervise.attempt import attempt_from, unfinished_attempt, why_lost
from hpctrain.supervise.context import AttemptContext, say
from hpctrain.supervise.decision_inputs import allocation_of, assess, blame_lost_attempt
from hpctrain.supervise.evidence.gather import between_launches
from hpctrain.supervise.evidence.job_facts import still_ours
from hpctrain.supervise.evidence.lost_nodes import gone_nodes
from hpctrain.supervise.evidence.postmortem import (
    Prober,
    Traces,
    ask_nodes,
    examine,
    newest_logged_step,
)
from hpctrain.supervise.judge.causes import FINAL_CAUSES, Cause
from hpctrain.supervise.judge.classify import classify
from hpctrain.supervise.judge.documents import (
    Action,
    ActionKind,
    Evidence,
    History,
    Situation,
    Verdict,
)
from hpctrain.supervise.judge.launch_history import history
from hpctrain.supervise.judge.launch_nodes import Allocation, place
from hpctrain.supervise.judge.lost_attempts import why_ended
from hpctrain.supervise.judge.policy import decide
from hpctrain.supervise.launching import Ended, Launcher
from hpctrain.supervise.restarted_job import came_back
from hpctrain.supervise.run_jobs import identity_of
from hpctrain.supervise.srun_process import Signals
from hpctrain.supervise.step_ids import use_up_step_ids
from hpctrain.supervise.storage_retry import outlast
from hpctrain.supervise.termination_guard import Guard
from hpctrain.supervise.time_limit import Outlook, look_ahead, why_no_launch

_SLURM_TIMEOUT_SECONDS = 8.0
# Between two faults of storage of which the second came before anything was done about the first.
_FAULT_PAUSE_SECONDS = 1.0


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
            ledger=BufferedLedger(run_layout),
            slurm=slurm or SlurmClient(timeout_seconds=_SLURM_TIMEOUT_SECONDS, shielded=True),
            signals=Signals(),
        )
        self.launcher = Launcher(self.context, argv, environment, ask)
        self.ask_nodes = ask
        self.guard = Guard(self.context)
        self._identity = identity_of(run_layout.directory)
        self._begun = self._opened = False
        self._lost: tuple[Event, Verdict] | None = None

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
            code = self._supervise()
        except Exception as error:
            traceback.print_exc()
            code = self._failed(error)
        self._last_words()
        return code

    def _failed(self, error: Exception) -> int:
        """A mistake of ours proves nothing about the run: the next attempt may get past it."""
        reason = f"the supervisor itself failed: {type(error).__name__}: {error}"
        verdict = Verdict(Cause.SUPERVISOR_LOST, reason)
        self._note_end(verdict)
        situation = replace(self._plain_situation(), keeps_nodes=False)
        return act(self.context, decide(verdict, self._history(), situation, self.context.config))

    def _last_words(self) -> None:
        """What the ledger could not take is at least in the job's log."""
        context = self.context
        with contextlib.suppress(OSError):
            outlast(context, self._flush)
        for line in context.ledger.waiting:
            say(f"not in the ledger: {line}")

    def _flush(self) -> None:
        error = self.context.ledger.flush()
        if error is not None:
            raise error

    def _supervise(self) -> int:
        """Launch after launch. Whatever fails by a fault of storage is an end like others."""
        allocation, ended = allocation_of(self.context), None
        while True:
            try:
                if ended is None and not self._begun:
                    action = self._begin()
                    if action is not None:
                        return act(self.context, action)
                    self._begun = True
                if ended is None:
                    outlook = look_ahead(self.context)
                    forbidden = self._why_not_now(outlook)
                    if forbidden is not None:
                        return act(self.context, forbidden)
                    ended = self._launch(allocation, outlook)
                allocation, action = self._decide(allocation, ended)
                exit_code = act(self.context, action, ended.verdict)
            except OSError as error:
                ended = self._end_by_storage(error)
                time.sleep(_FAULT_PAUSE_SECONDS)
                continue
            if action.kind is not ActionKind.RELAUNCH:
                return exit_code
            self._pause(action.delay_seconds)
            ended = self._interrupted(allocation)

    def _end_by_storage(self, error: OSError) -> Ended:
        cause = Cause.DISK_FULL if error.errno in FULL_ERRNOS else Cause.STORAGE
        verdict = Verdict(cause, f"the run directory cannot be used: {error}")
        self._note_end(verdict)
        return Ended(verdict)

    def _note_end(self, verdict: Verdict) -> None:
        """An end that no launch has noted itself."""
        self.context.note(
            EventKind.LAUNCH_ENDED,
            epoch=self.launcher.epoch or None,
            launch=self.launcher.launches or None,
            cause=verdict.cause,
            reason=verdict.reason,
        )
        say(f"{verdict.cause}: {verdict.reason}")

    # -- before the first launch -----------------------------------------------------------

    def _begin(self) -> Action | None:
        """Open the attempt; what is done instead of launching, if so. Can be called again after an
        OSError."""
        context = self.context
        context.run_layout.require()
        words = None if context.run_layout.done.exists() else must_leave(context)
        if words is not None:
            return Action(ActionKind.LEAVE, words)
        if not self._opened:
            adopt_own_job(context)
            self._open_attempt()
        action = self._why_not_begin()
        if action is None:
            ensure_successor(context)
            use_up_step_ids(context, self.launcher.environment)
        return action

    def _open_attempt(self) -> None:
        """Open this attempt in the ledger, and close one that has left no word."""
        events = self.context.ledger.events()
        lost = unfinished_attempt(events, self.context.attempt)
        if lost is not None:
            self._lost = lost, self._close_lost(lost, events)
        attempt = self.context.attempt
        self.context.note(EventKind.ATTEMPT_STARTED, nodes=attempt.nodes, cluster=attempt.cluster)
        self._opened = True
        say(f"attempt {attempt} of run {self.context.config.run_id} on {attempt.nodes}")

    def _close_lost(self, lost: Event, events: list[Event]) -> Verdict:
        gone = gone_nodes(self.context, lost, events)
        cause, reason = self._why_lost(lost, events, gone)
        self.context.ledger.append(
            EventKind.ATTEMPT_LOST,
            job_id=lost.job_id,
            restart_count=lost.restart_count,
            cause=cause,
            reason=reason,
        )
        verdict = Verdict(cause, reason)
        blame_lost_attempt(self.context, lost, verdict, gone)
        return verdict

    def _why_lost(
        self, lost: Event, events: list[Event], gone: tuple[str, ...]
    ) -> tuple[Cause, str]:
        """Of another job Slurm may still know how it ended; of our own we are the next attempt."""
        context = self.context
        if lost.job_id is not None and lost.job_id != context.job_id:
            with contextlib.suppress(SlurmError):
                record = context.slurm.jobs([lost.job_id]).get(lost.job_id)
                own = record is not None and lost.cluster in (None, record.cluster)
                if record is not None and own and self._identity.confirms(record):
                    found = why_ended(record, begun=True)
                    if found is not None:
                        return found
        return why_lost(lost, events, context.attempt, gone)

    def _why_not_begin(self) -> Action | None:
        """The run is done, a person wants it to stop, it was stopped and nobody has asked for it
        since, or attempts are lost again and again without a new checkpoint."""
        context = self.context
        if context.run_layout.done.exists():
            return Action(ActionKind.FINISH, "the run was done before this attempt")
        wish = read_request(context.run_layout)
        if wish is not None:
            return self._as_wished(wish)
        stopped = came_back(context)
        if stopped is not None:
            return stopped
        if self._lost is not None:
            start, verdict = self._lost
            situation = assess(context, allocation_of(context), verdict)
            action = decide(verdict, self._history(), situation, context.config)
            # A new submission is a person's word against what ended an earlier job for good.
            asked_since = start not in generation(context.ledger.events())
            if action.kind is ActionKind.STOP and not (
                asked_since and verdict.cause in FINAL_CAUSES
            ):
                return action
        return None

    def _as_wished(self, wish: Request) -> Action:
        verdict = _wish(wish)
        verdict = replace(verdict, reason=f"{verdict.reason} before this attempt")
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
            leaving = probe.leaving if verdict.cause is Cause.NODE_FAILURE else ()
            allocation = allocation.with_lost({*probe.unfit, *leaving})
        allocation = allocation.without(verdict.unfit_nodes)
        situation = assess(self.context, allocation, verdict, ended)
        action = decide(verdict, self._history(), situation, config)
        doubtful = probe.doubtful if probe is not None else ()
        return allocation.avoiding({*action.exclude, *doubtful}), action

    def _history(self) -> History:
        """Without a ledger that was ever read, only what this attempt has seen itself counts."""
        try:
            events = self.context.ledger.events()
        except OSError:
            events = self.context.ledger.waiting_events()
        return history(events, self.context.config.storm_window_seconds)

    def _plain_situation(self) -> Situation:
        return Situation(restarts=self.context.attempt.restart_count)

    # -- between two launches --------------------------------------------------------------

    def _why_not_now(self, outlook: Outlook | None) -> Action | None:
        """Too little time is left for a launch: the next attempt has more.

        An attempt that has not launched anything counts as one that met its time limit, so that a
        limit that is too short for any launch is named in the end.
        """
        verdict = why_no_launch(self.context, outlook)
        if verdict is None:
            return None
        if self.launcher.launches == 0:
            self._note_end(verdict)
        situation = assess(self.context, allocation_of(self.context), verdict)
        return decide(verdict, self._history(), situation, self.context.config)

    def _pause(self, delay_seconds: float) -> None:
        """Wait before a relaunch, but not once a signal has come or somebody asks."""
        deadline = time.monotonic() + delay_seconds
        while time.monotonic() < deadline and not self.context.signals.standing:
            if self._request() is not None:
                break
            time.sleep(0.1)

    def _request(self) -> Request | None:
        try:
            return read_request(self.context.run_layout)
        except OSError:
            return None  # the next launch finds out

    def _interrupted(self, allocation: Allocation) -> Ended | None:
        """What has come between, if anything: then it is decided again what to do.

        A supervisor that outlived its attempt must not take the run from its successor.
        """
        context = self.context
        signals, count = context.signals.take(), len(context.signals.names)
        for name in signals:
            context.note(EventKind.SIGNAL, signal=name)
        if context.signals.final:
            evidence = between_launches(context, signals)
            return self._after_signal(evidence, count, allocation)
        try:
            if is_superseded(context.run_layout.epochs, self.launcher.epoch, self.launcher.name):
                words = "a newer launch of this run has taken over"
                return Ended(Verdict(Cause.SUPERSEDED, words))
        except OSError:
            return None  # the next launch finds out
        wish = self._request()
        return Ended(_wish(wish)) if wish is not None else None

    def _after_signal(self, evidence: Evidence, count: int, allocation: Allocation) -> Ended:
        """Slurm says why it came, or did not send it: then the nodes are asked."""
        probe = None
        if still_ours(self.context, evidence.job):
            self.context.signals.dismiss(count)
            traces = Traces(time.time(), newest_logged_step(self.context))
            nodes = allocation.nodes
            asked = examine(self.context, evidence, nodes, traces, self.ask_nodes)
            evidence, probe = asked.evidence, asked.probe
        verdict = classify(evidence)
        say(f"{verdict.cause}: {verdict.reason}")
        return Ended(verdict, evidence, probe)


def _wish(wish: Request) -> Verdict:
    words = f"asked to {wish.kind} by {wish.by}"
    return Verdict(Cause.YIELDED, words, hold=wish.kind == "hold")


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
