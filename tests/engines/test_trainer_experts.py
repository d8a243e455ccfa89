"""Mixture of experts and token prediction: every layout computes what one process computes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from trial_runs import LLAMA, MOE, PP2, Trial, largest_difference, make_trial, trained
from variants import varied

import hpctrain.train.engines.megatron.model
import hpctrain.train.engines.megatron.snapshot
from hpctrain.records.run_records import TrainerExit
from hpctrain.train.engines.megatron.model import sharded_parts
from hpctrain.train.engines.megatron.snapshot import MegatronSnapshot

TOLERANCE = 1e-5

PREDICTING = dict(LLAMA, mtp_num_layers=1)
TP2 = dict(tensor_model_parallel_size=2, sequence_parallel=True)
DP2 = dict(data_parallel_size=2)
EP2 = dict(expert_model_parallel_size=2)

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2 ep2": {**DP2, **EP2},
    "pp2 dp2 ep2": {**PP2, **DP2, **EP2},
    "tp2 ep2": {**TP2, **EP2},
    "pp2, uneven": {**PP2, "pipeline_layer_split": ((3,), (1,))},
}


@pytest.fixture(scope="module")
def moe_reference() -> Trial:
    return trained(MOE)


def weights_only() -> None:
    """In a rank, before it trains: resume with the model alone, and an optimizer that is new.

    With expert parallelism megatron-core's optimizer state has another form than without.
    """

    def sharded_parts(
        self: MegatronSnapshot, metadata: dict[str, Any], *, is_loading: bool
    ) -> dict[str, Any]:
        state = original(self, metadata, is_loading=is_loading)
        if is_loading:
            del state["optimizer"]
        return state

    def load_parts(self: MegatronSnapshot, loaded: dict[str, Any]) -> None:
        for index, chunk in enumerate(self.model.bare):
            chunk.load_state_dict(loaded.get(f"model{index}", {}), strict=True)
        self.optimizer.inner.reload_model_params()
        self.optimizer.schedule.load_state_dict(loaded["schedule"])

    original = MegatronSnapshot._sharded_parts
    MegatronSnapshot._sharded_parts = sharded_parts  # type: ignore[method-assign]
    MegatronSnapshot._load_parts = load_parts  # type: ignore[method-assign]
    hpctrain.train.engines.megatron.snapshot.check_expert_spread = lambda *_: None


@pytest.fixture(scope="module")
def moe_continued(moe_reference: Trial, tmp_path_factory: pytest.TempPathFactory) -> Trial:
    """Steps 3 to 6 on one process, from the reference's weights."""
    made = make_trial(tmp_path_factory.mktemp("moe") / "continued", MOE)
    made.adopt(moe_reference, 2)
    assert made.train(resume=2, prepare=weights_only) == [0]
    return made


@pytest.mark.variant("test_a_fresh_start_is_that_of_one_process")
@pytest.mark.parametrize("name", LAYOUTS)
def test_experts_layout_equals_one_process(
    name: str, moe_continued: Trial, trial: Callable[..., Trial]
) -> None:
    layout = trial(MOE, **LAYOUTS[name])
    layout.adopt(moe_continued, 2)
    assert set(layout.train(resume=2, prepare=weights_only)) == {0}
    loss, norm = largest_difference(layout, moe_continued, 3)
    assert loss <= TOLERANCE
    assert norm <= TOLERANCE


def keep_first_weights(directory: Path) -> Callable[[], None]:
    """In a rank, before it trains: each part of the first weights goes to a file of the rank."""

    def prepare() -> None:
        def draw(seed: int, chunks: list[Any]) -> None:
            original(seed, chunks)
            parts = {
                (part.key, tuple(part.global_offset)): part.data.detach().clone()
                for chunk in chunks
                for part in sharded_parts(chunk.sharded_state_dict())
            }
            torch.save(parts, directory / f"{os.environ['RANK']}.pt")

        original = hpctrain.train.engines.megatron.model.draw_weights
        hpctrain.train.engines.megatron.model.draw_weights = draw

    return prepare


@pytest.mark.variant("test_a_fresh_start_is_that_of_one_process")
def test_experts_of_other_ranks_are_other_experts(
    trial: Callable[..., Trial], tmp_path: Path
) -> None:
    """A fresh start on two ranks and on one: the same four experts, which all differ."""
    found: list[dict[Any, torch.Tensor]] = []
    for name, layout in {"one": {}, "two": {**DP2, **EP2}}.items():
        directory = tmp_path / name
        directory.mkdir()
        made = trial(MOE, **layout, train_steps=1)
        assert set(made.train(prepare=keep_first_weights(directory))) == {0}
        ranks = [torch.load(directory / f"{rank}.pt") for rank in range(made.world_size)]
        found.append({place: part for parts in ranks for place, part in parts.items()})
        if name == "two":
            experts = [{place for place in parts if ".experts." in place[0]} for parts in ranks]
            assert len(experts[0]) == len(experts[1]) > 0 and not experts[0] & experts[1]
    one, two = found
    assert one.keys() == two.keys()
    for place, part in one.items():
        assert torch.equal(part, two[place]), place
    drawn: dict[str, list[torch.Tensor]] = {}
    for (key, _), part in one.items():
        if ".experts." in key:
            drawn.setdefault(key, []).append(part)
    # of the gated layer there are two halves of each expert
    assert {len(parts) for parts in drawn.values()} == {4, 8}
    for parts in drawn.values():
        for number, part in enumerate(parts):
            assert not any(torch.equal(part, other) for other in parts[:number])


@pytest.mark.parametrize("name", varied(LAYOUTS, "dp2 ep2"))
def test_a_fresh_start_is_that_of_one_process(name: str, moe_reference: Trial) -> None:
    layout = trained(MOE, **LAYOUTS[name])
    loss, norm = largest_difference(layout, moe_reference, 1)
    assert loss <= TOLERANCE
    assert norm <= TOLERANCE


def without_balance_loss() -> None:
    hpctrain.train.engines.megatron.model.BALANCE_LOSS_WEIGHT = 0.0


@pytest.mark.variant("test_a_fresh_start_is_that_of_one_process")
def test_the_balance_loss_is_in_the_gradients_and_not_in_the_reported_loss(
    moe_reference: Trial, trial: Callable[..., Trial]
) -> None:
    without = trial(MOE, train_steps=2)
    assert without.train(prepare=without_balance_loss) == [0]
    balanced, plain = moe_reference.rows[0], without.rows[0]
    assert balanced.loss_hex == plain.loss_hex
    assert balanced.grad_norm != plain.grad_norm


@pytest.mark.variant("test_a_fresh_start_is_that_of_one_process")
def test_experts_of_two_ranks_resume_exactly(trial: Callable[..., Trial]) -> None:
    whole = trained(MOE, **DP2, **EP2)
    again = trial(MOE, **DP2, **EP2)
    again.adopt(whole, 4)
    assert set(again.train(resume=4)) == {0}
    assert again.exact == {step: row for step, row in whole.exact.items() if step > 4}


def test_spreading_experts_in_the_middle_of_a_run_is_refused(
    moe_reference: Trial, trial: Callable[..., Trial]
) -> None:
    spread = trial(MOE, **DP2, **EP2)
    spread.adopt(moe_reference, 2)
    ranks = spread.start(resume=2)
    assert set(ranks.wait(60)) == {TrainerExit.CONFIG_ERROR}
    assert "expert_model_parallel_size was 1 and is now 2" in ranks.log(0)


@pytest.mark.variant("test_a_fresh_start_is_that_of_one_process")
def test_prediction_layers_behind_a_pipeline_equal_one_process(
    trial: Callable[..., Trial],
) -> None:
    alone, layout = trained(PREDICTING), trial(PREDICTING, **PP2)
    layout.adopt(alone, 4)
    assert set(layout.train(resume=4)) == {0}
    loss, norm = largest_difference(layout, alone, 5)
    assert loss <= TOLERANCE
    assert norm <= TOLERANCE
