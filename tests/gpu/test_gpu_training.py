"""Each engine on a real GPU, alone: what a CPU learns, resumed bit by bit, measured, traced."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from gpu_runs import ENGINES, FSDP, MEGATRON, MEGATRON_LM, PACKAGE, SAVED, STEPS, gpu_trial

from hpctrain.store.speed_checks import read_speed_checks

# fp32 on two kinds of hardware: sums in another order, which AdamW hands on for eight steps.
BOUND = 2e-4


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> dict[str, Any]:
    if ENGINES[request.param] is MEGATRON_LM:
        assert PACKAGE.is_dir(), "`make install` unpacks a Megatron-LM"
    return ENGINES[request.param]


def test_a_gpu_learns_what_a_cpu_learns(engine: dict[str, Any], tmp_path: Path) -> None:
    there = gpu_trial(tmp_path / "gpu", engine).trained()
    here = gpu_trial(tmp_path / "cpu", engine).trained(gpu=False)
    assert there.losses.keys() == here.losses.keys() == set(range(1, STEPS + 1))
    apart = max(abs(there.losses[step] - here.losses[step]) for step in here.losses)
    print(f"largest difference of a loss: {apart:.1e}")
    assert there.losses[STEPS] < there.losses[1] - 0.1, "it learns"
    assert apart < BOUND


def test_a_run_in_bf16_goes_on_bit_by_bit(engine: dict[str, Any], tmp_path: Path) -> None:
    if engine.get("zero_stage") == 0:
        engine = dict(engine, zero_stage=1)  # DeepSpeed has no fp32 copies at stage 0
    exact: dict[str, Any] = dict(
        precision="bf16", deterministic_mode=True, save_interval_steps=SAVED
    )
    whole = gpu_trial(tmp_path / "whole", engine, **exact).trained()
    resumed = gpu_trial(tmp_path / "resumed", engine, **exact)
    resumed.adopt(whole, SAVED)
    resumed.trained(resume=SAVED)
    assert set(resumed.exact) == set(range(SAVED + 1, STEPS + 1))
    assert resumed.exact == {step: whole.exact[step] for step in resumed.exact}
    assert whole.losses[STEPS] < whole.losses[1] - 0.1


def test_times_and_memory_are_those_of_the_gpu(tmp_path: Path) -> None:
    """Of events in its stream. A step is not shorter than its parts, nor much longer."""
    for number, base in enumerate((FSDP, MEGATRON)):
        run = gpu_trial(tmp_path / f"run-{number}", base, train_steps=8, precision="bf16").trained()
        times = run.times
        parts = [times.compute_seconds, times.backward_seconds, times.optimizer_seconds]
        spent = sum(one[0] for one in parts if one is not None)
        assert times.step_seconds is not None
        assert 0 < spent <= 1.05 * times.step_seconds[0]
        weights = run.config.model.hidden if base is FSDP else run.config.hidden_size
        assert times.peak_memory_bytes[0] > 16 * 2 * 12 * weights**2
        assert times.reserved_memory_bytes[0] >= times.peak_memory_bytes[0]


def test_a_trace_shows_kernels_and_parts_of_the_step(tmp_path: Path) -> None:
    wish = dict(steps=(4, 5), ranks=(0,))
    run = gpu_trial(tmp_path / "run", FSDP, profile=wish, precision="bf16").trained()
    [path] = run.run.directory.rglob("*.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    assert len(kernels) > 100
    marks = {event["name"] for event in events if event["name"].startswith("hpctrain: ")}
    assert {"hpctrain: compute", "hpctrain: backward", "hpctrain: optimizer"} <= marks


@pytest.mark.parametrize("base", [FSDP, MEGATRON], ids=["fsdp", "megatron"])
def test_the_speed_of_a_gpu_is_measured_before_training(
    base: dict[str, Any], tmp_path: Path
) -> None:
    """What the driver says of the GPU comes with it, and the losses are those without a check."""
    settings = dict(slow_gpu=0.75, slow_link=0.5, fabric="infiniband", axes=[])
    checked = gpu_trial(tmp_path / "checked", base, speed_check=settings).trained()
    (check,) = read_speed_checks(checked.run)
    assert check.gpu and check.accelerator == "cuda" and check.precision == "bf16"
    print(
        f"{check.gpu}: {check.product_flops_per_second} FLOP/s, {check.copy_bytes_per_second} B/s"
    )
    assert all(rate and rate > 1e12 for rate in check.product_flops_per_second)
    assert all(rate and rate > 1e10 for rate in check.copy_bytes_per_second)
    clock, highest = check.clock_hz[0], check.highest_clock_hz[0]
    assert clock and highest and 1e8 < clock <= highest
    assert check.seconds < 30 and check.slow == ()
    assert check.free_memory_bytes[0] and check.total_memory_bytes[0]
    assert check.free_memory_bytes[0] <= check.total_memory_bytes[0]
    plain = gpu_trial(tmp_path / "plain", base).trained()
    assert checked.exact == plain.exact
