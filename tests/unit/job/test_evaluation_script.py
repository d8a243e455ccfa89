"""The script of an evaluation job: one node, the site's software, words as they are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from trained_trials import SPEC

from hpctrain.base.errors import InvalidInputError
from hpctrain.job.prepare import Prepared, evaluation_files, prepare
from hpctrain.job.render.evaluation_script import placed_word
from hpctrain.records.layout import RunLayout

ROOT = Path(__file__).resolve().parents[3]
ODD = "a'b $HOME `x` {step}!"
WORDS = ["echo", "{checkpoint}", ODD, "--out={output}", '{"x": {y}}', "", "{run}"]
JOB = {"name": "score", "command": WORDS, "gpus": 1}


def prepared(tmp_path: Path, *overrides: str, profile: str = "sandbox", **job: object) -> Prepared:
    spec = tmp_path / "tiny.yaml"
    jobs = json.dumps([{**JOB, **job}])
    spec.write_text(f"{SPEC}\ndata: {{made_up: true}}\nevaluation: {{jobs: {jobs}}}\n")
    return prepare(spec, profile, overrides, runs=tmp_path / "runs")


def script(prepared_: Prepared) -> str:
    files = dict(evaluation_files(prepared_, RunLayout(Path("/runs/tiny"))))
    return files[Path("/runs/tiny/evaluation-score.sbatch")]


def directives(text: str) -> set[str]:
    return {line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SB")}


def test_words_reach_the_command_as_they_are(tmp_path: Path) -> None:
    program = "import sys, json; print(json.dumps(sys.argv[1:]))"
    line = " ".join(map(placed_word, [sys.executable, "-c", program, *WORDS]))
    values = {
        "HPCTRAIN_CHECKPOINT": "/a run/$(rm x)/iter_0000004",
        "HPCTRAIN_STEP": "4",
        "HPCTRAIN_OUTPUT": "/o'ut",
        "HPCTRAIN_RUN": "/a run",
    }
    done = subprocess.run(
        ["bash", "-euc", line], env={**os.environ, **values}, capture_output=True, check=True
    )
    assert json.loads(done.stdout) == [
        "echo",
        "/a run/$(rm x)/iter_0000004",
        "a'b $HOME `x` 4!",
        "--out=/o'ut",
        '{"x": {y}}',
        "",
        "/a run",
    ]


def test_one_node_with_the_software_of_the_site(tmp_path: Path) -> None:
    text = script(prepared(tmp_path, profile="a100x64", walltime="2h"))
    assert {"--nodes=1", "--ntasks=1", "--gres=gpu:1", "--time=02:00:00"} <= directives(text)
    of_training = ("--job-name", "--signal", "--comment")
    assert not any(one.startswith(of_training) for one in directives(text))
    assert "export NCCL_SOCKET_IFNAME=eth0" in text and "trap" not in text
    assert "hpctrain.supervise --run" not in text
    no_gpu = script(prepared(tmp_path, gpus=0, cpus=3, memory_per_node="2GiB"))
    assert {"--cpus-per-task=3", "--mem=2048M"} <= directives(no_gpu)
    assert not any("gpu" in one for one in directives(no_gpu))


def test_shellcheck_has_nothing_to_say(tmp_path: Path) -> None:
    path = tmp_path / "job.sh"
    path.write_text(script(prepared(tmp_path)))
    shellcheck = Path(sys.executable).parent / "shellcheck"
    done = subprocess.run([shellcheck, "-s", "bash", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_partition_account_and_qos(tmp_path: Path) -> None:
    own = script(prepared(tmp_path, "resources.account=ours", "resources.qos=long"))
    assert {"--account=ours", "--qos=long", "--partition=train"} <= directives(own)
    other = script(
        prepared(tmp_path, "resources.account=ours", "resources.qos=long", partition="urgent")
    )
    assert {"--account=ours", "--partition=urgent"} <= directives(other)
    assert "--qos=long" not in directives(other), "a QOS of one partition may not exist in another"
    said = script(prepared(tmp_path, account="theirs", qos="short"))
    assert {"--account=theirs", "--qos=short"} <= directives(said)


def test_templates_of_a_site_hold_for_evaluations(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "job.sbatch.j2").write_text(
        "{% extends 'hpctrain/job.sbatch.j2' %}\n"
        "{% block modules %}\nmodule load ours\n{% endblock %}\n"
    )
    made = prepared(tmp_path)
    assert "module load ours" in script(replace(made, template_directory=site))


@pytest.mark.parametrize(
    ("job", "words"),
    [
        ({"partition": "nope"}, r"evaluation\.jobs\[0\]\.partition.*no partition `nope`: it has"),
        ({"gpus": 3}, r"evaluation\.jobs\[0\]\.gpus.*one node, of 2 GPUs"),
        ({"walltime": "400d"}, r"evaluation\.jobs\[0\]\.walltime.*exceeds the limit"),
        ({"command": ["a"]}, r"no word contains `\{output\}`"),
        ({"command": ["{outputs}", "{output}"]}, r"`\{outputs\}` is not replaced: did you mean"),
        ({"command": []}, r"command"),
        ({"name": "a b"}, r"name"),
        ({"gpus": -1}, r"gpus"),
    ],
)
def test_what_is_refused_at_its_place(tmp_path: Path, job: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words) as caught:
        prepared(tmp_path, profile="a100x64" if "walltime" in job else "sandbox", **job)
    assert all(problem.line is not None for problem in caught.value.problems)


def test_two_jobs_of_one_name(tmp_path: Path) -> None:
    spec = tmp_path / "tiny.yaml"
    spec.write_text(f"{SPEC}\nevaluation: {{jobs: {json.dumps([JOB, JOB])}}}\n")
    with pytest.raises(InvalidInputError, match="two evaluation jobs are named `score`"):
        prepare(spec, "sandbox", runs=tmp_path / "runs")


def test_steps_are_those_that_are_kept_for_good(tmp_path: Path) -> None:
    def every(*overrides: str, **job: object) -> int | None:
        files = evaluation_files(prepared(tmp_path, *overrides, **job), RunLayout(tmp_path))
        found = json.loads(dict(files)[tmp_path / "evaluation.json"])
        return found["jobs"][0]["every_steps"]  # type: ignore[no-any-return]

    assert every() is None
    assert every("checkpoint.keep_every_steps=30") == 30
    assert every("checkpoint.keep_every_steps=30", every_steps=7) == 7


def test_it_has_the_environment_of_the_training(tmp_path: Path) -> None:
    site = tmp_path / "own.yaml"
    site.write_text(
        "extends: sandbox\nname: own\n"
        "software: {login_shell: true, python: $WORK/bin/python3, modules: {load: [$STACK]}}\n"
    )
    run = prepared(tmp_path, profile=str(site))
    text, training = script(run), run.script
    assert text.startswith("#!/bin/bash -l\n") and training.startswith("#!/bin/bash -l\n")
    start, end = "\n# Ends the job where a field", "\nPYTHONPATH="
    block = training[training.index(start) : training.index(end)]
    assert "needs software.modules.load STACK" in block and "needs software.python WORK" in block
    assert text[text.index(start) : text.index(end)] == block
    assert text.count('"${WORK:?}/bin/python3" -m hpctrain.supervise.evaluation_result') == 2
