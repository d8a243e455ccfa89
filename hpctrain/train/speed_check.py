"""Check the speed of GPUs and links before the model is built, at most 60 seconds a launch.

All ranks measure at the same time. Rank 0 compares them, has suspects measured a second time, and
records everything in `speed.jsonl`. A launch ends here where the supervisor can replace the slow
nodes; otherwise it trains on. Belongs here: measuring, the order, and the limit of time. Does not
belong here: comparing (`slow_parts`).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from hpctrain.engines.training import SpeedCheckConfig
from hpctrain.records.speed_checks import AxisSpeed, SpeedCheck, write_speed_check
from hpctrain.train.device import gpu_ids, gpu_index, on_cpu, wait_for_device
from hpctrain.train.engine import AxisGroup, Mesh
from hpctrain.train.faults import SlowNodesError
from hpctrain.train.job import Job
from hpctrain.train.placement import far_cpus
from hpctrain.train.slow_parts import (
    Suspects,
    Thresholds,
    better_of,
    slow_parts,
    suspects_of,
)
from hpctrain.train.step_agreement import Control
from hpctrain.train.storage import outlast

# -- Measure this rank's GPU and its links: matrix products, copies, all-reduce, messages --------
# Every function is a collective call: all ranks measure at the same time, as they will train. Uses
# no random numbers, and frees its memory.


# Products of the sizes that large models have; on a CPU they take a millisecond.
_GPU_SIZES, _SMALL_GPU_SIZE, _CPU_SIZE = 8192, 4096, 256
_GPU_ROOM_BYTES = 4 * 2**30
# A GPU reaches its clock under load, and its limit of power, within some tenths of a second.
_WARM_UP_SECONDS = 0.5
_PRODUCT_SECONDS = {"cuda": 1.0, "cpu": 0.3}
_BATCHES = 9
_COPY_BYTES = 2**30
# One operation is timed first, and then as many as fit into this; at least one in each batch,
# unless that would take too long.
_LINK_SECONDS = {"cuda": 0.5, "cpu": 0.3}
_LONGEST_SECONDS = 3.0
_MOST_REPETITIONS = 10


def product_size(device: torch.device) -> int:
    """Choose the size of the products by the free memory of the device."""
    if device.type == "cpu":
        return _CPU_SIZE
    return _GPU_SIZES if free_memory(device)[0] > _GPU_ROOM_BYTES else _SMALL_GPU_SIZE


def free_memory(device: torch.device) -> tuple[int, int]:
    """Return free and total bytes of a GPU."""
    free, total = torch.cuda.mem_get_info(device)
    return int(free), int(total)


def measure_products(
    device: torch.device, size: int, under_load: Callable[[], None] = lambda: None
) -> float:
    """Measure products of `size` x `size` matrices in FLOP/s: bf16 on a GPU, fp32 on a CPU.

    All ranks compute for the same time, not the same number of products, because they share power
    and, in a sandbox, cores. `under_load` is called while the device is busy.
    """
    kind = torch.float32 if device.type == "cpu" else torch.bfloat16
    left = torch.full((size, size), 1 / size, device=device, dtype=kind)
    right = torch.full((size, size), 0.5, device=device, dtype=kind)
    out = torch.empty_like(left)
    flops = 2 * size**3
    if device.type == "cpu":
        torch.matmul(left, right, out=out)
        count, began = 0, time.perf_counter()
        while time.perf_counter() - began < _PRODUCT_SECONDS["cpu"]:
            torch.matmul(left, right, out=out)
            count += 1
        seconds = time.perf_counter() - began
        under_load()
        return count * flops / seconds
    each = _seconds_each(lambda: torch.matmul(left, right, out=out), _WARM_UP_SECONDS)
    per_batch = max(1, round(_PRODUCT_SECONDS["cuda"] / _BATCHES / each))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(_BATCHES + 1)]
    events[0].record()
    for event in events[1:]:
        for _ in range(per_batch):
            torch.matmul(left, right, out=out)
        event.record()
    under_load()
    wait_for_device()
    seconds = median(a.elapsed_time(b) for a, b in pairwise(events)) / 1e3
    return per_batch * flops / seconds


def measure_copies(device: torch.device) -> float | None:
    """Measure a copy inside the GPU's memory, in bytes read and written per second; None on a CPU.

    None as well where the memory does not suffice.
    """
    if device.type == "cpu" or free_memory(device)[0] < 3 * _COPY_BYTES:
        return None
    source = torch.zeros(_COPY_BYTES, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / _seconds_each(lambda: target.copy_(source), 0.1)


def _seconds_each(work: Callable[[], Any], least_seconds: float) -> float:
    """Run work on the GPU for at least so long; return the seconds of one call at the end."""
    work()
    wait_for_device()
    count, began = 1, time.perf_counter()
    while True:
        start = time.perf_counter()
        for _ in range(count):
            work()
        wait_for_device()
        each = (time.perf_counter() - start) / count
        if time.perf_counter() - began >= least_seconds:
            return each
        count = max(1, min(1000, round(least_seconds / 4 / each)))


def measure_all_reduce(
    axis: AxisGroup, message_bytes: int, device: torch.device, control: Control
) -> float:
    """Measure the bus bandwidth of an all-reduce in this rank's group, in bytes per second.

    All groups of the axis work at the same time. 2 (n - 1) / n of the message pass each rank
    (nccl-tests, doc/PERFORMANCE.md).
    """
    kind = torch.float32 if device.type == "cpu" else torch.bfloat16
    tensor = torch.zeros(message_bytes // kind.itemsize, device=device, dtype=kind)
    seconds = _seconds_of_link(
        lambda: dist.all_reduce(tensor, group=axis.group), control, axis.ranks
    )
    size = len(axis.ranks)
    return 2 * (size - 1) / size * message_bytes / seconds


def measure_pairs(
    axis: AxisGroup,
    message_bytes: int,
    device: torch.device,
    control: Control,
    *,
    closed: bool,
) -> tuple[float | None, float | None]:
    """Exchange messages with the one or two neighbours on an axis, one at a time.

    Returns the slowest and the fastest in bytes per second and direction, None without a neighbour.
    Between other pairs of the axis messages are sent at the same time. `closed`: the last rank is a
    neighbour of the first one.
    """
    sent = torch.zeros(message_bytes, device=device, dtype=torch.uint8)
    received = torch.empty_like(sent)
    # torch makes NCCL's communicator with the first operation, for which all members are needed
    dist.all_reduce(torch.zeros(1, device=device), group=axis.group)
    rates = []
    for neighbour in neighbours(axis.ranks, dist.get_rank(), closed=closed):

        def exchange(other: int | None = neighbour) -> None:
            if other is None:
                return
            both = [
                dist.P2POp(dist.isend, sent, other, axis.group),
                dist.P2POp(dist.irecv, received, other, axis.group),
            ]
            for work in dist.batch_isend_irecv(both):
                work.wait()

        pair = (dist.get_rank(), neighbour) if neighbour is not None else (dist.get_rank(),)
        seconds = _seconds_of_link(exchange, control, pair)
        if neighbour is not None:
            rates.append(message_bytes / seconds)
    return min(rates, default=None), max(rates, default=None)


def neighbours(ranks: Sequence[int], rank: int, *, closed: bool) -> tuple[int | None, int | None]:
    """Pair the ranks of an axis twice; return this rank's partner in each round.

    First (0, 1), (2, 3) and so on, then (1, 2), (3, 4). `closed` pairs the last with the first in
    the second round, where the number of ranks is even and more than two.
    """
    place, size = ranks.index(rank), len(ranks)
    first = place ^ 1
    second = place - 1 if place % 2 == 0 else place + 1
    if closed and size % 2 == 0 and size > 2:
        second %= size
    pairs = (first, second)
    return tuple(ranks[one] if 0 <= one < size else None for one in pairs)  # type: ignore[return-value]


def _seconds_of_link(
    operation: Callable[[], Any], control: Control, members: Sequence[int]
) -> float:
    """Time an operation of `members`, after one that connects them; a collective call.

    They repeat it as often as fits into the time, by the slowest of them; other groups do the same.
    """
    operation()  # connects
    wait_for_device()
    control.barrier()
    once = _timed(operation, 1)
    seconds = [float(text) for text in control.everywhere(repr(once))]
    slowest = max(seconds[rank] for rank in members)
    wanted = _LINK_SECONDS["cpu" if on_cpu() else "cuda"]
    batches = _BATCHES if slowest * _BATCHES < _LONGEST_SECONDS else 1
    repetitions = max(1, min(_MOST_REPETITIONS, int(wanted / batches / max(slowest, 1e-6))))
    control.barrier()
    # the median: a pause of the machine, or another job's burst on a shared link, is in one batch
    return median(_timed(operation, repetitions) / repetitions for _ in range(batches))


def _timed(operation: Callable[[], Any], repetitions: int) -> float:
    began = time.perf_counter()
    for _ in range(repetitions):
        operation()
    wait_for_device()
    return time.perf_counter() - began


def release_memory(device: torch.device) -> None:
    """Return the memory of the measurements to the device, and forget their peak."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


# -- Read the state of this rank's GPU from NVIDIA's driver: SM clock, and what holds it down ---
# Uses NVML (libnvidia-ml, a part of the driver) by ctypes: torch needs another package for it, and
# nvidia-smi takes a second.


# nvml.h: nvmlClockType_t, and nvmlClocksEventReasons. Idle, application clocks and the power cap
# are left out: a GPU at full load is at its power cap.
_CLOCK_SM = 1
_REASONS = {
    0x08: "hardware slowdown",
    0x20: "thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}
_HZ_PER_MHZ = 1e6


@dataclass(frozen=True)
class GpuState:
    """SM clocks in Hz, and the reasons that hold the clock down, "" for none."""

    clock_hz: float | None = None
    highest_clock_hz: float | None = None
    slowdown: str = ""


def read_gpu_state(uuid: str, library: Any = None) -> GpuState:
    """Read the state of the GPU with this UUID; everything unknown where NVML cannot be used.

    `uuid`: as torch prints it, without `GPU-`. Returns within milliseconds.
    """
    try:
        nvml = library or ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() != 0:
            return GpuState()
        handle = ctypes.c_void_p()
        name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        if nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle)) != 0:
            return GpuState()
        clock = _number(nvml.nvmlDeviceGetClockInfo, handle, _CLOCK_SM)
        highest = _number(nvml.nvmlDeviceGetMaxClockInfo, handle, _CLOCK_SM)
        mask = ctypes.c_ulonglong()
        # the name of before driver 535, which newer drivers export, too
        if nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle, ctypes.byref(mask)) != 0:
            mask.value = 0
    except (OSError, AttributeError):
        return GpuState()
    found = [words for bit, words in _REASONS.items() if mask.value & bit]
    return GpuState(clock, highest, ", ".join(found))


def _number(function: Any, handle: ctypes.c_void_p, kind: int) -> float | None:
    value = ctypes.c_uint()
    if function(handle, kind, ctypes.byref(value)) != 0:
        return None
    return value.value * _HZ_PER_MHZ


# ----------------------------------------------------------------------------------------------


# The order of a comparison that begins inside a node.
_ORDER = ("tp", "cp", "ep", "dp", "pp")
_LIMIT_SECONDS = 60.0
# A part is begun only while this much is left: the slowest one, two rounds of pairs, takes less.
_LEAST_SECONDS = 10.0
_RECORD_SECONDS = 10.0
_MOST_PRINTED = 5


def watch_network(job: Job) -> NetworkLog | None:
    """Begin to record which network NCCL chooses; call it before process groups are joined."""
    if job.config.speed_check is None or job.launch.speed_check is None or on_cpu():
        return None
    version = torch.cuda.nccl.version()
    return open_network_log(tuple(version))


def check_speed(
    job: Job,
    mesh: Mesh,
    control: Control,
    network: NetworkLog | None,
    still_working: Callable[[], None],
) -> None:
    """Measure, compare and record; a collective call that does nothing where the check is off.

    Raises SlowNodesError on all ranks if the supervisor is to replace nodes.
    """
    config, leavable = job.config.speed_check, job.launch.speed_check
    if config is None or leavable is None:
        return
    rounds = _Rounds(job, config, mesh, control, still_working)
    check = rounds.first(network)
    limits = Thresholds(config.slow_gpu, config.slow_link, config.fabric)
    suspects = Suspects()
    if job.launch.leads:
        suspects = suspects_of(check, limits)
    again = control.from_leader(json.dumps([suspects.gpus, *suspects.axes]))
    gpus, *axes = json.loads(again or "[false]")
    if gpus or axes:
        check = rounds.second(check, Suspects(gpus, tuple(axes)))
    release_memory(rounds.device)
    leaves = None
    if job.launch.leads:
        leaves = _conclude(job, check, limits, leavable)
    leaves = control.from_leader(leaves)
    if leaves is not None:
        raise SlowNodesError(leaves)


def _conclude(job: Job, check: SpeedCheck, limits: Thresholds, leavable: int) -> str | None:
    """Name what is slow, write the record, print it; return why the launch ends, or None."""
    slow = slow_parts(check, limits)
    nodes = tuple(dict.fromkeys(node for part in slow if part.certain for node in part.nodes))
    leaves = bool(nodes) and len(nodes) <= leavable
    check = check.model_copy(update={"slow": slow, "leaves": leaves})
    try:
        outlast(job.run, lambda: write_speed_check(job.run, check), _RECORD_SECONDS)
    except OSError as error:
        print(f"the check of GPUs and links was not recorded: {error}", flush=True)
        leaves = False  # without the record the supervisor would not find the nodes
    for part in slow[:_MOST_PRINTED]:
        print(f"event=slow part={part.part} {part.message}", flush=True)
    print(
        f"event=speed_check seconds={check.seconds:.1f} slow={len(slow)} leaves={leaves}",
        flush=True,
    )
    certain = [part.message for part in slow if part.certain]
    return f"slow: {'; '.join(certain[:_MOST_PRINTED])}" if leaves else None


def _nothing() -> dict[str, Any]:
    """Return the measurements of a rank that has measured nothing; `links` by axis."""
    unknown = dict.fromkeys(("product", "copy", "clock", "highest", "free", "total"))
    return {**unknown, "slowdown": "", "network": "", "far_cpus": "", "links": {}}


class _Rounds:
    """Both rounds of measurements, within the limit of time that rank 0 keeps."""

    def __init__(
        self,
        job: Job,
        config: SpeedCheckConfig,
        mesh: Mesh,
        control: Control,
        still_working: Callable[[], None],
    ) -> None:
        self._job = job
        self._config = config
        self._control = control
        self._still_working = still_working
        self._began = time.monotonic()
        self.device = torch.device("cpu" if on_cpu() else f"cuda:{torch.cuda.current_device()}")
        groups = {group.axis: group for group in mesh.axes}
        checked = {axis.axis: axis for axis in config.axes}
        self._axes = [
            (groups[axis], checked[axis]) for axis in _ORDER if axis in groups and axis in checked
        ]
        self._unmeasured = [axis for axis in _ORDER if axis in checked and axis not in groups]
        self._size = product_size(self.device)
        self._skipped: list[str] = []

    def first(self, network: NetworkLog | None) -> SpeedCheck:
        """Measure GPUs, then axes from the nearest one on; return the record of all ranks."""
        own = _nothing()
        if self.device.type == "cuda":
            own["free"], own["total"] = free_memory(self.device)
        if self._has_time("matrix products"):
            self._measure_gpu(own)
        for group, axis in self._axes:
            if not self._has_time(f"axis {axis.axis}"):
                continue
            own["links"][axis.axis] = self._measure_axis(group, axis.message_bytes)
        self._skipped += [
            f"axis {axis}: the engine makes its groups later" for axis in self._unmeasured
        ]
        if network is not None:
            own["network"] = network.read()
            network.close()
        return self._gathered(own)

    def second(self, check: SpeedCheck, suspects: Suspects) -> SpeedCheck:
        """Measure suspects again, and their links pair by pair; the better round counts."""
        own = _nothing()
        if suspects.gpus and self._has_time("second round of matrix products"):
            self._measure_gpu(own)
        for group, axis in self._axes:
            if axis.axis not in suspects.axes or not self._has_time(f"second round of {axis.axis}"):
                continue
            leader, rate, best = self._measure_axis(group, axis.message_bytes)
            if axis.axis != "pp" and len(group.ranks) > 2:
                size = axis.message_bytes
                _, best = measure_pairs(group, size, self.device, self._control, closed=True)
            own["links"][axis.axis] = (leader, rate, best)
        return better_of(check, self._gathered(own))

    def _has_time(self, what: str) -> bool:
        """Agree on whether the limit leaves time for another part; renew the sign of life."""
        self._still_working()
        left = _LIMIT_SECONDS - (time.monotonic() - self._began)
        text = self._control.from_leader("yes" if left >= _LEAST_SECONDS else "no")
        if text == "yes":
            return True
        self._skipped.append(f"{what}: the limit of {_LIMIT_SECONDS:.0f} s")
        return False

    def _measure_gpu(self, own: dict[str, Any]) -> None:
        self._control.barrier()

        def read_state() -> None:
            if ids := gpu_ids():
                index = gpu_index(self._job.launch.local_rank, len(ids))
                state = read_gpu_state(ids[index])
                own["clock"], own["highest"] = state.clock_hz, state.highest_clock_hz
                own["slowdown"] = state.slowdown
            own["far_cpus"] = far_cpus(self._job.launch.local_rank)

        own["product"] = measure_products(self.device, self._size, read_state)
        own["copy"] = measure_copies(self.device)

    def _measure_axis(
        self, group: AxisGroup, message_bytes: int
    ) -> tuple[int, float | None, float | None]:
        """Return the first rank of the group, what it reaches, and its faster pair if measured."""
        leader = min(group.ranks)
        if group.axis == "pp":
            pairs = measure_pairs(group, message_bytes, self.device, self._control, closed=False)
            return leader, *pairs
        rate = measure_all_reduce(group, message_bytes, self.device, self._control)
        return leader, rate, None

    def _gathered(self, own: dict[str, Any]) -> SpeedCheck:
        """Gather the measurements of all ranks."""
        ranks: list[dict[str, Any]] = [
            json.loads(text) for text in self._control.everywhere(json.dumps(own))
        ]
        nodes = tuple(self._control.everywhere(self._job.launch.node))
        size = self._size

        def column(name: str) -> tuple[Any, ...]:
            return tuple(rank[name] for rank in ranks)

        axes = []
        for group, axis in self._axes:
            if axis.axis not in own["links"]:
                continue
            links = [rank["links"][axis.axis] for rank in ranks]
            axes.append(
                AxisSpeed(
                    axis=axis.axis,
                    operation="send_recv" if axis.axis == "pp" else "all_reduce",
                    ranks_per_group=len(group.ranks),
                    message_bytes=axis.message_bytes,
                    groups=tuple(leader for leader, _, _ in links),
                    bus_bytes_per_second=tuple(rate for _, rate, _ in links),
                    best_pair_bytes_per_second=tuple(best for _, _, best in links)
                    if any(best is not None for _, _, best in links)
                    else (),
                    expected_bytes_per_second=axis.expected_bytes_per_second,
                )
            )
        cpu = self.device.type == "cpu"
        return SpeedCheck(
            epoch=self._job.launch.epoch,
            time=time.time(),
            seconds=time.monotonic() - self._began,
            nodes=nodes,
            gpu=None if cpu else torch.cuda.get_device_name(self.device),
            accelerator="cpu" if cpu else "cuda",
            precision="fp32" if cpu else "bf16",
            product_mnk=(size, size, size),
            product_flops_per_second=column("product"),
            expected_flops_per_second=self._config.expected_flops_per_second,
            copy_bytes_per_second=() if cpu else column("copy"),
            clock_hz=() if cpu else column("clock"),
            highest_clock_hz=() if cpu else column("highest"),
            slowdowns=() if cpu else column("slowdown"),
            free_memory_bytes=() if cpu else column("free"),
            total_memory_bytes=() if cpu else column("total"),
            networks=() if cpu else column("network"),
            far_cpus=column("far_cpus") if any(column("far_cpus")) else (),
            axes=tuple(axes),
            skipped=tuple(self._skipped),
        )


# -- Find the network that NCCL has chosen, from NCCL's own debug log ---------------------------
# NCCL has no call that returns it, and falls back to TCP without an error. Each communicator logs
# `NCCL INFO Using network IB` (src/init.cc, the same text from NCCL 2.21 to 2.28).


_LINE = re.compile(rb"NCCL INFO Using network (.+)")
_VARIABLES = ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE")
# ncclResetDebugInit, which has the variables read again (nccl.h)
_RESETS_FROM = (2, 24, 3)


class NetworkLog:
    """NCCL's debug log of this process, from before the first communicator until `close`.

    A private file in the directory of temporary files; NCCL writes some tens of lines to it.
    """

    def __init__(self, path: Path, environment: MutableMapping[str, str], resets: bool) -> None:
        self._path = path
        self._environment = environment
        self._resets = resets
        self._before = {name: environment.get(name) for name in _VARIABLES}
        environment.update(
            NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,NET", NCCL_DEBUG_FILE=str(path)
        )

    def read(self) -> str:
        """Return the network of the newest communicator, such as `IB`; "" if there is none."""
        try:
            found = _LINE.findall(self._path.read_bytes())
        except OSError:
            return ""
        return found[-1].decode(errors="replace").strip() if found else ""

    def close(self, library: Any = None) -> None:
        """Restore the variables, have NCCL read them again, and remove the file."""
        for name, value in self._before.items():
            if value is None:
                self._environment.pop(name, None)
            else:
                self._environment[name] = value
        if self._resets:
            # where NCCL is linked into torch, the rest of its log goes to the removed file
            with contextlib.suppress(OSError, AttributeError):
                (library or ctypes.CDLL("libnccl.so.2")).ncclResetDebugInit()
        self._path.unlink(missing_ok=True)


def open_network_log(
    version: tuple[int, ...], environment: MutableMapping[str, str] = os.environ
) -> NetworkLog | None:
    """Direct NCCL's log into a file of this process; call it before the first communicator.

    None where that would take warnings from a person: NCCL's debug output is on, at more than
    warnings or into a file, or it cannot be switched back. `version`: NCCL's.
    """
    resets = version >= _RESETS_FROM
    level = environment.get("NCCL_DEBUG", "").upper()
    if environment.get("NCCL_DEBUG_FILE") or level in ("INFO", "TRACE", "ABORT"):
        return None
    if level and not resets:
        return None
    descriptor, name = tempfile.mkstemp(prefix="hpctrain-nccl-", suffix=".log")
    os.close(descriptor)
    return NetworkLog(Path(name), environment, resets)
