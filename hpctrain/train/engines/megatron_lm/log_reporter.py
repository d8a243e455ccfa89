"""Write the metrics and progress records of a run from what Megatron-LM prints.

Megatron-LM prints steps on the last rank and saves on the first. Belongs here: records written by
the rank that prints steps. Does not belong here: parsing lines (see `log_lines`), checkpoints (see
`checkpoint_publisher`).
"""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import replace

from hpctrain.checkpoints.publish import published_steps
from hpctrain.engines.megatron_lm import MegatronLmConfig
from hpctrain.records.run_records import Phase, write_record
from hpctrain.train.device import peak_memory_bytes
from hpctrain.train.engine import Evaluation
from hpctrain.train.engines.megatron_lm.log_lines import (
    FirstStepCorrection,
    read_evaluation,
    read_step,
)
from hpctrain.train.job import Job
from hpctrain.train.report import RecordFile, StepResult, progress_of, step_metrics

_PROGRESS_SECONDS = 1.0


def write_progress(job: Job, phase: Phase, step: int, last: StepResult | None = None) -> None:
    """Write one progress record; a file system that fails for a moment does not end the step."""
    with contextlib.suppress(OSError):
        steps = published_steps(job.run.checkpoints)
        record = progress_of(job, phase, step, last, steps[-1] if steps else None)
        write_record(job.run.progress, record, durable=False)


class LogReporter:
    """Writes metrics and progress from the program's lines; `step` is the last finished one."""

    def __init__(self, job: Job, config: MegatronLmConfig, resume_step: int) -> None:
        self.step = resume_step
        self._job = job
        self._rows = RecordFile(job.run, job.run.metrics)
        self._config = config
        self._correction = FirstStepCorrection()
        self._unrecorded: StepResult | None = None  # until its evaluation is through
        self._phase: Phase = "starting"
        self._written_at = -math.inf

    def handle_line(self, text: str) -> bool:
        """Record one line of the program's output; returns False for one to leave out of the log.

        The program prints every step, because these lines are its only progress report. The log
        gets as many of them as the spec sets.
        """
        parsed = read_step(text)
        if parsed is not None:
            line = self._correction.apply(parsed)
            self._record_pending()
            self.step = line.step
            interval = self._config.eval_interval_steps
            if interval and line.step % interval == 0:
                self._unrecorded = line  # its row gets the loss of the evaluation that follows
                self._progress("evaluating", line)
            else:
                self._record(line, None)
                self._progress(self._phase_after(line.step), line)
            return parsed.step % self._config.log_interval_steps == 0
        evaluation = read_evaluation(text)
        if evaluation is not None and self._unrecorded is not None:
            step, loss = evaluation
            pending, self._unrecorded = self._unrecorded, None
            self._record(pending, loss if step == pending.step else None)
            self._progress(self._phase_after(pending.step), pending)
        return True

    def close(self) -> None:
        """Write what is pending, after the program has ended."""
        self._record_pending()
        with contextlib.suppress(OSError):
            self._rows.close()

    def _phase_after(self, step: int) -> Phase:
        """Return the phase after step and evaluation: Megatron-LM saves right after it has
        printed them (training.py, `checkpoint_and_decide_exit`)."""
        every = self._config.save_interval_steps
        due = every is not None and step % every == 0
        return "saving" if due or step >= self._config.train_steps else "training"

    def _record_pending(self) -> None:
        if self._unrecorded is not None:
            self._record(self._unrecorded, None)
        self._unrecorded = None

    def _record(self, line: StepResult, eval_loss: float | None) -> None:
        result = replace(line, memory_bytes=peak_memory_bytes())
        evaluation = None if eval_loss is None else Evaluation(eval_loss)
        metrics = step_metrics(self._config, self._job.launch.epoch, result, evaluation)
        with contextlib.suppress(OSError):
            self._rows.append(metrics)

    def _progress(self, phase: Phase, line: StepResult) -> None:
        now = time.monotonic()
        if phase == self._phase and now - self._written_at < _PROGRESS_SECONDS:
            return
        self._phase, self._written_at = phase, now
        write_progress(self._job, phase, self.step, line)
