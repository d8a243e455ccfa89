"""Measure this rank's GPU and its links: matrix products, copies, all-reduce, messages.

Every function is a collective call: all ranks measure at the same time, as they will train. Uses
no random numbers, and frees its memory. Belongs here: timing. Does not belong here: order and
limits of time (see `speed_check`), comparing ranks (`slow_parts`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from hpctrain.train.device import on_cpu, wait_for_device
from hpctrain.train.engine import AxisGroup
from hpctrain.train.step_agreement import Control

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


@dataclass(frozen=True)
class PairRates:
    """Bytes per second and direction between this rank and its neighbours, None without one."""

    slowest: float | None
    fastest: float | None


def measure_pairs(
    axis: AxisGroup,
    message_bytes: int,
    device: torch.device,
    control: Control,
    *,
    closed: bool,
) -> PairRates:
    """Exchange messages with the one or two neighbours on an axis, one at a time.

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
    return PairRates(min(rates), max(rates)) if rates else PairRates(None, None)


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
