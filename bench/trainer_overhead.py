"""What the trainer costs on top of megatron-core: its step against a bare megatron-core step.

Both run in the same four processes (TP 2 x PP 2, gloo) on the same model, data and optimizer, in
alternating blocks, so that whatever else the machine does hits both. Printed: the median step of
each, and the median over blocks of the ratio of neighbours. Exit code 1 above the limit.

    python bench/trainer_overhead.py [--blocks 20] [--steps 2] [--limit 1.02]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from hpctrain.engines.megatron import MegatronConfig
from hpctrain.store.layout import RunLayout
from hpctrain.train import prefork, startup
from hpctrain.train.job import Job
from hpctrain.train.launch import read_launch
from hpctrain.train.loop import Loop
from hpctrain.train.megatron.engine import MegatronEngine
from hpctrain.train.stop import StopSignals

RANKS = 4
LIMIT_SECONDS = 1800.0

CONFIG = MegatronConfig(
    run_name="overhead",
    num_layers=4,
    hidden_size=256,
    ffn_hidden_size=1024,
    num_attention_heads=8,
    num_query_groups=8,
    kv_channels=32,
    vocab_size=2048,
    padded_vocab_size=2048,
    seq_length=128,
    activation="gelu",
    normalization="LayerNorm",
    layernorm_epsilon=1e-5,
    position_embedding_type="learned_absolute",
    rotary_base=10000,
    share_embeddings_and_output_weights=True,
    add_bias_linear=True,
    dropout=0.0,
    transformer_impl="auto",
    tensor_model_parallel_size=2,
    pipeline_model_parallel_size=2,
    virtual_pipeline_model_parallel_size=None,
    context_parallel_size=1,
    data_parallel_size=1,
    sequence_parallel=False,
    pipeline_layer_split=((2,), (2,)),
    micro_batch_size=2,
    global_batch_size=8,
    train_steps=10_000,
    precision="fp32",
    recompute_granularity=None,
    deterministic_mode=False,
    seed=1234,
    lr=1e-4,
    min_lr=1e-5,
    lr_decay_style="cosine",
    lr_warmup_steps=10,
    lr_decay_steps=10_000,
    adam_beta1=0.9,
    adam_beta2=0.95,
    adam_eps=1e-8,
    weight_decay=0.1,
    clip_grad=1.0,
    use_distributed_optimizer=True,
    overlap_grad_reduce=False,
    overlap_param_gather=False,
    data_blend=(),
    data_split="98,2,0",
    data_cache=None,
    tokenizer=None,
    eval_interval_steps=None,
    eval_batches=1,
    save_interval_steps=None,
    save_interval_seconds=3600.0,
    async_save=True,
    keep_checkpoints=1,
    keep_every_steps=None,
    log_interval_steps=10,
    distributed_timeout_seconds=600.0,
    model_flops_per_step=1e9,
    peak_flops_per_gpu=1e12,
)


class _Keeper:
    step: Callable[[], int]


def bare_step(loop: Loop) -> None:
    """The least that trains: what every megatron-core loop does, and the loss on the last stage.

    Without the timers of the trainer, which are part of what it costs.
    """
    engine = cast(MegatronEngine, loop.engine)
    runner, optimizer = engine.runner, engine.optimizer
    settings = runner.model.settings
    timers, settings.timers = settings.timers, None
    for chunk in runner.model.wrapped:
        chunk.zero_grad_buffer()
    optimizer.inner.zero_grad()
    reports = runner.run(engine.data.training, loop.position.consumed_samples, forward_only=False)
    updated, _, _ = optimizer.inner.step()
    if updated:
        optimizer.schedule.step(increment=1)
    if reports:
        loss_sum, tokens = sum(reports).tolist()
        assert loss_sum / tokens > 0
    settings.timers = timers


def measure(config_path: Path, blocks: int, steps: int) -> None:
    """On each rank: alternate both loops; rank 0 leaves the seconds per step of each block."""
    launch = read_launch(os.environ)
    run = RunLayout(config_path.parent)
    loop = startup.assemble(Job(CONFIG, launch, run, StopSignals()), _Keeper())
    kinds: dict[str, Callable[[], Any]] = {
        "bare": lambda: bare_step(loop),
        "hpctrain": loop.one_step,
    }
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for block in range(-1, blocks):
        order = list(kinds) if block % 2 else list(reversed(kinds))
        for name in order:
            taken = _time_block(loop, kinds[name], steps)
            if block >= 0:  # the first round warms up
                seconds[name].append(taken)
    if launch.leads:
        (run.directory / "seconds.json").write_text(json.dumps(seconds))
    loop.control.barrier()


def _time_block(loop: Loop, step: Callable[[], Any], steps: int) -> float:
    loop.control.barrier()
    started_at = time.perf_counter()
    for _ in range(steps):
        step()
    loop.control.barrier()
    return (time.perf_counter() - started_at) / steps


def report(seconds: dict[str, list[float]], limit: float) -> int:
    ratios = [ours / bare for ours, bare in zip(seconds["hpctrain"], seconds["bare"], strict=True)]
    for name, values in seconds.items():
        print(f"{name:9} median {statistics.median(values) * 1000:8.2f} ms per step")
    ratio = statistics.median(ratios)
    print(f"ratio     median {ratio:.4f} of {len(ratios)} pairs (limit {limit})")
    return 0 if ratio <= limit else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--limit", type=float, default=1.02)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        run = RunLayout(Path(name) / "run")
        run.create()
        ranks = prefork.fork(
            lambda: measure(run.train_config, options.blocks, options.steps), RANKS, run.logs
        )
        codes = ranks.wait(LIMIT_SECONDS)
        if any(codes):
            for rank, code in enumerate(codes):
                print(f"rank {rank}: exit code {code}\n{ranks.log(rank)[-2000:]}", file=sys.stderr)
            return 1
        return report(json.loads((run.directory / "seconds.json").read_text()), options.limit)


if __name__ == "__main__":
    sys.exit(main())
