"""Small training runs of the rungs: their documents, and starting their ranks.

On GPUs each rank is a process of its own, because a GPU cannot be used by what was forked from a
process that has used it; emulated ranks are forked, which starts them in seconds. Belongs here:
making and starting runs. Does not belong here: what is compared.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from bench import prefork
from bench.free_ports import free_port
from bench.gpu.rung import ROOT, Site
from hpctrain.engines.train_json import parse_train_config
from hpctrain.engines.training import TrainConfig
from hpctrain.records.layout import RunLayout
from hpctrain.records.manifest import checkpoint_name
from hpctrain.records.run_records import read_metrics

STEPS = 8
LIMIT_SECONDS = 600.0
_SHAPE = dict(layers=4, hidden=256, ffn=1024, heads=4, vocab=1000, seq=128)
_SHARED: dict[str, Any] = dict(
    run_name="rung",
    vocab_size=1000,
    seq_length=128,
    data_parallel_size=1,
    micro_batch_size=1,
    global_batch_size=8,
    train_steps=STEPS,
    precision="fp32",
    deterministic_mode=False,
    seed=1234,
    lr=3e-3,
    min_lr=3e-4,
    lr_decay_style="cosine",
    lr_warmup_steps=1,
    lr_decay_steps=STEPS,
    adam_beta1=0.9,
    adam_beta2=0.95,
    adam_eps=1e-8,
    weight_decay=0.1,
    clip_grad=1.0,
    data_blend=(),
    data_split="98,2,0",
    data_cache=None,
    tokenizer=None,
    eval_interval_steps=None,
    eval_batches=1,
    save_interval_steps=None,
    save_interval_seconds=None,
    async_save=True,
    keep_checkpoints=3,
    keep_every_steps=None,
    log_interval_steps=1,
    distributed_timeout_seconds=120.0,
    model_flops_per_step=1e9,
    peak_flops_per_gpu=None,
)
LLAMA: dict[str, Any] = dict(
    _SHARED,
    engine="megatron",
    num_layers=4,
    hidden_size=256,
    ffn_hidden_size=1024,
    num_attention_heads=4,
    num_query_groups=4,
    kv_channels=64,
    padded_vocab_size=1024,
    activation="swiglu",
    normalization="RMSNorm",
    layernorm_epsilon=1e-5,
    position_embedding_type="rope",
    rotary_base=10000,
    share_embeddings_and_output_weights=False,
    add_bias_linear=False,
    dropout=0.0,
    transformer_impl="local",
    tensor_model_parallel_size=1,
    pipeline_model_parallel_size=1,
    virtual_pipeline_model_parallel_size=None,
    context_parallel_size=1,
    sequence_parallel=False,
    pipeline_layer_split=((4,),),
    recompute_granularity=None,
    use_distributed_optimizer=True,
    overlap_grad_reduce=False,
    overlap_param_gather=False,
)
EXPERTS: dict[str, Any] = dict(LLAMA, num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=256)
WITH_ENGINE: dict[str, Any] = dict(LLAMA, transformer_impl="transformer_engine")
MODULE: dict[str, Any] = dict(
    _SHARED,
    engine="ddp",
    task="language_modeling",
    model=dict(family="llama", **_SHAPE),
)
FSDP: dict[str, Any] = dict(MODULE, engine="fsdp")
ZERO: dict[str, Any] = dict(
    MODULE,
    engine="deepspeed",
    zero_stage=2,
    reduce_bucket_elements=300_000,
    gather_bucket_elements=300_000,
)


class Ranks(Protocol):
    """Started ranks of one launch."""

    def wait(self, limit_seconds: float) -> list[int]: ...

    def signal(self, number: int, *ranks: int) -> None: ...

    def log(self, rank: int = 0) -> str: ...


@dataclass
class RankProcesses:
    """Ranks as processes of their own."""

    popens: list[subprocess.Popen[bytes]]
    logs: Path

    def wait(self, limit_seconds: float) -> list[int]:
        """Exit codes by rank (negative: killed by that signal); kills all past the limit."""
        end = time.monotonic() + limit_seconds
        for popen in self.popens:
            try:
                popen.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.signal(signal.SIGKILL)
                end = time.monotonic() + 60
        return [popen.wait(60) for popen in self.popens]

    def signal(self, number: int, *ranks: int) -> None:
        for rank in ranks or range(len(self.popens)):
            if self.popens[rank].poll() is None:
                self.popens[rank].send_signal(number)

    def log(self, rank: int = 0) -> str:
        return (self.logs / f"rank-{rank}.log").read_text(errors="replace")


@dataclass(frozen=True)
class TrialRun:
    """A run directory and its configuration."""

    run: RunLayout
    config: TrainConfig
    emulated: bool

    def start(self, resume: int | None = None) -> Ranks:
        logs = self.run.logs / f"launch-{time.monotonic_ns()}"
        environment = {
            "HPCTRAIN_EPOCH": "0",
            "HPCTRAIN_RESUME": "" if resume is None else checkpoint_name(resume),
        }
        config, count = self.run.train_config, self.config.world_size
        if self.emulated:
            return prefork.start(config, count, logs, environment=environment)
        return start_processes(["hpctrain.train", str(config)], count, logs, environment)

    def train(self, resume: int | None = None) -> str | None:
        """Run one launch to its end; returns what went wrong, None if nothing."""
        ranks = self.start(resume)
        codes = ranks.wait(LIMIT_SECONDS)
        bad = [rank for rank, code in enumerate(codes) if code]
        if not bad:
            return None
        return f"rank {bad[0]} ends with {codes[bad[0]]}: {ranks.log(bad[0])[-1200:].strip()}"

    def adopt(self, other: TrialRun, step: int) -> None:
        """Copy a checkpoint of another run, to resume from it."""
        name = checkpoint_name(step)
        shutil.copytree(other.run.checkpoints / name, self.run.checkpoints / name)

    @property
    def losses(self) -> dict[int, float]:
        return {row.step: float.fromhex(row.loss_hex) for row in read_metrics(self.run)}

    @property
    def exact(self) -> dict[int, tuple[str, float | None]]:
        """What must be equal bit for bit: loss and gradient norm of each step."""
        return {row.step: (row.loss_hex, row.grad_norm) for row in read_metrics(self.run)}

    @property
    def saved_steps(self) -> list[int]:
        """Steps of the published checkpoints, oldest first."""
        names = [path.name for path in self.run.checkpoints.glob("iter_*") if "." not in path.name]
        return sorted(int(name.removeprefix("iter_")) for name in names)


def make_run(site: Site, name: str, base: Mapping[str, Any], **changes: Any) -> TrialRun:
    """Make a run directory anew, with a `train.json` of `base` and some fields changed."""
    directory = site.directory / "runs" / name.replace(" ", "-")
    shutil.rmtree(directory, ignore_errors=True)
    config = parse_train_config(json.dumps({**base, "accelerator": site.device, **changes}))
    run = RunLayout(directory)
    run.create()
    run.train_config.write_text(config.model_dump_json())
    return TrialRun(run, config, site.emulated)


def start_processes(
    module: list[str], count: int, logs: Path, environment: Mapping[str, str]
) -> RankProcesses:
    """Start `python -m MODULE` once per rank, with a launcher's variables."""
    logs.mkdir(parents=True, exist_ok=True)
    shared = {
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        **environment,
    }
    popens = []
    for rank in range(count):
        with (logs / f"rank-{rank}.log").open("wb") as log:
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            popens.append(
                subprocess.Popen(
                    [sys.executable, "-m", *module],
                    cwd=ROOT,
                    env={**os.environ, **shared, **own},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    return RankProcesses(popens, logs)
