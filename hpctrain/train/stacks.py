"""Dump the stacks of all threads of a rank on SIGQUIT, into a file that is open from the start.

faulthandler writes the dump in C, within the signal handler: it needs neither Python's lock nor a
responsive main thread. So it works while a collective hangs or an extension holds the lock, and
uses the file system only to write. Belongs here: that file, and NCCL's flight recorder. Does not
belong here: requesting and interpreting dumps (the supervisor does). Imports nothing heavy,
because it must take effect before torch is imported.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from hpctrain.base.durable import shared_mode
from hpctrain.records.layout import RunLayout
from hpctrain.train.rank_environment import Launch

# Entries of the ring buffer per rank: the default of newer torch (FlightRecorder.hpp); older ones
# keep none by default.
_TRACE_ENTRIES = 2000
# Names that torch 2.8 has added for two of the variables; it reads both.
_NEWER_NAMES = {
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "TORCH_FR_BUFFER_SIZE",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "TORCH_FR_DUMP_TEMP_FILE",
}
# Device files of NVIDIA's and AMD's drivers.
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
        """Remove a file without dumps: one file per rank and launch adds up on a large machine."""
        faulthandler.unregister(signal.SIGQUIT)
        if os.fstat(self._descriptor).st_size == self._empty_bytes:
            self._path.unlink(missing_ok=True)


def open_stack_dump(run: RunLayout, launch: Launch) -> StackDump:
    """Open this rank's dump file and handle SIGQUIT. Raises OSError if it cannot be opened."""
    path = run.stack_dump(launch.epoch, launch.rank)
    run.make_directory(path.parent)
    return StackDump(path, dump_header(launch.rank, launch.node, launch.epoch))


def dump_header(rank: int, node: str, epoch: int, pid: int | None = None) -> str:
    """Describe a process, by default this one, in the first line of its dump file.

    `package` is the directory of hpctrain, by which the supervisor recognises frames of the
    trainer. It comes last because it may contain spaces, and is escaped as faulthandler escapes
    paths (CPython: Python/traceback.c, _Py_DumpASCII).
    """
    # as faulthandler writes it, which of code in an archive is not `__file__`
    own = dump_header.__code__.co_filename
    directory = os.path.dirname(os.path.dirname(own))
    package = directory.encode("ascii", "backslashreplace").decode().replace("\n", "\\x0a")
    return f"rank={rank} node={node} pid={pid or os.getpid()} epoch={epoch} package={package}\n"


def ignore_requests() -> None:
    """Ignore SIGQUIT in a forked child, because the dump file belongs to its parent."""
    faulthandler.unregister(signal.SIGQUIT)
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)


def flight_recorder(
    run: RunLayout, launch: Launch, environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return variables that enable NCCL's flight recorder, except those that the user has set.

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
    newer: dict[str, str] = {}  # this torch would warn on every rank of the older names
    with contextlib.suppress(PackageNotFoundError, ValueError):
        major, minor = version("torch").split(".")[:2]
        newer = _NEWER_NAMES if (int(major), int(minor)) >= (2, 8) else {}
    return {
        newer.get(name, name): value
        for name, value in wanted.items()
        if not {name, _NEWER_NAMES.get(name, name)} & environment.keys()
    }
