"""hpctrain's settings of six published models beside Megatron-Bridge's, with every difference.

`recipes/NAME.json` is what people review: `pytest tests/golden --write-golden` writes it anew. A
difference without a reason fails, and so does a reason without a difference. The settings are those
that a GPU with TransformerEngine and Apex would see: the facts about both are patched, as neither
is here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from golden_files import Golden

pytest.importorskip("torch", reason="needs the megatron extra")

# Before megatron-core is imported: the CPU layer must come first.
import hpctrain.train.engines.megatron.assembly

assert hpctrain.train.engines.megatron.assembly is not None

import recipe_settings  # noqa: E402
from megatron.core.models.common.embeddings import rope_utils  # noqa: E402
from megatron.core.transformer.moe import moe_utils  # noqa: E402

from hpctrain.records.software import Library  # noqa: E402
from hpctrain.train import software  # noqa: E402
from hpctrain.train.engines.megatron import model, option_settings  # noqa: E402

# Kernels of TransformerEngine that megatron-core looks for when it checks a configuration.
_PERMUTATIONS = (
    "fused_permute",
    "fused_permute_with_probs",
    "fused_sort_chunks_by_index",
    "fused_sort_chunks_by_index_with_probs",
    "fused_unpermute",
)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend to have GPUs, TransformerEngine and Apex."""
    for module in (model, option_settings):
        monkeypatch.setattr(module, "on_cpu", lambda: False)
    found = Library(version="2.9.0")
    monkeypatch.setattr(software, "transformer_engine", lambda: found)
    monkeypatch.setattr(software, "apex_wgrad", lambda: found)
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb", object(), raising=False)
    for name in _PERMUTATIONS:
        monkeypatch.setattr(moe_utils, name, object(), raising=False)


def compared(name: str, directory: Path) -> tuple[dict[str, Any], Any, Any, dict[str, Any]]:
    recipe, shared = recipe_settings.read(name), recipe_settings.read("shared")
    left = recipe_settings.ours(recipe, directory)
    right = recipe_settings.theirs(recipe, shared)
    return recipe, left, right, recipe_settings.differences(left, right)


@pytest.mark.parametrize("name", recipe_settings.NAMES)
def test_every_difference_has_its_reason(name: str, tmp_path: Path, golden: Golden) -> None:
    recipe, left, right, found = compared(name, tmp_path)
    shared = recipe_settings.read("shared")
    reasons = {**shared["reasons"], **recipe.get("reasons", {})}
    missing = sorted(found.keys() - reasons.keys())
    assert not missing, f"{name}: no reason for {[(field, found[field]) for field in missing]}"
    gone = sorted(recipe.get("reasons", {}).keys() - found.keys())
    assert not gone, f"{name}: reasons without a difference: {gone}"
    defaults = recipe_settings.library_defaults()
    text = dict(
        recipe=recipe["recipe"],
        commit=shared["commit"],
        differences={
            field: {**pair, "reason": reasons[field]} for field, pair in sorted(found.items())
        },
        hpctrain=recipe_settings.set_values(left, defaults),
        megatron_bridge=recipe_settings.set_values(right, defaults),
    )
    golden(f"recipes/{name}.json", json.dumps(text, indent=1, sort_keys=False) + "\n")


def test_a_shared_reason_stands_for_a_difference(tmp_path: Path) -> None:
    found: set[str] = set()
    for name in recipe_settings.NAMES:
        directory = tmp_path / name
        directory.mkdir()
        found |= compared(name, directory)[3].keys()
    gone = sorted(recipe_settings.read("shared")["reasons"].keys() - found)
    assert not gone, f"reasons without a difference: {gone}"


def test_a_changed_setting_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison reads all fields, not a list of them."""
    before = compared("llama3_8b", tmp_path)[3].keys()
    monkeypatch.setattr(option_settings, "message_settings", lambda config: {})
    monkeypatch.setattr(model, "message_settings", lambda config: {})
    after = compared("llama3_8b", tmp_path)[3].keys()
    assert after - before == {"transformer.cross_entropy_loss_fusion"}
