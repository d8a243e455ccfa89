"""What a layout demands of the model and of the number of GPUs.

Belongs here: divisibility and the rules of megatron-core about axes. Does not belong here: the
batch (`batch`), layers per stage (`stages`), what an engine other than megatron-core has
(`sharding`), memory (`plan_memory`). The search has the same rules over arrays (`grid`); a test
compares them for every layout that it enumerates.
"""

from __future__ import annotations

from math import lcm

from hpctrain.plan.abilities.sharding import axis_problems
from hpctrain.plan.divisors import (
    common_divisors,
    divisors,
    multiples_around,
    nearest,
    or_list,
)
from hpctrain.plan.documents import DEFAULT_ORDER, Layout
from hpctrain.plan.mesh.stages import split_problems
from hpctrain.plan.model.parameters import expert_tp
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.run import ModelSpec, ParallelSpec, RunSpec


def uses_sequence_parallel(parallel: ParallelSpec) -> bool:
    """As the spec says; by default on when tp > 1, which saves memory at no cost in traffic."""
    if parallel.sequence_parallel is None:
        return parallel.tp > 1
    return parallel.sequence_parallel


def settled(spec: RunSpec, parallel: ParallelSpec) -> ParallelSpec:
    """Switch sequence parallelism off for an engine without it, such as DeepSpeed."""
    if not spec.engine.abilities.sequence_parallel:
        return parallel.model_copy(update={"sequence_parallel": False})
    return parallel


def layout_of(parallel: ParallelSpec, gpus: int) -> Layout:
    """The mesh of an explicit layout; dp takes all GPUs that the other axes leave."""
    return Layout(
        tp=parallel.tp,
        pp=parallel.pp,
        vpp=parallel.vpp,
        cp=parallel.cp,
        dp=gpus // (parallel.tp * parallel.pp * parallel.cp),
        sequence_parallel=uses_sequence_parallel(parallel),
        ep=parallel.ep,
        order=DEFAULT_ORDER if parallel.order == "auto" else parallel.order,
    )


def layout_problems(spec: RunSpec, parallel: ParallelSpec) -> list[str]:
    """Everything about `parallel` that the model or the engine does not allow."""
    return [
        *axis_problems(spec, parallel),
        *tensor_problems(spec.model, parallel.tp),
        *_expert_problems(spec.model, parallel),
        *_sequence_problems(spec.model, parallel),
        *split_problems(spec.model.layers, parallel),
        *_context_problems(spec, parallel),
        *_prediction_problems(spec.model, parallel.pp),
    ]


def world_problems(parallel: ParallelSpec, gpus: int, profile: ClusterProfile) -> list[str]:
    """The product of the axes has to divide the number of GPUs."""
    model_gpus = parallel.tp * parallel.pp * parallel.cp
    if gpus % model_gpus == 0:
        return _expert_world_problems(parallel, gpus // parallel.pp)
    axes = [("tp", parallel.tp), ("pp", parallel.pp), ("cp", parallel.cp)]
    product = " x ".join(f"{name} {size}" for name, size in axes if name != "cp" or size > 1)
    per_node, total = profile.gpu.per_node, profile.gpu_count
    part_of_node = range(model_gpus, per_node + 1, model_gpus)
    whole_nodes = multiples_around(gpus, lcm(model_gpus, per_node), limit=total)
    proposal = or_list(nearest(gpus, (*part_of_node, *whole_nodes)))
    return [
        f"{gpus} GPUs cannot be divided into groups of {product} = {model_gpus}: "
        f"nearest {proposal} GPUs"
    ]


def _expert_world_problems(parallel: ParallelSpec, ranks: int) -> list[str]:
    """ep x expert tp divides the ranks of one pipeline stage, tp x cp x dp.

    megatron/core/parallel_state.py:788-795; expert tp is 1 with ep > 1 (`parameters.expert_tp`).
    """
    if ranks % (parallel.ep * expert_tp(parallel.tp, parallel.ep)) == 0:
        return []
    proposal = or_list(nearest(parallel.ep, divisors(ranks)))
    return [f"ep {parallel.ep} does not divide tp x cp x dp {ranks}: nearest ep {proposal}"]


def split_widths(model: ModelSpec) -> tuple[tuple[str, int], ...]:
    """What tensor parallelism splits in every layer, whatever ep is: heads and MLPs."""
    widths = [("heads", model.heads)]
    if model.moe is None or model.moe.dense_layers:
        widths.append(("ffn", model.ffn_size))
    if model.moe is not None and model.moe.shared_ffn:
        widths.append(("moe.shared_ffn", model.moe.shared_ffn))
    return tuple(widths)


def tensor_problems(model: ModelSpec, tp: int) -> list[str]:
    """What tp has to divide (megatron/core/transformer/transformer_config.py:925-948)."""
    groups = model.key_value_heads
    width = (model.heads + 2 * groups) * model.head_size
    problems = [
        f"{name} {size} is not divisible by tp {tp}"
        for name, size in split_widths(model)
        if size % tp
    ]
    if groups % tp and tp % groups:
        problems.append(f"kv_heads {groups} is neither a multiple nor a divisor of tp {tp}")
    elif width % tp and not problems:
        problems.append(f"the QKV width {width} is not divisible by tp {tp}")
    proposal = or_list(nearest(tp, tensor_sizes(model)))
    return [f"{problem}: nearest tp {proposal}" for problem in problems]


def tensor_sizes(model: ModelSpec) -> tuple[int, ...]:
    """All tp that heads, MLPs and kv_heads allow, ascending."""
    groups = model.key_value_heads
    return tuple(
        tp
        for tp in common_divisors(*(size for _, size in split_widths(model)))
        if (groups % tp == 0 or tp % groups == 0)
        and (model.heads + 2 * groups) * model.head_size % tp == 0
    )


def _expert_problems(model: ModelSpec, parallel: ParallelSpec) -> list[str]:
    if model.moe is None:
        return [f"ep {parallel.ep} needs a model with experts"] if parallel.ep > 1 else []
    problems, experts = [], model.moe.experts
    if experts % parallel.ep:
        proposal = or_list(nearest(parallel.ep, divisors(experts)))
        problems.append(
            f"experts {experts} are not divisible by ep {parallel.ep}: nearest ep {proposal}"
        )
    if parallel.ep == 1 and model.moe.ffn % parallel.tp:
        problems.append(f"moe.ffn {model.moe.ffn} is not divisible by tp {parallel.tp}: use ep")
    if parallel.ep == 1 and parallel.tp > 1 and model.bias:
        # transformer_config.py: "Bias in Moe is only supported when ETP==1"
        problems.append(f"experts with biases cannot be split over tp {parallel.tp}: use ep")
    if parallel.tp > 1 and not uses_sequence_parallel(parallel):
        # megatron/core/transformer/moe/moe_layer.py, MoELayer.forward refuses to train
        problems.append(f"experts with tp {parallel.tp} need sequence_parallel")
    return problems


def _sequence_problems(model: ModelSpec, parallel: ParallelSpec) -> list[str]:
    problems = []
    if parallel.cp > 1 and model.seq % (2 * parallel.cp):
        # each context parallel rank takes two of 2 x cp slices, to balance the causal mask
        choices = or_list(nearest(parallel.cp, divisors(model.seq // 2 or 1)))
        problems.append(
            f"seq {model.seq} is not divisible by 2 x cp {parallel.cp}: nearest cp {choices}"
        )
    elif uses_sequence_parallel(parallel) and model.seq // parallel.cp % parallel.tp:
        part = model.seq // parallel.cp
        problems.append(
            f"sequence_parallel splits {part} tokens over tp {parallel.tp}: "
            f"nearest seq {or_list(multiples_around(model.seq, parallel.tp * parallel.cp))}"
        )
    return problems


def _context_problems(spec: RunSpec, parallel: ParallelSpec) -> list[str]:
    if parallel.cp > 1 and spec.engine.implementation == "local":
        # megatron/core/transformer/dot_product_attention.py asserts context_parallel_size == 1
        return [
            f"cp {parallel.cp} needs TransformerEngine: the local implementation has no context "
            "parallel attention"
        ]
    return []


def _prediction_problems(model: ModelSpec, pp: int) -> list[str]:
    if pp > 1 and model.mtp_layers and model.positions == "learned":
        # parallel_state.py, default_position_embedding_ranks: gradients of the copy behind the
        # pipeline are summed with nobody's
        return [f"mtp_layers behind pp {pp} need rotary positions: use pp 1 or `positions: rope`"]
    return []
