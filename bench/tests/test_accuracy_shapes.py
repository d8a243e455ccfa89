"""Models as the cost model sees them."""

from __future__ import annotations

from typing import Any

import pytest
import row_specimens as specimens

from bench.cases import RowCase, row_case, shape_of
from bench.published import PublishedRow
from bench.published_models import model_of
from hpctrain.spec.loader import load_calibration, load_catalogue

CATALOGUE, CALIBRATION = load_catalogue(), load_calibration()


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[PublishedRow]:
    return specimens.rows(tmp_path_factory.mktemp("rows"), *specimens.ALL)


def gpt(**cells: Any) -> PublishedRow:
    sizes = dict(num_layers=24, hidden=2048, heads=16, vocab=51200, seq_len=2048, gpus=16, tp=2)
    return PublishedRow(
        **(dict(line=2, gpu="A100-80GB SXM", model="GPT", source="megatron 2022") | sizes | cells)
    )


def case(one: PublishedRow) -> RowCase:
    return row_case(one, CATALOGUE, CALIBRATION)


class TestShapes:
    def test_dense_layers_in_front_of_experts(self, rows: list[PublishedRow]) -> None:
        shape = case(rows[1]).case.shape  # DeepSeek-V3: arXiv 2412.19437, section 4.2
        assert (shape.layers, shape.mlp_blocks, shape.moe_blocks) == (61, 3, 58)
        assert (shape.dense_first, shape.experts, shape.top_k) == (1, 256, 8)
        assert (shape.mla, shape.qk_dim, shape.value_dim, shape.kv_heads) == (1, 192, 128, 128)
        assert (shape.q_rank, shape.kv_rank, shape.rope_dim) == (1536, 512, 64)

    def test_hybrids_have_a_mixer_per_layer(self, rows: list[PublishedRow]) -> None:
        shape = case(rows[-1]).case.shape
        mixers = shape.attention_blocks + shape.mlp_blocks + shape.moe_blocks + shape.mamba_blocks
        assert mixers == shape.layers
        assert shape.mamba_blocks > 0 and shape.dense_first == 0

    def test_learned_positions_have_a_table_but_not_in_bloom(self) -> None:
        assert case(gpt()).case.shape.position_rows == 2048
        assert case(gpt(source="BLOOM prequel sweep")).case.shape.position_rows == 0

    def test_shape_without_a_row(self) -> None:
        shape = shape_of(model_of(gpt(kv_heads=16, ffn_hidden=8192)))
        assert (shape.ffn, shape.gated, shape.tied, shape.biased) == (8192, 0, 1, 1)
        assert (shape.rope, shape.rms_norm, shape.dropout, shape.window_share) == (0, 0, 0.1, 0)

    def test_llama(self, rows: list[PublishedRow]) -> None:
        shape = case(rows[2]).case.shape  # Llama 3.1 405B: arXiv 2407.21783, table 3
        assert (shape.layers, shape.hidden, shape.ffn, shape.heads) == (126, 16384, 53248, 128)
        assert (shape.kv_heads, shape.qk_dim, shape.vocab, shape.seq) == (8, 128, 128256, 8192)
        assert (shape.rope, shape.rms_norm, shape.dropout, shape.gated) == (1, 1, 0, 1)
        assert (shape.mlp_blocks, shape.moe_blocks, shape.mamba_blocks) == (126, 0, 0)
        assert shape.causal == 1

    def test_hybrid_sizes(self, rows: list[PublishedRow]) -> None:
        shape = case(rows[-1]).case.shape
        assert shape.mamba_inner % shape.mamba_heads == 0 and shape.mamba_inner > 0
        assert min(shape.mamba_state, shape.mamba_groups, shape.mamba_chunk) > 0
