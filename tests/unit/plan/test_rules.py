"""The table of layout rules: each refuses something, with the offending values in its message."""

from __future__ import annotations

from typing import Any

import pytest
from specimens import GPT_TINY, LLAMA7B, cluster, run_spec

from hpctrain.plan.divisors import common_divisors, divisors, multiples_around, nearest, or_list
from hpctrain.plan.mesh.candidate import candidate_of, settled
from hpctrain.plan.mesh.rules import RULES, broken_rules, refusals
from hpctrain.plan.request import PlanRequest
from hpctrain.spec.run import ParallelSpec, RunSpec

EXPERTS = {**LLAMA7B, "moe": dict(experts=8, top_k=2, ffn=510)}
SHARED = {**LLAMA7B, "moe": dict(experts=8, top_k=2, ffn=512, shared_ffn=510)}
NARROW = dict(GPT_TINY, hidden=64, heads=32, kv_heads=1, head_dim=2)
VIT = dict(family="vit", layers=4, hidden=192, heads=3, vocab=10, image=32, patch=4)
FSDP, DEEPSPEED, DDP = ({"name": name} for name in ("fsdp", "deepspeed", "ddp"))
BIASED = {**EXPERTS, "bias": True, "moe": dict(experts=8, top_k=2, ffn=512)}
PREDICTING = dict(GPT_TINY, positions="learned", mtp_layers=1)

# Rule -> spec, layout, and what its message has to contain.
BROKEN: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "engine has tp": (dict(engine=DDP), dict(tp=2), ["engine ddp has no tp", "tp` 2"]),
    "engine has pp": (dict(engine=FSDP), dict(pp=2), ["engine fsdp has no pp", "pp` 2"]),
    "engine has vpp": (dict(engine=DEEPSPEED), dict(pp=2, vpp=2), ["has no vpp", "vpp` 2"]),
    "engine has cp": (dict(model=VIT, engine=DDP), dict(cp=4), ["a vit, planned", "cp` 4"]),
    "engine has ep": (dict(engine=FSDP), dict(ep=2), ["engine fsdp has no ep", "ep` 2"]),
    "tp divides heads": (dict(model=LLAMA7B), dict(tp=3), ["heads 32", "tp 3", "2 or 4"]),
    "tp divides ffn": (
        dict(model={**LLAMA7B, "ffn": 11007}),
        dict(tp=2),
        ["ffn 11007", "tp 2", "nearest tp 1"],
    ),
    "tp divides moe.shared_ffn": (
        dict(model=SHARED),
        dict(tp=4, ep=2),
        ["moe.shared_ffn 510", "tp 4"],
    ),
    "tp fits kv_heads": (
        dict(model={**LLAMA7B, "heads": 24, "hidden": 3072, "kv_heads": 12}),
        dict(tp=8),
        ["kv_heads 12", "tp 8"],
    ),
    "tp divides QKV": (dict(model=NARROW), dict(tp=8), ["QKV width 68", "tp 8"]),
    "ep needs experts": (dict(model=LLAMA7B), dict(ep=2), ["ep 2", "experts"]),
    "ep divides experts": (dict(model=EXPERTS), dict(ep=3), ["experts 8", "ep 3", "2 or 4"]),
    "etp divides moe.ffn": (dict(model=EXPERTS), dict(tp=4), ["moe.ffn 510", "tp 4", "use ep"]),
    "experts without ep are split as tp": (
        dict(model=EXPERTS),
        dict(tp=2, etp=1),
        ["without ep", "etp 1", "tp 2"],
    ),
    "experts with biases are whole": (dict(model=BIASED), dict(tp=2), ["biases", "tp 2"]),
    "the flex dispatcher has several ranks": (
        dict(model=EXPERTS, engine={"megatron": {"moe_token_dispatcher_type": "flex"}}),
        dict(),
        ["flex", "use ep"],
    ),
    "experts need sequence_parallel": (
        dict(model=EXPERTS),
        dict(tp=2, ep=2, sequence_parallel=False),
        ["tp 2", "sequence_parallel"],
    ),
    "cp divides seq": (dict(model=GPT_TINY), dict(cp=3), ["seq 64", "2 x cp 3", "2 or 4"]),
    "tp divides the sequence": (
        dict(model={**GPT_TINY, "seq": 63}),
        dict(tp=4),
        ["63 tokens", "tp 4", "60 or 64"],
    ),
    "stages hold the layers": (dict(model=GPT_TINY), dict(pp=3), ["4 layers", "pp 3 = 3 chunks"]),
    "cp needs TransformerEngine": (
        dict(engine={"implementation": "local"}),
        dict(cp=2),
        ["cp 2", "local"],
    ),
    "norms over heads are split": (
        dict(model={**GPT_TINY, "kv_heads": 2, "attention": dict(qk_norm="width")}),
        dict(tp=4),
        ["tp 4", "qk_norm: width", "tp 2 at most"],
    ),
    "mtp_layers behind a pipeline": (dict(model=PREDICTING), dict(pp=2), ["mtp_layers", "pp 2"]),
    "widths of low precision are aligned": (
        dict(model={**GPT_TINY, "ffn": 544}, precision="fp8"),
        dict(tp=4),
        ["fp8", "multiples of 16", "ffn 544 is 136 on each of 4 ranks", "precision: bf16"],
    ),
    "userbuffers need sequence_parallel": (
        dict(engine={"megatron": {"tp_comm_overlap": True}}),
        dict(),
        ["tp_comm_overlap", "not tp 1"],
    ),
    "a deferred weight gradient needs a pipeline": (
        dict(engine={"megatron": {"defer_embedding_wgrad_compute": True}}),
        dict(),
        ["defer_embedding_wgrad_compute", "pp above 1"],
    ),
    "recomputed layers fit a chunk": (
        dict(recompute="full", recompute_layers=3),
        dict(pp=2),
        ["recompute_layers 3", "the 2 layers of a chunk with pp 2"],
    ),
    "offloaded activations have no pipeline": (
        dict(activation_offload_layers=2),
        dict(pp=2),
        ["activation_offload_layers", "pp 1, not 2"],
    ),
    "tp x cp x pp divides the GPUs": (
        dict(gpus=6),
        dict(tp=4),
        ["6 GPUs", "tp 4 x pp 1 = 4", "4 or 8"],
    ),
    "ep divides the ranks of a stage": (
        dict(model=EXPERTS, gpus=8),
        dict(ep=8, pp=2),
        ["ep 8", "tp x cp x dp 4", "2 or 4"],
    ),
    "micro x dp divides the batch": (
        dict(gpus=4, batch=6, micro=1),
        dict(),
        ["batch 6", "micro 1 x dp 4", "4 or 8"],
    ),
    "pipelines of experts are pipelines": (
        dict(gpus=8),
        dict(tp=2, pp=2, cp=2, order="tp-cp-ep-pp-dp"),
        ["order tp-cp-ep-pp-dp", "pp 2", "tp x cp = 4", "= 2"],
    ),
    "rows of low precision are aligned": (
        dict(model={**GPT_TINY, "seq": 40}, precision="fp8"),
        dict(),
        ["multiples of 16", "micro 1 x seq 40 / cp 1 are 40"],
    ),
    "shards divide the replicas": (
        dict(gpus=8, engine=FSDP, optimizer=dict(lr=1e-3, shard_gpus=3)),
        dict(),
        ["shards of 3", "8 replicas"],
    ),
    "instances divide the replicas": (
        dict(gpus=8, engine={"megatron": {"num_distributed_optimizer_instances": 3}}),
        dict(),
        ["3 instances", "8 replicas (dp x cp)"],
    ),
    "levels of context parallelism make up cp": (
        dict(gpus=8, engine={"megatron": {"hierarchical_context_parallel_sizes": (2, 2)}}),
        dict(cp=2),
        ["cp 2", "(2, 2)", "`parallel.cp: 4`"],
    ),
    "near ranks of cp divide the heads": (
        dict(
            model={**GPT_TINY, "kv_heads": 2},
            gpus=8,
            engine={"megatron": {"hierarchical_context_parallel_sizes": (4, 2)}},
        ),
        dict(cp=8),
        ["4 near ranks", "the 2 of keys", "kv_heads 2, tp 1"],
    ),
    "gradients behind a pipeline are whole": (
        dict(engine=DEEPSPEED, optimizer=dict(lr=1e-3, zero=2)),
        dict(pp=2),
        ["stage 2", "pp 2"],
    ),
    "ZeRO 3 of DeepSpeed divides no tensors": (
        dict(engine=DEEPSPEED, optimizer=dict(lr=1e-3, zero=3)),
        dict(tp=2),
        ["stage 3", "tp 2"],
    ),
}


def of_search(name: str, spec: dict[str, Any], parallel: ParallelSpec) -> RunSpec:
    """The spec with its layout, but for what only a search can meet."""
    made = run_spec(**{"gpus": 8, **spec})
    if name.startswith("ZeRO 3"):
        return made
    return made.model_copy(update={"parallel": parallel})


def test_every_rule_is_in_the_table_below() -> None:
    assert [rule.name for rule in RULES] == list(BROKEN)


@pytest.mark.parametrize("name", BROKEN)
def test_each_rule_refuses_a_layout_and_names_its_values(name: str) -> None:
    kept, axes, words = BROKEN[name]
    parallel = ParallelSpec.model_validate(axes)
    spec = of_search(name, kept, parallel)
    values = candidate_of(spec, settled(spec, parallel), spec.resources.gpus)
    (rule,) = [rule for rule in broken_rules(spec, values, RULES) if rule.name == name]
    message = rule.message(PlanRequest(spec, cluster()), values)
    assert message in refusals(PlanRequest(spec, cluster()), values)
    for word in words:
        assert word in message


def test_a_layout_without_faults_breaks_no_rule() -> None:
    parallel = ParallelSpec(tp=2, pp=2)
    spec = run_spec(gpus=8).model_copy(update={"parallel": parallel})
    assert refusals(PlanRequest(spec, cluster()), candidate_of(spec, parallel, 8)) == []


def test_a_rule_only_waits_for_rules_before_it() -> None:
    seen: set[str] = set()
    for rule in RULES:
        assert seen.issuperset(rule.after), rule.name
        seen.add(rule.name)


# -- Numbers that a refusal proposes instead ----------------------------------------------------


def test_divisors_are_complete_and_ascending() -> None:
    for number in range(1, 400):
        assert divisors(number) == tuple(
            part for part in range(1, number + 1) if number % part == 0
        )


def test_common_divisors() -> None:
    assert common_divisors(12, 18, 30) == (1, 2, 3, 6)


def test_nearest_leaves_out_the_value_itself() -> None:
    assert nearest(12, (1, 2, 4, 8, 12, 16, 32)) == (8, 16)
    assert nearest(1, (1, 2, 4)) == (2, 4)
    assert nearest(5, ()) == ()


def test_multiples_around() -> None:
    assert multiples_around(100, 8) == (96, 104)
    assert multiples_around(5, 8) == (8,)
    assert multiples_around(510, 8, limit=508) == (504,)
    assert multiples_around(96, 8) == (104,)


def test_or_list_reads_like_a_sentence() -> None:
    assert or_list([8]) == "8"
    assert or_list([8, 16]) == "8 or 16"
    assert or_list([4, 8, 16]) == "4, 8 or 16"
    assert or_list([]) == "none"
