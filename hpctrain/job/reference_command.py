"""Commands `explain` and `examples`: what a field means, and specs to start from.

Does not belong here: finding what is known of a field (`hpctrain.spec.reference`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpctrain.page.options import FieldName, ProfileName
from hpctrain.page.output import table
from hpctrain.page.text import facts, paragraph

if TYPE_CHECKING:
    from hpctrain.spec.loader import Loaded
    from hpctrain.spec.reference import Field, Kind

_LONG = 60


@click.command()
@click.argument("field", required=False, type=FieldName())
@click.option(
    "--as",
    "kind",
    type=click.Choice(["spec", "profile", "service"]),
    help="Of run specs, profiles or services.",
)
@click.option(
    "--in",
    "file",
    type=click.Path(path_type=Path, allow_dash=True),
    help="A spec: also its value, and where that comes from.",
)
@click.option("--profile", "-p", type=ProfileName(), help="A profile instead of a run spec.")
def explain(field: str | None, kind: Kind | None, file: Path | None, profile: str | None) -> None:
    """Explain a field: its meaning, type, default, engines, and an example.

    Without a field: the sections of a run spec, or of a profile.

    \b
    Examples:
      hpctrain explain parallel.vpp
      hpctrain explain checkpoint
      hpctrain explain batch.micro --in gpt175b.yaml
      hpctrain explain network.nic_bandwidth -p a100x64
    """
    from hpctrain.spec.loader import kind_of_file
    from hpctrain.spec.reference import find_field

    if file is not None and profile is not None:
        raise click.UsageError("`--in` is a spec and `--profile` a profile: give one of them")
    wanted: Kind | None = kind
    if profile is not None:
        wanted = "profile"
    elif file is not None:
        wanted = kind_of_file(file)
    if field is None:
        table(*_section_rows(wanted or "spec"))
        return
    found_kind, found = find_field(field, wanted)
    for line in _field_lines(found_kind, found):
        click.echo(line)
    for line in _value_lines(field, file, profile):
        click.echo(line)
    if found.fields:
        click.echo()
    for line in _inner_lines(found_kind, found):
        click.echo(line)


def _field_lines(kind: Kind, field: Field) -> Iterator[str]:
    """Format one field: type, default, meaning, engines, example."""
    from hpctrain.spec.reference import TITLES, example_value

    yield from facts(
        ("Field", f"{field.path} ({TITLES[kind]})"),
        ("Meaning", field.description),
        ("Type", field.type),
        ("Default", default_text(field)),
        ("Engines", ", ".join(field.engines or ())),
    )
    example = example_value(field.path) if kind == "spec" and not field.fields else None
    if example is not None:
        name, value = example
        yield from facts(("Example", f"{_yaml(value)} (`hpctrain examples {name}`)"))


def _value_lines(path: str, spec: Path | None, profile: str | None) -> Iterator[str]:
    """Format the value that a document has, and the file and line, or option, that gives it."""
    if spec is not None:
        from hpctrain.spec.loader import load_spec

        yield from _value(load_spec(spec), path)
    elif profile is not None:
        from hpctrain.spec.loader import load_named_profile

        yield from _value(load_named_profile(profile), path)


def _value(loaded: Loaded[Any], path: str) -> Iterator[str]:
    value: Any = loaded.document.model_dump(mode="json", by_alias=True)
    for word in path.replace("[", ".[").split("."):
        if isinstance(value, list) and word.startswith("["):
            number = int(word.strip("[]") or 0)
            value = value[number] if number < len(value) else None
        elif isinstance(value, dict):
            value = value.get(word)
    origin = loaded.origin.get(path, "default")
    yield from facts(("Value", f"{_yaml(value)} ({origin})"))


def _yaml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def default_text(field: Field) -> str:
    """Say what holds where a file does not have the field."""
    if field.required:
        return "none: required"
    if field.fields:
        return "see its fields"
    return "absent" if field.default in (None, "null") else str(field.default)


def _inner_lines(kind: Kind, field: Field) -> Iterator[str]:
    """Format the fields of a section: name and type, below it the meaning."""
    from hpctrain.spec.reference import fields_of

    for path in field.fields:
        one = fields_of(kind)[path]
        kind_of = one.type if len(one.type) <= _LONG else f"{one.type[:_LONG].rstrip()} ..."
        default = f" · {default_text(one)}" if not one.fields else ""
        yield from paragraph(f"{one.name}: {kind_of}{default}", "  ", hang=6)
        yield from paragraph(one.description, "      ")


def _section_rows(kind: Kind) -> tuple[list[str], list[list[str]]]:
    """Tabulate the first level of a document."""
    from hpctrain.spec.reference import fields_of

    rows = [
        [path, "yes" if one.required else "", one.description.rstrip(".")]
        for path, one in fields_of(kind).items()
        if "." not in path and "[" not in path
    ]
    return ["FIELD", "REQUIRED", "MEANING"], rows


@click.command()
@click.argument("name", required=False)
def examples(name: str | None) -> None:
    """List the examples, or print one to start from.

    \b
    Examples:
      hpctrain examples
      hpctrain examples gpt175b > mine.yaml
    """
    from hpctrain.spec.reference import examples as all_examples
    from hpctrain.spec.reference import find_example

    if name is not None:
        click.echo(find_example(name).read_text(encoding="utf-8"), nl=False)
        return
    for one, path in all_examples().items():
        click.echo(one)
        for line in paragraph(_first_comment(path), "    "):
            click.echo(line)


def _first_comment(path: Path) -> str:
    """Return the first sentences that the file says about itself."""
    lines: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        text = line.removeprefix("#").strip()
        if not line.startswith("#") or (lines and not text):
            break
        if text and not text.startswith(("yaml-language-server", "(for editors")):
            lines.append(text)
    return " ".join(lines)
