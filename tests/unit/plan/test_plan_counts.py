from __future__ import annotations

import pytest
from specimens import GPT175B, LLAMA7B, LLAMA405B

from hpctrain.plan.model.parameters import (
    layer_parameters,
    model_flops_per_step,
    pad_vocab,
    total_parameters,
)
from hpctrain.spec.run import ModelSpec


@pytest.mark.parametrize(
    ("vocab", "tp", "padded"),
    [
        (50257, 1, 50304),  # 393 x 128; the GPT-2 vocabulary in Megatron's own examples
        (50257, 8, 51200),  # 50 x 1024
        (51200, 8, 51200),
        (512, 2, 512),
        (513, 2, 768),  # 3 x 256
        (2, 4, 512),
    ],
)
def test_vocabulary_is_padded_to_128_times_tp(vocab: int, tp: int, padded: int) -> None:
    assert pad_vocab(vocab, tp) == padded


def test_llama_2_7b_has_its_published_number_of_parameters() -> None:
    # layer: 4 x 4096^2 + 3 x 4096 x 11008 + 2 x 4096 = 202,383,360; 32 of them;
    # embedding and output 2 x 32000 x 4096 = 262,144,000; final norm 4096
    assert total_parameters(ModelSpec.model_validate(LLAMA7B)) == 6_738_415_616


def test_llama_3_405b_has_its_published_number_of_parameters() -> None:
    # layer: 2 x 16384 x (128 + 8) x 128 + 3 x 16384 x 53248 + 2 x 16384 = 3,187,703,808;
    # 126 of them; 2 x 128256 x 16384 = 4,202,692,608; final norm 16384
    assert total_parameters(ModelSpec.model_validate(LLAMA405B)) == 405_853_388_800


def test_gpt_layer_follows_12_h_squared_plus_13_h() -> None:
    model = ModelSpec.model_validate(GPT175B)
    assert layer_parameters(model, 1) == 12 * 12288**2 + 13 * 12288


def test_tied_model_counts_its_table_once() -> None:
    untied = ModelSpec.model_validate(GPT175B)
    tied = untied.model_copy(update={"tied": True})
    assert total_parameters(untied) - total_parameters(tied) == 51200 * 12288


def test_model_flops_follow_narayanan_without_recomputation() -> None:
    # 72 B s L h^2 (1 + s / 6h + V / 12Lh): arXiv 2104.04473 with 72 for 96
    model, batch = ModelSpec.model_validate(GPT175B), 1536
    s, h, layers, vocab = 2048, 12288, 96, 51200
    expected = 72 * batch * s * layers * h**2 * (1 + s / (6 * h) + vocab / (12 * layers * h))
    assert model_flops_per_step(model, batch) == pytest.approx(expected, rel=1e-12)


def test_model_flops_of_grouped_queries_and_gated_mlp() -> None:
    # per token: 6 x (126 x (2 x 16384 x 136 x 128 + 3 x 16384 x 53248) + 128256 x 16384)
    #          + 12 x 126 x 128 x 128 x 8192
    linear = 126 * (2 * 16384 * 136 * 128 + 3 * 16384 * 53248) + 128256 * 16384
    expected = (6 * linear + 12 * 126 * 16384 * 8192) * 16 * 8192
    assert model_flops_per_step(ModelSpec.model_validate(LLAMA405B), 16) == expected
