"""Runs of one process on a GPU, or on the CPU of the same machine: making, starting, looking."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trial_runs import GPT, MODULE_GPT, Trial, make_trial

from bench.free_ports import free_port
from hpctrain.records.manifest import checkpoint_name
from hpctrain.records.run_records import RankTimes, read_record

LIMIT_SECONDS = 240.0
STEPS, SAVED = 8, 4
# Large enough for the kernels that real models use: heads of 64, and products on tensor cores.
SHAPE = dict(layers=2, hidden=256, ffn=1024, heads=4, vocab=1000, seq=128)
DEVICE = "cpu" if os.environ.get("GPU_TESTS") == "emulated" else "cuda"
SAME: dict[str, Any] = dict(
    accelerator=DEVICE,
    vocab_size=1000,
    seq_length=128,
    train_steps=STEPS,
    lr_decay_steps=STEPS,
    rank_times_interval_steps=3,
)
MODULE: dict[str, Any] = dict(MODULE_GPT, **SAME, model=dict(MODULE_GPT["model"], **SHAPE))
FSDP: dict[str, Any] = dict(MODULE, engine="fsdp")
ZERO: dict[str, Any] = dict(
    MODULE, engine="deepspeed", reduce_bucket_elements=300_000, gather_bucket_elements=300_000
)
MEGATRON: dict[str, Any] = dict(
    GPT,
    **SAME,
    engine="megatron",
    num_layers=2,
    hidden_size=256,
    ffn_hidden_size=1024,
    kv_channels=64,
    padded_vocab_size=1024,
    pipeline_layer_split=((2,),),
    transformer_impl="local",
)
WITH_ENGINE: dict[str, Any] = dict(MEGATRON, transformer_impl="transformer_engine")
PACKAGE = Path(sys.prefix, "megatron-lm")
MEGATRON_LM: dict[str, Any] = dict(
    MEGATRON,
    engine="megatron-lm",
    save_interval_steps=STEPS,
    checkout=str(PACKAGE),
    entry=os.path.relpath(Path(__file__).parents[1] / "engines" / "pretrain_package.py", PACKAGE),
)
ENGINES: dict[str, dict[str, Any]] = {
    "ddp": MODULE,
    "fsdp": FSDP,
    "fsdp, recomputed": dict(FSDP, activation_checkpointing=True),
    "fsdp, offloaded": dict(FSDP, cpu_offload=True),
    "ZeRO 0": dict(ZERO, zero_stage=0),
    "ZeRO 1": dict(ZERO, zero_stage=1),
    "ZeRO 2": dict(ZERO, zero_stage=2),
    "ZeRO 2, offloaded": dict(ZERO, zero_stage=2, offload_optimizer="cpu"),
    "ZeRO 3": dict(ZERO, zero_stage=3),
    "megatron": MEGATRON,
    "megatron, TransformerEngine": WITH_ENGINE,
    "megatron-lm": MEGATRON_LM,
}


@dataclass
class Process:
    """One rank."""

    popen: subprocess.Popen[bytes]
    log_path: Path
    codes: list[int] = field(default_factory=list)

    def wait(self, limit_seconds: float = LIMIT_SECONDS) -> int:
        try:
            return self.popen.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            self.popen.send_signal(signal.SIGKILL)
            return self.popen.wait()

    @property
    def log(self) -> str:
        return self.log_path.read_text()


@dataclass(frozen=True)
class GpuTrial(Trial):
    """`start` and `train` differ from a Trial's: one process, which finds the GPU or does not."""

    def launch(self, *, gpu: bool = True, resume: int | None = None, **own: str) -> Process:
        variables = {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "HPCTRAIN_EPOCH": "0",
            "HPCTRAIN_RESUME": "" if resume is None else checkpoint_name(resume),
            **({} if gpu else {"CUDA_VISIBLE_DEVICES": ""}),
            **own,
        }
        log_path = self.run.logs / f"launch-{time.monotonic_ns()}.log"
        with log_path.open("wb") as log:
            command = [sys.executable, "-m", "hpctrain.train", str(self.run.train_config)]
            streams: dict[str, Any] = dict(stdout=log, stderr=subprocess.STDOUT)
            return Process(
                subprocess.Popen(command, env={**os.environ, **variables}, **streams), log_path
            )

    def trained(self, *, gpu: bool = True, resume: int | None = None) -> GpuTrial:
        """Itself, after a launch to the end."""
        process = self.launch(gpu=gpu, resume=resume)
        code = process.wait()
        assert code == 0, process.log[-4000:]
        return self

    @property
    def times(self) -> RankTimes:
        found = read_record(self.run.rank_times, RankTimes)
        assert found is not None
        return found


def needs_installed(engine: dict[str, Any]) -> str | None:
    """Return what an engine needs and this environment lacks; None if nothing."""
    from hpctrain.train.software import transformer_engine

    if engine is MEGATRON_LM and not PACKAGE.is_dir():
        return f"no checkout of Megatron-LM in {PACKAGE.name} of the environment (`make install`)"
    if engine is WITH_ENGINE and not transformer_engine().imported:
        return f"TransformerEngine: {transformer_engine()}"
    return None


def gpu_trial(directory: Path, base: dict[str, Any], **changes: Any) -> GpuTrial:
    made = make_trial(directory, base, **changes)
    return GpuTrial(made.run, made.config)
