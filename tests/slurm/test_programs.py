"""A program drives a run by what `hpctrain schema` and the skill say, and by nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from rehearsal import PATIENCE_SECONDS
from waiting import wait_until

from hpctrain.sandbox.sandbox import Sandbox
from tests.rig.stand_in.interpreter import write_stand_in_interpreter

pytestmark = pytest.mark.stand_in
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@dataclass
class Program:
    """It knows the words of the skill; whatever it reads has been compared with its schema."""

    directory: Path
    environment: dict[str, str]
    schemas: dict[str, Any] = field(default_factory=dict)

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "hpctrain", *words],
            cwd=self.directory,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )

    def ask(self, verb: str, *words: str, code: int = 0) -> Any:
        """The one document of a command that ends with this code."""
        if verb not in self.schemas:
            self.schemas[verb] = json.loads(self.run("schema", "--json", *verb.split()).stdout)
        done = self.run(*verb.split(), *words, "--json")
        assert done.returncode == code, done.stderr
        document = json.loads(done.stdout)
        jsonschema.Draft202012Validator(self.schemas[verb]).validate(document)
        return document

    def state(self, run: str) -> str:
        (row,) = self.ask("status", run)["runs"]
        return str(row["state"])

    def wait(self, run: str, *states: str) -> None:
        over = {"DONE", "FAILED", "STOPPED", "CANCELLED"}

        def is_there() -> bool:
            state = self.state(run)
            assert state in states or state not in over, self.ask("why", run)
            return state in states

        wait_until(is_there, f"{run} {states}", pause_seconds=2.0)


def with_line(path: Path, line: int, change: Callable[[str], str]) -> None:
    lines = path.read_text().splitlines(keepends=True)
    lines[line - 1] = change(lines[line - 1])
    path.write_text("".join(lines))


def test_a_program_mends_submits_stops_and_resumes(sandbox: Sandbox, tmp_path: Path) -> None:
    python = write_stand_in_interpreter(tmp_path / "python", 0.2)
    profile = {"extends": "sandbox", "name": "own", "software": {"python": str(python)}}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(profile))
    spec = tmp_path / "spec.yaml"
    text = (EXAMPLES / "digits" / "tiny.yaml").read_text()
    spec.write_text(text.replace("budget:", "bugdet:").replace("every_steps: 30", "every_steps: 5"))
    program = Program(tmp_path, {**os.environ, **sandbox.environment()})
    verbs = {row["verb"]: row for row in program.ask("schema")["verbs"]}
    assert verbs["plan"]["effect"] == "reads" and verbs["submit"]["effect"] == "acts"
    assert not verbs["submit"]["again"] and verbs["stop"]["again"]
    assert (
        program.run("data", "prepare", "--builtin", "digits", "-o", "data/digits").returncode == 0
    )

    where = ("-p", "own.yaml", "spec.yaml")
    error = program.ask("validate", *where, code=3)["error"]
    (wrong,) = [one for one in error["problems"] if "bugdet" in one["message"]]
    with_line(tmp_path / wrong["file"], wrong["line"], lambda old: old.replace("bugdet", "budget"))
    checks = program.ask("validate", *where)["checks"]
    assert checks and "fails" not in {one["state"] for one in checks}

    plan = program.ask("plan", *where)["plan"]
    run = program.ask("submit", *where, "--yes")["submitted"]["run_id"]
    steps = plan["batch"]["train_steps"]
    program.wait(run, "RUNNING")
    wait_until(lambda: program.ask("status", run)["runs"][0]["step"], "a step", pause_seconds=1.0)
    assert program.run("stop", run).returncode == 0
    program.wait(run, "STOPPED")
    why = program.ask("why", run)["why"]
    assert why["state"] == "STOPPED"
    assert program.run("resume", run).returncode == 0
    program.wait(run, "DONE")
    assert program.ask("status", run)["runs"][0]["step"] == steps
    story = program.ask("describe", run)["run"]
    assert len(story["attempts"]) == 2
    assert program.ask("status", "nobody", code=6)["error"]["kind"] == "NoSuchRunError"
