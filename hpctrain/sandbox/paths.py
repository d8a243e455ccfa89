"""Paths of the files of one sandbox, and the limit on the length of socket names.

Does not belong here: the content of the files.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

# sizeof(sockaddr_un.sun_path) is 108 with the closing zero: unix(7), "Address format".
SOCKET_NAME_LIMIT_BYTES = 107
# slurmd names the socket of a step SPOOL/NODE/NODE_JOB.STEP; both numbers may have ten digits.
_LONGEST_STEP = "_4294967295.4294967295"


@dataclass(frozen=True)
class SandboxPaths:
    """Paths in `directory`; sockets, spool and devices are in `sockets`, which may be elsewhere."""

    directory: Path
    sockets: Path

    @property
    def slurm_conf(self) -> Path:
        return self.directory / "slurm.conf"

    @property
    def munge_key(self) -> Path:
        return self.directory / "munge" / "munge.key"

    @property
    def munge_socket(self) -> Path:
        return self.sockets / "munge.socket"

    @property
    def spool(self) -> Path:
        return self.sockets / "spool"

    @property
    def devices(self) -> Path:
        return self.sockets / "dev"

    @property
    def state(self) -> Path:
        return self.directory / "state"

    @property
    def slurmdbd_conf(self) -> Path:
        return self.directory / "slurmdbd.conf"

    @property
    def database(self) -> Path:
        return self.directory / "database"

    @property
    def database_scratch(self) -> Path:
        return self.directory / "database-scratch"

    @property
    def database_socket(self) -> Path:
        return self.sockets / "mysql.socket"

    @property
    def jobcomp(self) -> Path:
        return self.directory / "log" / "jobcomp.txt"

    def log(self, daemon: str) -> Path:
        return self.directory / "log" / f"{daemon}.log"

    def pid_file(self, daemon: str) -> Path:
        return self.directory / "run" / f"{daemon}.pid"

    def all_directories(self, node_names: tuple[str, ...]) -> tuple[Path, ...]:
        """List every directory that has to exist before the daemons start."""
        inside = tuple(self.directory / name for name in ("munge", "run", "log", "state"))
        return (*inside, self.devices, self.spool, *(self.spool / name for name in node_names))


def state_file(directory: Path) -> Path:
    """Return the file that marks `directory` as a sandbox."""
    return directory / "sandbox.json"


def default_sockets(directory: Path) -> Path:
    """Return the directory of sockets, spool and devices, unless its name is too long."""
    return directory / "sockets"


def sockets_fit(sockets: Path, longest_node: str) -> bool:
    """Check that every socket below `sockets` can be bound: unix(7) limits the length of names.

    Blanks are refused too: device files are in the same directory, and gres.conf parses their
    names as a host list, which a blank ends.
    """
    if re.search(r"\s", str(sockets)):
        return False
    step = sockets / "spool" / longest_node / (longest_node + _LONGEST_STEP)
    return len(str(step).encode()) <= SOCKET_NAME_LIMIT_BYTES
