"""Lines of an external Megatron-LM as values, its standard output, and its end."""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hpctrain.checkpoints.publish import StaleEpochError
from hpctrain.engines.megatron_lm import MegatronLmConfig
from hpctrain.records.layout import RunLayout
from hpctrain.train import software_agreement
from hpctrain.train.engines.megatron_lm import program
from hpctrain.train.engines.megatron_lm.log_reporter import (
    FirstStepCorrection,
    read_evaluation,
    read_save_begun,
    read_save_done,
    read_step,
)
from hpctrain.train.engines.megatron_lm.program import LineFilter, filter_stdout
from hpctrain.train.job import Job
from hpctrain.train.rank_environment import Launch
from hpctrain.train.report import StepResult

# -- Lines of Megatron-LM as values --------------------------------------------------------------
# STEP and those about saves and evaluations are from runs of core_v0.16.1 and of the main line
# (d98e8a6) on a CPU, with shorter paths; MORE and SKIPPED are put together as training.py does.


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


def results(*values: tuple[int, float, float]) -> list[StepResult]:
    return [
        StepResult(step, 8 * step, loss, 1.0, 1e-3, seconds, memory_bytes=0)
        for step, loss, seconds in values
    ]


def test_the_second_line_has_the_first_step_in_its_means() -> None:
    """`is_first_iteration`: printed, but not taken out of the sums."""
    means = FirstStepCorrection()
    found = [means.apply(line) for line in results((5, 4.0, 9.0), (6, 3.5, 5.0), (7, 2.5, 1.0))]
    assert [(line.loss, line.step_seconds) for line in found] == [
        (4.0, 9.0),
        (3.0, 1.0),
        (2.5, 1.0),
    ]


def test_means_over_several_steps_stay_as_they_are() -> None:
    means = FirstStepCorrection()
    found = [means.apply(line) for line in results((1, 4.0, 9.0), (10, 3.5, 2.0), (20, 2.5, 1.0))]
    assert [line.loss for line in found] == [4.0, 3.5, 2.5]


# -- Lines on standard output: each is handled once as a whole, and some are dropped -------------


def drop_secrets(lines: list[str]) -> LineFilter:
    def handle(line: str) -> bool:
        lines.append(line)
        return "secret" not in line

    return LineFilter(io.StringIO(), handle)


def test_lines_are_handled_and_written() -> None:
    lines: list[str] = []
    stream = drop_secrets(lines)
    print("one", "two", file=stream, flush=True)
    stream.write("secret\nthr")
    assert stream.getvalue() == "one two\n", "a line is written when it is complete"
    stream.write("ee\n\n")
    assert lines == ["one two", "secret", "three", ""]
    assert stream.getvalue() == "one two\nthree\n\n"


def test_a_flush_in_the_middle_of_a_line() -> None:
    """By another thread, or by a progress bar: the line is still handled as a whole, and the part
    that was written gets its end."""
    lines: list[str] = []
    stream = drop_secrets(lines)
    for part in ("a sec", "ret", "\n", "fine"):
        stream.write(part)
        stream.flush()
    assert stream.getvalue() == "a secret\nfine"
    stream.write("\nsecret\n")
    assert lines == ["a secret", "fine", "secret"]
    assert stream.getvalue() == "a secret\nfine\n"


def test_a_line_without_an_end_is_not_kept_for_ever() -> None:
    lines: list[str] = []
    stream = drop_secrets(lines)
    for _ in range(200):
        stream.write("x" * 1000)
    assert len(stream.getvalue()) > 100_000
    stream.write("\n")
    assert stream.getvalue() == "x" * 200_000 + "\n"


def test_standard_output_is_as_before_afterwards(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout
    with filter_stdout(lambda line: False):
        print("handled only")
        print("no end", end="")
    assert sys.stdout is before
    assert capsys.readouterr().out == "no end"


# ------------------------------------------------------------------------------------------------
# The end of an external Megatron-LM, whose publisher interrupts the main thread when it fails.


class SupersededPublisher:
    """Finds that a newer launch owns the run, and its interrupt arrives in `finish`."""

    directory = Path("saving")
    newest_step = None

    def __init__(self, job: Job) -> None:
        self.problem: Exception | None = None
        self.abandoned = False

    def start(self) -> None:
        """Nothing to watch."""

    def finish(self) -> None:
        self.problem = StaleEpochError("a newer launch owns the run")
        raise KeyboardInterrupt

    def abandon(self) -> None:
        self.abandoned = True


def ends(code: int | None) -> Callable[..., None]:
    """Return a program that has ended; None: without SystemExit."""

    def execute(*arguments: Any) -> None:
        if code is not None:
            raise SystemExit(code)

    return execute


@pytest.mark.parametrize("code", [None, 3])
def test_an_interrupt_behind_the_end_is_the_publishers_problem(
    code: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "CheckpointPublisher": SupersededPublisher,
        "_execute": ends(code),
        "_prepare_environment": lambda config, launch: None,
        "_install_cpu_stand_ins": lambda config: False,
        "arguments": lambda config, places, on_cpu, ramps_up: (),
    }.items():
        monkeypatch.setattr(program, name, value)
    monkeypatch.setattr(software_agreement, "agree_on_software", lambda job: None)
    (tmp_path / "pretrain.py").touch()
    config = MegatronLmConfig.model_construct(
        checkout=str(tmp_path), entry="pretrain.py", train_steps=10
    )
    launch = Launch(rank=1, world_size=2, local_rank=1, node="n0", epoch=1, resume="")
    job = cast(Job, SimpleNamespace(config=config, launch=launch, run=RunLayout(tmp_path),
                                    data_cache=tmp_path))  # fmt: skip
    with pytest.raises(StaleEpochError, match="newer launch"):
        program.run(job, cast(Any, SimpleNamespace()))
