"""Map exceptions to the supervisor's causes of failure, where the exception proves the cause.

Everything else stays a plain crash, and the supervisor decides from the logs of all ranks. Imports
nothing heavy: it must work when importing torch has failed.
"""

from __future__ import annotations

import errno
import pickle
import re
from pathlib import Path

from hpctrain.base.durable import FULL_ERRNOS
from hpctrain.base.errors import CheckpointError, HpctrainError, StorageError
from hpctrain.checkpoints.publish import StaleEpochError
from hpctrain.train.storage import NoSpaceError, chain, exhausted

# Exit codes of megatron-core's rerun_state_machine.py, which computes suspicious results again
_MEGATRON_EXITS: dict[object, str] = {16: "suspect_numerics", 17: "diverged"}
# Messages of a full disk, for errors that have lost their errno in another process or a library.
_FULL_WORDS = re.compile(
    rf"\[Errno ({errno.ENOSPC}|{errno.EDQUOT})\]|No space left on device"
    r"|Not enough free space to write"  # numpy, ndarray.tofile
)
# torch's rendezvous (TCPStore) and sockets of gloo and NCCL
_PORT_WORDS = re.compile(r"EADDRINUSE|[Aa]ddress already in use")


class BadCheckpointError(CheckpointError):
    """Files of the checkpoint to resume from differ from what was written, as digests prove."""


class LoadFailedError(CheckpointError):
    """The checkpoint to resume from was read and could not be loaded."""


class UnreadableCheckpointError(CheckpointError):
    """This rank cannot read a file of a checkpoint that is otherwise intact."""


class RefusedElsewhereError(HpctrainError):
    """Ranks on other nodes refuse the launch, for reasons that this node does not have."""


class SlowNodesError(HpctrainError):
    """GPUs or links of some nodes are slow, and the supervisor can replace these nodes."""


class DataError(HpctrainError):
    """The dataset could not be read while training."""


class DivergedError(HpctrainError):
    """A step with invalid numbers; no state after `step` - 1 may be saved."""

    def __init__(self, step: int, consumed_samples: int, loss: float, what: str) -> None:
        super().__init__(
            f"diverged at step {step}: {what}; loss {loss:.7g}; "
            f"{consumed_samples} samples consumed before the step"
        )
        self.step = step
        self.consumed_samples = consumed_samples


def cause_of(error: BaseException) -> str | None:
    """Return the value of a `hpctrain.judge.causes.Cause`; None if the error is unclear.

    Examines the chain of exceptions, the outermost first.
    """
    return next((cause for link in chain(error) if (cause := _own_cause(link))), None)


def is_full(error: BaseException) -> bool:
    """Check whether the file system or a quota is full."""
    if isinstance(error, NoSpaceError):
        return True
    if isinstance(error, OSError) and error.errno in FULL_ERRNOS:
        return True
    return isinstance(error, OSError | RuntimeError) and bool(_FULL_WORDS.search(str(error)))


def is_node_dependent(error: BaseException, checkpoints: Path) -> bool:
    """Check whether only this node has the problem: a full disk that other nodes do not share.

    The disk of `checkpoints` is shared by all nodes; so is one with quotas.
    """
    for link in chain(error):
        if isinstance(link, NoSpaceError):
            return False
        if isinstance(link, OSError) and link.errno == errno.ENOSPC:
            return not exhausted(checkpoints)
    return False


def is_damage(error: BaseException) -> bool:
    """Check whether loading failed because of the content of files, not a machine or file system.

    torch's loader collects the failures of all ranks (checkpoint/api.py, CheckpointException).
    """
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict) and failures:
        return all(is_damage(failure[0]) for failure in failures.values())
    if isinstance(error, EOFError | KeyError | pickle.UnpicklingError):
        return True
    if isinstance(error, OSError) and error.errno == errno.EINVAL:
        return True  # torch.load seeks the lost directory of its archive before the file's start
    return isinstance(error, RuntimeError) and "PytorchStreamReader" in str(error)


def blames_checkpoint(error: BaseException) -> bool:
    """Check whether an error raised while loading may be the checkpoint's fault, by its type.

    Errors of a machine, a file system, a peer or a person do not count: the same files may load in
    another attempt or on other nodes. A missing file counts, because the rank has checked before
    that all files of the manifest exist.
    """
    return not any(_is_machine_fault(link) for link in chain(error))


# torch.distributed's own errors (torch/distributed/__init__.py), without importing torch
_DISTRIBUTED_ERRORS = frozenset({"DistError", "OutOfMemoryError"})


def _is_machine_fault(error: BaseException) -> bool:
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict) and failures:
        return any(not blames_checkpoint(failure[0]) for failure in failures.values())
    if isinstance(error, SystemExit | KeyboardInterrupt | MemoryError):
        return True
    if isinstance(error, StaleEpochError | UnreadableCheckpointError) or is_full(error):
        return True
    if isinstance(error, OSError):
        return not is_damage(error) and error.errno != errno.ENOENT
    return bool(_DISTRIBUTED_ERRORS & {kind.__name__ for kind in type(error).__mro__})


_CAUSES: tuple[tuple[type[BaseException], str], ...] = (
    (StaleEpochError, "superseded"),
    (StorageError, "storage"),
    (BadCheckpointError, "bad_checkpoint"),
    (SlowNodesError, "node_failure"),
    (LoadFailedError, "load_failed"),
    (UnreadableCheckpointError, "storage"),
    (DataError, "data_loader"),
    (DivergedError, "diverged"),
    (MemoryError, "host_oom"),
)


def _own_cause(error: BaseException) -> str | None:
    known = next((cause for kind, cause in _CAUSES if isinstance(error, kind)), None)
    if known is not None:
        return known
    if is_full(error):
        return "disk_full"
    if isinstance(error, SystemExit):
        return _MEGATRON_EXITS.get(error.code)
    if type(error).__name__ == "OutOfMemoryError":  # torch's, without importing torch
        return "gpu_oom"
    if isinstance(error, OSError | RuntimeError) and _PORT_WORDS.search(str(error)):
        return "port"
    return None
