"""Measure one device: matrix products, an elementwise kernel, fused attention.

A program of its own (`python -m bench.gpu.rates RESULT.json`), because the process must start
without a used GPU. Rates are of the best third of the repetitions, after a warm-up in which clocks
rise. Belongs here: these measurements. Does not belong here: links (see `links`).
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from torch.nn import functional

from hpctrain.records.gpu_report import KernelRates
from hpctrain.records.speed_checks import SpeedCheck

Precision = Literal["bf16", "fp32"]
WARM_UP_SECONDS, REPETITIONS = 2.0, 30
# On a GPU: products of 8192 fill the device; tensors of 1 GiB do not fit any cache; attention of
# 4 samples, 32 heads of 128, 4096 tokens.
GPU_SIZES = dict(product=8192, elements=2**29, attention=(4, 32, 4096, 128))
CPU_SIZES = dict(product=256, elements=2**20, attention=(1, 2, 128, 64))


def measure(work: Callable[[], object], device: torch.device, warm_up_seconds: float) -> float:
    """Return the seconds of one call: the median of the fastest third."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    end = time.monotonic() + warm_up_seconds
    work()
    while time.monotonic() < end:
        work()
        synchronize()
    taken = []
    for _ in range(REPETITIONS):
        synchronize()
        start = time.perf_counter()
        work()
        synchronize()
        taken.append(time.perf_counter() - start)
    return statistics.median(sorted(taken)[: REPETITIONS // 3])


def product_rate(device: torch.device, dtype: torch.dtype, size: int, warm_up: float) -> float:
    """Return FLOP/s of the product of two square matrices, 2 size^3 each."""
    left = torch.randn(size, size, device=device, dtype=dtype)
    right = torch.randn(size, size, device=device, dtype=dtype)
    result = torch.empty(size, size, device=device, dtype=dtype)
    return 2 * size**3 / measure(lambda: torch.mm(left, right, out=result), device, warm_up)


def stream_rate(device: torch.device, dtype: torch.dtype, elements: int, warm_up: float) -> float:
    """Return bytes per second, read and written, of a scaling into another tensor."""
    source = torch.ones(elements, device=device, dtype=dtype)
    target = torch.empty_like(source)
    moved = 2 * elements * source.element_size()
    return moved / measure(lambda: torch.mul(source, 1.5, out=target), device, warm_up)


def attention_rate(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int, int], warm_up: float
) -> float:
    """Return FLOP/s of causal attention forward and backward; `shape`: samples, heads, s, d.

    7 products of 2 s^2 d each, halved by the mask (arXiv 2205.14135, 2307.08691).
    """
    samples, heads, tokens, size = shape
    query, key, value = (
        torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3)
    )
    gradient = torch.randn(shape, device=device, dtype=dtype)

    def both_passes() -> None:
        out = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        torch.autograd.grad(out, (query, key, value), gradient)

    flops = 7 * 2 * samples * heads * tokens**2 * size / 2
    return flops / measure(both_passes, device, warm_up)


def measure_device(index: int, *, emulated: bool) -> tuple[SpeedCheck, KernelRates]:
    """Measure GPU `index`, or the CPU with small sizes."""
    device = torch.device("cpu") if emulated else torch.device("cuda", index)
    precision: Precision = "fp32" if emulated else "bf16"
    dtype = torch.float32 if emulated else torch.bfloat16
    sizes, warm_up = (CPU_SIZES, 0.0) if emulated else (GPU_SIZES, WARM_UP_SECONDS)
    start = time.monotonic()
    name = None if emulated else torch.cuda.get_device_name(index)
    memory = _memory_bytes(device)
    size = int(sizes["product"])  # type: ignore[call-overload]
    rates = KernelRates(
        gpu=name,
        memory_bytes=memory,
        precision=precision,
        stream_bytes_per_second=stream_rate(device, dtype, sizes["elements"], warm_up),  # type: ignore[arg-type]
        attention_flops_per_second=attention_rate(device, dtype, sizes["attention"], warm_up),  # type: ignore[arg-type]
    )
    product = product_rate(device, dtype, size, warm_up)
    check = SpeedCheck(
        epoch=0,
        time=time.time(),
        seconds=time.monotonic() - start,
        nodes=(os.environ.get("SLURMD_NODENAME") or socket.gethostname(),),
        gpu=name,
        accelerator="cpu" if emulated else "cuda",
        precision=precision,
        product_mnk=(size, size, size),
        product_flops_per_second=(product,),
        total_memory_bytes=(memory,),
    )
    return check, rates


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("result", type=Path)
    parser.add_argument("--emulate-gpu", action="store_true", help="measure the CPU")
    options = parser.parse_args()
    count = 1 if options.emulate_gpu else torch.cuda.device_count()
    measured = [measure_device(index, emulated=options.emulate_gpu) for index in range(count)]
    documents = [[part.model_dump(mode="json") for part in pair] for pair in measured]
    options.result.write_text(json.dumps(documents))


if __name__ == "__main__":
    main()
