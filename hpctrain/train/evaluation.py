"""Iterate over the batches of an evaluation, which ends early when all ranks agree to stop.

Belongs here: the numbers of the batches, and whether an evaluation is missing. Does not belong
here: the forward passes (see the engines), the agreement itself (see `step_agreement`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from hpctrain.engines.training import TrainConfig
from hpctrain.records.layout import RunLayout
from hpctrain.records.run_records import lineage, tail_metrics

_FIRST_TAIL_ROWS = 256


@dataclass
class EvaluationBatches:
    """Yields the numbers of the global batches of the validation data, 0 to `count` - 1.

    All ranks call `agree_to_stop` between two batches. The iteration ends when it returns True, and
    `interrupted` is set. The first batch is always yielded.
    """

    count: int
    agree_to_stop: Callable[[], bool]
    interrupted: bool = field(default=False, init=False)

    def __iter__(self) -> Iterator[int]:
        for number in range(self.count):
            if number and self.agree_to_stop():
                self.interrupted = True
                return
            yield number


def is_evaluated(config: TrainConfig, step: int) -> bool:
    """Check whether a step is followed by an evaluation."""
    interval = config.eval_interval_steps
    return interval is not None and step > 0 and step % interval == 0


def evaluation_is_missing(run: RunLayout, step: int) -> bool:
    """Check whether the metrics have the row of `step` without the result of its evaluation.

    Called on rank 0 when a launch resumes at an evaluated step. The launch that trained the step
    may have stopped and saved before the evaluation was complete.
    """
    count = _FIRST_TAIL_ROWS
    while True:
        rows = tail_metrics(run, count)
        kept = lineage([row for row in rows if row.step <= step])
        if kept and kept[-1].step == step:
            return kept[-1].eval_loss is None
        if len(rows) < count:
            return False
        count *= 4
