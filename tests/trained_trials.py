"""A spec for trials, and run directories as six trained steps leave them, made in no time."""

from __future__ import annotations

from step_rows import trained_step

from hpctrain.records.layout import RunLayout
from hpctrain.records.run_records import DoneMarker, append_metrics, write_record

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
        row = trained_step(
            step, loss - step / 10, epoch=launch, step_seconds=seconds, memory_bytes=2**30
        )
        append_metrics(run, row)
    (run.checkpoints / "iter_0000006").mkdir()
    write_record(run.done, DoneMarker(step=6, epoch=1, checkpoint="iter_0000006", time=0.0))
