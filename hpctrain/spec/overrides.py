"""`--set parallel.tp=8`: one value of a document, given on the command line.

Belongs here: reading PATH=VALUE and putting it into the parsed document before validation.
Does not belong here: whether PATH exists (validation says so, with the same hints as for a file).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from hpctrain.spec.positions import Parsed, Path, parse_yaml
from hpctrain.spec.scalars import shorten
from hpctrain.spec.syntax import Place

OPTION = "--set"
_PATH = re.compile(r"[^\s.\[\]=]+(?:\[\d{1,4}\])*(?:\.[^\s.\[\]=]+(?:\[\d{1,4}\])*)*")
_PART = re.compile(r"[^.\[\]]+|\[\d+\]")


def apply_overrides(parsed: Parsed, overrides: Sequence[str]) -> None:
    """Put each `PATH=VALUE` into the document; what is wrong is added to `parsed.problems`."""
    for text in overrides:
        place = Place(f"{OPTION} {shorten(text)}")
        name, equals, value_text = text.partition("=")
        if not equals or not _PATH.fullmatch(name):
            hint = f"for example {OPTION} parallel.tp=8"
            parsed.problems.append(place.problem("expected PATH=VALUE", hint))
            continue
        value = _value(parsed, value_text, place)
        if value is not parsed:
            _put(parsed, _parts(name), value, place)


def _parts(name: str) -> Path:
    return tuple(int(part[1:-1]) if part.startswith("[") else part for part in _PART.findall(name))


def _value(parsed: Parsed, text: str, place: Place) -> Any:
    """The value, or `parsed` itself as a sign that it was refused."""
    if not text.strip():
        return None
    read = parse_yaml(text, place.file)
    if read.problems:
        problem = read.problems[0]
        parsed.problems.append(place.problem(problem.message, problem.hint))
        return parsed
    if isinstance(read.data, dict) and read.data:  # an empty one takes a section back to defaults
        hint = "set each key on its own, and quote text that contains `: `"
        parsed.problems.append(place.problem("expected one value, got a mapping", hint))
        return parsed
    return read.data


def _put(parsed: Parsed, path: Path, value: Any, place: Place) -> None:
    if not isinstance(parsed.data, dict):
        return  # the file itself is no mapping, which is reported anyway
    here: Any = parsed.data
    for depth, part in enumerate(path):
        last = depth == len(path) - 1
        where = path[: depth + 1]
        if isinstance(here, list) and not (isinstance(part, int) and part < len(here)):
            message = f"`{part}` is no item of a list of {len(here)}"
            parsed.problems.append(place.problem(message, "items are counted from [0]"))
            return
        known = _child(here, part)
        if last or not isinstance(known, dict | list):
            # also turns `parallel: auto` into a mapping when one of its keys is set
            _forget(parsed, where)
            here[part] = value if last else {}
            parsed.keys[where] = parsed.values[where] = place
        here = here[part]


def _child(here: Any, part: str | int) -> Any:
    return here.get(part) if isinstance(here, dict) else here[part]


def _forget(parsed: Parsed, path: Path) -> None:
    """Drop the places of what is replaced, and the complaints about it that are still to come."""
    for places in (parsed.keys, parsed.values):
        for known in [known for known in places if known[: len(path)] == path]:
            del places[known]
    parsed.broken = {known for known in parsed.broken if known[: len(path)] != path}
