"""What LoRA leaves to learn, and what that saves in memory."""

from __future__ import annotations

from typing import Any

import pytest

from hpctrain.plan.documents import Plan
from hpctrain.plan.parameters import total_parameters
from hpctrain.plan.planner import make_plan
from hpctrain.plan.tuning import learned_parameters, learned_share
from hpctrain.spec.loader import find_profile, load_profile
from hpctrain.spec.run import RunSpec

LLAMA_7B: dict[str, Any] = dict(
    family="llama", layers=32, hidden=4096, ffn=11008, heads=32, vocab=32000, seq=2048
)


def spec(**fields: Any) -> RunSpec:
    return RunSpec.model_validate(
        dict(
            name="tuned",
            model=LLAMA_7B,
            batch={"global": 8, "micro": 1},
            budget=dict(steps=4),
            optimizer=dict(lr=1e-4),
            checkpoint=dict(every_steps=2),
            engine=dict(name="ddp"),
            resources=dict(gpus=8),
            recompute="full",
        )
        | fields
    )


# peft prints for Llama-2-7B with r=8 and q_proj, v_proj: "trainable params: 4,194,304"; with all
# linear layers and r=16: 39,976,960.
@pytest.mark.parametrize(
    ("lora", "count"),
    [(dict(rank=8, targets=("q_proj", "v_proj")), 4_194_304), (dict(rank=16), 39_976_960)],
)
def test_known_counts(lora: dict[str, Any], count: int) -> None:
    assert learned_parameters(spec(lora=lora)) == count


def test_everything_learns_without_lora() -> None:
    assert learned_parameters(spec()) == total_parameters(spec().model)
    assert learned_share(spec()) == 1.0


def planned(**fields: Any) -> Plan:
    return make_plan(spec(**fields), load_profile(find_profile("a100x64")).document)


def test_frozen_weights_have_no_gradients_and_no_moments() -> None:
    share = learned_share(spec(lora={}))
    tuned = planned(lora={}).memory[0]
    weights = total_parameters(spec().model)  # 32000 is a multiple of 128
    assert tuned.weights_bytes == 2 * weights
    assert tuned.gradients_bytes == round(4 * share * weights)
    assert tuned.optimizer_bytes == round((4 + 8 * share) * weights)


def test_a_model_of_7_billion_is_tuned_where_it_could_not_be_trained() -> None:
    with pytest.raises(Exception, match="GiB"):
        planned()
    assert planned(lora={}).memory[0].total_bytes < 80 * 2**30
