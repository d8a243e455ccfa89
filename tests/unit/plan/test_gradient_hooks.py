"""Sums of gradients in fewer bytes: what they save is a matter of the link."""

from __future__ import annotations

from pathlib import Path

import pytest
from planner_knowledge import knowledge_of

from hpctrain.plan.documents import Plan
from hpctrain.plan.planner import make_plan
from hpctrain.spec.loader import find_profile, load_profile, load_run_spec

EXAMPLE = Path(__file__).resolve().parents[3] / "examples/bert-4nodes"


def planned(profile: str, hook: str, gpus: int = 32) -> Plan:
    changes = [f"engine.ddp.hook={hook}", f"resources.gpus={gpus}"]
    spec = load_run_spec(EXAMPLE / "full.yaml", changes).document
    site = load_profile(find_profile(profile)).document
    return make_plan(spec, site, knowledge_of(site))


def seconds(profile: str, hook: str, gpus: int = 32) -> float:
    step = planned(profile, hook, gpus).step_seconds
    assert step is not None
    return step


def test_a_slow_link_wants_fewer_bytes() -> None:
    slow = str(EXAMPLE / "profile.yaml")
    exact, half = seconds(slow, "none"), seconds(slow, "bf16")
    assert seconds(slow, "hierarchical") == half < 0.6 * exact
    assert seconds(slow, "powersgd") < 0.4 * half


def test_a_fast_link_hardly_cares() -> None:
    assert seconds("a100x64", "hierarchical") == pytest.approx(seconds("a100x64", "none"), rel=0.05)


def test_inside_a_node_hierarchical_sums_are_exact() -> None:
    exact = seconds("a100x1", "none", 8)
    assert seconds("a100x1", "hierarchical", 8) == exact > seconds("a100x1", "bf16", 8)
