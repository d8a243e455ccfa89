"""The settings that megatron-core cannot combine, or that would have no effect there.

Belongs here: one contradiction for each, with the rule of megatron-core that it follows (file names
are those of megatron-core 0.16.1; arguments.py is Megatron-LM's). Does not belong here: rules about
layouts that the planner chooses (`hpctrain.plan.mesh.rules`), what a GPU can compute
(`hpctrain.plan.limits`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hpctrain.spec.contradiction import Contradiction
from hpctrain.spec.engines.abilities import Choices

if TYPE_CHECKING:
    from hpctrain.spec.engine import EngineSpec

LOW_PRECISIONS = ("fp8", "fp4")
# Modules of `recompute_modules` that keep no statistics of delayed scaling.
NOT_WITH_DELAYED = ("moe_act", "layernorm")


def _own(field: str) -> tuple[str, str, str]:
    return ("engine", "megatron", field)


def wrong_settings(engine: EngineSpec) -> Iterator[Contradiction]:
    """Find settings of `engine` that exclude each other, whatever the rest of the spec is."""
    own = engine.megatron
    flex = own.moe_token_dispatcher_type == "flex"
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
    }
    for field in (name for name, given in needs.items() if given):
        message = "this is TransformerEngine's, and `implementation` is local"
        yield Contradiction(_own(field), message, "set `engine.implementation: transformer_engine`")


def contradictions(engine: EngineSpec, choices: Choices) -> Iterator[Contradiction]:
    """Find what megatron-core's configuration refuses, or would ignore, in the whole spec."""
    yield from _of_precision(engine, choices)
    yield from _of_activations(engine, choices)
    yield from _of_messages(engine, choices)
    if choices.model is not None:
        yield from _of_the_model(engine, choices)


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
    elif own.fp8_param_gather and (optimizer.zero == 0 or not optimizer.distributed):
        # arguments.py: "--fp8-param-gather only supported with distributed optimizer"
        message = "weights are gathered in 8 bits by the distributed optimizer, which is off"
        hint = "set `optimizer.distributed: true`, or remove it"
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


def _of_the_model(engine: EngineSpec, choices: Choices) -> Iterator[Contradiction]:
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
            _own("moe_shared_expert_overlap"), message, "remove it, or give `model.moe.shared_ffn`"
        )
