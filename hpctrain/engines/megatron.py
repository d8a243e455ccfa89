"""Megatron-core: from spec and plan to the file that configures the trainer, and back to the model.

`MegatronConfig` uses Megatron's own names (megatron-core TransformerConfig, OptimizerConfig,
DistributedDataParallelConfig), which makes `train.json` readable to users of Megatron.
Belongs here: the document, the pure functions that fill it, and what its options need of libraries
and GPUs. Does not belong here: what ranks have (see `hpctrain.train.software_agreement`), options
that exclude each other (see `hpctrain.train.engines.megatron.preflight`), torch, megatron
imports, or reading files.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from hpctrain.engines.training import SoftwareNeed, TrainConfig, shared_config
from hpctrain.plan.layout_words import DEFAULT_ORDER, Order
from hpctrain.spec.architecture import MlaSpec, MoeSpec
from hpctrain.spec.document import Document
from hpctrain.spec.engines.abilities import RecomputeModule
from hpctrain.spec.engines.megatron import Fp8Recipe
from hpctrain.spec.model import ModelSpec

if TYPE_CHECKING:
    from hpctrain.plan.job import TrainingJob

# Weight of the loss that spreads tokens over experts (Fedus et al. 2021, arXiv 2101.03961, section
# 2.2: alpha = 10^-2; transformer_config.py, moe_aux_loss_coeff, recommends the same).
BALANCE_LOSS_WEIGHT = 1e-2
INITIAL_STD = 0.02  # Megatron-LM's
# megatron-core's least (distributed_data_parallel.py: max(40000000, 1000000 x dp)).
_ELASTIC_BUCKET_ELEMENTS = 40_000_000


class MegatronModel(Document):
    """The shape of a model in megatron-core's names.

    With `num_moe_experts`, experts are in place of the MLP from layer `moe_first_dense_layers` on.
    """

    # a directory that `hpctrain convert` wrote; None: random weights
    pretrained: str | None = None
    # bert: masked language modeling, gpt: causal
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
    num_moe_experts: int | None = None
    moe_router_topk: int = 2
    moe_ffn_hidden_size: int | None = None
    moe_shared_expert_intermediate_size: int | None = None
    moe_first_dense_layers: int = 0
    # `q_lora_rank` None: one full query projection
    multi_latent_attention: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int = 512
    qk_head_dim: int = 128
    qk_pos_emb_head_dim: int = 64
    v_head_dim: int = 128
    mtp_num_layers: int | None = None
    init_method_std: float = INITIAL_STD
    moe_router_load_balancing_type: str = "aux_loss"
    moe_aux_loss_coeff: float = BALANCE_LOSS_WEIGHT
    moe_z_loss_coeff: float | None = None


class MegatronConfig(MegatronModel, TrainConfig):
    """A GPT, Llama or BERT on megatron-core: its shape, layout and memory settings."""

    engine: Literal["megatron", "megatron-lm"] = "megatron"
    # layout
    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    virtual_pipeline_model_parallel_size: int | None
    context_parallel_size: int
    expert_model_parallel_size: int = 1
    # ranks that split one expert; None: 1 with expert parallelism, else tp
    expert_tensor_parallel_size: int | None = None
    parallel_order: Order = DEFAULT_ORDER
    sequence_parallel: bool
    pipeline_layer_split: tuple[tuple[int, ...], ...]
    # memory
    recompute_granularity: Literal["full", "selective"] | None
    recompute_modules: tuple[RecomputeModule, ...] = ("core_attn",)
    # `full`: so many layers of each stage; None: all of them
    recompute_num_layers: int | None = None
    # layers whose activations wait in the host's memory
    cpu_offloading_num_layers: int = 0
    # numbers of 8 and 4 bits in matrix products, with `precision` bf16. hybrid: gradients have more
    # exponent bits; e4m3: all have the same, for block scaling gives each block its own range
    fp8: Literal["hybrid", "e4m3"] | None = None
    fp8_recipe: Fp8Recipe = "delayed"
    fp8_param: bool = False
    fp4: Literal["e2m1"] | None = None
    # messages and kernels
    grad_reduce_in_fp32: bool = True
    tp_comm_overlap: bool = False
    cross_entropy_loss_fusion: bool = False
    defer_embedding_wgrad_compute: bool = False
    moe_token_dispatcher_type: Literal["alltoall", "flex"] = "alltoall"
    moe_flex_dispatcher_backend: Literal["deepep", "hybridep"] = "deepep"
    moe_permute_fusion: bool = False
    moe_shared_expert_overlap: bool = False
    cuda_graph_impl: Literal["none", "local", "transformer_engine"] = "none"
    # optimizer
    use_distributed_optimizer: bool
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    # elements of a bucket of gradients with `overlap_grad_reduce`; None: megatron-core's own, which
    # grows with dp
    ddp_bucket_size: int | None = None
    # how megatron-core cuts the optimizer's state. fully_reshardable: for any layout, but each
    # save gathers the state of all data-parallel ranks on each of them first; dp_reshardable:
    # each rank saves its own part, for any dp with the same tp, pp and buckets
    optimizer_sharding: Literal["fully_reshardable", "dp_reshardable"] = "fully_reshardable"

    @property
    def expert_tensor_ranks(self) -> int:
        """Ranks that split one expert: unless given, 1 with expert parallelism, else tp.

        Published recipes set 1 because whole experts keep their matrices large; the planner's cost
        model assumes the same (`hpctrain/plan/cost/case.py`).
        """
        if self.expert_tensor_parallel_size is not None:
            return self.expert_tensor_parallel_size
        spread = self.expert_model_parallel_size > 1
        return 1 if spread else self.tensor_model_parallel_size

    @property
    def compiles_kernels(self) -> bool:
        """megatron-core's fusions are compiled (jit.py, jit_fuser = torch.compile)."""
        return True

    @property
    def needs_transformer_engine(self) -> str | None:
        if self.transformer_impl == "transformer_engine":
            return "`engine.implementation: transformer_engine`"
        if self.multi_latent_attention:
            # multi_latent_attention.py gives core attention two head sizes, which
            # dot_product_attention.py does not take
            return "multi-head latent attention"
        if self.context_parallel_size > 1:
            # dot_product_attention.py asserts context_parallel_size == 1
            return f"context_parallel_size {self.context_parallel_size}"
        return None

    @property
    def software_needs(self) -> tuple[SoftwareNeed, ...]:
        return tuple(software_needs(self))

    @property
    def needed_paths(self) -> tuple[str, ...]:
        """The tokenizer for masked language modeling; only the first launch reads weights."""
        return (self.tokenizer,) if self.model_type == "bert" and self.tokenizer else ()

    @property
    def world_size(self) -> int:
        return (
            self.tensor_model_parallel_size
            * self.pipeline_model_parallel_size
            * self.context_parallel_size
            * self.data_parallel_size
        )

    @property
    def replays_graphs(self) -> bool:
        return self.cuda_graph_impl != "none"

    def pipeline_stage(self, rank: int) -> int:
        """Find the stage of a rank: ranks vary over tp first, then over cp, then over dp and pp in
        the layout's order (megatron-core: parallel_state.py, RankGenerator)."""
        inner = self.tensor_model_parallel_size * self.context_parallel_size
        if self.parallel_order == DEFAULT_ORDER:
            inner *= self.data_parallel_size
        return rank // inner % self.pipeline_model_parallel_size

    @property
    def layout_words(self) -> str:
        tp, pp = self.tensor_model_parallel_size, self.pipeline_model_parallel_size
        replicas = self.data_parallel_size * self.context_parallel_size
        return f"tp {tp} · pp {pp} · dp {replicas}"

    @property
    def model(self) -> ModelSpec:
        """The model as in a spec; a Llama if it has that family's choices."""
        rope, rms = self.position_embedding_type == "rope", self.normalization == "RMSNorm"
        family: Literal["gpt", "llama"] = (
            "llama" if rope and rms and self.activation == "swiglu" else "gpt"
        )
        latent = self.multi_latent_attention
        return ModelSpec(
            family="bert" if self.model_type == "bert" else family,
            **{ours: getattr(self, name) for name, ours in _MODEL_NAMES.items()},
            kv_heads=None if latent else self.num_query_groups,
            head_dim=None if latent else self.kv_channels,
            vocab=self.vocab_size,
            seq=self.seq_length,
            norm="rmsnorm" if rms else "layernorm",
            norm_epsilon=self.layernorm_epsilon,
            positions="rope" if rope else "learned",
            moe=None
            if self.num_moe_experts is None
            else MoeSpec(
                **{ours: getattr(self, name) for name, ours in _EXPERT_NAMES.items()},
                ffn=self.moe_ffn_hidden_size or self.ffn_hidden_size,
                shared_ffn=self.moe_shared_expert_intermediate_size or 0,
            ),
            mla=MlaSpec(**{ours: getattr(self, name) for name, ours in _LATENT_NAMES.items()})
            if latent
            else None,
            mtp_layers=self.mtp_num_layers or 0,
        )


# Names of megatron-core, and fields of a spec with the same values: of `model`, `moe` and `mla`.
_MODEL_NAMES = {
    "pretrained": "pretrained",
    "num_layers": "layers",
    "hidden_size": "hidden",
    "ffn_hidden_size": "ffn",
    "num_attention_heads": "heads",
    "activation": "activation",
    "rotary_base": "rope_base",
    "share_embeddings_and_output_weights": "tied",
    "add_bias_linear": "bias",
    "dropout": "dropout",
}
_EXPERT_NAMES = {
    "num_moe_experts": "experts",
    "moe_router_topk": "top_k",
    "moe_first_dense_layers": "dense_layers",
}
_LATENT_NAMES = {
    "q_lora_rank": "q_rank",
    "kv_lora_rank": "kv_rank",
    "qk_head_dim": "nope_dim",
    "qk_pos_emb_head_dim": "rope_dim",
    "v_head_dim": "value_dim",
}


def megatron_config(job: TrainingJob) -> MegatronConfig:
    """Fill the document from a plan, and from the spec where the plan has no value."""
    spec, plan = job.spec, job.plan
    layout, optimizer, own = plan.layout, spec.optimizer, spec.engine.megatron
    # Sizes of an elastic run have the same buckets, also the one that is left with dp 1.
    elastic = spec.resources.min_nodes is not None
    replicated = layout.dp > 1 or elastic
    # as TransformerEngine's MXFP8BlockScaling does
    eight_bits: Literal["hybrid", "e4m3"] = "e4m3" if plan.fp8_recipe == "mxfp8" else "hybrid"
    return MegatronConfig(
        **dict(shared_config(job)),
        **dict(
            megatron_model(
                spec.model, plan.padded_vocab, plan.implementation or spec.engine.implementation
            )
        ),
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        parallel_order=layout.order,
        sequence_parallel=layout.sequence_parallel,
        pipeline_layer_split=tuple(stage.chunk_layers for stage in plan.stages),
        recompute_granularity=None if plan.recompute == "none" else plan.recompute,
        recompute_modules=plan.recompute_modules or spec.recompute_modules,
        recompute_num_layers=plan.recompute_layers or spec.recompute_layers,
        cpu_offloading_num_layers=plan.activation_offload_layers or spec.offloaded_layers,
        expert_tensor_parallel_size=layout.etp,
        fp8=eight_bits if plan.precision == "fp8" else None,
        fp8_recipe=plan.fp8_recipe or "delayed",
        fp8_param=own.fp8_param_gather,
        fp4="e2m1" if plan.precision == "fp4" else None,
        **own.model_dump(exclude={"fp8_recipe", "fp8_param_gather"}),  # messages and kernels
        use_distributed_optimizer=optimizer.zero != 0,
        overlap_grad_reduce=optimizer.overlap_grad_reduce and replicated,
        overlap_param_gather=(
            optimizer.overlap_param_gather
            and optimizer.overlap_grad_reduce
            and optimizer.zero != 0
            and replicated
        ),
        ddp_bucket_size=_ELASTIC_BUCKET_ELEMENTS if elastic else None,
        optimizer_sharding="dp_reshardable",
    )


def megatron_model(
    model: ModelSpec,
    padded_vocab: int,
    implementation: Literal["auto", "local", "transformer_engine"],
) -> MegatronModel:
    """Translate a model's shape into megatron-core's names."""
    moe, mla = model.moe, model.mla
    shape: dict[str, Any] = {name: getattr(model, ours) for name, ours in _MODEL_NAMES.items()}
    assert None not in (model.activation, model.tied, model.bias), "by the family"
    if moe is not None:
        shape |= {name: getattr(moe, ours) for name, ours in _EXPERT_NAMES.items()}
        shape["moe_router_load_balancing_type"] = moe.balance
        shape["moe_z_loss_coeff"] = moe.z_loss
        if moe.balance_loss is not None:
            shape["moe_aux_loss_coeff"] = moe.balance_loss
        shape["moe_ffn_hidden_size"] = moe.ffn
        shape["moe_shared_expert_intermediate_size"] = moe.shared_ffn or None
    if mla is not None:
        shape |= {name: getattr(mla, ours) for name, ours in _LATENT_NAMES.items()}
    shape["ffn_hidden_size"] = model.ffn_size
    return MegatronModel(
        **shape,
        model_type="bert" if model.family == "bert" else "gpt",
        num_query_groups=model.key_value_heads,
        kv_channels=model.head_size,
        padded_vocab_size=padded_vocab,
        normalization="RMSNorm" if model.norm == "rmsnorm" else "LayerNorm",
        layernorm_epsilon=model.norm_epsilon,
        position_embedding_type="rope" if model.positions == "rope" else "learned_absolute",
        transformer_impl=implementation,
        multi_latent_attention=mla is not None,
        mtp_num_layers=model.mtp_layers or None,
        init_method_std=model.init_std or INITIAL_STD,
    )


# -- What the options need of libraries and GPUs -----------------------------------------------
# Versions are those that megatron-core 0.16.1 compares with, capabilities those of
# TransformerEngine (pytorch/quantization.py at commit d0067d0d).

# fp8_utils.py, get_fp8_recipe; _compute_fp8_support, _compute_fp8_block_scaling_support and
# _compute_mxfp8_support
_BY_RECIPE: dict[str, dict[str, Any]] = {
    "delayed": dict(version=(1, 0), capability=(8, 9)),
    "tensorwise": dict(version=(2, 2), capability=(8, 9)),
    "blockwise": dict(version=(2, 3), capability=(9, 0), cuda=(12, 9)),
    "mxfp8": dict(version=(2, 1), capability=(10, 0), capability_below=(12, 0)),
}


def software_needs(config: MegatronConfig) -> Iterator[SoftwareNeed]:
    """Yield what each option that is set needs."""
    bf16, leave = "set `precision: bf16`", "leave it false"

    def engine(setting: str, instead: str, **limits: Any) -> SoftwareNeed:
        return SoftwareNeed(
            setting=setting, instead=instead, library="transformer_engine", **limits
        )

    if config.fp4 is not None:
        yield engine("`precision: fp4`", bf16, version=(2, 7), capability=(10, 0))
    if config.fp8 is not None:
        recipe = config.fp8_recipe
        blocks = "set `fp8_recipe: tensorwise` or `precision: bf16`"
        instead = blocks if recipe in ("mxfp8", "blockwise") else bf16
        setting = f"`precision: fp8` with `fp8_recipe: {recipe}`"
        yield engine(setting, instead, **_BY_RECIPE[recipe])
    if config.tp_comm_overlap:
        # Before 1.9 userbuffers are started by MPI (megatron/training/initialize.py).
        yield engine("`tp_comm_overlap`", leave, version=(1, 9))
    if config.defer_embedding_wgrad_compute:
        # model_parallel_config.py: only with gradient_accumulation_fusion, which is Apex's
        setting = "`defer_embedding_wgrad_compute`"
        yield SoftwareNeed(setting=setting, library="apex_wgrad", instead=leave)
    if config.cpu_offloading_num_layers:
        # transformer_block.py, get_cpu_offload_context
        yield engine("`activation_offload_layers`", "set it to 0")
    if config.cuda_graph_impl == "transformer_engine":
        yield engine("`cuda_graph_impl: transformer_engine`", "set it to none")
    if config.cuda_graph_impl == "local":
        # streams and captures are CUDA's own; any GPU has them
        setting = "`cuda_graph_impl: local`"
        yield SoftwareNeed(setting=setting, capability=(7, 0), instead="set it to none")
    discarded = {"layernorm", "moe_act", "mla_up_proj"} & set(config.recompute_modules)
    if config.recompute_granularity == "selective" and discarded:
        # tensor_parallel/random.py, CheckpointWithoutOutput
        names = ", ".join(sorted(discarded))
        yield engine(f"`recompute_modules: [{names}]`", "recompute other modules")
    if config.moe_permute_fusion:
        # transformer_config.py: "Please install TE >= 2.1.0"
        yield engine("`moe_permute_fusion`", leave, version=(2, 1))
    if config.moe_token_dispatcher_type == "flex":
        # Generations: Megatron-Bridge, training/flex_dispatcher_backend.py
        backend = config.moe_flex_dispatcher_backend
        yield SoftwareNeed(
            setting=f"`moe_flex_dispatcher_backend: {backend}`",
            library="deep_ep" if backend == "deepep" else "hybrid_ep",
            capability=(8, 0),
            capability_below=(11, 0),
            instead="set `moe_token_dispatcher_type: alltoall`",
        )
