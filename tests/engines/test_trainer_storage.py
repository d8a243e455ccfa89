"""A file system without room, and a run directory that is away: said before writing, survived."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies import filesystem_async
from trial_runs import LIMIT_SECONDS, TWO, MakeTrial, Trial, held_at, trained, wrap

from hpctrain.checkpoints.discover import checkpoints
from hpctrain.checkpoints.publish import published_steps
from hpctrain.records.run_records import TrainerExit, read_saves
from hpctrain.train import storage
from hpctrain.train.saving import publication, saver, writer
from hpctrain.train.storage import Need, check_room

CRASHED = TrainerExit.CRASH
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


def test_no_room_for_the_first_checkpoint(trial: MakeTrial, small: Mount) -> None:
    """Its size is estimated from the parameters; nothing of it is written."""
    made = trial(save_interval_steps=2, **TWO)
    small(made.run.checkpoints, MEGABYTE)
    assert made.train() == [CRASHED, CRASHED]
    message = _full(made)
    assert "estimated from the parameters" in message and "nothing was written" in message
    assert [row.step for row in made.rows] == [1, 2]
    assert list(made.run.checkpoints.iterdir()) == []


@pytest.mark.variant("test_full_in_the_middle_of_a_save")
def test_the_estimate_is_near_the_truth(gpt_reference: Trial, trial: MakeTrial) -> None:
    found: list[float] = []
    for settings in ({}, dict(tensor_model_parallel_size=2), TWO):
        made = trial(train_steps=1, **settings)
        told = made.run.directory / "estimate"

        def note_estimate(told: Path = told) -> None:
            @wrap(saver, "check_room")
            def note(real: Any, root: Path, need: Need) -> str | None:
                told.write_text(str(need.size_bytes))
                return real(root, need)

        assert set(made.train(prepare=note_estimate)) == {0}
        (checkpoint,) = checkpoints(made.run.checkpoints)
        assert checkpoint.manifest is not None
        found.append(int(told.read_text()) / checkpoint.manifest.total_bytes)
    assert all(0.8 < ratio < 1.2 for ratio in found), found


@pytest.mark.variant("test_full_in_the_middle_of_a_save")
def test_no_room_for_the_next_one(trial: MakeTrial, small: Mount) -> None:
    """Asked before anything is written; the old checkpoint stays, whatever `keep` says."""
    made = trial(save_interval_steps=2, keep_checkpoints=1, async_save=True, **TWO)
    small(made.run.checkpoints, ONE_AND_A_HALF)
    assert made.train() == [CRASHED, CRASHED]
    message = _full(made)
    assert "as much as iter_0000002" in message and "nothing was written or deleted" in message
    assert [one.name for one in made.run.checkpoints.glob("iter_*")] == ["iter_0000002"]
    assert [one.good for one in checkpoints(made.run.checkpoints, "sha256")] == [True]


def test_no_inodes_left(trial: MakeTrial, small: Mount) -> None:
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
    size_bytes: int, async_save: bool, trial: MakeTrial, small: Mount
) -> None:
    """The older checkpoints stay good, and the unfinished one takes no room any more."""
    made = trial(save_interval_steps=2, async_save=async_save, **TWO)
    small(made.run.checkpoints, size_bytes)
    assert made.train(prepare=_look_away) == [CRASHED, CRASHED]
    # where rank 0 cannot even write what is common to all, the other rank only loses its peer
    causes = {record.cause for record in made.exits()}
    assert "disk_full" in causes and causes <= {"disk_full", None}
    kept = checkpoints(made.run.checkpoints, "sha256")
    assert kept and all(one.good for one in kept)
    assert not list(made.run.checkpoints.glob("*.partial-*"))


@pytest.mark.variant("test_full_in_the_middle_of_a_save")
def test_full_while_records_are_written(trial: MakeTrial, small: Mount, tmp_path: Path) -> None:
    """The whole run directory is on the full file system: the record finds room again."""
    made = trial(save_interval_steps=2, data_cache=str(tmp_path / "cache"), **TWO)
    config = made.run.train_config.read_text()
    small(made.run.directory, TWO_AND_A_HALF)
    for directory in ("control", "epochs", "exits", "logs", "stacks", "checkpoints"):
        (made.run.directory / directory).mkdir()
    made.run.train_config.write_text(config)
    assert made.train(prepare=_look_away) == [CRASHED, CRASHED]
    assert _full(made)
    assert published_steps(made.run.checkpoints)


@pytest.mark.variant("test_no_room_for_the_first_checkpoint")
def test_a_used_up_quota(trial: MakeTrial) -> None:
    """Met by one rank's writer, known by all ranks."""

    def no_quota() -> None:
        def refuse(*arguments: object) -> None:
            raise OSError(122, "Disk quota exceeded")

        if os.environ["RANK"] == "1":
            writer.write_rank_digests = refuse

    made = trial(train_steps=1, **TWO)
    assert made.train(prepare=no_quota) == [CRASHED, CRASHED]
    assert "on another rank" in _full(made) and "Disk quota exceeded" in made.message(1)


def test_file_systems_without_a_number_of_inodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They report none of none (btrfs, some parallel ones), which is not too few."""
    real = os.statvfs(tmp_path)
    values = list(real)[:10]
    values[5:8] = [0, 0, 0]  # f_files, f_ffree, f_favail
    monkeypatch.setattr(storage.os, "statvfs", lambda path: os.statvfs_result(values))
    assert check_room(tmp_path, Need(1, 10**12, "test")) is None


def test_no_room_for_the_sample_order(trial: MakeTrial, small: Mount) -> None:
    """numpy names no errno there, and megatron-core wraps it twice."""
    made = trial(data_cache=None)
    made.run.data_cache.mkdir()
    small(made.run.data_cache, MEGABYTE)
    assert made.train() == [CRASHED]
    assert made.exits()[0].cause == "disk_full"


# -- A run directory that is away while the real trainer trains, saves and publishes ------------


def away(run: Path) -> Path:
    return run.with_name(f"{run.name}.away")


def brings_back(run: Path, *missed: Path, seconds: float = 1.5) -> threading.Thread:
    """Wait until the directory has been moved away and is `missed`, as these files say, then some
    seconds, then move it back."""

    def bring_back() -> None:
        end = time.monotonic() + LIMIT_SECONDS
        while not all(path.exists() for path in (away(run), *missed)) and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(seconds)
        assert not run.exists(), f"made anew: {sorted(run.rglob('*'))}"
        away(run).rename(run)

    thread = threading.Thread(target=bring_back)
    thread.start()
    return thread


def missed(run: Path) -> Path:
    """It is there when what was begun without the directory is through."""
    return run.with_name(f"{run.name}.missed")


def goes_away_at(module: Any, name: str, run: Path, rank: int) -> Callable[[], None]:
    """A `prepare`: the directory goes away when this rank calls the function for the first time."""

    def prepare() -> None:
        @wrap(module, name)
        def with_the_directory_gone(real: Any, *arguments: Any) -> Any:
            # a file of its own name, for a writer is a process that forgets
            done = run.with_name(f"{run.name}.done")
            if os.environ["RANK"] == str(rank) and not done.exists():
                done.touch()
                run.rename(away(run))
                try:
                    return real(*arguments)
                finally:
                    missed(run).touch()
            return real(*arguments)

    return prepare


def assert_exact(hurt: Trial, reference: Trial) -> None:
    assert hurt.losses == reference.losses
    assert [row.step for row in hurt.rows] == sorted(hurt.losses), "no row lost, none doubled"
    assert all(one.good for one in checkpoints(hurt.run.checkpoints, "sha256"))
    steps = [save.step for save in read_saves(hurt.run)]
    assert steps == sorted(set(steps)) and steps[-1] == 6


@pytest.mark.variant("test_one_that_is_away_for_too_long_is_a_fault_of_storage")
def test_rows_wait_while_training_goes_on(trial: MakeTrial, gpt_reference: Trial) -> None:
    hurt = trial()
    released = hurt.run.directory.with_name("released")
    ranks = hurt.start(prepare=held_at(2, lambda loop: released.exists(), rank=0))
    hurt.wait_for_step(1, ranks)
    back = brings_back(hurt.run.directory)
    hurt.run.directory.rename(away(hurt.run.directory))
    released.touch()
    assert ranks.wait(LIMIT_SECONDS) == [0], ranks.log()
    back.join()
    assert_exact(hurt, gpt_reference)


ASYNC: dict[str, Any] = dict(TWO, async_save=True)
# what loses the directory, on which rank; rank 0 alone writes what follows the files of the ranks,
# and megatron-core has the others wait for it
LOST: dict[str, tuple[Any, str, int, dict[str, Any]]] = {
    "writer": (writer, "write_rank_digests", 0, {}),
    "publisher": (publication, "publish", 0, dict(async_save=True)),
    "writer of one rank": (writer, "write_rank_digests", 1, ASYNC),
    "index": (filesystem_async.FileSystemWriterAsync, "finish", 0, ASYNC),
    "format": (serialization, "save_config", 0, ASYNC),
}


@pytest.mark.variant("test_one_that_is_away_for_too_long_is_a_fault_of_storage")
@pytest.mark.parametrize("what", LOST)
def test_a_save_that_loses_its_directory_is_made_again_by_all(what: str, trial: MakeTrial) -> None:
    module, name, rank, changes = LOST[what]
    hurt = trial(save_interval_steps=2, **changes)
    run = hurt.run.directory
    back = brings_back(run, missed(run))
    assert set(hurt.train(prepare=goes_away_at(module, name, run, rank))) == {0}
    back.join()
    assert_exact(hurt, trained(data_parallel_size=hurt.world_size))
    if hurt.world_size > 1:
        assert "event=save_put_off checkpoint=iter_0000002" in hurt.said
    else:
        assert 2 in {save.step for save in read_saves(hurt.run)} or changes


def test_one_that_is_away_for_too_long_is_a_fault_of_storage(trial: MakeTrial) -> None:
    """Not a newer launch, and no crash of the program: the supervisor waits and tries again."""
    hurt = trial(save_interval_steps=2, **TWO)
    run = hurt.run.directory

    def leaving(rank: int) -> Path:
        return run.with_name(f"{run.name}.leaving-{rank}")

    def prepare() -> None:
        storage.PATIENCE_SECONDS = 1.0
        storage._EXIT_RECORD_SECONDS = LIMIT_SECONDS
        goes_away_at(publication, "publish", run, 0)()

        @wrap(storage, "write_exit_record")
        def write_exit_record(real: Any, layout: Any, node_rank: int, record: Any) -> None:
            leaving(record.rank).touch()
            real(layout, node_rank, record)

    back = brings_back(run, leaving(0), leaving(1))
    assert hurt.train(prepare=prepare) == [TrainerExit.CRASH] * 2
    back.join()
    records = hurt.exits()
    assert [record.cause for record in records] == ["storage", "storage"]
    assert all("was away" in (record.message or "") for record in records)
