"""Find the network that NCCL has chosen, from NCCL's own debug log.

NCCL has no call that returns it, and falls back to TCP without an error. Each communicator logs
`NCCL INFO Using network IB` (src/init.cc, the same text from NCCL 2.21 to 2.28). Belongs here: the
variables while process groups are made, reading the log, taking the variables back. Does not belong
here: whether that network is the right one (see `slow_parts`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import tempfile
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

_LINE = re.compile(rb"NCCL INFO Using network (.+)")
_VARIABLES = ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE")
# ncclResetDebugInit, which has the variables read again (nccl.h)
_RESETS_FROM = (2, 24, 3)


class NetworkLog:
    """NCCL's debug log of this process, from before the first communicator until `close`.

    A private file in the directory of temporary files; NCCL writes some tens of lines to it.
    """

    def __init__(self, path: Path, environment: MutableMapping[str, str], resets: bool) -> None:
        self._path = path
        self._environment = environment
        self._resets = resets
        self._before = {name: environment.get(name) for name in _VARIABLES}
        environment.update(
            NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,NET", NCCL_DEBUG_FILE=str(path)
        )

    def read(self) -> str:
        """Return the network of the newest communicator, such as `IB`; "" if there is none."""
        try:
            found = _LINE.findall(self._path.read_bytes())
        except OSError:
            return ""
        return found[-1].decode(errors="replace").strip() if found else ""

    def close(self, library: Any = None) -> None:
        """Restore the variables, have NCCL read them again, and remove the file."""
        for name, value in self._before.items():
            if value is None:
                self._environment.pop(name, None)
            else:
                self._environment[name] = value
        if self._resets:
            # where NCCL is linked into torch, the rest of its log goes to the removed file
            with contextlib.suppress(OSError, AttributeError):
                (library or ctypes.CDLL("libnccl.so.2")).ncclResetDebugInit()
        self._path.unlink(missing_ok=True)


def open_network_log(
    version: tuple[int, ...], environment: MutableMapping[str, str] = os.environ
) -> NetworkLog | None:
    """Direct NCCL's log into a file of this process; call it before the first communicator.

    None where that would take warnings from a person: NCCL's debug output is on, at more than
    warnings or into a file, or it cannot be switched back. `version`: NCCL's.
    """
    resets = version >= _RESETS_FROM
    level = environment.get("NCCL_DEBUG", "").upper()
    if environment.get("NCCL_DEBUG_FILE") or level in ("INFO", "TRACE", "ABORT"):
        return None
    if level and not resets:
        return None
    descriptor, name = tempfile.mkstemp(prefix="hpctrain-nccl-", suffix=".log")
    os.close(descriptor)
    return NetworkLog(Path(name), environment, resets)
