"""`validate -p`, `plan`, `submit --dry-run` and `submit` judge a run alike, whatever is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import Outcome, hpctrain
from test_preflight import SPEC
from token_files import write_tokens
from variants import varied

# What is wrong -> settings, exit code, and words of its sentences.
CASES: dict[str, tuple[tuple[str, ...], int, tuple[str, ...]]] = {
    "nothing": ((), 0, ()),
    "key": (("model.foo=1",), 3, ("unknown key",)),
    "partition": (("resources.partition=none",), 4, ("no partition `none`",)),
    "layout": (("parallel.tp=3",), 4, ("heads 4 is not divisible by tp 3",)),
    "size": (("resources.gpus=4096",), 4, ("4096 GPUs are more",)),
    "trainer": (("lora.rank=4",), 3, ("no `lora`",)),
    "variable": (("environment.variables.MASTER_PORT='8'",), 3, ("each launch sets it",)),
    "inherited": (("environment.inherit=[RANK]",), 3, ("each rank has its own",)),
    "data": (("data.sources=[{path: none}]",), 3, ("none.bin does not exist", "none.idx")),
    "weights": (("model.pretrained=none",), 3, ("none does not exist",)),
    "container": (("container.image=/i.sif",), 3, ("container",)),
    "made up": (("data={}", "budget.steps=101"), 3, ("made-up samples",)),
    "shares": (("data.split='0,100,0'",), 3, ("nothing is left for it",)),
    "evaluation": (
        ("data.split='100,0,0'", "evaluation.every_steps=9"),
        3,
        ("leaves nothing for the evaluation",),
    ),
    "trainer and layout": (("lora.rank=4", "parallel.tp=3"), 4, ("no `lora`", "by tp 3")),
    "layout and data": (
        ("parallel.tp=3", "data.sources=[{path: none}]"),
        4,
        ("by tp 3", "none.bin does not exist"),
    ),
}
# One of each way to an answer is shown by every landing.
_ALL_WAYS = ("nothing", "trainer", "data", "trainer and layout")
# Of these there is a plan, and no script.
_NO_SCRIPT = ("trainer", "container", "variable", "inherited")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    write_tokens(tmp_path / "data/text")
    (tmp_path / "small.yaml").write_text(SPEC)
    return tmp_path


def errors(outcome: Outcome) -> list[str]:
    return [line for line in outcome.stderr.splitlines() if line.startswith("error: ")]


@pytest.mark.parametrize("case", varied(CASES, *_ALL_WAYS))
def test_four_commands_have_one_verdict(place: Path, case: str) -> None:
    changes, code, words = CASES[case]
    of = ("-p", "sandbox", "small.yaml", *(word for one in changes for word in ("--set", one)))
    validated = hpctrain("validate", *of)
    shown = hpctrain("submit", *of, "--dry-run")
    submitted = hpctrain("submit", *of, "-y" if code else "--prepare")
    planned = hpctrain("plan", *of)
    assert [one.exit_code for one in (validated, shown, submitted)] == [code] * 3, case
    assert errors(validated) == errors(shown) == errors(submitted)
    for word in words:
        assert any(word in line for line in errors(validated)), validated.transcript()
    if planned.exit_code:  # there is no plan, and what has nothing to do with that is not said
        assert planned.exit_code == code and errors(planned)
        assert {*errors(planned)} <= {*errors(validated)} and not shown.stdout
        return
    assert shown.stdout.startswith("#!/bin/bash") == (case not in _NO_SCRIPT)
    checks = json.loads(hpctrain("validate", *of, "--json").stdout)["checks"] if code else []
    for check in checks:
        if check["state"] == "fails":
            count = len(check["problems"])
            problems = "problem" if count == 1 else "problems"
            assert f"{check['subject']} ({count} {problems})" in planned.stdout
    assert ("Ready     no: " if code else "Ready     yes") in planned.stdout
