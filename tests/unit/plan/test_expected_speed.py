"""What a plan assumes about GPUs and links, and what a launch is told to compare with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from planner_knowledge import knowledge_of

from hpctrain.engines.speed_check import speed_check_config, speed_check_mode
from hpctrain.plan.cost.expected_speed import ExpectedSpeed, expected_speed
from hpctrain.plan.documents import Plan
from hpctrain.plan.planner import make_plan
from hpctrain.plan.request import Knowledge, PlanRequest
from hpctrain.spec.loader import find_profile, load_calibration, load_profile, load_run_spec
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.run import RunSpec

MIB = 2**20


def made(
    profile: str, *overrides: str, example: str = "llama7b.yaml"
) -> tuple[RunSpec, ClusterProfile, Plan, ExpectedSpeed]:
    site = load_profile(find_profile(profile)).document
    spec = load_run_spec(Path("examples") / example, overrides).document
    known = knowledge_of(site)
    plan = make_plan(spec, site, known)
    expected = expected_speed(PlanRequest(spec, site, known), plan)
    assert expected is not None
    return spec, site, plan, expected


def test_links_inside_a_node_are_nvlinks_and_between_nodes_network_cards() -> None:
    tp8 = ("resources.gpus=16", "parallel.tp=8", "batch.micro=1")
    _, site, plan, expected = made("h100x16", *tp8)
    calibration = load_calibration()
    known = knowledge_of(site).gpu
    assert known is not None and plan.layout.tp == 8 and plan.layout.dp == 2
    shares = calibration.gpus[known.name if known.name in calibration.gpus else known.generation]
    nvlink = float(known.nvlink_bandwidth) * shares.nvlink_efficiency
    network = float(known.network_bandwidth)
    assert expected.bytes_per_second["tp"] == pytest.approx(nvlink, rel=0.01)
    # a group of two, on two nodes: each rank's share of the cards carries the whole message once
    assert 0.3 * network < expected.bytes_per_second["dp"] < network
    assert set(expected.bytes_per_second) == {"tp", "dp"}
    assert expected.product_flops_per_second == pytest.approx(
        float(known.peak["bf16"]) * shares.product_efficiency
    )


def test_without_a_known_gpu_nothing_is_expected() -> None:
    spec, site, plan, _ = made("h100x16", "resources.gpus=8")
    unknown = Knowledge(None, load_calibration())
    assert expected_speed(PlanRequest(spec, site, unknown), plan) is None
    config = speed_check_config(spec, site, plan, None)
    assert config is not None
    assert {axis.expected_bytes_per_second for axis in config.axes} == {None}


def test_messages_are_long_enough_for_their_bandwidth_and_no_longer() -> None:
    spec, site, plan, expected = made("h100x16", "resources.gpus=16", "parallel.tp=8")
    config = speed_check_config(spec, site, plan, expected)
    assert config is not None and config.fabric == "infiniband"
    assert {axis.axis: axis.message_bytes for axis in config.axes} == {
        "tp": 64 * MIB,
        "dp": 256 * MIB,
    }


def changed(site: ClusterProfile, **fields: Any) -> ClusterProfile:
    return site.model_copy(update=fields)


def test_the_site_decides_where_the_spec_does_not() -> None:
    spec, site, *_ = made("h100x16", "resources.gpus=8")
    sandbox = load_profile(find_profile("sandbox")).document
    assert speed_check_mode(spec, site) == "report"
    assert speed_check_mode(spec, sandbox) == "off"
    for mode in ("off", "report", "exclude"):
        assert speed_check_mode(spec, changed(site, speed_check=mode)) == mode
        assert speed_check_mode(spec, changed(sandbox, speed_check=mode)) == mode
    chosen = spec.supervise.speed_check.model_copy(update={"mode": "report"})
    own = spec.supervise.model_copy(update={"speed_check": chosen})
    decided = spec.model_copy(update={"supervise": own})
    assert speed_check_mode(decided, changed(site, speed_check="exclude")) == "report"
    engine = spec.engine.model_copy(update={"name": "megatron-lm"})
    external = spec.model_copy(update={"engine": engine})
    assert speed_check_mode(external, site) == "off"
