"""The rungs of several nodes on the sandbox's Slurm, with gloo in the place of NCCL.

The jobs are written, submitted, waited for and judged as on a cluster; no rate means anything.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from rehearsal import Stage

from bench.gpu import nodes
from bench.gpu.__main__ import OK, climb
from bench.gpu.__main__ import rungs as all_rungs
from bench.gpu.rung import Found, Site
from hpctrain.records.gpu_report import GpuReport
from hpctrain.spec.loader import find_profile, load_profile

pytestmark = pytest.mark.nightly("rungs of make gpu on an emulated GPU")

SPEC = """
name: own
model: {layers: 2, hidden: 64, heads: 4, vocab: 256, seq: 64}
engine: {name: ddp}
precision: fp32
batch: {global: 16, micro: 1}
budget: {steps: 100000}
optimizer: {lr: 1e-3}
checkpoint: {every: 1h}
resources: {gpus: 8, walltime: "1-00:00:00"}
"""


@pytest.fixture
def on_cluster(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's commands in PATH, as on a login node."""
    for name, value in stage.sandbox.environment().items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("on_cluster")
def test_two_nodes_are_measured_by_a_job_of_the_profile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site = Site(directory=tmp_path, profile="sandbox", emulated=True)
    [rung] = [one for one in all_rungs() if one.number == 5]
    path = tmp_path / "report.json"
    assert climb([rung], site, path, keep_names=False) == OK, capsys.readouterr().out
    report = GpuReport.model_validate_json(path.read_text())
    [check] = report.speed
    assert len(check.nodes) == 4 and len(set(check.nodes)) == 2
    assert all(name.startswith("node-") for name in check.nodes)
    assert {(axis.axis, axis.ranks_per_group) for axis in check.axes} == {
        ("tp", 2),
        ("dp", 2),
        ("pp", 2),
    }
    names = {one.name: one.outcome for one in report.rungs[0].checks}
    assert names["a second launch on the same port"] == "passed"
    assert names["open files"] == names["rate between nodes"] == "passed"
    # the same command again judges what is there, and submits nothing
    before = (tmp_path / "two-nodes" / "links-1.json").stat().st_mtime_ns
    assert climb([rung], site, path, keep_names=False) == OK
    assert (tmp_path / "two-nodes" / "links-1.json").stat().st_mtime_ns == before


@pytest.mark.usefixtures("on_cluster")
def test_a_job_that_fails_shows_why_and_is_submitted_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(directory=tmp_path, profile="sandbox", emulated=True)
    template = nodes._TEMPLATE.replace("bench.gpu.links", "bench.gpu.missing")
    monkeypatch.setattr(nodes, "_TEMPLATE", template)
    [check] = list(nodes.run_two_nodes(site, Found()))
    assert check.outcome == "failed" and "has not measured" in check.detail
    assert "No module named bench.gpu.missing" in check.detail
    assert not (tmp_path / "two-nodes" / "job-id").exists()


@pytest.mark.variant("test_two_nodes_are_measured_by_a_job_of_the_profile")
@pytest.mark.usefixtures("on_cluster")
def test_a_real_run_is_compared_with_its_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On two nodes instead of eight, planned as if the CPUs were A100. Any ratio counts as far off
    here: how far a CPU is from that plan depends on the machine."""
    monkeypatch.setattr(nodes, "_FAR_FROM_PLAN", 1.0)
    text = find_profile("sandbox").read_text()
    as_a100 = text.replace("  peak: {}", "  model: A100-80GB SXM\n  #")
    assert as_a100 != text
    own = tmp_path / "ours.yaml"
    own.write_text(as_a100)
    spec = tmp_path / "run.yaml"
    spec.write_text(SPEC)
    site = Site(directory=tmp_path, profile=str(own), spec=str(spec), emulated=True)
    found = Found()
    profile = load_profile(own).document
    checks = {one.name: one for one in nodes.train_and_compare(site, profile, 4, found)}
    assert checks["step time against the plan"].outcome == "failed", checks
    assert "hpctrain diagnose" in checks["step time against the plan"].detail
    [step] = found.steps
    assert (step.gpus, step.nodes) == (4, 2)
    assert step.measured_seconds > 0 and step.planned_seconds > 0
    assert step.stall_seconds is not None and step.restart_seconds is not None
    assert 0 < step.restart_seconds < 600
    assert found.software and found.software[0].cuda_build is None
    from hpctrain.job.prepare import load_knowledge
    from hpctrain.site.calibrate import _planned_seconds

    loaded = load_profile(own)
    again, problem = _planned_seconds(step, loaded, load_knowledge(loaded))
    assert problem is None and again == pytest.approx(step.planned_seconds), "planned the same"
