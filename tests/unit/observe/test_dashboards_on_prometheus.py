"""Every query of the dashboards has data in a real Prometheus; what it refuses is told.

Two hours of a fleet are written by `promtool tsdb create-blocks-from`, with the metrics of DCGM
exporter and node_exporter, so that no query may be empty for what it needs.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import hpctrain
from fabricated_metrics import FLEET, SEEN_TWICE, SERVICE, fabricated_metrics
from fetched_prometheus import fetched_prometheus
from waiting import wait_until

from bench.free_ports import free_port
from hpctrain.base.errors import NoSuchRunError, UsageError
from hpctrain.observe.dashboard_data import (
    PrometheusServer,
    QueryRefusedError,
    collect_dashboards,
    packaged_dashboards,
)
from hpctrain.observe.grafana_dashboard import Dashboard, Panel, PanelRow, Query
from hpctrain.runs.state import RunState

pytestmark = pytest.mark.nightly("a real Prometheus, which is fetched")

HOURS = 2
DASHBOARDS = {one.short_name: one for one in packaged_dashboards()}


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, float]]:
    """The URL of a server with the fleet's metrics, and the time at which they end."""
    programs, place = fetched_prometheus(), tmp_path_factory.mktemp("prometheus")
    end = time.time() // 60 * 60
    (place / "metrics").write_bytes(fabricated_metrics(end - HOURS * 3600, end))
    command = [programs.promtool, "tsdb", "create-blocks-from", "openmetrics", "metrics", "data"]
    subprocess.run(command, cwd=place, check=True, capture_output=True, timeout=300)
    (place / "prometheus.yml").write_text("{}\n")
    port = free_port()
    arguments = [
        *(programs.prometheus, "--config.file=prometheus.yml", "--storage.tsdb.path=data"),
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (place / "log").open("wb") as log:
        server = subprocess.Popen(arguments, cwd=place, stdout=log, stderr=log)
    try:
        _wait_until_ready(f"http://127.0.0.1:{port}", server, place / "log")
        yield f"http://127.0.0.1:{port}", end
    finally:
        server.terminate()
        server.wait(timeout=60)


def _wait_until_ready(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    def answers() -> bool:
        assert server.poll() is None, log.read_text()[-2000:]
        try:
            PrometheusServer(url).now("1", time.time())
        except (UsageError, QueryRefusedError):  # no socket yet, or it is still reading its blocks
            return False
        return True

    wait_until(answers, lambda: f"an answer of Prometheus: {log.read_text()[-2000:]}")


@pytest.mark.parametrize("name", DASHBOARDS)
def test_every_query_has_data(name: str, prometheus: tuple[str, float]) -> None:
    url, end = prometheus
    runs = [FLEET[0].run] if name == "run" else []
    asked = [DASHBOARDS[name]]
    (found,) = collect_dashboards(PrometheusServer(url), asked, end, runs, HOURS * 3600)
    for panel in found.panels():
        assert not panel.refusals, panel.panel.title
        for query, answer in zip(panel.panel.expressions, panel.answers, strict=True):
            assert answer.series, f"{panel.panel.title}: {query}"
    for one in found.annotations:
        assert one.answer.series and not one.answer.refusal, one.annotation.text


def test_other_exporters_are_joined_by_node(prometheus: tuple[str, float]) -> None:
    url, end = prometheus
    asked = [DASHBOARDS["nodes"]]
    (found,) = collect_dashboards(PrometheusServer(url), asked, end, [FLEET[1].run], 3600.0)
    table = next(one for one in found.panels() if one.panel.title == "Every node")
    for column, answer in zip(table.panel.columns, table.answers, strict=True):
        nodes = {one.labels["node"] for one in answer.series}
        assert nodes == set(FLEET[1].nodes), column.name


def test_a_run_that_two_exporters_read_counts_once(prometheus: tuple[str, float]) -> None:
    url, end = prometheus
    (found,) = collect_dashboards(PrometheusServer(url), [DASHBOARDS["fleet"]], end)
    running = [run for run in FLEET if run.state(1.0) is RunState.RUNNING]
    assert SEEN_TWICE in {run.run for run in running}
    figures = {one.panel.title: one.answers[0].series[0].last for one in found.panels()}
    assert figures["Running"] == len(running)
    assert figures["GPUs held"] == sum(8 * len(run.nodes) for run in running)


def test_the_single_run_is_one_that_runs(prometheus: tuple[str, float]) -> None:
    url, end = prometheus
    (found,) = collect_dashboards(PrometheusServer(url), [DASHBOARDS["run"]], end)
    assert found.chosen["run"] == ["gpt175b-7f3a"]  # gpt13b-00af is done


def test_the_page_is_written(prometheus: tuple[str, float], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    arguments = ("report", "--dashboards", "--prometheus", prometheus[0], "--require-data")
    outcome = hpctrain(*arguments, "--range", f"{HOURS}h", "gpt175b", "-o", str(page))
    assert outcome.exit_code == 0, outcome.stderr
    text = page.read_text()
    # No GPU of this run has an XID error, and no panel of another kind is empty.
    assert text.count("No data.") == 1 and "refuses" not in text
    of_runs = [one for name, one in DASHBOARDS.items() if name != "service"]
    assert all(panel.title in text for one in of_runs for panel in one.panels())
    assert "one service" not in text, "a run was named"
    assert page.stat().st_mode & 0o077 == 0


def test_the_page_of_a_service_has_its_dashboard_only(
    prometheus: tuple[str, float], tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    arguments = ("report", "--dashboards", "--prometheus", prometheus[0], "--require-data")
    outcome = hpctrain(*arguments, "--range", f"{HOURS}h", "chat", "-o", str(page))
    assert outcome.exit_code == 0, outcome.stderr
    text = page.read_text()
    assert all(one.title in text for one in DASHBOARDS["service"].panels())
    assert "fleet" not in text
    assert "No data." not in text and "refuses" not in text


def test_figures_of_a_service(prometheus: tuple[str, float]) -> None:
    """A replica that two exporters read counts once; the promise is compared with what it is of."""
    url, end = prometheus
    asked = [DASHBOARDS["service"]]
    (found,) = collect_dashboards(PrometheusServer(url), asked, end, [SERVICE], HOURS * 3600)
    panels = {one.panel.title: one for one in found.panels()}
    assert panels["Ready"].answers[0].series[0].last == 3
    rate = {
        one.labels.get("service"): one.last for one in panels["Tokens per second"].answers[1].series
    }
    assert rate[SERVICE] == pytest.approx(3 * 31 * 128, rel=0.02)
    promised, _, measured, of_limit = (
        {(one.labels["latency"], one.labels["percentile"]): one.last for one in answer.series}
        for answer in panels["Every promise"].answers
    )
    assert promised.keys() == measured.keys() == of_limit.keys() and len(promised) == 6
    for key, share in of_limit.items():
        assert share == pytest.approx(measured[key] / promised[key])
    assert measured["tpot", "p50"] == pytest.approx(0.017, rel=0.2), "within the buckets' width"


def test_missing_data_fail_on_demand(prometheus: tuple[str, float], tmp_path: Path) -> None:
    """A run in the queue has no speed."""
    page = tmp_path / "page.html"
    arguments = ("report", "--dashboards", "--prometheus", prometheus[0], "-o", str(page), "moe8x")
    assert hpctrain(*arguments, "--range", "10min").exit_code == 0
    outcome = hpctrain(*arguments, "--range", "10min", "--require-data")
    assert outcome.exit_code == 1 and "run, Time of a step: no data" in outcome.stderr


def test_a_refused_query_is_told(prometheus: tuple[str, float]) -> None:
    panel = Panel("Wrong", "Wrong.", "stat", (Query("sum by (run"),))
    dashboard = Dashboard("hpctrain-x", "x", "x", (), (PanelRow("x", (panel,)),))
    url, end = prometheus
    (found,) = collect_dashboards(PrometheusServer(url), [dashboard], end)
    assert "parse error" in found.panels()[0].refusals[0]


def test_an_unknown_run_is_refused(prometheus: tuple[str, float]) -> None:
    url, end = prometheus
    with pytest.raises(NoSuchRunError, match="no run `nobody`"):
        collect_dashboards(PrometheusServer(url), packaged_dashboards(), end, ["nobody"])
