"""Make one continuous curve of the rows of a run that goes back to its checkpoints. Pure.

A launch that resumes from step 40 after another had reached 47 trains 41 to 47 again, and its
values count. TensorBoard can be told to forget steps, so it gets rows at once. W&B cannot, so it
gets a row when no launch can train it again: when a checkpoint is behind it. Belongs here: which
rows are written when. Does not belong here: reading and writing them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hpctrain.records.run_records import EvaluationMetrics, SaveRecord, StepMetrics
from hpctrain.records.step_times import PlacedRow


@dataclass(frozen=True)
class PlacedStep:
    """A row of a step, and the offset of its line in the file in bytes."""

    row: StepMetrics
    offset: int


@dataclass(frozen=True)
class Continuation:
    """What comes after the rows that are written, with ascending steps.

    `rewound_to`: the written rows from this step on no longer count; None if all do. `late`:
    evaluations of steps whose rows are written already.
    """

    rows: tuple[PlacedStep, ...]
    rewound_to: int | None = None
    late: tuple[EvaluationMetrics, ...] = ()


def continuation(placed: Iterable[PlacedRow], *, epoch: int, step: int) -> Continuation:
    """Find what continues a curve whose newest row is of this launch (`epoch`) and step.

    A row of an older launch is left out, because a newer one has replaced it.
    """
    rows: list[PlacedStep] = []
    late: list[EvaluationMetrics] = []
    for one in placed:
        row = one.row
        if row.epoch < epoch:
            continue
        epoch = row.epoch
        if isinstance(row, EvaluationMetrics):
            if not _completed(rows, row):
                late.append(row)
            continue
        while rows and rows[-1].row.step >= row.step:
            rows.pop()
        late = [evaluation for evaluation in late if evaluation.step < row.step]
        rows.append(PlacedStep(row, one.offset))
    first = rows[0].row.step if rows else None
    rewound_to = first if first is not None and first <= step else None
    return Continuation(tuple(rows), rewound_to, tuple(late))


def _completed(rows: list[PlacedStep], late: EvaluationMetrics) -> bool:
    """Put an evaluation into the row of its step; False if that row is not there."""
    for index in reversed(range(len(rows))):
        if rows[index].row.step == late.step:
            values = {"eval_loss": late.eval_loss, "eval_accuracy": late.eval_accuracy}
            rows[index] = replace(rows[index], row=rows[index].row.model_copy(update=values))
            return True
    return False


@dataclass(frozen=True)
class Settled:
    """Rows that no launch will train again, with ascending steps.

    `offset`: of the first line that has to be read again next time. `epoch`: the newest launch
    among them. `kept_first`: rows left out because their steps are written already.
    """

    rows: tuple[StepMetrics, ...]
    offset: int
    epoch: int
    kept_first: int = 0


def settled(
    placed: Sequence[PlacedRow],
    saves: Iterable[SaveRecord],
    *,
    epoch: int,
    step: int,
    end: int,
    over: bool,
) -> Settled:
    """Find the rows after `step` that are behind a checkpoint of the launch that owns the run.

    `end`: the offset behind the last line. `over`: the run has ended, and all its rows count. The
    newest row waits for another one, because an evaluation may still be added to it.
    """
    found = continuation(placed, epoch=epoch, step=step)
    new = [one for one in found.rows if one.row.step > step]
    ready: list[PlacedStep] = []
    if new:
        newest = new[-1].row.epoch
        resumed_at = next(one.row.step for one in found.rows if one.row.epoch == newest) - 1
        bound = max([resumed_at, *(save.step for save in saves if save.epoch == newest)])
        ready = [one for one in new if over or one.row.step <= bound]
        if not over and len(ready) == len(new):
            ready.pop()
    offset = new[len(ready)].offset if len(ready) < len(new) else end
    return Settled(
        rows=tuple(one.row for one in ready),
        offset=offset,
        epoch=ready[-1].row.epoch if ready else epoch,
        kept_first=sum(one.row.step <= step and one.offset < offset for one in found.rows),
    )
