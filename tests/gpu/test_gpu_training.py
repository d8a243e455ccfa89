"""Each engine on a real GPU, alone: what a CPU learns, resumed bit by bit, measured, traced."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from gpu_runs import (
    DEVICE,
    ENGINES,
    FSDP,
    MEGATRON,
    SAVED,
    STEPS,
    WITH_ENGINE,
    gpu_trial,
    needs_installed,
)

from hpctrain.records.manifest import read_manifest
from hpctrain.records.speed_checks import read_speed_checks

# fp32 on two kinds of hardware: sums in another order, which AdamW carries on for eight steps.
BOUND = 2e-4
# TransformerEngine multiplies fp32 on tensor cores, in TF32 with 10 bits of mantissa (cuBLAS,
# CUBLAS_COMPUTE_32F_FAST_TF32): each product is off by up to 2^-11.
TF32_BOUND = 5e-3
KEPT = 3  # checkpoints of a run that saves at each step


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> dict[str, Any]:
    lacking = needs_installed(ENGINES[request.param])
    if lacking is not None:
        pytest.skip(f"not run: {lacking}")
    return ENGINES[request.param]


def test_a_gpu_learns_what_a_cpu_learns(engine: dict[str, Any], tmp_path: Path) -> None:
    there = gpu_trial(tmp_path / "gpu", engine).trained()
    # TransformerEngine has no kernels for CPUs: the same model of megatron-core's own layers
    plain = dict(MEGATRON if engine is WITH_ENGINE else engine, accelerator="cpu")
    here = gpu_trial(tmp_path / "cpu", plain).trained(gpu=False)
    assert there.losses.keys() == here.losses.keys() == set(range(1, STEPS + 1))
    apart = max(abs(there.losses[step] - here.losses[step]) for step in here.losses)
    print(f"largest difference of a loss: {apart:.1e}")
    assert there.losses[STEPS] < there.losses[1] - 0.1, "it learns"
    assert apart < (TF32_BOUND if engine is WITH_ENGINE else BOUND)


SAVING = [
    *("ddp", "fsdp", "fsdp, offloaded", "ZeRO 2", "ZeRO 2, offloaded", "ZeRO 3"),
    *("megatron", "megatron, TransformerEngine"),
]


@pytest.mark.parametrize("name", SAVING)
def test_a_save_beside_training_is_what_a_save_that_waits_is(name: str, tmp_path: Path) -> None:
    """The optimizer goes on while the files are written, and both must resume alike.

    A checkpoint that mixes two steps has other bytes, and resumes with other numbers. On a GPU the
    model is large enough that several steps pass while it is written.
    """
    lacking = needs_installed(ENGINES[name])
    if lacking is not None:
        pytest.skip(f"not run: {lacking}")
    engine = larger(ENGINES[name]) if DEVICE == "cuda" else ENGINES[name]
    exact: dict[str, Any] = dict(
        precision="bf16" if DEVICE == "cuda" else "fp32",
        deterministic_mode=True,
        save_interval_steps=1,
        keep_checkpoints=KEPT,
    )
    waiting = gpu_trial(tmp_path / "waiting", engine, **exact, async_save=False).trained()
    beside = gpu_trial(tmp_path / "beside", engine, **exact, async_save=True).trained()
    assert waiting.exact == beside.exact
    here, there = contents(waiting), contents(beside)
    saved = sorted(here.keys() & there.keys())
    assert saved, "both runs have a checkpoint of one step"
    for step in saved:
        assert here[step] == there[step], f"step {step} differs"
    for run in (waiting, beside):
        resumed = gpu_trial(
            tmp_path / f"{run.run.directory.name}-resumed",
            engine,
            **dict(exact, save_interval_steps=None),
        )
        resumed.adopt(run, saved[0])
        shutil.rmtree(run.run.checkpoints)
        resumed.trained(resume=saved[0])
        assert resumed.exact == {step: waiting.exact[step] for step in resumed.exact}
        assert len(resumed.exact) == STEPS - saved[0]


def larger(engine: dict[str, Any]) -> dict[str, Any]:
    """The engine's job with about 50 million weights: 4 layers of 12 x 1024^2.

    A checkpoint of it has 0.8 GB; eight tests at a time keep some 40 GB.
    """
    if "model" in engine:
        shape = dict(layers=4, hidden=1024, ffn=4096, heads=16)
        return dict(engine, model=dict(engine["model"], **shape))
    return dict(
        engine,
        num_layers=4,
        hidden_size=1024,
        ffn_hidden_size=4096,
        num_attention_heads=16,
        num_query_groups=16,
        pipeline_layer_split=((4,),),
    )


def contents(run: Any) -> dict[int, dict[str, str]]:
    """The digest of every file with tensors, by step and name; files with times are left out."""
    found: dict[int, dict[str, str]] = {}
    for directory in run.run.checkpoints.glob("iter_*"):
        manifest = read_manifest(directory)
        assert manifest is not None
        found[manifest.step] = {
            file.name: str(file.sha256) for file in manifest.files if has_tensors(file.name)
        }
    return found


def has_tensors(name: str) -> bool:
    return name.endswith((".distcp", ".pt", ".safetensors"))


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


@pytest.mark.whole_gpu
@pytest.mark.usefixtures("real_gpu")
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


@pytest.mark.usefixtures("real_gpu")
def test_a_trace_shows_kernels_and_parts_of_the_step(tmp_path: Path) -> None:
    wish = dict(steps=(4, 5), ranks=(0,))
    run = gpu_trial(tmp_path / "run", FSDP, profile=wish, precision="bf16").trained()
    [path] = run.run.directory.rglob("*.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    assert len(kernels) > 100
    marks = {event["name"] for event in events if event["name"].startswith("hpctrain: ")}
    assert {"hpctrain: compute", "hpctrain: backward", "hpctrain: optimizer"} <= marks


@pytest.mark.whole_gpu
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
