"""A run directory that is away while the real trainer trains, saves and publishes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies import filesystem_async
from trial_runs import LIMIT_SECONDS, Trial, held_at, trained

from hpctrain.checkpoints.discover import checkpoints
from hpctrain.records.run_records import TrainerExit, read_saves
from hpctrain.train import storage
from hpctrain.train.saving import saver, writer

DP2 = dict(data_parallel_size=2)


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


def once(module: Any, name: str, run: Path, rank: int) -> Callable[[], None]:
    """A `prepare`: the directory goes away when this rank calls the function for the first time."""

    def prepare() -> None:
        import os

        real = getattr(module, name)

        def with_the_directory_gone(*arguments: Any) -> Any:
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

        setattr(module, name, with_the_directory_gone)

    return prepare


def assert_exact(hurt: Trial, reference: Trial) -> None:
    assert hurt.losses == reference.losses
    assert [row.step for row in hurt.rows] == sorted(hurt.losses), "no row lost, none doubled"
    assert all(one.good for one in checkpoints(hurt.run.checkpoints, "sha256"))
    steps = [save.step for save in read_saves(hurt.run)]
    assert steps == sorted(set(steps)) and steps[-1] == 6


@pytest.mark.variant("test_one_that_is_away_for_too_long_is_a_fault_of_storage")
def test_rows_wait_while_training_goes_on(
    trial: Callable[..., Trial], gpt_reference: Trial
) -> None:
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


@pytest.mark.variant("test_one_that_is_away_for_too_long_is_a_fault_of_storage")
@pytest.mark.parametrize(
    ("module", "name", "changes"),
    [
        pytest.param(writer, "write_rank_digests", {}, id="writer"),
        pytest.param(saver, "publish", {"async_save": True}, id="publisher"),
    ],
)
def test_a_save_that_loses_its_directory_is_made_again(
    trial: Callable[..., Trial],
    gpt_reference: Trial,
    module: Any,
    name: str,
    changes: dict[str, bool],
) -> None:
    hurt = trial(save_interval_steps=2, **changes)
    run = hurt.run.directory
    back = brings_back(run, missed(run))
    assert hurt.train(prepare=once(module, name, run, 0)) == [0]
    back.join()
    assert_exact(hurt, gpt_reference)
    assert 2 in {save.step for save in read_saves(hurt.run)} or changes


@pytest.mark.variant("test_one_that_is_away_for_too_long_is_a_fault_of_storage")
def test_a_save_whose_files_one_rank_has_lost_is_made_again_by_all(
    trial: Callable[..., Trial],
) -> None:
    hurt = trial(save_interval_steps=2, async_save=True, **DP2)
    run = hurt.run.directory
    back = brings_back(run, missed(run))
    ranks = hurt.start(prepare=once(writer, "write_rank_digests", run, 1))
    assert ranks.wait(LIMIT_SECONDS) == [0, 0], ranks.log()
    back.join()
    assert_exact(hurt, trained(**DP2))
    assert "event=save_put_off checkpoint=iter_0000002" in ranks.log()


@pytest.mark.variant("test_one_that_is_away_for_too_long_is_a_fault_of_storage")
@pytest.mark.parametrize(
    ("module", "name"),
    [
        (filesystem_async.FileSystemWriterAsync, "finish"),
        pytest.param(serialization, "save_config", marks=pytest.mark.variant),
    ],
    ids=["index", "format"],
)
def test_a_save_that_loses_its_directory_before_its_metadata_is_made_again_by_all(
    trial: Callable[..., Trial], module: Any, name: str
) -> None:
    """Rank 0 alone writes these, and megatron-core has the others wait for it."""
    hurt = trial(save_interval_steps=2, async_save=True, **DP2)
    run = hurt.run.directory
    back = brings_back(run, missed(run))
    ranks = hurt.start(prepare=once(module, name, run, 0))
    assert ranks.wait(LIMIT_SECONDS) == [0, 0], ranks.log()
    back.join()
    assert_exact(hurt, trained(**DP2))
    assert "event=save_put_off checkpoint=iter_0000002" in ranks.log()


def test_one_that_is_away_for_too_long_is_a_fault_of_storage(trial: Callable[..., Trial]) -> None:
    """Not a newer launch, and no crash of the program: the supervisor waits and tries again."""
    hurt = trial(save_interval_steps=2, **DP2)
    run = hurt.run.directory

    def leaving(rank: int) -> Path:
        return run.with_name(f"{run.name}.leaving-{rank}")

    def prepare() -> None:
        from hpctrain.train import entry

        storage.PATIENCE_SECONDS = 1.0
        entry._EXIT_RECORD_SECONDS = LIMIT_SECONDS
        once(saver, "publish", run, 0)()
        real = entry.write_exit_record

        def write_exit_record(layout: Any, node_rank: int, record: Any) -> None:
            leaving(record.rank).touch()
            real(layout, node_rank, record)

        entry.write_exit_record = write_exit_record

    back = brings_back(run, leaving(0), leaving(1))
    assert hurt.train(prepare=prepare) == [TrainerExit.CRASH] * 2
    back.join()
    records = hurt.exits()
    assert [record.cause for record in records] == ["storage", "storage"]
    assert all("was away" in (record.message or "") for record in records)
