"""Watching one launch: signals, requests, stalls, first failures, newer launches of the same run.

Ends the step when it must, and only then. Belongs here: the waiting. Does not belong here: the
verdict, how long silence may last (`silence_limits`), reading files (`run_dir_snapshot`,
`stack_files`), what stacks mean (`odd_stacks`). A query that fails is "unknown" and leads to
nothing, and neither a file system nor a controller that hangs keeps signals from being handled.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hpctrain.store.ledger import EventKind
from hpctrain.store.requests import Request, ask_trainer_to_leave
from hpctrain.store.run_records import Progress, RankTimes
from hpctrain.supervise.context import AttemptContext, say
from hpctrain.supervise.evidence import stack_files
from hpctrain.supervise.evidence.job_facts import job_facts, still_ours
from hpctrain.supervise.evidence.pipeline_stages import read_stages
from hpctrain.supervise.evidence.run_dir_snapshot import (
    Looker,
    Onlooker,
    Sight,
    in_time,
    past_step_seconds,
)
from hpctrain.supervise.evidence.srun_steps import OwnSteps
from hpctrain.supervise.evidence.stack_inquiry import Inquiry
from hpctrain.supervise.judge.documents import JobFacts, Stall
from hpctrain.supervise.judge.silence_limits import Pulse, StallLimits
from hpctrain.supervise.judge.stragglers import (
    SlowRank,
    StageOf,
    Stragglers,
    one_stage,
)
from hpctrain.supervise.request_audit import audit
from hpctrain.supervise.srun_process import Launch
from hpctrain.supervise.time_limit import Outlook, OwnWarning

_POLL_SECONDS = 0.2
_LOOK_SECONDS = 2.0
_RANK_TIMES_SECONDS = 10.0
# A look takes milliseconds. One that takes this long is held by the file system.
_HELD_SECONDS = 5.0
# What a word in the ledger or a request to the trainer may take of our time.
_WORD_SECONDS = 1.0
# How long the ranks that survive a failed one may take to say what they saw.
_LAST_WORDS_SECONDS = 8.0
# How long a start that is asked to stop may take to end. Ranks leave it after some seconds by
# themselves (`hpctrain.train.startup_stop`); one that is not up yet, or computes in C, does not.
# Nothing can be lost: no step has been trained.
_STARTUP_STOP_SECONDS = 20.0
# How long srun may take to notice that all ranks have left (a dead slurmstepd never tells it).
_LEAVING_SECONDS = 15.0
# Time kept for the verdict and the requeue out of KillWait: half of it, which is for ranks that do
# not leave, but no more than one answer of a busy controller takes. They may go on meanwhile.
_LEAST_VERDICT_SECONDS, _VERDICT_SECONDS = 2.0, 8.0
_FINAL_READING_SECONDS = 0.2
# How long before the end of a launch a fault of storage may have been to have ended it: ranks wait
# for their run directory before they give up, and need some time to say so.
_FAULT_COUNTS_SECONDS = 60.0


@dataclass(frozen=True)
class Experience:
    """What launches have shown, for those that follow; one for each supervisor."""

    limits: StallLimits
    stragglers: Stragglers

    @classmethod
    def of(cls, context: AttemptContext) -> Experience:
        """That of the run's earlier attempts, as far as its metrics tell."""
        limits, found = StallLimits(context.config), list[float]()
        if in_time(lambda: found.extend(past_step_seconds(context.run_layout)), _WORD_SECONDS):
            limits.relearn(found)
        return cls(limits, Stragglers(context.config.slow_rank))


class LaunchWatch:
    """Waits for one launch; afterwards its attributes say what was seen.

    `tasks` is the number of ranks (0: as many as show themselves), `nodes` those of the launch in
    the order of its ranks (empty: all of the job), `stage_of` gives a rank's pipeline stage (None:
    as the trainer's file for so many ranks says), `outlook` is what Slurm has just said about the
    time limit.
    Afterwards: `superseded`, `started`, `stall` (with the odd ranks), `slow_ranks`, `signals` (that
    came meanwhile), `left_startup` (we have ended a start that was asked to stop), `limit_near`
    (the time limit is near, and Slurm's warning has not come), `step_remains`,
    `storage_stalled_seconds`, for how long the run directory did not answer, `storage_fault`, the
    error that kept us from reading it at the end, and `killed_at`, when we began to kill what was
    left of the step (seconds since the epoch).
    """

    def __init__(
        self,
        context: AttemptContext,
        launch: Launch,
        epoch: int,
        resume_step: int = 0,
        *,
        experience: Experience | None = None,
        tasks: int = 0,
        nodes: Sequence[str] = (),
        stage_of: StageOf | None = None,
        outlook: Outlook | None = None,
    ) -> None:
        self.context = context
        self.launch = launch
        self.epoch = epoch
        self.resume_step = resume_step
        self.superseded = self.left_startup = self.limit_near = False
        self.stall: Stall | None = None
        self.storage_stalled_seconds = 0.0
        self.step_remains = False
        self.killed_at = float("inf")
        self.tasks, self.nodes = tasks, tuple(nodes)
        self._stage_of = stage_of or _stages(context, tasks)
        self._experience = experience or Experience.of(context)
        self._experience.stragglers.launched()
        self._steps = OwnSteps(context)
        self._onlooker = Onlooker(context.run_layout, epoch)
        now = time.monotonic()
        self._pulse = Pulse(self._experience.limits, resume_step, now)
        self._sign: Progress | None = None
        self._seen_at = now
        self._stalled_before_seconds = 0.0
        self._next_look = self._next_rank_times = now
        self.signals: tuple[str, ...] = ()
        self.storage_fault: OSError | None = None
        self._fault_at = -math.inf
        self._told: _SlurmsWord | None = None
        self._final_at: float | None = None
        self._failed_at: float | None = None
        self._left_at: float | None = None
        self._asked_to_leave = self._owes_signal = False
        self._stopping_at: float | None = None
        self._own_warning = OwnWarning(context, outlook)
        self._inquiry = Inquiry(context, epoch, tasks, nodes, give_up=self._is_ending)

    @property
    def started(self) -> bool:
        """A rank of this launch has said something."""
        return self._pulse.started

    @property
    def slow_ranks(self) -> tuple[SlowRank, ...]:
        """The ranks that were slow when the launch ended."""
        return self._experience.stragglers.current

    def wait(self) -> None:
        """Return when srun has ended, or when waiting any longer would lose the last word."""
        run = self.context.run_layout
        looker = Looker(self._write_and_look)
        in_time(lambda: stack_files.forget_old_dumps(run, self.epoch), _WORD_SECONDS)
        while self.launch.poll() is None:
            self._handle_signals()
            self._warn_instead_of_slurm()
            if self._time_is_up() or self._look(looker):
                break
            time.sleep(_POLL_SECONDS)
        looker.close()
        if time.monotonic() - self._fault_at > _FAULT_COUNTS_SECONDS:
            self.storage_fault = None
        # While srun is alive its pipe stays open: no use in waiting for the end of it.
        self.launch.finish_reading(_FINAL_READING_SECONDS if self.launch.poll() is None else 2.0)
        self._handle_signals()
        self._hear_slurm(_WORD_SECONDS)
        if not self.context.signals.final:
            self._end_step()
        if self.stall is not None:
            self._name_the_odd(self.stall)

    # -- signals and requests --------------------------------------------------------------

    def _handle_signals(self) -> None:
        for name in self.context.signals.take():
            self.signals = (*self.signals, name)
            self._note(EventKind.SIGNAL, signal=name)
            if name == "USR1":
                self._ask_to_leave("Slurm's warning signal USR1")
            elif self._final_at is None:
                self._final_at = time.monotonic()
                self._told = _SlurmsWord(self.context)
        self._hear_slurm()

    def _hear_slurm(self, wait_seconds: float = 0.0) -> None:
        """A final signal with which Slurm has nothing to do ends nothing: the run is saved, for
        whoever sent it may do more, and then goes on."""
        told, self._told = self._told, None
        if told is None or not told.comes(wait_seconds):
            self._told = told
            return
        if still_ours(self.context, told.facts):
            self.context.signals.dismiss(told.signals_before)
            self._final_at = None
            self._ask_to_leave(f"signal {self.signals[-1]}, which Slurm did not send")
            self._say(f"signal {self.signals[-1]} did not come from Slurm, which runs the job on")

    def _warn_instead_of_slurm(self) -> None:
        """The warning may have come before this supervisor was there to notice it."""
        if self.limit_near or "USR1" in self.context.signals.names:
            return
        if self._own_warning.is_due():
            self.limit_near = True
            self._say("the time limit is near, and Slurm's warning has not come")
            self._ask_to_leave("the time limit is near")

    def _ask_to_leave(self, reason: str) -> None:
        """Both ways at once: a file survives a lost signal, a signal beats a cached file name.

        A rank that is still starting would die of the signal, so it is sent after the first sign.
        """
        run = self.context.run_layout
        self._stopping_at = self._stopping_at or time.monotonic()
        in_time(lambda: ask_trainer_to_leave(run, reason), _WORD_SECONDS)
        self._owes_signal = True
        self._signal_to_leave()

    def _signal_to_leave(self) -> None:
        if self._owes_signal and self.started:
            self._owes_signal = False
            # Not TERM: a step that is sent TERM by scancel counts as cancelled; not USR1, which
            # NCCL may catch.
            self._steps.signal("USR2")

    def _follow(self, request: Request | None) -> bool:
        """What a person asks for; True if the step is to be ended now."""
        if request is None:
            return False
        if not self._asked_to_leave:
            in_time(lambda: audit(self.context, request), _WORD_SECONDS)
        if request.kind == "stop-now":
            return True
        if not self._asked_to_leave:
            self._asked_to_leave = True
            self._ask_to_leave(f"control/{request.kind}")
        return False

    def _time_is_up(self) -> bool:
        """After the final TERM there are KillWait seconds, and the verdict needs some of them."""
        if self._final_at is None:
            return False
        seconds = self.context.config.kill_wait_seconds
        left = seconds - min(max(seconds / 2, _LEAST_VERDICT_SECONDS), _VERDICT_SECONDS)
        return time.monotonic() - self._final_at >= max(left, 0.5)

    def _is_ending(self) -> bool:
        """Handle signals that have come; True once Slurm ends the job."""
        self._handle_signals()
        return self.context.signals.final

    def _note(self, kind: EventKind, **fields: object) -> None:
        """A word into the ledger, unless the file system keeps us waiting for too long."""
        in_time(lambda: self.context.note(kind, epoch=self.epoch, **fields), _WORD_SECONDS)

    def _write_and_look(self, closely: bool, rank_times: bool) -> Sight:
        """In the looker's thread: events that had to wait are written as soon as they can be."""
        self.context.ledger.flush()
        return self._onlooker.look(closely, rank_times)

    # -- looking ---------------------------------------------------------------------------

    def _look(self, looker: Looker) -> bool:
        """Begin a look or take its answer. True when the step has to be ended."""
        now = time.monotonic()
        if not looker.busy:
            if now >= self._next_look:
                self._begin_look(looker, now)
            return False
        sight = looker.answer()
        if sight is None:
            self._count_held_look(now, None if looker.busy else looker.fault)
            return False
        if not self._judge(sight, now):
            return False
        return self.stall is None or self._is_certain(looker, self.stall)

    def _begin_look(self, looker: Looker, now: float) -> None:
        self._next_look = now + _LOOK_SECONDS
        rank_times = now >= self._next_rank_times
        if rank_times:
            self._next_rank_times = now + _RANK_TIMES_SECONDS
        looker.ask(closely=self._pulse.is_late(now), rank_times=rank_times)

    def _count_held_look(self, now: float, fault: OSError | None) -> None:
        """The run directory does not answer, or only with errors."""
        if fault is not None:
            self.storage_fault, self._fault_at = fault, now
        gap_seconds = now - self._seen_at
        if gap_seconds > _LOOK_SECONDS + _HELD_SECONDS:
            self.storage_stalled_seconds = self._stalled_before_seconds + gap_seconds

    def _count_gap(self, now: float) -> None:
        """What happened since the last look could not be seen if that was long ago.

        Also when nobody was there to look: Slurm may suspend a job, ranks and supervisor alike.
        """
        gap_seconds = now - self._seen_at
        if gap_seconds > _LOOK_SECONDS + _HELD_SECONDS:
            self._pulse.unseen(gap_seconds - _LOOK_SECONDS)
        self._stalled_before_seconds = self.storage_stalled_seconds
        self._seen_at = now

    def _judge(self, sight: Sight, now: float) -> bool:
        """True when the step has to be ended; `stall` is set if that is because of silence."""
        self.stall = None
        self._count_gap(now)
        self._take_sign(sight.progress, now)
        self._compare_ranks(sight.rank_times)
        self.superseded = sight.newest_epoch > self.epoch
        ended = self._follow(sight.request) or self._has_failed(sight, now)
        if self.superseded or ended or self._all_have_left(sight, now):
            return True
        if self._is_stuck_in_startup(now):
            self.left_startup = True
            return True
        # Ranks that wait for a failed one are silent too, and that is no hang.
        if self._failed_at is None:
            self.stall = self._find_stall(sight, now)
        return self.stall is not None

    def _take_sign(self, progress: Progress | None, now: float) -> None:
        """Note when the trainer's words change; its clock may differ from ours."""
        if progress is None or progress == self._sign:
            return
        self._sign = progress
        self._pulse.sign(progress.phase, progress.step, progress.step_seconds, now)
        self._signal_to_leave()

    def _find_stall(self, sight: Sight, now: float) -> Stall | None:
        return self._pulse.stall(
            now,
            ranks_seen=sight.ranks_seen,
            srun_waits=self.launch.waits_for_step,
            save_in_flight=sight.save_in_flight,
        )

    def _has_failed(self, sight: Sight, now: float) -> bool:
        """A rank has died; the others have had their time to say why they cannot go on."""
        if not sight.failed and not self.launch.failures:
            return False
        self._failed_at = self._failed_at or now
        return now - self._failed_at >= _LAST_WORDS_SECONDS

    def _is_stuck_in_startup(self, now: float) -> bool:
        """A stop was asked, and the ranks neither leave nor train."""
        if self._stopping_at is None or not self._pulse.in_startup:
            return False
        return now - self._stopping_at >= _STARTUP_STOP_SECONDS

    def _all_have_left(self, sight: Sight, now: float) -> bool:
        """Rank 0 has written that all leave, and srun still waits long after that."""
        if not sight.left:
            return False
        self._left_at = self._left_at or now
        return now - self._left_at >= _LEAVING_SECONDS

    def _compare_ranks(self, times: RankTimes | None) -> None:
        if times is None:
            return
        for slow in self._experience.stragglers.window(times, self._stage_of):
            reason = f"computes {slow.factor:.2f} times as long as its peers"
            self._note(
                EventKind.SLOW_RANK,
                rank=slow.rank,
                node=slow.node,
                factor=round(slow.factor, 3),
                reason=reason,
                last_step=times.last_step,
            )
            self._say(f"rank {slow.rank} on {slow.node} {reason}")

    # -- stacks ----------------------------------------------------------------------------

    def _is_certain(self, looker: Looker, stall: Stall) -> bool:
        """Have the ranks write down where they are, then look a last time."""
        self._inquiry.open()
        looker.ask(closely=True, rank_times=False)
        deadline = time.monotonic() + _HELD_SECONDS
        sight = None
        while looker.busy and time.monotonic() < deadline and not self._is_ending():
            sight = looker.answer(_POLL_SECONDS)
        if sight is None or not self._judge(sight, time.monotonic()):
            self.stall = None
            self._say(f"silent for {stall.silent_seconds:.0f} s while {stall.phase}, but no hang")
            return False
        if self.stall is not None:
            self._experience.limits.stalled(self.stall.phase, self.stall.silent_seconds)
        return True

    def _name_the_odd(self, stall: Stall) -> None:
        found = self._inquiry.close(stall.phase)
        if found is None:
            return
        self.stall = replace(stall, odd=found.odd)
        first = found.odd[0] if found.odd else None
        self._note(
            EventKind.STACKS_SAVED,
            reason=found.reason,
            evidence=found.evidence,
            rank=first.rank if first else None,
            node=(first.node or None) if first else None,
            nodes=",".join(dict.fromkeys(odd.node for odd in found.odd if odd.node)) or None,
        )
        self._say(found.reason)

    def _say(self, text: str) -> None:
        in_time(lambda: say(text), _WORD_SECONDS)

    # -- ending ----------------------------------------------------------------------------

    def _end_step(self) -> None:
        """Kill what is left of the step (srun may be dead and its tasks alive), then srun."""
        began_at = time.time()
        deadline = time.monotonic() + self.context.config.kill_wait_seconds + 10
        while self._steps.kill():
            self.killed_at = began_at
            self.step_remains = time.monotonic() >= deadline
            if self.step_remains:
                break
            time.sleep(_POLL_SECONDS * 2)
            self._handle_signals()
            if self.context.signals.final:
                break
        self._let_srun_end()

    def _let_srun_end(self) -> None:
        """Wait for srun's own end, but not when the job is being ended: the verdict comes first."""
        deadline = time.monotonic() + 5
        while self.launch.poll() is None and time.monotonic() < deadline:
            if self.context.signals.final:
                break
            time.sleep(_POLL_SECONDS)
        self.launch.kill()
        self.launch.finish_reading(_FINAL_READING_SECONDS)


class _SlurmsWord:
    """What Slurm says about our job, asked in a thread: a controller may take its time.

    `signals_before` is how many signals had arrived when it was asked.
    """

    def __init__(self, context: AttemptContext) -> None:
        self.signals_before = len(context.signals.names)
        self.facts: JobFacts | None = None
        self._context = context
        self._thread = threading.Thread(target=self._ask, daemon=True, name="slurms-word")
        self._thread.start()

    def _ask(self) -> None:
        self.facts = job_facts(self._context, patient=False)

    def comes(self, wait_seconds: float) -> bool:
        """True once Slurm has answered, or has not for too long."""
        self._thread.join(wait_seconds)
        return not self._thread.is_alive()


def _stages(context: AttemptContext, tasks: int) -> StageOf:
    """Pipeline stages of a launch of so many ranks; all ranks are peers if no file says more."""
    files = [shape.train_config for shape in context.config.shapes if shape.tasks == tasks]
    found: list[StageOf] = []
    if files:
        path = context.run_layout.directory / files[0]
        in_time(lambda: found.append(read_stages(path)), _WORD_SECONDS)
    return found[0] if found else one_stage
