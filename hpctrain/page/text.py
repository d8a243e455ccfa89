"""Lines of text: paragraphs behind labels, columns like squeue's that can be grepped. Pure.

Belongs here: wrapping and aligning. Does not belong here: printing, terminals and their colours
(`hpctrain.page.output`).
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence

from hpctrain.base.printable_text import printable_line

LINE_WIDTH = 80
_GAP = "  "
_MARKS = {"works": "ok", "limited": "note", "fails": "FAILS", "unknown": "?"}
_NUMBER = re.compile(r"[\d,./]+(-[\d,./]+)?|-")  # `1,234`, `0.5`, `3/10`, `52-63`


def or_dash(value: object | None) -> str:
    """Format a cell: `-` for unknown values, never empty."""
    return "-" if value is None or value == "" else str(value)


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


def columns_text(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    numeric: Sequence[bool] | bool | None = None,
) -> list[str]:
    """Format columns, right-aligned where `numeric`; by default where every cell is a number."""
    if numeric is None:
        numeric = [is_numeric([row[column] for row in rows]) for column in range(len(headers))]
    elif isinstance(numeric, bool):
        numeric = [numeric] * len(headers)
    return [_GAP.join(line).rstrip() for line in aligned([headers, *rows], numeric)]


def shortened(text: str, longest: int) -> str:
    """Shorten a name to a column."""
    shown = printable_line(text)
    return shown if len(shown) <= longest else f"{shown[: longest - 1]}\N{HORIZONTAL ELLIPSIS}"


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


def facts(*named: tuple[str, str | None], margin: int = 10, width: int = LINE_WIDTH) -> list[str]:
    """Format names with what is known, wrapped beside a margin; without a text a name is left out.

    `margin`: the columns of the longest name and the space behind it.
    """
    return [
        line
        for name, text in named
        for line in paragraph(text or "", f"{name:<{margin}}", hang=margin, width=width)
    ]


def marked(state: str, text: str) -> list[str]:
    """Wrap a finding behind the mark of its state: `works`, `limited`, `fails`, `unknown`."""
    return paragraph(text, f"{_MARKS[state]:6}", hang=6)
