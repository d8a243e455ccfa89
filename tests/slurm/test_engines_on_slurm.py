"""Every engine under the same supervisor: preempted, resumed, and the same run bit by bit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from rehearsal import PATIENCE_SECONDS, PlannedFault, Rehearsal, Stage
from slurm_settings import grace
from variants import varied

from bench import prefork
from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import EventKind
from hpctrain.records.run_records import read_metrics
from hpctrain.train.job import read_config

STEPS = 20  # some after the preemption, and a save before and after it
ENGINES = {
    "ddp": ("engine.name=ddp", "parallel.pp=1"),
    "fsdp": ("engine.name=fsdp", "parallel.pp=1"),
    "deepspeed": ("engine.name=deepspeed", "parallel.pp=1", "optimizer.zero=2"),
    "deepspeed in 3D": (
        *("engine.name=deepspeed", "parallel.pp=2", "parallel.tp=2", "optimizer.zero=1"),
        *("model.family=llama", "model.dropout=0", "model.ffn=128", "resources.gpus=4"),
    ),
}


@pytest.mark.parametrize("engine", varied(ENGINES, "ddp"))
def test_a_preempted_run_is_the_same_run(engine: str, stage: Stage, tmp_path: Path) -> None:
    planned = (PlannedFault(epoch=1, rank=1, step=13, do="await_warning"),)
    name, gpus = engine.replace(" ", "-").lower(), 2 if "3D" in engine else 1
    words = (f"name={name}", f"budget.steps={STEPS}", *ENGINES[engine])
    rehearsal = stage.start(*words, planned=planned, gpus_per_node=gpus)
    rehearsal.wait_for_step(12)
    with grace(stage.sandbox, seconds=600):
        rehearsal.urgent_job()
        rehearsal.wait(lambda: bool(rehearsal.causes), "preempted")
    row = rehearsal.wait_till_over()
    assert rehearsal.causes == ["preempted", "done"], f"{row}\n{rehearsal.logs()}"
    resumed = rehearsal.events(EventKind.LAUNCH_STARTED)[1].resume_step
    assert resumed == 13, "the ranks saved and left within the grace"
    assert losses(rehearsal.run.layout) == undisturbed(rehearsal, tmp_path), rehearsal.logs()


def undisturbed(rehearsal: Rehearsal, place: Path) -> dict[int, str]:
    """The losses of the same train.json on as many processes of this machine, without Slurm."""
    run = RunLayout(place / "undisturbed")
    run.create()
    shutil.copy(rehearsal.run.layout.train_config, run.train_config)
    size = read_config(run.train_config).world_size
    ranks = prefork.start(run.train_config, size, run.logs / "ranks")
    assert ranks.wait(PATIENCE_SECONDS) == [0] * size, ranks.log()
    return losses(run)


def losses(run: RunLayout) -> dict[int, str]:
    found = {row.step: row.loss_hex for row in read_metrics(run)}
    assert sorted(found) == list(range(1, STEPS + 1))
    return found
