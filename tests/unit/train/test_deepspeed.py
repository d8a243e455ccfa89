"""What a machine lacks for DeepSpeed, and where its operators are built."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from torch.utils.file_baton import FileBaton

from hpctrain.engines.deepspeed import DeepSpeedConfig, ds_config
from hpctrain.records.layout import RunLayout
from hpctrain.train.engines.deepspeed import preflight
from hpctrain.train.engines.deepspeed.assembly import exclusive_build, extensions_directory

# -- What a machine lacks for DeepSpeed is said before any rank waits for another ----------------


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


# -- Where DeepSpeed's operators are built, and that a killed build does not stop the next one ---


HOLD = """
import sys, time
from pathlib import Path
from hpctrain.train.engines.deepspeed.assembly import exclusive_build
from torch.utils.file_baton import FileBaton
root = Path(sys.argv[1])
with exclusive_build(root):
    (root / "cpu_adam").mkdir()
    assert FileBaton(str(root / "cpu_adam" / "lock")).try_acquire()
    print("building", flush=True)
    time.sleep(600)
"""


def test_a_killed_build_does_not_stop_the_next_one(tmp_path: Path) -> None:
    """With torch's own lock file: it is left behind, and torch would wait for it."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as builder:
        assert builder.stdout is not None and builder.stdout.readline() == "building\n"
        builder.send_signal(signal.SIGKILL)
        builder.wait(timeout=60)
    lock = tmp_path / "cpu_adam" / "lock"
    assert not FileBaton(str(lock)).try_acquire(), "torch would wait here"
    with exclusive_build(tmp_path):
        assert FileBaton(str(lock)).try_acquire()


@pytest.mark.variant("test_a_killed_build_does_not_stop_the_next_one")
def test_two_ranks_do_not_build_at_the_same_time(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as builder:
        assert builder.stdout is not None and builder.stdout.readline() == "building\n"
        other = HOLD.split("    (root")[0] + "    print('entered', flush=True)\n"
        with subprocess.Popen(
            [sys.executable, "-c", other, str(tmp_path)], stdout=subprocess.PIPE, text=True
        ) as waiting:
            with pytest.raises(subprocess.TimeoutExpired):
                waiting.wait(timeout=5)
            builder.kill()
            assert waiting.stdout is not None and waiting.stdout.readline() == "entered\n"
            assert waiting.wait(timeout=60) == 0


def test_the_directory_of_the_user_is_kept(tmp_path: Path) -> None:
    assert extensions_directory({"TORCH_EXTENSIONS_DIR": str(tmp_path)}) == tmp_path


def test_the_directory_is_on_the_node_and_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own = tmp_path / f"hpctrain-{os.getuid()}"
    assert extensions_directory({}).parent == own == extensions_directory({}).parent
    assert own.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("kind", ["open to others", "a link"])
def test_a_directory_that_others_could_write_is_not_used(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    taken = tmp_path / f"hpctrain-{os.getuid()}"
    if kind == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        taken.symlink_to(tmp_path / "elsewhere")
    else:
        taken.mkdir()
        taken.chmod(0o777)
    chosen = extensions_directory({}).parent
    assert chosen != taken and chosen.stat().st_mode & 0o777 == 0o700
