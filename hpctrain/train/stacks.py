"""Telling where every thread of a rank is, on SIGQUIT, into a file that is open from the start.

The dump is made by faulthandler in C, in the signal handler itself: it needs neither Python's lock
nor a main thread that listens, so it works while a collective hangs or an extension holds the
lock, and it touches the file system only to write. Belongs here: that file, and the same for NCCL
(its flight recorder). Does not belong here: when a dump is asked for and what it tells (the
supervisor's business). Imports nothing heavy, because it must be in force before torch.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Mapping
from pathlib import Path

from hpctrain.durable import shared_mode
from hpctrain.store.layout import RunLayout
from hpctrain.train.rank_environment import Launch

# Entries of the ring buffer per rank: what newer torch keeps by default (FlightRecorder.hpp); older
# ones keep none unless told.
_TRACE_ENTRIES = 2000
# What the drivers of NVIDIA and AMD create.
_GPU_FILES = (Path("/dev/nvidiactl"), Path("/dev/kfd"))


class StackDump:
    """The open dump file of this rank; SIGQUIT appends the stacks of all threads to it."""

    def __init__(self, path: Path, header: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
        self._path = path
        self._descriptor = os.open(path, flags, shared_mode(path.parent, 0o600))
        os.write(self._descriptor, header.encode())
        self._empty_bytes = os.fstat(self._descriptor).st_size
        faulthandler.register(signal.SIGQUIT, self._descriptor, all_threads=True, chain=False)

    def discard_if_unused(self) -> None:
        """Remove the file of a rank that ends by itself and was never asked: one file per rank
        and launch adds up on a large machine."""
        faulthandler.unregister(signal.SIGQUIT)
        if os.fstat(self._descriptor).st_size == self._empty_bytes:
            self._path.unlink(missing_ok=True)


def open_stack_dump(run: RunLayout, launch: Launch) -> StackDump:
    """Open this rank's dump file and take over SIGQUIT. Raises OSError if it cannot be made."""
    path = run.stack_dump(launch.epoch, launch.rank)
    run.make_directory(path.parent)
    return StackDump(path, dump_header(launch.rank, launch.node, launch.epoch))


def dump_header(rank: int, node: str, epoch: int) -> str:
    """Describe this process in the first line of its dump file.

    `package` is the directory of hpctrain, by which the supervisor recognises frames of the
    trainer. It comes last because it may contain spaces, and is escaped as faulthandler escapes
    paths (CPython: Python/traceback.c, _Py_DumpASCII).
    """
    directory = os.path.dirname(os.path.dirname(__file__))
    package = directory.encode("ascii", "backslashreplace").decode().replace("\n", "\\x0a")
    return f"rank={rank} node={node} pid={os.getpid()} epoch={epoch} package={package}\n"


def ignore_requests() -> None:
    """In a forked child: the file is its parent's, so a request is not for it."""
    faulthandler.unregister(signal.SIGQUIT)
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)


def flight_recorder(
    run: RunLayout, launch: Launch, environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Variables that let NCCL's watchdog say which collective hangs, unless the user set them.

    Names: PyTorch's ProcessGroupNCCL.hpp; the file is the given prefix and the rank
    (FlightRecorder.cpp, DebugInfoWriter). Empty where there is no GPU.
    """
    if not any(path.exists() for path in _GPU_FILES):
        return {}
    directory = run.stack_dump(launch.epoch, launch.rank).parent
    wanted = {
        "TORCH_NCCL_TRACE_BUFFER_SIZE": str(_TRACE_ENTRIES),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(directory / "nccl-rank-"),
    }
    newer = {  # names that torch 2.8 has added for two of them; it reads both
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "TORCH_FR_BUFFER_SIZE",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "TORCH_FR_DUMP_TEMP_FILE",
    }
    taken = {name for name in wanted if name in environment or newer.get(name) in environment}
    return {name: value for name, value in wanted.items() if name not in taken}
