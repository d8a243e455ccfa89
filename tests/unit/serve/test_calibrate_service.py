"""`hpctrain calibrate SERVICE`: what a service measured of itself corrects its next plan."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import hpctrain
from service_specimens import LLAMA_8B, SMALL, service_spec, weights

from hpctrain.base.errors import InvalidInputError
from hpctrain.records.service_layout import ServiceLayout
from hpctrain.serve.load.measurement import RequestRecord
from hpctrain.serve.make_plan import plan_service, read_model, service_request
from hpctrain.serve.plan.measured_speed import MeasuredSpeed
from hpctrain.serve.plan.routing import Window
from hpctrain.serve.plan.search import bound, simulated
from hpctrain.serve.plan.traffic import draw_requests
from hpctrain.site.calibrate_service import calibrate_service, is_service_directory
from hpctrain.spec.calibration import SiteCalibration
from hpctrain.spec.loader import load_document, load_named_profile

REAL = MeasuredSpeed(decode_factor=1.5, prompt_factor=2.0, request_seconds=0.05)


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServiceLayout:
    """A service that has been planned, and measured on GPUs that are slower than predicted."""
    monkeypatch.chdir(tmp_path)
    weights(tmp_path, LLAMA_8B)
    spec, profile = service_spec(tmp_path), load_named_profile("h100x16")
    plan = plan_service(spec, [profile]).chosen
    assert plan is not None
    layout = ServiceLayout(tmp_path / "runs/small-1a2b")
    layout.create()
    layout.spec.write_text(SMALL)
    layout.profile.write_text(load_text("h100x16"))
    layout.plan.write_text(plan.model_dump_json())
    request = service_request(spec, profile, read_model(spec))
    engine = replace(request.engine, speed=REAL)
    [(one,)] = [
        found
        for found in bound(request.offer, request.model, engine, request.demand)[0]
        if found[0].shape.decided
    ]
    count = plan.count
    got = simulated(one, one.tables.usual, count, request.demand, 600)
    drawn = draw_requests(request.demand.traffic, 3600, 0)
    lines = []
    for number, (begin, first, whole) in enumerate(
        zip(got.arrival_seconds, got.ttft_seconds, got.e2e_seconds, strict=True)
    ):
        kept = number + Window(0.1, 0.2).counted(600).start
        record = RequestRecord(
            request_id=f"r{number}",
            planned_seconds=float(begin),
            sent_seconds=float(begin),
            prompt_tokens=int(drawn.prompt_tokens[kept]),
            asked_tokens=int(drawn.output_tokens[kept]),
            first_token_seconds=float(begin + first),
            last_token_seconds=float(begin + whole),
            answered_tokens=int(drawn.output_tokens[kept]),
        )
        lines.append(record.to_line())
    failed = RequestRecord("r-x", 1.0, 1.0, 10, 10, failure="timeout")
    (layout.tests / "first.jsonl").write_text("\n".join([*lines, failed.to_line()]) + "\n")
    return layout


def load_text(name: str) -> str:
    from hpctrain.spec.loader import PACKAGED_PROFILES

    return (PACKAGED_PROFILES / f"{name}.yaml").read_text()


def test_factors_are_those_of_the_engine_that_was_measured(service: ServiceLayout) -> None:
    assert is_service_directory(service.directory)
    found = calibrate_service(service.directory)
    assert found.measured.decode_factor == pytest.approx(1.5, rel=0.08)
    assert found.measured.prompt_factor == pytest.approx(2.0, rel=0.35)
    assert found.measured.request_seconds == pytest.approx(0.05, rel=0.3)
    assert found.error_before > 0.3 > 2 * found.measured.error
    assert found.answers == 420 and found.engine == "vllm"


def test_the_command_writes_what_a_profile_names(service: ServiceLayout) -> None:
    site = Path("ours.yaml")
    site.write_text("extends: h100x16\nname: ours\n")
    done = hpctrain("calibrate", str(service.directory), "-p", str(site.absolute()))
    assert done.exit_code == 0, done.stderr
    assert "iterations without prompts" in done.stdout and "plans use it from now on" in done.stderr
    written = load_document(SiteCalibration, Path("ours.calibration.yaml")).document
    assert written.serving["vllm"].decode_factor == pytest.approx(1.5, rel=0.08)
    assert "420 answers" in written.serving["vllm"].provenance
    site.write_text("extends: h100x16\nname: ours\ncalibration: ours.calibration.yaml\n")
    spec = service_spec(Path.cwd())
    slow = service_request(spec, load_named_profile("./ours.yaml"), read_model(spec))
    assert slow.engine.speed.decode_factor == pytest.approx(1.5, rel=0.08)
    assert slow.error.log_deviation == written.serving["vllm"].error


def test_figures_of_training_stay(service: ServiceLayout) -> None:
    Path("ours.calibration.yaml").write_text(
        json.dumps(
            {"gpu": "H100-80GB SXM", "product_efficiency": 0.7, "provenance": "rung 3 of make gpu"}
        )
    )
    site = Path("ours.yaml")
    site.write_text("extends: h100x16\nname: ours\ncalibration: ours.calibration.yaml\n")
    calibrate_service(service.directory, "./ours.yaml")
    written = load_document(SiteCalibration, Path("ours.calibration.yaml")).document
    assert written.product_efficiency == 0.7 and "vllm" in written.serving


def test_scrapes_of_an_engine_are_measurements_too(service: ServiceLayout) -> None:
    """Eleven scrapes a minute apart: ten sequences at 20 ms, no prompts to speak of."""
    (service.tests / "first.jsonl").unlink()
    for minute in range(11):
        answers = 10 * minute
        text = "".join(
            f"{name} {value}\n"
            for name, value in {
                "vllm:prompt_tokens_total": 10 * minute,
                "vllm:generation_tokens_total": 60 * 10 / 0.02 * minute,
                "vllm:request_time_per_output_token_seconds_sum": 0.02 * answers,
                "vllm:request_time_per_output_token_seconds_count": answers,
                "vllm:time_to_first_token_seconds_count": answers,
            }.items()
        )
        file = service.tests / f"scrape-{minute:02d}.prom"
        file.write_text(text)
        os.utime(file, (1e9 + 60 * minute, 1e9 + 60 * minute))
    found = calibrate_service(service.directory)
    assert found.iterations == 10 and found.measured.prompt_factor == 1
    assert found.measured.decode_factor > 1.5


def test_what_cannot_be_used_is_refused(service: ServiceLayout) -> None:
    with pytest.raises(InvalidInputError, match="the service ran on `H100-80GB SXM`"):
        calibrate_service(service.directory, "a100x64")
    records = service.tests / "first.jsonl"
    records.write_text(records.read_text() + "no record\n")
    with pytest.raises(InvalidInputError, match=r"first.jsonl:422: is no record"):
        calibrate_service(service.directory)
    records.unlink()
    with pytest.raises(InvalidInputError, match="too few"):
        calibrate_service(service.directory)
    (service.tests / "a.prom").write_text("something 1\n")
    with pytest.raises(InvalidInputError, match="has no metric"):
        calibrate_service(service.directory)
