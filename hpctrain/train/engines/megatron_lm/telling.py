"""The run's signs of life, from what Megatron-LM prints.

Megatron-LM prints steps on the last rank, saves on the first. Belongs here: metrics and progress on
the rank that prints steps. Does not belong here: reading lines (see `lines`), saves (see `saves`).
"""

from __future__ import annotations

import contextlib
import math
import time

from hpctrain.checkpoints.publish import published_steps
from hpctrain.engines.megatron_lm import MegatronLmConfig
from hpctrain.store.run_records import Phase, Progress, write_record
from hpctrain.train.engine import Evaluation
from hpctrain.train.engines.megatron_lm.lines import OwnMeans, StepLine, read_evaluation, read_step
from hpctrain.train.job import Job
from hpctrain.train.report import RecordFile, StepResult, step_metrics

_PROGRESS_SECONDS = 1.0


def write_progress(job: Job, phase: Phase, step: int, last: StepLine | None = None) -> None:
    """One sign of life. A file system that is away for a moment must not end a step."""
    with contextlib.suppress(OSError):
        write_record(job.run.progress, _progress(job, phase, step, last), durable=False)


def _progress(job: Job, phase: Phase, step: int, last: StepLine | None) -> Progress:
    steps = published_steps(job.run.checkpoints)
    return Progress(
        epoch=job.launch.epoch,
        phase=phase,
        step=step,
        target_step=job.config.train_steps,
        time=time.time(),
        step_seconds=last.step_seconds if last else None,
        loss=last.loss if last and math.isfinite(last.loss) else None,
        checkpoint_step=steps[-1] if steps else None,
    )


class Teller:
    """Turns lines into metrics and progress; `step` is the last finished one it knows of."""

    def __init__(self, job: Job, config: MegatronLmConfig, resume_step: int) -> None:
        self.step = resume_step
        self._job = job
        self._rows = RecordFile(job.run, job.run.metrics)
        self._config = config
        self._means = OwnMeans()
        self._waiting: StepLine | None = None
        self._phase: Phase = "starting"
        self._written_at = -math.inf

    def hear(self, text: str) -> bool:
        """One line of the program's output; False for one that the log need not have.

        Steps are the only sign of life, so all are printed, and the log gets as many as it should.
        """
        line = read_step(text)
        if line is not None:
            self._finished(self._means.of(line))
            return line.step % self._config.log_interval_steps == 0
        evaluation = read_evaluation(text)
        if evaluation is not None and self._waiting is not None:
            step, loss = evaluation
            waiting, self._waiting = self._waiting, None
            self._record(waiting, loss if step == waiting.step else None)
            self._progress(self._after_evaluation(waiting.step), waiting)
        return True

    def close(self) -> None:
        """The program has ended: nothing more is waited for, except for the run directory."""
        self._flush()
        with contextlib.suppress(OSError):
            self._rows.close()

    def _finished(self, line: StepLine) -> None:
        """A row waits where an evaluation follows, whose loss belongs into it."""
        self._flush()
        self.step = line.step
        interval = self._config.eval_interval_steps
        if interval and line.step % interval == 0:
            self._waiting = line
            self._progress("evaluating", line)
            return
        self._record(line, None)
        self._progress(self._after_evaluation(line.step), line)

    def _after_evaluation(self, step: int) -> Phase:
        """Megatron-LM saves right after the words about a step (training.py,
        `checkpoint_and_decide_exit`)."""
        every = self._config.save_interval_steps
        due = every is not None and step % every == 0
        return "saving" if due or step >= self._config.train_steps else "training"

    def _flush(self) -> None:
        if self._waiting is not None:
            self._record(self._waiting, None)
        self._waiting = None

    def _record(self, line: StepLine, eval_loss: float | None) -> None:
        result = StepResult(
            step=line.step,
            consumed_samples=line.consumed_samples,
            loss=line.loss,
            grad_norm=line.grad_norm,
            learning_rate=line.learning_rate,
            step_seconds=line.step_seconds,
        )
        evaluation = None if eval_loss is None else Evaluation(eval_loss)
        metrics = step_metrics(self._config, self._job.launch.epoch, result, evaluation)
        with contextlib.suppress(OSError):
            self._rows.append(metrics)

    def _progress(self, phase: Phase, line: StepLine) -> None:
        now = time.monotonic()
        if phase == self._phase and now - self._written_at < _PROGRESS_SECONDS:
            return
        self._phase, self._written_at = phase, now
        write_progress(self._job, phase, self.step, line)
