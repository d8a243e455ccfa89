"""Paths of the files of one sandbox, and the limit on the length of socket names.

Does not belong here: the content of the files.
"""

from __future__ import annotations

import random
import re
import socket
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base.errors import SlurmError

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
    def modules(self) -> Path:
        """What jobs see as MODULESHOME."""
        return self.directory / "modules"

    @property
    def task_prolog(self) -> Path:
        return self.modules / "task-prolog"

    @property
    def programs(self) -> Path:
        """Programs that a site has and this machine lacks."""
        return self.directory / "bin"

    def site_directory(self, name: str) -> Path:
        """Return the directory of a file system, or of a login's variable."""
        return self.directory / "site" / name

    @property
    def profile(self) -> Path:
        """The site's profile with what differs on this machine."""
        return self.directory / "profile.yaml"

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


# -- Find free TCP ports on the loopback device for the daemons of one sandbox, and who answers -


# Below the ephemeral ports of Linux (ip_local_port_range starts at 32768), so that no outgoing
# connection takes a port between the check and the start of the daemon. Below the ports of
# launches, too (`supervise.srun_process`): rank 0 listens seconds after its port was found free.
LOWEST, HIGHEST = 12000, 19999
_TRIES = 200
_CONNECT_TIMEOUT_SECONDS = 5.0
# UDP sockets with the numbers of the blocks that this process has found: its daemons listen seconds
# later, and meanwhile no other sandbox may choose the same ports.
_reserved: list[socket.socket] = []


@dataclass(frozen=True)
class Ports:
    """One contiguous block: the controller, one port for each node, slurmdbd, the monitors."""

    controller: int
    nodes: int

    @property
    def first_node(self) -> int:
        return self.controller + 1

    @property
    def accounting(self) -> int:
        return self.first_node + self.nodes

    @property
    def exporter(self) -> int:
        return self.accounting + 1

    @property
    def node_exporter(self) -> int:
        return self.accounting + 2

    @property
    def alertmanager(self) -> int:
        return self.accounting + 3

    @property
    def prometheus(self) -> int:
        return self.accounting + 4

    @property
    def numbers(self) -> range:
        """All of them; `prometheus` is the last."""
        return range(self.controller, self.prometheus + 1)


def find_ports(nodes: int) -> Ports:
    """Find a block of free ports, and keep other sandboxes from finding it.

    Raises SlurmError if there is none.
    """
    count = len(Ports(LOWEST, nodes).numbers)
    for _ in range(_TRIES):
        ports = Ports(random.randint(LOWEST, HIGHEST - count + 1), nodes)
        if _reserve(ports):
            if are_free(ports):
                return ports
            for _ in ports.numbers:
                _reserved.pop().close()
    raise SlurmError(f"no {count} contiguous free ports between {LOWEST} and {HIGHEST}")


def _reserve(ports: Ports) -> bool:
    """Bind all numbers of the block as UDP ports, until this process ends."""
    with ExitStack() as stack:
        block = []
        for port in ports.numbers:
            block.append(stack.enter_context(socket.socket(type=socket.SOCK_DGRAM)))
            try:
                block[-1].bind(("127.0.0.1", port))
            except OSError:
                return False
        stack.pop_all()
    _reserved.extend(block)
    return True


def is_served(port: int) -> bool:
    """Check that somebody on this machine accepts connections at the port."""
    with socket.socket() as probe:
        probe.settimeout(_CONNECT_TIMEOUT_SECONDS)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def answers(page: str) -> bool:
    """Check that a page of this machine is answered with 200."""
    import http.client
    from urllib.parse import urlsplit

    address = urlsplit(page)
    connection = http.client.HTTPConnection(
        address.hostname or "", address.port, timeout=_CONNECT_TIMEOUT_SECONDS
    )
    try:
        connection.request("GET", address.path)
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def are_free(ports: Ports) -> bool:
    """Check that every port of the block can be bound now."""
    with ExitStack() as stack:
        for port in ports.numbers:
            probe = stack.enter_context(socket.socket())
            # As the daemons do: connections in TIME_WAIT do not matter.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                return False
    return True
