"""The page about a service: what it shows, what is left out, and that nothing in it can act."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from command_line import hpctrain

from hpctrain.base.durable import replace_text
from hpctrain.records.service_layout import ReplicaName
from hpctrain.records.service_records import ServiceEventKind, ServiceLedger
from hpctrain.report.service_page import write_service_page
from hpctrain.report.service_report import (
    ServiceReport,
    collect_service_report,
    coverage,
    marks_of_service,
)
from hpctrain.serve.load.measurement import FailureKind, RequestRecord
from hpctrain.serve.load.summary import failed_requests, latencies_over_time
from hpctrain.serve.service_files import ServiceFiles
from tests.fabricated_runs import fabricate
from tests.fabricated_services import (
    LIVES,
    NOW,
    Life,
    fabricate_service,
    fabricate_test,
    promise,
    start_engine_again,
)
from tests.unit.page.markup_reader import Page
from tests.unit.report.test_report_page import EVIL, is_harmless

SECTIONS = ["Overview", "Latency", "Replicas", "Cost", "Events", "Plan"]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> ServiceFiles:
    made = fabricate_service(tmp_path_factory.mktemp("runs"))
    fabricate_test(made)
    return made


@pytest.fixture(scope="module")
def report(service: ServiceFiles) -> ServiceReport:
    return collect_service_report(service, NOW)


@pytest.fixture(scope="module")
def page(report: ServiceReport) -> Page:
    return is_harmless(write_service_page(report))


def row_of(page: Page, first: str) -> list[str]:
    """The texts of the cells from one on that begins a row."""
    found = [one.text.strip() for one in page.all("td")]
    start = found.index(first)
    return found[start : start + 10]


def test_a_page_has_every_section_and_the_contents_lead_to_them(page: Page) -> None:
    assert [one.text for one in page.all("h2")] == SECTIONS
    anchors = {one.attributes["id"] for one in page.all("section")}
    assert {one.attributes["href"] for one in page.all("a")} == {f"#{one}" for one in anchors}
    assert [one.text for one in page.all("p", "nothing")] == ["The plan names no other one."]
    # Two latencies and the replicas of the test, all replicas, and the GPU-hours.
    assert len(page.all("svg", "chart")) == 5


def test_promise_stands_beside_measurement(page: Page, report: ServiceReport) -> None:
    (tested,) = report.tests
    found = tested.test.measurement.quantile("ttft", "p50")
    assert found is not None and found.seconds is not None
    cells = row_of(page, "time to the first token")
    assert cells[1:4] == ["p50", "200 ms", "110 ms"]
    assert cells[5] == f"{found.seconds * 1000:.3g} ms"
    verdicts = [[one.text for one in page.all("span", style)] for style in ("better", "worse")]
    assert verdicts == [["met"], ["not met", "not met"]]


def test_events_are_marks_of_the_picture(page: Page, report: ServiceReport) -> None:
    began = report.tests[0].test.measurement.began_seconds
    inside = [one for one in report.marks if 0 <= one.event_time - began <= 1500]
    assert [(one.kind, one.label) for one in inside] == [
        ("failure", "engine exit"),
        ("ready", "ready"),
        ("leave", "time limit"),
    ]
    titles = [one.text for one in page.all("title")]
    assert titles.count("r002-g001 is lost: engine exit: it was its time") == 2
    assert "r003-g001 draining: 2 min" in titles


def test_failed_requests_are_named(page: Page, report: ServiceReport) -> None:
    (tested,) = report.tests
    assert tested.failed and len(tested.failed) == tested.test.measurement.failed
    texts = [one.text for one in page.all("td")]
    assert all(one.request_id in texts for one in tested.failed)


def test_lives_and_money(page: Page, report: ServiceReport) -> None:
    assert report.spending is not None
    held = sum((one.ended or 7200) - (one.started or 0) for one in LIVES) * 4 / 3600
    assert report.spending.gpu_hours == pytest.approx(held)
    # Loading: the four that answered, and the one that still does.
    loading = sum((one.ready or 7200) - (one.started or 0) for one in LIVES) * 4 / 3600
    assert report.spending.starting_gpu_hours == pytest.approx(loading)
    assert row_of(page, "r003-g001")[7:9] == ["time limit, drain not finished", "2"]
    assert row_of(page, "r001-g001")[7:9] == ["preempted, drained", "0"]


def test_what_a_user_wrote_is_text(tmp_path: Path) -> None:
    service = fabricate_service(tmp_path)
    ledger = ServiceLedger(service.layout.ledger)
    ledger.append(ServiceEventKind.SCALE_REQUESTED, replicas=3, user=EVIL, reason=EVIL)
    is_harmless(write_service_page(collect_service_report(service, NOW)))


@pytest.mark.parametrize(
    "broken",
    [
        "plan.json",
        "service.yaml",
        "profile.yaml",
        "state.json",
        "tests/test-1.jsonl",
        "ledger.jsonl",
    ],
)
def test_what_cannot_be_read_takes_nothing_else_with_it(tmp_path: Path, broken: str) -> None:
    service = fabricate_service(tmp_path)
    fabricate_test(service, seconds=60.0, lost=())
    (service.layout.directory / broken).write_text("{torn")
    found = collect_service_report(service, NOW)
    page = is_harmless(write_service_page(found))
    assert [one.text for one in page.all("h2")] == SECTIONS
    told = " ".join(one.part for one in found.unread)
    if broken not in ("state.json", "ledger.jsonl"):  # of which a line or a record may be torn
        assert told, broken


def test_a_service_that_has_just_begun(tmp_path: Path) -> None:
    service = fabricate_service(tmp_path, lives=())
    page = is_harmless(write_service_page(collect_service_report(service, NOW)))
    assert "0 of 3 ready" in [one.text.strip() for one in page.all("span", "state")]


# -- windows of latencies --------------------------------------------------------------------------


def request(planned: float, ttft: float, failure: FailureKind | None = None) -> RequestRecord:
    return RequestRecord(
        f"r{planned}",
        planned,
        planned,
        10,
        2,
        None if failure else planned + ttft,
        None if failure else planned + ttft + 0.02,
        2,
        (),
        failure,
    )


def test_windows_have_percentiles_of_what_was_planned_in_them() -> None:
    records = [request(n * 0.1, 0.1 + 0.001 * (n % 100)) for n in range(2000)]
    (found,) = latencies_over_time(records, [promise("ttft", "p99", 0.15, 0.1)])
    assert found.window_seconds == 10.0 and len(found.windows) == 20
    assert {one.requests for one in found.windows} == {100}
    assert {round(one.p50_seconds or 0, 3) for one in found.windows} <= {0.149, 0.15}
    assert found.slow_count == pytest.approx(49.5 * 20, abs=10), "one of 100 is at the limit"
    assert found.slow == tuple(sorted(found.slow, key=lambda one: one.planned_seconds))
    assert len(found.within) + found.slow_count == 2000, "a short test shows every request"
    (longer,) = latencies_over_time([*records, *records], [])
    assert not longer.within


def test_a_failed_request_never_ends() -> None:
    records = [request(n * 0.1, 0.1) for n in range(1000)]
    records[500:502] = [request(50.0, 0.0, "reset"), request(50.1, 0.0, "reset")]
    (found,) = latencies_over_time(records, [promise("ttft", "p99", 0.15, 0.1)])
    gaps = [one.begin for one in found.windows if one.p99_seconds is None]
    assert gaps == [50.0] and found.windows[5].failed == 2
    assert [one.kind for one in failed_requests(records)] == ["reset", "reset"]


def test_windows_grow_with_a_test() -> None:
    slow = [request(n * 10.0, 0.1) for n in range(500)]
    (found,) = latencies_over_time(slow, [])
    assert found.window_seconds * len(found.windows) >= 4990
    assert all(one.requests >= 90 for one in found.windows[:-1])
    assert found.latency == "ttft" and not found.slow


# -- coverage and marks ----------------------------------------------------------------------------


def test_coverage_counts_replicas_that_answer_at_once(tmp_path: Path) -> None:
    lives = (
        Life("r001-g001", ready=100),
        Life("r002-g001", ready=200, told=1000, ended=1010, cause="preempted"),
    )
    service = fabricate_service(tmp_path, lives=lives, age=2100.0)
    found = collect_service_report(service, NOW)
    assert found.coverage is not None
    assert found.coverage.wall_seconds == 2000 and found.coverage.with_any == 1.0
    # It was withdrawn a second after it was told.
    assert found.coverage.with_needed == pytest.approx(800 / 2000, abs=0.001)
    assert coverage((), 1, NOW) is None


def test_an_engine_that_is_started_again_is_a_failure(tmp_path: Path) -> None:
    service = fabricate_service(tmp_path, lives=(Life("r001-g001"),))
    start_engine_again(service, ReplicaName(1, 1), NOW - 6200)
    marks = collect_service_report(service, NOW).marks
    assert [(one.kind, one.label) for one in marks] == [
        ("ready", "ready"),
        ("failure", "engine exit"),
        ("ready", "ready"),
    ]
    assert marks[1].words == "r001-g001 is lost: engine exit: exit 0 unasked"


def test_a_lost_replica_and_one_that_left_are_told_apart(report: ServiceReport) -> None:
    marks = marks_of_service(report.events, report.lives)
    kinds = {(one.kind, one.label) for one in marks}
    assert ("failure", "engine exit") in kinds and ("leave", "preempted") in kinds
    assert ("ready", "successor") in kinds
    assert not math.isnan(sum(one.event_time for one in marks))


# -- the command -----------------------------------------------------------------------------------


def test_the_command_writes_the_page_of_a_service(service: ServiceFiles, tmp_path: Path) -> None:
    page, runs = tmp_path / "page.html", str(service.layout.directory.parent)
    outcome = hpctrain("report", "chat", "--runs", runs, "-o", str(page))
    assert outcome.exit_code == 0, outcome.stderr
    assert "Promise and measurement" in page.read_text()
    assert page.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("report", "chat-7f3a", "gpt-0001"), 2, ["one service alone"]),
        (
            ("why", "chat-7f3a"),
            6,
            ["is a service, not a run", "hpctrain serve status chat-7f3a"],
        ),
    ],
)
def test_commands_about_runs_say_that_it_is_a_service(
    words: tuple[str, ...], code: int, told: list[str], tmp_path: Path
) -> None:
    fabricate_service(tmp_path)
    fabricate(tmp_path, "gpt-0001")
    outcome = hpctrain(*words, "--runs", str(tmp_path))
    assert outcome.exit_code == code and not [one for one in told if one not in outcome.stderr]


def test_a_name_that_begins_a_run_and_a_service_is_the_runs(tmp_path: Path) -> None:
    fabricate_service(tmp_path, "gpt-serve")
    run = fabricate(tmp_path, "gpt-0001")
    replace_text(run.layout.spec, "name: x")
    outcome = hpctrain("report", "gpt", "--offline", "--runs", str(tmp_path), "-o", "-")
    assert outcome.exit_code == 0 and "gpt-0001" in outcome.stdout
