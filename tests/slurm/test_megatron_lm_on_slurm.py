"""A real Megatron-LM (PyPI's package of `megatron.training`) under the supervisor: preempted, and
the same run digit by digit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rehearsal import PATIENCE_SECONDS, Rehearsal, Stage
from slurm_settings import grace

from bench.free_ports import free_port
from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import EventKind
from hpctrain.records.run_records import lineage, read_metrics

PACKAGE = Path(sys.prefix, "megatron-lm")
PROGRAM = Path(__file__).resolve().parents[1] / "engines" / "pretrain_package.py"
pytestmark = pytest.mark.skipif(not PACKAGE.is_dir(), reason="`make install` unpacks it")
STEPS = 40
WORDS = (
    "engine.name=megatron-lm",
    f"engine.checkout={PACKAGE}",
    f"engine.entry={os.path.relpath(PROGRAM, PACKAGE)}",
    "parallel.pp=1",
    f"budget.steps={STEPS}",
    "checkpoint.every_steps=30",
    "checkpoint.asynchronous=false",
    "logging.every_steps=10",
)


@pytest.mark.variant("test_preemptions_of_all_kinds_cost_no_budget")
def test_a_preempted_run_is_the_same_run(stage: Stage, tmp_path: Path) -> None:
    rehearsal = stage.start("name=checkout", *WORDS, held_at="1:8")
    rehearsal.wait_for_step(8)
    with grace(stage.sandbox, seconds=600):
        rehearsal.urgent_job()
        rehearsal.wait(lambda: bool(rehearsal.causes), "preempted")
    row = rehearsal.wait_till_over()
    assert rehearsal.causes == ["preempted", "done"], f"{row}\n{rehearsal.logs()}"
    resumed = rehearsal.events(EventKind.LAUNCH_STARTED)[1].resume_step or 0
    assert 8 <= resumed < 30, "it saved and left within the grace"
    runs = rehearsal.run.layout, undisturbed(rehearsal, tmp_path)
    rows, same = (lineage(read_metrics(run)) for run in runs)
    assert [one.step for one in rows] == list(range(1, STEPS + 1))
    for one, other in zip(rows, same, strict=True):
        # the second loss of a launch is computed from two printed ones
        rounding = 3e-6 if one.step in (2, resumed + 2) else 0.0
        assert one.loss == pytest.approx(other.loss, rel=0, abs=rounding), rehearsal.logs()
        assert one.grad_norm == other.grad_norm
    log = "".join(path.read_text() for path in rehearsal.run.layout.logs.rglob("*rank0001.log"))
    assert log.count("elapsed time per iteration") == STEPS // 10, "every step was heard"


def undisturbed(rehearsal: Rehearsal, place: Path) -> RunLayout:
    """The same train.json in two processes of this machine, without Slurm."""
    run = RunLayout(place / "undisturbed")
    run.create()
    shutil.copy(rehearsal.run.layout.train_config, run.train_config)
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = []
    for rank in ("0", "1"):
        own = {"RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": "1"}
        words = [sys.executable, "-m", "hpctrain.train", str(run.train_config)]
        with (run.logs / f"rank-{rank}.log").open("w") as log:
            ranks.append(
                subprocess.Popen(words, env={**os.environ, **shared, **own}, stdout=log, stderr=log)
            )
    codes = [one.wait(PATIENCE_SECONDS) for one in ranks]
    assert codes == [0, 0], "".join(path.read_text() for path in run.logs.glob("*.log"))
    return run
