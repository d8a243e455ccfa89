"""Prints tables and JSON, and formats paragraphs.

Tables are plain columns like squeue's, so that they can be grepped; in a pipe they are never cut.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Sequence

import click
from pydantic import BaseModel

SCHEMA_VERSION = 1
_WIDTH = 80
_IN_NUMBERS = str.maketrans("", "", ",./")  # `1,234`, `0.5` and `3/10` are numbers


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
    numeric = [
        all(row[column] == "-" or row[column].translate(_IN_NUMBERS).isdigit() for row in rows)
        for column in range(len(headers))
    ]
    lines = _fitted_lines if sys.stdout.isatty() else _plain_lines
    for line in lines(headers, rows, numeric):
        click.echo(line.rstrip())


def _plain_lines(
    headers: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[bool]
) -> Iterator[str]:
    """Format rows for pipes: one line per row, never cut.

    This does without rich, whose import and rendering would be a third of the CPU time of
    `status`, which scripts call often.
    """
    cells = [[" ".join(cell.splitlines()) for cell in row] for row in (headers, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        columns = zip(row, widths, numeric, strict=True)
        yield "  ".join(
            c.rjust(width) if number else c.ljust(width) for c, width, number in columns
        )


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


def paragraph(text: str, first: str, *, hang: int) -> list[str]:
    """Wrap a text to 80 columns: it begins with `first`, and further lines are indented."""
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=" " * hang,
        break_long_words=False,
        break_on_hyphens=False,
    )


def say(text: str = "") -> None:
    """Print a message for people, on stderr."""
    click.echo(text, err=True)


def or_dash(value: object | None) -> str:
    """Format a cell: `-` for unknown values, never empty."""
    return "-" if value is None or value == "" else str(value)
