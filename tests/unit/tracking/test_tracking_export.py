"""Settings from a spec, what is refused, and `hpctrain export`."""

from __future__ import annotations

import csv
import io
import shlex
import sys
from pathlib import Path

import pytest
from command_line import hpctrain
from fabricated_runs import fabricate, said
from tracked_runs import loss_of, shown, tracked, train

from hpctrain.base.errors import InvalidInputError
from hpctrain.job.preflight import input_checks
from hpctrain.job.prepare import load_inputs, prepare
from hpctrain.job.run_directory import write_run_directory
from hpctrain.job.supervisor_settings import wandb_id
from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import EventKind
from hpctrain.records.supervise_config import read_supervise_config
from hpctrain.records.tracking import tensorboard_directory, tracking_config
from hpctrain.spec.loader import load_run_spec

ROOT = Path(__file__).resolve().parents[3]
SPEC = ROOT / "examples" / "gpt175b.yaml"
BOTH = "tracking: {tensorboard: true, wandb: {project: llama, tags: [a, b], group: g}}\n"


def spec_with(directory: Path, text: str) -> Path:
    path = directory / "spec.yaml"
    path.write_text(f"{SPEC.read_text()}\n{text}")
    return path


# -- the spec ------------------------------------------------------------------------------------


def submitted(directory: Path, text: str) -> RunLayout:
    runs = directory / "runs"
    return write_run_directory(prepare(spec_with(directory, text), "a100x64", runs=runs), runs)


def test_a_spec_becomes_settings(tmp_path: Path) -> None:
    run = submitted(tmp_path, BOTH)
    assert read_supervise_config(run.supervise_config).tracking
    config = tracking_config(run)
    assert config is not None and config.wandb is not None
    assert tensorboard_directory(run, config) == run.tensorboard
    wandb = config.wandb
    assert (wandb.project, wandb.tags, wandb.group) == ("llama", ("a", "b"), "g")
    assert wandb.mode == "offline"
    assert wandb.name == run.run_id and wandb.run_id == wandb_id(run)
    assert config.description["gpus"] == 512
    assert run.tracking_config.stat().st_mode & 0o777 == 0o600
    assert str(tmp_path) not in run.tracking_config.read_text(), "a run may move"


def test_without_tracking_there_is_nothing(tmp_path: Path) -> None:
    run = submitted(tmp_path, "")
    assert not read_supervise_config(run.supervise_config).tracking
    assert not run.tracking_config.exists()


def test_a_directory_gets_one_for_each_run(tmp_path: Path) -> None:
    run = submitted(tmp_path, f"tracking: {{tensorboard: {tmp_path}/boards}}\n")
    config = tracking_config(run)
    assert config is not None and config.wandb is None
    assert config.tensorboard == f"{tmp_path}/boards/{run.run_id}"


def test_ids_are_short_enough_and_differ_between_directories(tmp_path: Path) -> None:
    long = "n" * 63 + "-7f3a"
    one, other = (wandb_id(RunLayout(tmp_path / name / long)) for name in ("a", "b"))
    assert len(one) == len(other) == 64 and one != other


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("{wandb: {project: p, api_key: abc}}", "unknown key", "no key stands in a spec"),
        ("{wandb: {project: p, key_file: k}}", "unknown key", "WANDB_API_KEY"),
        ("{wandb: {project: p, name: hf_abcdefghijklmnopqr}}", "form of a secret", "wandb login"),
        ("{wandb: {project: a/b}}", "expected a name without any of", ""),
        ("{wandb: {}}", "required, but missing", "Project of W&B"),
        ("{wandb: true}", "expected a mapping", ""),
        ("{wandb: {project: p, mode: never}}", "`offline` or `online`", ""),
        ("{tensorboard: yes}", "the path of a directory", ""),
        ("{tensorboard: ''}", "the path of a directory", ""),
        ("{tensorboard: 3}", "expected text or `true` or `false`", ""),
    ],
)
def test_what_is_wrong_is_said_at_its_place(
    tmp_path: Path, text: str, message: str, hint: str
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        load_run_spec(spec_with(tmp_path, f"tracking: {text}\n"))
    (problem,) = caught.value.problems
    assert message in problem.message and hint in (problem.hint or "")
    assert problem.line is not None
    assert "hf_abc" not in problem.message


def test_a_missing_package_is_refused_at_submit(tmp_path: Path) -> None:
    """The Python of the supervisor writes, also where a container trains."""
    spec, profile = load_inputs(spec_with(tmp_path, BOTH), "a100x64")
    good = [one for one in input_checks(spec, profile) if one.subject == "tracking"]
    assert [one.state for one in good] == ["works"]
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nshift\nexec {sys.executable} -P -S "$@"\n')
    bare.chmod(0o755)
    found = [one for one in input_checks(spec, profile, str(bare)) if one.subject == "tracking"]
    (problem,) = found[0].problems
    assert "has no tensorboard and no wandb" in problem.message
    assert "pip install 'hpctrain[tensorboard,wandb]'" in (problem.hint or "")
    plain, _ = load_inputs(SPEC, "a100x64")
    assert not [one for one in input_checks(plain, profile) if one.subject == "tracking"]


# -- the command ---------------------------------------------------------------------------------


def test_csv_has_the_steps_that_count(tmp_path: Path) -> None:
    run = fabricate(tmp_path).layout
    train(run, range(1, 48), saved=[40])
    train(run, range(41, 51), epoch=2)
    outcome = hpctrain("export", run.run_id, "--csv", "--runs", str(tmp_path))
    rows = list(csv.DictReader(io.StringIO(outcome.stdout)))
    assert [int(one["step"]) for one in rows] == [*range(1, 51)]
    assert [float(one["loss"]) for one in rows] == [loss_of(s, 1 + (s > 40)) for s in range(1, 51)]
    file = tmp_path / "metrics.csv"
    again = hpctrain("export", run.run_id, "--csv", "-o", str(file), "--runs", str(tmp_path))
    assert not again.stdout and file.read_text() == outcome.stdout


def test_tensorboard_for_a_run_without_tracking(tmp_path: Path) -> None:
    run = fabricate(tmp_path / "runs").layout
    train(run, range(1, 4))
    outcome = hpctrain("export", run.run_id, "--tensorboard", "--runs", str(tmp_path / "runs"))
    assert outcome.stdout == f"{run.tensorboard}\n"
    assert list(shown(run.tensorboard)) == [1, 2, 3]
    page = hpctrain("describe", run.run_id, "--runs", str(tmp_path / "runs"))
    assert f"tensorboard --logdir {run.tensorboard}" in page.stdout
    boards = tmp_path / "b o"
    other = ("export", run.run_id, "--tensorboard", "-o", str(boards))
    train(run, [4])
    for _ in range(2):
        outcome = hpctrain(*other, "--runs", str(tmp_path / "runs"))
    assert outcome.stdout == f"{boards / run.run_id}\n"
    assert list(shown(boards / run.run_id)) == [1, 2, 3, 4]


def test_wandb_for_a_run_without_tracking(tmp_path: Path) -> None:
    run = fabricate(tmp_path).layout
    train(run, range(1, 4), saved=[3])
    words = ("export", run.run_id, "--wandb", "--runs", str(tmp_path))
    refused = hpctrain(*words)
    assert refused.exit_code == 2 and "--project NAME" in refused.stderr
    outcome = hpctrain(*words, "--project", "llama")
    assert shlex.split(outcome.stdout) == ["wandb", "sync", str(run.wandb)]
    other = hpctrain(*words, "--project", "other")
    assert other.exit_code == 2 and "project llama" in other.stderr


@pytest.mark.parametrize(
    "options",
    [(), ("--csv", "--wandb"), ("--wandb", "-o", "x"), ("--csv", "--project", "p")],
)
def test_options_that_do_not_go_together(tmp_path: Path, options: tuple[str, ...]) -> None:
    run = fabricate(tmp_path)
    outcome = hpctrain("export", run.run_id, *options, "--runs", str(tmp_path))
    assert outcome.exit_code == 2 and not outcome.stdout


def test_a_failure_is_one_error(tmp_path: Path) -> None:
    """A file stands where the directory of event files belongs."""
    run = fabricate(tmp_path).layout
    tracked(run, tensorboard=True)
    train(run, [1])
    run.tracking.write_text("in the way")
    outcome = hpctrain("export", run.run_id, "--tensorboard", "--runs", str(tmp_path))
    assert outcome.exit_code == 1 and outcome.stderr.count("\n") == 1, outcome.stderr
    assert "Traceback" not in outcome.stderr and str(run.tracking) in outcome.stderr


def test_describe_names_a_failure_of_the_process(tmp_path: Path) -> None:
    job = {"job_id": 1, "restart_count": 0}
    entries = (
        said(EventKind.ATTEMPT_STARTED, nodes="n[0-1]", **job),
        said(EventKind.TRACKING_FAILED, reason="ended by signal 9", **job),
        said(EventKind.ACTION, action="requeue", reason="preempted", **job),
    )
    run = fabricate(tmp_path, entries=entries)
    outcome = hpctrain("describe", run.run_id, "--runs", str(tmp_path))
    assert "  tracking  ended by signal 9\n" in outcome.stdout
