"""megatron-core's section of the spec, and the abilities of hpctrain's own trainer on it.

Belongs here: the fields of `engine.megatron`, what they contradict, and the abilities. Does not
belong here: the document of the trainer (see `hpctrain.engines.megatron`).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from hpctrain.spec.document import Contradiction, Document
from hpctrain.spec.engines.abilities import (
    CONTEXT_WORD,
    MEGATRON_CORE,
    MODEL_AXES,
    PIPELINE_WORD,
    TENSOR_WORD,
    WORDS_OF_EVERY_ENGINE,
    Choices,
    EngineAbilities,
    zero_word,
)

if TYPE_CHECKING:
    from hpctrain.spec.engine import EngineSpec


# -- The settings that megatron-core cannot combine, or that would have no effect there ---------


LOW_PRECISIONS = ("fp8", "fp4")
# Modules of `recompute_modules` that keep no statistics of delayed scaling.
NOT_WITH_DELAYED = ("moe_act", "layernorm")


def _own(field: str) -> tuple[str, str, str]:
    return ("engine", "megatron", field)


def wrong_settings(engine: EngineSpec) -> Iterator[Contradiction]:
    """Find settings of `engine` that exclude each other, whatever the rest of the spec is."""
    own = engine.megatron
    flex = own.moe_token_dispatcher_type == "flex"
    types = {name: getattr(own, name) for name in _STATE_TYPES}
    for field in (name for name, kind in types.items() if kind != "fp32"):
        if not own.use_precision_aware_optimizer:
            # optimizer_config.py: "can only be fp32 when not using precision-aware optimizer"
            message = "without `use_precision_aware_optimizer` the state is in fp32"
            hint = "set `use_precision_aware_optimizer: true`, or remove it"
            yield Contradiction(_own(field), message, hint)
    if own.attention_backend == "local" and engine.implementation != "local":
        # language_module.py, _set_attention_backend: TransformerEngine's attention has no kernel
        message = "this is megatron-core's own attention, which comes with its own layers"
        hint = "set `engine.implementation: local`, or `unfused`"
        yield Contradiction(_own("attention_backend"), message, hint)
    if own.moe_flex_dispatcher_backend != "deepep" and not flex:
        # token_dispatcher.py: only MoEFlexTokenDispatcher reads it
        message = f"{own.moe_flex_dispatcher_backend} is a backend of the flex dispatcher, which "
        message += "is not chosen"
        hint = "set `moe_token_dispatcher_type: flex`, or remove it"
        yield Contradiction(_own("moe_flex_dispatcher_backend"), message, hint)
    if own.moe_shared_expert_overlap and flex:
        # transformer_config.py: "moe_shared_expert_overlap only works with alltoall"
        message = "the shared expert overlaps with the alltoall dispatcher only, not with flex"
        hint = "remove it, or set `moe_token_dispatcher_type: alltoall`"
        yield Contradiction(_own("moe_shared_expert_overlap"), message, hint)
    if engine.implementation != "local":
        return
    needs = {
        "tp_comm_overlap": own.tp_comm_overlap,  # userbuffers of its linear layers
        "moe_permute_fusion": own.moe_permute_fusion,  # "Please install TE >= 2.1.0"
        "cuda_graph_impl": own.cuda_graph_impl == "transformer_engine",
        # model_parallel_config.py: "when gradient accumulation fusion is not used", which comes
        # with these layers
        "defer_embedding_wgrad_compute": own.defer_embedding_wgrad_compute,
        # optimizer_config.py: "requires FusedAdam from TransformerEngine"
        "use_precision_aware_optimizer": own.use_precision_aware_optimizer,
        "attention_backend": own.attention_backend not in ("auto", "local"),
        # dot_product_attention.py: "Context parallelism is only supported by TEDotProductAttention"
        "hierarchical_context_parallel_sizes": own.hierarchical_context_parallel_sizes,
    }
    for field in (name for name, given in needs.items() if given):
        message = "this is TransformerEngine's, and `implementation` is local"
        yield Contradiction(_own(field), message, "set `engine.implementation: transformer_engine`")


def contradictions(engine: EngineSpec, choices: Choices) -> Iterator[Contradiction]:
    """Find what megatron-core's configuration refuses, or would ignore, in the whole spec."""
    yield from _of_precision(engine, choices)
    yield from _of_activations(engine, choices)
    yield from _of_messages(engine, choices)
    yield from _of_optimizer(engine, choices)
    if choices.model is not None:
        own, model = engine.megatron, choices.model
        assert model is not None
        if own.defer_embedding_wgrad_compute and model.family == "bert":
            # gpt_model.py has the buffers of inputs and gradients; bert_model.py has none
            message = "megatron-core's BERT computes the output layer's weight gradient at once"
            yield Contradiction(_own("defer_embedding_wgrad_compute"), message, "remove it")
        given = {
            "moe_token_dispatcher_type": own.moe_token_dispatcher_type != "alltoall",
            "moe_permute_fusion": own.moe_permute_fusion,
            "moe_shared_expert_overlap": own.moe_shared_expert_overlap,
        }
        if model.moe is None:
            for field in (name for name, chosen in given.items() if chosen):
                message = "this is for experts, and the model has none"
                yield Contradiction(_own(field), message, "remove it, or give `model.moe`")
        elif own.moe_shared_expert_overlap and not model.moe.shared_ffn:
            # moe_layer.py: shared experts exist with moe_shared_expert_intermediate_size only
            message = "the model has no shared expert"
            yield Contradiction(
                _own("moe_shared_expert_overlap"),
                message,
                "remove it, or give `model.moe.shared_ffn`",
            )


def _of_precision(engine: EngineSpec, choices: Choices) -> Iterator[Contradiction]:
    own, precision, optimizer = engine.megatron, choices.precision, choices.optimizer
    if own.fp8_recipe != "auto" and precision != "fp8":
        message = f"fp8_recipe scales numbers of `precision: fp8`, which is {precision}"
        hint = "set `precision: fp8`, or remove it"
        yield Contradiction(_own("fp8_recipe"), message, hint)
    if own.fp8_param_gather and precision != "fp8":
        # transformer_config.py: "fp8_param must be used together with fp8 mode"
        message = f"weights are kept in 8 bits with `precision: fp8` only, not with {precision}"
        hint = "set `precision: fp8`, or remove it"
        yield Contradiction(_own("fp8_param_gather"), message, hint)
    elif own.fp8_param_gather and optimizer.zero == 0:
        # arguments.py: "--fp8-param-gather only supported with distributed optimizer"
        message = "weights are gathered in 8 bits by the distributed optimizer, which is off"
        hint = "set `optimizer.zero: 1`, or remove it"
        yield Contradiction(_own("fp8_param_gather"), message, hint)
    elif own.fp8_param_gather and optimizer.offload != "none" and own.fp8_recipe != "delayed":
        # arguments.py: "the optimizer cpu offload must be used in conjunction with delayed"
        message = "with an offloaded optimizer weights are gathered in 8 bits by delayed scaling"
        hint = "set `fp8_recipe: delayed`, or remove the offload"
        yield Contradiction(_own("fp8_param_gather"), message, hint)
    if precision in LOW_PRECISIONS and engine.implementation == "local":
        # fp8_utils.py, fp4_utils.py: contexts of TransformerEngine, none without
        message = f"{precision} needs the layers of TransformerEngine, not local ones"
        hint = "set `engine.implementation: transformer_engine`, or `precision: bf16`"
        yield Contradiction(("precision",), message, hint)
    again = [name for name in choices.recompute_modules if name in NOT_WITH_DELAYED]
    if own.fp8_recipe == "delayed" and again and choices.recompute in ("selective", "auto"):
        # transformer_config.py: "Delayed scaling does not support moe_act and layernorm recompute"
        message = f"{again[0]} cannot be computed again with delayed scaling"
        hint = "remove it, or set `fp8_recipe: tensorwise`"
        yield Contradiction(("recompute_modules",), message, hint)
    if not own.grad_reduce_in_fp32 and precision == "fp32":
        # distributed_data_parallel.py: the type is otherwise that of the parameters
        message = "gradients are as wide as weights: with `precision: fp32` this changes nothing"
        yield Contradiction(_own("grad_reduce_in_fp32"), message, "remove it")


def _of_optimizer(engine: EngineSpec, choices: Choices) -> Iterator[Contradiction]:
    own, optimizer = engine.megatron, choices.optimizer
    needing = {
        # optimizer_config.py: "only supported with distributed optimizer"
        "use_precision_aware_optimizer": own.use_precision_aware_optimizer,
        # distributed_data_parallel.py: "Partial DistOpt cannot be used without DistOpt"
        "num_distributed_optimizer_instances": own.num_distributed_optimizer_instances > 1,
    }
    for field in (name for name, given in needing.items() if given and optimizer.zero == 0):
        message = "this is the distributed optimizer's, which is off"
        yield Contradiction(_own(field), message, "set `optimizer.zero: 1`, or remove it")
    narrow = [name for name in _STATE_TYPES if getattr(own, name) != "fp32"]
    if narrow and optimizer.offload != "none":
        # cpu_offloading/hybrid_optimizer.py: states of torch's Adam, in fp32
        message = "an offloaded state is updated by torch's Adam, in fp32"
        yield Contradiction(_own(narrow[0]), message, "remove one of the two")
    if own.main_params_dtype != "fp32" and choices.precision == "fp32":
        message = "weights of `precision: fp32` have no main copy"
        hint = "remove it, or set `precision: bf16`"
        yield Contradiction(_own("main_params_dtype"), message, hint)


def _of_activations(engine: EngineSpec, choices: Choices) -> Iterator[Contradiction]:
    own, offloaded = engine.megatron, choices.activation_offload_layers
    if choices.recompute_layers is not None and choices.recompute != "full":
        # transformer_config.py: with selective "recompute_num_layers must be None"
        message = f"only `recompute: full` counts layers, not {choices.recompute}"
        hint = "set `recompute: full`, or remove it"
        yield Contradiction(("recompute_layers",), message, hint)
    graphs = own.cuda_graph_impl != "none"
    if graphs and choices.recompute == "full":
        # transformer_config.py: "full recompute is only supported with full iteration CUDA graph"
        message = "graphs of layers exclude `recompute: full`"
        hint = "set `recompute: selective` or `none`, or remove it"
        yield Contradiction(_own("cuda_graph_impl"), message, hint)
    if not offloaded:
        return
    where = ("activation_offload_layers",)
    if engine.implementation == "local":
        # transformer_block.py: "CPU Offloading is enabled when TE is not present"
        message = "activations are offloaded by TransformerEngine, and `implementation` is local"
        yield Contradiction(where, message, "set `engine.implementation: transformer_engine`")
    if offloaded == "auto":  # the planner offloads nothing where the rest excludes it
        return
    if choices.recompute in ("selective", "full"):
        # transformer_config.py: "CPU offloading does not work when activation recomputation is
        # enabled"
        message = f"megatron-core offloads activations or computes them again ({choices.recompute})"
        yield Contradiction(where, message, "set `recompute: none`, or remove it")
    if choices.parallel.pp > 1:
        # transformer_config.py: "no support for Pipeline parallelism with CPU offloading"
        message = "megatron-core offloads activations without a pipeline only, not with pp "
        message += str(choices.parallel.pp)
        yield Contradiction(where, message, "set `parallel.pp: 1`, or remove it")
    if choices.model is not None and offloaded >= choices.model.layers:
        # transformer_config.py: "CPU offloading can be done only for layers less than"
        layers = choices.model.layers
        message = f"fewer than the model's {layers} layers can be offloaded, not {offloaded}"
        yield Contradiction(where, message, f"set {layers - 1} at most")
    if graphs:
        # transformer_config.py: "CUDA graphs not supported with CPU offloading"
        message = "graphs of layers exclude offloaded activations"
        yield Contradiction(_own("cuda_graph_impl"), message, "remove one of the two")


def _of_messages(engine: EngineSpec, choices: Choices) -> Iterator[Contradiction]:
    """Find contradictions with a layout that the spec gives; the planner avoids them itself."""
    own, parallel = engine.megatron, choices.parallel
    if not choices.layout_given:
        return
    sizes = own.hierarchical_context_parallel_sizes
    if sizes is not None and prod(sizes) != parallel.cp:
        # arguments.py: `context_parallel_size == prod(hierarchical_context_parallel_sizes)`
        message = f"{sizes[0]} x {sizes[1]} ranks share a sequence, and cp is {parallel.cp}"
        hint = f"set `parallel.cp: {prod(sizes)}`, or other sizes"
        yield Contradiction(_own("hierarchical_context_parallel_sizes"), message, hint)
    if own.tp_comm_overlap and (parallel.tp == 1 or parallel.sequence_parallel is False):
        # arguments.py: "can happen only when sequence parallelism is enabled"
        what = "tp is 1" if parallel.tp == 1 else "sequence_parallel is off"
        message = f"this hides messages of sequence parallelism over tp: {what}"
        hint = "remove it, or set `parallel.tp` above 1 with sequence_parallel"
        yield Contradiction(_own("tp_comm_overlap"), message, hint)
    if own.defer_embedding_wgrad_compute and parallel.pp == 1:
        # model_parallel_config.py: "Cannot defer embedding wgrad compute when pipeline model
        # parallel is not used"
        message = "without a pipeline there is no gap to compute the weight gradient in"
        hint = "remove it, or set `parallel.pp` above 1"
        yield Contradiction(_own("defer_embedding_wgrad_compute"), message, hint)


# ----------------------------------------------------------------------------------------------


ZERO_WORDS = (zero_word(0), zero_word(1))
MESH_WORDS = (TENSOR_WORD, PIPELINE_WORD, CONTEXT_WORD)
# tensor_parallel/layers.py relies on kernels that start in launch order. FSDP overlaps less with it
# (Megatron-LM's arguments.py refuses that pair).
ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}

# Types of the optimizer's state (Megatron-LM: arguments.py, --exp-avg-dtype), and kernels of
# attention (transformer/enums.py, AttnBackend).
StateType = Literal["fp32", "fp16", "bf16", "fp8"]
AttentionBackend = Literal["auto", "flash", "fused", "unfused", "local"]
_STATE_TYPES = ("exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype")
# How numbers are scaled into 8 bits (megatron-core: transformer_config.py, fp8_recipe).
Fp8Recipe = Literal["delayed", "tensorwise", "blockwise", "mxfp8"]
# Microbatches whose gradient of the output layer waits for the end of the pipeline (as in
# Megatron-Bridge, recipes/gpt/h100/gpt3_175b.py; megatron-core's default keeps all of them).
WGRAD_DEFERRAL_LIMIT = 50


class MegatronSpec(Document):
    """What production runs choose beyond the layout; names as in megatron-core's configuration."""

    fp8_recipe: Fp8Recipe | Literal["auto"] = Field(
        "auto",
        description="Scaling into 8 bits with `precision: fp8`; auto: tensorwise (current scaling) "
        "on Hopper, mxfp8 on Blackwell",
    )
    fp8_param_gather: bool = Field(
        False, description="Keep and gather weights in 8 bits with `precision: fp8`"
    )
    grad_reduce_in_fp32: bool = Field(
        True, description="Sum gradients in fp32; false: in bf16, half the bytes"
    )
    tp_comm_overlap: bool = Field(
        False, description="Hide tensor parallel messages by userbuffers of TransformerEngine"
    )
    cross_entropy_loss_fusion: bool = Field(
        False, description="Loss in fused kernels: fewer passes over the logits"
    )
    defer_embedding_wgrad_compute: bool = Field(
        False, description="Compute the output layer's weight gradient in the pipeline's last gap"
    )
    moe_token_dispatcher_type: Literal["alltoall", "flex"] = Field(
        "alltoall", description="How tokens reach experts; flex: by the backend below"
    )
    moe_flex_dispatcher_backend: Literal["deepep", "hybridep"] = Field(
        "deepep", description="Library of the flex dispatcher"
    )
    moe_permute_fusion: bool = Field(
        False, description="Sort tokens by expert in kernels of TransformerEngine"
    )
    moe_shared_expert_overlap: bool = Field(
        False, description="Compute the shared expert while tokens travel"
    )
    cuda_graph_impl: Literal["none", "local", "transformer_engine"] = Field(
        "none", description="Who captures CUDA graphs of the layers"
    )
    use_precision_aware_optimizer: bool = Field(
        False, description="TransformerEngine's Adam, with its state in the types below"
    )
    exp_avg_dtype: StateType = Field("fp32", description="Type of the first moment")
    exp_avg_sq_dtype: StateType = Field("fp32", description="Type of the second moment")
    main_params_dtype: Literal["fp32", "fp16"] = Field(
        "fp32", description="Type of the weights that the optimizer updates"
    )
    num_distributed_optimizer_instances: int = Field(
        1,
        ge=1,
        description="Copies of the optimizer's state; each is sharded over dp x cp / copies",
    )
    hierarchical_context_parallel_sizes: tuple[int, int] | None = Field(
        None,
        description="Factors of cp: near ranks exchange heads, far ones pass on keys and values",
    )
    attention_backend: AttentionBackend = Field(
        "auto",
        description="Kernels of attention; flash, fused, unfused: TransformerEngine's, local: "
        "megatron-core's own",
    )
    calculate_per_token_loss: bool = Field(
        False, description="Mean over all tokens of a step; false: over its microbatches' means"
    )


def with_fp8_recipe(engine: EngineSpec, recipe: Fp8Recipe) -> EngineSpec:
    """Copy `engine` with this scaling in place of `auto`."""
    own = engine.megatron.model_copy(update={"fp8_recipe": recipe})
    return engine.model_copy(update={"megatron": own})


ABILITIES = EngineAbilities(
    name="megatron",
    title="megatron-core",
    packages=("torch", "megatron.core"),
    extra="megatron",
    extra_packages=("torch", "megatron", "einops", "psutil", "tokenizers"),
    document="hpctrain.engines.megatron:MegatronConfig",
    fill="hpctrain.engines.megatron:megatron_config",
    assembly="hpctrain.train.engines.megatron.assembly",
    preflight="hpctrain.train.engines.megatron.preflight",
    library_check="hpctrain.train.engines.megatron.core_versions.check:library_findings",
    rules="hpctrain.plan.abilities.trainable_megatron",
    verifier="hpctrain.train.engines.megatron.verify",
    export="hpctrain.convert.run_checkpoint:export_megatron",
    trained_precisions=("bf16", "fp32", "fp8", "fp4"),  # 8 and 4 bits by TransformerEngine
    model_classes=MEGATRON_CORE,
    weights="megatron_core",
    pads_vocab=True,
    documents=("joined", "restart"),
    chooses_router_losses=True,
    axes=MODEL_AXES,
    zero_stages=(0, 1),  # without and with the distributed optimizer
    offloads=("none", "cpu"),  # OptimizerConfig.optimizer_cpu_offload
    planned_offloads=("cpu",),
    recomputes=("none", "selective", "full"),
    checkpoint_files_of_leader=3,  # common.pt, metadata.json, .metadata
    calibration="megatron-core",
    gradient_addition="product",
    chooses_overlap=True,
    environment=ENVIRONMENT,
    settings={"megatron": "{}"},
    wrong_settings=wrong_settings,
    contradictions=contradictions,
    splits_experts=True,
    precisions=("fp32", "fp16", "bf16", "fp8", "fp4"),
    recomputes_some=True,
    offloads_activations=True,
    words=(*ZERO_WORDS, *WORDS_OF_EVERY_ENGINE, *MESH_WORDS),
)
