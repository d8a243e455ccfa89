"""Check the speed of GPUs and links before the model is built, at most 60 seconds a launch.

All ranks measure at the same time. Rank 0 compares them, has suspects measured a second time, and
records everything in `speed.jsonl`. A launch ends here where the supervisor can replace the slow
nodes; otherwise it trains on. Belongs here: the order, and the limit of time. Does not belong here:
measuring (`speed_measurements`), comparing (`slow_parts`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hpctrain.engines.speed_check import SpeedCheckConfig
from hpctrain.records.speed_checks import AxisSpeed, SlowPart, SpeedCheck, write_speed_check
from hpctrain.train.device import gpu_ids, gpu_index, on_cpu
from hpctrain.train.engine import AxisGroup, Mesh
from hpctrain.train.faults import SlowNodesError
from hpctrain.train.gpu_state import GpuState, read_gpu_state
from hpctrain.train.job import Job
from hpctrain.train.nccl_network import NetworkLog, open_network_log
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
