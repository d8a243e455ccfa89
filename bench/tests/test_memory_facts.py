"""What is known of the memory of software in published rows."""

from __future__ import annotations

from dataclasses import MISSING, fields, replace

import pytest

from bench.memory_facts import MEMORY_FIELDS, copied_gradient_bytes, with_memory_facts
from bench.published import PublishedRow
from bench.published_recipes import Recipe
from hpctrain.plan.cost.case import Software
from hpctrain.spec.loader import load_calibration

ENTRY = load_calibration().software["megatron-deepspeed"]
RECIPE = Recipe(precision="bf16")
SOFTWARE = Software(**{field.name: 0.0 for field in fields(Software) if field.default is MISSING})


@pytest.mark.parametrize(
    ("key", "source", "narrow", "cached", "flat"),
    [
        ("nemo", "dgxc-benchmarking v25.04 memory log", 1, 0.2, 0),
        ("megatron-core", "dgxc-benchmarking v25.04 memory log", 1, 0.2, 0),
        ("mcore-plain", "SimuMax B200 real", 1, 0.0, 0),
        ("megatron-2023", "Zero-Bubble PP", 1, 0.0, 0),
        ("megatron-deepspeed", "BLOOM prequel sweep", 0, 0.0, 1),
        ("scaling", "Aleph Alpha layouts", 0, 0.0, 0),
        ("fsdp", "torchtitan", 0, 0.0, 0),
    ],
)
def test_every_software_has_its_tensors(
    key: str, source: str, narrow: int, cached: float, flat: int
) -> None:
    found = with_memory_facts(SOFTWARE, key, ENTRY, PublishedRow(line=2, source=source), RECIPE)
    assert (found.narrow_logits, found.cached, found.flat_copies) == (narrow, cached, flat)


def test_only_fp16_of_deepspeed_copies_gradients_for_its_optimizer() -> None:
    assert copied_gradient_bytes("megatron-deepspeed", "fp16") == 2 + 4
    assert copied_gradient_bytes("megatron-deepspeed", "bf16") == 0
    assert copied_gradient_bytes("nemo", "fp16") == 0


def test_bytes_are_those_of_the_entry_whose_software_it_is() -> None:
    row = PublishedRow(line=2, source="a paper")
    found = with_memory_facts(SOFTWARE, "megatron-deepspeed", ENTRY, row, RECIPE)
    assert all(getattr(found, name) == getattr(ENTRY, name) for name in MEMORY_FIELDS)
    assert found.main_bytes == ENTRY.main_bytes
    assert found.streaming == SOFTWARE.streaming, "a constant of time"
    short = with_memory_facts(SOFTWARE, "nemo", ENTRY, row, replace(RECIPE, moment_dtype="bf16"))
    assert short.main_bytes == ENTRY.main_bytes - 4


@pytest.mark.parametrize(("key", "gathered"), [("scaling-unfused-norms", 1), ("fsdp", 0)])
def test_a_head_that_gathers_its_logits(key: str, gathered: int) -> None:
    row = PublishedRow(line=2, source="a paper")
    found = with_memory_facts(SOFTWARE, key, ENTRY, row, RECIPE)
    assert (found.gathered_logits, found.gathered_inputs, found.gate_copy) == (gathered,) * 3
