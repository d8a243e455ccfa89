"""Metrics of a real run, from inside its job and from outside: the same, and training exact."""

from __future__ import annotations

import json
import os
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from rehearsal import Rehearsal, Stage, held, waits_for

from hpctrain.observe.exporter import Exporter, ExporterSlurm
from hpctrain.observe.samples import exposed
from hpctrain.records.find import RunFiles
from hpctrain.records.ledger import EventKind

pytestmark = pytest.mark.stand_in

# What depends on the moment, on who asks, or on who was asked.
_OF_THE_MOMENT = (
    "at_risk",
    "eta",
    "lost",
    "time_seconds",
    "gpu_seconds",
    "goodput",
    "budget",
    "disk",
)
Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def series(text: str, run_id: str) -> Series:
    """The samples of a run in a text of OpenMetrics."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels.get("run") == run_id
        and not any(word in sample.name for word in _OF_THE_MOMENT)
    }


def scraped(endpoint: Path, run_id: str) -> Series:
    (target,) = json.loads(endpoint.read_text())[0]["targets"]
    assert target.startswith("127.0.0.1:"), "as the profile says"
    request = urllib.request.Request(
        f"http://{target}/metrics", headers={"Accept": "application/openmetrics-text"}
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        return series(answer.read().decode(), run_id)


def exported(rehearsal: Rehearsal) -> Series:
    """What an exporter on the login node says."""
    runs = rehearsal.run.layout.directory.parent
    slurm = ExporterSlurm({**os.environ, **rehearsal.sandbox.environment()})
    text = exposed(Exporter((runs,), slurm, 86400.0).samples(), open_metrics=True).decode()
    assert "hpctrain_exporter_slurm_up 1.0" in text
    return series(text, rehearsal.run.run_id)


def test_a_job_serves_what_an_exporter_says(stage: Stage, reference: RunFiles) -> None:
    """It waits at step 17 of its first launch, is killed there, and waits again at step 34."""
    planned = (*held(1, 17), *waits_for("go", 34))
    rehearsal = stage.start(
        "name=scraped",
        "metrics.endpoint=true",
        planned=planned,
        profile={"metrics": {"address": "127.0.0.1"}},
    )
    run = rehearsal.run.layout
    rehearsal.wait_for_step(16)
    shared = run.directory.parent / ".file_sd" / f"{run.run_id}.json"

    def steps() -> float | None:
        if not shared.exists():
            return None
        return scraped(shared, run.run_id).get(("hpctrain_run_step", (("run", run.run_id),)))

    rehearsal.wait(lambda: steps() == 16, "an endpoint that knows step 16")
    rehearsal.kill_rank(1)
    rehearsal.wait_for_step(33, epoch=2)
    rehearsal.wait(lambda: steps() == 33, "the same endpoint, that knows step 33")
    inside, outside = scraped(run.metrics_endpoint, run.run_id), exported(rehearsal)
    assert inside.keys() == outside.keys()
    different = {key for key in inside if inside[key] != outside[key]}
    assert not different, {key: (inside[key], outside[key]) for key in different}
    ends = {dict(labels)["cause"]: v for (name, labels), v in inside.items() if "_ends_" in name}
    assert ends == {"crash": 1.0}
    rehearsal.say("go")
    rehearsal.assert_done_exactly(reference)
    assert not run.metrics_endpoint.exists() and not shared.exists()
    assert not rehearsal.events(EventKind.METRICS_FAILED)
