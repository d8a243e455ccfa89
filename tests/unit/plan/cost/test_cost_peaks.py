"""The fullest GPU: which blocks a stage has, peaks that others printed, many cases at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cost_specimens import GIB, case, changed, drawn, many, pipeline

from hpctrain.plan.cost.case import Case, Mesh, Shape
from hpctrain.plan.cost.from_spec import NO_MACHINE, software_of
from hpctrain.plan.cost.memory import peak_bytes, stage_memory, stages_that_matter
from hpctrain.plan.cost.weights import Blocks, all_blocks, first_blocks, later_blocks
from hpctrain.spec.loader import load_calibration

# 3 dense layers in front of 5 with experts
DENSE_FIRST = dict(
    mlp_blocks=3,
    moe_blocks=5,
    dense_first=1,
    experts=8,
    top_k=2,
    expert_ffn=2048,
    pp=4,
    layers_middle=2,
    layers_last=2,
)
MIXED = dict(mlp_blocks=4, moe_blocks=4, dense_first=0)


class TestComposition:
    """Dense layers at the front, the rest spread evenly."""

    def stages(self, layers_first: int) -> list[Blocks]:
        one = case(**DENSE_FIRST, layers_first=layers_first)
        behind = (8 - layers_first) / 3
        return [first_blocks(one), later_blocks(one, behind)]

    def test_all_dense_layers_fit_into_the_first_stage(self) -> None:
        first, later = self.stages(5)
        assert (first.mlp, first.moe) == (3, 2)
        assert (later.mlp, later.moe) == (0, 1)

    def test_dense_layers_that_do_not_fit_are_behind_it(self) -> None:
        first, later = self.stages(2)
        assert (first.mlp, first.moe) == (2, 0)
        assert (later.mlp, later.moe) == (pytest.approx(1 / 3), pytest.approx(5 / 3))

    @pytest.mark.parametrize("dense_first", [0, 1])
    def test_stages_add_up_to_the_model(self, dense_first: int) -> None:
        one = case(**{**DENSE_FIRST, "dense_first": dense_first}, layers_first=2)
        first, later = first_blocks(one), later_blocks(one, 2)
        for name in Blocks.__dataclass_fields__:
            total = getattr(first, name) + 3 * getattr(later, name)
            assert total == pytest.approx(getattr(all_blocks(one), name)), name

    def test_kinds_in_turn_are_spread_evenly(self) -> None:
        one = case(**DENSE_FIRST | MIXED, layers_first=2)
        for blocks in (first_blocks(one), later_blocks(one, 2)):
            assert (blocks.mlp, blocks.moe, blocks.attention) == (1, 1, 2)

    def test_fewer_layers_at_the_ends(self) -> None:
        one = changed(pipeline(4, 30), layers_first=7, layers_middle=8, layers_last=7)
        first, second, last = stages_that_matter(one)
        assert [s.blocks.layers for s in (first, second, last)] == [7, 8, 7]
        assert [s.index for s in (first, second, last)] == [0, 1, 3]

    def test_of_two_stages_the_second_is_the_last(self) -> None:
        one = changed(pipeline(2, 9), layers_first=5, layers_middle=99, layers_last=4)
        assert [s.blocks.layers for s in stages_that_matter(one)] == [5, 4, 4]


LLAMA = dict(causal=1, gated=1, rope=1, rms_norm=1, vocab=128256, qk_dim=128, value_dim=128)
LLAMA70B_12 = dict(LLAMA, hidden=8192, ffn=28672, heads=64, kv_heads=8, layers=12)
LLAMA405B_4 = dict(LLAMA, hidden=16384, ffn=53248, heads=128, kv_heads=16, layers=4)
DEEPSEEK_V2_4 = dict(
    LLAMA,
    hidden=5120,
    ffn=12288,
    heads=128,
    kv_heads=128,
    layers=4,
    vocab=102400,
    qk_dim=192,
    mla=1,
    q_rank=1536,
    kv_rank=512,
    rope_dim=64,
    mlp_blocks=1,
    dense_first=1,
    moe_blocks=3,
    experts=160,
    top_k=6,
    expert_ffn=1536,
    expert_hidden=5120,
    shared_ffn=3072,
)


def published(model: dict[str, Any], seq: int, **mesh: int) -> Case:
    """Megatron-core and TransformerEngine: bf16, fp32 gradients, distributed optimizer."""
    layers = model["layers"]
    each = layers / mesh.get("pp", 1)
    shape = Shape(**dict(seq=seq, attention_blocks=layers, mlp_blocks=layers) | model)
    return Case(
        shape,
        Mesh(
            **mesh,
            accumulation=4,
            sequence_parallel=int(mesh.get("tp", 1) > 1),
            zero=1,
            layers_first=each,
            layers_middle=each,
            layers_last=each,
        ),
        NO_MACHINE,
        replace(software_of(load_calibration().software["megatron-core"]), context_bytes=0),
    )


# GiB of max_memory_allocated on the fullest of eight B200: Megatron-LM at 23e00ed, as printed in
# MooreThreads/SimuMax, docs/b200/b200_release_v1.2_summary.md (columns of the real runs)
PRINTED = [
    ("70B of 12 layers, pp 2", published(LLAMA70B_12, 4096, pp=2, dp=4), 66.55),
    ("70B of 12 layers, tp 2", published(LLAMA70B_12, 4096, tp=2, dp=4), 60.68),
    ("405B of 4 layers, pp 2", published(LLAMA405B_4, 4096, pp=2, dp=4), 87.08),
    ("405B of 4 layers, tp 4", published(LLAMA405B_4, 4096, tp=4, dp=2), 52.89),
    ("DeepSeek-V2 of 4 layers, ep 8", published(DEEPSEEK_V2_4, 4096, ep=8, dp=8), 45.63),
    ("DeepSeek-V2, ep 4, pp 2", published(DEEPSEEK_V2_4, 4096, ep=4, pp=2, dp=4), 44.7),
    ("131072 tokens", published(LLAMA70B_12, 131072, tp=2, cp=4), 112.67),
]


@pytest.mark.parametrize(("name", "one", "gibibytes"), PRINTED, ids=[row[0] for row in PRINTED])
def test_peaks_that_were_printed(name: str, one: Case, gibibytes: float) -> None:
    assert float(peak_bytes(one)) / GIB == pytest.approx(gibibytes, rel=0.02)


CASES = drawn(seed=1, count=100)
TOGETHER = many(CASES)


class TestManyCases:
    def test_the_parts_add_up_and_none_is_negative(self) -> None:
        for stage in stages_that_matter(TOGETHER):
            memory = stage_memory(TOGETHER, stage)
            parts = [getattr(memory, name) for name in type(memory).__dataclass_fields__]
            assert memory.total == pytest.approx(sum(np.broadcast_arrays(*parts)))
            assert min(np.min(part) for part in parts) >= 0

    def test_the_peak_is_that_of_the_fullest_stage(self) -> None:
        totals = [stage_memory(TOGETHER, s).total for s in stages_that_matter(TOGETHER)]
        assert np.array_equal(peak_bytes(TOGETHER), np.max(totals, axis=0))
        fullest = np.argmax(totals, axis=0)
        assert {0, 2} <= set(fullest), "no case whose first or whose last stage is the fullest"

    def test_rows_at_once_are_rows_one_by_one(self) -> None:
        together = peak_bytes(TOGETHER)
        assert together.shape == (100,)
        assert together == pytest.approx([float(peak_bytes(one)) for one in CASES], rel=1e-12)

    @pytest.mark.parametrize(
        ("field", "values"),
        [
            ("micro_batch", [1, 2, 4]),
            ("seq", [1024, 2048, 8192]),
            ("layers_first", [2, 4, 8]),
            ("main_bytes", [8, 12, 16]),
        ],
    )
    def test_more_never_takes_less(self, field: str, values: list[float]) -> None:
        peaks = [peak_bytes(changed(TOGETHER, **{field: value})) for value in values]
        assert np.all(np.diff(peaks, axis=0) >= 0) and np.any(np.diff(peaks, axis=0) > 0)

    @pytest.mark.parametrize(("field", "values"), [("zero", [0, 1, 2]), ("recompute", [0, 1, 2])])
    def test_what_saves_memory_never_takes_more(self, field: str, values: list[float]) -> None:
        # some layers computed again in full may keep more than all of them in part
        whole = changed(TOGETHER, full_layers=0)
        peaks = [peak_bytes(changed(whole, **{field: value})) for value in values]
        assert np.all(np.diff(peaks, axis=0) <= 0) and np.any(np.diff(peaks, axis=0) < 0)

    def test_arrays_in_one_field_are_enough(self) -> None:
        peaks = peak_bytes(case(dp=np.array([1, 2, 4]), zero=1))
        assert np.all(np.diff(peaks) < 0)
