"""`hpctrain try` on a real Slurm: runs that keep their promises, and trainers that break one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import hpctrain
from ray_environment import ray_python
from rehearsal import Stage

from hpctrain.job.submit import rehearsal_note
from hpctrain.records.rehearsals import read_rehearsals

pytestmark = pytest.mark.stand_in

TRAINER = Path(__file__).resolve().parent / "promising_trainer.py"
RAY_LOOP = Path(__file__).resolve().parents[2] / "examples" / "any-trainer" / "ray_loop.py"
OWN = r"""
name: own
trainer:
  command: [{python}, {trainer}, "{{output}}", --resume, "{{resume}}", --steps, "{steps}"]
  done: {{step: {steps}}}
  checkpoint: {{path: "state-{{step}}.json", complete: {{json: ["."]}}}}
  launch: {launch}
  signal: {{save: TERM, seconds: 20s}}
  metrics: [{{output: 'step (?P<step>\d+) loss (?P<loss>\S+)'}}]
environment: {{variables: {{BROKEN: "{broken}"}}}}
resources: {{gpus: 2}}
"""


@pytest.fixture
def place(stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    """A stage of the test's own, whose Slurm is that of the commands."""
    for name, value in stage.sandbox.environment().items():
        monkeypatch.setenv(name, value)
    return stage.at(tmp_path)


def test_what_a_run_promises_is_proved(place: Stage) -> None:
    """Two ranks on one node: all is proved, and nothing but the record stays."""
    prepared, files = place.prepared("name=tiny", gpus_per_node=2)
    words = [str(files / "rehearsal.yaml"), "-p", str(files / "profile.yaml")]
    done = hpctrain("try", *words, "--set", "name=tiny", "-y", "--json", "--runs", str(place.runs))
    assert done.exit_code == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)["rehearsal"]
    assert {one["verdict"] for one in told["proofs"]} == {"yes"}, done.stdout
    facts = {one["topic"]: one["fact"] for one in told["proofs"]}
    assert "equal bit for bit" in facts["losses after resume"]
    assert "rejected" in facts["truncated checkpoint"]
    assert "exit 75" in facts["save on the signal"]
    (record,) = read_rehearsals(place.runs)
    assert (record.proved_level, record.promised_level) == (3, 3)
    assert [path.name for path in place.runs.rglob("*")] == [".rehearsals.jsonl"]
    assert not place.sandbox.command("squeue", "--noheader", "--states=PD,R").strip()
    note = rehearsal_note(prepared, place.runs)
    assert note is not None and note[0].endswith("level 3 (the same losses) of 3") and note[1]
    other, _ = place.prepared("name=tiny", "seed=7", gpus_per_node=2)
    assert rehearsal_note(other, place.runs) is None, "of another text nothing is known"


@pytest.mark.variant("test_what_a_run_promises_is_proved")
def test_a_trainer_of_ones_own_is_rehearsed(place: Stage) -> None:
    """Its target is far: all but that is proved, and the run is cancelled."""
    code, told = rehearsed(place, "")
    verdicts = {one["topic"]: one["verdict"] for one in told["proofs"]}
    assert verdicts.pop("end at its target") == "not tried"
    assert set(verdicts.values()) == {"yes"} and code == 0, told
    facts = {one["topic"]: one["fact"] for one in told["proofs"]}
    assert "in all digits that it reports" in facts["losses after resume"]
    assert not place.sandbox.command("squeue", "--noheader", "--states=PD,R").strip()


@pytest.mark.nightly("a rehearsal of half a minute for each promise")
@pytest.mark.parametrize(
    ("broken", "failed", "words"),
    [
        ("deaf", {"save on the signal"}, "exit 143, no checkpoint of its last step"),
        (
            "restarts",
            {"resume", "killed rank", "truncated checkpoint"},
            "its first report is of step 1",
        ),
        ("drifts", {"losses after resume"}, "more than rounding"),
        ("early", {"first checkpoint", "end at its target"}, "exit code 0 at step 3"),
    ],
)
def test_a_promise_that_is_broken_is_named(
    place: Stage, broken: str, failed: set[str], words: str
) -> None:
    code, told = rehearsed(place, broken)
    found = {one["topic"]: one["fact"] for one in told["proofs"] if one["verdict"] == "no"}
    assert found.keys() == failed, told
    assert all(words in fact for fact in found.values()) and code == 7, told


@pytest.mark.nightly("a rehearsal of half a minute, with training to the target")
def test_a_trainer_whose_target_is_near_ends_there(place: Stage) -> None:
    code, told = rehearsed(place, "", steps=400)
    assert {one["verdict"] for one in told["proofs"]} == {"yes"} and code == 0, told


@pytest.mark.nightly("a rehearsal of half a minute for each launcher")
@pytest.mark.parametrize(
    ("launch", "victim"), [("accelerate", "rank 1"), ("self", "the command on n")]
)
def test_each_launcher_is_rehearsed(place: Stage, launch: str, victim: str) -> None:
    assert_all_but_the_end(*rehearsed(place, "", launch=launch), victim)


@pytest.mark.nightly("Ray takes ten seconds to start, four times")
def test_ray_is_rehearsed_on_two_nodes(place: Stage) -> None:
    _, files = place.prepared("name=tiny")  # one GPU on each node
    command = f'["{ray_python()}", "{RAY_LOOP}", "{{output}}", "100000", "{{resume}}"]'
    far = ("--set", f"trainer.command={command}", "--set", "trainer.done.step=100000")
    told = tried(place, files, RAY_LOOP.with_name("ray.yaml"), "--nodes", "2", *far)
    assert_all_but_the_end(*told, "the driver of Ray")
    assert told[1]["nodes"].startswith("2 nodes")


@pytest.mark.nightly("a rehearsal of a minute for each way in which a site continues runs")
@pytest.mark.parametrize(
    ("continuation", "words"),
    [
        ("chain", "by itself, in the run's next job"),
        ("singleton", "by itself, in the run's next job"),
        ("array", "by itself, in the run's next job"),
        ("none", "by `hpctrain resume`: this site does not requeue"),
    ],
)
def test_each_continuation_is_rehearsed(place: Stage, continuation: str, words: str) -> None:
    """On two nodes with a rank each."""
    _, files = place.prepared("name=tiny", continuation=continuation)
    code, told = tried(place, files, files / "rehearsal.yaml", "--nodes", "2")
    assert {one["verdict"] for one in told["proofs"]} == {"yes"} and code == 0, str(told)
    (resume,) = (one["fact"] for one in told["proofs"] if one["topic"] == "resume")
    assert words in resume and told["nodes"].startswith("2 nodes")
    assert not place.sandbox.command("squeue", "--noheader", "--states=PD,R").strip()


def rehearsed(
    place: Stage, broken: str, steps: int = 100_000, launch: str = "torchrun"
) -> tuple[int, dict[str, Any]]:
    """Rehearse the tiny trainer, which breaks a promise; returns exit code and record."""
    _, files = place.prepared("name=tiny", gpus_per_node=2)
    spec, own = files / "own.yaml", dict(broken=broken, steps=steps, launch=launch)
    spec.write_text(OWN.format(python=sys.executable, trainer=TRAINER, **own))
    return tried(place, files, spec)


def tried(place: Stage, files: Path, spec: Path, *words: str) -> tuple[int, dict[str, Any]]:
    profile, runs = files / "profile.yaml", place.runs
    done = hpctrain(
        "try", str(spec), "-p", str(profile), "--runs", str(runs), "-y", "--json", *words
    )
    assert done.exit_code in (0, 7), done.stdout + done.stderr
    return done.exit_code, json.loads(done.stdout)["rehearsal"]


def assert_all_but_the_end(code: int, told: dict[str, Any], victim: str) -> None:
    verdicts = {one["topic"]: one["verdict"] for one in told["proofs"]}
    assert verdicts.pop("end at its target") == "not tried"
    assert set(verdicts.values()) == {"yes"} and code == 0, told
    (killed,) = (one["fact"] for one in told["proofs"] if one["topic"] == "killed rank")
    assert killed.startswith(victim), killed
