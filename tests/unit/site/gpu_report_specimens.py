"""Reports of `make gpu` for tests, with the rates of a plausible H100. Nobody has measured them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hpctrain.spec.run import RunSpec

RANKS = 16
H100 = "NVIDIA H100 80GB HBM3"
H100_BYTES = 81559 * 2**20


def axis(name: str, size: int, stride: int, operation: str, rate: float, **more: Any) -> dict:
    """One axis of 16 ranks: groups of `size` ranks, `stride` apart."""
    block = size * stride
    groups = [rank // block * block + rank % stride for rank in range(RANKS)]
    return dict(
        axis=name,
        operation=operation,
        ranks_per_group=size,
        message_bytes=2**28,
        groups=groups,
        bus_bytes_per_second=[rate] * RANKS,
        **more,
    )


def speed_check(**changes: Any) -> dict[str, Any]:
    """Two nodes with eight GPUs each."""
    return (
        dict(
            epoch=1,
            time=1.76e9,
            seconds=20.0,
            nodes=["gpu1"] * 8 + ["gpu2"] * 8,
            gpu=H100,
            accelerator="cuda",
            precision="bf16",
            product_mnk=[8192, 8192, 8192],
            product_flops_per_second=[7.0e14] * RANKS,
            total_memory_bytes=[H100_BYTES] * RANKS,
            axes=[
                axis("tp", 8, 1, "all_reduce", 3.9e11),
                axis("tp", 8, 1, "all_gather", 3.6e11),
                axis("dp", 2, 8, "all_gather", 4.4e10),
            ],
        )
        | changes
    )


def kernel_rates(**changes: Any) -> dict[str, Any]:
    return (
        dict(
            gpu=H100,
            memory_bytes=H100_BYTES,
            precision="bf16",
            stream_bytes_per_second=3.0e12,
            attention_flops_per_second=4.5e14,
        )
        | changes
    )


def one_gpu_step(seconds: float, number: int = 1, **model: Any) -> dict[str, Any]:
    """A GPT-1.3B on one GPU that took `seconds` per step."""
    spec = RunSpec.model_validate(
        dict(
            name=f"one-gpu-{number}",
            model=dict(layers=24, hidden=2048, heads=16, vocab=50257, seq=2048) | model,
            engine={"name": "fsdp"},
            recompute="none",
            batch={"global": 16, "micro": 8},
            budget={"steps": 12},
            optimizer={"lr": 1e-4},
            checkpoint={"every": "1h"},
            precision="bf16",
            resources={"gpus": 1, "walltime": "1:00:00"},
        )
    )
    return dict(
        name=f"gpt-1.3b {number}",
        spec=spec.model_dump_json(by_alias=True),
        gpus=1,
        nodes=1,
        planned_seconds=1.0,
        measured_seconds=seconds,
    )


def write_report(directory: Path, **changes: Any) -> Path:
    """Write a report of two nodes; `changes` are its top-level fields."""
    content = dict(
        kind="hpctrain-gpu-report",
        hpctrain="0.1.0",
        profile="h100x16",
        speed=[speed_check()],
        kernels=[kernel_rates()],
    )
    path = directory / "gpu-report.json"
    path.write_text(json.dumps(content | changes, indent=1))
    return path
