"""Metrics of services: what comes from which record, and what engines answer or do not."""

from __future__ import annotations

import http.server
import math
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
from fabricated_runs import fabricate
from fabricated_services import (
    GPUS_PER_REPLICA,
    LIVES,
    NOW,
    Life,
    fabricate_service,
    start_engine_again,
)
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from hpctrain.base.durable import append_line, replace_text
from hpctrain.observe import service_metrics
from hpctrain.observe.exporter import Exporter, ExporterSlurm
from hpctrain.observe.families import FAMILIES, PHASES
from hpctrain.observe.samples import Sample, exposed
from hpctrain.observe.service_metrics import (
    MetricsScraper,
    MetricsTarget,
    ServiceMetrics,
    fetch_metrics,
)
from hpctrain.records.ledger import Event, EventKind
from hpctrain.records.run_records import read_record, write_record
from hpctrain.records.service_layout import ReplicaName
from hpctrain.records.service_records import DrainRecord, ReplicaState
from hpctrain.serve.engines.registry import SERVING_ENGINES
from hpctrain.serve.plan.documents import ServicePlan
from hpctrain.serve.replica_lives import ReplicaLife, job_records, replica_life
from hpctrain.serve.service_files import ServiceFiles
from hpctrain.slurm.fake import FakeSlurm
from hpctrain.telemetry.scraped_text import Histogram, ScrapedText

# What vLLM 0.32.0 answered after twenty requests of 8 to 65 tokens to a tiny Llama on two cores.
CAPTURED = Path(__file__).resolve().parents[2] / "captured" / "vllm-0.32.0-metrics.txt"
Values = dict[tuple[str, ...], float]


class CountedFake(FakeSlurm):
    queries = 0


def exporter_of(runs: Path) -> Exporter:
    return Exporter((runs,), cast(ExporterSlurm, CountedFake()), 86400.0)


def values(samples: list[Sample]) -> Values:
    """Values by name and the values of labels, without the service's."""
    return {
        (one.name, *(text for name, text in one.labels if name != "service")): one.value
        for one in samples
        if one.family.subject == "service"
    }


def own_values(samples: list[Sample]) -> Values:
    return {(one.family.name,): one.value for one in samples if not one.family.subject}


class Engine:
    """An HTTP server that answers GET with the captured text, or with something else."""

    def __init__(self, text: str = "", status: int = 200, headers: dict[str, str] | None = None):
        self.asked: list[str] = []
        engine, body = self, (text or CAPTURED.read_text()).encode()

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                engine.asked.append(self.path)
                self.send_response(status)
                for name, value in (headers or {}).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def engine() -> Iterator[Engine]:
    opened = Engine()
    yield opened
    opened.close()


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of something that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


# -- records -------------------------------------------------------------------------------------


def test_replicas_promise_and_traffic_come_from_the_records(tmp_path: Path) -> None:
    fabricate_service(tmp_path)
    found = values(exporter_of(tmp_path).samples(NOW))
    (info,) = (key for key in found if key[0] == "hpctrain_service_info")
    assert info[2:] == ("a100x1", "vllm", "llama", "a100-80gb", "vllm-router", "http://n900:8080")
    phases = {key[1]: n for key, n in found.items() if key[0] == "hpctrain_service_replicas"}
    assert phases == {
        "queued": 0,
        "loading": 1,
        "ready": 2,
        "draining": 0,
        "ended": 2,
        "failed": 1,
    }
    for name, expected in {
        "replicas_wanted": 3,
        "replicas_needed": 2,
        "replicas_planned": 3,
        "replicas_ready": 2,
        "replicas_in_rotation": 2,
        "controller_epoch": 1,
        "rotation_timestamp_seconds": NOW - 2,
        "controller_timestamp_seconds": NOW - 4,
        "router_requests_total": 700_000,
        "planned_requests_per_second": 100,
    }.items():
        assert found[f"hpctrain_service_{name}",] == expected, name
    assert found["hpctrain_service_promised_seconds", "ttft", "p99"] == 0.45
    assert found["hpctrain_service_predicted_seconds", "tpot", "p99"] == 0.031
    assert found["hpctrain_service_promised_slow_ratio", "ttft", "p50"] == 0.5
    assert found["hpctrain_service_promised_slow_ratio", "ttft", "p99"] == 0.01
    assert found["hpctrain_service_router_failed_requests_total", "refused"] == 2
    assert found["hpctrain_service_replica_load_seconds", "r001-g002"] == 140


def test_a_lease_that_has_ended_is_no_ready_replica(tmp_path: Path) -> None:
    fabricate_service(tmp_path)
    found = values(exporter_of(tmp_path).samples(NOW + 21))
    assert found["hpctrain_service_replicas_ready",] == 0
    assert found["hpctrain_service_replicas_in_rotation",] == 0
    assert found["hpctrain_service_replicas", "ready"] == 2, "as the controller last saw them"


def test_ends_drains_and_money_come_from_the_ledgers(tmp_path: Path) -> None:
    fabricate_service(tmp_path)
    found = values(exporter_of(tmp_path).samples(NOW))
    ends = {key[1]: n for key, n in found.items() if "replica_ends" in key[0]}
    assert ends == {"preempted": 1, "engine_exit": 1, "time_limit": 1}
    assert found["hpctrain_service_drains_total", "finished"] == 1
    assert found["hpctrain_service_drains_total", "broken_off"] == 1
    assert found["hpctrain_service_broken_off_requests_total",] == 2
    assert found["hpctrain_service_replica_starts_total",] == 6
    held = sum((one.ended or 7200) - (one.started or 0) for one in LIVES)
    assert found["hpctrain_service_gpu_seconds_total",] == GPUS_PER_REPLICA * held
    # The spot price of a100x1 for a GPU-hour: jobs of its partition are preempted.
    cost = found["hpctrain_service_cost_total", "USD"]
    assert cost == pytest.approx(GPUS_PER_REPLICA * held / 3600 * 0.80)
    assert found["hpctrain_service_gpus",] == 3 * GPUS_PER_REPLICA


def test_a_job_that_vanished_costs_nothing_after_its_controller_saw_it(tmp_path: Path) -> None:
    """A node that dies writes no last line; the job would be held for ever."""
    service = fabricate_service(tmp_path, lives=(Life("r001-g001"),))
    before = values(exporter_of(tmp_path).samples(NOW))["hpctrain_service_gpu_seconds_total",]
    state = service.state
    assert state is not None
    gone = ReplicaState(
        name="r001-g001", phase="failed", job_id=101, node=None, since=NOW - 7200 + 1030
    )
    write_record(service.layout.state, state.model_copy(update={"replicas": (gone,)}))
    found = values(exporter_of(tmp_path).samples(NOW))
    after = found["hpctrain_service_gpu_seconds_total",]
    assert after == GPUS_PER_REPLICA * 1000 and before > after
    assert found["hpctrain_service_replica_ends_total", "unknown"] == 1


def test_a_job_that_goes_on_after_a_preemption_is_not_over(tmp_path: Path) -> None:
    """Between the end of its launch and the next line of its ledger it looks as if it were."""
    lives = (Life("r001-g001", told=7100, ended=7190, cause="preempted"),)
    service = fabricate_service(tmp_path, lives=lives)
    metrics = ServiceMetrics(service)
    for passes in range(2):
        metrics.targets(NOW)
        found = values(list(metrics.samples(NOW, {})))
        assert found["hpctrain_service_replica_starts_total",] == 1 + passes
        event = Event(event=EventKind.ATTEMPT_STARTED, time=NOW, job_id=101, restart_count=1)
        line = event.model_dump_json(exclude_defaults=True)
        append_line(service.layout.replica(ReplicaName(1, 1)).ledger, line)


def test_what_is_over_is_read_once(tmp_path: Path) -> None:
    service = fabricate_service(tmp_path)
    metrics = ServiceMetrics(service)
    metrics.targets(NOW)
    first = metrics.samples(NOW, {})
    name = next(one for one in service.layout.replica_names() if str(one) == "r001-g001")
    service.layout.replica(name).ledger.unlink()
    assert metrics.samples(NOW, {}) == first


@pytest.mark.parametrize("missing", ["plan.json", "state.json", "rotation.json", "traffic.json"])
def test_what_cannot_be_read_is_left_out(tmp_path: Path, missing: str) -> None:
    service = fabricate_service(tmp_path)
    (service.layout.directory / missing).write_text("{torn")
    samples = exporter_of(tmp_path).samples(NOW)
    assert own_values(samples)["hpctrain_exporter_unreadable_services",] == 0
    assert values(samples)["hpctrain_service_replicas_ready",] == 2


def test_a_newer_format_hides_no_other_service(tmp_path: Path) -> None:
    newer = fabricate_service(tmp_path, "newer-0001")
    newer.layout.state.write_text('{"schema_version": 99}')
    fabricate_service(tmp_path, "older-0002")
    samples = exporter_of(tmp_path).samples(NOW)
    own = own_values(samples)
    assert own["hpctrain_exporter_services",] == 2
    assert own["hpctrain_exporter_unreadable_services",] == 1
    assert {dict(one.labels).get("service") for one in samples} == {None, "older-0002"}


def test_services_and_runs_are_exported_side_by_side(tmp_path: Path) -> None:
    fabricate_service(tmp_path)
    fabricate(tmp_path, "gpt-0001")
    samples = exporter_of(tmp_path).samples(NOW)
    own = own_values(samples)
    assert own["hpctrain_exporter_runs",] == 1 and own["hpctrain_exporter_services",] == 1
    assert {dict(one.labels).get("run") for one in samples} == {None, "gpt-0001"}


def test_a_service_that_was_ended_long_ago_is_left_out(tmp_path: Path) -> None:
    lives = (Life("r001-g001", told=100, ended=150, cause="cancelled"),)
    service = fabricate_service(tmp_path, lives=lives, wanted=0)
    service.layout.down_request.touch()
    since = service.layout.ledger.stat().st_mtime
    for later, services in ((1000.0, 1), (100_000.0, 0)):
        own = own_values(exporter_of(tmp_path).samples(since + later))
        assert own["hpctrain_exporter_services",] == services


# -- engines -------------------------------------------------------------------------------------


def test_a_real_engine_is_exported_by_our_names(tmp_path: Path, engine: Engine) -> None:
    fabricate_service(tmp_path, urls=[engine.url, engine.url])
    samples = exporter_of(tmp_path).samples(NOW)
    found = values(samples)
    assert engine.asked == ["/metrics"], "one address is asked once"
    assert found["hpctrain_service_replica_answers", "r001-g002"] == 1
    assert found["hpctrain_service_prompt_tokens_total", "r001-g002"] == 411
    assert found["hpctrain_service_output_tokens_total", "r001-g002"] == 680
    assert found["hpctrain_service_kv_cache_used_ratio", "r001-g002"] == 0
    assert found["hpctrain_service_prefix_cache_queried_tokens_total", "r001-g002"] == 411
    for latency in ("ttft", "tpot", "e2e", "queue"):
        key = ("hpctrain_service_latency_seconds_count", latency, "r001-g002")
        assert found[key] == 20, latency
    total = found["hpctrain_service_latency_seconds_sum", "ttft", "r001-g002"]
    assert total == pytest.approx(3.6056439876556396)
    # 2 of 20 first tokens came within 0.1 s and all within 0.5 s, in vLLM's own buckets.
    slow = found["hpctrain_service_slow_requests_total", "ttft", "p99", "r001-g002"]
    inside = found["hpctrain_service_latency_seconds_bucket", "ttft", "r001-g002", "0.25"]
    assert slow == pytest.approx((20 - inside) * (1 - (0.45 - 0.25) / 0.25))
    text = exposed(samples, open_metrics=True).decode()
    (family,) = (
        one
        for one in text_string_to_metric_families(text)
        if one.name == "hpctrain_service_latency_seconds"
    )
    assert family.type == "histogram" and family.unit == "seconds"


def test_a_replica_that_does_not_answer_is_counted_and_not_waited_for(
    tmp_path: Path, engine: Engine, silent: str
) -> None:
    lives = [Life(f"r{number:03}-g001") for number in range(1, 42)]
    fabricate_service(
        tmp_path, lives=lives, urls=[engine.url, *(f"{silent}/{n}" for n in range(40))]
    )
    exporter = Exporter((tmp_path,), cast(ExporterSlurm, CountedFake()), 86400.0, 0.4)
    exporter.samples(NOW)  # reads documents for the first time
    began = time.monotonic()
    found = values(exporter.samples(NOW))
    assert time.monotonic() - began < 2
    answers = {key[1]: n for key, n in found.items() if key[0].endswith("replica_answers")}
    assert answers == {str(life.name): float(life.name == "r001-g001") for life in lives}


def test_what_still_owes_an_answer_is_not_asked_again(silent: str) -> None:
    scraper = MetricsScraper(seconds=0.2)
    target = MetricsTarget(silent, "/metrics")
    scraper.begin([target])
    owed = dict(scraper._asked)
    scraper.begin([target])
    assert not scraper._asked and scraper._owed == owed
    assert scraper.answers() == {}


def test_only_http_is_spoken() -> None:
    for url in ("file:///etc/passwd", "ftp://127.0.0.1/", "http://", "unix:/tmp/socket"):
        with pytest.raises(ValueError, match="is no address of HTTP"):
            fetch_metrics(MetricsTarget(url, "/metrics"))


def test_a_redirect_is_not_followed() -> None:
    other = Engine()
    first = Engine(status=302, headers={"Location": f"{other.url}/secret"})
    with pytest.raises(ValueError, match="status 302"):
        fetch_metrics(MetricsTarget(first.url, "/metrics"))
    assert first.asked and not other.asked
    first.close()
    other.close()


def test_an_answer_has_a_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_metrics, "_MOST_BYTES", 1000)
    endless = Engine("x" * 100_000)
    with pytest.raises(ValueError, match="does not end"):
        fetch_metrics(MetricsTarget(endless.url, "/metrics"))
    endless.close()


def test_a_slow_drip_ends_at_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
                try:
                    for _ in range(200):
                        connection.sendall(b"x")
                        time.sleep(0.02)
                except OSError:
                    pass

        threading.Thread(target=drip, daemon=True).start()
        began = time.monotonic()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ValueError, match="does not end"):
            fetch_metrics(MetricsTarget(url, "/metrics"), seconds=0.3)
        assert time.monotonic() - began < 2


def test_text_that_is_none_is_no_answer(tmp_path: Path) -> None:
    strange = Engine("vllm:prompt_tokens_total{ 1\n")
    fabricate_service(tmp_path, urls=[strange.url])
    found = values(exporter_of(tmp_path).samples(NOW))
    assert found["hpctrain_service_replica_answers", "r001-g002"] == 0
    strange.close()


# -- text and histograms -------------------------------------------------------------------------


def test_several_engines_in_one_process_add_up() -> None:
    text = "".join(
        f'kv{{engine="{n}"}} 0.{n}\nsum_total{{engine="{n}"}} 3\n'
        f't_bucket{{engine="{n}",le="1"}} {n}\nt_bucket{{engine="{n}",le="+Inf"}} 5\n'
        f't_count{{engine="{n}"}} 5\nt_sum{{engine="{n}"}} 2\n'
        for n in (1, 4)
    )
    found = ScrapedText(text + "sum_total_by_reason 7\n", ["kv", "sum_total", "t"])
    assert found.total("sum_total") == 6 and found.largest("kv") == 0.4
    assert found.histogram("t") == Histogram(((1.0, 5.0), (math.inf, 10.0)), 4.0)
    assert found.total("absent") is None and found.histogram("absent") is None
    assert found.total(None) is None and found.histogram(None) is None


@pytest.mark.parametrize(
    ("limit", "slow"),
    [(0.0, 100), (0.5, 90), (1.0, 80), (1.5, 60), (2.0, 40), (3.0, 40), (1e9, 40)],
)
def test_values_above_a_limit(limit: float, slow: float) -> None:
    """What is in the last bucket, which has no end, is above every limit."""
    histogram = Histogram(((1.0, 20.0), (2.0, 60.0), (math.inf, 100.0)), 1.0)
    assert histogram.above(limit) == pytest.approx(slow)


def test_every_engine_of_the_contract_has_the_latencies_that_are_promised() -> None:
    for name, one in SERVING_ENGINES.items():
        if one.metrics is not None:
            assert one.metrics.ttft_seconds and one.metrics.tpot_seconds, name


def test_labels_are_those_of_the_records() -> None:
    assert set(PHASES) == set(ReplicaState.model_fields["phase"].annotation.__args__)  # type: ignore[union-attr]
    allowed = {"user", "cluster", "engine", "model", "gpu", "router", "url"}
    allowed |= {"phase", "replica", "cause", "result", "reason", "currency"}
    allowed |= {"latency", "percentile"}
    of_services = [one for one in FAMILIES if one.subject == "service"]
    assert {label for one in of_services for label in one.labels} == allowed


# -- lives ---------------------------------------------------------------------------------------


def _lives(service: ServiceFiles) -> list[ReplicaLife]:
    """Tell the lives of all replicas, in order."""
    events, state = service.ledger.events(), service.state
    jobs = [job_records(service, name) for name in service.layout.replica_names()]
    return [replica_life(job, events, state, NOW) for job in jobs]


def test_lives_have_phases_without_gaps(tmp_path: Path) -> None:
    service: ServiceFiles = fabricate_service(tmp_path)
    lives = {one.name: one for one in _lives(service)}
    for life in lives.values():
        assert all(a.end == b.begin for a, b in zip(life.spans, life.spans[1:], strict=False))
    first = lives["r001-g001"]
    assert [one.phase for one in first.spans] == ["queued", "loading", "ready", "draining"]
    assert first.load_seconds == 120 and first.drain == "finished" and first.cause == "preempted"
    assert lives["r002-g001"].failed and lives["r002-g001"].drain is None
    assert lives["r003-g001"].drain == "broken_off"
    assert lives["r001-g002"].over_since is None
    assert lives["r001-g002"].spans[-1].end == NOW
    assert lives["r001-g002"].instead_of == "r001-g001"
    assert [one.phase for one in lives["r003-g002"].spans] == ["queued", "loading"]


def test_an_engine_that_is_started_again_in_its_job(tmp_path: Path) -> None:
    service = fabricate_service(tmp_path, lives=(Life("r001-g001"),))
    start_engine_again(service, ReplicaName(1, 1), NOW - 6200)
    (life,) = _lives(service)
    phases = [(one.phase, one.begin - NOW + 6200) for one in life.spans]
    assert phases[2:] == [("ready", -850), ("failed", 0), ("loading", 10), ("ready", 100)]
    assert life.over_since is None and life.ends == ("engine_exit",)


def test_a_job_that_is_killed_while_it_drains_breaks_off_what_was_in_flight(
    tmp_path: Path,
) -> None:
    service = fabricate_service(tmp_path)
    path = service.layout.replica(ReplicaName(1, 1)).drain
    drain = read_record(path, DrainRecord)
    assert drain is not None
    changes = {"ended_at": None, "broken_off": None, "in_flight": 7}
    write_record(path, drain.model_copy(update=changes))
    found = values(exporter_of(tmp_path).samples(NOW))
    assert found["hpctrain_service_broken_off_requests_total",] == 9
    assert found["hpctrain_service_drains_total", "broken_off"] == 2


def test_the_plan_of_the_fabricated_service_is_one(tmp_path: Path) -> None:
    service = fabricate_service(tmp_path)
    assert isinstance(service.plan(), ServicePlan)
    replace_text(service.layout.plan, "{}")
    assert service.plan() is None
