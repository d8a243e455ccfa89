"""Parse the lines that Megatron-LM prints about steps, evaluations and saves. Pure.

Formats: training.py (`training_log`, `evaluate_and_print_results`) and checkpointing.py
(`save_checkpoint`), the same in core_v0.16 and the main line. Belongs here: parsing one line.
Does not belong here: records made from it (see `log_reporter`).
"""

from __future__ import annotations

import math
import re
from dataclasses import replace

from hpctrain.train.report import StepResult

_STEP = re.compile(r"\biteration +(\d+)/ *\d+ \|(.*)")
_FIELD = re.compile(r"\s*([^|:]+?): +(\S+) *(?:\||$)")
_EVALUATION = re.compile(r"\bvalidation\S* loss at iteration (\d+) \| (.*)")
_EVALUATION_LOSS = re.compile(r"\blm loss value: (\S+)")
_SAVE_BEGUN = re.compile(r"\bsaving checkpoint at iteration +(\d+) to ")
_SAVE_DONE = re.compile(
    r"\b(?:scheduled an async checkpoint save at|successfully saved checkpoint from) "
    r"iteration +(\d+) to "
)


def read_step(line: str) -> StepResult | None:
    """Parse a line of `training_log`; None for any other line.

    Loss, norm and seconds are means since the line before it. `loss` is nan if the line has none:
    every step since the last line was skipped. The program prints no memory.
    """
    match = _STEP.search(line)
    if match is None:
        return None
    fields = {name: _number(text) for name, text in _FIELD.findall(match[2])}
    if not {"consumed samples", "elapsed time per iteration (ms)"} <= fields.keys():
        return None
    return StepResult(
        step=int(match[1]),
        consumed_samples=int(fields["consumed samples"]),
        step_seconds=fields["elapsed time per iteration (ms)"] / 1000,
        learning_rate=fields.get("learning rate", math.nan),
        loss=fields.get("lm loss", math.nan),
        grad_norm=fields.get("grad norm"),
        memory_bytes=0,
    )


def read_evaluation(line: str) -> tuple[int, float] | None:
    """Parse (step, mean loss) of an evaluation between steps; None for any other line."""
    match = _EVALUATION.search(line)
    value = _EVALUATION_LOSS.search(match[2]) if match else None
    return (int(match[1]), _number(value[1])) if match and value else None


def read_save_begun(line: str) -> int | None:
    """Parse the step whose save begins and stalls training; None for any other line."""
    match = _SAVE_BEGUN.search(line)
    return int(match[1]) if match else None


def read_save_done(line: str) -> int | None:
    """Parse the step whose save no longer stalls training; None for any other line."""
    match = _SAVE_DONE.search(line)
    return int(match[1]) if match else None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


class FirstStepCorrection:
    """Removes the first step of a launch from the means of the second line.

    Megatron-LM prints the first step by itself and keeps it in the sums (training.py,
    `is_first_iteration`). The second of two lines about single steps is therefore the mean of
    both.
    """

    def __init__(self) -> None:
        self._first: StepResult | None = None
        self._count = 0

    def apply(self, line: StepResult) -> StepResult:
        """Return the line with the values of its own steps; call it with every line, in order."""
        self._count += 1
        if self._count == 1:
            self._first = line
            return line
        first, self._first = self._first, None
        if first is None or line.step != first.step + 1:
            return line
        return replace(
            line,
            loss=2 * line.loss - first.loss,
            step_seconds=max(2 * line.step_seconds - first.step_seconds, 1e-6),
        )
