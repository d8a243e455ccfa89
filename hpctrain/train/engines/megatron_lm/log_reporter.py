"""Write the metrics and progress records of a run from what Megatron-LM prints.

Megatron-LM prints steps on the last rank and saves on the first. Belongs here: parsing lines, and
records written by the rank that prints steps. Does not belong here: checkpoints (see
`checkpoint_publisher`).
"""

from __future__ import annotations

import contextlib
import math
import re
from dataclasses import replace

from hpctrain.checkpoints.publish import published_steps
from hpctrain.engines.megatron_lm import MegatronLmConfig
from hpctrain.records.run_records import Phase
from hpctrain.train.device import peak_memory_bytes
from hpctrain.train.engine import Evaluation
from hpctrain.train.job import Job
from hpctrain.train.report import Reporter, StepResult

# -- Parse the lines that Megatron-LM prints about steps, evaluations and saves. Pure ------------
# Formats: training.py (`training_log`, `evaluate_and_print_results`) and checkpointing.py
# (`save_checkpoint`), the same in core_v0.16 and the main line.


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


class LogReporter(Reporter):
    """The reporter of a launch that takes its steps from the program's lines.

    Its records may fail: a program that cannot be told of it trains on.
    """

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        launch = job.launch
        self.hears = launch.rank == launch.world_size - 1  # utils.py, print_rank_last
        self._writes, self._logs = self.hears or launch.leads, False
        assert isinstance(job.config, MegatronLmConfig)
        self._config = job.config
        self._correction = FirstStepCorrection()
        self._unrecorded: StepResult | None = None  # until its evaluation is through

    def handle_line(self, text: str) -> bool:
        """Record one line of the program's output; returns False for one to leave out of the log.

        The program prints every step, because these lines are its only progress report. The log
        gets as many of them as the spec sets.
        """
        parsed = read_step(text)
        if parsed is not None:
            line = self._correction.apply(parsed)
            self._record_pending(None)
            interval = self._config.eval_interval_steps
            if interval and line.step % interval == 0:
                # its row gets the loss of the evaluation that follows
                self._unrecorded = line
                self.note_step(line)
                self._enter("evaluating", line.step)
            else:
                self._record(line, None)
            return parsed.step % self._config.log_interval_steps == 0
        evaluation = read_evaluation(text)
        if evaluation is not None and self._unrecorded is not None:
            step, loss = evaluation
            self._record_pending(loss if step == self._unrecorded.step else None)
        return True

    def close(self) -> None:
        """Write what is pending, after the program has ended."""
        self._record_pending(None)
        with contextlib.suppress(OSError):
            super().close()

    def _record_pending(self, eval_loss: float | None) -> None:
        if self._unrecorded is not None:
            pending, self._unrecorded = self._unrecorded, None
            self._record(pending, eval_loss)

    def _record(self, line: StepResult, eval_loss: float | None) -> None:
        """Record a step, and enter the phase that follows: Megatron-LM saves right after it has
        printed step and evaluation (training.py, `checkpoint_and_decide_exit`)."""
        evaluation = None if eval_loss is None else Evaluation(eval_loss)
        with contextlib.suppress(OSError):
            self.finished_step(replace(line, memory_bytes=peak_memory_bytes()), evaluation)
        every = self._config.save_interval_steps
        due = every is not None and line.step % every == 0
        saves = due or line.step >= self._config.train_steps
        self._enter("saving" if saves else "training", line.step)

    def _enter(self, phase: Phase, step: int) -> None:
        if phase != self._phase:
            self.phase(phase, step)

    def _write_progress(self) -> None:
        """Write it with the newest checkpoint, which another rank may have published."""
        with contextlib.suppress(OSError):
            steps = published_steps(self._run.checkpoints)
            self.checkpoint_step = steps[-1] if steps else None
            super()._write_progress()
