"""Run directories with times of ranks, metrics and saves to judge, planned by the real planner."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpctrain.job.prepare import prepare
from hpctrain.job.run_directory import write_run_directory
from hpctrain.records.find import RunFiles
from hpctrain.records.layout import RunLayout
from hpctrain.records.run_records import (
    RankTimes,
    SaveRecord,
    StepMetrics,
    append_metrics,
    append_save,
    write_record,
)
from tests.step_rows import trained_step

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
NOW = 1_800_000_000.0
GIB = 2**30


def submitted(
    runs: Path, example: str, profile: str, changes: Sequence[str] = ()
) -> tuple[RunFiles, int]:
    """What `submit` writes, without a job; and the number of ranks."""
    prepared = prepare(EXAMPLES / f"{example}.yaml", profile, changes, runs=runs)
    layout = write_run_directory(prepared, runs)
    return RunFiles(layout), prepared.plan.layout.world_size


def has_trained(
    layout: RunLayout, step_seconds: Sequence[float], *, epoch: int = 1, first_step: int = 1
) -> None:
    """One launch with steps of so many seconds."""
    for number, seconds in enumerate(step_seconds):
        append_metrics(layout, _row(first_step + number, epoch, seconds))


def has_saved(layout: RunLayout, stall_seconds: Sequence[float]) -> None:
    for number, seconds in enumerate(stall_seconds, 1):
        append_save(
            layout,
            SaveRecord(
                step=10 * number,
                epoch=1,
                time=NOW,
                stall_seconds=seconds,
                publish_seconds=2 * seconds,
                size_bytes=GIB,
            ),
        )


def has_window(layout: RunLayout, ranks: int, per_node: int, **columns: Any) -> None:
    """The record of all ranks; a column is one number for all of them, or a list."""
    defaults = dict(
        compute_seconds=1.0,
        backward_seconds=0.0,
        data_seconds=0.01,
        optimizer_seconds=0.1,
        step_seconds=1.3,
        peak_memory_bytes=50 * GIB,
        reserved_memory_bytes=55 * GIB,
    )
    given = {
        name: tuple(value) if isinstance(value, list) else (value,) * ranks
        for name, value in {**defaults, **columns}.items()
    }
    nodes = tuple(f"n{rank // per_node}" for rank in range(ranks))
    times = RankTimes(epoch=1, first_step=21, last_step=40, time=NOW, nodes=nodes, **given)
    write_record(layout.rank_times, times)


def _row(step: int, epoch: int, seconds: float) -> StepMetrics:
    figures = dict(step_seconds=seconds, tokens_per_second=1000.0, memory_bytes=50 * GIB)
    return trained_step(step, 2.0, epoch=epoch, time=NOW + step, learning_rate=1e-4, **figures)
