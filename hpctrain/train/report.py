"""Write progress, step metrics and log lines on rank 0; other ranks write nothing.

While the run directory is away, training continues: rows of metrics are buffered in memory and none
is lost, and progress is written as soon as possible. Belongs here: writing records, cheaply enough
for every step. Does not belong here: measuring (see `loop`), the exit record (see `entry`).
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.base.durable import FULL_ERRNOS, LineBuffer
from hpctrain.engines.training import TrainConfig
from hpctrain.records.layout import RunLayout
from hpctrain.records.manifest import step_of
from hpctrain.records.run_records import (
    CommunicationRecord,
    EvaluationMetrics,
    Phase,
    Progress,
    RankTimes,
    Record,
    SaveRecord,
    StepMetrics,
    write_record,
)
from hpctrain.train.job import Job
from hpctrain.train.storage import outlast

if TYPE_CHECKING:  # the module imports torch, and records need none
    from hpctrain.train.engine import Evaluation

_PROGRESS_SECONDS = 1.0


@dataclass(frozen=True)
class StepResult:
    """One finished optimizer step. `memory_bytes`: the peak of this process since it began."""

    step: int
    consumed_samples: int
    loss: float
    grad_norm: float | None
    learning_rate: float
    step_seconds: float
    memory_bytes: int
    profiled: bool = False


class RecordFile:
    """Appends records to one file; buffers them while it cannot be written."""

    def __init__(self, run: RunLayout, path: Path) -> None:
        self._run = run
        self._lines = LineBuffer(path, may_create=run.require, mode=0o600, durable=False)

    def append(self, record: Record) -> None:
        """Write the record now or later. Raises OSError when the disk is full."""
        _raise_if_full(self._lines.append(record.model_dump_json()))

    def flush(self) -> OSError | None:
        """Write buffered records; returns the error if they cannot be written."""
        return self._lines.flush()

    def close(self) -> None:
        """Write buffered records, retrying for a while. Raises OSError when that fails."""

        def write() -> None:
            error = self.flush()
            if error is not None:
                raise error

        outlast(self._run, write)


def _raise_if_full(error: OSError | None) -> None:
    if error is not None and error.errno in FULL_ERRNOS:
        raise error


class LaunchReporter:
    """What a launch shows of itself, whoever trains: an engine's ranks, a program, or an agent.

    `step` is the last finished one that is known here, `checkpoint_step` that of the newest
    checkpoint; `loss` is that of the newest step of this launch.
    """

    def __init__(
        self, run: RunLayout, epoch: int, resume_step: int | None, target_step: int | None
    ) -> None:
        # A resumed run is not at step 0 while its checkpoint is being loaded.
        self.step, self.checkpoint_step = resume_step or 0, resume_step
        self.loss: float | None = None
        self._step_seconds: float | None = None
        self._run, self._epoch, self._target = run, epoch, target_step
        self._metrics = RecordFile(run, run.metrics)
        self._writes = True
        self._phase: Phase = "starting"
        self._written_at = -math.inf

    def phase(self, phase: Phase, step: int | None = None) -> None:
        """Enter a phase; the progress record is always written."""
        self._phase = phase
        self.step = self.step if step is None else step
        self._write_progress()

    def still_working(self) -> None:
        """Renew the progress record within a long phase, about once a second."""
        if time.monotonic() - self._written_at >= _PROGRESS_SECONDS:
            self._write_progress()

    def rank_times(self, times: RankTimes) -> None:
        self._replace(self._run.rank_times, times)

    def close(self) -> None:
        """Write all rows of this launch. Raises OSError if that fails."""
        self._metrics.close()

    def _write_progress(self) -> None:
        if not self._writes:
            return
        self._written_at = time.monotonic()
        progress = Progress(
            epoch=self._epoch,
            phase=self._phase,
            step=self.step,
            target_step=self._target,
            time=time.time(),
            step_seconds=self._step_seconds,
            loss=self.loss,
            checkpoint_step=self.checkpoint_step,
        )
        if not self._replace(self._run.progress, progress):
            self._written_at = -math.inf  # with the next step

    def _replace(self, path: Path, record: Record) -> bool:
        """Write a record; returns False if that failed. Raises OSError when the disk is full."""
        try:
            write_record(path, record, durable=False)
        except OSError as error:
            _raise_if_full(error)
            return False
        return True


class Reporter(LaunchReporter):
    """Writes the records of a launch of an engine; does nothing on ranks other than 0."""

    def __init__(self, job: Job) -> None:
        launch, target_step = job.launch, job.config.train_steps
        super().__init__(job.run, launch.epoch, step_of(launch.resume), target_step)
        self._job = job
        self._writes = self._logs = launch.leads
        self._saves = RecordFile(job.run, job.run.saves)

    def resumed_from(self, step: int) -> None:
        self.step = self.checkpoint_step = step

    def finished_step(self, result: StepResult, evaluation: Evaluation | None) -> None:
        """Record one step: a metrics row, sometimes progress, sometimes a log line."""
        self.note_step(result)
        if not self._writes:
            return
        metrics = step_metrics(self._job.config, self._job.launch.epoch, result, evaluation)
        self._metrics.append(metrics)
        self.still_working()
        if result.step % self._job.config.log_interval_steps == 0:
            optional = {
                "mfu": metrics.mfu,
                "eval_loss": metrics.eval_loss,
                "eval_accuracy": metrics.eval_accuracy,
            }
            self.log(
                "step",
                step=f"{metrics.step}/{self._job.config.train_steps}",
                loss=metrics.loss,
                grad_norm=metrics.grad_norm,
                learning_rate=metrics.learning_rate,
                step_seconds=metrics.step_seconds,
                tokens_per_second=round(metrics.tokens_per_second or 0.0),
                **{name: value for name, value in optional.items() if value is not None},
            )

    def made_up_evaluation(self, evaluation: Evaluation) -> None:
        """Record the evaluation of the resumed step, which an earlier launch trained."""
        if not self._writes:
            return
        metrics = EvaluationMetrics(
            step=self.step,
            epoch=self._job.launch.epoch,
            time=time.time(),
            eval_loss=finite(evaluation.loss),
            eval_accuracy=evaluation.accuracy,
        )
        self._metrics.append(metrics)
        self.log("evaluation", step=self.step, eval_loss=evaluation.loss)

    def published(self, save: SaveRecord) -> None:
        """Record a published checkpoint; called on rank 0 only."""
        self.checkpoint_step = save.step
        self._saves.append(save)
        self.log(
            "checkpoint",
            step=save.step,
            save_seconds=round(save.publish_seconds, 3),
            stall_seconds=round(save.stall_seconds or 0.0, 3),
        )
        self._write_progress()

    def communication(self, record: CommunicationRecord) -> None:
        self._replace(self._run.communication, record)

    def flush(self) -> None:
        """Write buffered records if that is possible at once."""
        self._metrics.flush()
        self._saves.flush()

    def close(self) -> None:
        """Write all records of this launch. Raises OSError if that fails."""
        super().close()
        self._saves.close()

    def log(self, event: str, **values: object) -> None:
        """Print one `key=value` line on stdout."""
        if not self._logs:
            return
        pairs = [f"event={event}"]
        for name, value in values.items():
            number = isinstance(value, float)
            pairs.append(f"{name}={value:.7g}" if number else f"{name}={value}".replace(" ", "_"))
        print(" ".join(pairs), flush=True)

    def note_step(self, result: StepResult) -> None:
        """Make a step the newest one."""
        self.step, self._step_seconds = result.step, result.step_seconds
        self.loss = finite(result.loss)


def step_metrics(
    config: TrainConfig, epoch: int, result: StepResult, evaluation: Evaluation | None
) -> StepMetrics:
    """Build the metrics row of one step. MFU as in PaLM (Chowdhery et al. 2022, appendix B)."""
    batch = config.batch_sizes.size_after(result.step - 1)
    tokens = batch * config.seq_length
    mfu = None
    if config.peak_flops_per_gpu is not None:
        peak_flops = config.world_size * config.peak_flops_per_gpu
        flops = config.model_flops_per_step * (batch / config.global_batch_size)
        mfu = flops / (result.step_seconds * peak_flops)
    numbers = {"loss": finite(result.loss), "grad_norm": finite(result.grad_norm)}
    return StepMetrics(
        **{**vars(result), **numbers},
        epoch=epoch,
        time=time.time(),
        loss_hex=result.loss.hex(),
        tokens_per_second=tokens / result.step_seconds,
        mfu=mfu,
        eval_loss=finite(evaluation.loss) if evaluation else None,
        eval_accuracy=evaluation.accuracy if evaluation else None,
    )


def finite(value: float | None) -> float | None:
    """Return a number that JSON can have, else None."""
    return value if value is not None and math.isfinite(value) else None
