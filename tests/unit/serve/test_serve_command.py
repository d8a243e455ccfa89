"""`hpctrain serve`: what it prints and how it ends, without Slurm and engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import hpctrain

from hpctrain.records.service_records import Address, Traffic
from hpctrain.runs.service_status import ReplicaStatus, ServiceStatus
from hpctrain.serve.load.measurement import (
    Failures,
    MeasuredQuantile,
    Measurement,
    ObjectiveResult,
    ServiceTest,
)
from hpctrain.serve.serve_text import measured_lines, status_lines

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "serve70b" / "full.yaml"


def test_a_plan_as_json_has_promises_that_hold() -> None:
    done = hpctrain("serve", "plan", "-p", "h100x16", str(EXAMPLE), "--json")
    assert done.exit_code == 0, done.stderr
    (plan,) = json.loads(done.stdout)["service_plan"]["plans"]
    assert plan["promises"] and all(one["holds"] for one in plan["promises"])
    assert all(one["predicted_seconds"] <= one["limit_seconds"] for one in plan["promises"])
    assert plan["cost_per_hour"] > 0 and plan["replica"]["gpu"].startswith("H100")


def test_a_limit_without_its_latency_is_priced_and_refused() -> None:
    words = ("serve", "plan", "-p", "h100x16", str(EXAMPLE), "--set", "objectives.p99=500ms")
    done = hpctrain(*words)
    assert done.exit_code == 3 and "objectives.p99" in done.stdout
    assert all(f"\n  {name} " in done.stdout for name in ("ttft", "tpot", "e2e"))


def test_weights_that_are_not_there_are_named_with_their_line() -> None:
    done = hpctrain("serve", "up", "-p", "h100x16", str(EXAMPLE), "--dry-run")
    assert done.exit_code == 3 and f"{EXAMPLE}:" in done.stderr and "weights.path" in done.stderr


@pytest.mark.parametrize("words", [("status",), ("scale", "2"), ("restart",), ("down", "-y")])
def test_a_service_that_does_not_exist(words: tuple[str, ...], tmp_path: Path) -> None:
    command, *rest = words
    done = hpctrain("serve", command, "chat", *rest, "--runs", str(tmp_path))
    assert done.exit_code == 6 and "no service `chat`" in done.stderr


def test_a_number_of_replicas_is_one(tmp_path: Path) -> None:
    done = hpctrain("serve", "scale", "chat", "many", "--runs", str(tmp_path))
    assert done.exit_code == 2 and "`many`" in done.stderr


def test_no_services_are_an_empty_table(tmp_path: Path) -> None:
    done = hpctrain("serve", "status", "--runs", str(tmp_path), "--json")
    assert done.exit_code == 0 and json.loads(done.stdout)["services"] == []


REPLICAS = (
    ReplicaStatus(
        name="r0",
        phase="ready",
        job_id=12,
        node="n001",
        age_seconds=65,
        in_rotation=True,
        walltime_seconds=7200,
    ),
    ReplicaStatus(
        name="r10",
        phase="queued",
        job_id=None,
        node=None,
        age_seconds=4,
        in_rotation=False,
        reason="Priority",
    ),
)
UP = ServiceStatus(
    service_id="chat-7f3a",
    state="serving",
    address=Address(
        epoch=1, job_id=9, node="n001", url="http://n001:8080", needs_token=True, time=0
    ),
    wanted=2,
    reason="the rate needs two",
    ready=1,
    replicas=REPLICAS,
    traffic=Traffic(
        time=100,
        begun=0,
        requests=1234,
        failed=5,
        refused=7,
        rate=2.5,
        running=3,
        waiting=4,
        kv_share=0.25,
        ttft_p99_seconds=0.5,
    ),
    restart="1 of 2 replicas follow the new spec",
    waits=("r10 waits for nodes",),
    problems=("r3 has failed twice in ten minutes: its engine does not start on this node",),
    controller_age_seconds=1,
    rotation_age_seconds=1,
    load_seconds=None,
    queue_seconds=None,
    events=(),
)
DOWN = UP.model_copy(
    update={
        "state": "down",
        "address": None,
        "replicas": (),
        "traffic": None,
        "restart": None,
        "waits": (),
        "problems": (),
    }
)

FAILED = Failures(
    kind="http 5xx", detail="503", count=2, request_ids=("a", "b"), planned_seconds=(1.0, 2.0)
)


def test_the_page_of_a_service_has_what_is_known() -> None:
    assert list(status_lines(UP)) == [
        "Service   chat-7f3a: serving",
        "Address   http://n001:8080 (with a token)",
        "Replicas  1 ready, 2 wanted: the rate needs two",
        "Load      2.5/s in the last minute, 3 computed, 4 wait, at most 25% of a KV",
        "          cache used, p99 ttft 500 ms, 1,234 requests in all, 5 failed, 7",
        "          refused",
        "Restart   1 of 2 replicas follow the new spec",
        "Waits     r10 waits for nodes",
        "Problem   r3 has failed twice in ten minutes: its engine does not start on this",
        "          node",
        "",
        "REPLICA  PHASE   JOB  NODE  FOR   LEFT",
        "r0       ready   12   n001  65 s  2 h",
        "r10      queued  -    -     4 s   -     Priority",
    ]


def test_what_is_not_known_of_a_service_has_no_line() -> None:
    assert list(status_lines(DOWN)) == [
        "Service   chat-7f3a: down",
        "Replicas  1 ready, 2 wanted: the rate needs two",
    ]


def test_promise_and_measurement_stand_side_by_side() -> None:
    quantile = MeasuredQuantile(
        latency="ttft",
        percentile="p99",
        seconds=0.5,
        low_seconds=0.25,
        high_seconds=None,
        samples=90,
        independent=40,
    )
    met, missed = (
        ObjectiveResult.model_construct(
            latency=latency,
            percentile="p99",
            limit_seconds=2.0,
            promised_low_seconds=0.1,
            promised_high_seconds=0.2,
            measured=measured,
            verdict=verdict,
            reason=reason,
        )
        for latency, measured, verdict, reason in (
            ("ttft", quantile, "met", "the whole interval is within the limit"),
            ("e2e", None, "not met", "the whole interval is above the limit"),
        )
    )
    measurement = Measurement.model_construct(
        requests=100,
        counted=90,
        warm_up_seconds=10,
        rate=5.0,
        answered_rate=4.5,
        failures=(FAILED,),
        refused=("the client was too slow",),
    )
    found = ServiceTest.model_construct(objectives=(met, missed), measurement=measurement)
    assert list(measured_lines(found)) == [
        "Measured  90 of 100 requests after the first 10 s, 5/s planned, 4.50/s answered,",
        "          2 failed",
        "Failed    2 x http 5xx (such as a, b): 503",
        "",
        "          LIMIT  PROMISED          MEASURED  95 OF 100 WITHIN",
        "p99 ttft  2 s    100 ms to 200 ms  500 ms    250 ms to never   met",
        "p99 e2e   2 s    100 ms to 200 ms  -         -                 not met",
        "",
        "p99 e2e   the whole interval is above the limit",
        "Client    the client was too slow",
        "Verdict   not met",
    ]
