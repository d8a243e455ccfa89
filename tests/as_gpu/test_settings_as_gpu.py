"""Each setting of each family builds on a GPU's software, or is refused by name.

Found this way: BERT, experts with biases and prediction layers behind a pipeline could not start;
before them, every model without Apex and every latent attention (GPU_PATH, points 1 and 2).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import settings_sweep
from fresh_process import FreshProcess

STUBS = [Path(__file__).parents[1] / name for name in ("stubs", "stubs_apex")]
NEEDED = ["hpctrain.train.engines.megatron.assembly", "settings_sweep", "fake_worlds"]


@pytest.fixture(scope="module")
def apex_process() -> Iterator[FreshProcess]:
    """A process that has Apex's extension, too."""
    process = FreshProcess(STUBS, NEEDED)
    yield process
    process.close()


def unacceptable(outcomes: list[list[str]]) -> list[str]:
    """Return what is neither built nor refused by a sentence with the setting's name or value."""
    found = []
    for field, value, outcome in outcomes:
        words = {field, field.rpartition(".")[2], value.strip('"'), *BY_NAME.get(field, ())}
        if outcome != "built" and not any(word in outcome for word in words):
            found.append(f"{field}={value}: {outcome}")
        if outcome.split(":")[0].endswith(("Error", "Exception")):
            found.append(f"{field}={value}: {outcome}")
    return sorted(set(found))


# Names of a setting in the spec, or of what it is refused for.
BY_NAME = {
    "expert_tensor_parallel_size": ("etp",),
    "fp8_recipe": ("fp8",),
    "fp8_param": ("fp8_param_gather",),
    "transformer_impl": ("TransformerEngine",),
    "recompute_modules": ("moe_act", "mla_up_proj"),
    "moe_token_dispatcher_type": ("expert_model_parallel_size",),
    "moe_flex_dispatcher_backend": ("expert_model_parallel_size",),
    "virtual_pipeline_model_parallel_size": ("pipeline",),
    "model.bidirectional": ("encoder",),
    "model.norm": ("norm",),
    "model.norm_place": ("norm",),
    "model.rope.without": ("pattern",),
    "model.parallel_residual": ("parallel residual", "norm"),
    "model.attention.window": ("pattern",),
    "model.attention.qk_norm": ("norms of queries and keys",),
}


@pytest.mark.parametrize("family", settings_sweep.FAMILIES)
def test_settings_build_or_are_refused_by_name(family: str, engine_process: FreshProcess) -> None:
    outcomes = engine_process.call(settings_sweep.sweep, family=family)
    assert unacceptable(outcomes) == []
    assert outcomes[0][2] == "built", "the family itself"
    assert sum(outcome == "built" for _, _, outcome in outcomes) > len(outcomes) / 2


@pytest.mark.parametrize("family", ["gpt", "bert", "experts"])
def test_settings_build_with_apex(family: str, apex_process: FreshProcess) -> None:
    outcomes = apex_process.call(settings_sweep.sweep, family=family)
    assert unacceptable(outcomes) == []
    assert outcomes[0][2] == "built", "the family itself"


def test_fusions_follow_what_can_be_imported(
    engine_process: FreshProcess, apex_process: FreshProcess
) -> None:
    without = engine_process.call(settings_sweep.settings_of, family="llama")
    assert without == {
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": True,
        "bias_activation_fusion": True,
    }
    with_apex = apex_process.call(settings_sweep.settings_of, family="llama")
    assert with_apex == {**without, "gradient_accumulation_fusion": True}
    latent = engine_process.call(settings_sweep.settings_of, family="latent attention")
    assert not latent["apply_rope_fusion"]


def test_every_setting_has_values() -> None:
    """A new number in `MegatronConfig` needs values here; a new choice does not."""
    for family in settings_sweep.FAMILIES:
        for field in settings_sweep.swept_fields(family):
            settings_sweep.values_of(field)


@pytest.mark.parametrize(
    ("outcome", "good"),
    [
        ("built", True),
        ("`fp4` is not for this model", True),
        ("ValueError: fp4 is not supported", False),
        ("something else", False),
    ],
)
def test_what_counts_as_a_refusal(outcome: str, good: bool) -> None:
    assert (unacceptable([["fp4", '"e2m1"', outcome]]) == []) is good
