"""Place a rank near its GPU: CPUs and memory of the GPU's NUMA node, before torch is imported.

Slurm binds a rank to CPUs without knowing which GPU it will use. Copies from memory of another
socket cross the link between sockets, and NCCL's proxy threads never leave the mask. Reads files of
Linux and of NVIDIA's driver only. Belongs here: the GPU's NUMA node, CPU affinity, memory policy.
Does not belong here: choosing the GPU for torch (see `device`).
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Place = Literal["near", "far", "unknown"]
# set_mempolicy(2) and its number in the tables of Linux
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_MPOL_PREFERRED = 1
_MASK_WORDS = 16  # 1024 NUMA nodes


@dataclass(frozen=True)
class GpuPlace:
    """A GPU that this process may use; `numa_node` is None where the machine has only one."""

    uuid: str
    numa_node: int | None


def place_rank(
    local_rank: int,
    environment: Mapping[str, str] = os.environ,
    root: Path = Path("/"),
    prefer_memory: Callable[[int], None] | None = None,
) -> Place:
    """Bind this process to the CPUs of its mask that are near its GPU, and prefer their memory.

    `far`: its mask has none of these CPUs, and stays as it is. Changes this process and the threads
    and processes that it will start. `root`: where /proc, /sys and /dev are.
    """
    node = _gpu_node(local_rank, environment, root)
    if node is None:
        return "unknown"
    try:
        near = os.sched_getaffinity(0) & _cpus_of_node(node, root)
        if not near:
            return "far"
        os.sched_setaffinity(0, near)
    except (OSError, ValueError):
        return "unknown"
    (prefer_memory or _prefer_memory)(node)
    return "near"


def far_cpus(
    local_rank: int, environment: Mapping[str, str] = os.environ, root: Path = Path("/")
) -> str:
    """Describe the CPUs of this process if none is near its GPU; empty if one is, or if unknown.

    Call it after `place_rank`; it changes nothing. `root`: as there.
    """
    node = _gpu_node(local_rank, environment, root)
    if node is None:
        return ""
    own = os.sched_getaffinity(0)
    others = []
    try:
        if own & _cpus_of_node(node, root):
            return ""
        for directory in (root / "sys/devices/system/node").glob("node[0-9]*"):
            number = int(directory.name.removeprefix("node"))
            if own & _cpus_of_node(number, root):
                others.append(number)
    except (OSError, ValueError):
        return ""
    where = f"NUMA node {', '.join(map(str, sorted(others)))}" if others else "no NUMA node"
    return f"CPUs of {where}, its GPU is on node {node}"


def _gpu_node(local_rank: int, environment: Mapping[str, str], root: Path) -> int | None:
    """Return the NUMA node of the GPU of a rank; None if it is not known."""
    gpus = visible_gpus(environment, root)
    return gpus[local_rank if local_rank < len(gpus) else 0].numa_node if gpus else None


def _cpus_of_node(number: int, root: Path) -> set[int]:
    """Read the CPUs of a NUMA node. Raises OSError, ValueError."""
    path = root / f"sys/devices/system/node/node{number}/cpulist"
    return parse_cpu_list(path.read_text(encoding="ascii"))


def visible_gpus(environment: Mapping[str, str], root: Path = Path("/")) -> list[GpuPlace]:
    """List the GPUs that CUDA will number from 0, if CUDA_DEVICE_ORDER is PCI_BUS_ID.

    Devices that a cgroup of Slurm withholds cannot be opened. Without NVIDIA's driver, or with
    parts of a GPU (MIG) in CUDA_VISIBLE_DEVICES, there are none.
    """
    present = list(_openable_gpus(root))
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return present
    visible = []
    for word in filter(None, chosen.split(",")):
        if word.isdigit():
            found = present[int(word)] if int(word) < len(present) else None
        else:
            found = next((gpu for gpu in present if gpu.uuid.startswith(word)), None)
        if found is None:  # CUDA ignores everything from an unknown one on
            break
        visible.append(found)
    return visible


def _openable_gpus(root: Path) -> Iterator[GpuPlace]:
    """Read the driver's files in the order of PCI addresses.

    NVIDIA driver README, "The /proc Interface".
    """
    for directory in sorted((root / "proc/driver/nvidia/gpus").glob("*")):
        try:
            lines = (directory / "information").read_text(encoding="utf-8").splitlines()
            values = {
                name: value.strip() for name, _, value in (line.partition(":") for line in lines)
            }
            os.close(os.open(root / f"dev/nvidia{values['Device Minor']}", os.O_RDONLY))
            uuid = values["GPU UUID"]
        except (OSError, KeyError):
            continue
        try:
            node = int(
                (root / f"sys/bus/pci/devices/{directory.name.lower()}/numa_node").read_text()
            )
        except (OSError, ValueError):
            node = -1  # as Linux writes for a machine without NUMA
        yield GpuPlace(uuid, node if node >= 0 else None)


def parse_cpu_list(text: str) -> set[int]:
    """Parse a list of Linux such as `0-3,8` (cpuset(7), List format). Raises ValueError."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def _prefer_memory(node: int) -> None:
    """Allocate on this NUMA node while it has room (set_mempolicy(2)); failure is no problem."""
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * _MASK_WORDS)()
    mask[node // bits] = 1 << node % bits
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall(number, _MPOL_PREFERRED, mask, _MASK_WORDS * bits)
