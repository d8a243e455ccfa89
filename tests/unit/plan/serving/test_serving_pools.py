"""Separate pools for prompts and answers: their sizes, the network between them, the sentence."""

from __future__ import annotations

from dataclasses import replace

import pytest
from serving_offers import CHAT, TPOT, TTFT, demand, engine, model, offer

from hpctrain.serve.plan.disaggregation import (
    Pools,
    disaggregated,
    pools_sentence,
    transfer_seconds,
)
from hpctrain.serve.plan.search import Demand, Verdict, search


def together(asked: Demand, **changes: object) -> Verdict:
    found = search(offer(**changes), model(), engine(tp=4, batch_tokens=2048), asked).best
    assert found is not None
    return found


def pools(asked: Demand, **changes: object) -> Pools:
    found = disaggregated(together(asked, **changes), asked)
    assert found is not None
    return found


def test_each_pool_is_sized_for_its_own_limit() -> None:
    usual = pools(demand(60.0))
    assert usual.prompt_replicas >= 2 and usual.answer_replicas >= 1
    assert usual.gpus == 4 * (usual.prompt_replicas + usual.answer_replicas)
    patient = pools(demand(60.0, objectives=(replace(TTFT, limit_seconds=5.0), TPOT)))
    assert patient.prompt_replicas < usual.prompt_replicas
    assert patient.answer_replicas == usual.answer_replicas
    strict = pools(demand(60.0, objectives=(TTFT, replace(TPOT, limit_seconds=0.022))))
    assert strict.answer_replicas > usual.answer_replicas


def test_keys_go_over_the_network_once() -> None:
    """80 layers x 8 heads x 128 x 2 x 2 bytes per token, a quarter on each of four GPUs."""
    asked = demand(20.0)
    found = together(asked)
    card = found.bounded.shape.offer.network_bandwidth
    [seconds] = transfer_seconds(found.bounded, asked.requests.prompt_tokens[:1].astype(float))
    tokens = float(asked.requests.prompt_tokens[0])
    assert seconds == pytest.approx(tokens * 80 * 8 * 128 * 2 * 2 / 4 / card)


def test_slow_networks_rule_pools_out() -> None:
    asked = demand(20.0)
    assert disaggregated(together(asked), asked) is not None
    assert disaggregated(together(asked, network_bandwidth=5e6), asked) is None


def test_the_sentence_says_whether_it_pays() -> None:
    asked = demand(40.0)
    found = together(asked)
    separate = pools(asked).gpus
    for count, words in ((separate // 4 + 3, "would save"), (1, "do not pay")):
        sentence = pools_sentence(replace(found, count=max(count, found.count)), asked)
        if count > found.count:
            assert words in sentence and f"{separate} GPUs" in sentence
    cramped = replace(asked, traffic=replace(CHAT, burstiness=1.0))
    assert pools_sentence(found, replace(cramped, objectives=(TTFT,))).endswith("have limits")


def test_pools_that_take_as_many_gpus_do_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = demand(20.0)
    found = together(asked)
    here = found.count * 4
    same = Pools(1, found.count - 1, 0.001, here)
    monkeypatch.setattr("hpctrain.serve.plan.disaggregation.disaggregated", lambda *_: same)
    assert "do not pay" in pools_sentence(found, asked)
    fewer = replace(same, gpus=here - 4)
    monkeypatch.setattr("hpctrain.serve.plan.disaggregation.disaggregated", lambda *_: fewer)
    assert f"would save {4 / here:.0%}" in pools_sentence(found, asked)
    monkeypatch.setattr("hpctrain.serve.plan.disaggregation.disaggregated", lambda *_: None)
    assert "with no number of GPUs" in pools_sentence(found, asked)
