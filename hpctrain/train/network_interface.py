"""Choose the network interface of this node for gloo, before a process group is made.

A profile names it by its name, by the beginning of several names, or by a list. NCCL reads that as
it is (NCCL_SOCKET_IFNAME); gloo compares whole names, and ends the launch for a beginning ("Unable
to find address for: ib", gloo's transport/tcp/device.cc; seen with torch 2.13). Belongs here: what
a node has, and which of it is meant. Does not belong here: the fabric that NCCL uses beside TCP,
torch.
"""

from __future__ import annotations

import fcntl
import ipaddress
import re
import socket
import struct
from collections.abc import Iterable, Mapping, MutableMapping
from pathlib import Path

from hpctrain.base.errors import InvalidInputError, Problem

_GLOO = "GLOO_SOCKET_IFNAME"
# `network.interface` of the profile, from the job script (`hpctrain.job.render.environment`).
_OF_PROFILE = "HPCTRAIN_INTERFACE"
_INTERFACES = Path("/sys/class/net")
_IPV6 = Path("/proc/net/if_inet6")
_IFF_UP = 0x1  # netdevice(7)
_SIOCGIFADDR = 0x8915
_LINK_LOCAL = "20"  # scope of an address that only the same link reaches (ipv6(7))


def set_gloo_interface(
    environment: MutableMapping[str, str], node: str, usable: Mapping[str, str] | None = None
) -> str | None:
    """Set GLOO_SOCKET_IFNAME to one interface of this node; returns its address.

    What the variable has already counts before the profile's `network.interface`; None where
    neither names one. `usable` replaces what this machine has. Raises InvalidInputError where
    nothing matches.
    """
    wanted = environment.get(_GLOO) or environment.get(_OF_PROFILE)
    if not wanted:
        return None
    usable = usable_interfaces() if usable is None else usable
    names = wanted.split(",")
    if environment.get(_GLOO) and all(name in usable for name in names):
        return usable[names[0]]  # gloo takes several exact names, and uses all of them
    found = matching_interface(wanted, usable)
    if found is None:
        source = _GLOO if environment.get(_GLOO) else "`network.interface` of the profile"
        message = (
            f"{source} is {wanted}, and no interface of {node} with an address has such a name: "
            f"it has {', '.join(usable) or 'none'}"
        )
        hint = "a name, or the beginning of one, that every node has (`ip -brief address`)"
        raise InvalidInputError([Problem(message, hint=hint, node_dependent=True)])
    environment[_GLOO] = found
    return usable[found]


def matching_interface(wanted: str, names: Iterable[str]) -> str | None:
    """Find the interface that `wanted` means: one of exactly that name, else the first by prefix.

    `=ib0` is that name only, `ib0,eno1` the first that is there, as NCCL reads them.
    """
    have = sorted(names, key=_natural)
    parts = wanted.removeprefix("=").split(",")
    for part in parts:
        if part in have:
            return part
    if wanted.startswith("="):
        return None
    return next((name for part in parts if part for name in have if name.startswith(part)), None)


def usable_interfaces(directory: Path = _INTERFACES) -> dict[str, str]:
    """Map the interfaces that are up and have an address to it, in their natural order.

    `directory` has one directory per interface, as /sys/class/net.
    """
    try:
        names = [path.name for path in directory.iterdir() if path.is_dir()]
    except OSError:  # a container without /sys
        names = [name for _, name in socket.if_nameindex()]
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for name in sorted(names, key=_natural):
            try:
                up = bool(int((directory / name / "flags").read_text(), 16) & _IFF_UP)
            except OSError:
                up = True
            address = _address(name, control) if up else None
            if address is not None:
                found[name] = address
    return found


def _address(name: str, control: socket.socket) -> str | None:
    """Read an address that other nodes can reach: of IPv4, else of IPv6 from the kernel's table."""
    request = struct.pack("256s", name.encode()[:15])
    try:
        return socket.inet_ntoa(fcntl.ioctl(control, _SIOCGIFADDR, request)[20:24])
    except OSError:
        pass  # it has none of IPv4
    try:
        rows = [line.split() for line in _IPV6.read_text().splitlines()]
    except OSError:
        return None
    for row in rows:
        if row[-1] == name and row[3] != _LINK_LOCAL:
            return str(ipaddress.IPv6Address(int(row[0], 16)))
    return None


def _natural(name: str) -> list[tuple[int, str]]:
    """Order names by their numbers: ib2 before ib10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
