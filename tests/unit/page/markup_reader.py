"""Reads a page as a browser would, to assert what is in it.

Whatever stands in a text is none of its elements, and whatever is an element is found.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser


@dataclass
class Element:
    """A start tag with its attributes and the text directly inside."""

    tag: str
    attributes: dict[str, str]
    text: str = ""


@dataclass
class Page(HTMLParser):
    """All elements of a page in their order, and the names of those that were not closed."""

    elements: list[Element] = field(default_factory=list)
    stack: list[Element] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {name: value or "" for name, value in attrs})
        self.elements.append(element)
        if tag not in ("meta", "link", "br"):
            self.stack.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack and self.stack[-1].tag == tag, f"</{tag}> closes {self.stack[-1:]}"
        self.stack.pop()

    def handle_data(self, data: str) -> None:
        if self.stack:
            self.stack[-1].text += data

    def all(self, tag: str, style: str | None = None) -> list[Element]:
        return [
            one
            for one in self.elements
            if one.tag == tag
            and (style is None or style in one.attributes.get("class", "").split())
        ]


def read(markup: str) -> Page:
    """Read markup; fails where elements are not closed in their order."""
    page = Page()
    page.feed(markup)
    page.close()
    assert not page.stack, f"not closed: {page.stack}"
    return page
