"""Closed forms of parameter counts against the exact ones of the planner, stage by stage."""

from __future__ import annotations

from typing import Any

import pytest
from cost_specimens import case, drawn, many
from specimens import DEEPSEEK_V2, DEEPSEEK_V2_LITE, DEEPSEEK_V3, GPT175B, LLAMA7B, MIXTRAL

from hpctrain.plan.cost.case import Case, Mesh
from hpctrain.plan.cost.from_spec import NO_MACHINE, PLAIN, shape_of
from hpctrain.plan.cost.memory import held_weights, stages_that_matter
from hpctrain.plan.cost.weights import mamba_weights, table_weights, weights_of
from hpctrain.plan.documents import Layout
from hpctrain.plan.mesh.stages import build_stages, stage_expert_parameters
from hpctrain.spec.run import ModelSpec

GPT2 = dict(layers=12, hidden=768, heads=12, vocab=50257, seq=1024)
LLAMA70B = dict(
    family="llama",
    layers=80,
    hidden=8192,
    ffn=28672,
    heads=64,
    kv_heads=8,
    vocab=128256,
    seq=8192,
)
PREDICTING = dict(DEEPSEEK_V3, mtp_layers=1)
T5_BASE = dict(
    family="t5",
    layers=12,
    encoder_layers=12,
    hidden=768,
    heads=12,
    head_dim=64,
    vocab=32128,
    seq=512,
)
BIASED_EXPERTS = dict(GPT2, moe=dict(experts=8, top_k=1, ffn=3072, dense_layers=2))

# name: model, layers of each stage, tp, ep
SPECIMENS: dict[str, tuple[dict[str, Any], tuple[int, ...], int, int]] = {
    "GPT tied": (GPT2, (12,), 1, 1),
    "GPT tied, pipeline": (GPT2, (6, 6), 2, 1),
    "GPT untied": (GPT175B, (96,), 8, 1),
    "GPT untied, pipeline": (GPT175B, (12,) * 8, 8, 1),
    "Llama": (LLAMA7B, (32,), 1, 1),
    "Llama GQA, uneven ends": (LLAMA70B, (19, 21, 21, 19), 4, 1),
    "experts everywhere": (MIXTRAL, (32,), 1, 4),
    "experts split over tensor ranks": (MIXTRAL, (16, 16), 2, 1),
    "latent attention, one dense layer": (DEEPSEEK_V2, (15,) * 4, 1, 8),
    "latent attention without query rank": (DEEPSEEK_V2_LITE, (27,), 2, 2),
    "token prediction": (PREDICTING, (61,), 1, 8),
    "token prediction, pipeline": (PREDICTING, (16, 15, 15, 15), 2, 8),
    "encoder-decoder": (T5_BASE, (12,), 1, 1),
    "encoder-decoder, a longer encoder": (dict(T5_BASE, layers=3), (3,), 1, 1),
    "experts with biases": (BIASED_EXPERTS, (6, 6), 2, 4),
}


def layout_case(model: ModelSpec, split: tuple[int, ...], tp: int, ep: int) -> Case:
    mesh = Mesh(
        tp=tp,
        pp=len(split),
        ep=ep,
        dp=64,
        accumulation=16,
        zero=1,
        layers_first=split[0],
        layers_middle=split[len(split) // 2],
        layers_last=split[-1],
    )
    return Case(shape_of(model), mesh, NO_MACHINE, PLAIN)


def exact(model: ModelSpec, split: tuple[int, ...], tp: int, ep: int) -> list[tuple[float, float]]:
    """(dense, routed) parameters of every stage, counted by the planner."""
    layout = Layout(tp=tp, pp=len(split), vpp=1, cp=1, dp=64, sequence_parallel=False, ep=ep)
    found = []
    for stage in build_stages(model, layout, split):
        routed = stage_expert_parameters(model, layout, split, stage.index)
        found.append((stage.parameters_per_gpu - routed, routed))
    return found


@pytest.mark.parametrize("name", SPECIMENS)
def test_first_and_last_stage_hold_what_megatron_builds(name: str) -> None:
    document, split, tp, ep = SPECIMENS[name]
    model = ModelSpec.model_validate(document)
    of_case, counted = layout_case(model, split, tp, ep), exact(model, split, tp, ep)
    first, second, last = (held_weights(of_case, s) for s in stages_that_matter(of_case))
    for closed, index in ((first, 0), (second, min(1, len(split) - 1)), (last, -1)):
        assert float(closed.dense) == pytest.approx(counted[index][0], rel=1e-4)
        assert float(closed.routed) == pytest.approx(counted[index][1], rel=1e-4)


@pytest.mark.parametrize("name", SPECIMENS)
def test_the_stage_with_the_most_to_reduce(name: str) -> None:
    document, split, tp, ep = SPECIMENS[name]
    model = ModelSpec.model_validate(document)
    most, counted = weights_of(layout_case(model, split, tp, ep)), exact(model, split, tp, ep)
    assert float(most.dense) == pytest.approx(max(dense for dense, _ in counted), rel=1e-4)
    assert float(most.routed) == pytest.approx(max(routed for _, routed in counted), rel=1e-4)


def test_whole_models_have_their_published_size() -> None:
    # Touvron et al. 2023 (arXiv 2307.09288) and Jiang et al. 2024 (arXiv 2401.04088): exact counts
    # of the published weights; the vocabulary of both is a multiple of 128
    for document, parameters in ((LLAMA7B, 6_738_415_616), (MIXTRAL, 46_702_792_704)):
        model = ModelSpec.model_validate(document)
        weights = weights_of(layout_case(model, (32,), 1, 1))
        assert float(weights.dense + weights.routed) == parameters


def test_mamba_block() -> None:
    # into 2 x 2048 + 2 x 8 x 128 + 32 columns, out of 2048 rows; convolution of four taps and a
    # bias over 2048 + 2 x 1024 channels; a norm with a shift
    sizes = dict(mamba_inner=2048, mamba_state=128, mamba_groups=8, mamba_heads=32)
    split = 1024 * (6176 + 2048) + 5 * 4096
    assert mamba_weights(case(**sizes)) == split + 2 * 1024
    assert mamba_weights(case(**sizes, tp=4)) == split / 4 + 2 * 1024
    kinds = dict(attention_blocks=0, mlp_blocks=0, mamba_blocks=8)
    tables_and_norm = 2 * 51200 * 1024 + 2 * 1024
    assert weights_of(case(**sizes, **kinds)).dense == 8 * (split + 2 * 1024) + tables_and_norm


def test_a_table_is_padded_to_128_rows_on_every_rank() -> None:
    # 50257 words: 393 x 128 on one rank, 50 x 1024 over eight
    assert table_weights(case(vocab=50257)) == 50304 * 1024
    assert table_weights(case(vocab=50257, tp=8)) == 6400 * 1024


def test_many_at_once() -> None:
    cases = drawn(seed=11, count=60)
    together = weights_of(many(cases))
    for index, one in enumerate(cases):
        alone = weights_of(one)
        assert together.dense[index] == pytest.approx(float(alone.dense), rel=1e-12)
        assert together.routed[index] == pytest.approx(float(alone.routed), rel=1e-12)
