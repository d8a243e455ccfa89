"""A spec for trials, and run directories as six trained steps leave them, made in no time."""

from __future__ import annotations

from hpctrain.store.layout import RunLayout
from hpctrain.store.run_records import DoneMarker, StepMetrics, append_metrics, write_record

SPEC = """
name: tiny
model: {layers: 2, hidden: 64, heads: 4, vocab: 256, seq: 64}
batch: {global: 8, micro: 2}
budget: {steps: 3600}
precision: fp32
optimizer: {lr: 1e-3}
recompute: none
checkpoint: {every_steps: 10}
engine: {name: ddp}
resources: {gpus: 2}
"""


def train(run: RunLayout, seconds: float, *, loss: float = 5.0, launch: int = 1) -> None:
    """Six steps and a checkpoint, as the trainer would leave them."""
    for step in range(1, 7):
        value = loss - step / 10
        row = StepMetrics(
            step=step,
            epoch=launch,
            time=0.0,
            loss=value,
            loss_hex=value.hex(),
            grad_norm=1.0,
            learning_rate=1e-3,
            step_seconds=seconds,
            tokens_per_second=1.0,
            mfu=None,
            memory_bytes=2**30,
            consumed_samples=8 * step,
        )
        append_metrics(run, row)
    (run.checkpoints / "iter_0000006").mkdir()
    write_record(run.done, DoneMarker(step=6, epoch=1, checkpoint="iter_0000006", time=0.0))
