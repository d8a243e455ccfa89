"""What a layout demands of the model and of the number of GPUs.

Belongs here: divisibility and the rules of megatron-core about axes. Does not belong here: the
batch (`batch`), layers per stage (`stages`), memory (`memory`).
"""

from __future__ import annotations

from math import lcm

from hpctrain.plan.divisors import (
    common_divisors,
    divisors,
    multiples_around,
    nearest,
    or_list,
)
from hpctrain.plan.documents import Layout
from hpctrain.plan.stages import split_problems
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.run import ModelSpec, ParallelSpec, RunSpec


def uses_sequence_parallel(parallel: ParallelSpec) -> bool:
    """As the spec says; by default on when tp > 1, which saves memory at no cost in traffic."""
    if parallel.sequence_parallel is None:
        return parallel.tp > 1
    return parallel.sequence_parallel


def layout_of(parallel: ParallelSpec, gpus: int) -> Layout:
    """The mesh of an explicit layout; dp takes all GPUs that the other axes leave."""
    return Layout(
        tp=parallel.tp,
        pp=parallel.pp,
        vpp=parallel.vpp,
        cp=parallel.cp,
        dp=gpus // (parallel.tp * parallel.pp * parallel.cp),
        sequence_parallel=uses_sequence_parallel(parallel),
    )


def layout_problems(spec: RunSpec, parallel: ParallelSpec) -> list[str]:
    """Everything about `parallel` that the model or the engine does not allow."""
    return [
        *tensor_problems(spec.model, parallel.tp),
        *_sequence_problems(spec.model, parallel),
        *split_problems(spec.model.layers, parallel),
        *_context_problems(spec, parallel),
    ]


def world_problems(parallel: ParallelSpec, gpus: int, profile: ClusterProfile) -> list[str]:
    """The product of the axes has to divide the number of GPUs."""
    model_gpus = parallel.tp * parallel.pp * parallel.cp
    if gpus % model_gpus == 0:
        return []
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


def tensor_problems(model: ModelSpec, tp: int) -> list[str]:
    """What tp has to divide (megatron/core/transformer/transformer_config.py:925-948)."""
    groups = model.key_value_heads
    width = (model.heads + 2 * groups) * model.head_size
    problems = [
        f"{name} {size} is not divisible by tp {tp}"
        for name, size in (("heads", model.heads), ("ffn", model.ffn_size))
        if size % tp
    ]
    if groups % tp and tp % groups:
        problems.append(f"kv_heads {groups} is neither a multiple nor a divisor of tp {tp}")
    elif width % tp and not problems:
        problems.append(f"the QKV width {width} is not divisible by tp {tp}")
    proposal = or_list(nearest(tp, tensor_sizes(model)))
    return [f"{problem}: nearest tp {proposal}" for problem in problems]


def tensor_sizes(model: ModelSpec) -> tuple[int, ...]:
    """All tp that heads, ffn and kv_heads allow, ascending."""
    groups = model.key_value_heads
    return tuple(
        tp
        for tp in common_divisors(model.heads, model.ffn_size)
        if (groups % tp == 0 or tp % groups == 0)
        and (model.heads + 2 * groups) * model.head_size % tp == 0
    )


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
