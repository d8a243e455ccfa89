"""Tiny training runs on the real engines: making them, starting ranks, reading results."""

from __future__ import annotations

import atexit
import fcntl
import functools
import hashlib
import importlib
import json
import math
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import prefork
from hpctrain.engines.train_json import parse_train_config
from hpctrain.engines.training import TrainConfig
from hpctrain.records.exit_records import read_exit_records
from hpctrain.records.layout import RunLayout
from hpctrain.records.manifest import checkpoint_name
from hpctrain.records.run_records import ExitRecord, StepMetrics, read_metrics

LIMIT_SECONDS = 300.0
# Longer than any pause of a busy machine, and over before LIMIT_SECONDS.
COLLECTIVE_SECONDS = 150.0
# How far losses and norms may be from those of one process: of megatron-core's layouts, and of a
# mean in fp32 over other partial sums after six steps, whose norms may be ten times as far.
TOLERANCE, ROUNDING = 1e-5, 5e-6

GPT: dict[str, Any] = dict(
    run_name="tiny",
    num_layers=4,
    hidden_size=64,
    ffn_hidden_size=128,
    num_attention_heads=4,
    num_query_groups=4,
    kv_channels=16,
    vocab_size=250,
    padded_vocab_size=256,
    seq_length=32,
    activation="gelu",
    normalization="LayerNorm",
    layernorm_epsilon=1e-5,
    position_embedding_type="learned_absolute",
    rotary_base=10000,
    share_embeddings_and_output_weights=True,
    add_bias_linear=True,
    dropout=0.0,
    transformer_impl="auto",
    tensor_model_parallel_size=1,
    pipeline_model_parallel_size=1,
    virtual_pipeline_model_parallel_size=None,
    context_parallel_size=1,
    data_parallel_size=1,
    sequence_parallel=False,
    pipeline_layer_split=((4,),),
    micro_batch_size=2,
    global_batch_size=8,
    train_steps=6,
    precision="fp32",
    recompute_granularity=None,
    deterministic_mode=False,
    seed=1234,
    lr=3e-3,
    min_lr=3e-4,
    lr_decay_style="cosine",
    lr_warmup_steps=1,
    lr_decay_steps=6,
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
    save_interval_seconds=None,
    async_save=False,
    keep_checkpoints=10,
    keep_every_steps=None,
    log_interval_steps=1,
    distributed_timeout_seconds=COLLECTIVE_SECONDS,
    model_flops_per_step=1e9,
    peak_flops_per_gpu=None,
)
LLAMA = dict(
    GPT,
    activation="swiglu",
    normalization="RMSNorm",
    position_embedding_type="rope",
    num_query_groups=2,
    share_embeddings_and_output_weights=False,
    add_bias_linear=False,
)


# What of GPT is not megatron-core's own.
_SHARED = {name: GPT[name] for name in TrainConfig.model_fields if name in GPT}
# The same model on Hugging Face's classes, with the same samples.
MODULE_GPT: dict[str, Any] = dict(
    _SHARED,
    engine="ddp",
    model=dict(family="gpt", layers=4, hidden=64, ffn=128, heads=4, vocab=250, seq=32),
    task="language_modeling",
    initial_weights="place",
)
MODULE_LLAMA: dict[str, Any] = dict(
    MODULE_GPT,
    model=dict(
        family="llama", layers=2, hidden=64, ffn=128, heads=4, kv_heads=2, vocab=250, seq=32
    ),
)

# Settings of runs that several tests read or go on from (`trained`).
TWO: dict[str, Any] = dict(data_parallel_size=2)
DP2: dict[str, Any] = dict(
    data_parallel_size=2, overlap_grad_reduce=True, overlap_param_gather=True
)
PP2: dict[str, Any] = dict(pipeline_model_parallel_size=2, pipeline_layer_split=((2,), (2,)))
TP2_PP2: dict[str, Any] = dict(PP2, tensor_model_parallel_size=2)
EVALUATING: dict[str, Any] = dict(eval_interval_steps=2, eval_batches=2)
WITH_DROPOUT: dict[str, Any] = dict(model={**MODULE_GPT["model"], "layers": 2, "dropout": 0.1})
DDP2: dict[str, Any] = dict(MODULE_GPT, **WITH_DROPOUT, **EVALUATING, data_parallel_size=2)
FSDP2: dict[str, Any] = dict(DDP2, engine="fsdp", shard_size=2)
PLAIN: dict[str, Any] = dict(MODULE_GPT, model={**MODULE_GPT["model"], "layers": 2})
PLAIN_LLAMA: dict[str, Any] = dict(PLAIN, model=MODULE_LLAMA["model"])
ZERO: dict[str, Any] = dict(
    PLAIN,
    engine="deepspeed",
    zero_stage=1,
    data_parallel_size=2,
    # several buckets for a model of 100,000 weights, of which the norms stay whole at stage 3
    reduce_bucket_elements=30_000,
    gather_bucket_elements=30_000,
)
DROPPING_ZERO: dict[str, Any] = dict(ZERO, **WITH_DROPOUT, async_save=True)
ZERO3: dict[str, Any] = dict(DROPPING_ZERO, **EVALUATING, zero_stage=3)
ZERO_PP2: dict[str, Any] = dict(
    DROPPING_ZERO, **EVALUATING, pipeline_stages=(1, 1), data_parallel_size=1
)
# Tensors and pipeline: two of each.
ZERO_TP2_PP2: dict[str, Any] = dict(
    ZERO,
    model=PLAIN_LLAMA["model"],
    tensor_parallel=2,
    pipeline_stages=(1, 1),
    data_parallel_size=1,
)
TP2: dict[str, Any] = dict(tensor_model_parallel_size=2)
VPP2: dict[str, Any] = dict(
    pipeline_model_parallel_size=2,
    virtual_pipeline_model_parallel_size=2,
    pipeline_layer_split=((1, 1), (1, 1)),
)
EP2: dict[str, Any] = dict(expert_model_parallel_size=2)
MOE: dict[str, Any] = dict(
    LLAMA,
    num_moe_experts=4,
    moe_router_topk=2,
    moe_ffn_hidden_size=48,
    moe_shared_expert_intermediate_size=32,
    moe_first_dense_layers=1,
    global_batch_size=4,  # of micro-batches of two, with any layout: see `two_micro_batches`
)


@dataclass(frozen=True)
class Trial:
    """A run directory and its configuration."""

    run: RunLayout
    config: Any

    @property
    def world_size(self) -> int:
        return int(self.config.world_size)

    def start(
        self,
        *,
        resume: int | None = None,
        epoch: int = 0,
        prepare: Callable[[], None] | None = None,
        world_size: int | None = None,
    ) -> prefork.Ranks:
        """Fork the ranks of one launch and return at once."""
        environment = {
            "HPCTRAIN_EPOCH": str(epoch),
            "HPCTRAIN_RESUME": "" if resume is None else checkpoint_name(resume),
        }
        return prefork.start(
            self.run.train_config,
            world_size or self.world_size,
            self.run.logs / f"launch-{time.monotonic_ns()}",
            environment=environment,
            prepare=prepare,
        )

    def train(self, **launch: Any) -> list[int]:
        """One launch to its end: the exit codes; shows the logs when a rank failed unexpectedly."""
        ranks = self.start(**launch)
        codes = ranks.wait(LIMIT_SECONDS)
        for rank, code in enumerate(codes):
            print(f"--- rank {rank}: exit code {code}\n{ranks.log(rank)}")
        return codes

    def adopt(self, other: Trial, step: int) -> None:
        """Copy a checkpoint of another run, to resume from it."""
        name = checkpoint_name(step)
        shutil.copytree(other.run.checkpoints / name, self.run.checkpoints / name)

    def goes_on(self, other: Trial, step: int = 4, **launch: Any) -> Trial:
        """Train to the end from a checkpoint of another run."""
        self.adopt(other, step)
        assert self.train(resume=step, **launch) == [0] * self.world_size
        return self

    @property
    def said(self) -> str:
        """Everything that the ranks have said, in all launches."""
        return "".join(path.read_text() for path in sorted(self.run.logs.rglob("*.log")))

    @property
    def evaluated(self) -> dict[int, float]:
        """The losses of evaluations by step."""
        return {row.step: row.eval_loss for row in self.rows if row.eval_loss is not None}

    @property
    def rows(self) -> list[StepMetrics]:
        return read_metrics(self.run)

    @property
    def losses(self) -> dict[int, float]:
        return {row.step: float.fromhex(row.loss_hex) for row in self.rows}

    @property
    def exact(self) -> dict[int, tuple[str, float | None]]:
        """What must be equal bit for bit: loss and gradient norm of each step."""
        return {row.step: (row.loss_hex, row.grad_norm) for row in self.rows}

    def exits(self, epoch: int = 0) -> list[ExitRecord]:
        return read_exit_records(self.run, epoch)

    def message(self, rank: int = 0, epoch: int = 0) -> str:
        """What the exit record of a rank says."""
        return next(one.message or "" for one in self.exits(epoch) if one.rank == rank)

    def wait_for_step(self, step: int, ranks: prefork.Ranks) -> None:
        """Return when the run has recorded `step`."""
        end = time.monotonic() + LIMIT_SECONDS
        while True:
            ended = ranks.ended  # before the rows are read, so that the last one is seen
            if any(row.step >= step for row in self.rows):
                return
            assert not ended and time.monotonic() < end, ranks.log()
            time.sleep(0.02)


# The fixture `trial`, which makes run directories.
MakeTrial = Callable[..., Trial]


def held_at(step: int, released: Callable[[Any], bool], rank: int = 1) -> Callable[[], None]:
    """A `prepare`: this rank begins the step when its loop is `released`, and the others wait for
    it. For tests that do something to a run at its midst, which would be over in no time."""

    def prepare() -> None:
        @wrap("hpctrain.train.loop:Loop", "one_step")
        def one_step(real: Any, self: Any) -> Any:
            end = time.monotonic() + LIMIT_SECONDS
            here = self.position.step + 1 == step and os.environ["RANK"] == str(rank)
            while here and not released(self) and time.monotonic() < end:
                time.sleep(0.01)
            return real(self)

    return prepare


def keep_quietest_window() -> None:
    """A `prepare`: the record of rank times gets the window of the shortest steps, in which the
    machine did not pause. For tests of what takes how long."""
    from hpctrain.train.report import Reporter

    shortest = math.inf

    @wrap(Reporter, "rank_times")
    def rank_times(real: Any, self: Reporter, times: Any) -> None:
        nonlocal shortest
        if sum(times.step_seconds) < shortest:
            shortest = sum(times.step_seconds)
            real(self, times)


def retire_patiently() -> None:
    """A `prepare`: the end of a launch waits for the last deletion of old checkpoints."""
    from hpctrain.train.saving import publication

    publication._RETIRE_SECONDS = LIMIT_SECONDS


@functools.cache
def shared_directory() -> Path:
    """Where what many tests read is made once, for all processes of pytest-xdist: the fixture
    `_shared_by_all_processes` gives it. Without that one, as long as this process lives."""
    directory, owner = Path(tempfile.mkdtemp(prefix="hpctrain-shared-")), os.getpid()
    atexit.register(lambda: os.getpid() == owner and shutil.rmtree(directory, ignore_errors=True))
    return directory


def once(key: str, make: Callable[[Path], object]) -> Path:
    """A directory for this key: who asks first makes what is in it, the others wait for that."""
    directory = shared_directory() / hashlib.sha256(key.encode()).hexdigest()[:20]
    made = directory.with_suffix(".made")
    with directory.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            if not made.exists():
                shutil.rmtree(directory, ignore_errors=True)  # of a try that has failed
                make(directory)
                made.touch()
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # forked processes have this file open, too
    return directory


def shared_indexes() -> Path:
    """Where the orders of mock tokens are, 75 MB for each seed and length, for all trials."""
    return shared_directory() / "indexes"


def config_of(base: dict[str, Any], **changes: Any) -> Any:
    """The tiny model with some fields changed.

    Trials with mock tokens share a cache of their orders, unless `data_cache` says otherwise.
    """
    config = parse_train_config(json.dumps({**base, **changes}))
    mock_tokens = getattr(config, "data_format", "tokens") == "tokens" and not config.data_blend
    if mock_tokens and "data_cache" not in changes:
        config = config.model_copy(update={"data_cache": str(shared_indexes())})
    return config


def two_micro_batches(base: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The changes, and larger micro-batches where the four of one replica would show no more.

    The loss that balances experts is one of each micro-batch: with experts they stay.
    """
    wanted = {**base, **changes}
    given = "micro_batch_size" in changes or wanted.get("num_moe_experts") is not None
    sizes = wanted["micro_batch_size"], wanted["global_batch_size"], wanted["data_parallel_size"]
    return changes if given or sizes != (2, 8, 1) else {**changes, "micro_batch_size": 4}


def make_trial(directory: Path, base: dict[str, Any] = GPT, **changes: Any) -> Trial:
    """A run directory with a `train.json`."""
    config = config_of(base, **changes)
    run = RunLayout(directory)
    run.create()
    run.train_config.write_text(config.model_dump_json())
    return Trial(run, config)


@dataclass(frozen=True)
class Trained(Trial):
    """A whole run that all tests read, and that nobody trains any further or changes."""

    def start(self, **_: Any) -> prefork.Ranks:
        raise AssertionError("other tests read this run: `adopt` its checkpoints into another one")


def trained(base: dict[str, Any] = GPT, **changes: Any) -> Trained:
    """A whole run with these settings to read or to go on from, trained by the first who asks.

    It has a checkpoint after every second step, unless the settings say otherwise: tests ask for
    the same few runs as far as they can.
    """
    changes = two_micro_batches(base, **{"save_interval_steps": 2, **changes})
    config = config_of(base, **changes)

    def train(directory: Path) -> None:
        made = make_trial(directory, {}, **config.model_dump(mode="json"))
        assert set(made.train()) == {0}

    return Trained(RunLayout(once(config.model_dump_json(), train)), config)


def largest_difference(one: Trial, other: Trial, first_step: int) -> tuple[float, float]:
    """Largest differences of loss and gradient norm from `first_step` on, over all steps."""
    left = {row.step: row for row in one.rows if row.step >= first_step}
    right = {row.step: row for row in other.rows if row.step >= first_step}
    assert left.keys() == right.keys()
    assert left, "no steps to compare"
    pairs = [(left[step], right[step]) for step in left]
    loss = max(abs(float.fromhex(a.loss_hex) - float.fromhex(b.loss_hex)) for a, b in pairs)
    norm = max(abs((a.grad_norm or 0) - (b.grad_norm or 0)) for a, b in pairs)
    return loss, norm


def assert_near(
    one: Trial, other: Trial, first_step: int, loss: float = TOLERANCE, norm: float | None = None
) -> None:
    """Compare two runs from a step on; norms may be as far as losses, unless given."""
    losses, norms = largest_difference(one, other, first_step)
    assert losses <= loss and norms <= (loss if norm is None else norm), (losses, norms)


def assert_resumes_exactly(resumed: Trial, whole: Trial, step: int = 4, **launch: Any) -> None:
    """Bit by bit, from a checkpoint of a run that was not interrupted."""
    resumed.goes_on(whole, step, **launch)
    assert resumed.exact == {later: row for later, row in whole.exact.items() if later > step}
    assert resumed.exact, "no steps to compare"


def wrap(owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    """In a `prepare`: a decorator of what takes the place of a function or method of `owner` (or
    `module`, `module:Class`), and gets the real one as its first argument."""
    if isinstance(owner, str):
        module, _, attribute = owner.partition(":")
        owner = importlib.import_module(module)
        owner = getattr(owner, attribute) if attribute else owner
    real = getattr(owner, name)

    def install(replacement: Callable[..., Any]) -> None:
        def called(*given: Any, **named: Any) -> Any:
            return replacement(real, *given, **named)

        setattr(owner, name, called)

    return install


def apart(function: Callable[..., object], *given: Any) -> None:
    """Call it in a forked process: process groups and threads must not live where ranks are forked
    from later on (bench.prefork)."""
    process = multiprocessing.get_context("fork").Process(target=function, args=given)
    process.start()
    process.join(LIMIT_SECONDS)
    assert process.exitcode == 0
