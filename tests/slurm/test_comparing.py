"""`compare` and `scale` on the real Slurm: real engines, one that cannot fit, one that crashes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from rehearsal import Stage

from hpctrain.records.find import RunFiles
from hpctrain.records.ledger import EventKind
from hpctrain.records.sweeps import ComparisonLayout
from hpctrain.trials.compare import (
    engines_request,
    open_comparison,
    sizes_request,
)
from hpctrain.trials.comparison_plot import draw
from hpctrain.trials.documents import Comparison, TrialResult
from hpctrain.trials.run_trials import TrialRunner, start
from hpctrain.trials.trial_plans import Subject, TrialRequest, subject_of

pytestmark = pytest.mark.nightly("trains with three real engines, each in a job of its own")

SPEC = """
name: tiny
model: {layers: 2, hidden: 32, heads: 4, vocab: 128, seq: 32}
batch: {global: 8, micro: 2}
budget: {steps: 3600}
precision: fp32
optimizer: {lr: 1e-3}
recompute: none
checkpoint: {every_steps: 10}
engine: {name: ddp, deterministic: true}
resources: {gpus: 2, walltime: 00:10:00}
"""
STEPS = 8


@pytest.fixture
def subject(stage: Stage, tmp_path: Path) -> Subject:
    spec = tmp_path / "tiny.yaml"
    spec.write_text(SPEC)
    return subject_of(spec, "sandbox")


def begun(subject: Subject, request: TrialRequest, tmp_path: Path) -> ComparisonLayout:
    return start(subject, request, tmp_path / "runs")


def by_name(found: Comparison) -> dict[str, TrialResult]:
    return {trial.name: trial for trial in found.trials}


def run_logs(layout: ComparisonLayout) -> str:
    logs = sorted(layout.runs.glob("*/logs/**/*"))
    texts = [path.read_text(errors="replace")[-2000:] for path in logs if path.is_file()]
    return "\n".join(texts)


def test_engines_are_compared_and_failures_are_rows(
    subject: Subject, stage: Stage, tmp_path: Path
) -> None:
    variants = [
        "huge: model.hidden=65536",
        "broken: environment.variables.GLOO_SOCKET_IFNAME=nowhere0",
    ]
    engines = "ddp,fsdp,deepspeed:pp2"
    layout = begun(subject, engines_request(subject, engines, variants, STEPS), tmp_path)
    # somebody submits and closes the laptop; the second call goes on with the same jobs
    lines: list[str] = []
    TrialRunner(layout, stage.slurm, wait=False).run()
    found = TrialRunner(layout, stage.slurm, lines.append, poll_seconds=0.5).run()
    trials = by_name(found)
    states = {name: trial.state for name, trial in trials.items()}
    wanted = dict.fromkeys(engines.split(","), "DONE") | {"huge": "REFUSED", "broken": "FAILED"}
    assert states == wanted, f"{lines}\n{run_logs(layout)}"
    assert "no layout fits" in trials["huge"].reason
    assert "nowhere0" in trials["broken"].reason and trials["broken"].stability
    assert trials["broken"].stability.launches == 1, "a crash of a trial is a result"
    for name in engines.split(",")[1:]:
        agreement, measured = trials[name].agreement, trials[name].measured
        assert agreement and agreement.verdict == "same" and agreement.steps == STEPS
        assert measured and measured.peak_bytes > 2**20 and measured.shares
    assert found.recommendation.choice in engines.split(",")
    for trial in trials.values():
        assert trial.record.run_id is None or submissions(layout, trial) == 1
    draw(found, layout.plot)
    assert layout.plot.read_bytes().startswith(b"\x89PNG")
    later = open_comparison(layout.directory, stage.slurm)
    assert by_name(later)["ddp"].losses == trials["ddp"].losses, "and nothing runs again"


def submissions(layout: ComparisonLayout, trial: TrialResult) -> int:
    from hpctrain.records.layout import RunLayout

    ledger = RunFiles(RunLayout(layout.runs / str(trial.record.run_id))).ledger
    return sum(event.event is EventKind.SUBMITTED for event in ledger.events())


@pytest.mark.variant("test_engines_are_compared_and_failures_are_rows")
def test_a_run_is_scaled(subject: Subject, stage: Stage, tmp_path: Path) -> None:
    layout = begun(subject, sizes_request(subject, (1, 2), STEPS), tmp_path)
    found = TrialRunner(layout, stage.slurm, at_a_time=1, poll_seconds=0.5).run()
    one, two = found.trials
    assert one.succeeded and two.succeeded, run_logs(layout)
    assert [point.baseline for point in found.points] == [1, 1]
    assert found.points[1].speedup and found.points[1].efficiency
    assert two.agreement and two.agreement.verdict == "same", "strong scaling: the same steps"
    assert one.measured and two.measured and one.measured.shares and two.measured.shares
    assert os.path.exists(layout.record)
