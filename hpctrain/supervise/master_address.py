"""Choose MASTER_ADDR, the address at which all ranks reach the first node of a launch.

Belongs here: the form that the site wants. Does not belong here: which node is the first
(`judge.launch_nodes`), the port (`srun_process`).
"""

from __future__ import annotations

import contextlib
import socket

from hpctrain.base.errors import SlurmError
from hpctrain.slurm.client import SlurmClient


def master_address(slurm: SlurmClient, node: str, form: str | None) -> str:
    """Return the address of `node` in the form of `network.master_address`.

    None: the address that Slurm uses, or the node's name if Slurm does not answer. `hostname
    --ip-address` may give a loopback address. `ip`: that address as a number, if it can be
    resolved here; `{node}` in any other form is the name of the node.
    """
    if form is not None and form != "ip":
        return form.replace("{node}", node)
    address = node
    with contextlib.suppress(SlurmError):
        address = slurm.node_address(node)
    if form == "ip":
        with contextlib.suppress(OSError):
            found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
            numbers = [str(entry[4][0]) for entry in found]
            return next((one for one in numbers if not one.startswith("127.")), numbers[0])
    return address
