"""Parse YAML text into plain values with their positions, and write documents with their origins.

Belongs here: building the tree, nesting limits, duplicate keys, aliases, and YAML that loads again
to an equal document. Does not belong here: reading files (`loader`), any field. Nothing in the text
is evaluated: tags are refused and aliases are copied under a limit. The tree is built from the
parser's events, so that parsing of hostile text stops at the limit, before it fills the memory.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from hpctrain.base.errors import Problem

if TYPE_CHECKING:
    from hpctrain.spec.loader import DocumentT, Loaded


# -- Read the events of a YAML text with ruamel.yaml, and explain its syntax errors -------------
# Errors are classified by their class and position, never by the wording of the library.


MAX_DEPTH = 24
MAX_VALUES = 5_000
_CLOSED_QUOTE = re.compile(r"""'(?:[^']|'')*'(?!')|"(?:\\.|[^"\\])*\"""", re.DOTALL)


@dataclass(frozen=True)
class SourcePlace:
    """Position of a key or value; line and column are 1-based, None for the command line."""

    file: str
    line: int | None = None
    column: int | None = None

    def problem(self, message: str, hint: str | None = None) -> Problem:
        return Problem(message, self.file, self.line, self.column, hint)


class StopReading(Exception):
    """The problem that ends the reading of a file."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def too_large_problem(place: SourcePlace) -> Problem:
    return place.problem(
        f"too deep or too large: at most {MAX_DEPTH} levels and {MAX_VALUES} values are read",
        "an alias counts again each time it is used",
    )


def yaml_events(text: str, file: str) -> Iterator[Any]:
    """Parse `text` into the library's events. Raises StopReading for its errors."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    open_collections: list[Any] = []
    try:
        # "safe" names the reader that keeps no comments; nothing is constructed from the events
        for event in YAML(typ="safe", pure=True).parse(text):
            if type(event).__name__ in ("SequenceStartEvent", "MappingStartEvent"):
                open_collections.append(event)
            elif type(event).__name__ in ("SequenceEndEvent", "MappingEndEvent"):
                open_collections.pop()
            yield event
    except MarkedYAMLError as error:
        innermost = open_collections[-1] if open_collections else None
        raise StopReading(_syntax_problem(error, text, file, innermost)) from None
    except YAMLError:
        for number, line in enumerate(text.split("\n"), 1):
            for column, char in enumerate(line, 1):
                if not char.isprintable() and char not in "\t\r\x85\u2028\u2029\ufeff":
                    message = f"character U+{ord(char):04X} is not allowed in YAML"
                    place = SourcePlace(file, number, column)
                    raise StopReading(place.problem(message, "remove it")) from None
        raise StopReading(SourcePlace(file).problem("not a YAML text")) from None
    except RecursionError:  # cannot happen below MAX_DEPTH; here in case the library changes
        raise StopReading(too_large_problem(SourcePlace(file))) from None


def _syntax_problem(error: Any, text: str, file: str, innermost: Any) -> Problem:
    """Explain an error by its class, and by the characters at its two positions.

    `innermost` is the event that opened the collection in which the parser stopped.
    """
    from ruamel.yaml.parser import ParserError

    found, opened = error.problem_mark, error.context_mark
    if isinstance(error, ParserError):
        # the parser names the `[` or `{` of a flow collection, or the first key of a block
        inside = innermost is not None and opened is not None
        inside = inside and opened.index == innermost.end_mark.index - bool(innermost.flow_style)
        if inside and innermost.flow_style and text[opened.index] == "[":
            message = "a list that is opened with `[` is not closed"
            return _at(opened, file).problem(message, "add `]` or a comma")
        if inside and innermost.flow_style:
            message = "a mapping opened with `{` is not closed"
            return _at(opened, file).problem(message, "add `}` or a comma")
        if inside:
            hint = "keys of one section start in the same column; list items start with `- `"
            message = "this line does not line up with the lines above"
            return _at(found, file).problem(message, hint)
    elif found is not None:
        char, quote = text[found.index : found.index + 1], None
        if opened is not None and text[opened.index : opened.index + 1] in ("'", '"'):
            quote = "closed" if _CLOSED_QUOTE.match(text, opened.index) else "open"
        if char == "\t" and opened is None:
            return _at(found, file).problem("a tab cannot be used here", "indent with spaces")
        if char == ":" and opened is None:
            hint = "check the indentation of this line and the one above; quote text that "
            return _at(found, file).problem("a `:` is not allowed here", hint + "contains `: `")
        if opened is None and char not in ("-", "?"):
            message = "a value cannot start with this character"
            return _at(found, file).problem(message, "put it in quotes")
        if quote is not None and text[opened.index] == '"' and text[found.index - 1] == "\\":
            hint = "use single quotes for a plain `\\`"
            return _at(found, file).problem("unknown escape after `\\`", hint)
        if quote == "open" and found.index >= len(text):
            message = "a quote that is opened here is never closed"
            return _at(opened, file).problem(message, "close it")
        plain = opened is not None and text[opened.index] not in "&*!%|>'\"" and char != ":"
        if opened is not None and (plain or quote == "closed" or opened.line < found.line):
            return _at(opened, file).problem("a key without `:`", "write `key: value`")
    words = shorten(str(error.problem).splitlines()[0])
    return _at(found or opened, file).problem(f"not valid YAML: {words}")


def _at(mark: Any, file: str) -> SourcePlace:
    return SourcePlace(file) if mark is None else SourcePlace(file, mark.line + 1, mark.column + 1)


# -- Resolve unquoted YAML scalars: text, number, boolean or null (YAML 1.2.2, 10.3.2) ----------


_NULL = re.compile(r"null|Null|NULL|~|")
_TRUE = re.compile(r"true|True|TRUE")
_FALSE = re.compile(r"false|False|FALSE")
_INTEGER = re.compile(r"[-+]?[0-9]+")
_OCTAL_OR_HEX = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9]+")
_MAX_DIGITS = 30  # no field needs more, and int() of a very long text takes quadratic time

Scalar = str | int | float | bool | None


class AmbiguousScalarError(ValueError):
    """A refused unquoted scalar; `hint` gives the unambiguous spelling."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def plain_scalar(text: str) -> Scalar:
    """Resolve an unquoted scalar. Raises AmbiguousScalarError for `012`, `.nan` and `1e999`."""
    if _NULL.fullmatch(text):
        return None
    if _TRUE.fullmatch(text):
        return True
    if _FALSE.fullmatch(text):
        return False
    if _INTEGER.fullmatch(text) or _OCTAL_OR_HEX.fullmatch(text):
        if len(text) > _MAX_DIGITS:
            message = f"a number of {len(text)} digits is too long"
            raise AmbiguousScalarError(message, "quote it if it is text")
        if _LEADING_ZERO.fullmatch(text):
            bare = text.lstrip("+-").lstrip("0") or "0"
            raise AmbiguousScalarError(
                f"`{text}` starts with a zero, which some YAML readers take as octal",
                f'write `{bare}` for the number, or `"{text}"` for the text',
            )
        return int(text, 0)
    if _NOT_FINITE.fullmatch(text):
        raise AmbiguousScalarError(f"`{text}` is not a usable number", "write a finite number")
    if not _FLOAT.fullmatch(text):
        return text
    value = float(text)
    if math.isinf(value):
        raise AmbiguousScalarError(f"`{shorten(text)}` is too large", "write a finite number")
    return value


def shorten(text: str) -> str:
    """Prepare text for a message: escape control characters, truncate to 60 characters."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return shown if len(shown) <= 60 else shown[:57] + "..."


# ----------------------------------------------------------------------------------------------


Path = tuple[str | int, ...]
_STRING_TAG = "tag:yaml.org,2002:str"


@dataclass(frozen=True)
class Node:
    """One value of the text: a scalar, a tuple of nodes, or a tuple of (key, value) pairs."""

    kind: str
    content: Any
    place: SourcePlace
    problem: Problem | None = None


@dataclass
class Parsed:
    """The document as plain values. `broken` are paths whose problem is already reported.

    `names`: how a value is called where it stands, if that is no field of the document.
    """

    data: Any = None
    keys: dict[Path, SourcePlace] = field(default_factory=dict)
    values: dict[Path, SourcePlace] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    broken: set[Path] = field(default_factory=set)
    names: dict[Path, str] = field(default_factory=dict)

    def nearest_place(self, path: Path, *, key: bool = False) -> SourcePlace | None:
        """Find the place of the value (or key) at `path`, or of its closest parent that has one."""
        for end in range(len(path), -1, -1):
            here = path[:end]
            place = self.keys.get(here) if key or end < len(path) else self.values.get(here)
            place = place or self.values.get(here)
            if place is not None:
                return place
        return None


def dotted(path: Path) -> str:
    """Format a path as messages and `--set` have it: `slurm.partitions[0].name`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{shorten(part)}" if text else shorten(part)
    return text


def parse_yaml(text: str, file: str) -> Parsed:
    """Parse one document. Never raises for bad text: see `Parsed.problems`."""
    parsed = Parsed()
    try:
        parsed.data = _Flattener(parsed).value(_composed(text, file), ())
    except StopReading as stop:
        parsed.problems.append(stop.problem)
    return parsed


@lru_cache(maxsize=64)  # each point of a sweep, for one, reads the same profile several times
def _composed(text: str, file: str) -> Node:
    """Build the nodes of a text; one command reads its profile several times.

    Raises StopReading for what cannot be read.
    """
    return _Composer(text, file).document()


class _Composer:
    """Builds nodes from the parser's events."""

    def __init__(self, text: str, file: str) -> None:
        self.file = file
        self.anchors: dict[str, Node] = {}
        self.seen = 0
        self.events = yaml_events(text, file)

    def document(self) -> Node:
        names = (type(event).__name__ for event in self.events)
        next(names)  # start of the stream
        if next(names) == "StreamEndEvent":
            raise StopReading(SourcePlace(self.file, 1, 1).problem("the file is empty"))
        root = self._node(next(self.events), 0)
        next(names)  # end of the document
        extra = next(self.events)
        if type(extra).__name__ == "DocumentStartEvent":
            raise StopReading(
                self._place(extra).problem(
                    "a second YAML document begins here", "keep one document per file"
                )
            )
        return root

    def _place(self, event: Any) -> SourcePlace:
        return SourcePlace(self.file, event.start_mark.line + 1, event.start_mark.column + 1)

    def _node(self, event: Any, depth: int) -> Node:
        place = self._place(event)
        self.seen += 1
        if depth > MAX_DEPTH or self.seen > MAX_VALUES:
            raise StopReading(too_large_problem(place))
        kind = type(event).__name__
        if kind == "AliasEvent":
            name = str(event.anchor)
            if name in self.anchors:
                return self.anchors[name]
            # an anchor exists once its value is complete, so a value can never contain itself
            problem = place.problem(
                f"`*{shorten(name)}` refers to nothing that is complete at this point",
                f"define it first with `&{shorten(name)}`; a value cannot contain itself",
            )
            return Node("scalar", None, place, problem)
        if kind == "SequenceStartEvent":
            items = []
            while type(item := next(self.events)).__name__ != "SequenceEndEvent":
                items.append(self._node(item, depth + 1))
            node = Node("list", tuple(items), place)
        elif kind == "MappingStartEvent":
            pairs = []
            while type(key_event := next(self.events)).__name__ != "MappingEndEvent":
                key = self._node(key_event, depth + 1)
                pairs.append((key, self._node(next(self.events), depth + 1)))
            node = Node("mapping", tuple(pairs), place)
        elif event.style is not None or event.ctag is not None:
            node = Node("scalar", event.value, place)
        else:
            try:
                node = Node("scalar", plain_scalar(event.value), place)
            except AmbiguousScalarError as error:
                node = Node("scalar", None, place, place.problem(str(error), error.hint))
        tag = None if event.ctag is None else str(event.ctag)
        if tag is not None and not (tag == _STRING_TAG and node.kind == "scalar"):
            shown = shorten(tag.replace("tag:yaml.org,2002:", "!!"))
            message = f"YAML tags such as `{shown}` are not supported"
            node = replace(node, problem=place.problem(message, "remove the tag"))
        if event.anchor is not None:
            self.anchors[str(event.anchor)] = node
        return node


class _Flattener:
    """Copies nodes to plain values and records their places; every use of an alias counts."""

    def __init__(self, parsed: Parsed) -> None:
        self.parsed = parsed
        self.seen = 0

    def value(self, node: Node, path: Path) -> Any:
        self.seen += 1
        if self.seen > MAX_VALUES or len(path) > MAX_DEPTH:
            raise StopReading(too_large_problem(node.place))
        # The parser places an empty value at the next key, so its own key stands for it.
        empty = node.kind == "scalar" and node.content is None and node.problem is None
        self.parsed.values[path] = self.parsed.keys.get(path, node.place) if empty else node.place
        if node.problem is not None:
            self.parsed.broken.add(path)
            self._report(replace(node.problem, message=_prefixed(path, node.problem.message)))
            return None
        if node.kind == "scalar":
            return node.content
        if node.kind == "list":
            return [self.value(item, (*path, index)) for index, item in enumerate(node.content)]
        result: dict[str, Any] = {}
        lines: dict[str, int | None] = {}
        for key, value in node.content:
            name = self._key(key, path)
            if name is None:
                continue
            if name in result:
                message = _prefixed((*path, name), f"given twice, first on line {lines[name]}")
                self._report(key.place.problem(message, "keep one of the two"))
                continue
            lines[name] = key.place.line
            self.parsed.keys[(*path, name)] = key.place
            result[name] = self.value(value, (*path, name))
        return result

    def _report(self, problem: Problem) -> None:
        # an alias repeats the problems of its anchor
        known = {(other.line, other.column) for other in self.parsed.problems}
        if (problem.line, problem.column) not in known:
            self.parsed.problems.append(problem)

    def _key(self, key: Node, path: Path) -> str | None:
        """Return the name of a key, or report why it cannot be one."""
        if key.kind == "scalar" and key.problem is None and isinstance(key.content, str):
            if key.content != "<<":
                return key.content
            message = "merge keys (`<<`) are not part of YAML 1.2"
            self._report(key.place.problem(message, "write the keys out, or alias a whole value"))
            return None
        shown = f"`{shown_value(key.content)}`" if key.kind == "scalar" else f"a {key.kind}"
        message = _prefixed(path, f"keys must be text, got {shown}")
        self._report(key.place.problem(message, "put the key in quotes if it is a name"))
        return None


def shown_value(value: Scalar) -> str:
    """Format a scalar as YAML writes it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    return shorten(str(value))


def _prefixed(path: Path, message: str) -> str:
    return f"`{dotted(path)}`: {message}" if path else message


# -- Write a document in full, each value with its origin as a comment --------------------------


# Text that needs no quotes under YAML 1.1 and 1.2: no leading digit, no special value.
_PLAIN = re.compile(r"[A-Za-z_./][A-Za-z0-9_./-]*(?: [A-Za-z0-9_./-]+)*")
_SPECIAL = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}


def write_resolved(loaded: Loaded[DocumentT], *, defaults: bool = True) -> str:
    """Write all values of the document, each with `# FILE:LINE`, `# --set` or `# default`."""
    values = loaded.document.model_dump(mode="json", by_alias=True, exclude_defaults=not defaults)
    lines = [*_mapping(values, (), loaded), ""]
    return "\n".join(lines)


def _mapping(values: dict[str, Any], path: Path, loaded: Loaded[DocumentT]) -> Iterator[str]:
    for key, value in values.items():
        yield from _entry(f"{scalar_text(key)}:", value, (*path, key), loaded)


def _entry(head: str, value: Any, path: Path, loaded: Loaded[DocumentT]) -> Iterator[str]:
    if not isinstance(value, dict | list) or not value:
        origin = loaded.origin.get(dotted(path), "default")
        yield f"{head} {scalar_text(value)}  # {origin}"
        return
    if isinstance(value, dict):
        lines = [f"  {line}" for line in _mapping(value, path, loaded)]
    else:
        items = (_entry("-", item, (*path, index), loaded) for index, item in enumerate(value))
        lines = [f"  {line}" for entry in items for line in entry]
    if head == "-":  # the first key of an item stands behind the dash
        yield f"- {lines[0][2:]}"
        yield from lines[1:]
    else:
        yield head
        yield from lines


def scalar_text(value: Any) -> str:
    """Write one value so that YAML 1.1 and 1.2 read the same."""
    if isinstance(value, float):
        mantissa, exponent, power = repr(value).partition("e")
        return (mantissa if "." in mantissa else f"{mantissa}.0") + exponent + power
    if not isinstance(value, str):
        return json.dumps(value)
    if _PLAIN.fullmatch(value) and value.lower() not in _SPECIAL and not value.startswith("."):
        return value
    quoted = json.dumps(value, ensure_ascii=False)
    return "".join(
        char if char.isprintable() and char != "\ufeff" else f"\\U{ord(char):08X}"
        for char in quoted
    )
