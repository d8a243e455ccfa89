"""Watching one launch: signals, stalls, first failures, and newer launches of the same run.

Ends the step when it must, and only then. Belongs here: the waiting. Does not belong here: the
verdict. A query that fails is "unknown" and leads to nothing.
"""

from __future__ import annotations

import contextlib
import time

from hpctrain.durable import replace_text
from hpctrain.errors import SlurmError
from hpctrain.store.epochs import current_epoch
from hpctrain.store.ledger import EventKind
from hpctrain.store.signs import ExitRecord, Progress, read_exit_records, read_record
from hpctrain.supervise.context import AttemptContext
from hpctrain.supervise.documents import Stall
from hpctrain.supervise.process import Launch

_POLL_SECONDS = 0.2
_LOOK_SECONDS = 2.0
# How long the ranks that survive a failed one may take to say what they saw.
_LAST_WORDS_SECONDS = 8.0
# How long srun may take to notice that all ranks have left (a dead slurmstepd never tells it).
_LEAVING_SECONDS = 15.0
# Time kept for the verdict and the requeue out of KillWait.
_VERDICT_SECONDS = 2.0
_FINAL_READING_SECONDS = 0.2


class LaunchWatch:
    """Waits for one launch; afterwards its attributes say what was seen."""

    def __init__(
        self, context: AttemptContext, launch: Launch, epoch: int, resume_step: int = 0
    ) -> None:
        self.context = context
        self.launch = launch
        self.epoch = epoch
        self.superseded = False
        self.stall: Stall | None = None
        self.started = False
        self._started_at = time.monotonic()
        self._handled_signals = 0
        self._final_at: float | None = None
        self._failed_at: float | None = None
        self._left_at: float | None = None
        self._progress: Progress | None = None
        self._progress_at = self._started_at
        self._resume_step = resume_step

    def wait(self) -> None:
        """Return when srun has ended, or when waiting any longer would lose the last word."""
        next_look = 0.0
        while self.launch.poll() is None:
            self._handle_signals()
            if self._time_is_up():
                break
            if time.monotonic() >= next_look:
                next_look = time.monotonic() + _LOOK_SECONDS
                if self._look():
                    break
            time.sleep(_POLL_SECONDS)
        # While srun is alive its pipe stays open: no use in waiting for the end of it.
        self.launch.finish_reading(_FINAL_READING_SECONDS if self.launch.poll() is None else 2.0)
        self._handle_signals()
        if not self.context.signals.final:
            self._end_step()

    # -- signals ---------------------------------------------------------------------------

    def _handle_signals(self) -> None:
        names = self.context.signals.names
        for name in names[self._handled_signals :]:
            self.context.note(EventKind.SIGNAL, epoch=self.epoch, signal=name)
            if name == "USR1":
                self._ask_to_leave("Slurm's warning signal USR1")
            elif self._final_at is None:
                self._final_at = time.monotonic()
        self._handled_signals = len(names)

    def _ask_to_leave(self, reason: str) -> None:
        """Both ways at once: a file survives a lost signal, a signal beats a cached file name."""
        replace_text(self.context.run_layout.stop_request, reason + "\n", mode=0o600)
        for step_id in self._steps():
            with contextlib.suppress(SlurmError):
                # Not TERM: a step that is sent TERM by scancel counts as cancelled; not USR1,
                # which NCCL may catch.
                self.context.slurm.signal_step(self.context.job_id, step_id, "USR2")

    def _time_is_up(self) -> bool:
        """After the final TERM there are KillWait seconds, and the verdict needs some of them."""
        if self._final_at is None:
            return False
        left = self.context.config.kill_wait_seconds - _VERDICT_SECONDS
        return time.monotonic() - self._final_at >= max(left, 0.5)

    # -- looking ---------------------------------------------------------------------------

    def _look(self) -> bool:
        """True when the step has to be ended."""
        self.superseded = current_epoch(self.context.run_layout.epochs) > self.epoch
        self._read_progress()
        self.stall = self._find_stall()
        failed = self._has_failed()
        return self.superseded or self.stall is not None or failed or self._all_have_left()

    def _read_progress(self) -> None:
        """Note when the trainer's words change; its clock may differ from ours."""
        progress = read_record(self.context.run_layout.progress, Progress)
        if progress is None or progress.epoch != self.epoch or progress == self._progress:
            return
        self.started = True
        self._progress, self._progress_at = progress, time.monotonic()

    def _find_stall(self) -> Stall | None:
        """The first step of a launch is slow (connections, compilation), so it gets longer."""
        config, progress = self.context.config, self._progress
        silent_seconds = time.monotonic() - self._progress_at
        phase = progress.phase if progress else "starting"
        training = progress and phase == "training" and progress.step > self._resume_step
        limit_seconds = config.stall_seconds if training else config.setup_stall_seconds
        if silent_seconds <= limit_seconds:
            return None
        return Stall(phase, silent_seconds, limit_seconds)

    def _records(self) -> list[ExitRecord]:
        return read_exit_records(self.context.run_layout, self.epoch)

    def _has_failed(self) -> bool:
        """A rank has died; the others have had their time to say why they cannot go on."""
        bad = any(record.outcome in ("crash", "config_error") for record in self._records())
        if not bad and not self.launch.failures:
            return False
        self._failed_at = self._failed_at or time.monotonic()
        return time.monotonic() - self._failed_at >= _LAST_WORDS_SECONDS

    def _all_have_left(self) -> bool:
        """Rank 0 has written that all leave, and srun still waits long after that."""
        if not any(record.outcome in ("done", "yielded") for record in self._records()):
            return False
        self._left_at = self._left_at or time.monotonic()
        return time.monotonic() - self._left_at >= _LEAVING_SECONDS

    # -- ending ----------------------------------------------------------------------------

    def _steps(self) -> list[str]:
        """Ids of the live srun steps of this attempt (not `batch` and `extern`).

        Step ids start again at 0 when Slurm restarts the job (slurmctld/job_mgr.c,
        batch_requeue_fini), so a supervisor that outlived its attempt must not touch them.
        """
        slurm, attempt = self.context.slurm, self.context.attempt
        try:
            job = slurm.jobs([attempt.job_id]).get(attempt.job_id)
            if job is None or job.restart_count != attempt.restart_count:
                return []
            steps = slurm.steps(attempt.job_id)
        except SlurmError:
            return []
        return [step.step_id for step in steps if step.step_id.isdigit()]

    def _end_step(self) -> None:
        """Kill what is left of the step (srun may be dead and its tasks alive), then srun."""
        deadline = time.monotonic() + self.context.config.kill_wait_seconds + 10
        while (steps := self._steps()) and time.monotonic() < deadline:
            for step_id in steps:
                with contextlib.suppress(SlurmError):
                    self.context.slurm.kill_step(self.context.job_id, step_id)
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
