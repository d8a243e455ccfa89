"""Runs with metrics that go back to checkpoints, and what TensorBoard and W&B have of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpctrain.records.layout import RunLayout
from hpctrain.records.run_records import (
    EvaluationMetrics,
    SaveRecord,
    StepMetrics,
    append_metrics,
    append_save,
)
from hpctrain.records.tracking import TrackingConfig, WandbSettings

BEGAN = 1_750_000_000.0
WANDB = WandbSettings(run_id="gpt-tiny-7f3a-0123abcd", project="tests", name="gpt-tiny-7f3a")


def loss_of(step: int, epoch: int) -> float:
    """A loss that tells which launch has trained the step."""
    return 10.0 - step / 100 + epoch / 1000


def row(step: int, epoch: int = 1, loss: float | None = None, **more: Any) -> StepMetrics:
    value = loss_of(step, epoch) if loss is None else loss
    values: dict[str, Any] = {
        "step": step,
        "epoch": epoch,
        "time": BEGAN + 1000 * epoch + step,
        "loss": value,
        "loss_hex": value.hex(),
        "grad_norm": 1.5,
        "learning_rate": 1e-3,
        "step_seconds": 0.5,
        "tokens_per_second": 1024.0,
        "mfu": None,
        "memory_bytes": 1 << 20,
        "consumed_samples": step * 8,
        **more,
    }
    return StepMetrics(**values)


def evaluation(step: int, epoch: int, loss: float) -> EvaluationMetrics:
    time = BEGAN + 1000 * epoch + step
    return EvaluationMetrics(step=step, epoch=epoch, time=time, eval_loss=loss, eval_accuracy=None)


def save(step: int, epoch: int) -> SaveRecord:
    time = BEGAN + 1000 * epoch + step
    return SaveRecord(
        step=step, epoch=epoch, time=time, stall_seconds=0.1, publish_seconds=0.1, size_bytes=1
    )


def train(run: RunLayout, steps: Sequence[int], epoch: int = 1, saved: Sequence[int] = ()) -> None:
    """What rank 0 writes while it trains these steps."""
    for step in steps:
        append_metrics(run, row(step, epoch))
    for step in saved:
        append_save(run, save(step, epoch))


IMPATIENT = """
import sys
from hpctrain.tracking import __main__ as program, follower
follower.FOLLOW_SECONDS = 0.1
sys.exit(program.main(sys.argv[1:]))
"""


def follow(run: RunLayout) -> subprocess.Popen[bytes]:
    """The process beside training, as the supervisor starts it, that looks for news at once."""
    words = (sys.executable, "-P", "-c", IMPATIENT, "--follow", "--run-directory")
    return subprocess.Popen(
        [*words, str(run.directory)], stdin=subprocess.PIPE, stderr=subprocess.PIPE
    )


def tracked(run: RunLayout, *, tensorboard: bool = False, wandb: bool = False) -> None:
    """Give a run the settings that a spec with `tracking` leads to."""
    config = TrackingConfig(
        tensorboard="tracking/tensorboard" if tensorboard else None,
        wandb=WANDB if wandb else None,
        description={"run_id": run.run_id, "gpus": 2},
    )
    run.tracking_config.write_text(config.model_dump_json())


def shown(directory: Path, tag: str = "train/loss") -> dict[int, float]:
    """The values by step that TensorBoard's own reader makes of event files.

    Fails if it has two values of one step, or steps that go back.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    reader.Reload()
    values = reader.Scalars(tag) if tag in reader.Tags()["scalars"] else []
    steps = [value.step for value in values]
    assert steps == sorted(set(steps)), f"{tag}: {steps}"
    return {value.step: value.value for value in values}
