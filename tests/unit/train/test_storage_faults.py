"""What a rank makes of errors: their causes, and how long it waits for its run directory."""

from __future__ import annotations

import errno
import pickle
from pathlib import Path

import pytest

from hpctrain.base.errors import CheckpointError, StorageError
from hpctrain.checkpoints.publish import StaleEpochError
from hpctrain.judge.causes import Cause
from hpctrain.records.epochs import claim_epoch
from hpctrain.records.layout import RunLayout
from hpctrain.train import faults, storage
from hpctrain.train.faults import (
    BadCheckpointError,
    DataError,
    DivergedError,
    LoadFailedError,
    UnreadableCheckpointError,
    blames_checkpoint,
    cause_of,
    is_damage,
    is_node_dependent,
)
from hpctrain.train.rank_environment import Launch
from hpctrain.train.storage import (
    NoSpaceError,
    failed_below,
    fence_of,
    is_away,
    lost_in,
    outlast,
    stale_or,
)

# -- Which word the supervisor gets for an exception, and that unclear ones get none -------------


class OutOfMemoryError(RuntimeError):
    """As torch names its own."""


class CheckpointException(Exception):
    """As torch's loader collects what its ranks have met."""

    def __init__(self, *errors: BaseException) -> None:
        super().__init__("loading failed")
        self.failures = {rank: (error, None) for rank, error in enumerate(errors)}


STORE = (
    "The server socket has failed to listen on any local network address. port: 29500, "
    "useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"
)


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (OSError(28, "No space left on device"), "disk_full"),
        (OSError(122, "Disk quota exceeded"), "disk_full"),
        (RuntimeError("OSError: [Errno 28] No space left on device"), "disk_full"),
        (OSError("Not enough free space to write 170 bytes after offset 128"), "disk_full"),
        (NoSpaceError("no room for a checkpoint"), "disk_full"),
        (OutOfMemoryError("CUDA out of memory."), "gpu_oom"),
        (MemoryError(), "host_oom"),
        (OSError(98, "Address already in use"), "port"),
        (RuntimeError(STORE), "port"),
        (DivergedError(3, 16, float("nan"), "the loss is not finite"), "diverged"),
        (BadCheckpointError("a digest differs"), "bad_checkpoint"),
        (LoadFailedError("cannot resume"), "load_failed"),
        (UnreadableCheckpointError("rank 1 on n1 cannot read a shard"), "storage"),
        (DataError("samples 8 to 15 cannot be read"), "data_loader"),
        (StaleEpochError("launch epoch 1 is stale"), "superseded"),
        (SystemExit(16), "suspect_numerics"),
        (SystemExit(17), "diverged"),
        (SystemExit(3), None),
        (OSError(5, "Input/output error"), None),
        (CheckpointError("the writer failed on another rank"), None),
        (RuntimeError("Connection closed by peer"), None),
        (KeyError("step"), None),
        (ValueError("28"), None),
    ],
)
def test_the_cause_of_an_error(error: BaseException, cause: str | None) -> None:
    assert cause_of(error) == cause
    assert cause is None or Cause(cause)


def test_the_cause_is_looked_for_behind_other_errors() -> None:
    try:
        try:
            raise OSError(28, "No space left on device")
        except OSError as error:
            raise Exception("Failed to write dataset materials") from error
    except Exception as error:
        assert cause_of(error) == "disk_full"
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    assert cause_of(first) is None, "a chain may be a ring"


def test_a_lost_neighbour_is_no_damaged_checkpoint() -> None:
    """Two failures to load give a checkpoint up, so only what the files hold may be called so."""
    reader = RuntimeError("PytorchStreamReader failed reading zip archive")
    for error in (EOFError(), KeyError("x"), pickle.UnpicklingError(), reader):
        assert is_damage(error) and is_damage(CheckpointException(error, error))
    for error in (OSError(5, "Input/output error"), RuntimeError("Connection closed by peer")):
        assert not is_damage(error)
        assert not is_damage(CheckpointException(EOFError(), error))
    assert not is_damage(CheckpointException())


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/tmp/x"), True),
        (NoSpaceError("no room for a checkpoint"), False),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), False),
        (OSError(errno.EIO, "Input/output error"), False),
        (ValueError("bad batch"), False),
    ],
)
def test_a_full_disk_of_one_node_is_told_from_that_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, expected: bool
) -> None:
    assert is_node_dependent(error, tmp_path) is expected
    wrapped = RuntimeError("while saving")
    wrapped.__cause__ = error
    assert is_node_dependent(wrapped, tmp_path) is expected
    monkeypatch.setattr(faults, "exhausted", lambda path: path == tmp_path)
    assert not is_node_dependent(error, tmp_path), "the disk that is full is the run's own"


class DistNetworkError(type("DistError", (RuntimeError,), {})):  # type: ignore[misc]
    """Stands in for torch's, which is known by the names of its classes."""


@pytest.mark.parametrize(
    ("error", "blames"),
    [
        (LoadFailedError("PytorchStreamReader failed"), True),
        (BadCheckpointError("a digest differs"), True),
        (KeyError("optimizer"), True),
        (RuntimeError("size mismatch for weight"), True),
        (CheckpointException(EOFError(), ValueError("x")), True),
        (FileNotFoundError(2, "No such file or directory"), True),
        (OSError(22, "Invalid argument"), True),
        (OSError(5, "Input/output error"), False),
        (OSError(116, "Stale file handle"), False),
        (PermissionError(13, "Permission denied"), False),
        (ConnectionResetError(104, "Connection reset by peer"), False),
        (CheckpointException(EOFError(), OSError(5, "Input/output error")), False),
        (DistNetworkError("timed out"), False),
        (OutOfMemoryError("CUDA out of memory."), False),
        (MemoryError(), False),
        (StaleEpochError("launch epoch 1 is stale"), False),
        (UnreadableCheckpointError("rank 1 on n1 cannot read a shard"), False),
        (SystemExit(16), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_what_speaks_against_the_checkpoint(error: BaseException, blames: bool) -> None:
    assert blames_checkpoint(error) is blames


def test_a_machine_fault_behind_another_error_does_not_speak_against_it() -> None:
    try:
        try:
            raise OSError(5, "Input/output error")
        except OSError as error:
            raise RuntimeError("could not read __0_0.distcp") from error
    except RuntimeError as error:
        assert not blames_checkpoint(error)


# -- What a rank makes of a run directory that is out of reach, and for how long it waits --------


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
