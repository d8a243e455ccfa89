"""Check the speed of GPUs and links before the model is built, at most 60 seconds a launch.

All ranks measure at the same time. Rank 0 compares them, has suspects measured a second time, and
records everything in `speed.jsonl`. A launch ends here where the supervisor can replace the slow
nodes; otherwise it trains on. Belongs here: the order, and the limit of time. Does not belong here:
measuring (`speed_measurements`), comparing (`slow_parts`).
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hpctrain.engines.training import SpeedCheckConfig
from hpctrain.records.speed_checks import AxisSpeed, SlowPart, SpeedCheck, write_speed_check
from hpctrain.train.device import gpu_ids, gpu_index, on_cpu
from hpctrain.train.engine import AxisGroup, Mesh
from hpctrain.train.faults import SlowNodesError
from hpctrain.train.job import Job
from hpctrain.train.slow_parts import (
    Suspects,
    Thresholds,
    better_of,
    slow_parts,
    suspects_of,
)
from hpctrain.train.speed_measurements import (
    free_memory,
    measure_all_reduce,
    measure_copies,
    measure_pairs,
    measure_products,
    product_size,
    release_memory,
)
from hpctrain.train.step_agreement import Control
from hpctrain.train.storage import outlast

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
    return f"slow: {'; '.join(_messages(slow))}" if leaves else None


def _messages(slow: Sequence[SlowPart]) -> list[str]:
    return [part.message for part in slow if part.certain][:_MOST_PRINTED]


@dataclass
class _Own:
    """What this rank has measured; the fields are those of the record."""

    product: float | None = None
    copy: float | None = None
    state: GpuState = field(default_factory=GpuState)
    free: int | None = None
    total: int | None = None
    network: str = ""
    links: dict[str, tuple[int, float | None, float | None]] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(
            {
                "product": self.product,
                "copy": self.copy,
                "clock": self.state.clock_hz,
                "highest": self.state.highest_clock_hz,
                "slowdown": self.state.slowdown,
                "free": self.free,
                "total": self.total,
                "network": self.network,
                "links": self.links,
            }
        )


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
        own = _Own()
        if self.device.type == "cuda":
            own.free, own.total = free_memory(self.device)
        if self._has_time("matrix products"):
            self._measure_gpu(own)
        for group, axis in self._axes:
            if not self._has_time(f"axis {axis.axis}"):
                continue
            own.links[axis.axis] = self._measure_axis(group, axis.message_bytes)
        self._skipped += [
            f"axis {axis}: the engine makes its groups later" for axis in self._unmeasured
        ]
        if network is not None:
            own.network = network.read()
            network.close()
        return self._gathered(own)

    def second(self, check: SpeedCheck, suspects: Suspects) -> SpeedCheck:
        """Measure suspects again, and their links pair by pair; the better round counts."""
        own = _Own()
        if suspects.gpus and self._has_time("second round of matrix products"):
            self._measure_gpu(own)
        for group, axis in self._axes:
            if axis.axis not in suspects.axes or not self._has_time(f"second round of {axis.axis}"):
                continue
            leader, rate, best = self._measure_axis(group, axis.message_bytes)
            if axis.axis != "pp" and len(group.ranks) > 2:
                size = axis.message_bytes
                pairs = measure_pairs(group, size, self.device, self._control, closed=True)
                best = pairs.fastest
            own.links[axis.axis] = (leader, rate, best)
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

    def _measure_gpu(self, own: _Own) -> None:
        self._control.barrier()

        def read_state() -> None:
            own.state = self._read_state()

        own.product = measure_products(self.device, self._size, read_state)
        own.copy = measure_copies(self.device)

    def _read_state(self) -> GpuState:
        ids = gpu_ids()
        if not ids:
            return GpuState()
        return read_gpu_state(ids[gpu_index(self._job.launch.local_rank, len(ids))])

    def _measure_axis(
        self, group: AxisGroup, message_bytes: int
    ) -> tuple[int, float | None, float | None]:
        """Return the first rank of the group, what it reaches, and its faster pair if measured."""
        leader = min(group.ranks)
        if group.axis == "pp":
            pairs = measure_pairs(group, message_bytes, self.device, self._control, closed=False)
            return leader, pairs.slowest, pairs.fastest
        rate = measure_all_reduce(group, message_bytes, self.device, self._control)
        return leader, rate, None

    def _gathered(self, own: _Own) -> SpeedCheck:
        """Gather the measurements of all ranks."""
        ranks: list[dict[str, Any]] = [
            json.loads(text) for text in self._control.everywhere(own.to_json())
        ]
        nodes = tuple(self._control.everywhere(self._job.launch.node))
        size = self._size

        def column(name: str) -> tuple[Any, ...]:
            return tuple(rank[name] for rank in ranks)

        axes = []
        for group, axis in self._axes:
            if axis.axis not in own.links:
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
