"""What a machine lacks for DeepSpeed is said before any rank waits for another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpctrain.engines.deepspeed import DeepSpeedConfig, ds_config
from hpctrain.records.layout import RunLayout
from hpctrain.train.engines.deepspeed import preflight

GOOD: dict[str, Any] = dict(
    run_name="tiny", zero_stage=3, reduce_bucket_elements=1000, gather_bucket_elements=1000,
    model=dict(family="gpt", layers=2, hidden=64, heads=4, vocab=250, seq=32),
    task="language_modeling", vocab_size=250, seq_length=32, data_parallel_size=2,
    micro_batch_size=2, global_batch_size=8, train_steps=6, precision="bf16",
    deterministic_mode=False, seed=1, lr=1e-3, min_lr=0.0, lr_decay_style="cosine",
    lr_warmup_steps=1, lr_decay_steps=6, adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-8,
    weight_decay=0.1, clip_grad=1.0, data_blend=(), data_split="98,2,0", data_cache=None,
    tokenizer=None, eval_interval_steps=None, eval_batches=1, save_interval_steps=None,
    save_interval_seconds=None, async_save=False, keep_checkpoints=1, keep_every_steps=None,
    log_interval_steps=1, distributed_timeout_seconds=60.0, model_flops_per_step=1.0,
    peak_flops_per_gpu=None,
)  # fmt: skip


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A DeepSpeed without any operator, on a machine without any tool."""
    home = tmp_path / "deepspeed"
    (home / "ops" / "adam").mkdir(parents=True)
    monkeypatch.setattr(preflight, "package_directory", lambda: home)
    monkeypatch.setattr(preflight.shutil, "which", lambda tool: None)
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("CXX", raising=False)
    return home


def problems(directory: Path, **changes: Any) -> list[str]:
    config = DeepSpeedConfig(**{**GOOD, **changes})
    found = preflight.engine_problems(config, RunLayout(directory))
    return [str(problem) for problem in found]


def test_without_offload_nothing_is_built(installed: Path, tmp_path: Path) -> None:
    assert problems(tmp_path) == []


def test_an_adam_that_must_be_built_needs_tools(installed: Path, tmp_path: Path) -> None:
    adam = dict(offload_optimizer="cpu", torch_adam=False)
    assert [line.split(", and ")[1] for line in problems(tmp_path, **adam)] == [
        "c++ is missing",
        "ninja is missing",
    ]
    (installed / "ops" / "adam" / "cpu_adam_op.cpython-311-x86_64-linux-gnu.so").touch()
    assert problems(tmp_path, **adam) == [], "built when DeepSpeed was installed"


def test_nvme_needs_a_directory_and_libaio(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    nvme = dict(offload_optimizer="nvme", nvme_path=str(tmp_path / "file" / "nvme"))
    first, *others = problems(tmp_path, **nvme)
    assert "cannot write there" in first and "c++ is missing" in others[0]
    monkeypatch.setattr(preflight.shutil, "which", lambda tool: tool)
    monkeypatch.setattr(preflight, "has_libaio", lambda: False)
    (line,) = problems(tmp_path, **{**nvme, "nvme_path": str(tmp_path / "nvme")})
    assert "libaio.h is missing" in line


def test_deepspeed_that_is_not_there(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "package_directory", lambda: None)
    assert problems(tmp_path) == ["deepspeed is not installed in this environment"]


def test_a_changed_file_is_not_silently_left_unread(installed: Path, tmp_path: Path) -> None:
    run = RunLayout(tmp_path)
    other = ds_config(DeepSpeedConfig(**{**GOOD, "zero_stage": 2}))
    run.ds_config.write_text(json.dumps(other))
    (line,) = problems(tmp_path)
    assert "ds_config.json: differs from train.json" in line
    fewer = run.ds_config_for(1)
    fewer.write_text(json.dumps(ds_config(DeepSpeedConfig(**GOOD))))
    assert problems(tmp_path) == [], "this launch is of the other size"


def test_weights_that_cannot_be_split(installed: Path, tmp_path: Path) -> None:
    llama = dict(GOOD["model"], family="llama", kv_heads=2, ffn=128)
    split: dict[str, Any] = dict(model=llama, tensor_parallel=2, zero_stage=2)
    assert problems(tmp_path, **split) == []
    for changes in (dict(zero_stage=3), dict(lora=dict(rank=4)), dict(model=GOOD["model"])):
        (line,) = problems(tmp_path, **{**split, **changes})
        assert "weights are split over tp for whole Llamas" in line
    (line,) = problems(tmp_path, **{**split, "tensor_parallel": 4})
    assert "tp 4 divides not all of heads" in line


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(pipeline_stages=(1, 2)), "stages of 1 + 2 layers are not the model's 2"),
        (dict(zero_stage=2), "DeepSpeed's pipeline trains whole GPTs"),
        (dict(lora=dict(rank=4)), "DeepSpeed's pipeline trains whole GPTs"),
    ],
)
def test_a_pipeline_that_cannot_be(
    installed: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    given = {**dict(zero_stage=1, pipeline_stages=(1, 1)), **changes}
    (line,) = problems(tmp_path, **given)
    assert words in line
    assert problems(tmp_path, zero_stage=1, pipeline_stages=(1, 1)) == []
