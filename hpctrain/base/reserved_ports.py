"""Reserve the number of a TCP port for a program of ours that listens seconds later.

A port that was only found free may be another's by the time its program listens. A reservation is
a UDP socket that is bound to the number: TCP does not mind it, and nobody else who reserves gets
it. Belongs here: which numbers, and the reservation. Does not belong here: the block of a sandbox
(`hpctrain.sandbox.paths`), what replicas of several jobs on one node agree on
(`hpctrain.serve.replica.lifecycle`).
"""

from __future__ import annotations

import random
import socket
from collections.abc import Iterable

# Below the ephemeral ports of Linux (ip_local_port_range starts at 32768), so that no outgoing
# connection takes one meanwhile, and above those of sandboxes (`hpctrain.sandbox.paths`).
FIRST, COUNT = 20000, 10000


def reserve(host: str, numbers: Iterable[int]) -> socket.socket | None:
    """Reserve the first of the numbers that is free on this address of the machine ("" is all).

    Returns the UDP socket that holds the number until it is closed; None if no number is free.
    """
    for number in numbers:
        reserved = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            reserved.bind((host, number))
        except OSError:
            reserved.close()
            continue
        if is_free(host, number):
            return reserved
        reserved.close()
    return None


def reserve_any(host: str = "127.0.0.1") -> socket.socket:
    """Reserve a port; callers begin at different ones. Raises OSError if none is free."""
    start = random.randrange(COUNT)
    reserved = reserve(host, (FIRST + (start + offset) % COUNT for offset in range(COUNT)))
    if reserved is None:
        raise OSError(f"no free port between {FIRST} and {FIRST + COUNT - 1}")
    return reserved


def number_of(reserved: socket.socket) -> int:
    """The number that is reserved."""
    return int(reserved.getsockname()[1])


def is_free(host: str, number: int) -> bool:
    """Whether a program could listen on the port now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, number))
        except OSError:
            return False
    return True
