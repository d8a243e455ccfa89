"""Ports for the processes that tests and benchmarks start.

Reserved, so that no other process of a run takes one before its process listens: a port that the
kernel gives and takes back may be anybody's outgoing connection a moment later.
"""

from __future__ import annotations

import socket
from collections import deque

from hpctrain.base import reserved_ports

# A reservation lasts until so many later ones were made.
_RESERVED: deque[socket.socket] = deque(maxlen=64)


def free_port() -> int:
    """A TCP port of this machine; a new number for each caller."""
    _RESERVED.append(reserved_ports.reserve_any())
    return reserved_ports.number_of(_RESERVED[-1])
