"""Supervise one attempt inside its job: launch, watch, judge and act until the attempt is over.

The ledger records every action before it is carried out. Belongs here: the order of these steps,
and what keeps an attempt from beginning or going on.
Does not belong here: one launch (`srun_launch`), interpreting evidence (`judge.classify`), choosing
an action (`judge.policy`), carrying it out (`act.execute`).
"""

from __future__ import annotations

import contextlib
import signal
import threading
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

from hpctrain.base import clock
from hpctrain.base.durable import FULL_ERRNOS
from hpctrain.base.errors import SlurmError, StorageError
from hpctrain.judge.causes import FINAL_CAUSES, Cause
from hpctrain.judge.classify import classify
from hpctrain.judge.documents import (
    Action,
    ActionKind,
    History,
    Situation,
    Verdict,
)
from hpctrain.judge.job_end import why_ended
from hpctrain.judge.launch_history import history
from hpctrain.judge.launch_nodes import (
    Allocation,
    NodePlacement,
    Placement,
    details,
    place,
    summary,
)
from hpctrain.judge.policy import RETRIES, STOPPED_EXIT_CODE, decide
from hpctrain.notify.delivery import Sender, deliver, sender_name
from hpctrain.records.epochs import is_superseded
from hpctrain.records.jobs import awaited_run, generation
from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import BufferedLedger, Event, EventKind, Ledger
from hpctrain.records.requests import Request, read_request
from hpctrain.records.run_jobs import identity_of
from hpctrain.records.supervise_config import read_supervise_config
from hpctrain.slurm.client import SlurmClient
from hpctrain.slurm.states import JobState
from hpctrain.supervise.act.execute import act
from hpctrain.supervise.act.successor import adopt_own_job, ensure_successor, must_leave, requeue
from hpctrain.supervise.context import (
    AttemptContext,
    attempt_from,
    log_message,
    unfinished_attempt,
    why_lost,
)
from hpctrain.supervise.decision_inputs import allocation_of, assess, blame_lost_attempt
from hpctrain.supervise.evaluation_jobs import EvaluationThread
from hpctrain.supervise.evidence.gather import (
    Prober,
    Traces,
    between_launches,
    examine_failure,
    newest_logged_step,
    probe_job,
)
from hpctrain.supervise.evidence.slurm_facts import (
    gone_nodes,
    job_facts,
    leaves_of,
    still_ours,
    use_up_step_ids,
)
from hpctrain.supervise.side_processes import SideProcesses
from hpctrain.supervise.srun_launch import Ended, TrainerLauncher
from hpctrain.supervise.srun_process import Signals
from hpctrain.supervise.time_limit import JobTimeLimit, query_time_limit, too_late_for_launch
from hpctrain.supervise.timeouts import retry_while_storage_fails, run_with_timeout

_SLURM_TIMEOUT_SECONDS = 8.0
# Pause between two storage faults, when the second interrupts the handling of the first.
_FAULT_PAUSE_SECONDS = 1.0
# A pass over evaluation jobs may ask for all jobs of the user.
_POLLS_PER_EVALUATION_PASS = 3


class Supervisor:
    """Owns the `srun` of one attempt."""

    def __init__(
        self,
        directory: Path,
        argv: list[str],
        environment: Mapping[str, str],
        slurm: SlurmClient | None = None,
        prober: Prober = probe_job,
    ) -> None:
        run_layout = RunLayout(directory.resolve())
        config = read_supervise_config(run_layout.supervise_config)
        self.context = AttemptContext(
            run_layout=run_layout,
            config=config,
            attempt=attempt_from(environment),
            ledger=BufferedLedger(run_layout),
            slurm=slurm or SlurmClient(timeout_seconds=_SLURM_TIMEOUT_SECONDS, shielded=True),
            signals=Signals(),
        )
        self.notices = NoticeSender(self.context, environment)
        self.launcher = TrainerLauncher(self.context, argv, environment, prober)
        self.prober = prober
        self.guard = Guard(self.context)
        self._beside = SideProcesses(self.context, environment)
        # A client of its own: its calls may wait for Slurm while the supervisor asks it, too.
        client = slurm or SlurmClient(timeout_seconds=_SLURM_TIMEOUT_SECONDS, shielded=True)
        pause_seconds = _POLLS_PER_EVALUATION_PASS * self.context.config.poll_seconds
        self.evaluations = EvaluationThread(
            run_layout, client, pause_seconds, cluster=self.context.attempt.cluster
        )
        self._identity = identity_of(run_layout.directory)
        self._begun = self._opened = False
        self._lost: tuple[Event, Verdict] | None = None
        self._placed: NodePlacement | None = None

    def run(self) -> int:
        """Supervise this attempt to its end and return the exit code of the job.

        The work runs in a thread, because a hung file system blocks whoever reads from it. The main
        thread stays free to receive signals (see `Guard`).
        """
        self.context.signals.install()
        code: Future[int] = Future()

        def work() -> None:
            try:
                code.set_result(self._work())
            except BaseException as error:
                code.set_exception(error)

        worker = threading.Thread(target=work, name="supervisor")
        self.notices.start()
        worker.start()
        self.evaluations.start()
        self.guard.wait_for(worker)
        self.notices.close()
        self.evaluations.stop(last_pass=not self.context.signals.final)
        return code.result()

    def _work(self) -> int:
        try:
            code = self._supervise()
        except Exception as error:
            # A bug of ours proves nothing about the run: the next attempt may get past it.
            traceback.print_exc()
            verdict = Verdict(
                Cause.SUPERVISOR_LOST,
                f"the supervisor itself failed: {type(error).__name__}: {error}",
            )
            self._note_end(verdict)
            situation = Situation(restarts=self.context.attempt.restart_count, keeps_nodes=False)
            action = decide(verdict, self._history(), situation, self.context.config)
            code = act(self.context, action)
        ledger = self.context.ledger
        ledger.write_on()

        def flush() -> None:
            error = ledger.flush()
            if error is not None:
                raise error

        with contextlib.suppress(OSError):
            retry_while_storage_fails(self.context, flush)
        for line in ledger.waiting:
            log_message(f"not in the ledger: {line}")
        self._beside.finish()
        return code

    def _supervise(self) -> int:
        """Launch until an action ends the attempt; a storage fault counts as a failed launch."""
        allocation, ended = allocation_of(self.context), None
        located = False
        while True:
            try:
                if ended is None and not self._begun:
                    action = self._begin()
                    if action is not None:
                        return act(self.context, action)
                    self._begun = True
                    self._beside.start()
                    failed = self.launcher.commands.run_for_job()
                    if failed is not None:
                        self._note_end(failed)
                        ended = Ended(failed)
                if ended is None:
                    time_limit = query_time_limit(self.context)
                    forbidden = self._too_late_to_launch(time_limit)
                    if forbidden is not None:
                        return act(self.context, forbidden)
                    if not located:
                        nodes, environment = allocation.nodes, self.launcher.environment
                        leaves = leaves_of(self.context, nodes, environment)
                        allocation, located = replace(allocation, leaves=leaves), True
                    placement = place(self.context.config, allocation)
                    if placement is None:
                        reason = (
                            f"{len(allocation.healthy)} of {len(allocation.nodes)} nodes answer"
                        )
                        ended = Ended(Verdict(Cause.NODE_FAILURE, reason))
                    else:
                        self._note_placement(placement)
                        # Slurm lists the step of a lost node until it gives the node up.
                        placement = replace(placement, overlap=bool(allocation.lost))
                        ended = self.launcher.launch(placement, allocation.nodes, time_limit)
                allocation, action = self._decide(allocation, ended)
                exit_code = act(self.context, action, ended.verdict)
            except OSError as error:
                cause = Cause.DISK_FULL if error.errno in FULL_ERRNOS else Cause.STORAGE
                verdict = Verdict(cause, f"the run directory cannot be used: {error}")
                self._note_end(verdict)
                ended = Ended(verdict)
                clock.sleep(_FAULT_PAUSE_SECONDS)
                continue
            if action.kind is not ActionKind.RELAUNCH:
                return exit_code
            deadline = clock.monotonic() + action.delay_seconds
            while clock.monotonic() < deadline and not self.context.signals.standing:
                if self._request() is not None:
                    break
                clock.sleep(0.1)
            ended = self._interrupted(allocation)

    def _note_placement(self, placement: Placement) -> None:
        """Record where the nodes of a launch are, whenever that has changed."""
        topology, found = self.context.config.topology, placement.leaves
        if topology is None or found is None or found == self._placed:
            return
        self._placed = found
        self.context.note(
            EventKind.PLACED,
            reason=(words := summary(topology, found)),
            evidence=details(topology, found),
            groups_outside=found.outside,
        )
        log_message(words)

    def _note_end(self, verdict: Verdict) -> None:
        """Record an end that no launch has recorded itself."""
        self.context.note(
            EventKind.LAUNCH_ENDED,
            epoch=self.launcher.epoch or None,
            launch=self.launcher.launches or None,
            cause=verdict.cause,
            reason=verdict.reason,
        )
        log_message(f"{verdict.cause}: {verdict.reason}")

    # -- before the first launch -----------------------------------------------------------

    def _begin(self) -> Action | None:
        """Open the attempt; return the action to take instead of launching, if there is one.

        Can be called again after an OSError.
        """
        context = self.context
        context.run_layout.require()
        reason = None if context.run_layout.done.exists() else must_leave(context)
        if reason is not None:
            return Action(ActionKind.LEAVE, reason)
        if not self._opened:
            adopt_own_job(context)
            events = context.ledger.events()
            lost = unfinished_attempt(events, context.attempt)
            if lost is not None:
                self._lost = lost, self._close_lost_attempt(lost, events)
            attempt = context.attempt
            context.note(EventKind.ATTEMPT_STARTED, nodes=attempt.nodes, cluster=attempt.cluster)
            self._opened = True
            log_message(f"attempt {attempt} of run {context.config.run_id} on {attempt.nodes}")
        action = self._instead_of_first_launch()
        if action is None:
            ensure_successor(context)
            use_up_step_ids(context, self.launcher.environment)
        return action

    def _close_lost_attempt(self, lost: Event, events: list[Event]) -> Verdict:
        """Record the end of an attempt whose supervisor recorded none, and blame its nodes.

        Slurm may still know how another job ended. If it was our own job, we are its next attempt.
        """
        context = self.context
        gone = gone_nodes(context, lost, events)
        end = None
        if lost.job_id is not None and lost.job_id != context.job_id:
            with contextlib.suppress(SlurmError):
                record = context.slurm.jobs([lost.job_id]).get(lost.job_id)
                own = record is not None and lost.cluster in (None, record.cluster)
                if record is not None and own and self._identity.confirms(record):
                    end = why_ended(record, begun=True)
        cause, reason = end or why_lost(lost, events, context.attempt, gone)
        context.ledger.append(
            EventKind.ATTEMPT_LOST,
            job_id=lost.job_id,
            restart_count=lost.restart_count,
            cause=cause,
            reason=reason,
        )
        verdict = Verdict(cause, reason)
        blame_lost_attempt(context, lost, verdict, gone)
        return verdict

    def _instead_of_first_launch(self) -> Action | None:
        """Return what to do instead of the first launch, if a launch is not wanted.

        The run may be done, a person may have requested a stop, the run may have been stopped and
        not resumed since, it may wait for a run that is not done, or attempts may be lost
        repeatedly without a new checkpoint.
        """
        context = self.context
        if context.run_layout.done.exists():
            return Action(ActionKind.FINISH, "the run was done before this attempt")
        request = read_request(context.run_layout)
        if request is not None:
            verdict = _yielded(request)
            verdict = replace(verdict, reason=f"{verdict.reason} before this attempt")
            situation = assess(context, allocation_of(context), verdict)
            return decide(verdict, self._history(), situation, context.config)
        instead = stop_of_restarted_job(context) or wait_for_unfinished_run(context)
        if instead is not None:
            return instead
        if self._lost is not None:
            start, verdict = self._lost
            situation = assess(context, allocation_of(context), verdict)
            action = decide(verdict, self._history(), situation, context.config)
            # A person who submits again overrules what ended an earlier job for good.
            resubmitted = start not in generation(context.ledger.events())
            if action.kind is ActionKind.STOP and not (
                resubmitted and verdict.cause in FINAL_CAUSES
            ):
                return action
        return None

    # -- launch after launch ---------------------------------------------------------------

    def _decide(self, allocation: Allocation, ended: Ended) -> tuple[Allocation, Action]:
        """Choose the next action and the nodes that remain for it."""
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
        """Summarise the ledger; only this attempt's own events if it was never readable."""
        try:
            events = self.context.ledger.events()
        except OSError:
            events = self.context.ledger.waiting_events()
        return history(events, self.context.config.storm_window_seconds)

    # -- between two launches --------------------------------------------------------------

    def _too_late_to_launch(self, time_limit: JobTimeLimit | None) -> Action | None:
        """Return the action if too little time is left for a launch; the next attempt has more.

        An attempt that launched nothing counts as one that reached its time limit, so that a limit
        too short for any launch is reported in the end.
        """
        verdict = too_late_for_launch(self.context, time_limit)
        if verdict is None:
            return None
        if self.launcher.launches == 0:
            self._note_end(verdict)
        situation = assess(self.context, allocation_of(self.context), verdict)
        return decide(verdict, self._history(), situation, self.context.config)

    def _request(self) -> Request | None:
        try:
            return read_request(self.context.run_layout)
        except OSError:
            return None  # the next launch finds out

    def _interrupted(self, allocation: Allocation) -> Ended | None:
        """Return an end if a signal, a newer launch or a request arrived between two launches.

        A supervisor that outlived its attempt must not take the run from its successor.
        """
        context = self.context
        signals, count = context.signals.take(), len(context.signals.names)
        for name in signals:
            context.note(EventKind.SIGNAL, signal=name)
        if context.signals.final:
            evidence, probe = between_launches(context, signals), None
            if still_ours(context, evidence.job):
                # Slurm did not send the signal: ask the nodes.
                context.signals.dismiss(count)
                traces = Traces(clock.now(), newest_logged_step(context))
                nodes = allocation.nodes
                examined = examine_failure(context, evidence, nodes, traces, self.prober)
                evidence, probe = examined.evidence, examined.probe
            verdict = classify(evidence)
            log_message(f"{verdict.cause}: {verdict.reason}")
            return Ended(verdict, evidence, probe)
        try:
            if is_superseded(context.run_layout.epochs, self.launcher.epoch, self.launcher.name):
                reason = "a newer launch of this run has taken over"
                return Ended(Verdict(Cause.SUPERSEDED, reason))
        except OSError:
            return None  # the next launch finds out
        request = self._request()
        return Ended(_yielded(request)) if request is not None else None


def _yielded(request: Request) -> Verdict:
    """The verdict on a launch that a person's request has ended or prevented."""
    reason = f"asked to {request.kind} by {request.by}"
    return Verdict(Cause.YIELDED, reason, hold=request.kind == "hold")


# -- Keep a run that waits for another one (`after`) from beginning before that is done ---------
# Slurm starts its job when the job of the other has ended well (`afterok`). A job ends well, too,
# when a person has stopped its run, or when it leaves the run to a newer launch. Only the marker of
# the other run tells whether that is done.


def wait_for_unfinished_run(context: AttemptContext) -> Action | None:
    """Return the action that puts this run back, if the run that it waits for is not done.

    The job is held in the queue: the next submission of the other run makes it wait for that, and
    releases it. Where jobs are not requeued, the run stops. Raises OSError.
    """
    name = awaited_run(context.ledger.events())
    if name is None:
        return None
    awaited = RunLayout(context.run_layout.directory.with_name(name))
    if awaited.done.exists():
        return None
    if not awaited.directory.exists():
        reason = f"run `{name}`, for which this one has waited, was removed: Slurm's word counts"
        context.note(EventKind.OBSERVED, reason=reason)
        log_message(reason)
        return None
    own = context.config.run_id
    context.note(EventKind.OBSERVED, after_run=name, reason=f"began before run `{name}` was done")
    without = f"`hpctrain resume {own}` begins this one without it"
    if context.config.continuation != "requeue":
        reason = f"run `{name}`, for which this one waits, is not done; {without}"
        return Action(ActionKind.STOP, reason, STOPPED_EXIT_CODE)
    reason = (
        f"run `{name}`, for which this one waits, is not done: `hpctrain resume {name}` goes on "
        f"with it, and this one begins when that is done; {without}"
    )
    return Action(ActionKind.HOLD, reason)


# -- Distinguish a restart by Slurm from one by a person, for a job that has stopped its run ----
# From Slurm 24.05 on, a job that exits within its grace period is requeued whatever its exit code.
# The supervisor forbids that before it exits (`act.execute`). If Slurm did not get that, the next
# start must not continue the run. A person continues a run with `hpctrain resume`, by submitting
# the script again (another job), or by a later requeue.


# Slurm requeues a job when its last process is gone, and notes that time as its submission: epilog
# and messages take seconds, clocks of nodes and controller may differ (munge allows 300 s).
_ENDING_SECONDS = 120.0


def stop_of_restarted_job(context: AttemptContext) -> Action | None:
    """Return the stop that still holds, if no person has requested this attempt.

    A requeue long after the stop was a person's. If its time is unknown, the stop holds: it is in
    the ledger, and `hpctrain resume` overrides it.
    """
    stop = standing_stop(context.ledger.events(), context.job_id, context.attempt.restart_count)
    if stop is None:
        return None
    requeued_time = None  # seconds since the epoch
    with contextlib.suppress(SlurmError):
        job = context.slurm.jobs([context.job_id]).get(context.job_id)
        requeued_time = job.submit_time if job is not None else None
    limit_seconds = context.config.kill_wait_seconds + _ENDING_SECONDS
    if requeued_time is not None and requeued_time - stop.time > limit_seconds:
        minutes = (requeued_time - stop.time) / 60
        reason = f"requeued {minutes:.0f} min after it was stopped, so a person has continued it"
        context.note(EventKind.OBSERVED, reason=reason)
        log_message(reason)
        return None
    reason = f"stopped before ({stop.reason}), and nobody has resumed it: `hpctrain resume` does"
    return Action(ActionKind.STOP, reason, STOPPED_EXIT_CODE)


def standing_stop(events: Sequence[Event], job_id: int, restart_count: int) -> Event | None:
    """Find the stop that an earlier attempt of this job has recorded.

    None if a person has submitted or resumed the run since.
    """
    for event in reversed(generation(events) or list(events)):
        if event.event is EventKind.CONTROL and event.action == "resume":
            return None
        this_attempt = (event.job_id, event.restart_count) == (job_id, restart_count)
        if event.event is EventKind.ATTEMPT_STARTED and not this_attempt:
            return None
        if event.event is EventKind.ACTION and event.job_id == job_id:
            return event if event.action == ActionKind.STOP else None
    return None


# -- Requeue the job when the file system blocks the supervisor while Slurm is ending the job ---
# The supervisor works in a thread of its own; the main thread only receives signals and runs this
# guard. Once a signal has announced the end of the job, the guard checks whether the run directory
# still answers. If it does not, the trainer cannot save and the supervisor cannot read or write.
# What remains is to requeue the job while Slurm still accepts it, so that the run resumes from its
# newest checkpoint. The ledger cannot record this; the next attempt finds this one unfinished and
# records it.


_CHECK_SECONDS = 0.2
# A warning comes minutes ahead of the end, so a file system may still come back; after TERM there
# are only seconds (slurm.conf(5), KillWait: 30).
_AFTER_WARNING_SECONDS = 60.0
_AFTER_TERM_SECONDS = 10.0
_LOG_SECONDS = 2.0
_LAST_CHANCE_SECONDS = 0.5
_MESSAGE = "the run directory does not answer while the job is being ended: requeueing"


class FileSystemCheck:
    """Opens a file in a thread that may never return, to see whether the file system answers."""

    def __init__(self, path: Path, touch: Callable[[Path], None] | None = None) -> None:
        self._path = path
        # open(2) asks the server even for cached attributes (nfs(5)).
        self._touch = touch or (lambda path: path.open("rb", buffering=0).close())
        self._thread: threading.Thread | None = None
        self._began_at = 0.0

    def silent_seconds(self) -> float:
        """For how long the file system has not answered; 0 when the last check has ended."""
        if self._thread is not None:
            # on a machine that was suspended the check may not have run since it began
            self._thread.join(_LAST_CHANCE_SECONDS)
            if self._thread.is_alive():
                return clock.monotonic() - self._began_at

        def check() -> None:
            with contextlib.suppress(OSError):  # an error is an answer
                self._touch(self._path)

        self._began_at = clock.monotonic()
        self._thread = threading.Thread(target=check, daemon=True, name="file-system-check")
        self._thread.start()
        return 0.0


class Guard:
    """Watches the supervisor's own thread."""

    def __init__(self, context: AttemptContext, check: FileSystemCheck | None = None) -> None:
        self._context = context
        self._check = check or FileSystemCheck(context.run_layout.ledger)
        self._acted = False

    def wait_for(self, worker: threading.Thread) -> None:
        """Return when the supervisor's thread has ended."""
        context, signals = self._context, self._context.signals
        while worker.is_alive():
            worker.join(_CHECK_SECONDS)
            if not signals.names or self._acted or not worker.is_alive():
                continue
            patience = _AFTER_TERM_SECONDS if signals.final else _AFTER_WARNING_SECONDS
            if self._check.silent_seconds() >= patience:
                self._acted = True
                if context.config.continuation != "requeue":
                    continue  # its successor is in the queue already
                facts = job_facts(context, patient=False)
                if facts is None or facts.state is not JobState.RUNNING:
                    continue  # a job that a person has cancelled must not come back
                run_with_timeout(lambda: log_message(_MESSAGE), _LOG_SECONDS)
                requeue(context.slurm, context.job_id)


# -- Wait for the file of the supervisor's settings, or end the job without it ------------------


# As often and as long as the policy tries again after a fault of storage.
_TRIES = RETRIES[Cause.STORAGE] + 1
_PAUSE_SECONDS = 30.0


def wait_for_settings(path: Path, signals: Collection[signal.Signals]) -> bool:
    """Wait until the file can be read, as at submit time; False if that takes too long.

    `signals` are blocked. A signal that arrives ends the waiting: the job may be about to end.
    """
    for tries_left in reversed(range(_TRIES)):
        try:
            read_supervise_config(path)
        except StorageError as error:
            log_message(f"storage: {error}; {tries_left} more tries, {_PAUSE_SECONDS:.0f} s apart")
            if signal.sigtimedwait(signals, _PAUSE_SECONDS if tries_left else 0) is not None:
                return False
        else:
            return True
    return False


def end_without_settings(environment: Mapping[str, str], slurm: SlurmClient) -> int:
    """End a job that cannot read its settings; return its exit code.

    Other nodes may reach the run directory. Slurm takes a requeue only of a job that was submitted
    with one (sbatch(1), --requeue), and its own count of starts is the budget. A job that Slurm
    does not list as running is left alone: it may be cancelled.
    """
    attempt = attempt_from(environment)
    if attempt.restart_count >= RETRIES[Cause.STORAGE]:
        log_message(
            f"stop: started {attempt.restart_count + 1} times without reaching the run directory"
        )
        return STOPPED_EXIT_CODE
    try:
        job = slurm.jobs([attempt.job_id]).get(attempt.job_id)
    except SlurmError:
        job = None
    if job is None or not job.state.is_running:
        log_message("stop: the run directory is away, and Slurm does not list the job as running")
        return STOPPED_EXIT_CODE
    answer = slurm.requeue(attempt.job_id)
    log_message(f"requeue: {answer.result.value}: other nodes may reach the run directory")
    return 0 if answer.will_run_again else STOPPED_EXIT_CODE


# -- Tell people about this run from inside its job, in a thread that nothing waits for ---------
# The supervisor writes an event into the ledger and continues; this thread reads the ledger and
# sends (`hpctrain.notify.delivery`). A webhook that hangs, or a node without a network, delays
# neither a requeue nor a launch. What could not be sent is sent by `hpctrain watch --act`.


# For how long an ending job waits for its last message: longer than one channel takes. The nodes
# are idle meanwhile, so not for long.
CLOSE_SECONDS = 15.0
# ... and where Slurm ends the job and kills what is left of it (slurm.conf(5), KillWait).
_HURRIED_SECONDS = 2.0


class NoticeSender:
    """Sends the notices of one attempt; does nothing where the run tells nobody.

    `environment` is that of the job.
    """

    def __init__(self, context: AttemptContext, environment: Mapping[str, str]) -> None:
        self._context = context
        self._sender = Sender(sender_name(f"job {context.job_id}"), dict(environment), told=set())
        self._ledger = Ledger(context.run_layout.ledger)
        self._read: list[Event] = []
        self._wake, self._closing = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        if context.config.notify is not None:
            self._thread = threading.Thread(target=self._work, daemon=True, name="notices")
            context.ledger.listener = self._wake.set

    def start(self) -> None:
        if self._thread is not None:
            self._thread.start()

    def close(self) -> None:
        """Make a last pass, and wait for it for a few seconds."""
        if self._thread is None or self._thread.ident is None:
            return
        self._closing.set()
        self._wake.set()
        ends = self._context.signals.final
        self._thread.join(_HURRIED_SECONDS if ends else CLOSE_SECONDS)

    def _work(self) -> None:
        next_time: float | None = None
        while True:
            clock.wait(self._wake, None if next_time is None else max(0.0, next_time - clock.now()))
            self._wake.clear()
            # In this order: a `close` in between is then seen here or wakes the next wait.
            closing = self._closing.is_set()
            next_time = self._pass()
            if closing:
                return

    def _pass(self) -> float | None:
        """Send what is due; return when to look again. A problem is logged and ends nothing."""
        context = self._context
        try:
            delivery = deliver(
                context.run_layout, context.config, self._events(), self._sender, clock.now()
            )
        except Exception as error:  # whatever it is, the run goes on; texts may contain anything
            log_message(f"nobody was told: {type(error).__name__}")
            return None
        for one in delivery.results:
            told = ", ".join(one.kinds)
            outcome = "told" if one.problem is None else f"NOT told: {one.problem}"
            log_message(f"{one.channel}: {told}: {outcome}")
        return delivery.next_time

    def _events(self) -> list[Event]:
        """What is in the file, where `hpctrain watch` reads the same, and what waits to be there.

        Of a run that ends because its disk is full or away the file does not have the end.
        """
        waiting = self._context.ledger.waiting_events()
        with contextlib.suppress(OSError):
            self._read = self._ledger.events() or self._read
        return [*self._read, *(event for event in waiting if event not in self._read)]
