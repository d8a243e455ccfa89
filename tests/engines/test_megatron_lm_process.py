"""Supervision of an external Megatron-LM, with a stand-in for it (`pretrain_stand_in`)."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from megatron_lm_trials import LmTrial, make_lm_trial
from trial_runs import LIMIT_SECONDS

from bench import prefork
from hpctrain.checkpoints.discover import select_for_resume
from hpctrain.checkpoints.publish import TRACKER_NAME, fence_off, published_steps
from hpctrain.records.epochs import claim_epoch
from hpctrain.records.run_records import (
    DoneMarker,
    Progress,
    TrainerExit,
    read_record,
    read_saves,
)
from hpctrain.train.engines.megatron_lm import checkpoint_publisher


@pytest.fixture
def lm(tmp_path: Path) -> Callable[..., LmTrial]:
    def make(**changes: Any) -> LmTrial:
        return make_lm_trial(tmp_path / "run", **changes)

    return make


def test_a_run_to_its_end(lm: Callable[..., LmTrial], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_publisher, "_RETIRE_SECONDS", LIMIT_SECONDS)
    made = lm(keep_checkpoints=2)
    assert made.train() == [TrainerExit.DONE, TrainerExit.DONE]
    assert made.good == [6, 4], "retention keeps two"
    assert (made.run.checkpoints / TRACKER_NAME).read_text() == "6"
    assert not list(made.run.checkpoints.glob(".saving-*"))
    newest = select_for_resume(made.run.checkpoints, "sha256").checkpoint
    assert newest is not None and newest.manifest is not None
    assert (newest.manifest.engine, newest.manifest.consumed_samples) == ("megatron-lm", 48)
    assert {file.name for file in newest.manifest.files} == {
        *(f"__{rank}_{number}.distcp" for rank in (0, 1) for number in (0, 1)),
        *(".metadata", "common.pt", "metadata.json"),
    }
    done = read_record(made.run.done, DoneMarker)
    assert done is not None and (done.step, done.checkpoint) == (6, "iter_0000006")
    assert [save.step for save in read_saves(made.run)][-1] == 6
    assert [(record.rank, record.outcome) for record in made.exits()] == [(0, "done")]


def test_what_is_told_of_steps(lm: Callable[..., LmTrial]) -> None:
    made = lm()
    assert made.train() == [0, 0]
    assert [row.step for row in made.rows] == [1, 2, 3, 4, 5, 6]
    for row in made.rows:
        assert row.loss == pytest.approx(4.0 / row.step, rel=1e-6), "the second is its own mean"
        assert row.grad_norm == pytest.approx(1.0 / row.step, abs=1e-3)
        assert row.learning_rate == pytest.approx(1e-3 / row.step)
        assert (row.consumed_samples, row.step_seconds) == (8 * row.step, pytest.approx(0.02))
    losses = {row.step: row.eval_loss for row in made.rows if row.eval_loss is not None}
    assert losses == {3: pytest.approx(4 / 3 + 1), 6: pytest.approx(4 / 6 + 1)}
    progress = read_record(made.run.progress, Progress)
    assert progress is not None
    assert (progress.phase, progress.step, progress.target_step) == ("leaving", 6, 6)


def test_the_log_gets_as_many_steps_as_the_spec_says(lm: Callable[..., LmTrial]) -> None:
    made = lm(log_interval_steps=4, data_parallel_size=1)
    ranks = made.start()
    assert ranks.wait(LIMIT_SECONDS) == [0]
    told = [line for line in ranks.log().splitlines() if "elapsed time per iteration" in line]
    assert [line.split("iteration")[1].split("/")[0].strip() for line in told] == ["4"]
    assert "saving checkpoint at iteration       2" in ranks.log()
    assert [row.step for row in made.rows] == [1, 2, 3, 4, 5, 6]


def ask_by_signal(number: int) -> Callable[[LmTrial, prefork.Ranks], None]:
    return lambda made, ranks: ranks.signal(number, 1)


def ask_by_file(made: LmTrial, ranks: prefork.Ranks) -> None:
    made.run.stop_request.touch()


@pytest.mark.parametrize(
    "ask",
    [
        pytest.param(ask_by_signal(signal.SIGTERM), id="TERM"),
        pytest.param(ask_by_signal(signal.SIGUSR2), id="USR2", marks=pytest.mark.variant),
        pytest.param(ask_by_file, id="file", marks=pytest.mark.variant),
    ],
)
def test_asked_to_stop_and_resumed(
    lm: Callable[..., LmTrial], ask: Callable[[LmTrial, prefork.Ranks], None]
) -> None:
    """Megatron-LM leaves with 0 after a save on request, as after the last step."""
    made = lm(train_steps=60, lr_decay_steps=60, save_interval_steps=50)
    claim_epoch(made.run.epochs, "first")
    ranks = made.start(wish="asked@8", epoch=1)
    made.wait_for_step(2, ranks)
    ask(made, ranks)
    codes = ranks.wait(LIMIT_SECONDS)
    assert codes == [TrainerExit.YIELDED] * 2, ranks.log(0) + ranks.log(1)
    (step,) = made.good
    assert 2 <= step < 60
    assert read_record(made.run.done, DoneMarker) is None
    made.run.stop_request.unlink(missing_ok=True)
    claim_epoch(made.run.epochs, "second")
    assert made.train(resume=step, epoch=2) == [TrainerExit.DONE] * 2
    assert made.good[0] == 60
    assert [row.step for row in made.rows if row.epoch == 2] == list(range(step + 1, 61))


@pytest.mark.variant("test_a_run_to_its_end")
def test_a_resumed_run_that_has_nothing_left_to_do(lm: Callable[..., LmTrial]) -> None:
    made = lm()
    assert made.train() == [0, 0]
    made.run.done.unlink()
    assert made.train(resume=6) == [TrainerExit.DONE] * 2
    assert read_record(made.run.done, DoneMarker) is not None
    assert len(made.rows) == 6


@pytest.mark.parametrize(("code", "cause"), [(16, "suspect_numerics"), (17, "diverged")])
def test_results_that_cannot_be_trusted(lm: Callable[..., LmTrial], code: int, cause: str) -> None:
    """The rerun state machine saves the state before the step, to be resumed elsewhere."""
    made = lm(save_interval_steps=50)
    assert made.train(wish=f"exit:{code}@4") == [code, code]
    assert {record.cause for record in made.exits()} == {cause}
    assert made.good == [3], "what was saved before the end counts"


def test_a_crash_keeps_what_was_saved(
    lm: Callable[..., LmTrial], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_publisher, "_DIGEST_TIMEOUT_AFTER_FAILURE_SECONDS", 100.0)
    made = lm()
    assert made.train(wish="raise@5") == [TrainerExit.CRASH] * 2
    assert made.good == [4, 2]
    words = {record.message for record in made.exits()}
    assert words == {"RuntimeError: CUDA error: an illegal memory access was encountered"}


def test_an_argument_that_it_does_not_know(lm: Callable[..., LmTrial]) -> None:
    made = lm(extra_arguments={"no-such-thing": True})
    assert made.train() == [TrainerExit.CONFIG_ERROR] * 2
    (record,) = {(one.outcome, one.message) for one in made.exits()}
    assert record[0] == "config_error"
    assert "refuses its arguments: unrecognized arguments: --no-such-thing" in str(record[1])


def test_a_checkout_that_is_not_there(lm: Callable[..., LmTrial]) -> None:
    made = lm(entry="pretrain_nothing.py")
    assert made.train() == [TrainerExit.CONFIG_ERROR] * 2
    assert "no such program" in str(made.exits()[0].message)


def test_an_end_without_a_word(lm: Callable[..., LmTrial]) -> None:
    """validate_args prints some refusals and calls exit(), whose code is 0."""
    made = lm()
    assert made.train(wish="silent") == [TrainerExit.CONFIG_ERROR] * 2
    assert "without an error and without a checkpoint" in str(made.exits()[0].message)


def test_a_save_that_is_not_complete_does_not_count(lm: Callable[..., LmTrial]) -> None:
    made = lm()
    codes = made.train(wish="torn@6")
    assert codes[0] == TrainerExit.CRASH
    assert "it is incomplete" in str(made.exits()[0].message)
    assert made.good == [4, 2]
    assert read_record(made.run.done, DoneMarker) is None


def test_a_newer_launch_takes_the_files_away(lm: Callable[..., LmTrial]) -> None:
    """What a stale launch saves lies in a directory that the newer one has moved."""
    made = lm(train_steps=60, lr_decay_steps=60)
    claim_epoch(made.run.epochs, "first")
    fenced = made.run.directory / "fenced"
    ranks = made.start(wish=f"until:{fenced}@8", epoch=1)
    end = time.monotonic() + LIMIT_SECONDS
    while not published_steps(made.run.checkpoints):
        assert time.monotonic() < end, ranks.log()
        time.sleep(0.02)
    newer = claim_epoch(made.run.epochs, "second")
    fence_off(made.run.checkpoints, newer)
    published = made.good
    fenced.touch()
    assert ranks.wait(LIMIT_SECONDS)[0] == TrainerExit.CRASH
    assert made.exits(1)[0].cause == "superseded"
    assert published and made.good == published, "those from before still count"
