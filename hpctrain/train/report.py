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


class Reporter:
    """Writes the records of a launch; does nothing on ranks other than 0."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._writes = self._logs = job.launch.leads
        self._metrics = RecordFile(job.run, job.run.metrics)
        self._saves = RecordFile(job.run, job.run.saves)
        self._phase: Phase = "starting"
        # A resumed run is not at step 0 while its checkpoint is being loaded.
        self._checkpoint_step = step_of(job.launch.resume)
        self._step = self._checkpoint_step or 0
        self._last: StepResult | None = None
        self._written_at = -math.inf

    @property
    def step(self) -> int:
        """The last finished step known to this rank."""
        return self._step

    def phase(self, phase: Phase, step: int | None = None) -> None:
        """Enter a phase; the progress record is always written."""
        self._phase = phase
        self._step = self._step if step is None else step
        self._write_progress()

    def still_working(self) -> None:
        """Renew the progress record within a long phase, about once a second."""
        if time.monotonic() - self._written_at >= _PROGRESS_SECONDS:
            self._write_progress()

    def resumed_from(self, step: int) -> None:
        self._step = self._checkpoint_step = step

    def finished_step(self, result: StepResult, evaluation: Evaluation | None) -> None:
        """Record one step: a metrics row, sometimes progress, sometimes a log line."""
        self._step, self._last = result.step, result
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
            step=self._step,
            epoch=self._job.launch.epoch,
            time=time.time(),
            eval_loss=_finite(evaluation.loss),
            eval_accuracy=evaluation.accuracy,
        )
        self._metrics.append(metrics)
        self.log("evaluation", step=self._step, eval_loss=evaluation.loss)

    def published(self, save: SaveRecord) -> None:
        """Record a published checkpoint; called on rank 0 only."""
        self._checkpoint_step = save.step
        self._saves.append(save)
        self.log(
            "checkpoint",
            step=save.step,
            save_seconds=round(save.publish_seconds, 3),
            stall_seconds=round(save.stall_seconds or 0.0, 3),
        )
        self._write_progress()

    def rank_times(self, times: RankTimes) -> None:
        self._replace(self._job.run.rank_times, times)

    def communication(self, record: CommunicationRecord) -> None:
        self._replace(self._job.run.communication, record)

    def flush(self) -> None:
        """Write buffered records if that is possible at once."""
        self._metrics.flush()
        self._saves.flush()

    def close(self) -> None:
        """Write all records of this launch. Raises OSError if that fails."""
        self._metrics.close()
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

    def _write_progress(self) -> None:
        if not self._writes:
            return
        self._written_at = time.monotonic()
        progress = progress_of(
            self._job, self._phase, self._step, self._last, self._checkpoint_step
        )
        if not self._replace(self._job.run.progress, progress):
            self._written_at = -math.inf  # with the next step

    def _replace(self, path: Path, record: Record) -> bool:
        """Write a record; returns False if that failed. Raises OSError when the disk is full."""
        try:
            write_record(path, record, durable=False)
        except OSError as error:
            _raise_if_full(error)
            return False
        return True


def progress_of(
    job: Job, phase: Phase, step: int, last: StepResult | None, checkpoint_step: int | None
) -> Progress:
    """Build the progress record; `last` is the newest step of this launch."""
    return Progress(
        epoch=job.launch.epoch,
        phase=phase,
        step=step,
        target_step=job.config.train_steps,
        time=time.time(),
        step_seconds=last.step_seconds if last else None,
        loss=_finite(last.loss) if last else None,
        checkpoint_step=checkpoint_step,
    )


def step_metrics(
    config: TrainConfig, epoch: int, result: StepResult, evaluation: Evaluation | None
) -> StepMetrics:
    """Build the metrics row of one step. MFU as in PaLM (Chowdhery et al. 2022, appendix B)."""
    tokens = config.global_batch_size * config.seq_length
    mfu = None
    if config.peak_flops_per_gpu is not None:
        peak_flops = config.world_size * config.peak_flops_per_gpu
        mfu = config.model_flops_per_step / (result.step_seconds * peak_flops)
    finite = {"loss": _finite(result.loss), "grad_norm": _finite(result.grad_norm)}
    return StepMetrics(
        **{**vars(result), **finite},
        epoch=epoch,
        time=time.time(),
        loss_hex=result.loss.hex(),
        tokens_per_second=tokens / result.step_seconds,
        mfu=mfu,
        eval_loss=_finite(evaluation.loss) if evaluation else None,
        eval_accuracy=evaluation.accuracy if evaluation else None,
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
