"""Commands `validate`, `profiles` and `schema`: check and show documents, without Slurm."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from hpctrain.cli.options import ProfileName, json_option
from hpctrain.cli.output import json_out, or_dash, table

SPEC_ARGUMENT = click.Path(path_type=Path, allow_dash=True)


@click.command()
@click.argument("files", nargs=-1, required=True, type=SPEC_ARGUMENT)
@click.option("--as", "kind", type=click.Choice(["spec", "profile"]), help="What the files are.")
def validate(files: tuple[Path, ...], kind: str | None) -> None:
    """Check run specs and cluster profiles; every problem is shown with its place.

    \b
    Examples:
      hpctrain validate examples/gpt175b.yaml
      hpctrain validate --as profile my_cluster.yaml
    """
    from hpctrain.actions.validate import validate_file
    from hpctrain.errors import InvalidInputError, Problem

    good: list[str] = []
    problems: list[Problem] = []
    for file in files:
        try:
            good.append(f"{file}: ok ({validate_file(file, kind)})")
        except InvalidInputError as error:
            problems.extend(error.problems)
    if problems:
        raise InvalidInputError(problems)
    click.echo("\n".join(good))


@click.command()
@click.argument("name", required=False, type=ProfileName())
@json_option
def profiles(name: str | None, as_json: bool) -> None:
    """List the cluster profiles, or show one with all its values.

    `hpctrain profile detect` makes one, `hpctrain profile check` compares one.

    \b
    Examples:
      hpctrain profiles
      hpctrain profiles a100x64
    """
    from hpctrain.actions.profiles import load_named_profile, profile_search_path
    from hpctrain.spec.loader import profile_names
    from hpctrain.spec.resolved import write_resolved

    if name is not None:
        loaded = load_named_profile(name)
        if as_json:
            json_out("profile", loaded.document)
        else:
            click.echo(write_resolved(loaded), nl=False)
        return
    documents = [load_named_profile(n).document for n in profile_names(profile_search_path())]
    if as_json:
        json_out("profiles", documents)
        return
    rows = [
        [
            d.name,
            str(d.nodes.count),
            f"{d.gpu.per_node} x {d.gpu.type}",
            str(d.gpu.memory),
            d.network.fabric,
            or_dash(d.description),
        ]
        for d in documents
    ]
    table(["NAME", "NODES", "GPUS", "MEMORY", "FABRIC", "DESCRIPTION"], rows)


@click.command()
@click.argument("kind", type=click.Choice(["spec", "profile"]))
def schema(kind: Literal["spec", "profile"]) -> None:
    """Print the JSON Schema of run specs or cluster profiles.

    \b
    Examples:
      hpctrain schema spec > schemas/spec.json
    """
    from hpctrain.spec.schema import json_schema

    click.echo(json_schema(kind), nl=False)
