"""Watch one launch: signals, requests, stalls, first failures, newer launches of the same run.

Ends the step when it must, and only then. A query that fails means "unknown" and has no
consequence. Neither a hung file system nor a hung controller delays the handling of signals.
Belongs here: waiting. Does not belong here: the verdict, how long silence may last
(`judge.silence_limits`), reading files (`run_dir_snapshot`, `stack_inquiry`), what stacks mean
(`judge.odd_stacks`).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpctrain.base import clock
from hpctrain.base.errors import InvalidInputError
from hpctrain.engines.train_json import train_config_of
from hpctrain.judge import slow_nodes
from hpctrain.judge.documents import JobFacts, Stall
from hpctrain.judge.silence_limits import SilenceMonitor, StallLimits
from hpctrain.judge.slow_nodes import (
    SlowRank,
    StageOf,
    Stragglers,
    one_stage,
)
from hpctrain.records.ledger import EventKind
from hpctrain.records.old_launches import start_packing
from hpctrain.records.requests import Request, ask_trainer_to_leave
from hpctrain.records.run_records import Progress, RankTimes
from hpctrain.records.speed_checks import SpeedCheck
from hpctrain.slurm.client import Backoff
from hpctrain.supervise.context import AttemptContext, log_message
from hpctrain.supervise.evidence.run_dir_snapshot import (
    BackgroundReader,
    RunDirReader,
    RunDirSnapshot,
    past_step_seconds,
)
from hpctrain.supervise.evidence.slurm_facts import OwnSteps, job_facts, still_ours
from hpctrain.supervise.evidence.stack_inquiry import StackInquiry, forget_old_dumps
from hpctrain.supervise.srun_process import SrunProcess
from hpctrain.supervise.time_limit import JobTimeLimit, StopTime
from hpctrain.supervise.timeouts import run_with_timeout

_POLL_SECONDS = 0.2
_READ_SECONDS = 2.0
_RANK_TIMES_SECONDS = 10.0
# A snapshot takes milliseconds. One that takes this long is blocked by the file system.
_BLOCKED_SECONDS = 5.0
# Limit for writing a ledger event or a request to the trainer.
_WRITE_SECONDS = 1.0
# How long the ranks that survive a failed one may take to report what they observed.
_LAST_WORDS_SECONDS = 8.0
# How long a start that is requested to stop may take to end. Ranks exit by themselves after some
# seconds (`hpctrain.train.entry`), unless they are not up yet or run C code. Nothing can be
# lost, because no step has been trained.
_STARTUP_STOP_SECONDS = 20.0
# How long srun may take to notice that all ranks have exited (a dead slurmstepd never reports it).
_LEAVING_SECONDS = 15.0
# Time reserved for the verdict and the requeue out of KillWait: half of it, but no more than a busy
# controller takes to answer once. Ranks that have not exited may continue meanwhile.
_LEAST_VERDICT_SECONDS, _VERDICT_SECONDS = 2.0, 8.0
_FINAL_READING_SECONDS = 0.2
# A storage fault counts as the cause of a launch's end if it happened at most this long before:
# ranks wait for their run directory before they give up, and take some time to report it.
_FAULT_COUNTS_SECONDS = 60.0
# Slow parts in one event of the ledger.
_MOST_SLOW_PARTS = 6
# The last events of the ledger that may record a request.
_RECENT_EVENTS = 50


@dataclass(frozen=True)
class CrossLaunchState:
    """What the launches of one supervisor have in common: learned limits and slow ranks."""

    limits: StallLimits
    stragglers: Stragglers

    @classmethod
    def of(cls, context: AttemptContext) -> CrossLaunchState:
        """Learn limits from the metrics of the run's earlier attempts, if there are any."""
        limits, seconds = StallLimits(context.config), list[float]()
        run = context.run_layout
        if run_with_timeout(lambda: seconds.extend(past_step_seconds(run)), _WRITE_SECONDS):
            limits.relearn(seconds)
        return cls(limits, Stragglers(context.config.slow_rank))


class LaunchWatch:
    """Waits for one launch; its attributes then describe how the launch ended.

    `tasks` is the number of ranks (0: as many as appear). `nodes` are those of the launch in the
    order of its ranks (empty: all of the job). `stage_of` gives a rank's pipeline stage (None: read
    from the trainer's file). `time_limit` is Slurm's latest answer about the time limit.

    Results: `superseded`; `started`; `stall` (with the odd ranks); `slow_ranks`; `signals` received
    meanwhile; `speed_check`, what the ranks have measured before training; `stopped_in_startup`,
    the watch ended a start that was requested to stop; `limit_near`, the time limit is near without
    a warning from Slurm; `step_remains`;
    `storage_stalled_seconds`, how long the run directory did not answer; `storage_fault`, the error
    that kept the watch from reading it at the end; `killed_at`, when the watch began to kill what
    was left of the step (seconds since the epoch).
    """

    def __init__(
        self,
        context: AttemptContext,
        launch: SrunProcess,
        epoch: int,
        resume_step: int = 0,
        *,
        state: CrossLaunchState | None = None,
        tasks: int = 0,
        nodes: Sequence[str] = (),
        stage_of: StageOf | None = None,
        time_limit: JobTimeLimit | None = None,
    ) -> None:
        self.context = context
        self.launch = launch
        self.epoch = epoch
        self.resume_step = resume_step
        self.superseded = self.stopped_in_startup = self.limit_near = False
        self.stall: Stall | None = None
        self.storage_stalled_seconds = 0.0
        self.step_remains = False
        self.killed_at = float("inf")
        self.tasks, self.nodes = tasks, tuple(nodes)
        self._stage_of = stage_of or one_stage
        files = [shape.train_config for shape in context.config.shapes if shape.tasks == tasks]
        if stage_of is None and files:
            path, stages = context.run_layout.directory / files[0], list[StageOf]()
            run_with_timeout(lambda: stages.append(read_pipeline_stages(path)), _WRITE_SECONDS)
            self._stage_of = stages[0] if stages else one_stage
        self._state = state or CrossLaunchState.of(context)
        self._state.stragglers.launched()
        self._steps = OwnSteps(context)
        self._reader = RunDirReader(context.run_layout, epoch)
        now = clock.monotonic()
        self._silence = SilenceMonitor(self._state.limits, resume_step, now)
        self._progress: Progress | None = None
        self._seen_at = now
        self._stalled_before_seconds = 0.0
        self._next_read = self._next_rank_times = now
        self.signals: tuple[str, ...] = ()
        self.speed_check: SpeedCheck | None = None
        self.storage_fault: OSError | None = None
        self._fault_at = -math.inf
        self._slurm_query: _JobFactsQuery | None = None
        self._final_at: float | None = None
        self._failed_at: float | None = None
        self._left_at: float | None = None
        self._stop_requested = self._signal_pending = False
        self._stopping_at: float | None = None
        self._stop_time = StopTime(context, time_limit)
        self._trains_on = False
        self._served_seconds: float | None = None
        self._inquiry = StackInquiry(context, epoch, tasks, nodes, give_up=self._is_ending)

    @property
    def started(self) -> bool:
        """Whether a rank of this launch has written any record."""
        return self._silence.started

    @property
    def slow_ranks(self) -> tuple[SlowRank, ...]:
        """The ranks that were slow when the launch ended."""
        return self._state.stragglers.current

    def wait(self) -> None:
        """Return when srun has ended, or when the rest of the time is needed for the verdict."""
        run = self.context.run_layout

        def flush_and_read(find_saves: bool, rank_times: bool) -> RunDirSnapshot:
            """In the background thread: also write ledger events that had to wait."""
            self.context.ledger.flush()
            return self._reader.read(find_saves, rank_times)

        background = BackgroundReader(flush_and_read)
        run_with_timeout(lambda: forget_old_dumps(run, self.epoch), _WRITE_SECONDS)
        keep = self.context.config.keep_launches
        if keep:
            start_packing(run, keep, self.epoch, log_message)
        while self.launch.poll() is None:
            self._handle_signals()
            # Slurm's warning may have come before this supervisor could receive it.
            warned = "USR1" in self.context.signals.names and not self._trains_on
            if not self.limit_near and not warned and self._stop_time.is_due():
                self.limit_near = True
                self._note_stop_time("the time limit is near")
                self._request_stop("the time limit is near")
            if self._time_is_up() or self._poll_snapshot(background):
                break
            clock.sleep(_POLL_SECONDS)
        background.close()
        last: list[SpeedCheck | None] = []  # of a launch that ended soon after the record
        run_with_timeout(lambda: last.append(self._reader.speed_check()), _WRITE_SECONDS)
        self._record_speed_check(last[0] if last else None)
        if clock.monotonic() - self._fault_at > _FAULT_COUNTS_SECONDS:
            self.storage_fault = None
        # While srun is alive its pipe stays open: do not wait for the end of it.
        self.launch.finish_reading(_FINAL_READING_SECONDS if self.launch.poll() is None else 2.0)
        self._handle_signals()
        self._check_final_signal(_WRITE_SECONDS)
        if not self.context.signals.final:
            self._end_step()
        odd_ranks = self._inquiry.close(self.stall.phase) if self.stall is not None else None
        if self.stall is not None and odd_ranks is not None:
            self.stall = replace(self.stall, odd=odd_ranks.odd)
            first = odd_ranks.odd[0] if odd_ranks.odd else None
            self._note(
                EventKind.STACKS_SAVED,
                reason=odd_ranks.reason,
                evidence=odd_ranks.evidence,
                rank=first.rank if first else None,
                node=(first.node or None) if first else None,
                nodes=",".join(dict.fromkeys(o.node for o in odd_ranks.odd if o.node)) or None,
            )
            self._log(odd_ranks.reason)

    # -- signals and requests --------------------------------------------------------------

    def _handle_signals(self) -> None:
        for name in self.context.signals.take():
            self.signals = (*self.signals, name)
            self._note(EventKind.SIGNAL, signal=name)
            if name == "USR1":
                self._trains_on = self._stop_time.outlasts_warning()
                if self._trains_on:
                    self._note_stop_time("Slurm has warned, and there is time to train on")
                else:
                    self._request_stop("Slurm's warning signal USR1")
            elif self._final_at is None:
                self._final_at = clock.monotonic()
                self._slurm_query = _JobFactsQuery(self.context)
        self._check_final_signal()

    def _check_final_signal(self, wait_seconds: float = 0.0) -> None:
        """Set a final signal aside if Slurm did not send it.

        The run saves a checkpoint, because the sender may do more, and then continues.
        """
        query = self._slurm_query
        if query is None or not query.wait(wait_seconds):
            return
        self._slurm_query = None
        if still_ours(self.context, query.facts):
            self.context.signals.dismiss(query.signals_before)
            self._final_at = None
            self._request_stop(f"signal {self.signals[-1]}, which Slurm did not send")
            self._log(f"signal {self.signals[-1]} did not come from Slurm, which runs the job on")

    def _request_stop(self, reason: str) -> None:
        """Request a stop by file and by signal: either may be lost or late.

        The signal is sent after the first record of progress, because it would kill a rank that is
        still starting.
        """
        run = self.context.run_layout
        self._stopping_at = self._stopping_at or clock.monotonic()
        run_with_timeout(lambda: ask_trainer_to_leave(run, reason), _WRITE_SECONDS)
        self._signal_pending = True
        self._send_pending_signal()

    def _note_stop_time(self, what: str) -> None:
        """Record when the launch is stopped, and what that was computed from."""
        lead, planned = self._stop_time.lead, self._stop_time.planned_seconds
        if lead is None:
            self._log(f"{what}, and Slurm's warning has not come")
            return
        reason = f"{what}: {lead.sentence}; Slurm warns {planned:.0f} s ahead, as planned"
        self._note(EventKind.STOP_TIMED, reason=reason)
        self._log(reason)

    def _send_pending_signal(self) -> None:
        if self._signal_pending and self.started:
            self._signal_pending = False
            if self.context.config.launcher == "agent":
                return  # it has the file, and its trainer may not catch this signal
            # Not TERM: a step that scancel sends TERM counts as cancelled. Not USR1: NCCL may catch
            # it.
            self._steps.signal("USR2")

    def _follow_request(self, request: Request | None) -> bool:
        """Forward a person's request to the trainer; True if the step must end now."""
        if request is None:
            return False

        def record() -> None:
            """Record who made the request, unless the command that wrote its file has done so."""
            for event in reversed(self.context.ledger.events()[-_RECENT_EVENTS:]):
                if event.event is EventKind.CONTROL and event.action == request.kind:
                    return
                if event.event is EventKind.LAUNCH_STARTED:
                    break
            user, reason = request.owner or None, request.reason or None
            self.context.note(EventKind.CONTROL, action=request.kind, user=user, reason=reason)

        if not self._stop_requested:
            run_with_timeout(record, _WRITE_SECONDS)
        if request.kind == "stop-now":
            return True
        if not self._stop_requested:
            self._stop_requested = True
            self._request_stop(f"control/{request.kind}")
        return False

    def _time_is_up(self) -> bool:
        """Slurm grants KillWait seconds after the final TERM; the verdict needs some of them."""
        if self._final_at is None:
            return False
        seconds = self.context.config.kill_wait_seconds
        left = seconds - min(max(seconds / 2, _LEAST_VERDICT_SECONDS), _VERDICT_SECONDS)
        return clock.monotonic() - self._final_at >= max(left, 0.5)

    def _is_ending_within(self, seconds: float) -> bool:
        """Pause, and go on handling signals; True once Slurm ends the job."""
        until = clock.monotonic() + seconds
        while not self._is_ending() and (left := until - clock.monotonic()) > 0:
            clock.sleep(min(_POLL_SECONDS, left))
        return self.context.signals.final

    def _is_ending(self) -> bool:
        """Handle signals that have arrived; True once Slurm ends the job."""
        self._handle_signals()
        return self.context.signals.final

    def _note(self, kind: EventKind, **fields: object) -> None:
        """Append to the ledger, unless the file system blocks for too long."""
        run_with_timeout(
            lambda: self.context.note(kind, epoch=self.epoch, **fields), _WRITE_SECONDS
        )

    # -- snapshots -------------------------------------------------------------------------

    def _poll_snapshot(self, background: BackgroundReader) -> bool:
        """Request a snapshot or take its result; True when the step must end."""
        now = clock.monotonic()
        if not background.busy:
            if now >= self._next_read:
                self._next_read = now + _READ_SECONDS
                rank_times = now >= self._next_rank_times
                if rank_times:
                    self._next_rank_times = now + _RANK_TIMES_SECONDS
                background.request(find_saves=self._silence.is_late(now), rank_times=rank_times)
            return False
        snapshot = background.result()
        if snapshot is None:
            self._count_failed_read(now, None if background.busy else background.fault)
            return False
        if not self._must_end(snapshot, now):
            return False
        return self.stall is None or self._confirm_stall(background, self.stall)

    def _count_failed_read(self, now: float, fault: OSError | None) -> None:
        """Record that the run directory does not answer, or only with errors."""
        if fault is not None:
            self.storage_fault, self._fault_at = fault, now
        gap_seconds = now - self._seen_at
        if gap_seconds > _READ_SECONDS + _BLOCKED_SECONDS:
            self.storage_stalled_seconds = self._stalled_before_seconds + gap_seconds

    def _must_end(self, snapshot: RunDirSnapshot, now: float) -> bool:
        """Whether the step must end; sets `stall` if the reason is silence."""
        self.stall = None
        # After a long gap nothing is known about the time between. Slurm may also have suspended
        # the job, ranks and supervisor alike.
        gap_seconds = now - self._seen_at
        if gap_seconds > _READ_SECONDS + _BLOCKED_SECONDS:
            self._silence.unseen(gap_seconds - _READ_SECONDS)
        self._stalled_before_seconds = self.storage_stalled_seconds
        self._seen_at = now
        # A change counts, not the record's time: the trainer's clock may differ from ours.
        progress = snapshot.progress
        if progress is not None and progress != self._progress:
            self._progress = progress
            self._silence.sign(progress.phase, progress.step, progress.step_seconds, now)
            self._send_pending_signal()
            self._record_serving(progress)
        if snapshot.rank_times is not None:
            self._record_slow_ranks(snapshot.rank_times)
        self._record_speed_check(snapshot.speed_check)
        self.superseded = snapshot.newest_epoch > self.epoch
        if self._follow_request(snapshot.request):
            return True
        if snapshot.failed or self.launch.failures:
            self._failed_at = self._failed_at or now
            if now - self._failed_at >= _LAST_WORDS_SECONDS:
                return True
        # Rank 0 has recorded that all ranks exit, and srun still waits long after that.
        if snapshot.left:
            self._left_at = self._left_at or now
            if now - self._left_at >= _LEAVING_SECONDS:
                return True
        if self.superseded:
            return True
        # A stop was requested, and the ranks neither exit nor train.
        if self._stopping_at is not None and self._silence.in_startup:
            self.stopped_in_startup = now - self._stopping_at >= _STARTUP_STOP_SECONDS
            if self.stopped_in_startup:
                return True
        # Ranks that wait for a failed one are silent too; that is not a hang.
        if self._failed_at is None:
            self.stall = self._silence.stall(
                now,
                ranks_seen=snapshot.ranks_seen,
                srun_waits=self.launch.waits_for_step,
                save_in_flight=snapshot.save_in_flight,
            )
        return self.stall is not None

    def _record_serving(self, progress: Progress) -> None:
        """Record that a replica answers requests, and once more when that counts as progress."""
        if progress.ready_since is None:
            return
        served_seconds = max(0.0, progress.time - progress.ready_since)
        if self._served_seconds is None:
            self._served_seconds = 0.0
            self._note(EventKind.SERVING, served_seconds=0.0, reason="answers requests")
            self._log("the replica answers requests")
        least_seconds = self.context.config.served_progress_seconds
        if self._served_seconds < least_seconds <= served_seconds:
            self._served_seconds = served_seconds
            reason = f"has answered requests for {served_seconds:.0f} s: budgets begin anew"
            self._note(EventKind.SERVING, served_seconds=round(served_seconds, 1), reason=reason)

    def _record_slow_ranks(self, times: RankTimes) -> None:
        for slow in self._state.stragglers.window(times, self._stage_of):
            reason = f"computes {slow.factor:.2f} times as long as its peers"
            self._note(
                EventKind.SLOW_RANK,
                rank=slow.rank,
                node=slow.node,
                factor=round(slow.factor, 3),
                reason=reason,
                last_step=times.last_step,
            )
            self._log(f"rank {slow.rank} on {slow.node} {reason}")

    def _record_speed_check(self, check: SpeedCheck | None) -> None:
        """Record what the launch has measured before training, once."""
        if check is None or self.speed_check is not None:
            return
        self.speed_check = check
        slow = slow_nodes.certain_nodes(check)
        self._note(
            EventKind.SPEED_CHECKED,
            action=slow_nodes.LEAVE if check.leaves else slow_nodes.REPORT,
            reason=slow_nodes.summary(check),
            evidence=(
                *(part.message for part in check.slow[:_MOST_SLOW_PARTS]),
                *check.far_ranks[:_MOST_SLOW_PARTS],
            ),
            nodes=",".join(one.node for one in slow) or None,
        )
        self._log(f"speed: {slow_nodes.summary(check)}")
        for part in check.slow[:_MOST_SLOW_PARTS]:
            self._log(f"slow: {part.message}")
        for words in check.far_ranks[:_MOST_SLOW_PARTS]:
            self._log(f"far from its GPU: {words}")

    # -- stacks ----------------------------------------------------------------------------

    def _confirm_stall(self, background: BackgroundReader, stall: Stall) -> bool:
        """Have the ranks dump their stacks, then read a last snapshot; True if still silent."""
        self._inquiry.open()
        background.request(find_saves=True, rank_times=False)
        deadline = clock.monotonic() + _BLOCKED_SECONDS
        snapshot = None
        while background.busy and clock.monotonic() < deadline and not self._is_ending():
            snapshot = background.result(_POLL_SECONDS)
        if snapshot is None:  # this process may have been suspended for all of that time
            snapshot = background.result()
        if snapshot is None or not self._must_end(snapshot, clock.monotonic()):
            self.stall = None
            self._log(f"silent for {stall.silent_seconds:.0f} s while {stall.phase}, but no hang")
            return False
        if self.stall is not None:
            self._state.limits.stalled(self.stall.phase, self.stall.silent_seconds)
        return True

    def _log(self, text: str) -> None:
        run_with_timeout(lambda: log_message(text), _WRITE_SECONDS)

    # -- ending ----------------------------------------------------------------------------

    def _end_step(self) -> None:
        """Kill what is left of the step (its tasks may outlive srun), then srun."""
        began_at, pauses = clock.now(), Backoff()
        deadline = clock.monotonic() + self.context.config.kill_wait_seconds + 10
        while self._steps.kill():
            self.killed_at = began_at
            self.step_remains = clock.monotonic() >= deadline
            if self.step_remains or self._is_ending_within(pauses.next_seconds()):
                break
        # Wait for srun's own end, but not when Slurm ends the job: the verdict comes first.
        deadline = clock.monotonic() + 5
        while self.launch.poll() is None and clock.monotonic() < deadline:
            if self.context.signals.final:
                break
            clock.sleep(_POLL_SECONDS)
        self.launch.kill()
        self.launch.finish_reading(_FINAL_READING_SECONDS)


class _JobFactsQuery:
    """Queries Slurm about our job in a thread, because a controller may take its time.

    `signals_before` is the number of signals that had arrived when the query began.
    """

    def __init__(self, context: AttemptContext) -> None:
        self.signals_before = len(context.signals.names)
        self.facts: JobFacts | None = None

        def query() -> None:
            self.facts = job_facts(context, patient=False)

        self._thread = threading.Thread(target=query, daemon=True, name="job-facts")
        self._thread.start()

    def wait(self, wait_seconds: float) -> bool:
        """True once Slurm has answered, or the query has timed out."""
        self._thread.join(wait_seconds)
        return not self._thread.is_alive()


def read_pipeline_stages(train_config: Path) -> StageOf:
    """Read the pipeline stage of each rank; all ranks are peers if the file cannot be read."""
    try:
        return train_config_of(train_config, train_config.read_bytes()).pipeline_stage
    except (OSError, InvalidInputError):
        return one_stage
