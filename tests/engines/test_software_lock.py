"""A run and the software that it began with: a launch that finds another one, on a real engine."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from trial_runs import MODULE_GPT, Trial, make_trial, once
from variants import varied

from hpctrain.records.epochs import claim_epoch
from hpctrain.records.run_records import TrainerExit
from hpctrain.records.software import (
    SoftwareLock,
    of_newest_launch,
    read_lock,
    read_software,
    write_lock,
)

SHORT = dict(data_parallel_size=2, save_interval_steps=3, train_steps=6)
PARTS = {"hpctrain", "Python", "torch"}


def launched(trial: Trial, resume: int | None = None) -> list[int]:
    """The next launch, which owns the run."""
    number = len(list(trial.run.epochs.iterdir()))
    epoch = claim_epoch(trial.run.epochs, f"launch {number}")
    return trial.train(epoch=epoch, resume=resume)


def as_if_of_old_torch(trial: Trial) -> SoftwareLock:
    """The run was begun with another torch and one package more, and has not reached its end."""
    trial.run.done.unlink()
    lock = read_lock(trial.run)
    assert lock is not None
    old = lock.model_copy(
        update={
            "parts": {**lock.parts, "torch": "1.0"},
            "packages": {**lock.packages, "some-package": "7"},
        }
    )
    write_lock(trial.run, old)
    return lock


def begun_before(trial: Trial) -> None:
    """The run's first launch, which ended well."""

    def train(directory: Path) -> None:
        assert launched(make_trial(directory, MODULE_GPT, **SHORT)) == [0, 0]

    config = trial.run.train_config.read_text()
    first = once("software lock, first launch", train)
    shutil.copytree(first, trial.run.directory, dirs_exist_ok=True)
    trial.run.train_config.write_text(config)


@pytest.mark.parametrize("mode", varied(["locked", "warn", "any"], "locked"))
def test_what_follows_from_other_software(
    trial: Callable[..., Trial], mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trial(MODULE_GPT, **SHORT, software=mode)
    begun_before(run)
    lock = as_if_of_old_torch(run)
    assert set(lock.parts) >= PARTS and {"pydantic", "torch"} <= set(lock.packages)
    assert "hpctrain" not in lock.packages
    capsys.readouterr()
    codes = launched(run, resume=3)
    out = capsys.readouterr().out
    changed = (f"torch 1.0 -> {lock.parts['torch']}", "some-package 7 -> none")
    (record,) = of_newest_launch(read_software(run.run))
    assert record.changed == changed and record.epoch == 2
    words = f"software has changed{{}}: {changed[0]}, {changed[1]}"
    if mode == "locked":
        assert codes == [TrainerExit.CONFIG_ERROR] * 2
        (message,) = {end.message for end in run.exits(2)}
        assert message is not None and words.format(" since the run began") in message
        assert f"`hpctrain upgrade {run.run.run_id}`" in message
        assert {row.epoch for row in run.rows} == {1}, "it did not train on"
    else:
        assert codes == [0, 0]
        assert (f"warning: {words.format('')}" in out) == (mode == "warn")
        assert {row.epoch for row in run.rows if row.step > 3} == {1, 2}


@pytest.mark.variant("test_what_follows_from_other_software")
def test_before_the_first_step_the_software_may_still_change(trial: Callable[..., Trial]) -> None:
    """Who corrects what is installed after a first launch that failed has changed nothing."""
    run = trial(MODULE_GPT, **SHORT, software="locked")
    write_lock(run.run, SoftwareLock(epoch=0, parts={"torch": "1.0"}))
    assert launched(run) == [0, 0]
    lock = read_lock(run.run)
    assert lock is not None and lock.epoch == 1 and lock.parts["torch"] != "1.0"
