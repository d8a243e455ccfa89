"""Make one continuous curve of the rows of a run that goes back to its checkpoints. Pure.

A launch that resumes from step 40 after another had reached 47 trains 41 to 47 again, and its
values count. TensorBoard can be told to forget steps, so it gets rows at once. W&B cannot, so it
gets a row when no launch can train it again: when a checkpoint is behind it. Belongs here: which
rows are written when, and the names of their values, which group curves by what stands before the
slash. Does not belong here: reading and writing them.
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
            index = next((i for i in range(len(rows)) if rows[i].row.step == row.step), None)
            if index is None:
                late.append(row)
            else:
                values = {"eval_loss": row.eval_loss, "eval_accuracy": row.eval_accuracy}
                completed = rows[index].row.model_copy(update=values)
                rows[index] = replace(rows[index], row=completed)
            continue
        while rows and rows[-1].row.step >= row.step:
            rows.pop()
        late = [evaluation for evaluation in late if evaluation.step < row.step]
        rows.append(PlacedStep(row, one.offset))
    first = rows[0].row.step if rows else None
    rewound_to = first if first is not None and first <= step else None
    return Continuation(tuple(rows), rewound_to, tuple(late))


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


# -- Names of the values of a row, as TensorBoard and W&B show them -----------------------------

_EVALUATION = {"eval/loss": "eval_loss", "eval/accuracy": "eval_accuracy"}


def scalars(row: StepMetrics) -> dict[str, float]:
    """The values of a step that are known. The loss may be NaN or infinite: that is shown, too."""
    values: dict[str, float | None] = {
        "train/loss": row.exact_loss,
        "train/grad_norm": row.grad_norm,
        "train/learning_rate": row.learning_rate,
        "train/consumed_samples": row.consumed_samples,
        "speed/step_seconds": row.step_seconds,
        "speed/tokens_per_second": row.tokens_per_second,
        "speed/mfu": row.mfu,
        "memory/peak_bytes": row.memory_bytes,
        "run/launch": row.epoch,
        **_evaluation(row),
    }
    return {name: float(value) for name, value in values.items() if value is not None}


def evaluation_scalars(row: EvaluationMetrics) -> dict[str, float]:
    """The values of an evaluation whose step has been written before."""
    return {name: value for name, value in _evaluation(row).items() if value is not None}


def _evaluation(row: StepMetrics | EvaluationMetrics) -> dict[str, float | None]:
    return {name: getattr(row, field) for name, field in _EVALUATION.items()}
