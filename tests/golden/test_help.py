"""`--help` of every command."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest
from command_line import hpctrain
from golden_files import Golden

from hpctrain.cli.main import cli


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
