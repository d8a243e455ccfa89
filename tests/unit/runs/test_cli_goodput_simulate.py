"""`goodput` and `simulate` as people and scripts see them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from command_line import hpctrain
from fabricated_runs import LAUNCHED, NOW, STARTED, SUBMITTED, ended, fabricate, said
from trainer_documents import plan_json

from hpctrain.base.durable import append_line
from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import EventKind
from hpctrain.records.run_records import SaveRecord, append_save
from hpctrain.runs.goodput import goodput

ROOT = Path(__file__).resolve().parents[3]
SIMULATE = ["simulate", "--gpus", "1024", "--days", "5", "--trials", "10"]


def crashed(runs: Path) -> RunLayout:
    """Submitted 3 s before it starts; 60 steps in 60 s said to have taken 2 s each."""
    relaunch = said(EventKind.LAUNCH_STARTED, job_id=1, restart_count=0, epoch=2, resume_step=30)
    entries = (*SUBMITTED, STARTED, LAUNCHED, *ended("crash", "rank 3", "relaunch"), relaunch)
    run = fabricate(runs, entries=entries, steps=60)
    run.layout.plan.write_text(plan_json(nodes={"nodes": 4, "gpus_per_node": 8}))
    return run.layout


def test_the_account_adds_up_on_paper(tmp_path: Path) -> None:
    crashed(tmp_path)
    told = hpctrain("goodput", "gpt-tiny-7f3a", "--runs", str(tmp_path))
    assert told.exit_code == 0 and told.stderr == ""
    lines = told.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    shares = [float(x) for x in re.findall(r"(\d+\.\d\d)%", told.stdout)]
    assert sum(shares) == pytest.approx(100, abs=0.1)
    assert re.search(r"^crash +1 ", told.stdout, re.MULTILINE)
    assert "on 32 GPUs" in lines[0]


def test_the_same_in_json(tmp_path: Path) -> None:
    layout = crashed(tmp_path)
    append_save(layout, SaveRecord(step=30, epoch=1, time=NOW, stall_seconds=0.5,
                                   publish_seconds=1, size_bytes=9))  # fmt: skip
    told = hpctrain("goodput", "gpt-tiny-7f3a", "--runs", str(tmp_path), "--json")
    document = json.loads(told.stdout)["goodput"]
    assert sum(document["seconds"].values()) == pytest.approx(document["wall_seconds"])
    assert document["gpus"] == 32 and document["unsaved_steps"] == 30
    assert document["failures"] == 1 and document["over"] is False
    assert {loss["cause"] for loss in document["causes"]} == {"crash", "first start"}


def test_torn_files_and_a_lost_plan_are_no_reason_to_fail(tmp_path: Path) -> None:
    layout = crashed(tmp_path)
    layout.plan.write_text("{")
    for path in (layout.ledger, layout.metrics, layout.saves):
        append_line(path, '{"event": "launch_en')
    told = hpctrain("goodput", "gpt-tiny-7f3a", "--runs", str(tmp_path))
    assert told.exit_code == 0
    assert (
        "GPU-hours," not in told.stdout.splitlines()[0]
        and "GPUs" not in told.stdout.splitlines()[0]
    )


def test_a_run_that_was_only_rendered(tmp_path: Path) -> None:
    fabricate(tmp_path, entries=SUBMITTED[:1])
    told = hpctrain("goodput", "gpt-tiny-7f3a", "--runs", str(tmp_path))
    assert told.exit_code == 0 and "has not been submitted" in told.stdout


def test_spare_nodes_count_as_gpus_that_are_held(tmp_path: Path) -> None:
    layout = crashed(tmp_path)
    config = json.loads(layout.supervise_config.read_text())
    layout.supervise_config.write_text(json.dumps({**config, "spare_nodes": 2}))
    from hpctrain.records.find import RunFiles

    assert goodput(RunFiles(layout), NOW).gpus == 48


def test_an_unknown_run(tmp_path: Path) -> None:
    told = hpctrain("goodput", "nobody", "--runs", str(tmp_path))
    assert told.exit_code == 6 and told.stderr.startswith("error: no run `nobody`")


def test_a_table_of_spares_and_intervals() -> None:
    told = hpctrain(*SIMULATE, "--spares", "0,2", "--interval", "10min,1h,auto")
    assert told.exit_code == 0 and told.stderr == ""
    assert max(map(len, told.stdout.splitlines())) <= 80
    assert len(re.findall(r"%  best$|%$", told.stdout, re.MULTILINE)) >= 6
    assert len(re.findall(r"  best$", told.stdout, re.MULTILINE)) == 1
    assert hpctrain(*SIMULATE, "--spares", "0,2", "--interval", "10min,1h,auto") == told


def test_simulated_json() -> None:
    told = hpctrain(*SIMULATE, "--spares", "1", "--json", "--walltime", "1d", "--save-stall", "30s")
    document = json.loads(told.stdout)["simulation"]
    assert document["scenario"]["nodes"] == 128
    assert document["scenario"]["walltime_seconds"] == 86400
    assert document["scenario"]["save_stall_seconds"] == 30
    assert document["choice"]["outcomes"][0]["spare_nodes"] == 1
    assert document["choice"]["outcomes"][0]["requeues"] >= 5


def test_a_spec_brings_its_own_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    told = hpctrain("simulate", "-p", "a100x64", "examples/gpt175b.yaml", "--trials", "3", "--json")
    document = json.loads(told.stdout)["simulation"]
    assert document["scenario"]["nodes"] == 64 and document["currency"] == "USD"
    outcomes = document["choice"]["outcomes"]
    assert [o["spare_nodes"] for o in outcomes] == [0, 0]
    intervals = [o["interval_seconds"] for o in outcomes]
    assert intervals[0] == document["written"]["interval_seconds"] != intervals[1], (
        "the spec's, auto"
    )
    assert any("has 64 nodes" in note for note in document["assumptions"])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "either a spec"),
        (("x.yaml", "--gpus", "8"), "either a spec"),
        (("x.yaml",), "go together"),
        (("--gpus", "8", "-p", "a100x64"), "go together"),
        (("--gpus", "8", "--set", "seed=1"), "--set changes a spec"),
        (("x.yaml", "-p", "a100x64", "--days", "3"), "--days: with a spec"),
        (("--gpus", "12"), "does not fill nodes"),
        (("--gpus", "0"), "--gpus"),
        (("--gpus", "8", "--interval", "0s"), "above 0"),
        (("--gpus", "8", "--interval", "10"), "a duration such as"),
        (("--gpus", "8", "--spares", "one"), "no list of numbers"),
        (("--gpus", "8", "--spares", "9", "--cluster-nodes", "4"), "the cluster has 4 nodes"),
        (("--gpus", "80000", "--days", "1e7"), "too many to play"),
    ],
)
def test_wrong_words_get_one_clear_error(words: tuple[str, ...], says: str) -> None:
    told = hpctrain("simulate", *words)
    assert told.exit_code == 2 and says in told.stderr
    assert told.stdout == "" and "Traceback" not in told.stderr
