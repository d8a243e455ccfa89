"""One command for two kinds of things: the metrics of a run, and a spec for another cluster."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from command_line import hpctrain

ROOT = Path(__file__).resolve().parents[3]
SPEC = str(ROOT / "examples" / "llama7b.yaml")
PODS = ("--run-claim", "runs", "--image", "ghcr.io/example/train:1")


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_yaml_on_stdout_and_losses_on_stderr(kind: str, tmp_path: Path) -> None:
    words = ("export", SPEC, "-p", "h100x16", "--to", kind, *PODS)
    outcome = hpctrain(*words)
    assert outcome.exit_code == 0, outcome.stderr
    assert next(yaml.safe_load_all(outcome.stdout))["kind"] == "ConfigMap"
    assert "- supervisor: nobody finds out" in outcome.stderr
    assert hpctrain(*words).stdout == outcome.stdout, "same input, same bytes"
    into = hpctrain(*words, "-o", str(tmp_path / "new"))
    written = tmp_path / "new" / f"llama7b-{kind}.yaml"
    assert into.stdout == f"{written}\n" and written.read_text() == outcome.stdout


def test_hostfile(tmp_path: Path) -> None:
    words = ("export", SPEC, "-p", "h100x16", "--to", "hostfile")
    assert "a directory that all hosts have" in hpctrain(*words, "--hosts", "n1").stderr
    outcome = hpctrain(*words, "--hosts", "n1", "-o", str(tmp_path), "--name", "mine")
    assert outcome.exit_code == 0, outcome.stderr
    names = {Path(line).name for line in outcome.stdout.splitlines()}
    assert names == {"train.json", "hostfile", "run-node.sh", "commands.txt"}
    assert "/runs/mine" in (tmp_path / "run-node.sh").read_text()


WRONG = [
    ((SPEC,), "is a spec and no run"),
    ((SPEC, "--csv"), "is a spec and no run"),
    (("gpt-7f3a",), "choose one of"),
    (("gpt-7f3a", "--to", "jobset", "-p", "h100x16", *PODS), "does not exist"),
    ((SPEC, "--to", "jobset", *PODS), "'--profile'"),
    ((SPEC, "--to", "jobset", "-p", "h100x16", "--csv"), "the metrics of a run"),
    ((SPEC, "--to", "jobset", "-p", "h100x16", "--hosts", "n1"), "--to hostfile"),
    ((SPEC, "--to", "hostfile", "-p", "h100x16", "--queue", "q"), "--to jobset or trainjob"),
    (("gpt-7f3a", "--csv", "--image", "x"), "--to jobset or trainjob"),
    (("gpt-7f3a", "--csv", "-p", "h100x16"), "--to jobset or trainjob or hostfile"),
    ((SPEC, "--to", "jobset", "-p", "h100x16"), "--run-claim is missing"),
]


@pytest.mark.parametrize(("words", "message"), WRONG)
def test_which_of_the_two_is_meant(words: tuple[str, ...], message: str) -> None:
    outcome = hpctrain("export", *words)
    assert outcome.exit_code == 2 and message in outcome.stderr, outcome.stderr
    assert not outcome.stdout
