"""The parts that a page is made of: head, tiles, sections, cards, tables. Pure.

Text becomes HTML in templates of jinja2 with autoescape, and nowhere else but in `charts`; only
what they return is Markup. Belongs here: these parts and their templates. Does not belong here:
what they contain, lines of text (`text`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from markupsafe import Markup, escape

from hpctrain.page.charts import nothing
from hpctrain.page.text import columns_text, shortened
from hpctrain.page.words import UNKNOWN

if TYPE_CHECKING:
    from jinja2 import Environment

Record = TypeVar("Record")


@dataclass(frozen=True)
class Fact:
    """A name and a value of the page's head."""

    name: str
    value: str


@dataclass(frozen=True)
class Tile:
    """A figure that is seen first, with what it is compared to."""

    name: str
    value: str
    more: str = ""


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

    def __html__(self) -> Markup:
        return fill("head.html.j2", head=self)


@dataclass(frozen=True)
class Table:
    """Rows of cells below headings, as HTML or as lines of text.

    `columns` maps headings to styles: `number`, `name`, `words` (may be wrapped) or none.
    """

    columns: Mapping[str, str]
    rows: Sequence[Sequence[str]]

    @classmethod
    def of(
        cls,
        records: Sequence[Record],
        columns: Mapping[str, tuple[str, Callable[[Record], str]]],
    ) -> Table:
        """Build one row per record; `columns` maps headings to styles and what writes a cell."""
        styles = {heading: style for heading, (style, _) in columns.items()}
        return cls(styles, [[cell(one) for _, cell in columns.values()] for one in records])

    def or_nothing(self, reason: str) -> Table | Markup:
        """Say in its place why it has no rows."""
        return self if self.rows else nothing(reason)

    def __html__(self) -> Markup:
        """Write a table, which scrolls by itself where it is wider than its card."""
        styles = [*self.columns.values()]
        return fill("table.html.j2", columns=self.columns, styles=styles, rows=self.rows)

    def without(self, *headings: str) -> Table:
        """Drop columns for which lines have no room."""
        kept = {name: style for name, style in self.columns.items() if name not in headings}
        places = [number for number, name in enumerate(self.columns) if name in kept]
        return Table(kept, [[row[number] for number in places] for row in self.rows])

    def text(self, longest_name: int) -> list[str]:
        """Write lines: headings in capitals, numbers on the right, `-` for what is not known."""
        styles = self.columns.values()
        rows = [
            [
                "-"
                if cell == UNKNOWN
                else shortened(cell, longest_name)
                if style == "name"
                else cell
                for cell, style in zip(row, styles, strict=True)
            ]
            for row in self.rows
        ]
        numeric = [style == "number" for style in styles]
        return columns_text([heading.upper() for heading in self.columns], rows, numeric)


@dataclass(frozen=True)
class Card:
    """A box with a title; `wide` over the whole page."""

    title: str
    body: Markup | Table
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
    tiles: Sequence[Tile] | None = None

    def __html__(self) -> Markup:
        figures = None if self.tiles is None else fill("tiles.html.j2", tiles=self.tiles)
        return fill("section.html.j2", section=self, tiles=figures)


@dataclass(frozen=True)
class Chapter:
    """One of several runs with its sections, of which the contents list the name alone."""

    anchor: str
    head: Head
    sections: Sequence[Section]

    @property
    def title(self) -> str:
        return self.head.title

    def __html__(self) -> Markup:
        name = fill("run_name.html.j2", anchor=self.anchor, head=self.head)
        return Markup("\n").join([name, *map(escape, self.sections)])


@dataclass(frozen=True)
class Page:
    """One file of HTML: no script, nothing loaded. The contents list its parts."""

    title: str
    head: Head
    parts: Sequence[Section | Chapter]
    footer: Sequence[str]

    def html(self) -> str:
        return str(fill("page.html.j2", page=self))


@functools.cache
def _templates() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("hpctrain.page", "templates"),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def fill(template: str, **values: object) -> Markup:
    """Fill a template; everything that is not Markup is escaped."""
    return Markup(_templates().get_template(template).render(**values))


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


def styled(style: str, text: str | None) -> str:
    """Write a text in a style, such as `better` or `worse`; nothing without a text."""
    return Markup('<span class="{}">{}</span>').format(style, text) if text else ""


def figure(text: str, style: str, name: str = "") -> Markup:
    """Write one large number in a tone, with its name in small letters if it has one."""
    more = Markup(" <small>{}</small>").format(name) if name else Markup("")
    return Markup('<p class="figure tone {}">{}{}</p>').format(style, text, more)


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
