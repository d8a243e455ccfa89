"""Megatron-core: from spec and plan to the one file that tells the trainer what to do.

`TrainConfig` uses Megatron's own names (megatron-core TransformerConfig, OptimizerConfig,
DistributedDataParallelConfig), so that whoever knows Megatron can read `train.json`.
Belongs here: the document and the pure function that fills it. Does not belong here: torch,
megatron imports, or reading files.
"""

from __future__ import annotations

from typing import Literal

from hpctrain.plan.documents import DEFAULT_ORDER, Order, Plan
from hpctrain.spec.document import Document
from hpctrain.spec.run import CheckpointSpec, RecomputeModule, RunSpec

_FIRST_SAVE_SECONDS = 600.0


class TrainConfig(Document):
    """What `python -m hpctrain.train RUN_DIRECTORY/train.json` does. Sizes are plain numbers."""

    schema_version: Literal[1] = 1
    run_name: str
    # model
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    vocab_size: int
    padded_vocab_size: int
    seq_length: int
    activation: Literal["gelu", "swiglu", "squared_relu"]
    normalization: Literal["LayerNorm", "RMSNorm"]
    layernorm_epsilon: float
    position_embedding_type: Literal["learned_absolute", "rope"]
    rotary_base: int
    share_embeddings_and_output_weights: bool
    add_bias_linear: bool
    dropout: float
    transformer_impl: Literal["auto", "local", "transformer_engine"]
    # experts in place of the MLP, from layer `moe_first_dense_layers` on; None: dense everywhere
    num_moe_experts: int | None = None
    moe_router_topk: int = 2
    moe_ffn_hidden_size: int | None = None
    moe_shared_expert_intermediate_size: int | None = None
    moe_first_dense_layers: int = 0
    # multi-head latent attention; q_lora_rank None: one full query projection
    multi_latent_attention: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int = 512
    qk_head_dim: int = 128
    qk_pos_emb_head_dim: int = 64
    v_head_dim: int = 128
    mtp_num_layers: int | None = None
    # layout
    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    virtual_pipeline_model_parallel_size: int | None
    context_parallel_size: int
    data_parallel_size: int
    expert_model_parallel_size: int = 1
    parallel_order: Order = DEFAULT_ORDER
    sequence_parallel: bool
    pipeline_layer_split: tuple[tuple[int, ...], ...]
    # batch and budget
    micro_batch_size: int
    global_batch_size: int
    train_steps: int
    # numerics and memory
    precision: Literal["bf16", "fp32"]
    recompute_granularity: Literal["full", "selective"] | None
    recompute_modules: tuple[RecomputeModule, ...] = ("core_attn",)
    deterministic_mode: bool
    seed: int
    # optimizer and schedule
    lr: float
    min_lr: float
    lr_decay_style: Literal["cosine", "linear", "constant"]
    lr_warmup_steps: int
    lr_decay_steps: int
    adam_beta1: float
    adam_beta2: float
    adam_eps: float
    weight_decay: float
    clip_grad: float
    use_distributed_optimizer: bool
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    # data: (weight, path prefix) pairs; empty means Megatron's mock data
    data_blend: tuple[tuple[float, str], ...]
    data_split: str
    data_cache: str | None
    tokenizer: str | None
    # evaluation, checkpoints, logging
    eval_interval_steps: int | None
    eval_batches: int
    save_interval_steps: int | None
    save_interval_seconds: float | None
    # True: Young/Daly's interval from measured saves takes the place of `save_interval_seconds`
    save_interval_auto: bool = False
    async_save: bool
    # how megatron-core cuts the optimizer's state. fully_reshardable: for any layout, but each
    # save gathers the state of all data-parallel ranks on each of them first; dp_reshardable:
    # each rank saves its own part, for the same layout
    optimizer_sharding: Literal["fully_reshardable", "dp_reshardable"] = "fully_reshardable"
    keep_checkpoints: int
    keep_every_steps: int | None
    log_interval_steps: int
    distributed_timeout_seconds: float
    # end the launch when a loss is so many median absolute deviations above the median; None: never
    loss_spike: float | None = None
    # steps between two looks at how long each rank computes
    rank_times_interval_steps: int = 20
    # for reporting: model FLOPs of one step and the GPU's dense peak in FLOP/s (None: unknown)
    model_flops_per_step: float
    peak_flops_per_gpu: float | None

    @property
    def expert_tensor_parallel_size(self) -> int:
        """How far one expert is split: not at all with expert parallelism, else over tp.

        Whole experts keep their matrices large, which is why published recipes set it to 1; the
        planner's cost model assumes the same (`hpctrain/plan/cost/case.py`).
        """
        spread = self.expert_model_parallel_size > 1
        return 1 if spread else self.tensor_model_parallel_size


def train_config(spec: RunSpec, plan: Plan, peak_flops_per_gpu: float | None) -> TrainConfig:
    """The trainer's view of a plan: spec values where the plan did not decide, plan values else."""
    return TrainConfig(
        run_name=spec.name,
        **_model_fields(spec, plan),
        **_expert_fields(spec),
        **_latent_fields(spec),
        **_layout_fields(spec, plan),
        **_training_fields(spec, plan),
        **_io_fields(spec),
        model_flops_per_step=plan.model_flops_per_step,
        peak_flops_per_gpu=peak_flops_per_gpu,
    )


def _model_fields(spec: RunSpec, plan: Plan) -> dict[str, object]:
    model = spec.model
    return dict(
        num_layers=model.layers,
        hidden_size=model.hidden,
        ffn_hidden_size=model.ffn_size,
        num_attention_heads=model.heads,
        num_query_groups=model.key_value_heads,
        kv_channels=model.head_size,
        vocab_size=model.vocab,
        padded_vocab_size=plan.padded_vocab,
        seq_length=model.seq,
        activation=model.activation,
        normalization={"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}[str(model.norm)],
        layernorm_epsilon=model.norm_epsilon,
        position_embedding_type="rope" if model.positions == "rope" else "learned_absolute",
        rotary_base=model.rope_base,
        share_embeddings_and_output_weights=model.tied,
        add_bias_linear=model.bias,
        dropout=model.dropout,
        transformer_impl=spec.engine.implementation,
        mtp_num_layers=model.mtp_layers or None,
    )


def _expert_fields(spec: RunSpec) -> dict[str, object]:
    moe = spec.model.moe
    if moe is None:
        return {}
    return dict(
        num_moe_experts=moe.experts,
        moe_router_topk=moe.top_k,
        moe_ffn_hidden_size=moe.ffn,
        moe_shared_expert_intermediate_size=moe.shared_ffn or None,
        moe_first_dense_layers=moe.dense_layers,
    )


def _latent_fields(spec: RunSpec) -> dict[str, object]:
    mla = spec.model.mla
    if mla is None:
        return {}
    return dict(
        multi_latent_attention=True,
        q_lora_rank=mla.q_rank,
        kv_lora_rank=mla.kv_rank,
        qk_head_dim=mla.nope_dim,
        qk_pos_emb_head_dim=mla.rope_dim,
        v_head_dim=mla.value_dim,
    )


def _layout_fields(spec: RunSpec, plan: Plan) -> dict[str, object]:
    layout = plan.layout
    return dict(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        parallel_order=layout.order,
        data_parallel_size=layout.dp,
        expert_model_parallel_size=layout.ep,
        sequence_parallel=layout.sequence_parallel,
        pipeline_layer_split=tuple(stage.chunk_layers for stage in plan.stages),
    )


def _training_fields(spec: RunSpec, plan: Plan) -> dict[str, object]:
    optimizer, schedule = spec.optimizer, spec.schedule
    return dict(
        micro_batch_size=plan.batch.micro_batch,
        global_batch_size=plan.batch.global_batch,
        train_steps=plan.batch.train_steps,
        precision=plan.precision,
        recompute_granularity=None if plan.recompute == "none" else plan.recompute,
        recompute_modules=spec.recompute_modules,
        deterministic_mode=spec.engine.deterministic,
        seed=spec.seed,
        lr=optimizer.lr,
        min_lr=optimizer.min_lr,
        lr_decay_style=schedule.style,
        lr_warmup_steps=schedule.warmup_steps,
        lr_decay_steps=schedule.decay_steps or plan.batch.train_steps,
        adam_beta1=optimizer.beta1,
        adam_beta2=optimizer.beta2,
        adam_eps=optimizer.epsilon,
        weight_decay=optimizer.weight_decay,
        clip_grad=optimizer.clip_grad,
        use_distributed_optimizer=optimizer.distributed,
        overlap_grad_reduce=optimizer.overlap_grad_reduce and plan.layout.dp > 1,
        overlap_param_gather=(
            optimizer.overlap_param_gather
            and optimizer.overlap_grad_reduce
            and optimizer.distributed
            and plan.layout.dp > 1
        ),
    )


def _io_fields(spec: RunSpec) -> dict[str, object]:
    data, checkpoint = spec.data, spec.checkpoint
    return dict(
        data_blend=tuple((source.weight, source.path) for source in data.sources),
        data_split=data.split,
        data_cache=data.cache,
        tokenizer=data.tokenizer,
        eval_interval_steps=spec.evaluation.every_steps,
        eval_batches=spec.evaluation.batches,
        save_interval_steps=checkpoint.every_steps,
        save_interval_seconds=_interval_seconds(checkpoint),
        save_interval_auto=checkpoint.every == "auto",
        loss_spike=spec.supervise.rollback.spike,
        async_save=checkpoint.asynchronous,
        optimizer_sharding=_optimizer_sharding(spec),
        keep_checkpoints=checkpoint.keep,
        keep_every_steps=checkpoint.keep_every_steps,
        log_interval_steps=spec.logging.every_steps,
        distributed_timeout_seconds=float(spec.engine.collective_timeout),
    )


def _optimizer_sharding(spec: RunSpec) -> Literal["fully_reshardable", "dp_reshardable"]:
    """Only a run that may go on with fewer nodes ever loads into another layout."""
    return "dp_reshardable" if spec.resources.min_nodes is None else "fully_reshardable"


def _interval_seconds(checkpoint: CheckpointSpec) -> float | None:
    """`auto` begins with a save after some minutes, whose cost then sets the interval."""
    if checkpoint.every == "auto":
        return _FIRST_SAVE_SECONDS
    return float(checkpoint.every) if checkpoint.every else None
