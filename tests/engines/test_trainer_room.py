"""A file system without room for a checkpoint: said before writing, and survived while writing."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from trial_runs import Trial

from hpctrain.checkpoints.discover import checkpoints
from hpctrain.checkpoints.publish import published_steps
from hpctrain.records.run_records import TrainerExit
from hpctrain.train import storage
from hpctrain.train.saving import saver, writer
from hpctrain.train.storage import Need, check_room

CRASHED = TrainerExit.CRASH
DP2 = dict(data_parallel_size=2)
MEGABYTE = 1 << 20
# A checkpoint of the tiny model has about 2.4 MB.
ONE_AND_A_HALF, TWO_AND_A_HALF = 4 * MEGABYTE, 6 * MEGABYTE


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Callable[[Path, int], None]]:
    """Mount a real file system of a few megabytes over an empty directory."""
    mounted: list[Path] = []

    def mount(directory: Path, size_bytes: int, inodes: int = 0) -> None:
        options = f"size={size_bytes}" + (f",nr_inodes={inodes}" if inodes else "")
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(directory)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if done.returncode:
            pytest.skip(f"mounting needs privileges: {done.stderr.strip()}")
        mounted.append(directory)

    yield mount
    for directory in mounted:
        subprocess.run(["umount", "-l", str(directory)], check=True, timeout=300)


Mount = Callable[..., None]


def _full(made: Trial) -> str:
    """The message, when all ranks say that the disk is full."""
    records = made.exits()
    assert {record.cause for record in records} == {"disk_full"}
    return records[0].message or ""


def test_no_room_for_the_first_checkpoint(trial: Callable[..., Trial], small: Mount) -> None:
    """Its size is estimated from the parameters; nothing of it is written."""
    made = trial(save_interval_steps=2, **DP2)
    small(made.run.checkpoints, MEGABYTE)
    assert made.train() == [CRASHED, CRASHED]
    message = _full(made)
    assert "estimated from the parameters" in message and "nothing was written" in message
    assert [row.step for row in made.rows] == [1, 2]
    assert list(made.run.checkpoints.iterdir()) == []


@pytest.mark.variant("test_full_in_the_middle_of_a_save")
def test_the_estimate_is_near_the_truth(gpt_reference: Trial, trial: Callable[..., Trial]) -> None:
    found: list[float] = []
    for settings in ({}, dict(tensor_model_parallel_size=2), DP2):
        made = trial(train_steps=1, **settings)
        told = made.run.directory / "estimate"
        assert set(made.train(prepare=lambda told=told: _note_estimate(told))) == {0}
        (checkpoint,) = checkpoints(made.run.checkpoints)
        assert checkpoint.manifest is not None
        found.append(int(told.read_text()) / checkpoint.manifest.total_bytes)
    assert all(0.8 < ratio < 1.2 for ratio in found), found


def _note_estimate(path: Path) -> None:
    real = saver.check_room

    def note(root: Path, need: Need) -> str | None:
        path.write_text(str(need.size_bytes))
        return real(root, need)

    saver.check_room = note


@pytest.mark.variant("test_full_in_the_middle_of_a_save")
def test_no_room_for_the_next_one(trial: Callable[..., Trial], small: Mount) -> None:
    """Asked before anything is written; the old checkpoint stays, whatever `keep` says."""
    made = trial(save_interval_steps=2, keep_checkpoints=1, async_save=True, **DP2)
    small(made.run.checkpoints, ONE_AND_A_HALF)
    assert made.train() == [CRASHED, CRASHED]
    message = _full(made)
    assert "as much as iter_0000002" in message and "nothing was written or deleted" in message
    assert [one.name for one in made.run.checkpoints.glob("iter_*")] == ["iter_0000002"]
    assert [one.good for one in checkpoints(made.run.checkpoints, "sha256")] == [True]


def test_no_inodes_left(trial: Callable[..., Trial], small: Mount) -> None:
    made = trial(save_interval_steps=2)
    small(made.run.checkpoints, 64 * MEGABYTE, 10)
    assert made.train() == [CRASHED]
    assert "inodes for" in _full(made)


def _look_away() -> None:
    """The question is answered wrongly, as a user's quota does: statvfs does not know of it."""
    saver.check_room = lambda root, need: None


@pytest.mark.parametrize(
    ("size_bytes", "async_save"),
    [
        (ONE_AND_A_HALF, True),
        pytest.param(TWO_AND_A_HALF, False, marks=pytest.mark.variant),
        pytest.param(ONE_AND_A_HALF, False, marks=pytest.mark.variant),
        pytest.param(TWO_AND_A_HALF, True, marks=pytest.mark.variant),
    ],
)
def test_full_in_the_middle_of_a_save(
    size_bytes: int, async_save: bool, trial: Callable[..., Trial], small: Mount
) -> None:
    """The older checkpoints stay good, and the unfinished one takes no room any more."""
    made = trial(save_interval_steps=2, async_save=async_save, **DP2)
    small(made.run.checkpoints, size_bytes)
    assert made.train(prepare=_look_away) == [CRASHED, CRASHED]
    # where rank 0 cannot even write what is common to all, the other rank only loses its peer
    causes = {record.cause for record in made.exits()}
    assert "disk_full" in causes and causes <= {"disk_full", None}
    kept = checkpoints(made.run.checkpoints, "sha256")
    assert kept and all(one.good for one in kept)
    assert not list(made.run.checkpoints.glob("*.partial-*"))


@pytest.mark.variant("test_full_in_the_middle_of_a_save")
def test_full_while_records_are_written(
    trial: Callable[..., Trial], small: Mount, tmp_path: Path
) -> None:
    """The whole run directory is on the full file system: the record finds room again."""
    made = trial(save_interval_steps=2, data_cache=str(tmp_path / "cache"), **DP2)
    config = made.run.train_config.read_text()
    small(made.run.directory, TWO_AND_A_HALF)
    for directory in ("control", "epochs", "exits", "logs", "stacks", "checkpoints"):
        (made.run.directory / directory).mkdir()
    made.run.train_config.write_text(config)
    assert made.train(prepare=_look_away) == [CRASHED, CRASHED]
    assert _full(made)
    assert published_steps(made.run.checkpoints)


def _no_quota() -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(122, "Disk quota exceeded")

    if os.environ["RANK"] == "1":
        writer.write_rank_digests = refuse


@pytest.mark.variant("test_no_room_for_the_first_checkpoint")
def test_a_used_up_quota(trial: Callable[..., Trial]) -> None:
    """Met by one rank's writer, known by all ranks."""
    made = trial(train_steps=1, **DP2)
    assert made.train(prepare=_no_quota) == [CRASHED, CRASHED]
    assert "on another rank" in _full(made)
    assert "Disk quota exceeded" in (made.exits()[1].message or "")


def test_file_systems_without_a_number_of_inodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They report none of none (btrfs, some parallel ones), which is not too few."""
    real = os.statvfs(tmp_path)
    values = list(real)[:10]
    values[5:8] = [0, 0, 0]  # f_files, f_ffree, f_favail
    monkeypatch.setattr(storage.os, "statvfs", lambda path: os.statvfs_result(values))
    assert check_room(tmp_path, Need(1, 10**12, "test")) is None


def test_no_room_for_the_sample_order(trial: Callable[..., Trial], small: Mount) -> None:
    """numpy names no errno there, and megatron-core wraps it twice."""
    made = trial(data_cache=None)
    made.run.data_cache.mkdir()
    small(made.run.data_cache, MEGABYTE)
    assert made.train() == [CRASHED]
    assert made.exits()[0].cause == "disk_full"
