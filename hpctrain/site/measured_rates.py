"""Compute shares of the data sheet from rates that were measured on one cluster. Pure.

Belongs here: which measurement gives which constant of the cost model, and which values cannot be
true. Does not belong here: reading files, or writing the calibration (see
`hpctrain.site.calibrate`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hpctrain.records.gpu_report import KernelRates
from hpctrain.records.speed_checks import AxisSpeed, SpeedCheck
from hpctrain.spec.calibration import HALF_LENGTH_CAUSAL, GpuCalibration
from hpctrain.spec.catalogue import Gpu

# Below this share of the data sheet a GPU or link was busy with something else, or is broken.
_LEAST_SHARE = 0.05
# Switches that add (NVLink SHARP, SHARP) let an all-reduce send each byte once instead of twice.
_SWITCH_SUMS = {"all_reduce": 2.0, "all_gather": 1.0, "send_recv": 1.0}
# The operation that a constant is taken from, best first: no switch can shorten an all-gather.
_PREFERENCE = ("all_gather", "all_reduce", "send_recv")
# Fused attention is measured with causal sequences of 4096 (bench/gpu/rates.py), which reach this
# share of the rate of long ones.
_ATTENTION_SHARE = 4096 / (4096 + HALF_LENGTH_CAUSAL)


@dataclass(frozen=True)
class Measurements:
    """Everything measured: `speed[i]` and `kernels[i]` are those paths in the file."""

    speed: tuple[SpeedCheck, ...]
    kernels: tuple[KernelRates, ...]

    def gpus(self) -> Iterator[tuple[str, str | None, float | None]]:
        """Yield (path, name or None for a CPU, memory in bytes or None) of each measurement."""
        for number, check in enumerate(self.speed):
            memory = [size for size in check.total_memory_bytes if size]
            on_cpu = check.accelerator == "cpu"
            yield f"speed[{number}].gpu", None if on_cpu else check.gpu, max(memory, default=None)
        for number, rates in enumerate(self.kernels):
            yield f"kernels[{number}].gpu", rates.gpu, float(rates.memory_bytes)


@dataclass(frozen=True)
class Share:
    """One field of `SiteCalibration`: its value, and the measurements behind it."""

    name: str
    value: float
    source: str


@dataclass(frozen=True)
class Suspect:
    """A value that cannot be true, and where it stands."""

    path: str
    message: str
    hint: str


@dataclass
class _Samples:
    """Values of one figure and the problems among them."""

    values: list[float] = field(default_factory=list)
    suspects: list[Suspect] = field(default_factory=list)

    def accepts(self, path: str, rate: float, limit: float, unit: float, word: str) -> bool:
        """Tell whether a rate can be true, and record why not; `limit` is of the data sheet."""
        if rate > limit:
            message = f"{rate / unit:.4g} {word} is above the data sheet, {limit / unit:.4g} {word}"
            hint = "the profile or the catalogue has another GPU or link than the cluster"
            self.suspects.append(Suspect(path, message, hint))
        elif rate < _LEAST_SHARE * limit:
            message = f"{rate / unit:.4g} {word} is less than {_LEAST_SHARE:.0%} of the data sheet"
            hint = "something else used the GPU or the link, or it is broken: measure again"
            self.suspects.append(Suspect(path, message, hint))
        else:
            return True
        return False


def measured_shares(
    measurements: Measurements, gpu: Gpu, packaged: GpuCalibration
) -> tuple[list[Share], list[Suspect]]:
    """Compute the figures that the measurements allow, and list the values that cannot be true.

    `packaged` has the other constants of the formula for products (tails, memory).
    """
    shares: list[Share] = []
    streams, attention = _kernels(measurements, gpu)
    memory = statistics.median(streams.values) if streams.values else packaged.memory_efficiency
    products = _products(measurements, gpu, packaged, memory)
    inside, outside = _links(measurements, gpu)
    for name, samples, what in (
        ("product_efficiency", products, "GPUs"),
        ("flash_efficiency", attention, "GPUs"),
        ("memory_efficiency", streams, "GPUs"),
        ("nvlink_bandwidth", inside, "ranks"),
        ("network_bandwidth", outside, "ranks"),
    ):
        if samples.values:
            count = len(samples.values)
            source = f"median of {count} {what.removesuffix('s') if count == 1 else what}"
            shares.append(Share(name, statistics.median(samples.values), source))
    suspects = [one for part in (products, streams, attention, inside, outside)
                for one in part.suspects]  # fmt: skip
    return shares, suspects


def _products(
    measurements: Measurements, gpu: Gpu, packaged: GpuCalibration, memory: float
) -> _Samples:
    """Solve the planner's price of a product (plan/cost/kernels.py, product_seconds) for its rate.

    seconds = hypot(2 m n k / rate, operands) + result + 2 k tail / rate, of which operands and
    result are bytes over the memory's rate: a quadratic equation for 1 / rate.
    """
    samples = _Samples()
    for number, check in enumerate(measurements.speed):
        if check.precision != "bf16" or check.accelerator != "cuda":
            continue
        m, n, k = check.product_mnk
        peak = max(float(gpu.peak[name]) for name in ("bf16", "fp16", "fp32") if name in gpu.peak)
        operands, result = (
            2 * numbers / (float(gpu.memory_bandwidth) * memory)
            for numbers in (m * k + k * n, m * n)
        )
        products, tail = 2 * m * n * k, 2 * packaged.tail_products * k
        for rank, rate in enumerate(check.product_flops_per_second):
            path = f"speed[{number}].product_flops_per_second[{rank}]"
            if rate is None or not samples.accepts(path, rate, peak, 1e12, "TFLOP/s"):
                continue
            seconds = max(2 * m * n * k / rate - result, operands)
            root = math.sqrt((products * seconds) ** 2 - (products**2 - tail**2) * operands**2)
            share = (products**2 - tail**2) / (peak * max(root - seconds * tail, 1e-12))
            samples.values.append(min(1.0, share))
    return samples


def _kernels(measurements: Measurements, gpu: Gpu) -> tuple[_Samples, _Samples]:
    """Return shares of the memory bandwidth, and of the 16-bit peak by fused attention."""
    streams, attention = _Samples(), _Samples()
    peak = max(float(gpu.peak[name]) for name in ("bf16", "fp16", "fp32") if name in gpu.peak)
    bandwidth = float(gpu.memory_bandwidth)
    for number, rates in enumerate(measurements.kernels):
        rate, path = rates.stream_bytes_per_second, f"kernels[{number}]."
        if rate is not None and streams.accepts(
            f"{path}stream_bytes_per_second", rate, bandwidth, 1e9, "GB/s"
        ):
            streams.values.append(rate / bandwidth)
        rate = rates.attention_flops_per_second
        if (
            rate is not None
            and rates.precision == "bf16"
            and attention.accepts(f"{path}attention_flops_per_second", rate, peak, 1e12, "TFLOP/s")
        ):
            attention.values.append(min(1.0, rate / peak / _ATTENTION_SHARE))
    if not streams.values:
        streams = _copies(measurements, bandwidth)
    return streams, attention


def _copies(measurements: Measurements, bandwidth: float) -> _Samples:
    """Return shares of the memory bandwidth by copies, which launches measure before training."""
    samples = _Samples()
    for number, check in enumerate(measurements.speed):
        for rank, rate in enumerate(check.copy_bytes_per_second):
            path = f"speed[{number}].copy_bytes_per_second[{rank}]"
            if rate is not None and samples.accepts(path, rate, bandwidth, 1e9, "GB/s"):
                samples.values.append(rate / bandwidth)
    return samples


def _links(measurements: Measurements, gpu: Gpu) -> tuple[_Samples, _Samples]:
    """Return rates per GPU inside the NVLink domain and over the network, in bytes per second."""
    inside: dict[str, _Samples] = {name: _Samples() for name in _PREFERENCE}
    outside: dict[str, _Samples] = {name: _Samples() for name in _PREFERENCE}
    for number, check in enumerate(measurements.speed):
        for place, axis in enumerate(check.axes):
            if axis.message_bytes < max(
                other.message_bytes
                for other in check.axes
                if (other.axis, other.operation) == (axis.axis, axis.operation)
            ):
                continue  # the largest message shows the bandwidth, smaller ones the latency
            path = f"speed[{number}].axes[{place}].bus_bytes_per_second"
            for rank, rate in enumerate(axis.bus_bytes_per_second):
                if rate is None:
                    continue
                near = _members_inside(axis, rank, gpu.nvlink_domain)
                far = near < axis.ranks_per_group
                samples = (outside if far else inside)[axis.operation]
                own = _network_rate(axis, near, rate) if far else rate
                limit = float(gpu.network_bandwidth if far else gpu.nvlink_bandwidth)
                most = limit * _SWITCH_SUMS[axis.operation]
                if samples.accepts(f"{path}[{rank}]", own, most, 1e9, "GB/s"):
                    samples.values.append(min(own, limit))
    return _preferred(inside), _preferred(outside)


def _members_inside(axis: AxisSpeed, rank: int, domain: int) -> int:
    """Count the ranks of a rank's group that are in its NVLink domain; domains are consecutive."""
    own = axis.groups[rank] if rank < len(axis.groups) else 0
    members = [other for other, group in enumerate(axis.groups) if group == own]
    return max(1, sum(other // domain == rank // domain for other in members))


def _network_rate(axis: AxisSpeed, near: int, bus_rate: float) -> float:
    """Convert a bus rate into what each GPU sends over the network (plan/cost/blocks.py).

    A gathering of S bytes takes S (d - 1) / d / (members inside x rate) over d domains.
    """
    if axis.operation == "send_recv":
        return bus_rate
    ranks, domains = axis.ranks_per_group, axis.ranks_per_group / near
    whole = bus_rate * ranks / (ranks - 1)
    return whole * (domains - 1) / domains / near


def _preferred(found: dict[str, _Samples]) -> _Samples:
    """Take the values of the best operation that was measured, and the problems of all."""
    suspects = [one for name in _PREFERENCE for one in found[name].suspects]
    values: Sequence[float] = next((found[n].values for n in _PREFERENCE if found[n].values), [])
    return _Samples(list(values), suspects)
