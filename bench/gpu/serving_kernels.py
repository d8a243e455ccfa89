"""Measure the kernels of a server of a large language model on one GPU, for a planner of serving.

A program of its own (`python -m bench.gpu.serving_kernels RESULT.json`): products of the layers of
Llama 3 8B and 70B by the number of tokens, in bf16 and FP8; attention of decoding and of prefill;
the small kernels between them; launches; copies to and from the host. Kernels are replayed from a
CUDA graph, as servers replay them, and their operands change from call to call, so that no weight
stays in the L2 cache. Belongs here: these measurements. Does not belong here: what a step of a
server takes, or rates of training (see `rates`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

Call = Callable[[], object]
REPLAYS = 5
TOKENS = (1, 8, 32, 128, 512, 2048, 8192)
TENSOR_PARALLEL = (1, 4, 8)
KV_TOKENS, BATCHES = (1024, 8192), (1, 8, 32, 128)
PREFILL_TOKENS = (512, 2048, 8192)
VOCABULARY, HEAD = 128256, 128
_FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Model:
    """The shape of one layer (Grattafiori et al. 2024, arXiv:2407.21783, table 3)."""

    name: str
    hidden: int
    ffn: int
    heads: int
    kv_heads: int


MODELS = (Model("llama-8b", 4096, 14336, 32, 8), Model("llama-70b", 8192, 28672, 64, 8))


@dataclass(frozen=True)
class Sizes:
    """How much is measured: `pool_bytes` of operands, `replay_seconds` of each replay."""

    pool_bytes: int
    replay_seconds: float
    shrink: int = 1


GPU_SIZES = Sizes(36 * 2**30, 0.012)
CPU_SIZES = Sizes(2**24, 0.0, shrink=64)


@dataclass(frozen=True)
class KernelTime:
    """One kernel: seconds of a call, operations, and bytes read and written at the least."""

    kind: str
    name: str
    shape: tuple[int, ...]
    seconds: float | None
    flops: float = 0.0
    moved_bytes: float = 0.0
    error: str = ""


class Bench:
    """One device with a pool of random operands."""

    def __init__(self, device: torch.device, sizes: Sizes) -> None:
        self.device, self.sizes = device, sizes
        self.pool = torch.empty(sizes.pool_bytes // 2, device=device, dtype=torch.bfloat16)
        for part in self.pool.split(2**30):
            part.normal_()
        self.bytes = torch.randn(2**30 // sizes.shrink, device=device).to(_FP8)

    def operands(self, *shape: int, pool: torch.Tensor | None = None) -> Iterator[torch.Tensor]:
        """Yield views of the pool without end, each behind the one before."""
        flat = self.pool if pool is None else pool
        count = int(torch.Size(shape).numel())
        offset = 0
        while True:
            if offset + count > flat.numel():
                offset = 0
            yield flat[offset : offset + count].view(shape)
            offset += -(-count // 512) * 512

    def seconds(self, calls: Sequence[Call]) -> float:
        """Return the seconds of one call: the median of replays of all, after a warm-up."""
        if self.device.type == "cpu":
            start = time.perf_counter()
            calls[0]()
            return time.perf_counter() - start
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            calls[0]()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        graph.replay()
        once = _elapsed(graph.replay, 1)
        repetitions = max(1, min(50, round(self.sizes.replay_seconds / once)))
        return statistics.median(_elapsed(graph.replay, repetitions) for _ in range(REPLAYS)) / len(
            calls
        )

    def measured(
        self,
        kind: str,
        name: str,
        shape: tuple[int, ...],
        calls: Callable[[], Sequence[Call]],
        flops: float = 0.0,
        moved_bytes: float = 0.0,
    ) -> KernelTime:
        """Measure one kernel; what this torch or GPU cannot do is recorded with its reason."""
        try:
            taken = self.seconds(calls())
        except (RuntimeError, ValueError, NotImplementedError) as error:
            reason = str(error).strip().splitlines()[0]
            return KernelTime(kind, name, shape, None, flops, moved_bytes, reason)
        return KernelTime(kind, name, shape, taken, flops, moved_bytes)


def _elapsed(work: Call, repetitions: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repetitions):
        work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / repetitions


def products_of(model: Model, parallel: int) -> dict[str, tuple[int, int]]:
    """Return columns and rows (n, k) of each product of a layer on one rank, and of the logits."""
    return {
        "qkv": ((model.heads + 2 * model.kv_heads) * HEAD // parallel, model.hidden),
        "attention out": (model.hidden, model.heads * HEAD // parallel),
        "gate and up": (2 * model.ffn // parallel, model.hidden),
        "down": (model.hidden, model.ffn // parallel),
        "logits": (VOCABULARY // parallel, model.hidden),
    }


def products(bench: Bench, *, fp8: bool) -> Iterator[KernelTime]:
    """Measure [m, k] x [n, k]^T for each product of a layer; logits for few tokens only."""
    kind = "fp8 product" if fp8 else "bf16 product"
    shrink = bench.sizes.shrink
    for model in MODELS:
        for parallel in TENSOR_PARALLEL:
            for name, (n, k) in products_of(model, parallel).items():
                n, k = max(16, n // shrink // 16 * 16), max(16, k // shrink // 16 * 16)
                for m in TOKENS:
                    if (name == "logits" and (m > 512 or fp8)) or (fp8 and model is MODELS[0]):
                        continue
                    width = 1 if fp8 else 2
                    moved = width * (m * k + n * k) + 2 * m * n
                    make = _fp8_calls if fp8 else _bf16_calls
                    yield bench.measured(
                        kind,
                        f"{model.name} {name} tp{parallel}",
                        (m, n, k),
                        partial(make, bench, m, n, k),
                        2.0 * m * n * k,
                        moved,
                    )


def _bf16_calls(bench: Bench, m: int, n: int, k: int) -> list[Call]:
    tokens = next(bench.operands(m, k))
    out = torch.empty(m, n, device=bench.device, dtype=torch.bfloat16)
    weights = islice(bench.operands(n, k), _rotation(2 * n * k))
    return [partial(torch.mm, tokens, weight.t(), out=out) for weight in weights]


def _fp8_calls(bench: Bench, m: int, n: int, k: int) -> list[Call]:
    tokens = next(bench.operands(m, k, pool=bench.bytes))
    weights = islice(bench.operands(n, k, pool=bench.bytes), _rotation(n * k))
    one = torch.ones((), device=bench.device)
    multiply = partial(
        torch._scaled_mm,
        scale_a=one,
        scale_b=one,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    return [partial(multiply, tokens, weight.t()) for weight in weights]


def _rotation(weight_bytes: int) -> int:
    """Choose how many calls a graph has, each with its own weight: 400 MB, 4 to 24 calls."""
    return max(4, min(24, round(4e8 / weight_bytes)))


def decoding(bench: Bench) -> Iterator[KernelTime]:
    """Measure attention of one new token per sample over its keys and values, 8 KV heads by 128."""
    for heads, kv_heads in ((64, 8), (8, 1), (32, 8)):
        for tokens in KV_TOKENS:
            for samples in BATCHES:
                kv_bytes = 2 * 2 * samples * tokens * kv_heads * HEAD
                if kv_bytes > bench.sizes.pool_bytes:
                    continue
                for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
                    yield bench.measured(
                        "decode attention",
                        f"{backend.name.lower()} {heads}/{kv_heads} heads",
                        (samples, tokens, heads, kv_heads),
                        partial(
                            _attention_calls,
                            bench,
                            backend,
                            (samples, heads, kv_heads),
                            queries=1,
                            tokens=tokens,
                            causal=False,
                        ),
                        4.0 * samples * heads * tokens * HEAD,
                        kv_bytes,
                    )


def prefill(bench: Bench) -> Iterator[KernelTime]:
    """Measure causal attention of one prompt, and of a chunk over all tokens before it."""
    for heads, kv_heads in ((64, 8), (8, 1)):
        for tokens in PREFILL_TOKENS:
            for chunk in {tokens, min(2048, tokens)}:
                whole = chunk == tokens
                for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
                    yield bench.measured(
                        "prefill attention",
                        f"{backend.name.lower()} {heads}/{kv_heads} heads"
                        f"{' causal' if whole else ' all keys'}",
                        (chunk, tokens, heads, kv_heads),
                        partial(
                            _attention_calls,
                            bench,
                            backend,
                            (1, heads, kv_heads),
                            queries=chunk,
                            tokens=tokens,
                            causal=whole,
                        ),
                        4.0 * heads * chunk * tokens * HEAD / (2 if whole else 1),
                        2.0 * HEAD * (2 * kv_heads * tokens + 2 * heads * chunk),
                    )


def _attention_calls(
    bench: Bench,
    backend: SDPBackend,
    shape: tuple[int, int, int],
    *,
    queries: int,
    tokens: int,
    causal: bool,
) -> list[Call]:
    """Keys and values lie as in a cache: samples, tokens, heads."""
    samples, heads, kv_heads = shape
    query = next(bench.operands(samples, queries, heads, HEAD)).transpose(1, 2)
    cache = bench.operands(samples, tokens, kv_heads, HEAD)
    kv_bytes = 4 * samples * tokens * kv_heads * HEAD
    count = max(1, min(8, bench.sizes.pool_bytes // kv_bytes, round(4e8 / kv_bytes)))
    pairs = [(next(cache).transpose(1, 2), next(cache).transpose(1, 2)) for _ in range(count)]

    def call(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(
                query, key, value, is_causal=causal, enable_gqa=True
            )

    return [partial(call, key, value) for key, value in pairs]


def between(bench: Bench) -> Iterator[KernelTime]:
    """Measure what stands between products: norms, gates, and choosing the next token."""
    hidden, ffn = MODELS[1].hidden // bench.sizes.shrink, MODELS[1].ffn // bench.sizes.shrink
    scale = torch.ones(hidden, device=bench.device, dtype=torch.bfloat16)
    for m in TOKENS:
        many = bench.operands(m, hidden)
        rows, others, gates = next(many), next(many), next(bench.operands(m, 2 * ffn))
        logits = next(bench.operands(min(m, 128), VOCABULARY // bench.sizes.shrink))
        kernels: dict[str, tuple[Call, float]] = {
            "rms norm": (partial(functional.rms_norm, rows, (hidden,), scale), 4 * m * hidden),
            "silu and product, two kernels": (partial(_gate, gates), 10 * m * ffn),
            "sum of two": (partial(torch.add, rows, others), 6 * m * hidden),
        }
        if m <= 128:
            kernels["largest logit"] = (partial(torch.argmax, logits, -1), 2 * logits.numel())
            kernels["softmax of logits, two kernels"] = (
                partial(_softmax, logits),
                14 * logits.numel(),
            )
        for name, (call, moved) in kernels.items():
            yield bench.measured("small", name, (m,), partial(_repeated, call), 0.0, moved)


def _gate(rows: torch.Tensor) -> torch.Tensor:
    gates, values = rows.chunk(2, -1)
    return functional.silu(gates) * values


def _softmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.float().softmax(-1)


def _repeated(call: Call) -> list[Call]:
    return [call] * 10


def launches(bench: Bench) -> Iterator[KernelTime]:
    """Measure a tiny kernel from Python and in a graph, and a copy of one number to the host."""
    one = torch.zeros(1, device=bench.device)
    left, right = torch.ones(16, 16, device=bench.device), torch.ones(16, 16, device=bench.device)
    yield bench.measured("launch", "in a graph", (1000,), lambda: [lambda: one.add_(1)] * 1000)
    works: dict[str, tuple[Call, int]] = {
        "add_ from Python": (lambda: one.add_(1), 2000),
        "mm from Python": (lambda: torch.mm(left, right), 2000),
        "number to the host": (lambda: one.item(), 200),
    }
    for name, (work, count) in works.items():
        for _ in range(20):
            work()
        _wait(bench.device)
        start = time.perf_counter()
        for _ in range(count):
            work()
        _wait(bench.device)
        yield KernelTime("launch", name, (count,), (time.perf_counter() - start) / count)


def copies(bench: Bench) -> Iterator[KernelTime]:
    """Measure copies of 1 GiB inside the GPU, and to and from pinned memory of the host."""
    count = 2**30 // bench.sizes.shrink
    here = torch.empty(count, device=bench.device, dtype=torch.uint8)
    there = torch.empty_like(here)
    host = torch.empty(count, dtype=torch.uint8, pin_memory=bench.device.type == "cuda")
    works: dict[str, tuple[Call, int]] = {
        "inside": (lambda: there.copy_(here), 2 * count),
        "to the host": (lambda: host.copy_(here, non_blocking=True), count),
        "from the host": (lambda: here.copy_(host, non_blocking=True), count),
    }
    for name, (work, moved) in works.items():
        taken = []
        for _ in range(6):
            _wait(bench.device)
            start = time.perf_counter()
            work()
            _wait(bench.device)
            taken.append(time.perf_counter() - start)
        seconds = statistics.median(taken[1:])
        yield KernelTime("copy", name, (count,), seconds, 0.0, moved)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


PARTS: dict[str, Callable[[Bench], Iterator[KernelTime]]] = {
    "launches": launches,
    "copies": copies,
    "decoding": decoding,
    "prefill": prefill,
    "between": between,
    "bf16": lambda bench: products(bench, fp8=False),
    "fp8": lambda bench: products(bench, fp8=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("result", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0, help="no kernel is begun after them")
    parser.add_argument("--only", choices=PARTS, help="one part; default: all")
    parser.add_argument("--emulate-gpu", action="store_true", help="small sizes on the CPU")
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    device = torch.device("cpu" if options.emulate_gpu else "cuda")
    bench = Bench(device, CPU_SIZES if options.emulate_gpu else GPU_SIZES)
    found: list[KernelTime] = []
    for name, part in PARTS.items():
        if options.only not in (None, name):
            continue
        for kernel in part(bench):
            found.append(kernel)
            if time.monotonic() > end:
                break
    gpu = None if options.emulate_gpu else torch.cuda.get_device_name()
    document = {"gpu": gpu, "torch": torch.__version__, "kernels": [asdict(one) for one in found]}
    options.result.write_text(json.dumps(document, indent=0))
    failures = sum(one.seconds is None for one in found)
    print(f"{len(found)} kernels, {failures} of them cannot be run here")


if __name__ == "__main__":
    main()
