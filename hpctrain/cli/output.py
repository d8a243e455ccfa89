"""How things are shown: tables, JSON, and words for numbers.

Tables are plain columns like squeue's, so that they can be grepped; in a pipe they are never cut.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import click
from pydantic import BaseModel

SCHEMA_VERSION = 1


def json_out(
    kind: str,
    content: BaseModel | Sequence[BaseModel],
    **more: BaseModel | Sequence[BaseModel] | None,
) -> None:
    """Print `{"schema_version": 1, KIND: ...}`; NaN becomes null (RFC 8259 has no NaN).

    `more`: further documents under their own names; those that are None are left out.
    """
    parts = {kind: content, **{name: one for name, one in more.items() if one is not None}}
    body = ", ".join(f'"{name}": {_json(one)}' for name, one in parts.items())
    click.echo(f'{{"schema_version": {SCHEMA_VERSION}, {body}}}')


def _json(content: BaseModel | Sequence[BaseModel]) -> str:
    if isinstance(content, BaseModel):
        return content.model_dump_json(indent=2)
    items = ",\n".join(item.model_dump_json(indent=2) for item in content)
    return f"[{items}]"


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print columns; right-aligned where every cell is a number, cut only on a narrow terminal."""
    numeric = [all(_is_number(row[number]) for row in rows) for number in range(len(headers))]
    lines = _fitted_lines if sys.stdout.isatty() else _plain_lines
    for line in lines(headers, rows, numeric):
        click.echo(line.rstrip())


def _plain_lines(
    headers: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[bool]
) -> Iterator[str]:
    """For pipes: one line per row, as long as it takes. Without rich, whose import and rendering
    would be a third of the CPU time of `status`, which scripts call often.
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
    """For people: wrapped to the width of their terminal."""
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


def _is_number(cell: str) -> bool:
    return cell == "-" or cell.replace(",", "").replace(".", "").replace("/", "").isdigit()


def say(text: str = "") -> None:
    """Words for people, on stderr."""
    click.echo(text, err=True)


def or_dash(value: object | None) -> str:
    """Unknown is `-`, never empty."""
    return "-" if value is None or value == "" else str(value)
