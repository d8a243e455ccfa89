"""The dashboards of a real run: Slurm, exporter, Prometheus, and every query of every panel.

Which metrics a run has is tested elsewhere. Here a panel that needs nothing beside hpctrain may not
be empty for a run that trains and has lost a launch.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from command_line import hpctrain
from fetched_prometheus import fetched_prometheus
from rehearsal import PATIENCE_SECONDS, PlannedFault, Rehearsal, Stage

from hpctrain.observe.dashboard_data import (
    PrometheusServer,
    collect_dashboards,
    packaged_dashboards,
)
from hpctrain.sandbox.monitoring import Monitoring

pytestmark = pytest.mark.nightly("a real Prometheus, which is fetched")

SHOWN_SECONDS = 600.0


def watched_server(stage: Stage, run: Rehearsal) -> str:
    """Watch the runs that are there, until Prometheus has seen this one in its second launch."""
    programs = fetched_prometheus().directory
    stage.sandbox.monitor(Monitoring(programs, stage.runs, scrape_seconds=1, collect_seconds=0.5))
    url = stage.sandbox.environment()["HPCTRAIN_PROMETHEUS"]
    wanted = f'hpctrain_run_step{{run="{run.run.run_id}"}} > 30'
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not PrometheusServer(url).now(f"count_over_time(({wanted})[1h:1s]) > 3", time.time()):
        assert time.monotonic() < deadline, run.logs()
        time.sleep(0.2)
    return url


def test_panels_of_a_run_that_trains(stage: Stage, tmp_path: Path) -> None:
    crash = PlannedFault(epoch=1, rank=1, step=14, do="leave", code=3)
    waits = PlannedFault(epoch=2, rank=1, step=40, do="sleep")
    run = stage.start("name=shown", planned=(crash, waits))
    try:
        url = watched_server(stage, run)
        dashboards, names = packaged_dashboards(), [run.run.run_id]
        found = collect_dashboards(
            PrometheusServer(url), dashboards, time.time(), names, SHOWN_SECONDS
        )
        page = tmp_path / "page.html"
        arguments = ("report", "--dashboards", "--prometheus", url, "-o", str(page), "shown")
        outcome = hpctrain(*arguments, "--range", "10min", "--require-data")
    finally:
        stage.sandbox.monitor(None)
    panels = [panel for dashboard in found for panel in dashboard.panels()]
    assert not [panel.refusals for panel in panels if panel.refusals]
    assert not [panel.panel.title for panel in panels if panel.lacks_data]
    causes = next(one for one in panels if one.panel.title == "Ends of launches, by cause")
    assert {one.labels["cause"] for one in causes.answers[0].series} == {"crash"}
    assert outcome.exit_code == 0, outcome.stderr
    assert "crash" in page.read_text()
