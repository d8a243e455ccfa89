"""Write a profile as YAML in which every value has a comment that says where it comes from.

Belongs here: the form. Does not belong here: which values (see `detected`).
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hpctrain.base.printable_text import printable_line
from hpctrain.spec.open_questions import ASK

_WIDTH = 100
# Text that needs no quotes: words, quantities with a unit, and times as `1-00:00:00`.
_PLAIN = re.compile(
    r"[A-Za-z_/][A-Za-z0-9_./&-]*(?: [A-Za-z0-9_./&-]+)*|--?[A-Za-z][A-Za-z0-9_./=-]*"
    r"|\d+(?:\.\d+)?(?:s|[KMGT]iB|[MGT][Bb]/s|GiB)|(?:\d+-)?\d\d:\d\d:\d\d"
)
_SPECIAL = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}

Scalar = str | int | float | bool | None
# A tuple is a list in one line, an empty mapping says that there is nothing.
Value = Scalar | tuple[str, ...] | Mapping[str, str]


@dataclass(frozen=True)
class Stated:
    """A value and where it comes from: the command that printed it, or why it is a guess.

    Or it is a question (`is_ask`): then the value does no harm, and the user has a better one.
    """

    value: Value
    source: str
    is_guess: bool = False
    is_ask: bool = False

    @property
    def comment(self) -> str:
        text = printable_line(self.source)
        if self.is_ask:
            return f"{ASK} {text}"
        if self.is_guess:
            return f"guess: {text}; check"
        return f"from: {text}" if text else ""


Tree = Stated | Mapping[str, "Tree"] | Sequence["Tree"]


def guess(value: Value, reason: str) -> Stated:
    """State a value that no command has printed, and what it is guessed from."""
    return Stated(value, reason, is_guess=True)


def ask(value: Value, question: str) -> Stated:
    """State a harmless value in place of one that only the user knows."""
    return Stated(value, question, is_ask=True)


def profile_text(tree: Mapping[str, Tree], head: Sequence[str]) -> str:
    """Write the document: `head` as comments, then the sections with a blank line between them."""
    lines = [line for words in head for line in _comment(words)]
    was_section = False
    for key, value in tree.items():
        is_section = not isinstance(value, Stated)
        if is_section or was_section:
            lines.append("")
        lines += _entry(f"{key}:", value, "")
        was_section = is_section
    return "\n".join(lines) + "\n"


def stated_values(tree: Tree, path: str = "") -> Iterator[tuple[str, Stated]]:
    """List all values with their dotted paths."""
    if isinstance(tree, Stated):
        yield path, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from stated_values(value, f"{path}.{key}" if path else key)
    else:
        for index, value in enumerate(tree):
            yield from stated_values(value, f"{path}[{index}]")


def _entry(head: str, value: Tree, indent: str) -> list[str]:
    if isinstance(value, Stated):
        text = f"{indent}{head} {_written(value.value)}"
        if isinstance(value.value, tuple) and len(text) > _WIDTH:
            return [*_comment(value.comment, indent), *_flow(f"{indent}{head} [", value.value)]
        return _line(text, value.comment, indent)
    below = indent + "  "
    if isinstance(value, Mapping):
        inner = [line for key, one in value.items() for line in _entry(f"{key}:", one, below)]
    else:
        inner = [line for one in value for line in _item(one, below)]
    return [f"{indent}{head}", *inner]


def _flow(head: str, words: Sequence[str]) -> list[str]:
    """Write a list that is too long for one line over several ones."""
    lines, margin = [head], " " * (len(head) - len(head.lstrip()) + 4)
    for number, word in enumerate(words):
        text = f"{_written(word)}{',' if number + 1 < len(words) else ']'}"
        if len(lines[-1]) + len(text) < _WIDTH or lines[-1] == margin:
            lines[-1] += text if lines[-1].endswith(("[", margin)) else f" {text}"
        else:
            lines.append(margin + text)
    return lines


def _item(value: Tree, indent: str) -> list[str]:
    """Write an entry of a list: its first key stands behind the dash."""
    if isinstance(value, Stated):
        return _line(f"{indent}- {_written(value.value)}", value.comment, indent)
    assert isinstance(value, Mapping)
    lines = [line for key, one in value.items() for line in _entry(f"{key}:", one, indent + "  ")]
    first = next(i for i, line in enumerate(lines) if not line.lstrip().startswith("#"))
    lines[first] = f"{indent}- {lines[first].lstrip()}"
    return lines


def _line(text: str, comment: str, indent: str) -> list[str]:
    """Put the comment behind the value, or above it where the line would be too long."""
    whole = f"{text}  # {comment}" if comment else text
    return [whole] if len(whole) <= _WIDTH else [*_comment(comment, indent), text]


def _comment(words: str, indent: str = "") -> list[str]:
    mark = f"{indent}# "
    return textwrap.wrap(
        words,
        _WIDTH,
        initial_indent=mark,
        subsequent_indent=mark + "  " * words.startswith("- "),
        break_long_words=False,
        break_on_hyphens=False,
    ) or [mark.rstrip()]


def _written(value: Value) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(_written(one) for one in value)}]"
    if not isinstance(value, str):
        return json.dumps(value)
    if _PLAIN.fullmatch(value) and value.lower() not in _SPECIAL:
        return value
    return json.dumps(value)
