"""The parts that a page is made of: head, tiles, sections, cards, tables. Pure.

Text becomes HTML in templates of jinja2 with autoescape, and nowhere else but in `charts`; only
what they return is Markup. Belongs here: these parts and their templates. Does not belong here:
what they contain.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from markupsafe import Markup, escape

if TYPE_CHECKING:
    from jinja2 import Environment


@dataclass(frozen=True)
class Fact:
    """A name and a value of the page's head."""

    name: str
    value: str | Markup


@dataclass(frozen=True)
class Tile:
    """A figure that is seen first, with what it is compared to."""

    name: str
    value: str
    more: str | Markup = ""


@dataclass(frozen=True)
class Head:
    """The top of a page; `colour` is the class of the state's dot."""

    title: str
    facts: Sequence[Fact]
    state: str = ""
    colour: str = "neutral"
    lead: str = ""

    @property
    def sentence(self) -> Markup:
        return prose(self.lead)


@dataclass(frozen=True)
class Cell:
    """A cell with its content, in the style of its column."""

    content: str | Markup
    style: str


@dataclass(frozen=True)
class Card:
    """A box with a title; `wide` over the whole page."""

    title: str
    body: Markup
    note: str = ""
    wide: bool = False

    @property
    def style(self) -> str:
        return "card wide" if self.wide else "card"

    @property
    def caption(self) -> Markup:
        return paragraph(self.note) if self.note else Markup("")


@dataclass(frozen=True)
class Section:
    """A part of the page that the contents lead to."""

    anchor: str
    title: str
    cards: Sequence[Card]
    tiles: Markup | None = None


@dataclass(frozen=True)
class Contents:
    """A line of the table of contents."""

    anchor: str
    title: str


@functools.cache
def _templates() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("hpctrain.report", "templates"),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def fill(template: str, **values: object) -> Markup:
    """Fill a template; everything that is not Markup is escaped."""
    return Markup(_templates().get_template(template).render(**values))


def table(columns: Mapping[str, str], rows: Sequence[Sequence[str | Markup]]) -> Markup:
    """Write a table, which scrolls by itself where it is wider than its card.

    `columns` maps headings to styles: `number`, `name`, `words` (may be wrapped) or none.
    """
    styles = list(columns.values())
    cells = [[Cell(cell, style) for cell, style in zip(row, styles, strict=True)] for row in rows]
    heads = [Cell(name, style) for name, style in columns.items()]
    return fill("table.html.j2", heads=heads, rows=cells)


def tiles(content: Sequence[Tile]) -> Markup:
    return fill("tiles.html.j2", tiles=content)


def section(content: Section) -> Markup:
    return fill("section.html.j2", section=content)


def prose(text: str) -> Markup:
    """Write a sentence; what stands between backticks is code."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # one backtick too many: none of them is meant so
        return escape(text)
    return Markup("").join(
        code(part) if number % 2 else escape(part) for number, part in enumerate(parts)
    )


def paragraph(text: str, style: str = "note") -> Markup:
    return Markup('<p class="{}">{}</p>').format(style, prose(text))


def code(text: str) -> Markup:
    return Markup("<code>{}</code>").format(text)


def key(colour: str, text: str) -> Markup:
    """Write a text behind the colour that a chart uses for it."""
    return Markup('<i class="key {}"></i>{}').format(colour, text)


def folded(summary: str, text: str) -> Markup:
    """Write a long text that is opened by a click."""
    return Markup("<details><summary>{}</summary><pre>{}</pre></details>").format(summary, text)


def changed_lines(lines: Sequence[str]) -> Markup:
    """Write the lines of a unified diff: what was added, what was removed, and where."""
    styles = {"+": "added", "-": "removed", "@": "place"}
    spans = (
        Markup('<span class="{}">{}</span>').format(styles.get(line[:1], ""), line)
        for line in lines
    )
    return Markup("<pre>{}</pre>").format(Markup("\n").join(spans))
