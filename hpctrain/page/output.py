"""Prints tables, messages and JSON, and writes what a command made into a private file.

Tables are plain columns like squeue's, so that they can be grepped; in a pipe they are never cut.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import click
from pydantic import BaseModel, ConfigDict

from hpctrain.base.errors import HpctrainError, InvalidInputError, Problem
from hpctrain.page.text import LINE_WIDTH, columns_text, is_numeric, paragraph

SCHEMA_VERSION = 1
_SOON_SECONDS = 1.0


class ErrorDocument(BaseModel):
    """What a command with `--json` prints in place of its document when it cannot do its work."""

    model_config = ConfigDict(frozen=True)

    exit_code: int
    kind: str
    problems: tuple[Problem, ...]

    @classmethod
    def of(cls, error: HpctrainError | click.ClickException) -> ErrorDocument:
        """Take over message, places and hints."""
        problems: Sequence[Problem]
        if isinstance(error, InvalidInputError):
            problems = error.problems
        elif isinstance(error, click.ClickException):
            problems = (Problem(error.format_message()),)
        else:
            problems = (Problem(str(error), hint=error.hint),)
        return cls(exit_code=error.exit_code, kind=type(error).__name__, problems=tuple(problems))


def json_out(
    kind: str,
    content: BaseModel | Sequence[BaseModel],
    **more: BaseModel | Sequence[BaseModel] | None,
) -> None:
    """Print `{"schema_version": 1, KIND: ...}`; NaN becomes null (RFC 8259 has no NaN).

    `more`: further documents under their own names; those that are None are left out.
    """
    context = click.get_current_context(silent=True)
    if context is not None and isinstance(context.obj, set):
        context.obj |= {kind}  # the set of `cli.main.run`
    body = f'"schema_version": {SCHEMA_VERSION}'
    for name, part in {kind: content, **more}.items():
        if isinstance(part, BaseModel):
            body += f', "{name}": {part.model_dump_json(indent=2, by_alias=True)}'
        elif part is not None:
            items = ",\n".join(item.model_dump_json(indent=2, by_alias=True) for item in part)
            body += f', "{name}": [{items}]'
    click.echo(f"{{{body}}}")


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print columns; right-aligned where every cell is a number, cut only on a narrow terminal."""
    fitted = _fitted_lines if sys.stdout.isatty() else columns_text
    for line in fitted(headers, rows):
        click.echo(line.rstrip())


def coloured(text: str, colour: str | None) -> str:
    """Colour a text for a terminal, unless $NO_COLOR is set (no-color.org)."""
    if colour is None or os.environ.get("NO_COLOR"):
        return text
    return click.style(text, fg=colour)


def _fitted_lines(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows for people: wrapped to the width of their terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=None, pad_edge=False, show_edge=False, padding=(0, 2, 0, 0))
    for number, header in enumerate(headers):
        right = is_numeric([row[number] for row in rows])
        shown.add_column(Text(header), justify="right" if right else "left")
    for row in rows:
        shown.add_row(*(Text(cell) for cell in row))
    console = Console()
    with console.capture() as text:
        console.print(shown)
    return text.get().splitlines()


@contextmanager
def busy(text: str) -> Iterator[None]:
    """Say on a terminal what takes longer than a second; the line is gone afterwards."""
    if not sys.stderr.isatty():
        yield
        return
    line = text[: LINE_WIDTH - 1]
    shown = threading.Event()

    def show() -> None:
        shown.set()
        click.echo(f"{line}\r", err=True, nl=False)

    timer = threading.Timer(_SOON_SECONDS, show)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        if shown.is_set():
            click.echo(" " * len(line) + "\r", err=True, nl=False)


def terminal_width() -> int:
    """Return the columns of the terminal, or of $COLUMNS."""
    return shutil.get_terminal_size((LINE_WIDTH, 24)).columns


def line_width(stream: TextIO) -> int:
    """Return the columns to wrap at: 80 on a terminal; elsewhere lines are for grep, and whole."""
    return LINE_WIDTH if stream.isatty() else sys.maxsize


def say(text: str = "") -> None:
    """Print a message for people, on stderr."""
    click.echo(text, err=True)


def warn(text: str) -> None:
    """Print a warning on stderr: wrapped on a terminal, one line elsewhere."""
    first = "warning: "
    lines = paragraph(text, first) if sys.stderr.isatty() else [first + text]
    say("\n".join(lines))


def write_private(path: Path, text: str, *, name_on_stderr: bool = False) -> None:
    """Replace a file that only its owner may read, and print its name; `-` is stdout.

    `name_on_stderr`: stdout is for something else. The file is private also where a directory
    shares its files with a group. Raises OSError.
    """
    if str(path) == "-":
        click.echo(text, nl=False)
        return
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    click.echo(path, err=name_on_stderr)
