"""What `serve status` and `serve test` print about one service."""

from __future__ import annotations

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
