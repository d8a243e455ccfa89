"""The tiny twins of examples/, trained on a real Slurm as their READMEs say, several at once.

Commands are taken from the READMEs and run as they stand there; then each twin shows what its job
is about. What the full sizes need of Slurm is looked at in `test_sbatch_scripts.py`.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from rehearsal import HELD_RANKS, Rehearsal, Stage
from slurm_settings import grace

from bench import prefork
from hpctrain.checkpoints.publish import published_steps
from hpctrain.job.prepare import prepare
from hpctrain.plan.documents import Plan
from hpctrain.records.find import find_run
from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import EventKind
from hpctrain.records.manifest import Manifest, checkpoint_name, read_manifest
from hpctrain.records.run_records import RankTimes, StepMetrics, lineage, read_metrics, read_record
from hpctrain.runs.state import RunState

pytestmark = pytest.mark.nightly("the tiny twins of the examples, all of which train")

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# Other partial sums of fp32 numbers, over 60 steps.
ROUNDING = 1e-5
ONE_PICTURE = 1 / 320
# Of 576 pictures. Rounding does not stay rounding for 30 steps: where a gradient is almost nothing,
# Adam makes as much of it as anywhere. Two seeds ended 0.0 and 0.3 points apart; 8 where gradients
# are not summed. Batch statistics of each rank alone show in the first loss (by 0.02), not here.
SAME_ACCURACY = 0.025
STEPS_BEFORE = 15  # a fine-tune's, until its nodes are taken
FOR_EVER_SECONDS = 1000
PATIENCE_SECONDS = 600.0


class Place:
    """A directory that looks like a clone of hpctrain, with a Slurm."""

    def __init__(self, stage: Stage, directory: Path) -> None:
        self.stage, self.directory = stage, directory
        (directory / "examples").symlink_to(ROOT / "examples")
        self.held: dict[str, str] = {}

    def follow(self, *examples: str) -> dict[str, Rehearsal]:
        """Do what the READMEs say for the tiny twins; runs by `example`, `example 2`, ..."""
        runs: dict[str, Rehearsal] = {}
        done: set[tuple[str, ...]] = set()
        for example in examples:
            for words in tiny_commands(example):
                if words[:2] == ["hpctrain", "submit"]:
                    number = sum(name.startswith(example) for name in runs)
                    runs[f"{example} {number + 1}" if number else example] = self._submit(words)
                elif tuple(words) not in done:
                    self._run(words)
                    done.add(tuple(words))
        return runs

    def _submit(self, words: list[str]) -> Rehearsal:
        if self.held:  # a job has of the submitting shell only what its spec names
            words = [*words, "--set", f"environment.inherit=[{', '.join(self.held)}]"]
        told = json.loads(self._run([*words, "--yes", "--json"]))["submitted"]
        run = find_run(self.directory / "runs", told["run_id"])
        return Rehearsal(self.stage.sandbox, self.stage.slurm, run, told["job_id"])

    def _run(self, words: list[str]) -> str:
        programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            words,
            cwd=self.directory,
            env={**os.environ, **self.stage.sandbox.environment(), "PATH": programs, **self.held},
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
        )
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}{done.stderr}"
        return done.stdout


def tiny_commands(example: str) -> list[list[str]]:
    """What the README says to stage and to submit for the tiny twin."""
    text = (ROOT / "examples" / example / "README.md").read_text()
    lines = "\n".join(BLOCK.findall(text)).replace("\\\n", " ").splitlines()
    words = [shlex.split(line, comments=True) for line in lines]
    of_the_twin = re.compile(r"tiny|--builtin")
    return [line for line in words if of_the_twin.search(shlex.join(line))]


@pytest.fixture
def place(stage: Stage, tmp_path: Path) -> Place:
    return Place(stage, tmp_path)


def trained(rehearsal: Rehearsal) -> list[StepMetrics]:
    """The steps of a run that is done, each once; its loss has fallen."""
    rehearsal.wait(lambda: rehearsal.run.layout.done.exists(), "done", PATIENCE_SECONDS)
    row = rehearsal.wait_till_over()
    assert row.state is RunState.DONE, f"{row}\n{rehearsal.logs()}"
    rows = lineage(read_metrics(rehearsal.run.layout))
    assert [row.step for row in rows] == [*range(1, (row.target_step or 0) + 1)]
    losses = [loss_of(row) for row in rows]
    assert sum(losses[-3:]) / 3 < sum(losses[:3]) / 3 - 0.2, losses
    return rows


def loss_of(row: StepMetrics) -> float:
    return float.fromhex(row.loss_hex)


def plan_of(rehearsal: Rehearsal) -> Plan:
    return Plan.model_validate_json(rehearsal.run.layout.plan.read_text())


def nodes_of(rehearsal: Rehearsal) -> list[str]:
    """The node of each rank, as the ranks have told."""
    told = read_record(rehearsal.run.layout.rank_times, RankTimes)
    assert told is not None, rehearsal.logs()
    return list(told.nodes)


def on_one_process(place: Place, example: str) -> list[StepMetrics]:
    """The same spec with one GPU, trained on this machine without Slurm."""
    spec = place.directory / "examples" / example / "tiny.yaml"
    before = Path.cwd()
    os.chdir(place.directory)
    try:
        prepared = prepare(spec, "sandbox", ["resources.gpus=1"], runs=place.directory / "alone")
    finally:
        os.chdir(before)
    run = RunLayout(place.directory / "alone" / example)
    run.create()
    run.train_config.write_text(prepared.train.model_dump_json())
    ranks = prefork.start(run.train_config, 1, run.logs / "ranks")
    assert ranks.wait(PATIENCE_SECONDS) == [0], ranks.log()
    return read_metrics(run)


@pytest.mark.variant("test_big_models_are_split_as_planned")
def test_pictures_are_learned_alike_by_one_process_and_by_several(place: Place) -> None:
    runs = place.follow("digits", "resnet50-ddp")
    digits, alone = trained(runs["digits"]), on_one_process(place, "digits")
    assert len(digits) == len(alone) == 60
    for one, other in zip(digits, alone, strict=True):
        assert abs(loss_of(one) - loss_of(other)) <= ROUNDING, one.step
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-4), one.step
        assert one.eval_loss == pytest.approx(other.eval_loss, abs=ROUNDING), one.step
    accuracy = digits[-1].eval_accuracy
    assert accuracy is not None and accuracy > 0.6
    assert accuracy == pytest.approx(alone[-1].eval_accuracy, abs=ONE_PICTURE)
    resnet, alone = trained(runs["resnet50-ddp"]), on_one_process(place, "resnet50-ddp")
    assert plan_of(runs["resnet50-ddp"]).nodes.nodes == 2
    for one, other in zip(resnet[:2], alone[:2], strict=True):
        assert abs(loss_of(one) - loss_of(other)) <= ROUNDING, "batch statistics of all ranks"
    accuracies = [rows[-1].eval_accuracy or 0.0 for rows in (resnet, alone)]
    assert min(accuracies) > 0.9, accuracies
    assert abs(accuracies[0] - accuracies[1]) <= SAME_ACCURACY, accuracies


@pytest.mark.variant("test_big_models_are_split_as_planned")
def test_texts_get_their_classes(place: Place) -> None:
    runs = place.follow("distilbert-sentiment")
    rows = trained(runs["distilbert-sentiment"])
    assert rows[-1].eval_accuracy is not None and rows[-1].eval_accuracy > 0.9


@pytest.mark.variant("test_big_models_are_split_as_planned")
def test_eight_ranks_of_four_nodes_sum_inside_of_nodes_first(place: Place) -> None:
    bert = place.follow("bert-4nodes")["bert-4nodes"]
    assert trained(bert)[-1].eval_loss is not None
    config = json.loads(bert.run.layout.train_config.read_text())
    assert (config["ddp"]["hook"], config["node_size"]) == ("hierarchical", 2)
    assert nodes_of(bert) == ["n0", "n0", "n1", "n1", "n2", "n2", "n3", "n3"]


@pytest.mark.variant("test_big_models_are_split_as_planned")
def test_fine_tunes_lose_their_nodes_and_go_on(place: Place) -> None:
    """The full one, on two nodes, loses both and gets one: the node that LoRA's has lost before."""
    # else a run is over before its nodes are wanted
    place.held = {"PYTHONPATH": str(HELD_RANKS), "HELD_RANKS": f"1:{STEPS_BEFORE + 1}"}
    runs = place.follow("llama7b-spot")
    full, lora = runs["llama7b-spot"], runs["llama7b-spot 2"]
    lora.wait(lambda: lora.attempts > 0, "started")
    last = list(lora.nodes())
    full.wait_for_step(STEPS_BEFORE)
    lora.wait_for_step(STEPS_BEFORE)
    with grace(place.stage.sandbox, seconds=600):
        full.urgent_job(FOR_EVER_SECONDS, [f"n{i}" for i in range(4) if f"n{i}" not in last])
        lora.urgent_job(nodes=last)
        full.wait(lambda: bool(full.causes and lora.causes), "preempted")
    for run in (full, lora):
        rows = trained(run)
        assert run.causes == ["preempted", "done"], run.logs()
        resumed = run.events(EventKind.LAUNCH_STARTED)[1].resume_step or 0
        assert resumed == STEPS_BEFORE + 1, "saved within the grace time: no step is lost"
        consumed = [row.consumed_samples for row in rows]
        assert consumed == [8 * row.step for row in rows], "every conversation once, in one order"
        assert nodes_of(run) == last * 2, "two ranks on the one node that is left"
    of_all, of_thin = last_checkpoint(full), last_checkpoint(lora)
    assert (plan_of(full).layout.world_size, of_all.world_size) == (4, 2), "shards of four ranks"
    assert of_thin.total_bytes < of_all.total_bytes / 3, "thin matrices only"


def last_checkpoint(rehearsal: Rehearsal) -> Manifest:
    checkpoints = rehearsal.run.layout.checkpoints
    manifest = read_manifest(checkpoints / checkpoint_name(published_steps(checkpoints)[-1]))
    assert manifest is not None, rehearsal.logs()
    return manifest


@pytest.mark.variant("test_big_models_are_split_as_planned")
def test_two_engines_have_the_same_losses(place: Place) -> None:
    runs = place.follow("gpt1300m-one-node")
    fsdp, deepspeed = (trained(run) for run in runs.values())
    for one, other in zip(fsdp, deepspeed, strict=True):
        assert abs(loss_of(one) - loss_of(other)) <= ROUNDING, one.step
    zero = plan_of(runs["gpt1300m-one-node 2"])
    assert (zero.engine, zero.zero, zero.offload) == ("deepspeed", 2, "cpu")


def test_big_models_are_split_as_planned(place: Place) -> None:
    run = place.follow("gpt175b")["gpt175b"]
    trained(run)
    layout = plan_of(run).layout
    assert (layout.tp, layout.pp, layout.vpp) == (2, 2, 3)


@pytest.mark.variant("test_big_models_are_split_as_planned")
def test_experts_are_split_as_planned(place: Place) -> None:
    run = place.follow("moe")["moe"]
    trained(run)
    layout = plan_of(run).layout
    assert (layout.tp, layout.pp, layout.ep) == (1, 2, 2)


@pytest.mark.variant("test_big_models_are_split_as_planned")
def test_the_other_big_models_are_split_as_planned(place: Place) -> None:
    # Two at a time on eight GPUs; islands need all of them, and would make the others wait.
    runs = place.follow("two-nodes-tp-pp", "gpt130b", "gpt10b-islands")
    for run in runs.values():
        trained(run)
    plans = {name: plan_of(run) for name, run in runs.items()}
    assert {(plan.layout.tp, plan.layout.pp) for plan in plans.values()} == {(2, 2)}
    axes = plans["gpt10b-islands"].placements
    spans = {one.axis: one.span for one in axes if one.size > 1}
    assert spans == {"tp": "inside a node", "dp": "across nodes", "pp": "across islands"}
    assert plans["gpt10b-islands"].layout.order == "tp-cp-ep-dp-pp"
    tensor_pairs = nodes_of(runs["two-nodes-tp-pp"])
    assert tensor_pairs[0] == tensor_pairs[1] != tensor_pairs[2] == tensor_pairs[3]
    assert nodes_of(runs["gpt10b-islands"]) == [f"n{rank // 2}" for rank in range(8)]
