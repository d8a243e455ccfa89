"""Find free TCP ports on the loopback device for the daemons of one sandbox, and who answers."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack
from dataclasses import dataclass

from hpctrain.base.errors import SlurmError

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
            _release(ports)
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


def _release(ports: Ports) -> None:
    for _ in ports.numbers:
        _reserved.pop().close()


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
