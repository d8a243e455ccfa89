"""The rendered `ds_config.json` in the hands of DeepSpeed's own class."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from planned_job import planned_job

from hpctrain.engines.deepspeed import DeepSpeedConfig, ds_config
from hpctrain.engines.train_json import train_config
from hpctrain.spec.loader import find_profile, load_profile, load_run_spec

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("needs the deepspeed extra", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
NVME = (
    "optimizer.zero=3",
    "optimizer.offload=nvme",
    "engine.deepspeed.offload_parameters=nvme",
    "engine.deepspeed.nvme_path=/local",
)
SPECS: dict[str, tuple[str, ...]] = {
    "stage 0": ("optimizer.zero=0", "precision=fp32", "model.layers=4"),
    "stage 1": ("optimizer.zero=1",),
    "stages of a pipeline": ("optimizer.zero=1", "parallel.pp=4"),
    "weights split over two": ("optimizer.zero=2", "parallel.tp=2"),
    "tp, pp and dp": ("optimizer.zero=1", "parallel.pp=2", "parallel.tp=2"),
    "stage 2": ("optimizer.zero=2", "optimizer.overlap_grad_reduce=false"),
    "stage 2, host": ("optimizer.zero=2", "optimizer.offload=cpu"),
    "stage 3": ("optimizer.zero=3", "engine.deepspeed.reduce_precision=fp32"),
    "stage 3, host": ("optimizer.zero=3", "optimizer.offload=cpu", "engine.deepspeed.adam=torch",
                      "engine.deepspeed.offload_parameters=cpu"),
    "stage 3, nvme": NVME,
    "no clipping": ("optimizer.clip_grad=0", "optimizer.zero=2"),
    "small buckets": ("optimizer.zero=3", "engine.deepspeed.reduce_bucket=1MB",
                      "engine.deepspeed.gather_bucket=1B"),
}  # fmt: skip


def told(*overrides: str) -> DeepSpeedConfig:
    given = ("engine.name=deepspeed", "recompute=full", "resources.gpus=16", *overrides)
    spec = load_run_spec(ROOT / "examples" / "llama7b.yaml", given).document
    site = load_profile(find_profile("a100x64")).document
    config = train_config(planned_job(spec, site))
    assert isinstance(config, DeepSpeedConfig)
    return config


def taken(config: DeepSpeedConfig, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What DeepSpeed makes of the file on as many ranks as the plan has."""
    from deepspeed import comm
    from deepspeed.runtime.config import DeepSpeedConfig as Theirs

    monkeypatch.setattr(comm, "get_rank", lambda: 0)
    ranks = SimpleNamespace(get_data_parallel_world_size=lambda: config.data_parallel_size)
    return Theirs(json.loads(json.dumps(ds_config(config))), mpu=ranks)


@pytest.mark.parametrize("kind", SPECS)
def test_deepspeed_takes_it(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that it does not know it leaves out silently at the top, so each must be seen there."""
    config = told(*SPECS[kind])
    theirs = taken(config, monkeypatch)
    zero = theirs.zero_config
    half = config.precision == "bf16"
    assert (zero.stage, config.world_size) == (config.zero_stage, 16)
    places = config.tensor_parallel * max(1, len(config.pipeline_stages))
    assert theirs.world_size == config.data_parallel_size == 16 // places
    split = config.tensor_parallel if not config.pipeline_stages else 1
    assert theirs.tensor_parallel_config.autotp_size == (split if split > 1 else 0)
    assert theirs.gradient_accumulation_steps == config.microbatches
    assert theirs.train_micro_batch_size_per_gpu == config.micro_batch_size
    assert theirs.gradient_clipping == config.clip_grad
    assert theirs.bfloat16_config.enabled == half
    assert theirs.grad_accum_dtype == ("fp32" if half else None)
    assert (theirs.optimizer_name, theirs.optimizer_params["eps"]) == ("adamw", 1e-8)
    assert theirs.optimizer_params["torch_adam"] == config.torch_adam
    assert not theirs.zero_force_ds_cpu_optimizer and not theirs.timers_config.enabled
    assert not theirs.checkpoint_tag_validation_enabled and not theirs.wall_clock_breakdown
    if config.zero_stage > 0:
        assert zero.overlap_comm == config.overlap_comm
        assert zero.reduce_bucket_size == config.reduce_bucket_elements


def test_homes_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    zero = taken(told(*NVME), monkeypatch).zero_config
    assert zero.offload_optimizer.device == zero.offload_param.device == "nvme"
    assert str(zero.offload_param.nvme_path) == "/local/hpctrain-llama7b"
    assert zero.offload_param.buffer_size == 100_000_000


def test_sums_in_fp32_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    assert taken(told(*SPECS["stage 3"]), monkeypatch).communication_data_type == torch.float32


def test_what_deepspeed_does_not_know_it_refuses_in_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the test above would prove nothing about that section."""
    from deepspeed import comm
    from deepspeed.runtime.config import DeepSpeedConfig as Theirs

    monkeypatch.setattr(comm, "get_rank", lambda: 0)
    config = ds_config(told(*SPECS["stage 1"]))
    config["zero_optimization"]["bucket"] = 1
    with pytest.raises(ValueError, match="bucket"):
        Theirs(config, mpu=SimpleNamespace(get_data_parallel_world_size=lambda: 16))
