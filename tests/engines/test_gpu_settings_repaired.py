"""Settings of megatron-core as a GPU would see them, where a reading found that runs would fail.

docs/gpu.md lists each point with its test. TransformerEngine and Apex are facts here, no libraries.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from deepspeed_trials import ZERO
from trial_runs import GPT, LLAMA

from hpctrain.engines.train_json import parse_train_config
from hpctrain.records.layout import RunLayout
from hpctrain.records.software import Library
from hpctrain.train import entry, software
from hpctrain.train.engines.megatron.model import _fusion_settings
from hpctrain.train.job import Job
from hpctrain.train.rank_environment import read_launch
from hpctrain.train.stop import StopSignals

PRESENT = Library(version="2.8.0")
LATENT = dict(
    LLAMA,
    multi_latent_attention=True,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_head_dim=16,
    qk_pos_emb_head_dim=8,
    v_head_dim=16,
)


def fused(monkeypatch: pytest.MonkeyPatch, base: dict[str, Any], apex: Library) -> dict[str, Any]:
    """The fusions of a model with TransformerEngine on a GPU."""
    monkeypatch.setattr(software, "transformer_engine", lambda: PRESENT)
    monkeypatch.setattr(software, "apex_wgrad", lambda: apex)
    document = json.dumps(dict(base, transformer_impl="transformer_engine"))
    return _fusion_settings(parse_train_config(document), compiled=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("base", [GPT, LLAMA, LATENT], ids=["gpt", "llama", "latent"])
def test_gradients_are_accumulated_by_apex_only_where_its_extension_imports(
    base: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """megatron-core's output layer raises otherwise, with TransformerEngine or without."""
    for apex in (Library(), Library(error="ImportError: libcudart.so.12")):
        assert fused(monkeypatch, base, apex)["gradient_accumulation_fusion"] is False
    assert fused(monkeypatch, base, PRESENT)["gradient_accumulation_fusion"] is True


def test_rotary_positions_of_latent_attention_are_not_fused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """megatron-core fuses those of YaRN only, and refuses others (transformer_config.py)."""
    assert fused(monkeypatch, LATENT, PRESENT)["apply_rope_fusion"] is False
    assert fused(monkeypatch, LLAMA, PRESENT)["apply_rope_fusion"] is True


BROKEN = """\
import sys
sys.path.insert(0, sys.argv[1])
from hpctrain.train import megatron_on_cpu
megatron_on_cpu.install_triton()
from hpctrain.train.engines.megatron import fixes
fixes.install()
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer as optimizer
for name in ("load_state_dict", "_set_main_param_and_optimizer_states"):
    print(name, getattr(optimizer, name).__module__)
"""


@pytest.mark.variant("test_rotary_positions_of_latent_attention_are_not_fused")
def test_a_library_that_is_installed_and_broken_keeps_no_correction_away(tmp_path: Path) -> None:
    """megatron-core then takes torch's AdamW, whose steps would be wrong after every resume.

    Of Apex only: megatron-core cannot be imported at all beside a TransformerEngine that cannot
    (tensor_parallel/random.py).
    """
    broken = tmp_path / "apex" / "optimizers"
    broken.mkdir(parents=True)
    (broken.parent / "__init__.py").write_text("")
    (broken / "__init__.py").write_text("raise ImportError('undefined symbol')\n")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BROKEN, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    lines = [line.split() for line in done.stdout.splitlines() if line.strip()]
    modules = {name: module for name, module in lines[-2:]}
    assert len(modules) == 2, done.stderr[-2000:]
    assert all(module.startswith("hpctrain.") for module in modules.values()), modules


@pytest.mark.parametrize(("offloaded", "threads"), [(True, "12"), (False, "1")])
def test_an_optimizer_on_the_host_computes_with_the_cpus_of_its_rank(
    offloaded: bool, threads: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = dict(ZERO, zero_stage=2, accelerator="cuda")
    base |= dict(offload_optimizer="cpu") if offloaded else {}
    config = parse_train_config(json.dumps(base))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)))
    monkeypatch.setattr(entry, "place_rank", lambda local_rank: "near")
    for name in ("OMP_NUM_THREADS", "CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    launch = read_launch({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"})
    entry._prepare_process(Job(config, launch, RunLayout(tmp_path), StopSignals()))
    assert os.environ["OMP_NUM_THREADS"] == threads
