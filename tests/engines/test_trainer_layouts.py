"""Every layout computes what one process computes, from the same weights.

The layouts resume from the checkpoint that the reference run on one process wrote after step 4
and train to step 6. Loss and gradient norm are compared: a wrong gradient with a right loss is the
likelier fault of the two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from trial_runs import LLAMA, PP2, Trial, largest_difference, trained
from variants import varied

TOLERANCE = 1e-5

TP2 = dict(tensor_model_parallel_size=2)
VPP2 = dict(
    pipeline_model_parallel_size=2,
    virtual_pipeline_model_parallel_size=2,
    pipeline_layer_split=((1, 1), (1, 1)),
)
DP2 = dict(data_parallel_size=2)
SP = dict(sequence_parallel=True)
PIPELINES_NEAR = dict(parallel_order="tp-cp-ep-pp-dp")
OVERLAP = dict(overlap_grad_reduce=True, overlap_param_gather=True)

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2 pp2": {**TP2, **PP2},
    "tp2 sp": {**TP2, **SP},
    "tp4": dict(tensor_model_parallel_size=4),
    "dp2 overlap": {**DP2, **OVERLAP},
    "pp2 vpp2": VPP2,
    "pp2 vpp2 dp2 overlap": {**VPP2, **DP2, **OVERLAP},
    "tp2 sp pp2": {**TP2, **SP, **PP2},
    "tp2 pp2 dp2, pipelines near": {**TP2, **PP2, **DP2, **PIPELINES_NEAR},
    # the middle stage reads nothing
    "uneven pp3": dict(
        pipeline_model_parallel_size=3,
        pipeline_layer_split=((2,), (1,), (1,)),
        eval_interval_steps=4,
    ),
    "uneven vpp2": {**VPP2, "pipeline_layer_split": ((1, 0), (2, 1))},
}


@pytest.mark.parametrize("name", varied(LAYOUTS, "pp2 vpp2 dp2 overlap"))
def test_layout_equals_one_process(
    name: str, gpt_reference: Trial, trial: Callable[..., Trial]
) -> None:
    layout = trial(**LAYOUTS[name])
    layout.adopt(gpt_reference, 4)
    assert set(layout.train(resume=4)) == {0}
    loss, norm = largest_difference(layout, gpt_reference, 5)
    assert loss <= TOLERANCE
    assert norm <= TOLERANCE


@pytest.mark.variant("test_layout_equals_one_process")
@pytest.mark.parametrize("name", ["tp2 sp pp2", "dp2 overlap", "tp4"])
def test_llama_layout_equals_one_process(
    name: str, llama_reference: Trial, trial: Callable[..., Trial]
) -> None:
    layout = trial(LLAMA, **LAYOUTS[name])
    layout.adopt(llama_reference, 4)
    assert set(layout.train(resume=4)) == {0}
    loss, norm = largest_difference(layout, llama_reference, 5)
    assert loss <= TOLERANCE
    assert norm <= TOLERANCE


@pytest.mark.variant("test_layout_equals_one_process")
@pytest.mark.parametrize("granularity", varied(["full", "selective"], "full"))
def test_recompute_changes_no_bit(granularity: str, trial: Callable[..., Trial]) -> None:
    recomputed = trial(dropout=0.1, recompute_granularity=granularity)
    assert recomputed.train() == [0]
    assert trained(dropout=0.1).exact == recomputed.exact
    assert len(recomputed.exact) == 6


@pytest.mark.variant("test_layout_equals_one_process")
def test_recompute_under_sequence_parallelism_changes_no_bit(trial: Callable[..., Trial]) -> None:
    settings = dict(dropout=0.1, train_steps=3, **TP2, **SP)
    plain, recomputed = trial(**settings), trial(recompute_granularity="full", **settings)
    assert plain.train() == recomputed.train() == [0, 0]
    assert plain.exact == recomputed.exact


@pytest.mark.variant("test_layout_equals_one_process")
@pytest.mark.parametrize("layout", [PP2, pytest.param({**TP2, **PP2})])
def test_bf16_follows_fp32(
    layout: dict[str, Any], gpt_reference: Trial, trial: Callable[..., Trial]
) -> None:
    full, half = gpt_reference, trial(precision="bf16", **layout)
    assert set(half.train()) == {0}
    first, last = min(half.losses), max(half.losses)
    assert half.losses[last] < half.losses[first] - 0.1
    assert abs(half.losses[last] - full.losses[last]) < 0.2
    assert half.exact != full.exact
