"""Counts of mixtures of experts, latent attention, token prediction and BERT, as published."""

from __future__ import annotations

from typing import Any

import pytest

from hpctrain.plan.model.parameters import (
    expert_parameters,
    expert_tp,
    layer_parameters,
    linear_parameters,
    model_flops_per_step,
    mtp_parameters,
    total_parameters,
)
from hpctrain.spec.model import ModelSpec

DEEPSEEK_V3: dict[str, Any] = dict(
    family="llama",
    layers=61,
    hidden=7168,
    ffn=18432,
    heads=128,
    vocab=129280,
    seq=4096,
    moe=dict(experts=256, top_k=8, ffn=2048, shared_ffn=2048, dense_layers=3),
    mla=dict(q_rank=1536, kv_rank=512),
)
DEEPSEEK_V2: dict[str, Any] = dict(
    family="llama",
    layers=60,
    hidden=5120,
    ffn=12288,
    heads=128,
    vocab=102400,
    seq=4096,
    moe=dict(experts=160, top_k=6, ffn=1536, shared_ffn=3072, dense_layers=1),
    mla=dict(q_rank=1536, kv_rank=512),
)
DEEPSEEK_V2_LITE: dict[str, Any] = dict(
    family="llama",
    layers=27,
    hidden=2048,
    ffn=10944,
    heads=16,
    vocab=102400,
    seq=4096,
    moe=dict(experts=64, top_k=6, ffn=1408, shared_ffn=2816, dense_layers=1),
    mla=dict(kv_rank=512),
)
MIXTRAL: dict[str, Any] = dict(
    family="llama",
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    vocab=32000,
    seq=4096,
    moe=dict(experts=8, top_k=2, ffn=14336),
)
BERT: dict[str, Any] = dict(family="bert", layers=12, hidden=768, heads=12, vocab=30522, seq=512)


def spec(shape: dict[str, Any], **others: object) -> ModelSpec:
    return ModelSpec.model_validate({**shape, **others})


@pytest.mark.parametrize(
    ("shape", "parameters"),
    [
        # sums over the tensors of the published checkpoints; DeepSeek-V3 has 58 x 256 biases of
        # its router besides, which are no parameters but moved by a rule (arXiv 2412.19437, 2.1.2)
        (DEEPSEEK_V3, 671_026_419_200 - 58 * 256),
        (DEEPSEEK_V2, 235_741_434_880),
        (DEEPSEEK_V2_LITE, 15_706_484_224),
        (MIXTRAL, 46_702_792_704),
    ],
    ids=["deepseek-v3", "deepseek-v2", "deepseek-v2-lite", "mixtral-8x7b"],
)
def test_totals_of_published_checkpoints(shape: dict[str, Any], parameters: int) -> None:
    assert total_parameters(spec(shape)) == parameters


def test_experts_are_spread_over_ep_and_whole_then() -> None:
    mixtral, expert = spec(MIXTRAL), 3 * 4096 * 14336
    assert expert_parameters(mixtral, 1, 1) == 8 * expert
    assert expert_parameters(mixtral, 4, 1) == 8 * expert // 4
    assert expert_parameters(mixtral, 4, 8) == expert_parameters(mixtral, 1, 8) == expert
    assert expert_parameters(spec(BERT), 1) == 0
    assert [expert_tp(*sizes) for sizes in ((4, 1), (4, 2), (1, 1))] == [4, 1, 1]


def test_layers_of_both_kinds() -> None:
    model = spec(DEEPSEEK_V3)
    dense, experts = layer_parameters(model, 1, layer=2), layer_parameters(model, 1, layer=3)
    # layer 2: one MLP of 18432; layer 3: 256 + 1 of 2048, and the router
    assert experts - dense == 3 * 7168 * (257 * 2048 - 18432) + 256 * 7168
    assert layer_parameters(model, 1) == experts
    assert layer_parameters(model, 1, 64) == experts - 3 * 7168 * 2048 * 252


def test_latent_attention_of_deepseek_v3() -> None:
    mlp = 3 * 7168 * 18432 + 2 * 7168
    queries = 7168 * 1536 + 1536 + 1536 * 128 * 192
    keys_values = 7168 * (512 + 64) + 512 + 512 * 128 * (128 + 128)
    attention = queries + keys_values + 128 * 128 * 7168
    assert layer_parameters(spec(DEEPSEEK_V3), 1, layer=0) == attention + mlp
    # down-projections and norms stay whole on each of 8 ranks
    whole = 7168 * (1536 + 576) + 1536 + 512 + 2 * 7168
    split = attention + mlp - whole
    assert layer_parameters(spec(DEEPSEEK_V3), 8, layer=0) == split // 8 + whole


def test_token_prediction_adds_a_layer_a_projection_and_norms() -> None:
    model = spec(DEEPSEEK_V3, mtp_layers=1)
    added = total_parameters(model) - total_parameters(spec(DEEPSEEK_V3))
    assert added == mtp_parameters(model, 1)
    assert added == layer_parameters(model, 1) + 2 * 7168**2 + 3 * 7168
    assert mtp_parameters(spec(DEEPSEEK_V3, mtp_layers=3), 1) == 3 * added


def test_bert_base() -> None:
    # 12 layers of 12 h^2 + 13 h; words, positions, segments; final norm; masked-word head
    # h^2 + h, norm and output bias. The encoder of the paper has 109,482,240 of these (with one
    # norm behind the embeddings for the final one, and its pooler, as large as the head's h^2 + h).
    h = 768
    encoder = 12 * (12 * h * h + 13 * h) + (30522 + 512 + 2) * h + 2 * h + h * h + h
    assert encoder == 109_482_240
    heads = 2 * h + 30522
    assert total_parameters(spec(BERT)) == encoder + heads


def test_flops_count_active_experts_the_router_and_token_prediction() -> None:
    h, layers = 4096, 32
    attention = 2 * h * (32 + 8) * 128
    linear = layers * (attention + 3 * h * 2 * 14336 + 8 * h) + 32000 * h
    assert linear_parameters(spec(MIXTRAL)) == linear
    square = 12 * layers * h * 4096
    assert model_flops_per_step(spec(MIXTRAL), 3) == (6 * linear + square) * 4096 * 3
    again = attention + 3 * h * 2 * 14336 + 8 * h + 2 * h * h + 32000 * h
    predicted = model_flops_per_step(spec(MIXTRAL, mtp_layers=1), 3)
    assert predicted == (6 * (linear + again) + square * 33 // 32) * 4096 * 3


def test_flops_of_latent_attention_have_both_head_sizes() -> None:
    h, a = 7168, 128
    latent = h * 1536 + 1536 * a * 192 + h * 576 + 512 * a * 256 + a * 128 * h
    dense = latent + 3 * h * 18432
    experts = latent + 3 * h * 9 * 2048 + 256 * h
    linear = 3 * dense + 58 * experts + 129280 * h
    assert linear_parameters(spec(DEEPSEEK_V3)) == linear
    full = model_flops_per_step(spec(DEEPSEEK_V3), 1)
    assert full == (6 * linear + 6 * 61 * a * (192 + 128) * 4096) * 4096


def test_causal_variant_halves_attention_of_causal_models_only() -> None:
    model = spec(MIXTRAL)
    full, causal = (model_flops_per_step(model, 1, causal) for causal in (False, True))
    assert full - causal == 6 * 32 * 4096 * 4096 * 4096
    bert = spec(BERT)
    assert model_flops_per_step(bert, 1, True) == model_flops_per_step(bert, 1)


def test_flops_of_bert() -> None:
    linear = 12 * 12 * 768**2 + 768**2 + 30522 * 768
    expected = (6 * linear + 12 * 12 * 768 * 512) * 512 * 256
    assert model_flops_per_step(spec(BERT), 256) == expected
