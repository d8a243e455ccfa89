"""Two runs that all tests of pages read and none changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.records.find import RunFiles
from hpctrain.records.run_records import Progress, read_record
from hpctrain.report.collect import RunReport, collect_reports
from tests.reported_runs import reported


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="session")
def run(runs: Path) -> RunFiles:
    """A run of 600 steps that was preempted and has lost a node."""
    return reported(runs, "first", steps=600)


@pytest.fixture(scope="session")
def other(runs: Path) -> RunFiles:
    """Another one with another learning rate."""
    return reported(runs, "second", steps=300, changes=("optimizer.lr=4e-5",), seed=3)


@pytest.fixture(scope="session")
def report(run: RunFiles) -> RunReport:
    return collected(run)[0]


def collected(*runs: RunFiles) -> tuple[RunReport, ...]:
    """Collect pages as of ten seconds after the last sign of life of the first run."""
    progress = read_record(runs[0].layout.progress, Progress)
    assert progress is not None
    return collect_reports(runs, None, progress.time + 10)
