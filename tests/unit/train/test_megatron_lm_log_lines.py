"""Lines of Megatron-LM as values.

STEP and those about saves and evaluations are from runs of core_v0.16.1 and of the main line
(d98e8a6) on a CPU, with shorter paths; MORE and SKIPPED are put together as training.py does.
"""

from __future__ import annotations

import math

import pytest

from hpctrain.train.engines.megatron_lm.log_reporter import (
    FirstStepCorrection,
    read_evaluation,
    read_save_begun,
    read_save_done,
    read_step,
)
from hpctrain.train.report import StepResult

STEP = (
    " [2026-11-21 15:31:38.394654] iteration        3/       8 | consumed samples:           24 | "
    "elapsed time per iteration (ms): 48.4 | learning rate: 2.491711E-03 | global batch size:     8"
    " | lm loss: 5.483721E+00 | loss scale: 1.0 | grad norm: 2.007 | number of skipped iterations: "
    "  0 | number of nan iterations:   0 |"
)
MORE = (
    " [2026-11-21 15:17:02.114532] iteration    12000/   95368 | consumed samples:     18432000 | "
    "skipped samples:         1536 | elapsed time per iteration (ms): 14250.3 | throughput per GPU "
    "(TFLOP/s/GPU): 151.2 | learning rate: 6.000000E-05 | global batch size:  1536 | "
    "load_balancing_loss: 1.000312E+00 | mtp_1 loss: 3.000000E+00 | lm loss: 2.500000E+00 | "
    "loss scale: 1.0 | grad norm: 0.312 | num zeros: 12 | params norm: 9.120 | number of skipped "
    "iterations:   0 | number of nan iterations:   0 |"
)
SKIPPED = (
    " [2026-11-21 15:17:02.114532] iteration        4/       8 | consumed samples:           32 | "
    "elapsed time per iteration (ms): 30.0 | learning rate: 1.000000E-03 | global batch size:     8"
    " | loss scale: 65536.0 | number of skipped iterations:   1 | number of nan iterations:   1 |"
)


def test_a_step() -> None:
    assert read_step(STEP) == StepResult(
        step=3,
        consumed_samples=24,
        step_seconds=pytest.approx(0.0484),
        learning_rate=2.491711e-3,
        loss=5.483721,
        grad_norm=2.007,
        memory_bytes=0,
    )


def test_a_step_with_all_that_can_be_printed() -> None:
    line = read_step(MORE)
    assert line is not None
    assert (line.step, line.consumed_samples) == (12000, 18432000)
    assert (line.loss, line.grad_norm, line.step_seconds) == (2.5, 0.312, pytest.approx(14.2503))


def test_a_step_without_a_loss() -> None:
    """A step whose gradients overflowed is skipped, and prints neither loss nor norm."""
    line = read_step(SKIPPED)
    assert line is not None
    assert math.isnan(line.loss) and line.grad_norm is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "training ...",
        " > number of parameters on (tensor, pipeline) model parallel rank (0, 0): 148864",
        "[before the start of training step] datetime: 2026-11-21 15:17:01 ",
        " loading distributed checkpoint from /run at iteration 40",
        " iteration 3/8 | nothing of ours: 1 |",
        "Number of parameters in transformer block in billions:  0.00",
    ],
)
def test_other_lines_are_nothing(text: str) -> None:
    readers = (read_step, read_evaluation, read_save_begun, read_save_done)
    assert [reader(text) for reader in readers] == [None] * 4


def test_evaluations() -> None:
    between = " validation loss at iteration 4 | lm loss value: 5.258339E+00 | lm PPL: 192.1 | "
    assert read_evaluation(between) == (4, 5.258339)
    behind = between.replace("iteration 4", "iteration 8 on validation set")
    assert read_evaluation(behind) is None, "after training, and for no row"


def test_saves() -> None:
    begun = (
        "[2026-11-21 15:31:38.396020] saving checkpoint at iteration       3 to /run in torch_dist"
    )
    begun = f"{begun} format"
    saved = (
        "  [2026-11-21 15:31:40.245879] successfully saved checkpoint from iteration       3 to "
        "/run [ t 1/1, gtp_remat 1/1, p 1/1 ]"
    )
    later = (
        "  [2026-11-21 15:31:40.3] scheduled an async checkpoint save at iteration       3 to /run"
    )
    assert (read_save_begun(begun), read_save_done(begun)) == (3, None)
    assert (read_save_begun(saved), read_save_done(saved)) == (None, 3)
    assert (read_save_begun(later), read_save_done(later)) == (None, 3)


def lines(*values: tuple[int, float, float]) -> list[StepResult]:
    return [
        StepResult(step, 8 * step, loss, 1.0, 1e-3, seconds, memory_bytes=0)
        for step, loss, seconds in values
    ]


def test_the_second_line_has_the_first_step_in_its_means() -> None:
    """`is_first_iteration`: printed, but not taken out of the sums."""
    means = FirstStepCorrection()
    found = [means.apply(line) for line in lines((5, 4.0, 9.0), (6, 3.5, 5.0), (7, 2.5, 1.0))]
    assert [(line.loss, line.step_seconds) for line in found] == [
        (4.0, 9.0),
        (3.0, 1.0),
        (2.5, 1.0),
    ]


def test_means_over_several_steps_stay_as_they_are() -> None:
    means = FirstStepCorrection()
    found = [means.apply(line) for line in lines((1, 4.0, 9.0), (10, 3.5, 2.0), (20, 2.5, 1.0))]
    assert [line.loss for line in found] == [4.0, 3.5, 2.5]
