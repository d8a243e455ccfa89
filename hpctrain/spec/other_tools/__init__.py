"""What configurations of other tools say: a table for each, and reading their names and lines.

`tools.yaml` has the names by which a file is recognised; `NAME.yaml` which name there is which
field of a spec, what hpctrain leaves out on purpose, and what it has no field for. Belongs here:
the form of these tables, reading TOML, JSON, YAML and command lines into named values. Does not
belong here: making a spec of them (`hpctrain.adopt.configuration`).
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.spec.document import Document
from hpctrain.spec.positions import parse_yaml

DIRECTORY = Path(__file__).resolve().parent
Form = Literal["arguments", "json", "names", "script", "toml", "yaml"]


class Tool(Document):
    """A tool, and names in its configurations of which `least` are in each.

    `hint`: what to do with one of which no spec can be made.
    """

    name: str
    title: str
    forms: tuple[Form, ...]
    signs: tuple[str, ...]
    least: int = 3
    hint: str | None = None


class Tools(Document):
    """`tools.yaml`."""

    tools: tuple[Tool, ...]


class NameRow(Document):
    """What a name means. In a file it may be the field alone.

    `values`: theirs -> ours. `times`, `per`: names whose values multiply or divide it. `also`:
    fields that it sets besides, `without`: fields that it replaces. `whole`: other than whole
    numbers above 0 say nothing. `same`: values that change nothing. Without `field` it says nothing
    to a spec, for `reason`.
    """

    field: str | None
    values: dict[str, Any] = Field({})
    times: tuple[str, ...] = ()
    per: tuple[str, ...] = ()
    also: dict[str, Any] = Field({})
    without: tuple[str, ...] = ()
    reader: str | None = None
    whole: bool = False
    same: tuple[Any, ...] = ()
    reason: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _short(cls, data: object) -> object:
        if not isinstance(data, dict):
            return {"field": data}
        # behind this validator a list is no tuple any more, as it is in JSON
        return {name: tuple(one) if isinstance(one, list) else one for name, one in data.items()}


class ToolTable(Document):
    """The names of one tool. In `dropped` and `no_field` a reason has the names, or patterns."""

    engine: str
    like: str | None = None
    sections: tuple[str, ...] = ()
    defaults: dict[str, Any] = Field({})
    rows: dict[str, NameRow]
    dropped: dict[str, tuple[str, ...]] = Field({})
    no_field: dict[str, tuple[str, ...]] = Field({})
    same: dict[str, tuple[Any, ...]] = Field({})

    def key(self, name: str) -> str:
        """Return the name as the table has it: without its section, where that is left out."""
        if name in self.rows or not self.sections:
            return name
        section, _, rest = name.partition(".")
        return (rest if section in self.sections else name).replace("_", "-")

    def reason(self, name: str, kind: Literal["dropped", "no_field"]) -> str | None:
        """Return why a name is left out, or has no field; None if that is not known."""
        groups: Mapping[str, tuple[str, ...]] = getattr(self, kind)
        found = (
            (len(pattern), why)
            for why, patterns in groups.items()
            for pattern in patterns
            if fnmatch(name, pattern)
        )
        return max(found, default=(0, None))[1]


@cache
def tools() -> tuple[Tool, ...]:
    """List the tools that are recognised."""
    from hpctrain.spec.files import load_packaged

    return load_packaged(Tools, DIRECTORY / "tools.yaml").tools


@cache
def table_of(name: str) -> ToolTable | None:
    """Read the table of a tool, with that of the tool it is like; None if it has none."""
    from hpctrain.spec.files import load_packaged

    file = DIRECTORY / f"{name}.yaml"
    if not file.is_file():
        return None
    own = load_packaged(ToolTable, file)
    if own.like is None:
        return own
    base = table_of(own.like)
    assert base is not None, own.like
    joined = {
        "rows": {**base.rows, **own.rows},
        "dropped": _joined(base.dropped, own.dropped),
        "no_field": _joined(base.no_field, own.no_field),
    }
    return own.model_copy(update=joined)


def _joined(
    base: Mapping[str, tuple[str, ...]], own: Mapping[str, tuple[str, ...]]
) -> dict[str, tuple[str, ...]]:
    return {why: (*base.get(why, ()), *own.get(why, ())) for why in {**base, **own}}


# -- Reading ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NamedValue:
    """A value of a configuration; `name` is dotted, without dashes in front."""

    name: str
    value: Any
    line: int


@dataclass(frozen=True)
class Configuration:
    """The file of a tool, and what is in it."""

    tool: Tool
    values: tuple[NamedValue, ...]


def recognised(text: str, file: str) -> Configuration | None:
    """Tell of which tool a file is, and read it; None for any other file."""
    try:
        form, values = named_values(text, file)
    except InvalidInputError:
        return None
    names = {one.name for one in values}
    names |= {name.rpartition(".")[0] for name in names}
    best: tuple[float, Tool] | None = None
    for tool in tools():
        if form not in tool.forms:
            continue
        known = {sign for sign in tool.signs if sign in names}
        if form == "arguments" and "#SBATCH" in tool.signs and "#SBATCH" in text:
            known.add("#SBATCH")
        if len(known) >= tool.least and (best is None or len(known) > best[0]):
            best = (len(known), tool)
    return None if best is None else Configuration(best[1], values)


def named_values(text: str, file: str) -> tuple[Form, tuple[NamedValue, ...]]:
    """Read a configuration by its form. Raises InvalidInputError where it has none."""
    suffix = Path(file).suffix
    section = re.search(r"^\[[\w.]+\]\s*(#.*)?$", text, re.M)
    has_section = section is not None and re.search(r"^\w+ *= ", text, re.M) is not None
    if suffix == ".toml" or (suffix not in (".yaml", ".yml", ".json") and has_section):
        try:
            data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise InvalidInputError([Problem(f"not TOML: {error}", file)]) from None
        return "toml", tuple(_in_order(data, text, r'^[ \t]*(?:[\w."-]+\.)?"?{}"?[ \t]*='))
    if text.lstrip().startswith("{"):
        try:
            data = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise InvalidInputError([Problem(f"not JSON: {error}", file)]) from None
        return "json", tuple(_in_order(data, text, r'"{}"\s*:'))
    if suffix in (".sh", ".sbatch", ".slurm") or text.startswith("#!"):
        return "arguments", tuple(arguments_in(text))
    parsed = parse_yaml(text, file)
    if isinstance(parsed.data, dict):
        places = {path: place.line or 1 for path, place in parsed.keys.items()}
        found = tuple(_leaves(parsed.data, (), places))
        if any("--" in one.name for one in found):  # Megatron-LM's own tests
            shown = (one for one in found if "--" in one.name)
            return "arguments", tuple(
                NamedValue(_dashed(one.name.rpartition("--")[2]), one.value, one.line)
                for one in shown
            )
        return "yaml", found
    if re.search(r"(?<![\w-])--[a-z]", text):
        return "arguments", tuple(arguments_in(text))
    raise InvalidInputError(parsed.problems or [Problem("no configuration of a tool", file)])


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _leaves(
    value: Any, path: tuple[str | int, ...], places: Mapping[Any, int], line: int = 1
) -> Iterator[NamedValue]:
    """Yield the values of nested mappings; a list of plain values is one."""
    line = places.get(path, line)
    if isinstance(value, dict) and value:
        for key, one in value.items():
            yield from _leaves(one, (*path, key), places, line)
    elif isinstance(value, list) and any(isinstance(one, dict | list) for one in value):
        for index, one in enumerate(value):
            yield from _leaves(one, (*path, index), places, line)
    else:
        yield NamedValue(".".join(part for part in path if isinstance(part, str)), value, line)


def _in_order(data: Any, text: str, pattern: str) -> Iterator[NamedValue]:
    """Yield the values of TOML or JSON; the line of a key is that of its next occurrence."""
    if not isinstance(data, dict):
        return
    at = 0
    for one in _leaves(data, (), {}):
        key = re.escape(one.name.rpartition(".")[2])
        compiled = re.compile(pattern.replace("{}", key), re.M)
        match = compiled.search(text, at) or compiled.search(text)
        if match is not None:
            at = match.end()
        line = text.count("\n", 0, match.end() if match is not None else 0) + 1
        yield NamedValue(one.name, one.value, line)


# -- Arguments of a command, in a script or a list of them ----------------------------------------


_FLAG = re.compile(r"(?<![\w-])--([A-Za-z][\w-]*)(?:=|(?=[\s\"')]|$))")
_ASSIGNED = re.compile(r"^\s*(?:export\s+|local\s+|declare\s+)?([A-Za-z_]\w*)=(?!\()(.*)$")
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_0-9]\w*)(?::?-([^{}]*))?\}|([A-Za-z_0-9]\w*))")
_SUM = re.compile(r"\$\(\(\s*([\d\s*/+()-]+?)\s*\)\)")
_NO_VALUE = re.compile(r"^\$\{?\w*(ARG|OPT|FLAG|EXTRA|PARAM)|\[[@*]\]|\.py$|^python|^--|^}")
_WORD = re.compile(r"""\\?"[^"\\]*\\?"|'[^']*'|[^\s"']+""")


def arguments_in(text: str) -> Iterator[NamedValue]:
    """Find `--name value` in a script, wherever it stands; nothing is run.

    Variables are put in that a line of the script sets; what a decision of the shell chooses is
    there as often as it is written.
    """
    variables: dict[str, str] = {}
    name, begin, words = "", 0, list[str]()
    for number, line in enumerate([*text.splitlines(), ""], 1):
        line = re.sub(r"(^|\s)#.*$", "", line)
        assigned = _ASSIGNED.match(line)
        if assigned is not None and "--" not in assigned[2]:
            value = assigned[2].strip().rstrip("\\;").strip().strip("\"'")
            variables.setdefault(assigned[1], _expanded(value, variables))
        rest = assigned[2] if assigned is not None else line
        at = 0
        for match in (*_FLAG.finditer(rest), None):
            end = match.start() if match is not None else len(rest)
            words += _words(rest[at:end], variables) if name else []
            goes_on = match is None and rest.rstrip().endswith("\\")
            if name and not goes_on:
                value = True if not words else words[0] if len(words) == 1 else words
                yield NamedValue(_dashed(name), value, begin)
            if not goes_on:
                name, words = "", []
            if match is not None:
                name, begin, at = match[1], number, match.end()


def _words(text: str, variables: Mapping[str, str]) -> list[str]:
    """Split what stands behind a name; programs and lists of further arguments are no values."""
    found = (one.strip("\"'\\;,") for one in _WORD.findall(_expanded(text, variables)))
    inside = (one.rstrip(")") if "(" not in one else one for one in found)
    return [
        word
        for one in inside
        for word in one.split()
        if not _NO_VALUE.search(word) and word not in ("\\", "&&", "|", "||", "&", "2>&1", "then")
    ]


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    """Put in variables and sums that are known; others stay as they are written."""
    for _ in range(4):
        before = text
        text = _VARIABLE.sub(
            lambda found: variables.get(found[1] or found[3], (found[2] or found[0]).strip("\"'")),
            text,
        )
        text = _SUM.sub(lambda found: _sum(found[1]), text)
        if text == before:
            break
    return text


def _sum(text: str) -> str:
    """Compute products and sums of whole numbers, from left to right; others stay as they are."""
    parts = re.findall(r"\d+|[*/+-]", text)
    if "(" in text or not parts or not parts[0].isdigit():
        return text
    result = int(parts[0])
    for sign, number in zip(parts[1::2], parts[2::2], strict=False):
        if not number.isdigit() or (sign == "/" and number == "0"):
            return text
        second = int(number)
        result = (
            result * second
            if sign == "*"
            else result // second
            if sign == "/"
            else result + second
            if sign == "+"
            else result - second
        )
    return str(result)
