"""Commands `explain` and `examples`: what a field means, and specs to start from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpctrain.page.options import FieldName, ProfileName
from hpctrain.page.output import table
from hpctrain.page.text import paragraph

if TYPE_CHECKING:
    from hpctrain.spec.reference import Field, Kind

_INDENT = 10


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
    from hpctrain.job.reference_text import field_lines, section_rows, value_lines
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
        table(*section_rows(wanted or "spec"))
        return
    found_kind, found = find_field(field, wanted)
    for line in field_lines(found_kind, found):
        click.echo(line)
    for line in value_lines(field, file, profile):
        click.echo(line)
    _print_fields(found_kind, found)


def _print_fields(kind: Kind, found: Field) -> None:
    from hpctrain.job.reference_text import inner_lines

    if found.fields:
        click.echo()
        for line in inner_lines(kind, found):
            click.echo(line)


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
        for line in paragraph(_first_comment(path), "    ", hang=4):
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
