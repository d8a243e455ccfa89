"""What a rank makes of a run directory that is out of reach, and for how long it waits."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.base.errors import CheckpointError, StorageError
from hpctrain.checkpoints.publish import StaleEpochError
from hpctrain.records.epochs import claim_epoch
from hpctrain.records.layout import RunLayout
from hpctrain.train import storage
from hpctrain.train.rank_environment import Launch
from hpctrain.train.storage import (
    failed_below,
    fence_of,
    is_away,
    lost_in,
    outlast,
    stale_or,
)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunLayout:
    monkeypatch.setattr(storage, "_RETRY_SECONDS", 0.01)
    layout = RunLayout(tmp_path / "run")
    layout.create()
    layout.train_config.write_text("{}")
    return layout


def launch(epoch: int) -> Launch:
    return Launch(rank=0, world_size=1, local_rank=0, node="n0", epoch=epoch, resume="")


def behind(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "away"),
    [
        (OSError(5, "Input/output error"), True),
        (OSError(30, "Read-only file system"), True),
        (OSError(116, "Stale file handle"), True),
        (OSError(108, "Cannot send after transport endpoint shutdown"), True),
        (StorageError("the directory is not what it was"), True),
        (behind(RuntimeError("save failed"), OSError(116, "Stale file handle")), True),
        (FileNotFoundError(2, "No such file or directory"), False),
        (OSError(28, "No space left on device"), False),
        (PermissionError(13, "Permission denied"), False),
        (CheckpointError("iter_0000004 lacks a shard"), False),
        (ValueError("30"), False),
    ],
)
def test_which_errors_are_a_fault_of_storage(run: RunLayout, error: Exception, away: bool) -> None:
    assert is_away(error, run) is away
    run.directory.rename(run.directory.with_name("elsewhere"))
    assert is_away(error, run), "whatever fails while the whole directory is away"


def test_a_file_that_is_missing_where_we_write_has_gone_with_its_directory(tmp_path: Path) -> None:
    ours, other = tmp_path / "iter_1.partial-e000001", tmp_path / "data"
    missing = FileNotFoundError(2, "No such file or directory", str(ours / "__0_0.distcp"))
    assert lost_in(ours, missing) and lost_in(ours, behind(RuntimeError("save"), missing))
    assert not lost_in(other, missing)
    assert not lost_in(ours, FileNotFoundError(2, "No such file or directory"))


def test_only_what_is_about_a_file_of_the_run_has_failed_for_its_directory(run: RunLayout) -> None:
    """A peer that is lost while the directory is away is a peer that is lost."""
    ours = FileNotFoundError(2, "No such file or directory", str(run.checkpoints / "iter_1"))
    stale = OSError(116, "Stale file handle", str(run.metrics))
    others = FileNotFoundError(2, "No such file or directory", str(run.directory.parent / "data"))
    reset = ConnectionResetError(104, "Connection reset by peer")
    assert not failed_below(run, ours), "missing in a directory that is there"
    assert failed_below(run, behind(RuntimeError("load"), stale))
    run.directory.rename(run.directory.with_name("elsewhere"))
    assert failed_below(run, behind(RuntimeError("load"), ours))
    for error in (others, reset, RuntimeError("Connection closed by peer")):
        assert not failed_below(run, error)


def test_what_fails_while_the_directory_is_away_is_done_when_it_is_back(run: RunLayout) -> None:
    away = run.directory.with_name("away")
    run.directory.rename(away)
    tries: list[int] = []

    def work() -> str:
        tries.append(1)
        if len(tries) == 3:
            away.rename(run.directory)
        return run.train_config.read_text()

    assert outlast(run, work) == "{}"
    assert len(tries) == 3


def test_a_file_that_was_missing_with_its_directory_is_looked_for_again(run: RunLayout) -> None:
    tries: list[int] = []

    def work() -> None:
        tries.append(1)
        (run.checkpoints / "absent").read_text()

    with pytest.raises(FileNotFoundError):
        outlast(run, work)
    assert len(tries) == 3, "twice more, for the directory is there"
    tries.clear()

    def other() -> None:
        tries.append(1)
        raise ValueError("of the program")

    with pytest.raises(ValueError, match="of the program"):
        outlast(run, other)
    assert len(tries) == 1


def test_patience_ends(run: RunLayout) -> None:
    run.directory.rename(run.directory.with_name("elsewhere"))
    with pytest.raises(StorageError, match="was away for 0 s"):
        outlast(run, run.require, patience_seconds=0.05)


def test_who_owns_the_run(run: RunLayout) -> None:
    fence_of(run, launch(0)).check()
    assert claim_epoch(run.epochs, "first") == 1
    fence_of(run, launch(1)).check()
    error = RuntimeError("some file is gone")
    assert stale_or(error, run, launch(1)) is error
    assert stale_or(error, run, launch(2)) is error, "an older epoch takes nothing away"
    with pytest.raises(StorageError, match="the newest launch in the run directory is 1"):
        fence_of(run, launch(2)).check()
    assert claim_epoch(run.epochs, "second") == 2
    stale = stale_or(error, run, launch(1))
    assert isinstance(stale, StaleEpochError) and "some file is gone" in str(stale)
    run.directory.rename(run.directory.with_name("elsewhere"))
    assert stale_or(error, run, launch(1)) is error, "nobody can tell"
    for epoch in (0, 1):
        with pytest.raises(OSError, match=r"away|No such file"):
            fence_of(run, launch(epoch)).check()


def test_started_by_hand_without_a_supervisor(run: RunLayout) -> None:
    run.epochs.rmdir()
    fence_of(run, launch(0)).check()
