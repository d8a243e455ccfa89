"""Megatron-core: from spec and plan to the file that configures the trainer.

`MegatronConfig` uses Megatron's own names (megatron-core TransformerConfig, OptimizerConfig,
DistributedDataParallelConfig), which makes `train.json` readable to users of Megatron.
Belongs here: the document, the pure functions that fill it, and what its options need of libraries
and GPUs. Does not belong here: what ranks have (see `hpctrain.train.software_agreement`), options
that exclude each other (see `hpctrain.train.engines.megatron.preflight`), torch, megatron
imports, or reading files.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, cast

from pydantic import model_validator

from hpctrain.engines.training import SoftwareNeed, TrainConfig, shared_config
from hpctrain.plan.layout_words import DEFAULT_ORDER, Order
from hpctrain.spec.architecture import MlaSpec, MoeSpec
from hpctrain.spec.engines.abilities import RecomputeModule
from hpctrain.spec.engines.megatron import AttentionBackend, Fp8Recipe, StateType
from hpctrain.spec.families import put
from hpctrain.spec.model import ModelSpec

if TYPE_CHECKING:
    from hpctrain.plan.job import TrainingJob

# Weight of the loss that spreads tokens over experts (Fedus et al. 2021, arXiv 2101.03961, section
# 2.2: alpha = 10^-2; transformer_config.py, moe_aux_loss_coeff, recommends the same).
BALANCE_LOSS_WEIGHT = 1e-2
# Gate and input of GPT-OSS's MLP stay below (transformers, modeling_gpt_oss.py, GptOssExperts).
CLAMPED_AT = 7.0
INITIAL_STD = 0.02  # Megatron-LM's
# megatron-core's least (distributed_data_parallel.py: max(40000000, 1000000 x dp)).
_ELASTIC_BUCKET_ELEMENTS = 40_000_000


class MegatronConfig(TrainConfig):
    """A model on megatron-core: its parts, layout and memory settings."""

    engine: Literal["megatron", "megatron-lm"] = "megatron"
    model: ModelSpec
    padded_vocab_size: int
    transformer_impl: Literal["auto", "local", "transformer_engine"]
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
    attention_backend: AttentionBackend = "auto"
    calculate_per_token_loss: bool = False
    # ranks that exchange heads, and rings of such groups
    hierarchical_context_parallel_sizes: tuple[int, int] | None = None
    # optimizer
    use_distributed_optimizer: bool
    num_distributed_optimizer_instances: int = 1
    use_precision_aware_optimizer: bool = False
    exp_avg_dtype: StateType = "fp32"
    exp_avg_sq_dtype: StateType = "fp32"
    main_params_dtype: Literal["fp32", "fp16"] = "fp32"
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    # elements of a bucket of gradients with `overlap_grad_reduce`; None: megatron-core's own, which
    # grows with dp
    ddp_bucket_size: int | None = None
    # how megatron-core cuts the optimizer's state. fully_reshardable: for any layout, but each
    # save gathers the state of all data-parallel ranks on each of them first; dp_reshardable:
    # each rank saves its own part, for any dp with the same tp, pp and buckets
    optimizer_sharding: Literal["fully_reshardable", "dp_reshardable"] = "fully_reshardable"

    @model_validator(mode="before")
    @classmethod
    def _read_former_shape(cls, data: object) -> object:
        """Read documents of earlier versions, which had the model in megatron-core's names."""
        former = isinstance(data, dict) and "model" not in data and "num_layers" in data
        return with_model(cast(dict[str, Any], data)) if former else data

    @property
    def pretrained(self) -> str | None:
        """A directory that `hpctrain convert` wrote; None: random weights."""
        return self.model.pretrained

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
        masked = self.model.reads_masked_text
        return (self.tokenizer,) if masked and self.tokenizer else ()

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


# Former names of a train.json, and the fields of a spec with the same values: of `model`, `moe` and
# `mla`, with what their absence said.
_FORMER: dict[str, tuple[str, Any]] = {
    "pretrained": ("pretrained", None),
    "num_layers": ("layers", None),
    "hidden_size": ("hidden", None),
    "ffn_hidden_size": ("ffn", None),
    "num_attention_heads": ("heads", None),
    "num_query_groups": ("kv_heads", None),
    "kv_channels": ("head_dim", None),
    "activation": ("activation", None),
    "layernorm_epsilon": ("norm_epsilon", None),
    "rotary_base": ("rope_base", None),
    "share_embeddings_and_output_weights": ("tied", None),
    "add_bias_linear": ("bias", None),
    "dropout": ("dropout", None),
    "mtp_num_layers": ("mtp_layers", 0),
    "num_moe_experts": ("moe.experts", None),
    "moe_router_topk": ("moe.top_k", 2),
    "moe_ffn_hidden_size": ("moe.ffn", None),
    "moe_shared_expert_intermediate_size": ("moe.shared_ffn", 0),
    "moe_first_dense_layers": ("moe.dense_layers", 0),
    "q_lora_rank": ("mla.q_rank", None),
    "kv_lora_rank": ("mla.kv_rank", 512),
    "qk_head_dim": ("mla.nope_dim", 128),
    "qk_pos_emb_head_dim": ("mla.rope_dim", 64),
    "v_head_dim": ("mla.value_dim", 128),
}
_FORMER_CHOICES = ("model_type", "normalization", "position_embedding_type")


def with_model(data: dict[str, Any]) -> dict[str, Any]:
    """Put the model of a former train.json, in megatron-core's names, into the field `model`."""
    read: dict[str, Any] = {}
    for name, (path, absent) in _FORMER.items():
        given = data.get(name)
        put(read, path, absent if given is None else given)
    kind, norm, positions = (data.get(name) for name in _FORMER_CHOICES)
    rope, rms = positions == "rope", norm == "RMSNorm"
    llama = rope and rms and read.get("activation") == "swiglu"
    read["family"] = "bert" if kind == "bert" else "llama" if llama else "gpt"
    read |= dict(vocab=data.get("vocab_size"), seq=data.get("seq_length"))
    read |= dict(norm="rmsnorm" if rms else "layernorm", positions="rope" if rope else "learned")
    if "experts" in read["moe"]:
        read["moe"].setdefault("ffn", read.get("ffn"))
    else:
        del read["moe"]
    if data.get("multi_latent_attention"):
        del read["kv_heads"], read["head_dim"]
    else:
        del read["mla"]
    gone = {*_FORMER, *_FORMER_CHOICES, "multi_latent_attention"}
    return {name: value for name, value in data.items() if name not in gone} | {"model": read}


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
        model=spec.model,
        padded_vocab_size=plan.padded_vocab,
        transformer_impl=plan.implementation or spec.engine.implementation,
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
        use_distributed_optimizer=plan.zero != 0,
        overlap_grad_reduce=optimizer.overlap_grad_reduce and replicated,
        overlap_param_gather=(
            optimizer.overlap_param_gather
            and optimizer.overlap_grad_reduce
            and plan.zero != 0
            and replicated
        ),
        ddp_bucket_size=_ELASTIC_BUCKET_ELEMENTS if elastic else None,
        optimizer_sharding="dp_reshardable",
    )


# -- The model in the names of megatron-core's TransformerConfig ----------------------------------


def core_fields(model: ModelSpec) -> dict[str, Any]:
    """Return the fields of TransformerConfig that say what `model` is.

    Those of absent parts are left out. megatron-lm has arguments of the same names. The
    activation is a function, and is not here.
    """
    attends, layers = model.attends, range(model.layers)
    fields: dict[str, Any] = dict(
        num_layers=model.layers,
        hidden_size=model.hidden,
        ffn_hidden_size=model.ffn_size,
        num_attention_heads=model.heads,
        num_query_groups=model.key_value_heads,
        kv_channels=model.head_size,
        normalization="RMSNorm" if model.norm == "rmsnorm" else "LayerNorm",
        layernorm_epsilon=model.norm_epsilon,
        layernorm_zero_centered_gamma=model.norm_zero_centered,
        add_bias_linear=model.mlp_bias,
        add_qkv_bias=model.qkv_bias and not model.mlp_bias,
        gated_linear_unit=model.gated,
        hidden_dropout=model.dropout,
        attention_dropout=model.dropout,
        qk_layernorm=attends.qk_norm == "head" or model.mla is not None,
        softmax_scale=attends.scale,
        softmax_type="learnable" if attends.sinks else "vanilla",
        attention_output_gate=attends.gate,
        rotary_interleaved=model.rotates.interleaved and model.mla is None,
        mtp_num_layers=model.mtp_layers or None,
        init_method_std=model.init_std or INITIAL_STD,
    )
    windows = [int(model.mixer(layer) == "window") for layer in layers]
    if attends.window is not None and any(windows):
        # of the tokens before: a window of transformers counts the token itself
        fields |= dict(window_size=(attends.window - 1, 0), window_attn_skip_freq=windows)
    if without := model.rotates.without:
        fields["no_rope_freq"] = [int(without[layer % len(without)]) for layer in layers]
    if model.activation == "swiglu_clamped":
        fields |= dict(glu_linear_offset=1.0, activation_func_clamp_value=CLAMPED_AT)
    if model.moe is not None:
        fields |= _expert_fields(model, model.moe)
    if model.mla is not None:
        fields |= _latent_fields(model, model.mla)
    return fields


def _expert_fields(model: ModelSpec, moe: MoeSpec) -> dict[str, Any]:
    """Return the fields of experts: dropless routing.

    Weights of softmax add up to 1 where it comes behind the choice, over the chosen; sigmoid's are
    divided by their sum (moe_utils.py, topk_routing_with_score_function). megatron-core refuses
    top-1 routing unless the softmax comes first.
    """
    weight = BALANCE_LOSS_WEIGHT if moe.balance_loss is None else moe.balance_loss
    fields: dict[str, Any] = dict(
        num_moe_experts=moe.experts,
        moe_layer_freq=[int(model.has_experts(layer)) for layer in range(model.layers)],
        moe_ffn_hidden_size=moe.ffn,
        moe_shared_expert_intermediate_size=moe.shared_ffn or None,
        moe_shared_expert_gate=moe.shared_gate,
        moe_router_topk=moe.top_k,
        moe_router_pre_softmax=moe.top_k == 1 or not moe.normalize,
        moe_router_score_function=moe.score,
        moe_router_enable_expert_bias=moe.expert_bias,
        moe_router_topk_scaling_factor=None if moe.scale == 1 else moe.scale,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type=moe.balance if weight else "none",
        moe_aux_loss_coeff=weight,
        moe_z_loss_coeff=moe.z_loss,
    )
    if moe.groups is not None:
        fields |= dict(moe_router_num_groups=moe.groups, moe_router_group_topk=moe.top_groups)
    return fields


def _latent_fields(model: ModelSpec, mla: MlaSpec) -> dict[str, Any]:
    """Return the fields of multi-head latent attention.

    There are norms behind both low-rank projections (DeepSeek-V2, arXiv 2405.04434, section 3.1.2:
    "additional RMS Norm layers after the compressed latent vectors").
    """
    fields: dict[str, Any] = dict(
        multi_latent_attention=True,
        q_lora_rank=mla.q_rank,
        kv_lora_rank=mla.kv_rank,
        qk_head_dim=mla.nope_dim,
        qk_pos_emb_head_dim=mla.rope_dim,
        v_head_dim=mla.value_dim,
        rope_type="rope",
        rotary_base=model.rope_base,
    )
    scaling = model.rotates.scaling
    if scaling is not None:
        fields |= dict(
            rope_type="yarn",
            rotary_scaling_factor=scaling.factor,
            original_max_position_embeddings=scaling.original_seq or model.max_seq or model.seq,
            beta_fast=scaling.beta_fast or 32,
            beta_slow=scaling.beta_slow or 1,
            mscale=scaling.mscale or 1.0,
            mscale_all_dim=scaling.mscale_all_dim or 0.0,
        )
    return fields


def position_kind(model: ModelSpec) -> Literal["learned_absolute", "rope", "none"]:
    """Return GPTModel's `position_embedding_type`."""
    kinds: dict[str | None, Literal["learned_absolute", "rope"]] = {
        "rope": "rope",
        "learned": "learned_absolute",
    }
    return kinds.get(model.positions, "none")


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
    if config.use_precision_aware_optimizer:
        # 2.1: keeps 16 of 32 bits of a main weight (optimizer_config.py, store_param_remainders)
        yield engine("`use_precision_aware_optimizer`", leave, version=(2, 1))
    if config.attention_backend not in ("auto", "local"):
        yield engine(f"`attention_backend: {config.attention_backend}`", "set it to auto")
    if config.hierarchical_context_parallel_sizes:
        # extensions/transformer_engine.py: "must be >= 1.12.0 to support hierarchical cp"
        yield engine("`hierarchical_context_parallel_sizes`", "leave it out", version=(1, 12))
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
