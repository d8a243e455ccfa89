"""How a launch ends: done, yielded, refused, crashed; its exit code and what it leaves behind."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from trainer_contract import assert_done, assert_yielded
from trial_runs import LIMIT_SECONDS, Trial, held_at, trained
from variants import varied

from hpctrain.checkpoints.publish import published_steps
from hpctrain.records.epochs import claim_epoch, current_epoch
from hpctrain.records.manifest import checkpoint_name
from hpctrain.records.run_records import Progress, TrainerExit, read_record
from hpctrain.train.job import Job, read_config
from hpctrain.train.rank_environment import Launch
from hpctrain.train.report import Reporter
from hpctrain.train.saving import writer
from hpctrain.train.stop import StopSignals

YIELDED, REFUSED, CRASHED = TrainerExit.YIELDED, TrainerExit.CONFIG_ERROR, TrainerExit.CRASH
DP2 = dict(data_parallel_size=2)
LONG = dict(train_steps=16, lr_decay_steps=16)


def test_done(gpt_reference: Trial) -> None:
    assert_done(gpt_reference.run, 6, epoch=0)


def test_a_run_that_resumes_is_never_reported_at_its_beginning(trial: Callable[..., Trial]) -> None:
    """From its first sign of life on, long before the checkpoint is loaded."""
    run = trial().run
    launch = Launch(rank=0, world_size=1, local_rank=0, node="n0", epoch=2, resume="iter_0000040")
    job = Job(read_config(run.train_config), launch, run, StopSignals())
    Reporter(job).phase("starting")
    progress = read_record(run.progress, Progress)
    assert progress is not None
    assert (progress.phase, progress.step, progress.checkpoint_step) == ("starting", 40, 40)


def test_a_finished_run_is_not_run_again(gpt_reference: Trial, trial: Callable[..., Trial]) -> None:
    finished = trial()
    shutil.copytree(gpt_reference.run.directory, finished.run.directory, dirs_exist_ok=True)
    assert finished.train(resume=6) == [0]
    assert finished.rows == gpt_reference.rows


@pytest.mark.parametrize(
    "how",
    varied(["stop file", "SIGTERM", "SIGUSR1", "SIGUSR2"], "SIGUSR2"),
)
def test_stop_saves_and_the_resume_is_exact(how: str, trial: Callable[..., Trial]) -> None:
    """The signal goes to rank 1 only: all ranks must leave after the same step."""
    stopped = trial(async_save=True, save_interval_steps=3, **DP2)
    ranks = stopped.start(prepare=held_at(4, _is_asked_to_stop))
    stopped.wait_for_step(2, ranks)
    if how == "stop file":
        stopped.run.stop_request.touch()
    else:
        ranks.signal(getattr(signal, how), 1)
    assert ranks.wait(LIMIT_SECONDS) == [YIELDED, YIELDED], ranks.log()
    last = max(stopped.losses)
    assert last < 6
    assert_yielded(stopped.run, last, epoch=0)
    if how == "SIGTERM":
        stopped.run.stop_request.unlink(missing_ok=True)
        assert stopped.train(resume=last) == [0, 0]
        whole = trained(**DP2)
        assert stopped.exact == whole.exact
        assert len(whole.exact) == len(stopped.rows) == 6


def _is_asked_to_stop(loop: Any) -> bool:
    return bool(loop.job.stop.requested or loop.job.run.stop_request.exists())


def test_signal_during_start_up(trial: Callable[..., Trial]) -> None:
    """One rank is asked to stop before anything is trained: nothing is saved."""
    early = trial(**DP2)

    def terminate_second_rank() -> None:
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)

    assert early.train(prepare=terminate_second_rank) == [YIELDED, YIELDED]
    assert early.rows == []
    assert published_steps(early.run.checkpoints) == []


def test_stop_at_the_last_step_is_done(trial: Callable[..., Trial]) -> None:
    last = trial(train_steps=1)
    last.run.control.mkdir(exist_ok=True)
    ranks = last.start(prepare=_stop_after_first_update)
    assert ranks.wait(LIMIT_SECONDS) == [0], ranks.log()
    assert last.run.done.exists()


def _stop_after_first_update() -> None:
    from hpctrain.train.loop import Loop

    original = Loop._propose

    def stop_then_propose(self: Loop) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        original(self)

    Loop._propose = stop_then_propose  # type: ignore[method-assign]


def test_a_stale_launch_publishes_nothing(trial: Callable[..., Trial]) -> None:
    stale = trial(save_interval_steps=12, **LONG, **DP2)
    assert claim_epoch(stale.run.epochs, "first") == 1
    ranks = stale.start(epoch=1, prepare=held_at(8, _is_superseded))
    stale.wait_for_step(1, ranks)
    assert claim_epoch(stale.run.epochs, "second") == 2
    assert ranks.wait(LIMIT_SECONDS) == [CRASHED, CRASHED], ranks.log()
    assert published_steps(stale.run.checkpoints) == []
    records = stale.exits(epoch=1)
    assert [record.outcome for record in records] == ["crash", "crash"]
    assert all((record.message or "").startswith("stale epoch") for record in records)
    assert stale.train(epoch=1) == [CRASHED, CRASHED]
    assert "stale epoch" in (stale.exits(epoch=1)[0].message or "")


def _is_superseded(loop: Any) -> bool:
    return current_epoch(loop.job.run.epochs) > 1


def test_a_killed_rank_ends_the_others(trial: Callable[..., Trial]) -> None:
    killed = trial(**LONG, **DP2)
    ranks = killed.start(prepare=held_at(8, lambda loop: False))
    killed.wait_for_step(2, ranks)
    ranks.signal(signal.SIGKILL, 1)
    assert ranks.wait(LIMIT_SECONDS) == [CRASHED, -signal.SIGKILL]
    (record,) = killed.exits()
    assert (record.rank, record.outcome) == (0, "crash")
    assert record.traceback


def _writer_dies() -> None:
    if os.environ["RANK"] == "1":
        writer._write = lambda *arguments: os._exit(9)


def _writer_hangs() -> None:
    if os.environ["RANK"] == "1":
        writer._write = lambda *arguments: time.sleep(300)
        writer.DEADLINE_SECONDS = 0.5


@pytest.mark.variant("test_a_killed_rank_ends_the_others")
@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (_writer_dies, "exit code 9"),
        (_writer_hangs, "did not finish within"),
    ],
    ids=["dies", "hangs"],
)
def test_a_lost_writer_is_noticed(
    prepare: Callable[[], None], words: str, trial: Callable[..., Trial]
) -> None:
    lost = trial(save_interval_steps=2, async_save=True, **LONG, **DP2)
    ranks = lost.start(prepare=prepare)
    assert ranks.wait(LIMIT_SECONDS) == [CRASHED, CRASHED]
    messages = [record.message or "" for record in lost.exits()]
    assert "on another rank" in messages[0]
    assert words in messages[1]
    assert published_steps(lost.run.checkpoints) == []


def test_a_damaged_checkpoint_is_named(gpt_reference: Trial, trial: Callable[..., Trial]) -> None:
    damaged = trial()
    damaged.adopt(gpt_reference, 2)
    shard = next((damaged.run.checkpoints / checkpoint_name(2)).glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-10])
    assert damaged.train(resume=2) == [CRASHED]
    (record,) = damaged.exits()
    message = record.message or ""
    assert record.cause == "bad_checkpoint"
    assert checkpoint_name(2) in message
    assert shard.name in message
