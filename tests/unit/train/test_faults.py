"""Which word the supervisor gets for an exception, and that unclear ones get none."""

from __future__ import annotations

import errno
import pickle
from pathlib import Path

import pytest

from hpctrain.base.errors import CheckpointError
from hpctrain.checkpoints.publish import StaleEpochError
from hpctrain.judge.causes import Cause
from hpctrain.train import faults
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
from hpctrain.train.storage import NoSpaceError


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
