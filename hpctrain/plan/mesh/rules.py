"""List the rules that a layout has to keep, each with a mask and a message.

The mask is over many layouts, the message about one. The search applies the masks; a refusal
consists of the messages of the rules that one layout breaks. Belongs here: divisibility, and the
demands of engines on axes, batch, sharding and order. Does not belong here: what a spec alone
excludes (`abilities`), limits of the site (`limits`), memory (`cost.prediction`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import lcm, prod

import numpy as np
from numpy.typing import NDArray

from hpctrain.base.errors import Refusal
from hpctrain.plan.divisors import divisors, multiples_around, nearest, or_list
from hpctrain.plan.layout_words import DEFAULT_ORDER, ORDERS
from hpctrain.plan.mesh.candidate import (
    Candidate,
    Columns,
    LayoutValues,
    Number,
    Whole,
    columns_of,
    split_widths,
    tensor_sizes,
)
from hpctrain.plan.mesh.stages import split_messages
from hpctrain.plan.model.number_formats import (
    linear_widths,
    low_alignment,
    low_row_alignment,
)
from hpctrain.plan.request import PlanRequest
from hpctrain.spec.engines.abilities import MEGATRON_CORE, MODEL_AXES, Axis
from hpctrain.spec.run import ModelSpec, RunSpec

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Rule:
    """A condition that every layout has to meet.

    `holds`: the mask of the layouts that keep it. `message`: about one layout that breaks it.
    `after`: rules that have to hold before the message makes sense. `field` of the spec is where
    the message points.
    """

    name: str
    holds: Callable[[RunSpec, Columns], Mask | bool]
    message: Callable[[PlanRequest, Candidate], str]
    after: tuple[str, ...] = ()
    field: str = "parallel"


def allowed(spec: RunSpec, layouts: Columns, rules: Iterable[Rule]) -> Mask:
    """Compute the mask of the layouts that keep all these rules."""
    kept = np.ones(layouts.tp.shape, dtype=bool)
    for rule in rules:
        kept &= rule.holds(spec, layouts)
    return kept


def broken_rules(spec: RunSpec, layout: Candidate, rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """List the rules that one layout breaks, without those whose message needs a broken one."""
    row = columns_of(layout)
    broken: dict[str, Rule] = {}
    for rule in rules:
        if broken.keys().isdisjoint(rule.after) and not np.all(rule.holds(spec, row)):
            broken[rule.name] = rule
    return tuple(broken.values())


def possible_orders(spec: RunSpec, layout: Candidate) -> tuple[int, ...]:
    """List positions in ORDERS of the orders that megatron-core allows for this mesh."""
    numbers = range(len(ORDERS))
    return tuple(n for n in numbers if not broken_rules(spec, replace(layout, order=n), [ORDER]))


def _axis(name: Axis) -> Rule:
    """Make the rule that the engine has this axis; not every model can be split over ranks."""

    def holds(spec: RunSpec, at: Columns) -> Mask | bool:
        has = name in spec.engine.abilities.axes and spec.model.splits
        return has or np.asarray(getattr(at, name) == 1)

    def message(request: PlanRequest, at: Candidate) -> str:
        model, owner = request.spec.model, f"engine {request.spec.engine.name}"
        if not model.splits:
            owner = f"a {model.called}, planned with data parallelism only,"
        return f"{owner} has no {name}: remove `parallel.{name}` {getattr(at, name)}"

    return Rule(f"engine has {name}", holds, message, field=f"parallel.{name}")


def _width(name: str) -> Rule:
    """Make the rule that tp divides a width (transformer_config.py:925-948 of megatron-core)."""

    def holds(spec: RunSpec, at: Columns) -> Mask:
        return np.asarray(split_widths(spec.model).get(name, 0) % at.tp == 0)

    def message(request: PlanRequest, at: Candidate) -> str:
        size = split_widths(request.spec.model)[name]
        return f"{name} {size} is not divisible by tp {at.tp}{_nearest_tp(request, at)}"

    return Rule(f"tp divides {name}", holds, message, field="parallel.tp")


def _nearest_tp(request: PlanRequest, at: Candidate) -> str:
    return f": nearest tp {or_list(nearest(at.tp, tensor_sizes(request.spec.model)))}"


def _qkv_width(model: ModelSpec) -> int:
    return (model.heads + 2 * model.key_value_heads) * model.head_size


def _experts(spec: RunSpec) -> int:
    return spec.model.moe.experts if spec.model.moe else 0


def _instances(spec: RunSpec) -> int:
    return spec.engine.megatron.num_distributed_optimizer_instances


def _context_levels(spec: RunSpec) -> tuple[int, int] | None:
    return spec.engine.megatron.hierarchical_context_parallel_sizes


def _expert_ffn(spec: RunSpec) -> int:
    return spec.model.moe.ffn if spec.model.moe else 0


def _expert_split(at: Candidate) -> str:
    """Format what splits an expert, and what to use instead."""
    return f"etp {at.etp}: use 1" if at.etp else f"tp {at.tp}: use ep"


def _nearest_ep(at: Candidate, number: int) -> str:
    return f"nearest ep {or_list(nearest(at.ep, divisors(number)))}"


def _split_holds(spec: RunSpec, at: Columns) -> Mask | bool:
    if at.stages is not None:
        return not split_messages(spec.model.layers, at.stages)
    counted = spec.model.layers + at.count_embedding + at.count_loss
    return np.asarray((at.uneven > 0) | (counted % at.chunks == 0))


def _split_message(request: PlanRequest, at: Candidate) -> str:
    layers = request.spec.model.layers
    if at.stages is not None:
        return "\n".join(split_messages(layers, at.stages))
    counted = layers + at.count_embedding + at.count_loss
    extra = " (embedding and loss counted as asked)" if counted != layers else ""
    axes = f"pp {at.pp}" + (f" x vpp {at.vpp}" if at.vpp > 1 else "")
    proposal = or_list(nearest(at.chunks, divisors(counted)))
    if (layers + 2) % at.chunks == 0:
        hint = "; or set count_embedding and count_loss"
    elif (layers + 1) % at.chunks == 0:
        hint = "; or set one of count_embedding and count_loss"
    else:
        hint = "; or list the layers of each chunk in `stages`"
    return (
        f"{counted} layers{extra} cannot be split evenly over {axes} = {at.chunks} chunks: "
        f"nearest numbers of chunks {proposal}{hint}"
    )


def _world_message(request: PlanRequest, at: Candidate) -> str:
    profile = request.profile
    axes = [("tp", at.tp), ("pp", at.pp), ("cp", at.cp)]
    product = " x ".join(f"{name} {size}" for name, size in axes if name != "cp" or size > 1)
    per_node, total = profile.gpu.per_node, profile.gpu_count
    part_of_node = range(at.model_gpus, per_node + 1, at.model_gpus)
    whole_nodes = multiples_around(at.gpus, lcm(at.model_gpus, per_node), limit=total)
    near = nearest(at.gpus, (*part_of_node, *whole_nodes))
    message = f"{at.gpus} GPUs cannot be divided into groups of {product} = {at.model_gpus}"
    return f"{message}: nearest {or_list(near)} GPUs" if near else message


def _batch_message(request: PlanRequest, at: Candidate) -> str:
    batch, micro = request.spec.batch.global_, request.spec.batch.micro
    sizes = request.spec.batch.sizes.all
    names = [("micro", at.micro_batch)] * (micro != "auto") + [("dp", at.dp)]
    if all(size % (at.micro_batch * at.dp) == 0 for size in sizes):
        names.append(("pp", at.pp))
    group = at.pp if at.vpp > 1 else 1
    product = " x ".join(f"{name} {number}" for name, number in names)
    why = " (the interleaved schedule takes microbatches in groups of pp)" * ("pp" in dict(names))
    unit = at.micro_batch * at.dp * group
    if batch % unit == 0:
        odd = [str(size) for size in sizes if size % unit]
        more = f" and {len(odd) - 5} more" if len(odd) > 5 else ""
        return (
            f"batches of the ramp-up are not divisible by {product}{why}: {', '.join(odd[:5])}"
            f"{more}; say `start` and `increment` that are multiples of {unit}"
        )
    around = multiples_around(batch, unit)
    proposals = [f"global batch {or_list(around)}"]
    per_gpu, rest = divmod(batch, at.dp * group)
    if micro != "auto" and rest == 0 and per_gpu:
        proposals.append(f"micro {or_list(nearest(micro, divisors(per_gpu)))}")
    return (
        f"global batch {batch} is not divisible by {product}{why}: "
        f"nearest {', or '.join(proposals)}"
    )


def _order_holds(spec: RunSpec, at: Columns) -> Mask:
    """Check that pipelines of dense layers and of experts have the same ranks.

    megatron-core 0.16.1, megatron/core/parallel_state.py:808-820. The stride of pp is tp x
    cp in one mesh and expert tp x ep in the other.
    """
    same = at.tp * at.cp == _expert_ranks(at)
    return np.asarray((at.order == 0) | (at.pp == 1) | same)


def _expert_ranks(at: Columns) -> Whole:
    """Return expert tp x ep: the nearest ranks of the mesh of experts."""
    return at.ep * at.expert_tp


def longest_chunk(spec: RunSpec, at: LayoutValues[Number]) -> Number | int:
    """Count the layers of the longest chunk of a pipeline stage."""
    if at.stages is not None:
        return max(at.stages)
    both, either = at.count_embedding * at.count_loss, at.count_embedding + at.count_loss
    # of one chunk or two, no chunk is between those that embedding and loss make shorter
    short = (at.chunks == 1) * either + (at.chunks == 2) * both
    longest: Number = -(-(spec.model.layers + either) // at.chunks) - short
    return longest


def _rows(spec: RunSpec, at: LayoutValues[Number]) -> Number:
    """Count the tokens of a microbatch on one rank: rows of the products of linear layers."""
    return at.micro_batch * spec.model.seq // at.cp


def _own_rows(spec: RunSpec, at: LayoutValues[Number]) -> Number:
    """Count those of one rank outside the tensor parallel region."""
    split = np.where(np.asarray(at.sequence_parallel) > 0, at.tp, 1)
    return _rows(spec, at) // split  # type: ignore[return-value]


def _unaligned_rows_message(request: PlanRequest, at: Candidate) -> str:
    spec = request.spec
    whole, own = _rows(spec, at), int(_own_rows(spec, at))
    tokens, step = f"micro {at.micro_batch} x seq {spec.model.seq} / cp {at.cp}", whole
    multiple = low_alignment(spec)
    if whole % multiple == 0:
        tokens, step, multiple = f"{tokens} / tp {at.tp}", own, low_row_alignment(spec)
    return f"{spec.precision} takes tokens in multiples of {multiple}: {tokens} are {step}"


def _all_aligned(spec: RunSpec, at: Columns) -> Mask | bool:
    """Check that low precision takes every width of a linear layer on one rank."""
    step = low_alignment(spec)
    if step == 1:
        return True
    kept = np.ones(at.tp.shape, dtype=bool)
    for width, ranks in linear_widths(spec.model, at.tp, at.expert_tp).values():
        kept &= width // ranks % step == 0
    return kept


def _unaligned_message(request: PlanRequest, at: Candidate) -> str:
    spec, step = request.spec, low_alignment(request.spec)
    widths = linear_widths(spec.model, at.tp, at.expert_tp)
    name, (width, ranks) = next(
        (name, found) for name, found in widths.items() if found[0] // found[1] % step
    )
    split = f" on each of {ranks} ranks" if ranks > 1 else ""
    return (
        f"{spec.precision} takes widths in multiples of {step}: {name} {width} is "
        f"{width // ranks}{split}; use less tensor parallelism, or `precision: bf16`"
    )


_WIDTHS = tuple(_width(name) for name in ("heads", "ffn", "moe.shared_ffn"))

# Rules about the mesh alone, in the order of their messages.
MODEL_RULES: tuple[Rule, ...] = (
    *(_axis(name) for name in MODEL_AXES),
    *_WIDTHS,
    Rule(
        "tp fits kv_heads",
        lambda spec, at: (
            (spec.model.key_value_heads % at.tp == 0) | (at.tp % spec.model.key_value_heads == 0)
        ),
        lambda request, at: (
            f"kv_heads {request.spec.model.key_value_heads} is neither a multiple nor a divisor "
            f"of tp {at.tp}{_nearest_tp(request, at)}"
        ),
        field="parallel.tp",
    ),
    Rule(
        "tp divides QKV",
        lambda spec, at: _qkv_width(spec.model) % at.tp == 0,
        lambda request, at: (
            f"the QKV width {_qkv_width(request.spec.model)} is not divisible by tp {at.tp}"
            f"{_nearest_tp(request, at)}"
        ),
        after=(*(rule.name for rule in _WIDTHS), "tp fits kv_heads"),
        field="parallel.tp",
    ),
    Rule(
        "ep needs experts",
        lambda spec, at: (at.ep == 1) | (spec.model.moe is not None),
        lambda request, at: f"ep {at.ep} needs a model with experts",
        field="parallel.ep",
    ),
    Rule(
        "ep divides experts",
        lambda spec, at: _experts(spec) % at.ep == 0,
        lambda request, at: (
            f"experts {_experts(request.spec)} are not divisible by ep {at.ep}: "
            f"{_nearest_ep(at, _experts(request.spec))}"
        ),
        field="parallel.ep",
    ),
    Rule(
        "etp divides moe.ffn",
        lambda spec, at: _expert_ffn(spec) % at.expert_tp == 0,
        lambda request, at: (
            f"moe.ffn {_expert_ffn(request.spec)} is not divisible by {_expert_split(at)}"
        ),
        field="parallel.etp",
    ),
    Rule(
        # megatron-core adds up gradients of experts over other ranks than those of dense layers
        # only with expert parallelism (`allreduce` in moe/experts.py), so they would be wrong
        "experts without ep are split as tp",
        lambda spec, at: (at.ep > 1) | (at.expert_tp == at.tp) | (spec.model.moe is None),
        lambda request, at: f"without ep, etp {at.etp} must be tp {at.tp}: leave `etp` out",
        field="parallel.etp",
    ),
    Rule(  # transformer_config.py: "Bias in Moe is only supported when ETP==1"
        "experts with biases are whole",
        lambda spec, at: (at.expert_tp == 1) | (not spec.model.bias) | (spec.model.moe is None),
        lambda request, at: f"experts with biases cannot be split over {_expert_split(at)}",
        field="parallel.etp",
    ),
    Rule(  # token_dispatcher.py: "Flex token dispatcher requires TPxEP > 1"
        "the flex dispatcher has several ranks",
        lambda spec, at: (
            (spec.engine.megatron.moe_token_dispatcher_type != "flex") | (at.expert_tp * at.ep > 1)
        ),
        lambda request, at: "the flex dispatcher needs ep or etp above 1: use ep",
        field="engine.megatron.moe_token_dispatcher_type",
    ),
    Rule(  # megatron/core/transformer/moe/moe_layer.py, MoELayer.forward refuses to train
        "experts need sequence_parallel",
        lambda spec, at: (at.tp == 1) | (at.sequence_parallel > 0) | (spec.model.moe is None),
        lambda request, at: f"experts with tp {at.tp} need sequence_parallel",
        field="parallel.sequence_parallel",
    ),
    Rule(  # each context parallel rank takes two of 2 x cp slices, to balance the causal mask
        "cp divides seq",
        lambda spec, at: (at.cp == 1) | (spec.model.seq % (2 * at.cp) == 0),
        lambda request, at: (
            f"seq {request.spec.model.seq} is not divisible by 2 x cp {at.cp}: nearest cp "
            f"{or_list(nearest(at.cp, divisors(request.spec.model.seq // 2 or 1)))}"
        ),
        field="parallel.cp",
    ),
    Rule(
        "tp divides the sequence",
        lambda spec, at: (at.sequence_parallel == 0) | (spec.model.seq // at.cp % at.tp == 0),
        lambda request, at: (
            f"sequence_parallel splits {request.spec.model.seq // at.cp} tokens over tp {at.tp}: "
            f"nearest seq {or_list(multiples_around(request.spec.model.seq, at.tp * at.cp))}"
        ),
        after=("cp divides seq",),
        field="parallel.tp",
    ),
    Rule("stages hold the layers", _split_holds, _split_message, field="parallel.pp"),
    Rule(  # megatron/core/transformer/dot_product_attention.py asserts context_parallel_size == 1
        "cp needs TransformerEngine",
        lambda spec, at: (at.cp == 1) | (spec.engine.implementation != "local"),
        lambda request, at: (
            f"cp {at.cp} needs TransformerEngine: the local implementation has no context "
            "parallel attention"
        ),
        field="parallel.cp",
    ),
    Rule(
        # train/engines/megatron/layers.py, HeadsNorm: each rank has the weights of its own heads
        "norms over heads are split",
        lambda spec, at: (
            (spec.model.attends.qk_norm not in ("width", "each_head"))
            | (spec.engine.abilities.model_classes != MEGATRON_CORE)
            | (at.tp <= spec.model.key_value_heads)
        ),
        lambda request, at: (
            f"tp {at.tp} leaves ranks without a key head of its own norm "
            f"(attention.qk_norm: {request.spec.model.attends.qk_norm}): use tp "
            f"{request.spec.model.key_value_heads} at most"
        ),
        field="parallel.tp",
    ),
    Rule(
        # parallel_state.py, default_position_embedding_ranks: gradients of the copy behind the
        # pipeline are not summed with the first stage's
        "mtp_layers behind a pipeline",
        lambda spec, at: (
            (at.pp == 1) | (not spec.model.mtp_layers) | (spec.model.positions != "learned")
        ),
        lambda request, at: (
            f"mtp_layers behind pp {at.pp} need rotary positions: use pp 1 or `positions: rope`"
        ),
        field="parallel.pp",
    ),
)
# Rules of settings that only some layouts can have.
OPTION_RULES: tuple[Rule, ...] = (
    Rule(
        "widths of low precision are aligned",
        lambda spec, at: _all_aligned(spec, at),
        _unaligned_message,
        after=tuple(rule.name for rule in MODEL_RULES),
        field="precision",
    ),
    Rule(  # arguments.py: "can happen only when sequence parallelism is enabled"
        "userbuffers need sequence_parallel",
        lambda spec, at: (
            (not spec.engine.megatron.tp_comm_overlap) | ((at.tp > 1) & (at.sequence_parallel > 0))
        ),
        lambda request, at: (
            f"tp_comm_overlap needs tp above 1 with sequence_parallel, not tp {at.tp}"
        ),
        field="engine.megatron.tp_comm_overlap",
    ),
    Rule(  # model_parallel_config.py: "when pipeline model parallel is not used"
        "a deferred weight gradient needs a pipeline",
        lambda spec, at: (not spec.engine.megatron.defer_embedding_wgrad_compute) | (at.pp > 1),
        lambda request, at: "defer_embedding_wgrad_compute needs pp above 1",
        field="engine.megatron.defer_embedding_wgrad_compute",
    ),
    Rule(
        # a count above the layers of every chunk would be another word for all of them
        "recomputed layers fit a chunk",
        lambda spec, at: (spec.recompute_layers or 0) <= longest_chunk(spec, at),
        lambda request, at: (
            f"recompute_layers {request.spec.recompute_layers} is above the "
            f"{longest_chunk(request.spec, at)} layers of a chunk with pp {at.pp}"
            + (f" x vpp {at.vpp}" if at.vpp > 1 else "")
        ),
        after=("stages hold the layers",),
        field="recompute_layers",
    ),
    Rule(  # transformer_config.py: "no support for Pipeline parallelism with CPU offloading"
        "offloaded activations have no pipeline",
        lambda spec, at: (spec.offloaded_layers == 0) | (at.pp == 1),
        lambda request, at: f"activation_offload_layers needs pp 1, not {at.pp}",
        field="activation_offload_layers",
    ),
)
WORLD = Rule(
    "tp x cp x pp divides the GPUs",
    lambda spec, at: at.gpus % at.model_gpus == 0,
    _world_message,
)
# megatron/core/parallel_state.py:788-795
EXPERT_RANKS = Rule(
    "ep divides the ranks of a stage",
    lambda spec, at: at.gpus // at.pp % _expert_ranks(at) == 0,
    lambda request, at: (
        f"{'etp x ep' if at.etp else 'ep'} {at.ep * max(1, at.etp)} does not divide "
        f"tp x cp x dp {at.gpus // at.pp}: {_nearest_ep(at, at.gpus // at.pp // max(1, at.etp))}"
    ),
    after=(WORLD.name,),
    field="parallel.ep",
)
MESH_RULES = (*MODEL_RULES, *OPTION_RULES, WORLD, EXPERT_RANKS)

# Rules about microbatch, sharding and order of a mesh.
BATCH = Rule(
    "micro x dp divides the batch",
    # The interleaved schedule moves microbatches through the chunks in groups of pp
    # (megatron/core/pipeline_parallel/schedules.py:995-1015); 1F1B takes any number.
    lambda spec, at: (
        spec.batch.sizes.common_divisor % (at.micro_batch * at.dp * np.where(at.vpp > 1, at.pp, 1))
        == 0
    ),
    _batch_message,
    after=(WORLD.name, EXPERT_RANKS.name),
    field="batch.global",
)
_MESH_NAMES = (*(rule.name for rule in MESH_RULES), BATCH.name)
ORDER = Rule(
    "pipelines of experts are pipelines",
    _order_holds,
    lambda request, at: (
        f"order {ORDERS[at.order]} is not possible with pp {at.pp}: megatron-core needs tp x cp = "
        f"{at.tp * at.cp} to be expert tp x ep = {at.expert_tp * at.ep}; "
        f"use {DEFAULT_ORDER}"
    ),
    after=_MESH_NAMES,
    field="parallel.order",
)
CANDIDATE_RULES: tuple[Rule, ...] = (
    BATCH,
    ORDER,
    Rule(
        "rows of low precision are aligned",
        lambda spec, at: (
            (_rows(spec, at) % low_alignment(spec) == 0)
            & (_own_rows(spec, at) % low_row_alignment(spec) == 0)
        ),
        _unaligned_rows_message,
        after=(*_MESH_NAMES, "cp divides seq"),
        field="batch.micro",
    ),
    Rule(
        "shards divide the replicas",
        lambda spec, at: at.dp * at.cp % np.where(at.shard_gpus > 0, at.shard_gpus, 1) == 0,
        lambda request, at: (
            f"shards of {at.shard_gpus} GPUs do not divide the {at.dp * at.cp} replicas (dp x cp)"
        ),
        after=_MESH_NAMES,
        field="optimizer.shard_gpus",
    ),
    Rule(
        # parallel_state.py: "Data parallel size should be divisible by partial DistOpt shard
        # factor", and the same of experts
        "instances divide the replicas",
        lambda spec, at: (
            (at.dp * at.cp % _instances(spec) == 0)
            & (
                (_experts(spec) == 0)
                | (at.dp * at.cp * at.tp // (at.ep * at.expert_tp) % _instances(spec) == 0)
            )
        ),
        lambda request, at: (
            f"{_instances(request.spec)} instances of the optimizer do not divide the "
            f"{at.dp * at.cp} replicas (dp x cp){', or those of experts' * bool(at.ep > 1)}"
        ),
        after=_MESH_NAMES,
        field="engine.megatron.num_distributed_optimizer_instances",
    ),
    Rule(
        # arguments.py: `context_parallel_size == prod(hierarchical_context_parallel_sizes)`
        "levels of context parallelism make up cp",
        lambda spec, at: at.cp == prod(_context_levels(spec) or (at.cp,)),
        lambda request, at: (
            f"cp {at.cp} is not the product of {_context_levels(request.spec)}: set "
            f"`parallel.cp: {prod(_context_levels(request.spec) or (1,))}`"
        ),
        field="engine.megatron.hierarchical_context_parallel_sizes",
    ),
    Rule(
        # TransformerEngine, context_parallel.py: "The number of attention heads needs to be
        # divisible by CP size" of the all-to-all
        "near ranks of cp divide the heads",
        lambda spec, at: (
            np.maximum(1, spec.model.key_value_heads // at.tp) % (_context_levels(spec) or (1,))[0]
            == 0
        ),
        lambda request, at: (
            f"{(_context_levels(request.spec) or (1,))[0]} near ranks of cp exchange heads, and do "
            f"not divide the {max(1, request.spec.model.key_value_heads // at.tp)} of keys on a "
            f"rank (kv_heads {request.spec.model.key_value_heads}, tp {at.tp})"
        ),
        after=_MESH_NAMES,
        field="engine.megatron.hierarchical_context_parallel_sizes",
    ),
    Rule(
        # deepspeed/runtime/pipe/engine.py: PipelineEngine asserts a stage below `gradients`,
        # because a pipeline accumulates over microbatches
        "gradients behind a pipeline are whole",
        lambda spec, at: (at.zero < 2) | (at.pp == 1),
        lambda request, at: f"ZeRO stage {at.zero} cannot be combined with pp {at.pp}: use pp 1",
        after=_MESH_NAMES,
        field="optimizer.zero",
    ),
    Rule(
        # what the trainer can (`trainable_deepspeed.untrainable_in_tensors`); a layout that a spec
        # gives may be planned all the same
        "ZeRO 3 of DeepSpeed divides no tensors",
        lambda spec, at: (
            (at.zero < 3)
            | (at.tp == 1)
            | spec.engine.abilities.stage3_with_tensors
            | (spec.parallel != "auto")
        ),
        lambda request, at: f"ZeRO stage {at.zero} of DeepSpeed is not trained with tp {at.tp}",
        after=_MESH_NAMES,
        field="parallel.tp",
    ),
)
RULES = (*MESH_RULES, *CANDIDATE_RULES)


def refusals(
    request: PlanRequest, layout: Candidate, rules: Sequence[Rule] = RULES
) -> list[Refusal]:
    """List the messages about one layout: one for each rule that it breaks."""
    return [
        Refusal(rule.message(request, layout), rule.field)
        for rule in broken_rules(request.spec, layout, rules)
    ]
