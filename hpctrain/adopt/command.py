"""Command `adopt`: a spec, and the differences of a profile, from a batch script."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpctrain.page.options import ProfileName, json_option
from hpctrain.page.output import json_out, say, table
from hpctrain.page.text import paragraph
from hpctrain.page.words import counted

if TYPE_CHECKING:
    from hpctrain.adopt.draft import AdoptedLine, Adoption

_MOST = 72  # characters of a line of the script in the table
_BECOMES = {
    "spec": "spec",
    "profile": "profile",
    "needless": "not needed",
    "dropped": "DROPPED",
}


@click.command()
@click.argument("script", type=click.Path(path_type=Path))
@click.option("--profile", "-p", type=ProfileName(), help="Write only what this profile lacks.")
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(),
    help="Directory of what is written.  [default: the current one]",
)
@click.option("--strict", is_flag=True, help="Fail, and write nothing, where a line is dropped.")
@json_option
def adopt(script: Path, profile: str | None, output: Path, strict: bool, as_json: bool) -> None:
    """Make a spec with `trainer:` of a batch script that starts a training.

    The script is read as text from where it would be submitted, and nothing of it is run. NAME.yaml
    is the spec; with a profile NAME.profile.yaml extends it by what the script asks of
    the site and the profile does not have. A table says of each line what became of it:
    a field, not needed because hpctrain does it, or dropped, with the reason.

    Exit code 0 also where lines are dropped; with --strict 3.

    \b
    Examples:
      hpctrain adopt train.sbatch
      hpctrain adopt train.sbatch -p jean-zay-h100 -o runs/
      hpctrain adopt train.sbatch --json
    """
    from hpctrain.adopt.adoption import Source
    from hpctrain.adopt.adoption import adopt as action
    from hpctrain.base.errors import InvalidInputError, Problem
    from hpctrain.spec.files import read_text
    from hpctrain.spec.loader import (
        adapter_names,
        find_profile,
        load_adapter,
        load_named_profile,
        profile_search_path,
    )

    text = read_text(script)
    document = None if profile is None else load_named_profile(profile).document
    extends = None
    if profile is not None and ("/" in profile or profile.endswith((".yaml", ".yml"))):
        extends = str(find_profile(profile, profile_search_path()).absolute())
    source = Source(
        script.name,
        text,
        str(Path.cwd()),
        None if output.absolute() == Path.cwd() else str(output.absolute()),
    )
    adapters = {name: load_adapter(name).document for name in adapter_names()}
    done = action(source, adapters, document, profile, extends)
    if as_json:
        json_out("adoption", done)
    else:
        table(["LINE", "TEXT", "BECOMES", "WHY"], answer_rows(done))
    dropped = done.dropped
    if strict and dropped:
        problems = [
            Problem(f"dropped: {part.part or line.text.splitlines()[0]}", str(script), line.line,
                    hint=part.reason)
            for line, part in dropped
        ]  # fmt: skip
        raise InvalidInputError(problems)
    if not as_json:
        _say_counts(done)
    _write_files(done, output)


def answer_rows(done: Adoption) -> list[list[str]]:
    """List one row for each part of a line; its number and text stand at the first."""
    rows = []
    for line in done.lines:
        first, *more = line.text.splitlines() or [""]
        shown = _short(f"{first} ..." if more else first)
        for number, part in enumerate(line.parts):
            becomes = f"{_BECOMES[part.outcome]} {part.field or ''}".rstrip()
            own = (
                [str(line.line), shown]
                if number == 0
                else ["", f"  {_short(part.part or '')}".rstrip()]
            )
            why = part.reason
            if number == 0 and part.part and len(line.parts) > 1:
                why = f"{part.part}: {why}"
            rows.append([*own, becomes, " ".join(why.split())])
    return rows


def _short(text: str) -> str:
    """Cut a line: its number says which it is, and `--json` has all of it."""
    return text if len(text) <= _MOST else f"{text[: _MOST - 4]} ..."


def _say_counts(done: Adoption) -> None:
    def worst(line: AdoptedLine) -> str:
        kinds = [part.outcome for part in line.parts]
        return next(kind for kind in ("dropped", "spec", "profile", "needless") if kind in kinds)

    found = [worst(line) for line in done.lines]
    counts = ", ".join(
        f"{found.count(kind)} {words}"
        for kind, words in (
            ("spec", "in the spec"),
            ("profile", "in the profile"),
            ("needless", "not needed"),
            ("dropped", "with something dropped"),
        )
    )
    say(f"{counted(len(found), 'command or option', 'commands and options')}: {counts}")
    if done.profile is None and done.profile_needs:
        say("A profile for it needs (with --profile: what that one lacks):")
        for need in done.profile_needs:
            where = f" (line {need.line})" if need.line else ""
            say(f"  {need.field}: {need.value}{where}")


def _write_files(done: Adoption, output: Path) -> None:
    """Write the files that are not there yet, and say what is left to do."""
    from hpctrain.base.errors import InvalidInputError, Problem, UsageError
    from hpctrain.spec.loader import load_any_run_spec, load_profile, profile_search_path

    spec, overlay = output / f"{done.name}.yaml", output / f"{done.name}.profile.yaml"
    texts = {spec: done.spec, **({overlay: done.overlay} if done.overlay is not None else {})}
    try:
        output.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            if path.exists() and path.read_text(encoding="utf-8") != text:
                hint = "remove it, or name another directory: `--output DIR`"
                raise UsageError(f"{path} exists, and is left as it is", hint=hint)
        for path, text in texts.items():
            path.write_text(text, encoding="utf-8")
            say(f"Wrote {path}")
    except OSError as error:
        raise UsageError(f"{error.filename} cannot be written: {error.strerror}") from None
    if done.profile is not None and done.overlay is None:
        say(f"Profile {done.profile} has all that the script asks of the site")
    left: list[Problem] = []
    try:
        load_any_run_spec(spec)
    except InvalidInputError as error:
        left += error.problems
    try:
        if done.overlay is not None:
            load_profile(overlay, profile_search_path())
    except InvalidInputError as error:
        left += error.problems
    if left or done.adapter_needs:
        say("Before it can run:")
    for problem in left:
        hint = f" ({problem.hint})" if problem.hint else ""
        say("\n".join(paragraph(f"{problem}{hint}", "- ")))
    for need in done.adapter_needs:
        say("\n".join(paragraph(f"its adapter needs: {need}", "- ")))
    where = overlay if done.overlay is not None else done.profile or "PROFILE"
    say(f"Next  hpctrain validate -p {where} {spec}")
    say(f"      hpctrain try -p {where} {spec}")
