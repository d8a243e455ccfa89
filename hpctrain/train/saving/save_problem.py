"""Describe on rank 0 why a checkpoint cannot be written or published, and raise it on all ranks.

Rank 0 broadcasts the value, so it holds no exception, whose content may not be picklable. Belongs
here: kinds of problems and the errors they become. Does not belong here: finding one
(`saver`, `saver`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from hpctrain.base.errors import CheckpointError, HpctrainError, StorageError
from hpctrain.checkpoints.publish import StaleEpochError
from hpctrain.train.faults import is_full
from hpctrain.train.free_space import NoSpaceError


class SaveProblemKind(StrEnum):
    """RETRY: the run directory is away and may come back, so all ranks try again."""

    RETRY = "retry"
    STALE = "stale"
    AWAY = "away"
    FULL = "full"
    FAILED = "failed"


@dataclass(frozen=True)
class SaveProblem:
    """A problem of rank 0 that concerns all ranks."""

    kind: SaveProblemKind
    message: str

    @classmethod
    def of(cls, error: Exception) -> SaveProblem:
        """Classify an error that ended the publication of a checkpoint."""
        if isinstance(error, StaleEpochError):
            kind = SaveProblemKind.STALE
        elif isinstance(error, StorageError):
            kind = SaveProblemKind.AWAY
        else:
            kind = SaveProblemKind.FULL if is_full(error) else SaveProblemKind.FAILED
        known = isinstance(error, CheckpointError | OSError | ValueError)
        return cls(kind, str(error) if known else repr(error))

    @property
    def error(self) -> HpctrainError:
        """The exception that every rank raises."""
        return _ERRORS[self.kind](self.message)


_ERRORS: dict[SaveProblemKind, type[HpctrainError]] = {
    SaveProblemKind.RETRY: StorageError,
    SaveProblemKind.STALE: StaleEpochError,
    SaveProblemKind.AWAY: StorageError,
    SaveProblemKind.FULL: NoSpaceError,
    SaveProblemKind.FAILED: CheckpointError,
}
