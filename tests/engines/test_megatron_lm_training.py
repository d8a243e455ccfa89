"""A real Megatron-LM (PyPI's package of `megatron.training`) trains on CPUs under hpctrain.

Its parser, loop, log lines, signal handler and checkpoints; only the loss and the mock data come
from `pretrain_package`, because the package has no pretrain_gpt.py.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
from megatron_lm_trials import (
    ASKED,
    EVERY,
    PACKAGE,
    STEPS,
    UNMEASURED,
    RealTrial,
    make_real_trial,
    trained_real,
)
from trainer_contract import assert_done, assert_yielded
from trial_runs import LIMIT_SECONDS, once
from waiting import wait_until

from hpctrain.diagnose.of_run import diagnose
from hpctrain.records.epochs import claim_epoch
from hpctrain.records.find import RunFiles
from hpctrain.records.layout import RunLayout
from hpctrain.records.manifest import checkpoint_name
from hpctrain.records.run_records import RankTimes, TrainerExit, read_record, read_saves
from hpctrain.train.job import read_config

pytestmark = pytest.mark.skipif(not PACKAGE.is_dir(), reason="`make install` unpacks it")


@pytest.fixture(scope="module")
def whole() -> RealTrial:
    return trained_real()


@pytest.fixture(scope="module")
def stopped() -> RealTrial:
    """The same run, not measured, asked to leave by a USR2 on one rank after its third step."""

    def train(directory: Path) -> None:
        made = make_real_trial(directory, entry=UNMEASURED)
        epoch = claim_epoch(made.run.epochs, "first")
        ranks = made.start(epoch=epoch, environment={"HELD": "1"})
        made.wait_for_step(3, ranks)
        ranks.signal(signal.SIGUSR2, 1)
        assert ranks.wait(LIMIT_SECONDS) == [TrainerExit.YIELDED] * 2, ranks.log()

    run = RunLayout(once("real, stopped", train))
    return RealTrial(run, read_config(run.train_config))


def test_a_whole_run(whole: RealTrial) -> None:
    assert whole.good == [STEPS, EVERY]
    assert [row.step for row in whole.rows] == list(range(1, STEPS + 1))
    assert whole.rows[0].loss == pytest.approx(5.57, abs=0.05), "ln 256 = 5.545"
    assert whole.rows[-1].loss < whole.rows[0].loss - 0.3
    assert all(row.grad_norm and row.learning_rate > 0 for row in whole.rows)
    assert [row.consumed_samples for row in whole.rows[:3]] == [8, 16, 24]
    saves = read_saves(whole.run)
    assert [save.step for save in saves] == [EVERY, STEPS]
    assert all(save.stall_seconds > 0 for save in saves)
    assert_done(whole.run, STEPS, epoch=whole.rows[-1].epoch)


def test_the_time_of_each_rank(whole: RealTrial, stopped: RealTrial) -> None:
    """By Megatron-LM's own timers, which its log level keeps silent."""
    times = read_record(whole.run.rank_times, RankTimes)
    assert times is not None
    assert (times.first_step, times.last_step) == (7, 11), "the first step warms up"
    assert len(times.compute_seconds) == len(times.nodes) == 2
    parts = (times.compute_seconds, times.data_seconds, times.optimizer_seconds)
    for step, compute, data, optimizer in zip(times.step_seconds, *parts, strict=True):
        assert min(compute, data, optimizer) > 0
        assert compute + data + optimizer <= step, "no time is counted twice"
    assert min(times.peak_memory_bytes) > 50e6
    assert not stopped.run.rank_times.exists(), "its program undoes what measures it"
    asked = ("data", "communication", "imbalance")
    for made, told in ((whole, True), (stopped, False)):
        answers = {one.topic: one.answer for one in diagnose(RunFiles(made.run)).findings}
        assert {answers[topic] != "unknown" for topic in asked} == {told}, answers


def test_nothing_outlives_a_launch(whole: RealTrial, stopped: RealTrial) -> None:
    """megatron-core's saver has a process of its own, which knows nothing of how its rank ended."""
    # multiprocessing's own tracker takes a moment to see it
    wait_until(lambda: not [*writers(whole), *writers(stopped)], "the end of all writers")


def writers(made: RealTrial) -> list[Path]:
    """Processes whose standard output is a log of this run."""
    outputs = Path("/proc").glob("[0-9]*/fd/1")
    return [path for path in outputs if str(made.run.directory) in os.path.realpath(path)]


def test_resumed_as_if_nothing_had_happened(
    whole: RealTrial, stopped: RealTrial, tmp_path: Path
) -> None:
    """Weights, Adam's state, samples and learning rate: digit by digit as printed, and as in a
    run that is measured. With dropout: tests/slurm/test_megatron_lm_on_slurm.py."""
    (step,) = stopped.good
    assert stopped.rows[-1].step == step < EVERY, "it saved and left at once"
    assert_yielded(stopped.run, step)
    resumed = make_real_trial(tmp_path / "resumed", entry=UNMEASURED)
    shutil.copytree(stopped.run.directory, resumed.run.directory, dirs_exist_ok=True)
    epoch = claim_epoch(resumed.run.epochs, "second")
    assert resumed.train(resume=step, epoch=epoch) == [TrainerExit.DONE] * 2
    assert [row.epoch for row in resumed.rows] == [1] * step + [epoch] * (STEPS - step)
    # the second loss of a launch is computed from two rows (`OwnMeans`), not printed
    computed = {2, step + 2}
    for row, same in zip(resumed.rows, whole.rows, strict=True):
        assert row.loss == pytest.approx(same.loss, rel=0, abs=3e-6 * (row.step in computed))
        assert row.grad_norm == same.grad_norm
        assert (row.learning_rate, row.consumed_samples) == (
            same.learning_rate,
            same.consumed_samples,
        )


@pytest.mark.variant("test_resumed_as_if_nothing_had_happened")
def test_resumed_on_fewer_ranks(whole: RealTrial, tmp_path: Path) -> None:
    """The state of Adam, which two ranks have shared, is one rank's now."""
    made = make_real_trial(tmp_path / "alone", data_parallel_size=1)
    made.adopt(whole, EVERY)
    assert made.train(resume=EVERY) == [TrainerExit.DONE]
    for row, same in zip(made.rows, whole.rows[EVERY:], strict=True):
        # fp32 sums in another order, printed with seven digits
        assert row.loss == pytest.approx(same.loss, rel=0, abs=5e-6)
        assert row.grad_norm == pytest.approx(same.grad_norm, rel=0, abs=2e-3)


@pytest.mark.variant("test_resumed_as_if_nothing_had_happened")
def test_a_checkpoint_of_another_model_is_not_loaded(whole: RealTrial, tmp_path: Path) -> None:
    """What Megatron-LM refuses to load ends the launch; nothing is trained from step 0."""
    changes = dict(num_layers=2, pipeline_layer_split=((2,),), data_parallel_size=1)
    made = make_real_trial(tmp_path / "other", **changes)
    shutil.copytree(*(one.run.checkpoints / checkpoint_name(EVERY) for one in (whole, made)))
    (code,) = made.train(resume=EVERY)
    assert code in (TrainerExit.CRASH, TrainerExit.CONFIG_ERROR)
    assert made.rows == [] and made.good == [EVERY]


@pytest.mark.variant("test_a_stop_after_the_start_saves")
def test_an_evaluation_is_left_between_batches(tmp_path: Path) -> None:
    """Later evaluations read the same data as if this one had been completed; its own loss is
    missing, because Megatron-LM evaluates after steps only."""
    changes = dict(entry=ASKED, eval_interval_steps=4, eval_batches=6)
    whole, asked = (make_real_trial(tmp_path / name, 8, **changes) for name in ("whole", "asked"))
    assert whole.train(environment=_noting(tmp_path / "all")) == [TrainerExit.DONE] * 2
    noting, epoch = _noting(tmp_path / "left"), claim_epoch(asked.run.epochs, "first")
    assert asked.train(epoch=epoch, environment={**noting, "ASKED": "1"}) == [75, 75]
    assert {(tmp_path / "left" / rank).read_text() for rank in "01"} == {"1 2 3 "}
    assert asked.good == [4]
    epoch = claim_epoch(asked.run.epochs, "second")
    again = dict(resume=4, epoch=epoch, environment=_noting(tmp_path / "again"))
    assert asked.train(**again) == [TrainerExit.DONE] * 2
    expected, found = (
        {row.step: row.eval_loss for row in made.rows if row.step % 4 == 0}
        for made in (whole, asked)
    )
    assert None not in expected.values()
    assert found == {**expected, 4: None}


def _noting(directory: Path) -> dict[str, str]:
    directory.mkdir()
    return {"COMPUTED": str(directory)}


@pytest.mark.variant("test_resumed_as_if_nothing_had_happened")
def test_a_stop_during_the_start_leaves_it(tmp_path: Path) -> None:
    """Once its parser has run, Megatron-LM itself would train a step first."""
    made = make_real_trial(tmp_path / "starting", entry=ASKED)
    environment = {"COMPUTED": str(tmp_path), "SLOW_START": "1"}
    ranks = made.start(epoch=claim_epoch(made.run.epochs, "first"), environment=environment)
    wait_until(lambda: len(list(tmp_path.glob("slow-*"))) == 2, ranks.log)
    ranks.signal(signal.SIGTERM)
    assert ranks.wait(LIMIT_SECONDS) == [TrainerExit.YIELDED] * 2, ranks.log()
    assert made.rows == [] and made.good == []
    assert {one.outcome for one in made.exits(1)} == {"yielded"}
