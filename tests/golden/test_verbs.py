"""What programs rely on: the table of commands is complete and true, schemas, errors, the skill."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import click
import jsonschema
import pytest
import yaml
from command_line import hpctrain
from reviewed_files import compare

from hpctrain.base import errors
from hpctrain.cli.main import cli
from hpctrain.cli.verbs import VERBS, output_schema, skill_text


def leaves(command: click.Command, *path: str) -> dict[str, click.Command]:
    if not isinstance(command, click.Group):
        return {" ".join(path): command}
    context, found = click.Context(command), {}
    for name in command.list_commands(context):
        inner = command.get_command(context, name)
        assert inner is not None
        found |= leaves(inner, *path, name)
    return found


COMMANDS = leaves(cli)


def test_every_command_has_its_row() -> None:
    assert sorted(VERBS) == sorted(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_rows_name_options_and_codes_that_are_there(name: str) -> None:
    verb, command = VERBS[name], COMMANDS[name]
    options = {word for one in command.params for word in one.opts}
    assert ("--json" in options) == bool(verb.output)
    assert set(verb.unless) <= options
    classes = vars(errors).values()
    known = {one.exit_code for one in classes if inspect.isclass(one) and hasattr(one, "exit_code")}
    assert set(verb.codes) <= known - {1, 2}
    # What its help says about exit codes stands in the row, too.
    said = {int(code) for code in re.findall(r"exit code (\d)", command.help or "", re.IGNORECASE)}
    assert said <= {0, 1, 2, 130, *verb.codes}


@pytest.mark.parametrize("name", [name for name, verb in VERBS.items() if verb.output])
def test_schemas_are_schemas(name: str) -> None:
    done = hpctrain("schema", "--json", *name.split())
    assert done.exit_code == 0 and done.stdout == output_schema(name)
    schema = json.loads(done.stdout)
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    assert not validator.is_valid({"schema_version": 1})
    assert not validator.is_valid({"schema_version": 1, "anything": 1})


def test_an_error_is_a_document_with_its_places(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text("name: a\nparalel: {tp: 2}\n")
    done = hpctrain("plan", "-p", "a100x64", str(tmp_path / "spec.yaml"), "--json")
    error = json.loads(done.stdout)["error"]
    assert (done.exit_code, error["exit_code"], error["kind"]) == (3, 3, "InvalidInputError")
    places = [(one["line"], one["column"]) for one in error["problems"]]
    assert (2, 1) in places and "error: " in done.stderr
    assert any("parallel" in (one["hint"] or one["message"]) for one in error["problems"])


@pytest.mark.parametrize("words", [("schema", "--json", "serve", "up"), ("schema", "--json", "no")])
def test_a_verb_without_a_schema(words: tuple[str, ...]) -> None:
    done = hpctrain(*words)
    assert done.exit_code == 2 and json.loads(done.stdout)["error"]["kind"] == "UsageError"


def test_the_table_for_programs() -> None:
    rows = json.loads(hpctrain("schema", "--json").stdout)["verbs"]
    assert [row["verb"] for row in rows] == list(VERBS)
    assert hpctrain("schema").stdout.count("\n") == len(rows) + 1


def test_the_skill_is_one(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    text = skill_text()
    _, head, body = text.split("---\n", 2)
    compare(request.config, "docs/for-programs.md", body.lstrip())
    # agentskills.io, specification: name as the folder's, description of at most 1,024 characters
    fields = yaml.safe_load(head)
    assert fields["name"] == "hpctrain" and 0 < len(fields["description"]) <= 1024
    assert len(body.splitlines()) < 200 and "{{" not in body
    assert hpctrain("schema", "--skill", str(tmp_path)).exit_code == 0
    assert (tmp_path / "hpctrain" / "SKILL.md").read_text() == text
    for words in re.findall(r"(?:`|^|\| )hpctrain ([a-z]+)", body, re.MULTILINE):
        assert words in {name.split()[0] for name in VERBS}, words
