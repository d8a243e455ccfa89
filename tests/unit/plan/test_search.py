"""The vectorised search against plain loops that share nothing with it but the price of a case."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
from planner_knowledge import knowledge_of
from specimens import GPT175B, GPT_TINY, LLAMA7B, LLAMA405B, cluster, run_spec

from hpctrain.plan.abilities.sharding import sharding_problems
from hpctrain.plan.abilities.trainable_deepspeed import untrainable_by_deepspeed
from hpctrain.plan.cost.from_spec import case_of
from hpctrain.plan.cost.memory import peak_bytes
from hpctrain.plan.cost.step import step_seconds
from hpctrain.plan.layout_words import ORDERS
from hpctrain.plan.mesh.candidate import Candidate, candidate_of, columns_of, module_bits, settled
from hpctrain.plan.mesh.rules import (
    CANDIDATE_RULES,
    MESH_RULES,
    broken_rules,
    refusals,
)
from hpctrain.plan.mesh.stages import spread_layers
from hpctrain.plan.planner import make_plan
from hpctrain.plan.request import PlanRequest
from hpctrain.plan.search.layouts import NEAR_TIE, Found, pareto, preferred, search
from hpctrain.plan.search.space import EMBEDDING_LOSS_AS_LAYERS, freedom_of
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.run import ParallelSpec, RunSpec

MOE = dict(
    family="llama",
    layers=6,
    hidden=256,
    ffn=1024,
    heads=8,
    kv_heads=4,
    vocab=1000,
    seq=128,
    moe=dict(experts=8, top_k=2, ffn=510, shared_ffn=512, dense_layers=1),
)
SMALL = {**LLAMA7B, "layers": 6, "hidden": 1024, "heads": 8, "ffn": 2816, "seq": 1024}
ODD = {**GPT_TINY, "heads": 6, "kv_heads": 2, "hidden": 96, "seq": 36}
SPECS: dict[str, dict[str, Any]] = {
    "dense": dict(model=SMALL, gpus=16, batch=24, micro="auto"),
    # heads 6 and kv_heads 2 with tp 4; 36 tokens with cp 4, and with cp 2 and tp 4
    "odd": dict(model={**ODD, "layers": 7}, gpus=24, batch=24),
    "experts": dict(model=MOE, gpus=8, batch=4, micro="auto"),
    "biased": dict(
        model={
            **MOE,
            "bias": True,
            "positions": "learned",
            "mtp_layers": 1,
            "moe": dict(experts=4, top_k=2, ffn=512),
        },
        gpus=8,
        batch=8,
    ),
    "local": dict(model=SMALL, gpus=8, batch=16, engine={"implementation": "local"}),
    # 24 tokens: tp 8 divides them, but not those of cp 2
    "fsdp": dict(
        model={**SMALL, "seq": 24}, gpus=16, batch=32, micro="auto", engine={"name": "fsdp"}
    ),
    "deepspeed": dict(model=SMALL, gpus=8, batch=32, engine={"name": "deepspeed"}),
    # key/value heads that tp 4 would have to copy, and a sequence that it does not divide
    "deepspeed, shared heads": dict(
        model={**SMALL, "kv_heads": 2, "seq": 1023},
        gpus=8,
        batch=16,
        engine={"name": "deepspeed"},
    ),
    "deepspeed, offloaded": dict(
        model=SMALL,
        gpus=8,
        batch=32,
        engine={"name": "deepspeed"},
        optimizer={"lr": 1e-3, "offload": "cpu"},
    ),
    "images": dict(
        model=dict(family="vit", layers=4, hidden=192, heads=3, vocab=10, image=32, patch=4),
        gpus=8,
        batch=64,
        engine={"name": "ddp"},
        micro="auto",
    ),
}

ENDS = dict(count_embedding=True, count_loss=True)
GPU = {"type": "a100", "per_node": 8, "reserved": "100MiB", "model": "A100-80GB SXM"}


def found_of(spec: RunSpec, profile: ClusterProfile) -> Found:
    request = PlanRequest(spec, profile, knowledge_of(profile))
    return search(request, freedom_of(request))


@cache
def named(name: str) -> tuple[RunSpec, Found]:
    """A spec of the table and its search on the usual cluster."""
    spec = run_spec(**SPECS[name])
    return spec, found_of(spec, cluster())


@cache
def loops(name: str) -> list[Candidate]:
    return by_loops(named(name)[0], cluster())


def parallels(spec: RunSpec) -> list[ParallelSpec]:
    """Every explicit layout that somebody could write, sizes 1 to 16."""
    sizes = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
    written = []
    for tp, pp, cp, ep, vpp in product(sizes, sizes, sizes, (1, 2, 4, 8), range(1, 9)):
        whole = spec.resources.gpus % (tp * pp * cp) == 0  # else `world_problems` has words
        if (vpp > 1 and pp == 1) or not whole or (ep > 1 and spec.model.moe is None):
            continue
        # ranks that split other layers may split experts that are spread over others
        splits = (2, 3, 4, 5, 6, 7, 8) if ep > 1 and spec.engine.abilities.splits_experts else ()
        for etp in (None, *(n for n in splits if n <= tp)):
            written.append(_split(spec, dict(tp=tp, pp=pp, cp=cp, ep=ep, vpp=vpp, etp=etp)))
    return [settled(spec, parallel) for parallel in written if parallel is not None]


def can_be_trained(spec: RunSpec) -> bool:
    assert spec.parallel != "auto"
    if spec.engine.name == "fsdp":
        return spec.parallel.tp == spec.parallel.cp == 1
    return not any(untrainable_by_deepspeed(spec))


def _split(spec: RunSpec, axes: dict[str, Any]) -> ParallelSpec | None:
    """The first way of splitting the layers, in words of the spec."""
    layers, chunks = spec.model.layers, axes["pp"] * axes["vpp"]
    for first, last in EMBEDDING_LOSS_AS_LAYERS:
        if (layers + first + last) % chunks == 0:
            return ParallelSpec(**axes, count_embedding=first, count_loss=last)
    if axes["vpp"] > 1 or axes["pp"] > layers:
        return None
    return ParallelSpec(**axes, stages=spread_layers(layers, axes["pp"]))


def by_loops(spec: RunSpec, profile: ClusterProfile) -> list[Candidate]:
    """All candidates, one at a time."""
    found: list[Candidate] = []
    gpus, batch = spec.resources.gpus, spec.batch.global_
    micros = [2**n for n in range(12) if batch % 2**n == 0]
    for parallel in parallels(spec):
        one = candidate_of(spec, parallel, gpus)
        fixed = spec.model_copy(update={"parallel": parallel})
        if broken_rules(spec, one, MESH_RULES):
            continue
        if spec.engine.name in ("deepspeed", "fsdp") and not can_be_trained(fixed):
            continue
        for micro in micros if spec.batch.micro == "auto" else [spec.batch.micro]:
            found += _details(spec, replace(one, micro_batch=micro))
    return found


def _details(spec: RunSpec, one: Candidate) -> list[Candidate]:
    engine, optimizer = spec.engine.name, spec.optimizer
    zeros = {"megatron": (1,), "fsdp": (2, 3), "deepspeed": (1, 2, 3), "ddp": (0,)}[engine]
    offloads = (False, True) if optimizer.offload != "none" else (False,)
    shards = (0, 8) if engine == "fsdp" and one.gpus > 8 else (0,)
    orders = range(len(ORDERS)) if one.pp > 1 and one.dp > 1 else (0,)
    made = []
    # engines of PyTorch modules recompute whole blocks or nothing
    recomputes: list[dict[str, int]] = [dict(recompute=0), dict(recompute=2)]
    if engine == "megatron":
        chunk = max(one.split)
        some = sorted({quarter * chunk // 4 for quarter in (1, 2, 3)} - {0, chunk})
        dense = spec.model.moe is None or spec.model.moe.dense_layers > 0
        recomputes += [dict(recompute=2, recompute_layers=layers) for layers in some]
        for module in ("core_attn", "mlp" if dense else "moe"):
            recomputes.append(dict(recompute=1, recompute_modules=module_bits([module])))
    for zero, shard, order in product(zeros, shards, orders):
        other = replace(one, zero=zero, shard_gpus=shard, order=order)
        if broken_rules(spec, other, CANDIDATE_RULES):
            continue
        made += [
            replace(other, offload=int(offload), **how)
            for offload, how in product(offloads, recomputes)
        ]
    return made


def key(candidate: Candidate) -> tuple[Any, ...]:
    parallel = candidate.parallel
    return (
        *(parallel.tp, parallel.pp, parallel.cp, parallel.ep, parallel.vpp, candidate.layout.order),
        *(parallel.count_embedding, parallel.count_loss, candidate.split, candidate.micro_batch),
        *(candidate.layout.etp, candidate.recompute_modules, candidate.recompute_layers),
        *(candidate.recompute, candidate.zero, candidate.shard_gpus, candidate.offload),
    )


@pytest.mark.parametrize("name", SPECS)
def test_the_search_finds_exactly_the_layouts_of_a_plain_loop(name: str) -> None:
    _, found = named(name)
    searched = [key(found.candidate(row)) for row in range(len(found.columns))]
    assert len(set(searched)) == len(searched)
    assert set(searched) == {key(candidate) for candidate in loops(name)}


@pytest.mark.parametrize("name", SPECS)
def test_columns_say_what_the_candidate_is(name: str) -> None:
    """A row is the same as the table of the candidate that it stands for."""
    _, found = named(name)
    for row in range(0, len(found.columns), 5):
        one = columns_of(found.candidate(row))
        for field in (
            "layers_first",
            "layers_middle",
            "layers_last",
            "accumulation",
            "dp",
            "zero",
            "order",
            "etp",
            "recompute",
            "recompute_modules",
            "recompute_layers",
        ):
            assert getattr(one, field)[0] == getattr(found.columns, field)[row], field


@pytest.mark.parametrize(
    ("name", "memory"),
    [
        pytest.param("dense", "1GiB", marks=pytest.mark.variant),  # minutes of pricing one by one
        pytest.param("experts", "80GiB", marks=pytest.mark.variant),
        ("local", "1GiB"),
        ("deepspeed", "1GiB"),
    ],
)
def test_the_winner_is_the_optimum_of_a_plain_loop(name: str, memory: str) -> None:
    spec = run_spec(**SPECS[name])
    profile = cluster(gpu={**GPU, "memory": memory})
    known = knowledge_of(profile)
    best, fitting, feasible = np.inf, 0, 0
    for candidate in loops(name):
        case = case_of(PlanRequest(spec, profile, known), columns_of(candidate))
        feasible += 1
        share = float(peak_bytes(case)[0]) / int(profile.gpu.memory)
        fitting += share <= 1
        if share <= 0.94:
            best = min(best, float(np.ravel(step_seconds(case).total)[0]))
    found = found_of(spec, profile)
    counts = found.counts
    assert (counts.fitting, counts.fitting + counts.too_large) == (fitting, feasible)
    assert counts.enumerated == counts.infeasible + counts.too_large + counts.fitting
    row = int(preferred(found)[0])
    assert found.step_seconds[row] <= (1 + NEAR_TIE) * best
    assert float(np.nanmin(found.step_seconds[found.roomy])) == pytest.approx(best, rel=1e-12)


def test_near_ties_go_to_the_simpler_layout() -> None:
    _, found = named("dense")
    row = int(preferred(found)[0])
    fastest = float(np.nanmin(found.step_seconds[found.roomy]))
    near = np.flatnonzero(found.roomy & (found.step_seconds <= (1 + NEAR_TIE) * fastest))
    axes = [
        sum(int(getattr(found.columns, name)[one]) > 1 for name in ("tp", "pp", "cp", "ep", "vpp"))
        for one in near
    ]
    own = sum(int(getattr(found.columns, n)[row]) > 1 for n in ("tp", "pp", "cp", "ep", "vpp"))
    assert row in near and own == min(axes)


def test_the_winner_of_a_large_model_is_within_a_near_tie_of_the_fastest() -> None:
    spec = run_spec(GPT175B, gpus=128, batch=256, micro="auto")
    found = found_of(spec, cluster())
    fastest = float(np.nanmin(found.step_seconds[found.roomy]))
    assert fastest <= found.step_seconds[preferred(found)[0]] <= (1 + NEAR_TIE) * fastest


def test_the_order_of_preference_is_by_time_behind_the_near_ties() -> None:
    _, found = named("dense")
    seconds = found.step_seconds[preferred(found)]
    later = seconds[seconds > (1 + NEAR_TIE) * seconds.min()]
    assert len(later) and np.all(np.diff(later) >= 0)


def test_by_memory_takes_the_leanest_and_of_equals_the_fastest() -> None:
    _, found = named("dense")
    row = int(preferred(found, "memory")[0])
    bound = found.peak_bytes.min() + 0.01 * found.capacity_bytes
    near = found.peak_bytes <= bound
    assert found.peak_bytes[row] <= bound
    assert found.step_seconds[row] == found.step_seconds[near].min()


@pytest.mark.parametrize("name", ["dense", "experts"])
def test_nothing_beats_a_point_of_the_front_and_every_other_is_beaten(name: str) -> None:
    _, found = named(name)
    front = {int(row) for row in pareto(found)}
    seconds, peaks = found.step_seconds, found.peak_bytes
    rows = np.flatnonzero(found.fits)
    assert 1 < len(front) < len(rows) and front <= set(rows.tolist())
    fronted = {(seconds[row], peaks[row]) for row in front}
    for row in rows:
        no_worse = (seconds[rows] <= seconds[row]) & (peaks[rows] <= peaks[row])
        better = no_worse & ((seconds[rows] < seconds[row]) | (peaks[rows] < peaks[row]))
        # of several with the same time and memory one is on the front
        assert ((seconds[row], peaks[row]) in fronted) != better.any()


@pytest.mark.parametrize(
    ("layers", "pp", "stages"),
    [
        (61, 16, (3, *(4,) * 13, 4 - 1, 3)),
        (7, 2, (4, 3)),
        (7, 3, (2, 3, 2)),
        (8, 3, (3, 3, 2)),
        (5, 5, (1,) * 5),
    ],
)
def test_uneven_stages_spare_the_ends(layers: int, pp: int, stages: tuple[int, ...]) -> None:
    assert spread_layers(layers, pp) == stages
    assert sum(stages) == layers


def test_what_the_spec_fixes_is_fixed() -> None:
    parallel = dict(tp=2, pp=2, order="tp-cp-ep-pp-dp", sequence_parallel=False)
    spec = run_spec(SMALL, gpus=16, batch=32, micro=2, recompute="full", parallel=parallel)
    columns = found_of(spec, cluster()).columns
    assert len(columns) == 1
    assert (columns.tp[0], columns.pp[0], columns.micro_batch[0], columns.recompute[0]) == (
        *(2, 2),
        *(2, 2),
    )
    assert columns.order[0] == 1 and columns.sequence_parallel[0] == 0


def test_experts_with_tensor_but_without_sequence_parallelism_are_impossible() -> None:
    parallel = dict(tp=2, ep=2, sequence_parallel=False)
    spec = run_spec(MOE, gpus=8, parallel=parallel)
    assert isinstance(spec.parallel, ParallelSpec)
    assert refusals(PlanRequest(spec, cluster()), candidate_of(spec, spec.parallel, 8)) == [
        "experts with tp 2 need sequence_parallel"
    ]
    assert len(found_of(spec, cluster()).columns) == 0


def test_a_layout_that_just_fits_is_taken_only_when_no_other_leaves_room() -> None:
    spec, found = named("dense")
    best = int(preferred(found)[0])
    # the search above was on a cluster that reserves 2 GiB
    capacity = int((found.peak_bytes[best] - 2 * 2**30 + 100 * 2**20) / 0.97)
    narrow = found_of(spec, cluster(gpu={**GPU, "memory": f"{capacity}B"}))
    row = int(preferred(narrow)[0])
    assert narrow.fits[best] and not narrow.roomy[best]
    assert narrow.peak_bytes[row] <= 0.94 * capacity
    assert narrow.step_seconds[row] >= narrow.step_seconds[best]
    least = int((found.peak_bytes.min() - 2 * 2**30 + 100 * 2**20) / 0.97)
    narrow = found_of(spec, cluster(gpu={**GPU, "memory": f"{least}B"}))
    assert len(preferred(narrow)) and narrow.counts.tight == narrow.counts.fitting > 0


def test_only_the_engine_of_the_spec_decides_about_axes() -> None:
    spec = run_spec(SMALL, gpus=8, engine={"name": "fsdp"}, parallel=dict(pp=2, ep=2))
    assert isinstance(spec.parallel, ParallelSpec)
    lines = refusals(PlanRequest(spec, cluster()), candidate_of(spec, spec.parallel, 8))
    assert [line.split(":")[0] for line in lines][:2] == [
        "engine fsdp has no pp",
        "engine fsdp has no ep",
    ]


@pytest.mark.parametrize(
    ("engine", "optimizer", "words"),
    [
        ("megatron", dict(zero=3), ["no ZeRO stage 3", "0 or 1", "fsdp or deepspeed"]),
        ("fsdp", dict(zero=1), ["no ZeRO stage 1", "2 or 3", "megatron-lm or deepspeed"]),
        ("ddp", dict(offload="cpu"), ["engine ddp", "offload: cpu"]),
        ("megatron", dict(shard_gpus=4), ["shard_gpus is for engine fsdp"]),
        ("megatron", dict(zero=0, distributed=True), ["zero 0 contradicts"]),
    ],
)
def test_what_an_engine_does_not_have_is_said(
    engine: str, optimizer: dict[str, Any], words: list[str]
) -> None:
    spec = run_spec(SMALL, gpus=8, engine={"name": engine}, optimizer={"lr": 1e-3, **optimizer})
    (line,) = sharding_problems(spec)
    for word in words:
        assert word in line


def priced(model: dict[str, Any], gpus: int, layout: dict[str, Any]) -> float:
    """Seconds of a step of an explicit layout on 64 nodes, recomputing as the planner likes."""
    spec = run_spec(model, gpus=gpus, batch=1536, micro="auto", parallel=layout)
    profile = cluster()
    seconds = make_plan(spec, profile, knowledge_of(profile)).step_seconds
    assert seconds is not None
    return seconds


@pytest.mark.parametrize(
    ("model", "gpus", "odd", "usual"),
    [
        # tensors over two nodes; 128 stages, the first with nothing but the embedding
        (GPT175B, 512, dict(tp=16, pp=8), dict(tp=8, pp=8)),
        (LLAMA405B, 512, dict(tp=4, pp=128, **ENDS), dict(tp=8, pp=32, **ENDS)),
    ],
)
def test_ends_that_nobody_runs_have_their_price(
    model: dict[str, Any], gpus: int, odd: dict[str, Any], usual: dict[str, Any]
) -> None:
    assert priced(model, gpus, odd) > 1.02 * priced(model, gpus, usual)


def test_experts_may_be_split_over_the_ranks_that_split_other_layers() -> None:
    columns = named("experts")[1].columns
    split = columns.etp > 0
    assert split.any() and (columns.ep[split] > 1).all()
    assert (columns.etp[split] <= columns.tp[split]).all()
    assert not named("dense")[1].columns.etp.any()
