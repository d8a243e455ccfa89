"""Defines the options that several commands share, and completes names of runs and profiles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from hpctrain.base.units import Duration

Decorated = Callable[..., Any]


class ProfileName(click.ParamType[str]):
    """A profile's name or file; completes from directory names only."""

    name = "profile"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        from hpctrain.spec.loader import profile_names, profile_search_path

        names = profile_names(profile_search_path())
        return [CompletionItem(name) for name in names if name.startswith(incomplete)]


class FieldName(click.ParamType[str]):
    """A dotted field of a run spec, as `--set` and `explain` take it; completes `FIELD=VALUE`."""

    name = "field"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        from hpctrain.spec.reference import fields_of, names_below

        field, equals, start = incomplete.partition("=")
        if not equals:
            return [CompletionItem(name) for name in names_below(field)]
        known = fields_of("spec").get(field)
        words = known.type.replace(" or ", " | ").split(" | ") if known else []
        values = [word for word in words if " " not in word and word.startswith(start)]
        return [CompletionItem(f"{field}={value}") for value in values]


class RunName(click.ParamType[str]):
    """A run id or the start of one."""

    name = "run"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        from hpctrain.records.find import runs_directory

        directory = runs_directory()
        names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
        return [CompletionItem(name) for name in sorted(names) if name.startswith(incomplete)]


class Seconds(click.ParamType[float]):
    """`90s`, `30min`, `2h`; must be above 0."""

    name = "duration"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        if isinstance(value, int | float):
            return float(value)
        return self._read(str(value), param, ctx)

    def _read(self, text: str, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            seconds = float(Duration.parse(text))
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if seconds < 0:
            self.fail("must not be negative", param, ctx)
        return seconds


def profile_option(function: Decorated) -> Decorated:
    return click.option(
        "--profile", "-p", type=ProfileName(), required=True, help="Cluster profile: name or file."
    )(function)


def set_option(function: Decorated) -> Decorated:
    return click.option(
        "--set",
        "overrides",
        type=FieldName(),
        multiple=True,
        metavar="FIELD=VALUE",
        help="Override one field of the spec, such as parallel.tp=8. May be repeated.",
    )(function)


def pace_options(function: Decorated) -> Decorated:
    """Add the options that say how fast a trainer of its own is."""
    like = click.option(
        "--like",
        type=RunName(),
        help="With `trainer:` in the spec: the run that has measured its steps.  [default: the "
        "last one with the same command]",
    )
    return click.option(
        "--step-time", type=Seconds(), help="With `trainer:` in the spec: the time of a step."
    )(like(function))


def runs_option(function: Decorated) -> Decorated:
    return click.option(
        "--runs",
        type=click.Path(path_type=Path, file_okay=False),
        help="Directory of the runs.  [default: $HPCTRAIN_RUNS or ./runs]",
    )(function)


def json_option(function: Decorated) -> Decorated:
    return click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")(
        function
    )


def yes_option(function: Decorated) -> Decorated:
    return click.option("--yes", "-y", is_flag=True, help="Do not ask.")(function)


def confirm(question: str, *, yes: bool) -> None:
    """Ask on a terminal.

    Raises NotConfirmedError for a no, UsageError without a terminal, because nobody could answer.
    """
    import sys

    from hpctrain.base.errors import NotConfirmedError, UsageError

    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError("no terminal to ask on", hint="`-y` answers yes")
    if not click.confirm(question, err=True):
        raise NotConfirmedError("nothing was done")
