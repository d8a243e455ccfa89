"""Megatron-core: from spec and plan to the one file that tells the trainer what to do.

`MegatronConfig` uses Megatron's own names (megatron-core TransformerConfig, OptimizerConfig,
DistributedDataParallelConfig), so that whoever knows Megatron can read `train.json`.
Belongs here: the document and the pure function that fills it. Does not belong here: torch,
megatron imports, or reading files.
"""

from __future__ import annotations

from typing import Literal

from hpctrain.engines.training import TrainConfig, shared_fields
from hpctrain.plan.documents import DEFAULT_ORDER, Order, Plan
from hpctrain.spec.model import ModelSpec
from hpctrain.spec.run import RecomputeModule, RunSpec


class MegatronConfig(TrainConfig):
    """A GPT, Llama or BERT on megatron-core: its shape, its layout and what is kept in memory."""

    engine: Literal["megatron", "megatron-lm"] = "megatron"
    # a directory that `hpctrain convert` has made; None: random weights
    pretrained: str | None = None
    # bert: guesses masked words, gpt: the next token
    model_type: Literal["gpt", "bert"] = "gpt"
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    padded_vocab_size: int
    activation: Literal["gelu", "gelu_tanh", "swiglu", "squared_relu"]
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
    expert_model_parallel_size: int = 1
    parallel_order: Order = DEFAULT_ORDER
    sequence_parallel: bool
    pipeline_layer_split: tuple[tuple[int, ...], ...]
    # memory
    recompute_granularity: Literal["full", "selective"] | None
    recompute_modules: tuple[RecomputeModule, ...] = ("core_attn",)
    # optimizer
    use_distributed_optimizer: bool
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    # how megatron-core cuts the optimizer's state. fully_reshardable: for any layout, but each
    # save gathers the state of all data-parallel ranks on each of them first; dp_reshardable:
    # each rank saves its own part, for the same layout
    optimizer_sharding: Literal["fully_reshardable", "dp_reshardable"] = "fully_reshardable"

    @property
    def expert_tensor_parallel_size(self) -> int:
        """How far one expert is split: not at all with expert parallelism, else over tp.

        Whole experts keep their matrices large, which is why published recipes set it to 1; the
        planner's cost model assumes the same (`hpctrain/plan/cost/case.py`).
        """
        spread = self.expert_model_parallel_size > 1
        return 1 if spread else self.tensor_model_parallel_size

    @property
    def world_size(self) -> int:
        return (
            self.tensor_model_parallel_size
            * self.pipeline_model_parallel_size
            * self.context_parallel_size
            * self.data_parallel_size
        )

    def pipeline_stage(self, rank: int) -> int:
        """Ranks count tp first, then cp, then by the order of the layout dp and pp or pp and dp
        (megatron-core: parallel_state.py, RankGenerator)."""
        inner = self.tensor_model_parallel_size * self.context_parallel_size
        if self.parallel_order == DEFAULT_ORDER:
            inner *= self.data_parallel_size
        return rank // inner % self.pipeline_model_parallel_size

    @property
    def layout_words(self) -> str:
        tp, pp = self.tensor_model_parallel_size, self.pipeline_model_parallel_size
        replicas = self.data_parallel_size * self.context_parallel_size
        return f"tp {tp} · pp {pp} · dp {replicas}"


def megatron_config(spec: RunSpec, plan: Plan, peak_flops_per_gpu: float | None) -> MegatronConfig:
    """The trainer's view of a plan: spec values where the plan did not decide, plan values else."""
    return MegatronConfig(
        **shared_fields(spec, plan, peak_flops_per_gpu),
        **model_fields(spec.model, plan.padded_vocab, spec.engine.implementation),
        **_expert_fields(spec),
        **_latent_fields(spec),
        **_layout_fields(spec, plan),
        **_memory_fields(spec, plan),
    )


def model_fields(model: ModelSpec, padded_vocab: int, implementation: str) -> dict[str, object]:
    """What a dense model needs; experts and latent attention have fields of their own."""
    return dict(
        pretrained=model.pretrained,
        model_type="bert" if model.family == "bert" else "gpt",
        num_layers=model.layers,
        hidden_size=model.hidden,
        ffn_hidden_size=model.ffn_size,
        num_attention_heads=model.heads,
        num_query_groups=model.key_value_heads,
        kv_channels=model.head_size,
        padded_vocab_size=padded_vocab,
        activation=model.activation,
        normalization={"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}[str(model.norm)],
        layernorm_epsilon=model.norm_epsilon,
        position_embedding_type="rope" if model.positions == "rope" else "learned_absolute",
        rotary_base=model.rope_base,
        share_embeddings_and_output_weights=model.tied,
        add_bias_linear=model.bias,
        dropout=model.dropout,
        transformer_impl=implementation,
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
        expert_model_parallel_size=layout.ep,
        sequence_parallel=layout.sequence_parallel,
        pipeline_layer_split=tuple(stage.chunk_layers for stage in plan.stages),
    )


def _memory_fields(spec: RunSpec, plan: Plan) -> dict[str, object]:
    optimizer = spec.optimizer
    return dict(
        recompute_granularity=None if plan.recompute == "none" else plan.recompute,
        recompute_modules=spec.recompute_modules,
        use_distributed_optimizer=optimizer.distributed,
        overlap_grad_reduce=optimizer.overlap_grad_reduce and plan.layout.dp > 1,
        overlap_param_gather=(
            optimizer.overlap_param_gather
            and optimizer.overlap_grad_reduce
            and optimizer.distributed
            and plan.layout.dp > 1
        ),
        optimizer_sharding=_optimizer_sharding(spec),
    )


def _optimizer_sharding(spec: RunSpec) -> Literal["fully_reshardable", "dp_reshardable"]:
    """Only a run that may go on with fewer nodes ever loads into another layout."""
    return "dp_reshardable" if spec.resources.min_nodes is None else "fully_reshardable"
