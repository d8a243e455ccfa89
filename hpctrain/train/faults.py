"""From an exception to the word for it that the supervisor knows, where the trainer can tell.

Belongs here: errors whose cause is beyond doubt. Everything else stays a plain crash, and the logs
of all ranks decide. Imports nothing heavy: it is needed when importing torch has failed, too.
"""

from __future__ import annotations

import errno
import pickle
import re
from pathlib import Path

from hpctrain.checkpoints.publish import StaleEpochError
from hpctrain.durable import FULL_ERRNOS
from hpctrain.errors import CheckpointError, HpctrainError, StorageError
from hpctrain.train.free_space import NoSpaceError, exhausted
from hpctrain.train.storage import chain

# rerun_state_machine.py: what megatron-core ends a process with that has computed a result twice
_MEGATRON_EXITS: dict[object, str] = {16: "suspect_numerics", 17: "diverged"}
# How a full disk reads when only the text of an error has crossed a process or a library.
_FULL_WORDS = re.compile(
    rf"\[Errno ({errno.ENOSPC}|{errno.EDQUOT})\]|No space left on device"
    r"|Not enough free space to write"  # numpy, ndarray.tofile
)
# torch's rendezvous (TCPStore) and sockets of gloo and NCCL
_PORT_WORDS = re.compile(r"EADDRINUSE|[Aa]ddress already in use")


class BadCheckpointError(CheckpointError):
    """Files of the checkpoint to resume from are not as they were written: proven, by digests."""


class LoadFailedError(CheckpointError):
    """The checkpoint to resume from was read and could not be loaded."""


class UnreadableCheckpointError(CheckpointError):
    """This rank cannot read a file of the checkpoint, of which nothing else is wrong."""


class DataError(HpctrainError):
    """The dataset could not be read while training."""


class DivergedError(HpctrainError):
    """A step whose numbers must not be trained on; nothing after `step` - 1 may be saved."""

    def __init__(self, step: int, consumed_samples: int, loss: float, what: str) -> None:
        super().__init__(
            f"diverged at step {step}: {what}; loss {loss:.7g}; "
            f"{consumed_samples} samples consumed before the step"
        )
        self.step = step
        self.consumed_samples = consumed_samples


def cause_of(error: BaseException) -> str | None:
    """`hpctrain.supervise.judge.causes.Cause` by its value; None when the error alone does not
    tell.

    Looks through the chain of exceptions, the outermost first.
    """
    for one in chain(error):
        cause = _own_cause(one)
        if cause is not None:
            return cause
    return None


def is_full(error: BaseException) -> bool:
    """True if the file system or a quota is full."""
    if isinstance(error, NoSpaceError):
        return True
    if isinstance(error, OSError) and error.errno in FULL_ERRNOS:
        return True
    return isinstance(error, OSError | RuntimeError) and bool(_FULL_WORDS.search(str(error)))


def is_node_dependent(error: BaseException, checkpoints: Path) -> bool:
    """True if ranks on other nodes may not have met the error: a disk of this node is full.

    Not that of `checkpoints`, which all nodes share, nor a quota, which a user has on such a disk.
    """
    for one in chain(error):
        if isinstance(one, NoSpaceError):
            return False
        if isinstance(one, OSError) and one.errno == errno.ENOSPC:
            return not exhausted(checkpoints)
    return False


def is_damage(error: BaseException) -> bool:
    """True if loading failed by what the files hold, not by a machine or a file system.

    torch's loader collects what each rank has met (checkpoint/api.py, CheckpointException).
    """
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict) and failures:
        return all(is_damage(one[0]) for one in failures.values())
    if isinstance(error, EOFError | KeyError | pickle.UnpicklingError):
        return True
    if isinstance(error, OSError) and error.errno == errno.EINVAL:
        return True  # torch.load seeks the lost directory of its archive before the file's start
    return isinstance(error, RuntimeError) and "PytorchStreamReader" in str(error)


def blames_checkpoint(error: BaseException) -> bool:
    """True if what was raised while loading may be the checkpoint's fault, by its type.

    Not so where a machine, a file system, a peer or a person ended it: on another try, or on other
    nodes, the same files may load. A file that is not there counts, for the rank has seen all that
    the manifest lists before.
    """
    return not any(_is_machine_fault(one) for one in chain(error))


# torch.distributed's own errors (torch/distributed/__init__.py), without importing torch
_DISTRIBUTED_ERRORS = frozenset({"DistError", "OutOfMemoryError"})


def _is_machine_fault(error: BaseException) -> bool:
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict) and failures:
        return any(not blames_checkpoint(one[0]) for one in failures.values())
    if isinstance(error, SystemExit | KeyboardInterrupt | MemoryError):
        return True
    if isinstance(error, StaleEpochError | UnreadableCheckpointError) or is_full(error):
        return True
    if isinstance(error, OSError):
        return not is_damage(error) and error.errno != errno.ENOENT
    return bool(_DISTRIBUTED_ERRORS & {kind.__name__ for kind in type(error).__mro__})


def _own_cause(error: BaseException) -> str | None:
    kind = type(error).__name__
    if isinstance(error, StaleEpochError):
        return "superseded"
    if isinstance(error, StorageError):
        return "storage"
    if is_full(error):
        return "disk_full"
    if isinstance(error, BadCheckpointError):
        return "bad_checkpoint"
    if isinstance(error, LoadFailedError):
        return "load_failed"
    if isinstance(error, UnreadableCheckpointError):
        return "storage"
    if isinstance(error, DataError):
        return "data_loader"
    if isinstance(error, DivergedError):
        return "diverged"
    if isinstance(error, SystemExit):
        return _MEGATRON_EXITS.get(error.code)
    if isinstance(error, MemoryError):
        return "host_oom"
    if kind == "OutOfMemoryError":  # torch.OutOfMemoryError, without importing torch
        return "gpu_oom"
    if isinstance(error, OSError | RuntimeError) and _PORT_WORDS.search(str(error)):
        return "port"
    return None
