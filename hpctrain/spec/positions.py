"""Parse YAML text into plain values, with the position of every key and every value.

Belongs here: building the tree, nesting limits, duplicate keys, aliases. Does not belong here:
reading files (`loader`), the YAML library (`syntax`), any field. Nothing in the text is evaluated:
tags are refused and aliases are copied under a limit. The tree is built from the parser's events,
so that parsing of hostile text stops at the limit, before it fills the memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from hpctrain.base.errors import Problem
from hpctrain.spec.scalars import AmbiguousScalarError, Scalar, plain_scalar, shorten
from hpctrain.spec.syntax import (
    MAX_DEPTH,
    MAX_VALUES,
    SourcePlace,
    StopReading,
    too_large_problem,
    yaml_events,
)

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
    """The document as plain values. `broken` are paths whose problem is already reported."""

    data: Any = None
    keys: dict[Path, SourcePlace] = field(default_factory=dict)
    values: dict[Path, SourcePlace] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    broken: set[Path] = field(default_factory=set)

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
