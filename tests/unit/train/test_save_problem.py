"""A problem of rank 0 as a value that all ranks can raise."""

from __future__ import annotations

import errno
import pickle

import pytest

from hpctrain.base.errors import CheckpointError, HpctrainError, StorageError
from hpctrain.checkpoints.publish import StaleEpochError
from hpctrain.train.saving.saver import SaveProblem, SaveProblemKind
from hpctrain.train.storage import NoSpaceError

FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("error", "kind", "raised"),
    [
        (StaleEpochError("epoch 3 owns the run"), SaveProblemKind.STALE, StaleEpochError),
        (StorageError("full: away"), SaveProblemKind.AWAY, StorageError),
        (FULL, SaveProblemKind.FULL, NoSpaceError),
        (CheckpointError("retry: a digest is missing"), SaveProblemKind.FAILED, CheckpointError),
        (ValueError("stale: no"), SaveProblemKind.FAILED, CheckpointError),
    ],
)
def test_the_kind_follows_from_the_error_and_not_from_its_text(
    error: Exception, kind: SaveProblemKind, raised: type[HpctrainError]
) -> None:
    problem = pickle.loads(pickle.dumps(SaveProblem.of(error)))
    assert (problem.kind, problem.message) == (kind, str(error))
    assert type(problem.error) is raised and str(problem.error) == str(error)


def test_an_error_of_the_program_is_shown_with_its_type() -> None:
    assert SaveProblem.of(KeyError("x")).message == "KeyError('x')"


def test_every_kind_can_be_raised() -> None:
    assert all(str(SaveProblem(kind, "x").error) == "x" for kind in SaveProblemKind)
