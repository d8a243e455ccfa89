"""Command `schema`: what YAML files may have, what commands print for programs, and the skill."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast, get_args

import click

from hpctrain.page.options import json_option
from hpctrain.page.output import json_out, say, table

if TYPE_CHECKING:
    from hpctrain.spec.reference import Kind


@click.command()
@click.argument("what", nargs=-1, metavar="[spec|profile|service|VERB...]")
@json_option
@click.option(
    "--skill",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Write the skill for assistants to DIR/hpctrain (Agent Skills).",
)
def schema(what: tuple[str, ...], as_json: bool, skill: Path | None) -> None:
    """Print JSON Schemas: of YAML files, or of what a command prints with --json.

    Alone: a table of all commands, with what each changes and its exit codes.

    \b
    Examples:
      hpctrain schema spec > schemas/spec.json
      hpctrain schema --json status
      hpctrain schema --json serve plan
      hpctrain schema --skill ~/.agents/skills
    """
    from hpctrain.base.errors import UsageError
    from hpctrain.cli.verbs import VERBS, output_schema, skill_text
    from hpctrain.spec.fields import did_you_mean
    from hpctrain.spec.reference import Kind, json_schema

    if skill is not None:
        if what or as_json:
            raise click.UsageError("--skill goes with nothing else")
        path = skill / "hpctrain" / "SKILL.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(skill_text(), encoding="utf-8")
        say(f"Wrote {path}")
    elif what and as_json:
        click.echo(output_schema(" ".join(what)), nl=False)
    elif what:
        kinds = get_args(Kind)
        if len(what) > 1 or what[0] not in kinds:
            words = " ".join(what)
            meant = did_you_mean(words, kinds)
            raise UsageError(
                f"`{words}` is none of {', '.join(kinds)}",
                hint=meant or f"`hpctrain schema --json {words}` is about what a command prints",
            )
        click.echo(json_schema(cast("Kind", what[0])), nl=False)
    elif as_json:
        json_out("verbs", list(VERBS.values()))
    else:
        rows = [
            [
                one.verb,
                one.effect,
                "yes" if one.prints_json else "no",
                " ".join(map(str, one.codes)) or "-",
                "; ".join(f"{name} {effect}" for name, effect in one.unless.items()) or "-",
            ]
            for one in VERBS.values()
        ]
        table(["VERB", "EFFECT", "JSON", "CODES", "OTHERWISE"], rows)
