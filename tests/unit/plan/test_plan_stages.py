from __future__ import annotations

import pytest
from specimens import GPT_TINY, cluster, run_spec

from hpctrain.plan.mesh.candidate import candidate_of, layout_of
from hpctrain.plan.mesh.rules import MESH_RULES, broken_rules
from hpctrain.plan.mesh.stages import (
    build_stages,
    split_layers,
    stage_expert_parameters,
    stage_layers,
)
from hpctrain.plan.model.parameters import (
    expert_parameters,
    layer_parameters,
    pad_vocab,
    total_parameters,
)
from hpctrain.plan.request import PlanRequest
from hpctrain.spec.run import ModelSpec, ParallelSpec


def chunks(layers: int, **parallel: object) -> list[tuple[int, ...]]:
    wanted = ParallelSpec.model_validate(parallel)
    model = ModelSpec.model_validate({**GPT_TINY, "layers": layers})
    layout = layout_of(wanted, wanted.tp * wanted.pp)
    return [
        stage.chunk_layers for stage in build_stages(model, layout, split_layers(layers, wanted))
    ]


def test_even_split() -> None:
    assert chunks(8, pp=4) == [(2,), (2,), (2,), (2,)]
    assert chunks(8, pp=2, vpp=2) == [(2, 2), (2, 2)]


def test_counted_embedding_and_loss_take_the_place_of_a_layer() -> None:
    # 126 + 2 = 128 layers over 16 x 4 chunks of 2: the first and the last chunk have one layer
    split = chunks(126, pp=16, vpp=4, count_embedding=True, count_loss=True)
    assert split[0] == (1, 2, 2, 2)
    assert split[1:15] == [(2, 2, 2, 2)] * 14
    assert split[15] == (2, 2, 2, 1)


def test_listed_stages_are_in_model_order() -> None:
    # virtual stage n is chunk n div pp of pipeline stage n mod pp
    assert chunks(10, pp=2, vpp=2, stages=(1, 2, 3, 4)) == [(1, 3), (2, 4)]


@pytest.mark.parametrize(
    ("layers", "parallel", "words"),
    [
        (126, dict(pp=16), ["126 layers", "pp 16", "14 or 18", "count_embedding and count_loss"]),
        (126, dict(pp=16, vpp=4), ["64 chunks", "42 or 63"]),
        (7, dict(pp=2), ["7 layers", "1 or 7", "one of count_embedding and count_loss"]),
        (10, dict(pp=4, count_loss=True), ["11 layers", "counted as asked", "1 or 11"]),
        (13, dict(pp=8), ["13 layers", "`stages`"]),
        (8, dict(pp=2, stages=(4, 5)), ["9 layers", "the model has 8"]),
        (8, dict(pp=2, stages=(9, -1)), ["negative", "-1"]),
        (8, dict(pp=3, stages=(4, 0, 4)), ["first and the last"]),
    ],
)
def test_impossible_splits_are_explained(
    layers: int, parallel: dict[str, object], words: list[str]
) -> None:
    wanted = ParallelSpec.model_validate(parallel)
    spec = run_spec({**GPT_TINY, "layers": layers}, gpus=wanted.pp)
    values = candidate_of(spec, wanted, wanted.pp)
    (rule,) = broken_rules(spec, values, MESH_RULES)
    message = rule.message(PlanRequest(spec, cluster()), values)
    for word in words:
        assert word in message


def test_every_possible_split_holds_every_layer() -> None:
    seen = 0
    for layers in range(1, 49):
        spec = run_spec({**GPT_TINY, "layers": layers})
        for pp in (1, 2, 3, 4, 6, 8):
            for vpp in (1, 2, 3) if pp > 1 else (1,):
                for counted in (dict(), dict(count_embedding=True), dict(count_loss=True)):
                    parallel = ParallelSpec(pp=pp, vpp=vpp, **counted)
                    values = candidate_of(spec, parallel, pp)
                    if broken_rules(spec, values, MESH_RULES):
                        continue
                    split = split_layers(layers, parallel)
                    assert (sum(split), len(split), min(split) >= 0) == (layers, pp * vpp, True)
                    seen += 1
    assert seen > 300


def test_parameters_of_all_gpus_add_up_to_the_model_and_what_is_replicated() -> None:
    base = ModelSpec.model_validate({**GPT_TINY, "layers": 12, "vocab": 1000})
    hidden, layers = base.hidden, base.layers
    for tied in (True, False):
        model = base.model_copy(update={"tied": tied})
        for tp in (1, 2, 4):
            for pp in (1, 2, 3, 4, 6):
                parallel = ParallelSpec(tp=tp, pp=pp)
                stages = build_stages(
                    model, layout_of(parallel, tp * pp), split_layers(layers, parallel)
                )
                # per layer two norms (2h each) and two row-parallel biases (h each); at the ends
                # the positions and the final norm
                replicated = layers * 6 * hidden + model.seq * hidden + 2 * hidden
                padding = (pad_vocab(1000, tp) - 1000) * hidden * (1 if tied else 2)
                copy = pad_vocab(1000, tp) * hidden if tied and pp > 1 else 0
                assert tp * sum(stage.parameters_per_gpu for stage in stages) == (
                    total_parameters(model) + (tp - 1) * replicated + padding + copy
                )


def test_embedding_and_loss_are_at_the_ends() -> None:
    model = ModelSpec.model_validate(GPT_TINY)
    parallel = ParallelSpec(pp=4)
    stages = build_stages(model, layout_of(parallel, 4), split_layers(4, parallel))
    assert [stage.embedding for stage in stages] == [True, False, False, False]
    assert [stage.loss for stage in stages] == [False, False, False, True]


MIXED = ModelSpec.model_validate(
    dict(
        family="llama",
        layers=8,
        hidden=64,
        ffn=176,
        heads=4,
        vocab=512,
        seq=64,
        moe=dict(experts=8, top_k=2, ffn=32, dense_layers=3),
    )
)


def test_layers_of_a_stage_are_those_of_its_chunks() -> None:
    assert stage_layers((1, 2, 3, 4), 2, 0) == (range(1), range(3, 6))
    assert stage_layers((1, 2, 3, 4), 2, 1) == (range(1, 3), range(6, 10))
    assert stage_layers((0, 4), 2, 0) == (range(0),)


@pytest.mark.parametrize("stages", [(4, 4), (2, 6), (0, 8), (3, 5), (8, 0)])
def test_each_stage_has_its_own_kinds_of_layers(stages: tuple[int, ...]) -> None:
    parallel = ParallelSpec(pp=2, ep=4, stages=stages)
    layout, split = layout_of(parallel, 8), split_layers(8, parallel)
    dense, experts = (layer_parameters(MIXED, 1, 4, layer) for layer in (0, 7))
    first, last = build_stages(MIXED, layout, split)
    ends = pad_vocab(512, 1) * 64
    kinds = [min(stages[0], 3), max(0, stages[0] - 3)]
    assert first.parameters_per_gpu == kinds[0] * dense + kinds[1] * experts + ends
    assert last.parameters_per_gpu == (3 - kinds[0]) * dense + (5 - kinds[1]) * experts + ends + 64
    one_layer = expert_parameters(MIXED, 1, 4)
    assert stage_expert_parameters(MIXED, layout, split, 0) == kinds[1] * one_layer
    assert stage_expert_parameters(MIXED, layout, split, 1) == (5 - kinds[1]) * one_layer


def test_experts_of_token_prediction_are_on_the_last_stage() -> None:
    model = MIXED.model_copy(update={"mtp_layers": 2})
    parallel = ParallelSpec(pp=2)
    layout, split = layout_of(parallel, 2), split_layers(8, parallel)
    one_layer = expert_parameters(model, 1)
    assert stage_expert_parameters(model, layout, split, 0) == one_layer
    assert stage_expert_parameters(model, layout, split, 1) == (4 + 2) * one_layer
    dense = ModelSpec.model_validate(GPT_TINY)
    assert stage_expert_parameters(dense, layout, (2, 2), 1) == 0
