"""Command `init`: a run spec from flags and questions, or from another tool's configuration."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpctrain.page.options import ProfileName
from hpctrain.page.output import busy, line_width, say, table
from hpctrain.page.text import paragraph
from hpctrain.page.words import counted

if TYPE_CHECKING:
    from hpctrain.site.init import Wishes

_MOST = 64  # characters of a name with its value in the table


@click.command()
@click.argument("file", required=False, type=click.Path(path_type=Path, allow_dash=True))
@click.option("--model", "-m", metavar="NAME|DIR", help="A published model, or a config.json.")
@click.option(
    "--remote-code",
    metavar="DIGEST",
    help="Of --model: run the code beside its config.json, if it has this digest.",
)
@click.option(
    "--trainer",
    metavar="ADAPTER",
    help="Instead: a program of your own, by its framework (`hpctrain adapters`).",
)
@click.option(
    "--from",
    "source",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Instead: the configuration of another tool, or a script with its arguments.",
)
@click.option("--data", metavar="PREFIX", help="Tokens: prefix of .bin and .idx.  [default: none]")
@click.option("--tokenizer", metavar="FILE", help="The tokenizer that the data was made with.")
@click.option("--tokens", metavar="COUNT", help="How long: 100B.  [default: 20 a parameter]")
@click.option(
    "--gpus", type=click.IntRange(1), help="[default: one node; more if the model needs it]"
)
@click.option("--engine", metavar="NAME", help="[default: by the model]")
@click.option("--name", help="Name of the runs.  [default: that of the model]")
@click.option("--profile", "-p", type=ProfileName(), help="Plan the spec at once on this cluster.")
@click.option("--list", "listed", is_flag=True, help="List the published models.")
def init(
    file: Path | None,
    model: str | None,
    remote_code: str | None,
    trainer: str | None,
    source: Path | None,
    data: str | None,
    tokenizer: str | None,
    tokens: str | None,
    gpus: int | None,
    engine: str | None,
    name: str | None,
    profile: str | None,
    listed: bool,
) -> None:
    """Write a run spec to start from, with comments; what is not given is asked on a terminal.

    --from reads a file of Megatron-LM (arguments, or a script with them), Megatron-Bridge, NeMo,
    torchtitan, nanotron, DeepSpeed, axolotl or LLaMA-Factory as text. A table says of each name,
    with its line, whether it is a field of the spec, has none, or is left out, and why.

    \b
    Examples:
      hpctrain init --list
      hpctrain init --model llama-3-8b --gpus 64 -p a100x64
      hpctrain init my.yaml --model models/llama-2-7b --data data/text --tokens 6B
      hpctrain init my.yaml --trainer hf
      hpctrain init --from train_gpt3_175b.sh --gpus 1024
      hpctrain init my.yaml --from llama3_8b.toml
    """
    from hpctrain.site.init import Wishes, named_model, spec_text, trainer_text
    from hpctrain.spec.families.settings import unknown_note

    if listed:
        _list_models()
        return
    if source is not None:
        given = {"model": model, "trainer": trainer, "data": data, "tokenizer": tokenizer}
        given["remote-code"] = remote_code
        for option, value in (given | {"tokens": tokens, "engine": engine}).items():
            if value is not None:
                raise click.UsageError(f"--{option} is not for --from: edit the spec")
        _bring(source, file, gpus, name, profile)
        return
    if trainer is not None:
        given = {"model": model, "data": data, "tokenizer": tokenizer, "tokens": tokens}
        given["remote-code"] = remote_code
        for option, value in (given | {"engine": engine}).items():
            if value is not None:
                raise click.UsageError(f"--{option} is for hpctrain's engines, not for --trainer")
        own = name or "my-trainer"
        text = trainer_text(trainer, own, gpus or _node_gpus(profile))
        if str(file) == "-":
            click.echo(text, nl=False)
            return
        _write(file or Path(f"{own}.yaml"), text)
        click.echo(file or f"{own}.yaml")
        where = f"-p {profile or 'PROFILE'} {file or own + '.yaml'}"
        say("Next  put your values where the file asks (`# ASK:`), then")
        say(f"      hpctrain validate {where}")
        say(f"      hpctrain plan {where} --step-time 2s")
        return
    asking = sys.stdin.isatty() and sys.stderr.isatty()
    if model is None:
        if not asking:
            raise click.UsageError("give a --model (`hpctrain init --list`), or use a terminal")
        model = click.prompt("Model (a name of `hpctrain init --list`, or a directory)", err=True)
    chosen = named_model(model, file.parent if file is not None else Path(), remote_code)
    if note := unknown_note(chosen.shape):
        say(note)
    if data is None and asking:
        answer = click.prompt(
            "Data (prefix of .bin and .idx; empty: made-up data, for a trial)",
            default="",
            show_default=False,
            err=True,
        )
        data = answer or None
    wishes = Wishes(
        chosen, gpus or _node_gpus(profile), data, tokenizer, _tokens(tokens), engine, name
    )
    if gpus is None:
        if profile is not None:
            wishes = _enlarged(wishes, profile)
        if asking:
            gpus = click.prompt("GPUs", default=wishes.gpus, type=click.IntRange(1), err=True)
            wishes = replace(wishes, gpus=gpus)
    text = spec_text(wishes)
    if str(file) == "-":
        click.echo(text, nl=False)
        return
    target = file or Path(f"{wishes.name or chosen.name}.yaml")
    _write(target, text)
    click.echo(target)
    _say_next(target, profile)


def _bring(
    source: Path, file: Path | None, gpus: int | None, name: str | None, profile: str | None
) -> None:
    """Make a spec of another tool's configuration, and show what became of each name."""
    from hpctrain.adopt.configuration import bring
    from hpctrain.base.errors import InvalidInputError
    from hpctrain.spec.files import read_text

    def has_weights(directory: str) -> bool | None:
        config = Path(directory, "config.json")
        return any(config.parent.glob("*.safetensors")) if config.is_file() else None

    done = bring(read_text(source), source, gpus=gpus, name=name, has_weights=has_weights)
    if str(file) == "-":
        click.echo(done.text, nl=False)
    else:
        becomes = {"spec": "spec", "no field": "NO FIELD", "dropped": "DROPPED"}
        rows = [
            [
                str(one.line),
                f"{one.name} {one.value}"[:_MOST],
                one.field or becomes[one.outcome],
                one.reason,
            ]
            for one in done.names
        ]
        table(["LINE", "NAME", "BECOMES", "WHY"], rows)
    counts = {"spec": "understood", "no field": "without a field", "dropped": "left out"}
    found = ", ".join(f"{done.count(kind)} {words}" for kind, words in counts.items())  # type: ignore[arg-type]
    say(f"{done.tool}, {counted(len(done.names), 'name')}: {found}")
    if str(file) == "-":
        return
    target = file or Path(f"{done.name}.yaml")
    try:
        _write(target, done.text)
    except InvalidInputError as error:
        say(f"Wrote {target}")
        say("Before it can run:")
        for problem in error.problems:
            hint = f" ({problem.hint})" if problem.hint else ""
            say("\n".join(paragraph(f"{problem}{hint}", "- ")))
        say(f"Next  hpctrain validate -p {profile or 'PROFILE'} {target}")
    else:
        say(f"Wrote {target}")
        _say_next(target, profile)


def _enlarged(wishes: Wishes, profile: str) -> Wishes:
    """Take more than one node where one is too small for the model, and say so."""
    from hpctrain.site.init import fitting_gpus

    with busy("looking for the number of GPUs that suffices ..."):
        gpus = fitting_gpus(wishes, profile)
    if gpus != wishes.gpus:
        say(f"{wishes.model.name} does not fit {wishes.gpus} GPUs: the spec takes {gpus}")
    return replace(wishes, gpus=gpus)


def _write(target: Path, text: str) -> None:
    from hpctrain.base.errors import UsageError
    from hpctrain.spec.loader import load_any_run_spec

    try:
        with target.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        hint = "another name, or `hpctrain init -` to print the spec"
        raise UsageError(f"{target} exists, and is left as it is", hint=hint) from None
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror}") from None
    load_any_run_spec(target)


def _say_next(target: Path, profile: str | None) -> None:
    where = profile or "PROFILE"
    say(f"Next  hpctrain plan -p {where} {target} --apply")
    say(f"      hpctrain validate -p {where} {target}")
    if profile is None:
        return
    from hpctrain.job.plan import load, plan_option
    from hpctrain.job.plan_text import answer_lines

    inputs = load(target, profile)
    option = plan_option(inputs, "time")
    if option.refusal is not None:
        raise inputs.placed(option.refusal)
    lines = answer_lines(option, None, width=line_width(sys.stderr))
    click.echo("\n".join(lines).rstrip(), err=True)


def _node_gpus(profile: str | None) -> int:
    """Return the GPUs of one node: the profile's, else eight, as in most machines."""
    if profile is None:
        return 8
    from hpctrain.spec.loader import load_named_profile

    return load_named_profile(profile).document.gpu.per_node


def _tokens(text: str | None) -> float | None:
    from hpctrain.base.units import TokenCount

    if text is None:
        return None
    try:
        return float(TokenCount.parse(text))
    except ValueError as error:
        raise click.UsageError(f"--tokens: {error}") from None


def _list_models() -> None:
    from hpctrain.job.plan_text import short_count
    from hpctrain.spec.loader import load_presets

    rows = [
        [one.name, str(one.shape["family"]), short_count(one.parameters), one.source]
        for one in load_presets().presets
    ]
    table(["NAME", "FAMILY", "PARAMETERS", "SOURCE"], rows)
