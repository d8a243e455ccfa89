"""The job that each engine trains: one small GPT, data made up, in fp32 on CPUs; on a GPU one of
355 million weights in bf16 (GPT-3 medium: Brown et al. 2020, arXiv:2005.14165, table 2.1).

Belongs here: documents for the trainer, as a plan would fill them. Does not belong here: measuring.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from hpctrain.engines.megatron import MegatronConfig
from hpctrain.engines.train_json import parse_train_config
from hpctrain.engines.training import TrainConfig

ROOT = Path(__file__).resolve().parents[2]
# Unpacked by `make install`: megatron.training, with a program of the tests to call it.
MEGATRON_LM = Path(sys.prefix, "megatron-lm")

_RUN: dict[str, Any] = dict(
    run_name="overhead",
    seq_length=128,
    vocab_size=2048,
    micro_batch_size=2,
    global_batch_size=8,
    train_steps=10_000,
    precision="fp32",
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
# Four ranks, so that both tensor and pipeline parallelism take part.
_MEGATRON: dict[str, Any] = dict(
    _RUN,
    engine="megatron",
    num_layers=4,
    hidden_size=256,
    ffn_hidden_size=1024,
    num_attention_heads=8,
    num_query_groups=8,
    kv_channels=32,
    padded_vocab_size=2048,
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
    recompute_granularity=None,
    use_distributed_optimizer=True,
    overlap_grad_reduce=False,
    overlap_param_gather=False,
)
_MODULE: dict[str, Any] = dict(
    _RUN,
    task="language_modeling",
    model=dict(family="gpt", layers=4, hidden=256, ffn=1024, heads=8, vocab=2048, seq=128),
    data_parallel_size=2,
)
_MEGATRON_LM: dict[str, Any] = dict(
    _MEGATRON,
    engine="megatron-lm",
    checkout=str(MEGATRON_LM),
    entry=str(Path(__file__).with_name("pretrain_in_turns.py")),
    tensor_model_parallel_size=1,
    pipeline_model_parallel_size=1,
    pipeline_layer_split=((4,),),
    data_parallel_size=2,
    save_interval_steps=10_000,
    save_interval_seconds=None,
    async_save=False,
)


def _parsed(fields: dict[str, Any]) -> TrainConfig:
    return parse_train_config(json.dumps(fields))


JOBS: dict[str, TrainConfig] = {
    "megatron": _parsed(_MEGATRON),
    "fsdp": _parsed(dict(_MODULE, engine="fsdp", shard_size=2)),
    "ddp": _parsed(dict(_MODULE, engine="ddp")),
    "deepspeed": _parsed(
        dict(
            _MODULE,
            engine="deepspeed",
            zero_stage=2,
            reduce_bucket_elements=500_000_000,
            gather_bucket_elements=500_000_000,
        )
    ),
    "megatron-lm": _parsed(_MEGATRON_LM),
}

_ON_GPU: dict[str, Any] = dict(
    precision="bf16",
    seq_length=1024,
    vocab_size=50257,
    micro_batch_size=8,
    global_batch_size=16,
    data_parallel_size=1,
    peak_flops_per_gpu=None,
)
_MEGATRON_ON_GPU: dict[str, Any] = dict(
    _ON_GPU,
    num_layers=24,
    hidden_size=1024,
    ffn_hidden_size=4096,
    num_attention_heads=16,
    num_query_groups=16,
    kv_channels=64,
    padded_vocab_size=50304,
    tensor_model_parallel_size=1,
    pipeline_model_parallel_size=1,
    pipeline_layer_split=((24,),),
)


def on_one_gpu(config: TrainConfig) -> TrainConfig:
    """The same engine with a job that keeps one GPU busy."""
    shape = dict(family="gpt", layers=24, hidden=1024, ffn=4096, heads=16, vocab=50257, seq=1024)
    if config.engine.startswith("megatron"):
        own: dict[str, Any] = _MEGATRON_ON_GPU
    else:
        own = dict(_ON_GPU, model=shape)
    sharded = dict(shard_size=1) if config.engine == "fsdp" else {}
    return _parsed({**config.model_dump(mode="json"), **own, **sharded})


assert isinstance(JOBS["megatron"], MegatronConfig)
MEGATRON: MegatronConfig = JOBS["megatron"]
