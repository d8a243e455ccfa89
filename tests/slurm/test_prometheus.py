"""Real alerts: runs go wrong, a real Prometheus notices, a real Alertmanager tells a webhook.

Each alert is induced, arrives as one that fires, and as one that is resolved after the recovery.
Conditions are those of the packaged rules; only the time that they have to last is shortened. What
conditions are there is played in tests/unit/observe.
"""

from __future__ import annotations

import json
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

import pytest
from fetched_prometheus import fetched_prometheus
from rehearsal import (
    PATIENCE_SECONDS,
    PlannedFault,
    Rehearsal,
    Stage,
    own_sandbox,
    wait_till_remembered,
    waits_for,
)
from webhook_server import Webhook, webhook

from hpctrain.records.ledger import EventKind
from hpctrain.runs.state import RunState
from hpctrain.sandbox.faults import kill_controller, restart_controller
from hpctrain.sandbox.monitoring import MONITORS, Monitoring, alerts_page, job_endpoints
from hpctrain.sandbox.processes import find_process, kill
from hpctrain.sandbox.repair import revive
from hpctrain.sandbox.sandbox import Sandbox
from hpctrain.sandbox.shape import default_shape

pytestmark = pytest.mark.nightly("a real Prometheus and Alertmanager, which are fetched")

STALL_SECONDS = 20
# Minutes become hundredths of a minute. No condition is changed.
DELAY_FACTOR = 0.01


@dataclass
class Watched:
    """A stage whose runs are watched, and what people were told about them."""

    stage: Stage
    hook: Webhook
    began: float = field(default_factory=time.time)

    def told(self, alert: str, status: str, **labels: str) -> list[dict[str, Any]]:
        """What arrived about an alert, `firing` or `resolved`, oldest first."""
        return [
            one
            for _, document in list(self.hook.received)
            for one in document["alerts"]
            if one["status"] == status
            and one["labels"]["alertname"] == alert
            and labels.items() <= one["labels"].items()
        ]

    def wait(self, alert: str, status: str, **labels: str) -> dict[str, Any]:
        """Until it has arrived; returns it."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (found := self.told(alert, status, **labels)):
            assert time.monotonic() < deadline, f"{alert} is not {status}: {self.ask('ALERTS')}"
            time.sleep(0.1)
        when = found[0]["startsAt" if status == "firing" else "endsAt"]
        seconds = datetime.fromisoformat(when).timestamp() - self.began
        print(f"{seconds:6.1f} s after the start of Prometheus: {alert} {status} {labels}")
        return found[0]

    def ask(self, query: str) -> list[dict[str, Any]]:
        """What Prometheus answers to a query now."""
        address = self.stage.sandbox.environment()["HPCTRAIN_PROMETHEUS"]
        words = urllib.parse.urlencode({"query": query})
        with urllib.request.urlopen(f"{address}/api/v1/query?{words}", timeout=60) as answer:
            document = json.load(answer)
        result: list[dict[str, Any]] = document["data"]["result"]
        return result

    def wait_for(self, query: str) -> list[dict[str, Any]]:
        """Until a query has an answer."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (found := self.ask(query)):
            assert time.monotonic() < deadline, f"no answer to {query}"
            time.sleep(0.2)
        return found


@pytest.fixture
def watched(stage: Stage) -> Iterator[Watched]:
    fetched_prometheus()
    with webhook() as hook:
        yield Watched(stage, hook)
        pids = monitors_of(stage.sandbox).values()
        stage.sandbox.monitor(None)
    assert not any(map(find_process, pids))
    assert stage.sandbox.is_up(), "Slurm was left alone"


def watch(watched: Watched) -> None:
    """From now on. The exporter asks Slurm as often as the runs that are there allow."""
    watched.stage.sandbox.monitor(
        Monitoring(
            fetched_prometheus().directory,
            watched.stage.runs,
            watched.hook.url,
            scrape_seconds=1,
            collect_seconds=0.5,
            delay_factor=DELAY_FACTOR,
        )
    )
    watched.began = time.time()


def name_again(watched: Watched) -> None:
    """Name the exporter as jobs name their endpoints: from now on each series comes twice."""
    exporter = watched.stage.sandbox.status().addresses["exporter"].removeprefix("http://")
    text = json.dumps([{"targets": [exporter], "labels": {}}])
    (job_endpoints(watched.stage.runs) / "again.json").write_text(text)


def start_all(stage: Stage, light: Stage) -> tuple[Rehearsal, Rehearsal, Rehearsal]:
    """Three runs beside each other: one hangs, one fails at each start, one has a loss of NaN.

    Only the last one is about numbers: the ranks of the others may be the `light` stage's.
    """
    hangs = light.start(
        "name=hangs",
        f"supervise.stall={STALL_SECONDS}s",
        planned=(PlannedFault(epoch=1, rank=1, step=14, do="sleep"),),
    )
    fails = light.start(
        "name=fails",
        "supervise.failures_without_progress=9",
        "supervise.storm_failures=9",
        planned=tuple(PlannedFault(epoch=n, rank=1, do="leave", code=3) for n in (1, 2, 3)),
    )
    poisoned = stage.start(
        "name=poisoned", planned=(PlannedFault(epoch=1, rank=-1, do="poison", samples=14 * 8),)
    )
    return hangs, fails, poisoned


def test_what_goes_wrong_is_told_and_told_to_be_over(
    watched: Watched, pytestconfig: pytest.Config
) -> None:
    stage = watched.stage
    runs = start_all(stage, replace(stage, stand_in=not pytestconfig.getoption("--nightly")))
    watch(watched)
    name_again(watched)
    hangs, fails, poisoned = (run.run.run_id for run in runs)

    hang = watched.wait("HpctrainRunHangs", "firing", run=hangs)
    # Two jobs of Prometheus see the same run, which is one alert.
    seen = watched.ask(f'hpctrain_run_step{{run="{hangs}"}}')
    assert {one["metric"]["job"] for one in seen} == {"hpctrain", "hpctrain-jobs"}, seen
    assert len({one["fingerprint"] for one in watched.told("HpctrainRunHangs", "firing")}) == 1
    storm = watched.wait("HpctrainRestartStorm", "firing", run=fails)
    watched.wait("HpctrainLossNotFinite", "firing", run=poisoned)
    assert hang["labels"]["severity"] == storm["labels"]["severity"] == "page"
    assert f"hpctrain why {hangs}" in hang["annotations"]["description"]
    assert f"hpctrain why {fails}" in storm["annotations"]["description"]

    watched.wait("HpctrainRestartStorm", "resolved", run=fails)
    watched.wait("HpctrainRunHangs", "resolved", run=hangs)
    assert runs[0].rows(2), "resolved by a step of the relaunch"
    watched.wait("HpctrainLossNotFinite", "resolved", run=poisoned)
    assert runs[0].causes[0] == "hang", "by the supervisor, which waited longer than the alert"
    (ended,) = (event for event in runs[0].events(EventKind.LAUNCH_ENDED) if event.epoch == 1)
    print(f"{ended.time - watched.began:6.1f} s the supervisor had ended the launch that hung")
    for run in runs:
        assert run.wait_till_over().state is RunState.DONE, run.logs()
    # Nobody is told of a run what another one has.
    whose = {"RunHangs": hangs, "RestartStorm": fails, "LossNotFinite": poisoned}
    for alert, run_id in whose.items():
        told = watched.told(f"Hpctrain{alert}", "firing")
        assert {one["labels"]["run"] for one in told} == {run_id}, told
    assert not watched.told("HpctrainNoProgress", "firing")
    (took,) = watched.ask('avg_over_time(scrape_duration_seconds{job="hpctrain"}[5m])')
    (series,) = watched.ask('scrape_samples_scraped{job="hpctrain"}')
    print(f"a scrape takes {float(took['value'][1]) * 1e3:.1f} ms for {series['value'][1]} series")


@pytest.mark.variant("test_what_goes_wrong_is_told_and_told_to_be_over")
def test_a_dead_exporter_is_told_and_revived(watched: Watched) -> None:
    """It is the eye of all other alerts. `sandbox revive` starts it again."""
    sandbox = watched.stage.sandbox
    watched.stage.start("name=seen")
    watch(watched)
    watched.wait_for("hpctrain_exporter_info")
    assert sandbox.is_up()
    kill(one.identity for one in sandbox.state.daemons if one.name == "exporter")
    assert sandbox.health() == "partial"
    watched.wait("HpctrainWatcherBlind", "firing", blind="exporter")
    revive(sandbox)
    assert sandbox.is_up()
    watched.wait("HpctrainWatcherBlind", "resolved", blind="exporter")


@pytest.mark.variant("test_what_goes_wrong_is_told_and_told_to_be_over")
def test_a_slurm_that_does_not_answer_is_told(watched: Watched) -> None:
    """The states of runs are unknown then; none is taken for one that has ended or hangs."""
    sandbox = watched.stage.sandbox
    rehearsal = watched.stage.start("name=unseen", planned=waits_for("go", 14))
    rehearsal.wait_for_step(13)
    watch(watched)
    watched.wait_for("hpctrain_exporter_slurm_up == 1")
    wait_till_remembered(sandbox)
    kill_controller(sandbox)
    watched.wait("HpctrainWatcherBlind", "firing", blind="slurm")
    restart_controller(sandbox)
    watched.wait("HpctrainWatcherBlind", "resolved", blind="slurm")
    rehearsal.say("go")
    assert rehearsal.wait_till_over().state is RunState.DONE, rehearsal.logs()
    told = {one["labels"]["alertname"] for _, doc in watched.hook.received for one in doc["alerts"]}
    assert told <= {"HpctrainWatcherBlind", "HpctrainBudgetNearlyUsed"}, told


def test_down_ends_the_monitors_and_keeps_their_settings() -> None:
    """A start later has the same Prometheus again, with the series of before."""
    programs = fetched_prometheus()
    with own_sandbox(default_shape(nodes=1, gpus_per_node=1)) as box:
        runs = box.directory / "runs"
        runs.mkdir()
        settings = Monitoring(programs.directory, runs, scrape_seconds=1, collect_seconds=10)
        box.monitor(settings)
        before = monitors_of(box)
        assert set(before) == set(MONITORS) and all(before.values())
        box.monitor(settings)
        assert monitors_of(box) == before, "the same settings: nothing was started again"
        with urllib.request.urlopen(alerts_page(box.state.ports), timeout=60) as page:
            assert "HpctrainRunHangs" in page.read().decode()
        watched = Watched(Stage(box, runs), Webhook(0))
        first = float(watched.wait_for('timestamp(up{job="prometheus"})')[0]["value"][1])
        box.down(keep=True)
        assert not any(map(find_process, before.values()))
        assert box.health() == "down" and not box.state.daemons
        box.up(PATIENCE_SECONDS)
        assert set(monitors_of(box)) == set(MONITORS)
        watched.wait_for(f'min_over_time(timestamp(up{{job="prometheus"}})[1h:1s]) <= {first + 1}')
        for path in (box.directory / "monitoring").iterdir():
            assert path.stat().st_mode & 0o077 == 0, path


def monitors_of(box: Sandbox) -> dict[str, int]:
    """The processes of the monitors that are alive."""
    return {one.name: one.pid for one in box.status().daemons if one.alive and one.name in MONITORS}
