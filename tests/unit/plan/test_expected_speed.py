"""What a plan assumes about GPUs and links, and what a launch is told to compare with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from planned_job import planned_job
from planner_knowledge import knowledge_of

from hpctrain.engines.training import speed_check_config, speed_check_mode
from hpctrain.plan.cost.expected_speed import ExpectedSpeed, expected_speed
from hpctrain.plan.job import TrainingJob
from hpctrain.plan.request import Knowledge, PlanRequest
from hpctrain.spec.loader import find_profile, load_calibration, load_profile, load_run_spec

MIB = 2**20


def made(
    profile: str, *overrides: str, example: str = "llama7b.yaml"
) -> tuple[TrainingJob, ExpectedSpeed]:
    site = load_profile(find_profile(profile)).document
    spec = load_run_spec(Path("examples") / example, overrides).document
    known = knowledge_of(site)
    job = planned_job(spec, site, known)
    expected = expected_speed(PlanRequest(spec, site, known), job.plan)
    assert expected is not None
    return job, expected


def test_links_inside_a_node_are_nvlinks_and_between_nodes_network_cards() -> None:
    tp8 = ("resources.gpus=16", "parallel.tp=8", "batch.micro=1")
    job, expected = made("h100x16", *tp8)
    plan = job.plan
    calibration = load_calibration()
    known = knowledge_of(job.profile).gpu
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
    job, _ = made("h100x16", "resources.gpus=8")
    unknown = Knowledge(None, load_calibration())
    assert expected_speed(PlanRequest(job.spec, job.profile, unknown), job.plan) is None
    config = speed_check_config(job, None)
    assert config is not None
    assert {axis.expected_bytes_per_second for axis in config.axes} == {None}


def test_messages_are_long_enough_for_their_bandwidth_and_no_longer() -> None:
    job, expected = made("h100x16", "resources.gpus=16", "parallel.tp=8")
    config = speed_check_config(job, expected)
    assert config is not None and config.fabric == "infiniband"
    assert {axis.axis: axis.message_bytes for axis in config.axes} == {
        "tp": 64 * MIB,
        "dp": 256 * MIB,
    }


def mode_of(job: TrainingJob, **site: Any) -> str:
    return speed_check_mode(replace(job, profile=job.profile.model_copy(update=site)))


def test_the_site_decides_where_the_spec_does_not() -> None:
    job, _ = made("h100x16", "resources.gpus=8")
    spec, sandbox = job.spec, replace(job, profile=load_profile(find_profile("sandbox")).document)
    assert (mode_of(job), mode_of(sandbox)) == ("report", "off")
    for mode in ("off", "report", "exclude"):
        assert mode_of(job, speed_check=mode) == mode_of(sandbox, speed_check=mode) == mode
    chosen = spec.supervise.speed_check.model_copy(update={"mode": "report"})
    own = spec.supervise.model_copy(update={"speed_check": chosen})
    decided = spec.model_copy(update={"supervise": own})
    assert mode_of(replace(job, spec=decided), speed_check="exclude") == "report"
    engine = spec.engine.model_copy(update={"name": "megatron-lm"})
    external = spec.model_copy(update={"engine": engine})
    assert mode_of(replace(job, spec=external)) == "off"
