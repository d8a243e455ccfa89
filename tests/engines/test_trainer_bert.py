"""BERT on megatron-core: masked words, the same in every layout, and after a resume."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from test_trainer_layouts import DP2, OVERLAP, SP, TP2, VPP2
from trial_runs import GPT, PP2, Trial, largest_difference, trained
from variants import varied

BERT: dict[str, Any] = dict(GPT, model_type="bert")
TOLERANCE = 1e-5
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2 sp pp2": {**TP2, **SP, **PP2},
    "pp2 vpp2 dp2 overlap": {**VPP2, **DP2, **OVERLAP},
    "tp2 pp2": {**TP2, **PP2},
}


@pytest.fixture(scope="module")
def reference() -> Trial:
    return trained(BERT)


@pytest.mark.variant("test_layout_equals_one_process")
@pytest.mark.parametrize("name", varied(LAYOUTS, "tp2 sp pp2"))
def test_a_layout_of_bert_equals_one_process(
    name: str, reference: Trial, trial: Callable[..., Trial]
) -> None:
    layout = trial(BERT, **LAYOUTS[name])
    layout.adopt(reference, 4)
    assert set(layout.train(resume=4)) == {0}
    loss, norm = largest_difference(layout, reference, 5)
    assert loss <= TOLERANCE
    assert norm <= TOLERANCE


@pytest.mark.variant("test_resume_is_exact")
def test_bert_resumes_bit_by_bit(trial: Callable[..., Trial]) -> None:
    settings = dict(dropout=0.1, **PP2)
    whole = trained(BERT, eval_interval_steps=2, **settings)
    resumed = trial(BERT, eval_interval_steps=2, **settings)
    resumed.adopt(whole, 4)
    assert set(resumed.train(resume=4)) == {0}
    assert resumed.exact == {step: whole.exact[step] for step in (5, 6)}


def _see_only_what_came_before() -> None:
    """A mask as a GPT has it: what a bidirectional model must not have."""
    import torch
    from megatron.core.models.bert.bert_model import BertModel

    def causal(self: Any, attention_mask: Any) -> Any:
        length = attention_mask.shape[1]
        return torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), diagonal=1)

    BertModel.bert_extended_attention_mask = causal


@pytest.mark.variant("test_resume_is_exact")
def test_words_see_what_comes_after_them(reference: Trial, trial: Callable[..., Trial]) -> None:
    blind = trial(BERT, train_steps=2)
    assert blind.train(prepare=_see_only_what_came_before) == [0]
    assert blind.exact[1] != reference.exact[1]
