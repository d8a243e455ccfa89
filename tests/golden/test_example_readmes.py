"""What the READMEs of examples/ say: plans that the planner prints now, commands that exist.

A `console` block holds commands and lines of what they print. Every command in it is run (they
predict only); every line below it must be a line of its output. `make golden` puts present lines
in the place of old ones (the most similar line is taken), and the diff shows what has changed.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
from command_line import on_terminal
from golden_files import Golden

from hpctrain.cli.main import cli
from hpctrain.job.prepare import prepare
from hpctrain.serve.make_plan import plan_service
from hpctrain.serve.service_job import ServiceInputs
from hpctrain.serve.up import service_scripts
from hpctrain.spec.loader import kind_of_file, load_named_profile, load_service_spec

ROOT = Path(__file__).resolve().parents[2]
PYTHON = "/opt/hpctrain/bin/python3"
READMES = sorted((ROOT / "examples").glob("*/README.md"))
EXAMPLES = [path.parent.name for path in READMES]
BLOCK = re.compile(r"^```(sh|console)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Shown:
    """A command of a README and the lines quoted below it."""

    command: str
    lines: tuple[str, ...]


def blocks(text: str, kind: str) -> list[str]:
    return [found[2] for found in BLOCK.finditer(text) if found[1] == kind]


def shown(text: str) -> Iterator[Shown]:
    for block in blocks(text, "console"):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, printed = part.partition("\n")
            lines = tuple(line for line in printed.splitlines() if line and line != "...")
            yield Shown(command, lines)


def commands(text: str) -> list[list[str]]:
    """Every `hpctrain` line, in words; comments are gone, continued lines joined."""
    lines = [one.command for one in shown(text)]
    for block in blocks(text, "sh"):
        lines += block.replace("\\\n", " ").splitlines()
    words = [shlex.split(line, comments=True) for line in lines]
    return [line[1:] for line in words if line and line[0] == "hpctrain"]


def readme(example: str) -> Path:
    return ROOT / "examples" / example / "README.md"


def printed_by(one: Shown, place: pytest.MonkeyPatch) -> list[str]:
    place.chdir(ROOT)
    place.setenv("COLUMNS", "80")  # what an error is wrapped at
    words = shlex.split(one.command)
    predicts = {"plan", "simulate", "--predict"} & set(words[1:])
    assert words[0] == "hpctrain" and predicts, f"only predictions are quoted, not {one.command}"
    *lines, code = click.unstyle(on_terminal(80, *words[1:])).splitlines()
    assert code in ("exit code 0", "exit code 4"), lines
    return [line.rstrip() for line in lines]


@pytest.mark.parametrize("example", EXAMPLES)
def test_figures_are_what_the_planner_prints_now(
    example: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    path = readme(example)
    text = path.read_text()
    quoted = list(shown(text))
    assert quoted, f"{path} quotes no plan"
    for one in quoted:
        now = printed_by(one, monkeypatch)
        old = [line for line in one.lines if line not in now]
        nearest = [_nearest(line, now) for line in old]
        if None not in nearest and request.config.getoption("--write-golden"):
            for line, new in zip(old, nearest, strict=True):
                text = text.replace(f"\n{line}\n", f"\n{new}\n")
            path.write_text(text)
            continue
        message = "\n".join([*old, "now:", *now])
        assert not old, f"{path}: $ {one.command}\n{message}"


def _nearest(line: str, now: list[str]) -> str | None:
    """The line that begins with the same word and is most like it."""
    same = [new for new in now if new.split()[:1] == line.split()[:1]]
    return next(iter(difflib.get_close_matches(line, same, n=1, cutoff=0)), None)


@pytest.mark.parametrize("example", EXAMPLES)
def test_commands_exist(example: str) -> None:
    """Options by click's own parser; files that are not made by an earlier line are there."""
    found = commands(readme(example).read_text())
    submitted = any(words[:1] == ["submit"] or "up" in words for words in found)
    assert submitted, "nothing is submitted"
    for words in found:
        parse(words)
        named = [word for word in words if word.startswith("examples/")]
        missing = [word for word in named if not (ROOT / word).exists()]
        assert not missing, f"{missing} in: {words}"


def parse(words: list[str]) -> None:
    """Raises click.UsageError for an option that the command does not have."""
    command: click.Command = cli
    context = cli.make_context("hpctrain", [], resilient_parsing=True)
    while isinstance(command, click.Group):
        inner = command.get_command(context, words[0])
        assert inner is not None, f"no command {words[0]}"
        context = inner.make_context(words[0], [], parent=context, resilient_parsing=True)
        command, words = inner, words[1:]
    command.make_parser(context).parse_args(list(words))


@pytest.mark.parametrize("example", EXAMPLES)
def test_script(golden: Golden, tmp_path: Path, example: str) -> None:
    """The job script of the full size, on the profile that the README names first."""
    home = ROOT / "examples" / example
    profile = profile_of(readme(example).read_text())
    given = str(ROOT / profile) if "/" in profile else profile
    if kind_of_file(home / "full.yaml") == "service":
        text, router = scripts_of_service(home / "full.yaml", given)
        golden(f"services/{example}-router.sbatch", router)
    else:
        text = prepare(home / "full.yaml", given, runs=tmp_path, python=PYTHON).script
    golden(f"scripts/example--{example}.sbatch", text)


def scripts_of_service(spec: Path, profile: str) -> tuple[str, str]:
    """The scripts of a replica and the router, whose weights are not on this machine."""
    loaded, cluster = load_service_spec(spec), load_named_profile(profile)
    plan = plan_service(loaded, [cluster]).chosen
    assert plan is not None and loaded.document.weights.path is not None
    weights = Path(loaded.document.weights.path)
    return service_scripts(ServiceInputs(loaded, cluster, plan, weights, PYTHON))


def profile_of(text: str) -> str:
    first = next(words for words in commands(text) if "-p" in words)
    return first[first.index("-p") + 1]


def test_every_directory_is_complete_and_listed() -> None:
    homes = sorted(path.parent.name for path in (ROOT / "examples").glob("*/full.yaml"))
    assert homes == EXAMPLES
    scripts = (ROOT / "tests/golden/scripts").glob("example--*")
    assert sorted(path.stem.removeprefix("example--") for path in scripts) == homes
    listed = (ROOT / "examples/README.md").read_text()
    for name in homes:
        assert "." not in name and f"({name}/README.md)" in listed, name
        for file in ("full.yaml", "tiny.yaml"):
            assert (ROOT / "examples" / name / file).exists(), f"{name} has no {file}"
        lines = readme(name).read_text().splitlines()
        assert len(lines) <= 45, f"{name}/README.md is no short one any more"
