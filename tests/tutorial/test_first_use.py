"""README.md: its commands, typed into a shell up to the first step of a run, and to the end of one.

Ranks compute nothing, as in most tests of Slurm; `make nightly` takes the real trainer. What they
print is not compared: docs/tutorial.md has that.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from installed_wheel import ROOT
from typed_shell import TypedShell, typed_shell
from waiting import wait_until

from hpctrain.base.errors import UsageError
from hpctrain.records.find import all_runs
from hpctrain.records.run_records import read_metrics
from hpctrain.sandbox.sandbox import Sandbox
from tests.rig.stand_in.interpreter import write_stand_in_interpreter

_PATIENCE_SECONDS = 300.0
_MOST_COMMANDS = 10
_STEP_SECONDS = 0.2
_TRAINED = re.compile(r"Progress +[1-9]\d* of \d+ steps")


def commands(heading: str = "## First real use") -> list[str]:
    """Read the commands of a section, in their order."""
    section = (ROOT / "README.md").read_text().partition(f"\n{heading}\n")[2]
    block = section.partition("```sh\n")[2].partition("```")[0]
    return [line.partition("  #")[0].strip() for line in block.splitlines() if line[0] != " "]


def test_a_newcomer_types_few_commands() -> None:
    typed = commands()
    assert 0 < len(typed) <= _MOST_COMMANDS
    words = " ".join(typed)
    for verb in ("profile detect", "doctor --start", "init", "submit"):
        assert f"hpctrain {verb}" in words, verb


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[TypedShell]:
    variables = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "NO_COLOR": "1",
        "OMP_NUM_THREADS": "1",
    }
    try:
        with typed_shell(tmp_path, variables) as shell:
            yield shell
    finally:
        with contextlib.suppress(UsageError):
            Sandbox.open(tmp_path / ".sandbox").down()


def test_the_commands_lead_to_the_first_step(
    shell: TypedShell, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    python = write_stand_in_interpreter(tmp_path / "python", _STEP_SECONDS)
    for command in commands():
        code, printed = shell.type(command)
        assert code == 0, f"{command}\n{printed}"
        if "profile detect" in command and not pytestconfig.getoption("--nightly"):
            with (tmp_path / "mycluster.yaml").open("a") as profile:
                profile.write(f"software: {{python: {python}}}\n")
        if command.startswith("hpctrain status"):
            deadline = time.monotonic() + _PATIENCE_SECONDS
            while not _TRAINED.search(printed):
                assert time.monotonic() < deadline, printed
                time.sleep(1)
                printed = shell.type(command)[1]
    (run,) = all_runs(tmp_path / "runs")
    assert run.layout.metrics.read_text(), "it has trained a step"
    assert "first start" not in printed


def test_a_script_of_ones_own_runs_to_its_end(
    shell: TypedShell, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """The commands of the second example, with the real script; `try` in the night."""
    shutil.copytree(ROOT / "examples/any-trainer", tmp_path / "examples/any-trainer")
    begin = [*commands()[:2], "hpctrain profile detect -o examples/any-trainer/mycluster.yaml"]
    for command in (*begin, *commands("### With a training script of your own")):
        if command.startswith("hpctrain try") and not pytestconfig.getoption("--nightly"):
            continue
        code, printed = shell.type(command)
        assert code == 0, f"{command}\n{printed}"
    (run,) = all_runs(tmp_path / "examples/any-trainer/runs")
    wait_until(run.layout.done.exists, "the end of the run")
    rows = read_metrics(run.layout)
    assert [row.step for row in rows] == list(range(1, 61))
    assert {row.learning_rate for row in rows} == {None}, "the script has reported none"
