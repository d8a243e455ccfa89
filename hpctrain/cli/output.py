"""Prints tables and JSON, and formats paragraphs.

Tables are plain columns like squeue's, so that they can be grepped; in a pipe they are never cut.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

import click
from pydantic import BaseModel

SCHEMA_VERSION = 1
_MARKS = {"works": "ok", "limited": "note", "fails": "FAILS", "unknown": "?"}
LINE_WIDTH = 80
_NUMBER = re.compile(r"[\d,./]+(-[\d,./]+)?|-")  # `1,234`, `0.5`, `3/10`, `52-63`
_SOON_SECONDS = 1.0


def json_out(
    kind: str,
    content: BaseModel | Sequence[BaseModel],
    **more: BaseModel | Sequence[BaseModel] | None,
) -> None:
    """Print `{"schema_version": 1, KIND: ...}`; NaN becomes null (RFC 8259 has no NaN).

    `more`: further documents under their own names; those that are None are left out.
    """
    body = f'"schema_version": {SCHEMA_VERSION}'
    for name, part in {kind: content, **more}.items():
        if isinstance(part, BaseModel):
            body += f', "{name}": {part.model_dump_json(indent=2)}'
        elif part is not None:
            items = ",\n".join(item.model_dump_json(indent=2) for item in part)
            body += f', "{name}": [{items}]'
    click.echo(f"{{{body}}}")


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print columns; right-aligned where every cell is a number, cut only on a narrow terminal."""
    numeric = [is_numeric([row[column] for row in rows]) for column in range(len(headers))]
    if sys.stdout.isatty():
        lines = _fitted_lines(headers, rows, numeric)
    else:
        lines = ["  ".join(line) for line in aligned([headers, *rows], numeric)]
    for line in lines:
        click.echo(line.rstrip())


def is_numeric(column: Sequence[str]) -> bool:
    """Return True for numbers, ranges of them and `-`, which are aligned on the right."""
    return all(_NUMBER.fullmatch(cell) for cell in column)


def aligned(rows: Sequence[Sequence[str]], numeric: Sequence[bool]) -> Iterator[list[str]]:
    """Pad cells to the width of their columns: one line per row, never cut.

    This does without rich, whose import and rendering would be a third of the CPU time of
    `status`, which scripts call often.
    """
    cells = [[" ".join(cell.splitlines()) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        columns = zip(row, widths, numeric, strict=True)
        yield [c.rjust(width) if number else c.ljust(width) for c, width, number in columns]


def coloured(text: str, colour: str | None) -> str:
    """Colour a text for a terminal, unless $NO_COLOR is set (no-color.org)."""
    if colour is None or os.environ.get("NO_COLOR"):
        return text
    return click.style(text, fg=colour)


def _fitted_lines(
    headers: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[bool]
) -> list[str]:
    """Format rows for people: wrapped to the width of their terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=None, pad_edge=False, show_edge=False, padding=(0, 2, 0, 0))
    for header, right in zip(headers, numeric, strict=True):
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


def paragraph(text: str, first: str, *, hang: int, width: int = LINE_WIDTH) -> list[str]:
    """Wrap a text to `width` columns: it begins with `first`, and further lines are indented."""
    return textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=" " * hang,
        break_long_words=False,
        break_on_hyphens=False,
    )


def marked(state: str, text: str) -> list[str]:
    """Wrap a finding behind the mark of its state: `works`, `limited`, `fails`, `unknown`."""
    return paragraph(text, f"{_MARKS[state]:6}", hang=6)


def say(text: str = "") -> None:
    """Print a message for people, on stderr."""
    click.echo(text, err=True)


def warn(text: str) -> None:
    """Print a warning on stderr: wrapped on a terminal, one line elsewhere."""
    first = "warning: "
    lines = paragraph(text, first, hang=len(first)) if sys.stderr.isatty() else [first + text]
    say("\n".join(lines))


def or_dash(value: object | None) -> str:
    """Format a cell: `-` for unknown values, never empty."""
    return "-" if value is None or value == "" else str(value)
