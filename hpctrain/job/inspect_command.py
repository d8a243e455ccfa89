"""Commands `validate`, `profiles` and `adapters`: check and show documents, without Slurm."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from hpctrain.page.options import ProfileName, json_option, runs_option, set_option
from hpctrain.page.output import busy, json_out, line_width, say, table, warn
from hpctrain.page.text import facts, marked, or_dash, paragraph

if TYPE_CHECKING:
    from hpctrain.base.errors import Problem
    from hpctrain.spec.profile import ClusterProfile
    from hpctrain.spec.reference import Kind
    from hpctrain.spec.trainer import Adapter

SPEC_ARGUMENT = click.Path(path_type=Path, allow_dash=True)


@click.command()
@click.argument("files", nargs=-1, required=True, type=SPEC_ARGUMENT)
@click.option(
    "--as",
    "kind",
    type=click.Choice(["spec", "profile", "service"]),
    help="What the files are.",
)
@click.option(
    "--profile",
    "-p",
    type=ProfileName(),
    help="Check all that `submit` checks: plan, data, software, space.",
)
@set_option
@runs_option
@json_option
def validate(
    files: tuple[Path, ...],
    kind: Kind | None,
    profile: str | None,
    overrides: tuple[str, ...],
    runs: Path | None,
    as_json: bool,
) -> None:
    """Check run specs and cluster profiles; every problem is shown with its place.

    With a profile everything is checked that `submit` checks, and nothing is submitted.

    \b
    Examples:
      hpctrain validate gpt175b.yaml
      hpctrain validate gpt175b.yaml -p a100x64
      hpctrain validate --as profile my_cluster.yaml
    """
    if profile is not None:
        if kind == "profile":
            raise click.UsageError("`--profile` is for run specs, not for `--as profile`")
        _examine(files, profile, overrides, runs, as_json=as_json)
        return
    if overrides or runs or as_json:
        raise click.UsageError("`--set`, `--runs` and `--json` need `--profile`")
    from hpctrain.base.errors import InvalidInputError
    from hpctrain.page.words import counted
    from hpctrain.spec.files import read_text
    from hpctrain.spec.open_questions import open_questions

    good: dict[str, list[str]] = {}
    problems: list[Problem] = []
    asked: list[Problem] = []
    for file in files:
        try:
            with busy(f"reading {file} ..."):
                text = read_text(file)
                told: list[str] = []
                good[f"{file}: ok ({validate_file(file, kind, told)})"] = told
                asked += [one.problem(str(file)) for one in open_questions(text)]
        except InvalidInputError as error:
            problems.extend(error.problems)
    if problems:
        raise InvalidInputError(problems)
    for line, told in good.items():
        click.echo(line)
        for text in told:
            say(text)
    if asked:
        number = counted(len(asked), "question is open", "questions are open")
        say(f"{number}; put your values, and remove the comments `# ASK:`")
    for one in asked:
        say("\n".join(paragraph(str(one), "- ")))


def validate_file(path: Path, kind: Kind | None = None, told: list[str] | None = None) -> str:
    """Load a spec or a profile, and print what is to be known of it; returns what it is called.

    How a trainer of its own is supervised becomes lines of `told`.

    Without `kind` a document with one of the sections that only profiles have counts as a profile,
    one with a top-level `kind` as the spec of a service, any other one as that of a run. Raises
    InvalidInputError with every problem.
    """
    from hpctrain.base.errors import InvalidInputError, Problem
    from hpctrain.job.render.job_options import continuation_problems
    from hpctrain.job.trainer_run import supervision_lines
    from hpctrain.spec.families.settings import unknown_note
    from hpctrain.spec.loader import (
        kind_of_file,
        load_any_run_spec,
        load_profile,
        load_service_spec,
        profile_search_path,
    )
    from hpctrain.spec.profile import profile_remarks
    from hpctrain.spec.reference import TITLES
    from hpctrain.spec.trainer import TrainerRunSpec

    if kind is None:
        kind = kind_of_file(path)
    if kind == "profile":
        profile = load_profile(path, profile_search_path())
        site = profile.document
        problems = [
            Problem(message, profile.file)
            for partition in site.slurm.partitions
            for message in continuation_problems(site, partition)
        ]
        if problems:
            raise InvalidInputError(problems)
        for field, remark in profile_remarks(site):
            warn(str(profile.problem(field, remark)))
    elif kind == "service":
        load_service_spec(path)
    else:
        document = load_any_run_spec(path).document
        if told is None:
            return TITLES[kind]
        if not isinstance(document, TrainerRunSpec):
            told += filter(None, [unknown_note(document.model)])
        else:
            told += facts(*supervision_lines(document.trainer), width=line_width(sys.stderr))
    return TITLES[kind]


def _examine(
    files: tuple[Path, ...],
    profile: str,
    overrides: tuple[str, ...],
    runs: Path | None,
    *,
    as_json: bool,
) -> None:
    """Print the checks of each spec, then raise what `submit` would refuse it for."""
    from hpctrain.base.errors import HpctrainError, InvalidInputError, Problem
    from hpctrain.job.preflight import examine
    from hpctrain.records.find import runs_directory

    errors: list[HpctrainError] = []
    in_one_place = sys.stdout.isatty() and sys.stderr.isatty()
    for file in files:
        with busy(f"planning {file}, and checking all that could end the run ..."):
            found = examine(file, profile, overrides, runs=runs_directory(runs))
        if as_json:
            json_out("checks", found.checks)
        else:
            click.echo(f"{file} on {profile}")
            for check in found.checks:
                # The error below has the same sentence, with its place in the file and a hint.
                twice = in_one_place and check.problems
                sentence = "see below" if twice else check.sentence
                click.echo("\n".join(marked(check.state, f"{check.subject}: {sentence}")))
        try:
            found.refuse()
        except HpctrainError as error:
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    problems: list[Problem] = []
    for one in errors:
        problems += one.problems if isinstance(one, InvalidInputError) else [Problem(str(one))]
    if problems:
        raise InvalidInputError(problems)


@click.command()
@click.argument("name", required=False, type=ProfileName())
@click.option(
    "--sites",
    is_flag=True,
    help="List those of named clusters, written from public pages; with a name: its sources.",
)
@json_option
def profiles(name: str | None, sites: bool, as_json: bool) -> None:
    """List the cluster profiles, or show one with all its values.

    `hpctrain profile detect` makes one, `hpctrain profile check` compares one. A named cluster's
    is used as it is (`-p lumi-g`), or a file of yours `extends: lumi-g` and names your account.

    \b
    Examples:
      hpctrain profiles
      hpctrain profiles --sites
      hpctrain profiles --sites lumi-g
      hpctrain profiles a100x64
    """
    from hpctrain.spec.loader import (
        load_named_profile,
        profile_names,
        profile_search_path,
        site_names,
    )
    from hpctrain.spec.positions import write_resolved

    if name is not None:
        loaded = load_named_profile(name)
        if as_json:
            json_out("profile", loaded.document)
        elif sites:
            _print_facts(loaded.document)
        else:
            click.echo(write_resolved(loaded), nl=False)
        return
    named = site_names(profile_search_path())
    others = [one for one in profile_names(profile_search_path()) if one not in named]
    documents, broken = _readable_profiles(named if sites else others)
    for directory in profile_search_path():
        if not directory.is_dir():
            say(f"warning: {directory} in $HPCTRAIN_PROFILE_PATH is no directory")
    for problem in broken:
        say(f"warning: {problem}")
    if as_json:
        json_out("profiles", documents)
        return
    if sites:
        _print_sites(documents)
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
    say(f"{len(named)} profiles of named clusters: `hpctrain profiles --sites`")


class AdapterName(click.ParamType[str]):
    """The name of an adapter, or the path of a file."""

    name = "adapter"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        from hpctrain.spec.loader import adapter_names

        return [CompletionItem(name) for name in adapter_names() if name.startswith(incomplete)]


@click.command()
@click.argument("name", required=False, type=AdapterName())
@json_option
def adapters(name: str | None, as_json: bool) -> None:
    """List the frameworks whose trainers are known, or show the fields that one fills in.

    A spec has the name: `trainer: {adapter: hf, ...}`. An adapter of yours is a file, whose path
    has a `/`; `extends: hf` takes over what it leaves out.

    \b
    Examples:
      hpctrain adapters
      hpctrain adapters hf
      hpctrain adapters ./mine.yaml
    """
    from hpctrain.spec.loader import adapter_names, load_adapter
    from hpctrain.spec.positions import write_resolved
    from hpctrain.spec.trainer import NamedAdapter

    loaded = {one: load_adapter(one) for one in ([name] if name else adapter_names())}
    if as_json:
        named = [NamedAdapter(name=one, **dict(it.document)) for one, it in loaded.items()]
        json_out("adapters", named)
    elif name is not None:
        click.echo(write_resolved(loaded[name], defaults=False), nl=False)
    else:
        rows = [
            [one, it.document.title, str(it.document.level), or_dash(_checked_words(it.document))]
            for one, it in loaded.items()
        ]
        table(["NAME", "TITLE", "LEVEL", "CHECKED"], rows)
        say("`hpctrain adapters NAME` shows what a command needs, and all fields")


def _checked_words(adapter: Adapter) -> str:
    """Say with which versions an adapter was seen to work, and with which it was only read."""
    words = []
    for one in adapter.checked:
        parts = {name: getattr(one, name) for name in ("resume", "save", "progress", "complete")}
        for how in ("run", "read"):
            names = [name for name, value in parts.items() if value == how]
            if names:
                words.append(f"{how} with {one.package} {one.version}: {', '.join(names)}")
    return "; ".join(words)


def _print_sites(documents: list[ClusterProfile]) -> None:
    """Print the named clusters, each with the date of its facts and whether it was tried."""
    rows = []
    for document in documents:
        known = document.site
        assert known is not None, "a test asserts it of every packaged site"
        tried = "no" if known.tried is None else str(known.tried)
        gpus = f"{document.gpu_count} {document.gpu.type}"
        rows.append([document.name, document.description, gpus, str(known.as_of), tried])
    table(["NAME", "WHAT", "GPUS", "FACTS OF", "TRIED THERE"], rows)
    say("Written from public pages: `hpctrain profiles --sites NAME` names them")


def _print_facts(document: ClusterProfile) -> None:
    """Print where the values of a profile are from, and what jobs of it have or lack."""
    from hpctrain.base.errors import UsageError

    known = document.site
    if known is None:
        message = f"profile `{document.name}` does not say where its values are from"
        raise UsageError(message, f"`hpctrain profiles {document.name}` has their lines")
    tried = "not tried there" if known.tried is None else f"trained there on {known.tried}"
    rows = {
        "What": document.description,
        "Facts of": f"{known.as_of}, {tried}",
        "Assumed": ", ".join(known.assumed),
        "Expressed": "; ".join(known.expressed),
        "Refused": "; ".join(known.refused),
        "Missing": "; ".join(known.missing),
    }
    shown = [(title, text or None) for title, text in rows.items()]
    shown += [("Source", source) for source in known.sources]
    click.echo("\n".join(facts(*shown, margin=11)))
    say("Compare what is assumed with the cluster: `hpctrain profile check`, `hpctrain doctor`")


def _readable_profiles(names: list[str]) -> tuple[list[ClusterProfile], list[Problem]]:
    """Read every profile; one that is wrong hides no other."""
    from hpctrain.base.errors import InvalidInputError
    from hpctrain.spec.loader import load_named_profile

    documents: list[ClusterProfile] = []
    problems: list[Problem] = []
    for name in names:
        try:
            documents.append(load_named_profile(name).document)
        except InvalidInputError as error:
            problems += error.problems
    return documents, problems
