"""Print what this machine has, as JSON: software by importing, driver, GPUs, NUMA nodes.

A program of its own (`python -m bench.gpu.facts`), because an import of a broken library may end
the process. Belongs here: finding the facts. Does not belong here: judging them (see `driver` and
`environment`).
"""

from __future__ import annotations

import glob
import os
from importlib.metadata import PackageNotFoundError, requires, version

from pydantic import BaseModel, ConfigDict

from hpctrain.records.software import SoftwareFacts

LIBRARIES = ("transformers", "deepspeed")


class GpuNode(BaseModel):
    """The NUMA node of one GPU, and how many CPUs of this process are on it; None: unknown."""

    model_config = ConfigDict(frozen=True)

    numa_node: int | None = None
    near_cpus: int | None = None


class MachineFacts(BaseModel):
    """What one process finds on this machine.

    `driver_loaded`: the kernel's driver of NVIDIA. `devices`: GPUs whose device file exists.
    `torch_error`: why torch cannot be imported; the software is then unknown.
    `required_megatron_core`: the requirement of this hpctrain.
    """

    model_config = ConfigDict(frozen=True)

    driver_loaded: bool
    devices: int
    torch_error: str | None = None
    software: SoftwareFacts | None = None
    memory_bytes: tuple[int, ...] = ()
    gpu_nodes: tuple[GpuNode, ...] = ()
    cpus: int = 0
    libraries: dict[str, str | None] = {}
    required_megatron_core: str | None = None


def collect() -> MachineFacts:
    """Find everything; never raises for what is missing."""
    machine = MachineFacts(
        driver_loaded=os.path.exists("/proc/driver/nvidia/version"),
        devices=len(glob.glob("/dev/nvidia[0-9]*")),
        cpus=len(os.sched_getaffinity(0)),
        libraries={name: _version(name) for name in LIBRARIES},
        required_megatron_core=_required("megatron-core"),
    )
    try:
        import torch
    except Exception as error:  # a broken library raises anything
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        return machine.model_copy(update={"torch_error": text})
    from hpctrain.train import software

    memory: tuple[int, ...] = ()
    if torch.cuda.is_available():
        devices = range(torch.cuda.device_count())
        memory = tuple(torch.cuda.get_device_properties(i).total_memory for i in devices)
    return machine.model_copy(
        update={
            "software": software.collect(),
            "memory_bytes": memory,
            "gpu_nodes": tuple(_gpu_nodes()),
        }
    )


def _gpu_nodes() -> list[GpuNode]:
    from pathlib import Path

    from hpctrain.train.placement import parse_cpu_list, visible_gpus

    mask, nodes = os.sched_getaffinity(0), []
    for gpu in visible_gpus(os.environ):
        near = None
        if gpu.numa_node is not None:
            cpus = Path(f"/sys/devices/system/node/node{gpu.numa_node}/cpulist")
            try:
                near = len(mask & parse_cpu_list(cpus.read_text(encoding="ascii")))
            except (OSError, ValueError):
                near = None
        nodes.append(GpuNode(numa_node=gpu.numa_node, near_cpus=near))
    return nodes


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _required(distribution: str) -> str | None:
    """Return the version requirement of the installed hpctrain, such as `==0.16.1`."""
    try:
        listed = requires("hpctrain") or []
    except PackageNotFoundError:
        return None
    for line in listed:
        words = line.partition(";")[0].strip()
        if words.startswith(distribution):
            return words.removeprefix(distribution).strip(" ()") or None
    return None


if __name__ == "__main__":
    print(collect().model_dump_json())
