"""Fields that change what is learned: documents in samples, wsd, first weights, router losses."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from dataset_specimens import config_of, opened
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from test_trainer_data import VOCAB, write_dataset
from trial_runs import (
    DP2,
    GPT,
    LLAMA,
    MODULE_GPT,
    MODULE_LLAMA,
    MakeTrial,
    assert_near,
)

from hpctrain.engines.megatron import MegatronConfig, with_model
from hpctrain.engines.train_json import parse_train_config
from hpctrain.train.engines.megatron.engine import build_optimizer
from hpctrain.train.engines.megatron.model import transformer_settings
from hpctrain.train.engines.models.build import build_module
from hpctrain.train.schedule import learning_rate

END = VOCAB - 1
WSD = dict(lr_decay_style="wsd", wsd_decay_steps=2, lr_warmup_steps=1, train_steps=6)


def document(**changes: Any) -> MegatronConfig:
    made = parse_train_config(json.dumps({**GPT, "engine": "megatron", **changes}))
    assert isinstance(made, MegatronConfig)
    return made


def of_model(**fields: Any) -> MegatronConfig:
    """A document whose record has these fields."""
    values = with_model(json.loads(json.dumps({**LLAMA, "engine": "megatron"})))
    values["model"] |= fields
    made = parse_train_config(json.dumps(values))
    assert isinstance(made, MegatronConfig)
    return made


def test_positions_begin_anew_and_ends_have_no_loss(tmp_path: Path) -> None:
    write_dataset(tmp_path / "a", 60, 1)
    given = dict(document_end=END, documents="separate", eod_mask_loss=True)
    apart = opened(config_of(MODULE_GPT, tmp_path / "a", **given), tmp_path).training
    joined = opened(config_of(MODULE_GPT, tmp_path / "a"), tmp_path).training
    ends = 0
    for batch, plain in zip(
        apart.microbatches(range(8)), joined.microbatches(range(8)), strict=True
    ):
        assert batch is not None and plain is not None
        assert torch.equal(batch.tokens, plain.tokens)
        assert bool((plain.loss_mask == 1).all()) and int(plain.positions[0, -1]) == 31
        assert torch.equal(batch.loss_mask == 0, batch.tokens == END)
        for tokens, positions in zip(batch.tokens, batch.positions, strict=True):
            begin = 0
            for place, token in enumerate(tokens.tolist()):
                assert positions[place] == place - begin
                begin = place + 1 if token == END else begin
                ends += token == END
    assert ends > 1


@pytest.mark.variant("test_positions_begin_anew_and_ends_have_no_loss")
def test_the_engines_learn_other_things_from_documents_apart(
    tmp_path: Path, trial: MakeTrial
) -> None:
    write_dataset(tmp_path / "a", 60, 1)
    data = dict(data_blend=((1.0, str(tmp_path / "a")),), train_steps=1, lr_decay_steps=2)
    losses = {}
    for name, changes in {
        "joined": {},
        "restart": dict(document_end=END, documents="restart"),
        "masked": dict(document_end=END, eod_mask_loss=True),
    }.items():
        run = trial(GPT, **data, **changes)
        assert run.train() == [0], run
        losses[name] = run.rows[0].loss
    assert len(set(losses.values())) == 3, losses


def test_a_mean_over_all_tokens_is_the_same_in_any_microbatches(
    tmp_path: Path, trial: MakeTrial
) -> None:
    """As Hugging Face's engines have it; a mean of means weighs short microbatches more."""
    write_dataset(tmp_path / "a", 60, 1)
    data: dict[str, Any] = dict(data_blend=((1.0, str(tmp_path / "a")),), document_end=END)
    data |= dict(eod_mask_loss=True, calculate_per_token_loss=True)
    whole, small = trial(GPT, **data, micro_batch_size=4), trial(GPT, **data, **DP2)
    for run in (whole, small):
        assert set(run.train()) == {0}
    assert_near(small, whole, 1)


@pytest.mark.parametrize("style", ["linear", "cosine", "exponential", "minus_sqrt"])
def test_wsd_is_that_of_megatron_core(style: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = document(**WSD, lr_wsd_decay_style=style)
    module = "hpctrain.train.engines.megatron.engine.get_megatron_optimizer"
    inner = SimpleNamespace(param_groups=[{}], scale_loss=None)
    monkeypatch.setattr(module, lambda *a, **k: inner)
    schedule = build_optimizer(config, cast(Any, SimpleNamespace(wrapped=[], settings=inner)))
    assert isinstance(schedule.schedule, OptimizerParamScheduler)
    for step in range(8):
        theirs = schedule.schedule.get_lr(inner.param_groups[0])
        assert learning_rate(config, step) == pytest.approx(theirs, rel=1e-6), step
        schedule.schedule.step(increment=1)


def test_first_weights_have_the_deviation_that_is_asked_for() -> None:
    settings = transformer_settings(of_model(init_std=0.01))
    weight = torch.empty(4, 4)
    assert settings.init_method is not None
    assert vars(settings.init_method(weight)) == {"hpctrain_initial_std": 0.01}
    made = json.dumps({**MODULE_LLAMA, "model": {**MODULE_LLAMA["model"], "init_std": 0.003}})
    module = build_module(cast(Any, parse_train_config(made)), device=torch.device("cpu"))
    assert float(module.lm_head.weight.std()) == pytest.approx(0.003, rel=0.05)


def test_losses_of_the_router_are_those_that_are_asked_for() -> None:
    moe = dict(experts=4, top_k=2, ffn=64, balance="seq_aux_loss", balance_loss=0.02, z_loss=1e-3)
    settings = transformer_settings(of_model(moe=moe))
    assert settings.moe_router_load_balancing_type == "seq_aux_loss"
    assert (settings.moe_aux_loss_coeff, settings.moe_z_loss_coeff) == (0.02, 1e-3)
