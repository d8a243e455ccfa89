"""man/*: the man pages of the wheel are what commands, options and fields say about themselves."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from command_line import hpctrain
from golden_files import Golden
from man_text import ENVIRONMENT, command_page, field_page
from reviewed_files import ROOT, compare

from hpctrain.cli.main import EXIT_CODES, cli
from hpctrain.spec.reference import fields_of

PAGES = {
    "hpctrain.1": command_page,
    "hpctrain-spec.5": lambda: field_page("spec"),
    "hpctrain-profile.5": lambda: field_page("profile"),
    "hpctrain-service.5": lambda: field_page("service"),
}


_MACROS = {".TH", ".SH", ".SS", ".TP", ".PP", ".nf", ".fi", ".br", '.\\"'}
_ESCAPES = re.compile(r"\\(e|-|&|\(dq|fB|fI|fR|\[u[0-9A-F]{4,5}\])")


@pytest.mark.parametrize("name", PAGES)
def test_page(name: str, request: pytest.FixtureRequest) -> None:
    compare(request.config, f"man/{name}", PAGES[name]())


@pytest.mark.parametrize("name", PAGES)
def test_the_language_is_that_of_man(name: str) -> None:
    """Macros that every man knows, with nothing that roff would take for something else."""
    text = PAGES[name]()
    assert text.isascii() and not re.search(r"[ \t]$", text, re.MULTILINE)
    assert re.findall(r"^\.SH (.*)", text, re.MULTILINE)[0] == "NAME"
    open_lines = 0
    for line in text.splitlines():
        assert line, "an empty line is a request, too"
        if line.startswith((".", "'")):
            assert line.split()[0] in _MACROS, line
        open_lines += {".nf": 1, ".fi": -1}.get(line, 0)
        assert open_lines in (0, 1), line
        if not line.startswith('.\\"'):
            assert "\\" not in _ESCAPES.sub("", line), line
    assert open_lines == 0
    assert text.count("\\fB") + text.count("\\fI") == text.count("\\fR")


@pytest.mark.parametrize("name", PAGES)
def test_groff_finds_no_fault(name: str) -> None:
    if shutil.which("groff") is None:
        pytest.skip("groff is not installed")
    argv = ["groff", "-man", "-Tascii", "-ww", "-z"]
    done = subprocess.run(
        argv, input=PAGES[name](), capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_every_command_and_option_is_there() -> None:
    plain = command_page().replace("\\-", "-").replace("\\fB", "").replace("\\fR", "")
    for path in walk(cli):
        command: click.Command = cli
        for word in path:
            assert isinstance(command, click.Group)
            found = command.get_command(click.Context(command), word)
            assert found is not None
            command = found
        heading = " ".join(("hpctrain", *path))
        found_heading = re.search(rf'^\.SS "?{heading}[ "\n]', plain, re.MULTILINE)
        assert found_heading or not path, heading
        start = found_heading.start() if found_heading and path else 0
        section = plain[start : plain.find("\n.S", start + 1)] if path else plain
        options = [param for param in command.params if isinstance(param, click.Option)]
        options = [one for one in options if not one.hidden]
        names = [name for one in options if one.name != "version" for name in one.opts]
        assert [name for name in names if name not in section] == [], heading
    codes = re.findall(r"(?:^|· )(\d+) ", EXIT_CODES.replace("Exit codes: ", ""), re.MULTILINE)
    assert len(codes) > 8
    for code in codes:
        assert f".TP\n{code}\n" in plain


@pytest.mark.parametrize("kind", ["spec", "profile"])
def test_every_field_is_there(kind: str) -> None:
    plain = PAGES[f"hpctrain-{kind}.5"]().replace("\\-", "-")
    missing = [path for path in fields_of(kind) if f"\n\\fB{path}\\fR\n" not in plain]  # type: ignore[arg-type]
    assert not missing


def test_variables_that_people_set_are_there() -> None:
    """A variable that the commands read is listed. Those that jobs give to their ranks are not."""
    rooms = [
        ROOT / "hpctrain" / room for room in ("cli", "records", "runs", "sandbox", "slurm", "spec")
    ]
    sources = [path.read_text() for room in rooms for path in sorted(room.rglob("*.py"))]
    read = set(re.findall(r'"(HPCTRAIN_[A-Z_]*[A-Z])"', "\n".join(sources)))
    assert {"HPCTRAIN_RUNS", "HPCTRAIN_PROFILE_PATH"} <= read
    # the mark by which a sandbox knows its own processes again; what a trainer's script has
    others = {"HPCTRAIN_SANDBOX_MONITOR", "HPCTRAIN_CHECKPOINT"}
    assert read - others <= ENVIRONMENT.keys()


def test_the_wheel_installs_all_of_them() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    placed = {
        f"{directory}/{Path(file).name}": file
        for directory, files in settings["data-files"].items()
        for file in files
    }
    expected = {f"share/man/man{name[-1]}/{name}": f"man/{name}" for name in PAGES}
    assert placed == expected


# -- `--help` of every command -------------------------------------------------------------------


def walk(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of every command and group."""
    yield path
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from walk(command, (*path, name))
        else:
            yield (*path, name)


@pytest.mark.parametrize("path", list(walk(cli)), ids=lambda path: " ".join(path) or "hpctrain")
def test_help(golden: Golden, path: tuple[str, ...]) -> None:
    outcome = hpctrain(*path, "--help")
    assert outcome.exit_code == 0 and not outcome.stderr
    assert "Examples:\n" in outcome.stdout, "people read the examples first"
    examples = outcome.stdout.split("Examples:\n")[1].split("\n\n")[0].splitlines()
    assert examples and all("hpctrain" in line for line in examples), examples
    golden(f"help/{'-'.join(('hpctrain', *path))}.txt", outcome.stdout)


@pytest.mark.parametrize("path", list(walk(cli)), ids=lambda path: " ".join(path) or "hpctrain")
def test_help_fits_80_columns(path: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = hpctrain(*path, "--help").stdout
    lines, commands = text.splitlines(), text.partition("\nCommands:\n")[2].splitlines()
    assert not [line for line in lines if len(line) > 80]
    assert not [line for line in commands if line.endswith("...")], "give it a `short_help`"
    assert "\n\n  Examples:\n" in text
    assert "examples/" not in text, "people with a wheel have no such directory"


def test_every_option_is_explained() -> None:
    for path in walk(cli):
        command: click.Command = cli
        for name in path:
            assert isinstance(command, click.Group)
            found = command.get_command(click.Context(command), name)
            assert found is not None
            command = found
        mute = [p.name for p in command.params if isinstance(p, click.Option) and not p.help]
        assert not mute, f"`hpctrain {' '.join(path)}`: options without help: {mute}"
