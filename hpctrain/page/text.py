"""Lines of text: paragraphs behind labels, columns like squeue's that can be grepped. Pure.

Belongs here: wrapping and aligning. Does not belong here: printing, terminals and their colours
(`hpctrain.page.output`).
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from hpctrain.base.printable_text import printable_line

LINE_WIDTH = 80
_GAP = "  "
_MARKS = {"works": "ok", "limited": "note", "fails": "FAILS", "unknown": "?"}
_NUMBER = re.compile(r"[\d,./]+(-[\d,./]+)?|-")  # `1,234`, `0.5`, `3/10`, `52-63`
_TIE = "\N{NO-BREAK SPACE}"  # textwrap breaks at ASCII white space only
# A number stays on a line with its unit or currency, the name of an axis with its size.
_BEFORE_UNIT = re.compile(
    r"(?<=\d) (?=(?:d|h|min|s|ms|[KMGT]iB|B|[A-Z]{3}|GPUs?|x|nodes?|steps)\b|%)|(?<=·) "
)
_BEHIND_AXIS = re.compile(r"\b(tp|pp|vpp|cp|ep|dp|micro|recompute|stage|zero|order) (?=\S)")


# A name, and what is known: one text or several below each other; without any it is left out.
Named = tuple[str, str | Iterable[str] | None]


class Whole(str):
    """A line that people copy or search for, such as a command: `facts` does not wrap it."""


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


def grid(rows: Sequence[Sequence[str]], numeric: Sequence[bool] | None = None) -> list[str]:
    """Format rows without headings, right-aligned where `numeric`."""
    numeric = numeric or [False] * max(map(len, rows), default=0)
    return [_GAP.join(line).rstrip() for line in aligned(rows, numeric)]


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
    return grid([headers, *rows], numeric)


def used_widths(
    names: Sequence[str],
    rows: Sequence[Mapping[str, str]],
    *,
    always: Sequence[str],
    measure: Callable[[str], int] = len,
) -> dict[str, int]:
    """Return the widths of the columns in which something stands, and of those shown `always`."""
    return {
        name: max(map(measure, (name, *(row[name] for row in rows))))
        for name in names
        if name in always or any(row[name] not in ("-", "0") for row in rows)
    }


def fitting(
    widths: Mapping[str, int], drop_order: Sequence[str], width: int, gap: str = _GAP
) -> list[str]:
    """Drop columns in this order until the others fit on a line of a terminal."""
    shown = list(widths)
    for name in drop_order:
        if sum(widths[one] + len(gap) for one in shown) - len(gap) <= width:
            break
        if name in shown:
            shown.remove(name)
    return shown


def shortened(text: str, longest: int) -> str:
    """Shorten a name to a column."""
    shown = printable_line(text)
    return shown if len(shown) <= longest else f"{shown[: longest - 1]}\N{HORIZONTAL ELLIPSIS}"


def paragraph(
    text: str, first: str = "", *, hang: int | None = None, width: int = LINE_WIDTH
) -> list[str]:
    """Wrap a text to `width` columns: it begins with `first`, and further lines are indented.

    `hang`: their indentation; by default they stand below the text.
    """
    tied = _BEHIND_AXIS.sub(rf"\1{_TIE}", _BEFORE_UNIT.sub(_TIE, text))
    lines = textwrap.wrap(
        tied,
        width,
        initial_indent=first,
        subsequent_indent=" " * (len(first) if hang is None else hang),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(_TIE, " ") for line in lines]


def facts(*named: Named, margin: int = 10, width: int = LINE_WIDTH) -> list[str]:
    """Format names with what is known, wrapped beside a margin.

    `margin`: the columns of the longest name and the space behind it.
    """
    lines = []
    for name, said in named:
        label = f"{f'{name} ':<{margin}}"
        for text in (said,) if isinstance(said, str) else said or ():
            whole = isinstance(text, Whole)
            lines += [label + text] if whole else paragraph(text, label, width=width)
            label = " " * margin
    return lines


def marked(state: str, text: str) -> list[str]:
    """Wrap a finding behind the mark of its state: `works`, `limited`, `fails`, `unknown`."""
    return paragraph(text, f"{_MARKS[state]:6}")
