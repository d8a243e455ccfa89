"""The vectorised search against plain loops that share nothing with it but the price of a case."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
from planner_knowledge import knowledge_of
from pydantic import ValidationError
from specimens import GPT175B, GPT_TINY, LLAMA7B, LLAMA405B, cluster, run_spec

from hpctrain.base.errors import DoesNotFitError
from hpctrain.base.units import ByteSize
from hpctrain.engines.megatron import megatron_config
from hpctrain.job.plan_text import plan_lines
from hpctrain.plan.abilities.sharding import sharding_problems
from hpctrain.plan.abilities.trainable_deepspeed import untrainable_by_deepspeed
from hpctrain.plan.cost.from_spec import case_of, software_of
from hpctrain.plan.cost.memory import peak_bytes
from hpctrain.plan.cost.prediction import crossed_islands, predict, shown_seconds, uplink_seconds
from hpctrain.plan.cost.step import step_seconds
from hpctrain.plan.documents import Plan
from hpctrain.plan.job import TrainingJob
from hpctrain.plan.layout_words import ORDERS
from hpctrain.plan.mesh.candidate import (
    MODULES,
    Candidate,
    candidate_of,
    columns_of,
    module_bits,
    modules_of,
    recomputations,
    recompute_words,
    settled,
)
from hpctrain.plan.mesh.rules import CANDIDATE_RULES, MESH_RULES, broken_rules, refusals
from hpctrain.plan.mesh.stages import spread_layers
from hpctrain.plan.model.parameters import total_parameters
from hpctrain.plan.planner import decide, make_plan
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
        ("fsdp", dict(kind="muon"), ["has no `optimizer.kind: muon`", "megatron-lm or ddp"]),
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


# -- Islands ------------------------------------------------------------------------------------


EIGHT_LAYERS = {**LLAMA7B, "layers": 8, "hidden": 1024, "heads": 8, "ffn": 2816, "seq": 1024}


def halls(uplink: str, nodes: int = 2) -> ClusterProfile:
    """Two halls of `nodes` nodes each."""
    islands = [{"nodes": nodes, "uplink": uplink} for _ in range(2)]
    network = {"fabric": "infiniband", "nics_per_node": 8, "nic_bandwidth": "200Gb/s"}
    return cluster(nodes=2 * nodes, network={**network, "islands": islands})


def test_one_island_adds_nothing() -> None:
    assert crossed_islands(16, halls("10Gb/s")) == ()
    assert len(crossed_islands(32, halls("10Gb/s"))) == 2
    assert crossed_islands(32, cluster()) == ()


def test_the_ring_of_all_gradients_crosses_once() -> None:
    spec = run_spec(EIGHT_LAYERS, gpus=32, batch=32)
    one = candidate_of(spec, ParallelSpec(), 32)
    gradients, activations = uplink_seconds(
        PlanRequest(spec, halls("100Gb/s")),
        columns_of(one),
        crossed_islands(32, halls("100Gb/s")),
    )
    # ZeRO-1: 4 bytes reduced and 2 gathered of every parameter, 31 / 32 of it over each link of
    # the one ring; 100 Gb/s are 12.5e9 bytes/s
    expected = 6 * total_parameters(spec.model) * 31 / 32 / 12.5e9
    assert gradients[0] == pytest.approx(expected, rel=0.01)  # the padded vocabulary
    assert activations[0] == 0


def test_pipelines_across_the_border_send_activations_instead() -> None:
    spec = run_spec(EIGHT_LAYERS, gpus=32, batch=32)
    parallel = ParallelSpec(pp=2, order="tp-cp-ep-dp-pp")
    one = candidate_of(spec, parallel, 32)
    gradients, activations = uplink_seconds(
        PlanRequest(spec, halls("100Gb/s")),
        columns_of(one),
        crossed_islands(32, halls("100Gb/s")),
    )
    # 16 pipelines with 2 microbatches each: an activation forth, over each direction of the link
    assert activations[0] == pytest.approx(16 * 2 * 2 * 1024 * 1024 / 12.5e9)
    assert gradients[0] == 0


def test_no_step_is_shorter_than_its_uplink_is_busy() -> None:
    spec = run_spec(EIGHT_LAYERS, gpus=32, batch=32)
    columns = columns_of(candidate_of(spec, ParallelSpec(), 32))
    software = software_of(knowledge_of(cluster()).calibration.software["megatron-core"])
    step, none = np.array([1.0]), np.array([0.0])

    def shown(gradients: float, activations: float, charged: float = 0.0) -> float:
        loads, data = (np.array([gradients]), np.array([activations])), none + charged
        return float(shown_seconds(columns, software, step, data, loads)[0])

    assert shown(0, 0) == 0
    assert shown(0.5 * software.dp_overlap, 0) == 0  # behind the only microbatch
    assert shown(10, 0) == pytest.approx(10 - software.dp_overlap)
    # what the cost model has for the same messages counts once
    overlap = software.dp_overlap
    assert shown(overlap + 0.5, 0, charged=0.2) == pytest.approx(max(0.3, overlap - 0.5))
    assert 1 + shown(0, 100) >= 100
    # between whole passes of a stage nothing hides
    assert shown(0, 0.5) == pytest.approx(0.5)
    columns = columns_of(candidate_of(spec, ParallelSpec(pp=2, vpp=2), 32))
    assert shown(0, 0.5) == pytest.approx(0.5 * (1 - software.pp_overlap))


@pytest.mark.parametrize("uplink", ["400Gb/s", "10Gb/s"])
def test_the_search_prices_islands_as_the_plan_does(uplink: str) -> None:
    profile = halls(uplink)
    known = knowledge_of(profile)
    spec = run_spec(EIGHT_LAYERS, gpus=32, batch=64, micro="auto", recompute="none")
    request = PlanRequest(spec, profile, known)
    found = search(request, freedom_of(request))
    for row in range(0, len(found.columns), 29):
        prediction = predict(PlanRequest(spec, profile, known), found.candidate(row))
        assert prediction is not None
        assert prediction.parts.total_seconds == pytest.approx(found.step_seconds[row])


def test_a_slow_link_costs_time_and_changes_the_layout() -> None:
    spec = run_spec(EIGHT_LAYERS, gpus=32, batch=64, micro="auto", recompute="none")
    plans = []
    for uplink in ("1600Gb/s", "100Gb/s", "1Gb/s"):
        profile = halls(uplink)
        plans.append(make_plan(spec, profile, knowledge_of(profile)))
    seconds = [plan.step_seconds for plan in plans]
    assert seconds == sorted(seconds) and seconds[0] < 0.5 * seconds[2]
    assert plans[0].layout != plans[2].layout
    assert all(plan.prediction and plan.prediction.parts.islands_seconds >= 0 for plan in plans)


@pytest.mark.parametrize("parallel", ["auto", dict(pp=2, count_loss=True), dict(pp=2)])
def test_order_and_split_of_a_plan_on_islands(parallel: Any) -> None:
    model = (
        {**EIGHT_LAYERS, "layers": 7}
        if isinstance(parallel, dict) and len(parallel) > 1
        else EIGHT_LAYERS
    )
    profile = halls("10Gb/s")
    spec = run_spec(model, gpus=32, batch=64, micro="auto", parallel=parallel)
    decision = decide(PlanRequest(spec, profile, knowledge_of(profile)))
    row = decision.row
    assert decision.plan.step_seconds == pytest.approx(decision.found.step_seconds[row])
    assert decision.plan.layout.order == decision.found.candidate(row).layout.order


# -- Ways to compute activations again: which are tried, their words, what the engine gets ------


A100_RESERVED = {"type": "a100", "per_node": 8, "model": "A100-80GB SXM", "reserved": "1GiB"}
MODES = ("none", "selective", "full")
EXPERTS = {**GPT_TINY, "bias": False, "moe": dict(experts=4, top_k=2, ffn=512)}


def planned(memory: str, **others: Any) -> tuple[RunSpec, Plan]:
    """LLaMA-7B on 8 GPUs without model parallelism, with so much memory each."""
    spec = run_spec(LLAMA7B, gpus=8, batch=64, parallel=dict(tp=1), **others)
    profile = cluster(gpu={**A100_RESERVED, "memory": memory})
    return spec, make_plan(spec, profile, knowledge_of(profile))


def test_modules_are_bits_in_megatrons_order() -> None:
    assert module_bits(["core_attn"]) == 1 and module_bits(["mlp", "core_attn"]) == 3
    assert modules_of(3) == ("core_attn", "mlp")
    assert modules_of(module_bits(MODULES)) == MODULES


@pytest.mark.parametrize(
    ("way", "words"),
    [
        (("none", ("core_attn",), None), "none"),
        (("selective", ("core_attn",), None), "selective"),
        (("selective", ("mlp", "layernorm"), None), "selective (mlp, layernorm)"),
        (("full", ("mlp",), None), "full"),
        (("full", ("core_attn",), 1), "full of 1 layer a chunk"),
        (("full", ("core_attn",), 3), "full of 3 layers a chunk"),
    ],
)
def test_words(way: tuple[Any, ...], words: str) -> None:
    assert recompute_words(*way) == words


def test_what_is_tried() -> None:
    free = recomputations(run_spec(), MODES)
    assert [(MODES[one.mode], modules_of(one.modules), one.quarters) for one in free] == [
        ("none", ("core_attn",), 0),
        ("selective", ("core_attn",), 0),
        ("full", ("core_attn",), 0),
        ("selective", ("mlp",), 0),
        *(("full", ("core_attn",), quarters) for quarters in (1, 2, 3)),
    ]


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        (dict(recompute="full"), 3),  # the modes given here, and nothing of them
        (dict(recompute_modules=["layernorm"]), 3 + 3),  # modules are given, layers are free
        (dict(model=EXPERTS), 4 + 3),
    ],
)
def test_what_the_spec_says_is_fixed(others: dict[str, Any], expected: int) -> None:
    assert len(recomputations(run_spec(**others), MODES)) == expected


def test_experts_are_computed_again_where_all_layers_have_them() -> None:
    sets = {modules_of(one.modules) for one in recomputations(run_spec(EXPERTS), MODES)}
    assert sets == {("core_attn",), ("moe",)}
    some = {**EXPERTS, "moe": {**EXPERTS["moe"], "dense_layers": 1}}
    sets = {modules_of(one.modules) for one in recomputations(run_spec(some), MODES)}
    assert sets == {("core_attn",), ("mlp",)}


def test_engines_that_cannot_count_layers_recompute_all_of_them() -> None:
    ways = recomputations(run_spec(engine={"name": "fsdp"}), ("none", "full"))
    assert [one.quarters for one in ways] == [0, 0]


def test_less_memory_takes_more_recomputation() -> None:
    """Each plan is the fastest that fits: none, MLPs, some layers, all layers."""
    found = [planned(memory)[1] for memory in ("80GiB", "68GiB", "63GiB", "56GiB")]
    ways = [(plan.recompute, plan.recompute_modules, plan.recompute_layers) for plan in found]
    assert ways[0] == ("none", ("core_attn",), None)
    assert ways[-1] == ("full", ("core_attn",), None)
    between = ways[1:-1]
    assert all(way[1] == ("mlp",) or way[2] is not None for way in between)
    seconds = [plan.step_seconds for plan in found]
    assert seconds == sorted(seconds) and seconds[0] < seconds[-1]  # type: ignore[type-var, operator]


@pytest.mark.parametrize("memory", ["80GiB", "68GiB", "63GiB", "56GiB"])
def test_the_engine_gets_what_was_planned(memory: str) -> None:
    spec, plan = planned(memory)
    config = megatron_config(TrainingJob(spec, cluster(), plan))
    assert config.recompute_granularity == (None if plan.recompute == "none" else plan.recompute)
    assert config.recompute_modules == plan.recompute_modules
    assert config.recompute_num_layers == plan.recompute_layers


def test_a_given_number_of_layers_stays() -> None:
    plan = planned("80GiB", recompute="full", recompute_layers=5)[1]
    assert plan.recompute_layers == 5
    assert any("full of 5 layers a chunk saves" in reason for reason in plan.reasons)
    whole = planned("80GiB", recompute="full")[1]
    assert plan.prediction is not None and whole.prediction is not None
    ratio = plan.prediction.mfu / plan.prediction.hfu, whole.prediction.mfu / whole.prediction.hfu
    # 5 of 32 layers are computed again
    assert 1 / ratio[0] - 1 == pytest.approx(5 / 32 * (1 / ratio[1] - 1))


TE = {"name": "megatron", "implementation": "transformer_engine"}


def offloading(memory: str, host_gib: int = 1024, **others: Any) -> tuple[RunSpec, Plan]:
    """The same with activations that may wait on the host."""
    settings = dict(activation_offload_layers="auto", recompute="none", engine=TE, **others)
    spec = run_spec(LLAMA7B, gpus=8, batch=64, parallel=dict(tp=1), **settings)
    profile = cluster(gpu={**A100_RESERVED, "memory": memory})
    nodes = profile.nodes.model_copy(update={"memory": ByteSize(host_gib * 2**30)})
    profile = profile.model_copy(update={"nodes": nodes})
    return spec, make_plan(spec, profile, knowledge_of(profile))


def test_the_planner_offloads_activations_where_it_has_to() -> None:
    assert offloading("80GiB")[1].activation_offload_layers == 0
    spec, plan = offloading("60GiB")
    assert plan.activation_offload_layers in (8, 16, 24)
    assert plan.recompute == "none" and plan.memory[0].total_bytes <= 60 * 2**30
    assert any("layers keep their activations in the host's memory" in r for r in plan.reasons)
    config = megatron_config(TrainingJob(spec, cluster(), plan))
    assert config.cpu_offloading_num_layers == plan.activation_offload_layers


def test_it_offloads_no_more_than_a_host_has() -> None:
    with pytest.raises(DoesNotFitError):
        offloading("60GiB", host_gib=32)


def test_it_offloads_nothing_behind_a_pipeline_or_beside_recomputation() -> None:
    settings = dict(activation_offload_layers="auto", engine=TE, micro="auto")
    spec = run_spec(LLAMA7B, gpus=8, batch=64, **settings)
    profile = cluster(gpu={**A100_RESERVED, "memory": "80GiB"})
    request = PlanRequest(spec, profile, knowledge_of(profile))
    columns = search(request, freedom_of(request)).columns
    away = columns.offloaded_layers > 0
    assert away.any()
    assert (columns.pp[away] == 1).all() and (columns.recompute[away] == 0).all()
    assert sorted(set(columns.offloaded_layers.tolist())) == [0, 8, 16, 24]


def test_only_an_engine_that_offloads_may_be_told_to() -> None:
    with pytest.raises(ValidationError, match="keeps activations on the GPU"):
        run_spec(activation_offload_layers="auto", engine={"name": "fsdp"})
    with pytest.raises(ValidationError, match="offloaded by TransformerEngine"):
        run_spec(activation_offload_layers="auto", engine={**TE, "implementation": "local"})


def test_the_plan_names_what_is_computed_again_and_what_waits_on_the_host() -> None:
    lines = "\n".join(plan_lines(planned("80GiB", recompute="full", recompute_layers=5)[1]))
    assert "recompute full of 5 layers a chunk" in " ".join(lines.replace("\xa0", " ").split())
    lines = "\n".join(plan_lines(offloading("60GiB")[1]))
    assert "layers on the host" in " ".join(lines.replace("\xa0", " ").split())


@pytest.mark.parametrize("zero", [2, 3])
def test_zero_stages_beside_context_parallelism(zero: int) -> None:
    """FSDP shards over dp x cp; engines without either say so by name."""
    spec = dict(
        gpus=64, batch=64, parallel=dict(cp=4), optimizer={"lr": 1e-3, "zero": zero}, micro=1
    )
    profile = cluster(gpu={**A100_RESERVED, "memory": "80GiB"})
    plan = make_plan(
        run_spec({**LLAMA7B, "seq": 32768}, engine={"name": "fsdp"}, **spec),
        profile,
        knowledge_of(profile),
    )
    assert (plan.zero, plan.layout.cp, plan.layout.dp) == (zero, 4, 16)
    # 6.7 G parameters: main copy and moments in 12 bytes, over 64 ranks
    assert plan.memory[0].optimizer_bytes == pytest.approx(12 * plan.parameters / 64, rel=0.01)
    weights = 2 * plan.parameters / (64 if zero == 3 else 1)
    assert plan.memory[0].weights_bytes == pytest.approx(weights, rel=0.01)
    for engine, words in (("deepspeed", "has no cp"), ("megatron", f"no ZeRO stage {zero}")):
        with pytest.raises(DoesNotFitError, match=words):
            make_plan(run_spec(LLAMA7B, engine={"name": engine}, **spec), profile)
