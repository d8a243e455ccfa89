"""Measure the links of each axis: one process per GPU, on one node or on several.

Bus bandwidth as nccl-tests define it (doc/PERFORMANCE.md); all groups of an axis work at once, as
in training. Started by rung 4 as processes, by rung 5 with srun: `python -m bench.gpu.links
RESULT.json --gpus-per-node 8`. Imports nothing of bench, because a job gets a copy of this file.
Belongs here: the measurement, and what NCCL logs about its network. Does not belong here: rates of
one GPU (see `rates`).
"""

from __future__ import annotations

import argparse
import glob
import os
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from hpctrain.records.speed_checks import AxisName, AxisSpeed, SpeedCheck
from hpctrain.train.placement import place_rank
from hpctrain.train.rank_environment import Launch, read_launch

Operation = Literal["all_reduce", "all_gather", "send_recv"]
OPERATIONS: tuple[Operation, ...] = ("all_reduce", "all_gather", "send_recv")
GPU_BYTES, CPU_BYTES = (2**20, 2**26, 2**28), (2**16, 2**20)
REPETITIONS = 10
# INFO lines of NCCL 2.19 and newer (src/transport/net_ib, net_socket, src/init.cc)
_NETWORK = re.compile(r"NCCL INFO Using network (\S+)")
_CARDS = re.compile(r"NCCL INFO NET/(\w+)\s*:\s*Using (.+?)(?:;|$)")
_SHARP = re.compile(r"NVLS multicast support is (available|not available)")


class LinkReport(BaseModel):
    """What the ranks have found: rates, and per node what NCCL logged.

    `cards`: the lines in which NCCL names its network cards, one per node. `open_files` is what a
    process of the largest rank has open, `open_files_limit` its limit after raising it. `far`:
    ranks none of whose CPUs is near their GPU.
    """

    model_config = ConfigDict(frozen=True)

    check: SpeedCheck
    cards: dict[str, str] = {}
    sharp: str | None = None
    open_files: int
    open_files_limit: int
    far: tuple[int, ...] = ()
    gloo_interface: str | None = None


@dataclass(frozen=True)
class Axis:
    """Groups of `size` ranks, `stride` apart."""

    name: AxisName
    size: int
    stride: int

    def group_of(self, rank: int) -> tuple[int, ...]:
        block = self.size * self.stride
        first = rank // block * block + rank % self.stride
        return tuple(first + i * self.stride for i in range(self.size))


def axes_of(world_size: int, gpus_per_node: int) -> list[Axis]:
    """List the axes to measure: 2, 4, ... GPUs of a node as tp; across nodes as dp and pp."""
    inside, axes = min(world_size, gpus_per_node), []
    size = 2
    while size <= inside:
        if inside % size == 0:
            axes.append(Axis("tp", size, 1))
        size *= 2
    if inside > 1 and inside not in {axis.size for axis in axes}:
        axes.append(Axis("tp", inside, 1))
    nodes = world_size // inside
    if nodes > 1:
        axes += [Axis("dp", nodes, inside), Axis("pp", nodes, inside)]
    elif inside > 1:
        axes.append(Axis("pp", inside, 1))
    return axes


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("result", type=Path)
    parser.add_argument("--gpus-per-node", type=int, required=True)
    parser.add_argument("--emulate-gpu", action="store_true", help="CPUs and gloo")
    options = parser.parse_args()
    launch = read_launch(os.environ)
    placed = "unknown" if options.emulate_gpu else place_rank(launch.local_rank)
    logs = options.result.with_suffix(".nccl")
    logs.mkdir(parents=True, exist_ok=True)
    os.environ |= {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,NET",
        "NCCL_DEBUG_FILE": str(logs / f"rank-{launch.rank}.log"),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
    report = measure_links(launch, options.gpus_per_node, logs, placed, options.emulate_gpu)
    if report is not None:
        options.result.write_text(report.model_dump_json())
    os._exit(0)  # threads of gloo and NCCL may hold up the interpreter's end


def measure_links(
    launch: Launch, gpus_per_node: int, logs: Path, placed: str, emulated: bool
) -> LinkReport | None:
    """Measure all axes; a collective call. Returns the report on rank 0, None elsewhere."""
    import torch
    import torch.distributed as dist

    from hpctrain.train.software import raise_open_files_limit

    limit, start = raise_open_files_limit(), time.monotonic()
    device = torch.device("cpu")
    if not emulated:
        device = torch.device("cuda", launch.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if emulated else "nccl", rank=launch.rank, world_size=launch.world_size
    )
    axes = axes_of(launch.world_size, gpus_per_node)
    speeds = [
        speed
        for axis in axes
        for speed in _measure_axis(axis, launch, device, CPU_BYTES if emulated else GPU_BYTES)
    ]
    own = (
        launch.node,
        _network_of(logs / f"rank-{launch.rank}.log"),
        len(glob.glob("/proc/self/fd/*")),
        placed == "far",
    )
    gathered: list[tuple[str, tuple[str, str, str | None], int, bool]] = [
        None  # type: ignore[list-item]
    ] * launch.world_size
    dist.all_gather_object(gathered, own)
    if not launch.leads:
        return None
    name = None if emulated else torch.cuda.get_device_name(device)
    memory = None if emulated else torch.cuda.get_device_properties(device).total_memory
    check = SpeedCheck(
        epoch=0,
        time=time.time(),
        seconds=time.monotonic() - start,
        nodes=tuple(one[0] for one in gathered),
        gpu=name,
        accelerator="cpu" if emulated else "cuda",
        precision="fp32" if emulated else "bf16",
        product_mnk=(1, 1, 1),
        product_flops_per_second=(None,) * launch.world_size,
        total_memory_bytes=(memory,) * launch.world_size,
        networks=tuple(one[1][0] for one in gathered),
        axes=tuple(speeds),
        skipped=("matrix products: rung 3 measures them",),
    )
    return LinkReport(
        check=check,
        cards={node: network[1] for node, network, _, _ in gathered if network[1]},
        sharp=gathered[0][1][2],
        open_files=max(one[2] for one in gathered),
        open_files_limit=limit,
        far=tuple(rank for rank, one in enumerate(gathered) if one[3]),
        gloo_interface=os.environ.get("GLOO_SOCKET_IFNAME"),
    )


def _measure_axis(
    axis: Axis, launch: Launch, device: object, sizes: Sequence[int]
) -> list[AxisSpeed]:
    """Measure one axis on all ranks; every rank gets the rates of all."""
    import torch
    import torch.distributed as dist

    group, members = None, axis.group_of(launch.rank)
    for first in sorted({axis.group_of(rank) for rank in range(launch.world_size)}):
        made = dist.new_group(list(first))  # every rank has to create every group
        group = made if launch.rank in first else group
    speeds = []
    for operation in OPERATIONS:
        if (axis.name == "pp") != (operation == "send_recv"):
            continue
        for size in sizes:
            tensor = torch.zeros(size // 4, dtype=torch.float32, device=device)  # type: ignore[call-overload]
            work = _work(operation, tensor, members, launch.rank, group)
            seconds = _seconds(work, device)
            rates: list[float] = [0.0] * launch.world_size
            dist.all_gather_object(rates, bus_rate(operation, axis.size, size, seconds))
            speeds.append(
                AxisSpeed(
                    axis=axis.name,
                    operation=operation,
                    ranks_per_group=axis.size,
                    message_bytes=size,
                    groups=tuple(axis.group_of(r)[0] for r in range(launch.world_size)),
                    bus_bytes_per_second=tuple(rates),
                )
            )
    return speeds


def bus_rate(operation: Operation, ranks: int, size: int, seconds: float) -> float:
    """Return the bus bandwidth in bytes per second (nccl-tests, doc/PERFORMANCE.md)."""
    factor = {
        "all_reduce": 2 * (ranks - 1) / ranks,
        "all_gather": (ranks - 1) / ranks,
        "send_recv": 1.0,
    }[operation]
    return factor * size / seconds


def _work(
    operation: Operation, tensor: object, members: Sequence[int], rank: int, group: object
) -> Callable[[], None]:
    """Return one call of the operation; send_recv passes the tensor around the ring."""
    import torch
    import torch.distributed as dist

    data: torch.Tensor = tensor  # type: ignore[assignment]
    if operation == "all_reduce":
        return lambda: dist.all_reduce(data, group=group)  # type: ignore[arg-type]
    if operation == "all_gather":
        count = len(members)
        own = torch.zeros(data.numel() // count, dtype=data.dtype, device=data.device)
        whole = torch.zeros(own.numel() * count, dtype=data.dtype, device=data.device)
        return lambda: dist.all_gather_into_tensor(whole, own, group=group)  # type: ignore[arg-type]
    place, received = list(members).index(rank), torch.empty_like(data)
    following, previous = members[(place + 1) % len(members)], members[place - 1]

    def pass_on() -> None:
        operations = [
            dist.P2POp(dist.isend, data, following, group),  # type: ignore[arg-type]
            dist.P2POp(dist.irecv, received, previous, group),  # type: ignore[arg-type]
        ]
        for request in dist.batch_isend_irecv(operations):
            request.wait()

    return pass_on


def _seconds(work: Callable[[], None], device: object) -> float:
    """Return the median seconds of one call, after calls that set up NCCL's connections."""
    import torch
    import torch.distributed as dist

    synchronize = torch.cuda.synchronize if str(device) != "cpu" else lambda: None
    for _ in range(3):
        work()
    synchronize()
    dist.barrier()
    taken = []
    for _ in range(REPETITIONS):
        start = time.perf_counter()
        work()
        synchronize()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _network_of(log: Path) -> tuple[str, str, str | None]:
    """Read what NCCL has logged: (network, line of its cards, NVLink SHARP)."""
    try:
        return read_network(log.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return "", "", None


def read_network(log: str) -> tuple[str, str, str | None]:
    """Find in a log of NCCL the network, such as `IB` or `Socket`, its cards, and NVLink SHARP."""
    network = cards = ""
    sharp = None
    for line in log.splitlines():
        if found := _NETWORK.search(line):
            network = found[1]
        if found := _CARDS.search(line):
            cards = f"NET/{found[1]} : {found[2].strip()}"
            network = network or found[1]
        if found := _SHARP.search(line):
            sharp = found[1]
    return network, cards, sharp


if __name__ == "__main__":
    main()
