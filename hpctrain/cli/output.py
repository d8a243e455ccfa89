"""How things are shown: tables, JSON, and words for numbers.

Tables are plain columns like squeue's, so that they can be grepped; in a pipe they are never cut.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click
from pydantic import BaseModel

SCHEMA_VERSION = 1


def json_out(kind: str, content: BaseModel | Sequence[BaseModel]) -> None:
    """Print `{"schema_version": 1, KIND: ...}`; NaN becomes null (RFC 8259 has no NaN)."""
    if isinstance(content, BaseModel):
        text = content.model_dump_json(indent=2)
    else:
        items = ",\n".join(item.model_dump_json(indent=2) for item in content)
        text = f"[{items}]"
    click.echo(f'{{"schema_version": {SCHEMA_VERSION}, "{kind}": {text}}}')


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print columns; right-aligned where every cell is a number, cut only on a narrow terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    terminal = sys.stdout.isatty()
    console = Console() if terminal else Console(width=10_000, height=100, no_color=True)
    shown = Table(box=None, pad_edge=False, show_edge=False, padding=(0, 2, 0, 0))
    for number, header in enumerate(headers):
        numeric = all(_is_number(row[number]) for row in rows)
        shown.add_column(Text(header), justify="right" if numeric else "left", no_wrap=not terminal)
    for row in rows:
        shown.add_row(*(Text(cell) for cell in row))
    with console.capture() as text:
        console.print(shown)
    for line in text.get().splitlines():
        click.echo(line.rstrip())  # rich fills every line up to the width of the table


def _is_number(cell: str) -> bool:
    return cell == "-" or cell.replace(",", "").replace(".", "").replace("/", "").isdigit()


def say(text: str = "") -> None:
    """Words for people, on stderr."""
    click.echo(text, err=True)


def or_dash(value: object | None) -> str:
    """Unknown is `-`, never empty."""
    return "-" if value is None or value == "" else str(value)
