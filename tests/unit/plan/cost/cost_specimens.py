"""Cases with round numbers for the tests of the cost model, and cases drawn by chance.

`case()` is a small GPT on one GPU of a machine without losses: every share is 1, nothing overlaps
and nothing has an overhead, so that the seconds of a test can be worked out by hand.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from hpctrain.plan.cost.case import Case, Machine, Mesh, Shape, Software, stack

GIB = 2**30
NEVER = 1e30  # bytes/s or FLOP/s of something that shall cost nothing

# 8 layers, hidden 1024: dense GPT without grouped queries, gates or positions
SHAPE = Shape(
    layers=8,
    hidden=1024,
    seq=2048,
    vocab=51200,
    attention_blocks=8,
    heads=16,
    kv_heads=16,
    qk_dim=64,
    value_dim=64,
    mlp_blocks=8,
    ffn=4096,
    expert_hidden=1024,
)
MESH = Mesh(zero=1, layers_first=8, layers_middle=8, layers_last=8)
MACHINE = Machine(
    peak=1e15,
    peak_low=2e15,
    memory_bandwidth=1e12,
    nvlink_bandwidth=1e11,
    network_bandwidth=1e10,
    domain=8,
    product_efficiency=1.0,
    low_efficiency=1.0,
    flash_efficiency=1.0,
    batched_efficiency=1.0,
    memory_efficiency=1.0,
    nvlink_efficiency=1.0,
    network_efficiency=1.0,
    scan_efficiency=1.0,
    misaligned_cost=3.0,
)
SOFTWARE = Software(
    flash=1,
    flash_speed=1.0,
    softmax_passes=6.0,
    streaming=1.0,
    tp_overlap=0.0,
    dp_overlap=0.0,
    pp_overlap=0.0,
    ep_overlap=0.0,
    scatter_gather=0,
    layer_overhead=0.0,
    step_overhead=0.0,
)
RECORDS = ("shape", "mesh", "machine", "software")


def case(**changes: Any) -> Case:
    """The specimen with these fields of any of its records."""
    return changed(Case(SHAPE, MESH, MACHINE, SOFTWARE), **changes)


def changed(given: Case, **changes: Any) -> Case:
    """A case with other values of these fields, whichever record they belong to."""
    records, left = {}, dict(changes)
    for name in RECORDS:
        record = getattr(given, name)
        own = {key: left.pop(key) for key in list(left) if hasattr(record, key)}
        records[name] = replace(record, **own)
    assert not left, f"no record has {sorted(left)}"
    return Case(**records)


def only_products(**changes: Any) -> Case:
    """A case whose seconds are floating-point operations over 1e15 and nothing else."""
    free = dict(memory_bandwidth=NEVER, nvlink_bandwidth=NEVER, network_bandwidth=NEVER)
    return case(**free, **changes)


def pipeline(pp: int, layers: int, **changes: Any) -> Case:
    """A pipeline of equal stages."""
    each = layers / pp
    blocks = dict(layers=layers, attention_blocks=layers, mlp_blocks=layers)
    split = dict(layers_first=each, layers_middle=each, layers_last=each)
    return case(pp=pp, **blocks, **split, **changes)


def many(cases: list[Case]) -> Case:
    """The cases as one whose fields are arrays."""
    return Case(*(stack([getattr(one, name) for one in cases]) for name in RECORDS))


def drawn(seed: int, count: int) -> list[Case]:
    """Cases of all kinds: dense, experts, latent attention, pipelines, every ZeRO stage."""
    dice = random.Random(seed)
    return [_drawn(dice) for _ in range(count)]


def _drawn(dice: random.Random) -> Case:
    pp, each = dice.choice([1, 2, 4]), dice.choice([2, 4])
    tp, cp, dp = dice.choice([1, 2, 4]), dice.choice([1, 2]), dice.choice([2, 4, 16])
    found = pipeline(
        pp,
        pp * each,
        tp=tp,
        cp=cp,
        dp=dp,
        vpp=dice.choice([1, 2]) if pp > 1 else 1,
        micro_batch=dice.choice([1, 2]),
        accumulation=dice.choice([4, 8, 32]),
        sequence_parallel=dice.choice([0, 1]) if tp > 1 else 0,
        zero=dice.choice([0, 1, 2, 3]),
        recompute=dice.choice([0, 1, 2]),
        pipeline_outside=dice.choice([0, 1]),
        low=dice.choice([0, 1]),
        low_bytes=dice.choice([0.0, 2.0]),
        full_layers=dice.choice([0, 0, 1]),
        deferred_output=dice.choice([0, 2, 50]) if pp > 1 else 0,
        gradient_copy=dice.choice([0, 4]),
        offload=dice.choice([0, 0, 1]),
        hidden=dice.choice([1024, 4096]),
        gated=dice.choice([0, 1]),
        kv_heads=dice.choice([4, 16]),
        flash=dice.choice([0, 1]),
        tp_overlap=dice.choice([0.0, 0.4]),
        dp_overlap=dice.choice([0.0, 0.4]),
        pp_overlap=dice.choice([0.0, 0.4]),
        ep_overlap=dice.choice([0.0, 0.4]),
        layer_overhead=1e-4,
        step_overhead=1e-2,
        straggling=0.01,
        product_efficiency=0.7,
        tail_products=1e6,
    )
    extra = dice.choice([_with_experts, _with_latent_attention, lambda one, dice: one])
    return extra(found, dice)


def _with_experts(found: Case, dice: random.Random) -> Case:
    layers = found.shape.layers
    dense = dice.choice([0, 1])
    return changed(
        found,
        mlp_blocks=dense,
        dense_first=1,
        moe_blocks=layers - dense,
        experts=8,
        top_k=2,
        expert_ffn=1024,
        expert_hidden=found.shape.hidden,
        shared_ffn=dice.choice([0, 1024]),
        ep=dice.choice([1, 2]),
        etp=dice.choice([0, 0, 2]),
        shared_overlap=dice.choice([0, 1]),
        expert_overhead=1e-4,
        mtp_layers=dice.choice([0, 1]),
    )


def _with_latent_attention(found: Case, dice: random.Random) -> Case:
    rank = dice.choice([0, 384])
    return changed(found, mla=1, q_rank=rank, kv_rank=128, qk_dim=96, rope_dim=32, rope=1)
