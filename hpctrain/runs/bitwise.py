"""Compares two runs bit by bit, to show whether an interruption changed anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.judge.attempts import launch_ends
from hpctrain.records.find import RunFiles
from hpctrain.records.ledger import Event
from hpctrain.records.run_records import StepMetrics, lineage, read_metrics


@dataclass(frozen=True)
class LaunchSummary:
    """The steps that one launch has trained; losses are None where they are not reported."""

    number: int
    first_step: int
    last_step: int
    first_loss: float | None
    last_loss: float | None
    cause: str
    reason: str


@dataclass(frozen=True)
class BitwiseComparison:
    """`steps_lost` were trained more than once; `identical` covers every step that counts.

    If a step was trained more than once, the last time counts (`run_records.lineage`): a rollback
    may have removed the earlier ones from the run.
    """

    steps_compared: int
    steps_lost: int
    identical: bool
    first_difference: str | None
    launches: tuple[LaunchSummary, ...]


def compare_runs(reference: RunFiles, run: RunFiles) -> BitwiseComparison:
    """Compare the losses of `run` with those of `reference`, both read from their metrics."""
    expected = {row.step: row.loss_hex for row in lineage(read_metrics(reference.layout))}
    rows = read_metrics(run.layout)
    kept = lineage(rows)
    steps = {row.step for row in kept}
    difference = None
    for row in kept:
        if row.loss_hex != expected.get(row.step):
            difference = f"step {row.step}: {row.loss_hex} instead of {expected.get(row.step)}"
            break
    return BitwiseComparison(
        steps_compared=len(steps & expected.keys()),
        steps_lost=len(rows) - len(kept),
        identical=bool(expected) and steps == expected.keys() and difference is None,
        first_difference=difference,
        launches=tuple(_launches(rows, run.ledger.events())),
    )


def _launches(rows: Sequence[StepMetrics], events: Sequence[Event]) -> list[LaunchSummary]:
    ends = {event.epoch: event for event in launch_ends(events)}
    summaries = []
    for number, epoch in enumerate(sorted({row.epoch for row in rows}), 1):
        mine = [row for row in rows if row.epoch == epoch]
        end = ends.get(epoch)
        summaries.append(
            LaunchSummary(
                number=number,
                first_step=mine[0].step,
                last_step=mine[-1].step,
                first_loss=mine[0].exact_loss,
                last_loss=mine[-1].exact_loss,
                cause=str(end.cause) if end else "lost",
                reason=str(end.reason) if end else "no record of its supervisor",
            )
        )
    return summaries
