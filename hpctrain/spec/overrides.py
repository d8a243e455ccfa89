"""Apply `--set parallel.tp=8` to a parsed document, before it is validated.

Belongs here: parsing PATH=VALUE and setting the value. Does not belong here: checking that PATH
exists (validation reports that, with the same hints as for a file).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Self

from hpctrain.spec.positions import Parsed, Path, parse_yaml
from hpctrain.spec.scalars import shorten
from hpctrain.spec.syntax import SourcePlace

OPTION = "--set"
_PATH = re.compile(r"[^\s.\[\]=]+(?:\[\d{1,4}\])*(?:\.[^\s.\[\]=]+(?:\[\d{1,4}\])*)*")
_PART = re.compile(r"[^.\[\]]+|\[\d+\]")


class OptionText(str):
    """One `PATH=VALUE` of another option than `--set`, which messages have to name."""

    option: str

    def __new__(cls, text: str, option: str) -> Self:
        """Take the text and the name of its option."""
        self = super().__new__(cls, text)
        self.option = option
        return self


def apply_overrides(parsed: Parsed, overrides: Sequence[str]) -> None:
    """Put each `PATH=VALUE` into the document; errors are appended to `parsed.problems`."""
    for text in overrides:
        option = text.option if isinstance(text, OptionText) else OPTION
        place = SourcePlace(f"{option} {shorten(_without_secrets(text))}")
        name, equals, value_text = text.partition("=")
        if not equals or not _PATH.fullmatch(name):
            hint = f"for example {option} parallel.tp=8"
            parsed.problems.append(place.problem("expected PATH=VALUE", hint))
            continue
        read = parse_yaml(value_text, place.file) if value_text.strip() else Parsed()
        if read.problems:
            problem = read.problems[0]
            parsed.problems.append(place.problem(problem.message, problem.hint))
        elif isinstance(read.data, dict) and read.data:  # `{}` resets a section to its defaults
            hint = "set each key on its own, and quote text that contains `: `"
            parsed.problems.append(place.problem("expected one value, got a mapping", hint))
        else:
            parts = _PART.findall(name)
            path = tuple(int(part[1:-1]) if part.startswith("[") else part for part in parts)
            _set_value(parsed, path, read.data, place)


def _set_value(parsed: Parsed, path: Path, value: Any, place: SourcePlace) -> None:
    """Set the value at `path`, and drop positions and pending problems of what it replaces."""
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
        known = here.get(part) if isinstance(here, dict) else here[part]
        if last or not isinstance(known, dict | list):
            # also turns `parallel: auto` into a mapping when one of its keys is set
            for places in (parsed.keys, parsed.values):
                for below in [below for below in places if below[: depth + 1] == where]:
                    del places[below]
            parsed.broken = {path for path in parsed.broken if path[: depth + 1] != where}
            here[part] = value if last else {}
            parsed.keys[where] = parsed.values[where] = place
        here = here[part]


def _without_secrets(text: str) -> str:
    """Hide the values of variables, which may be secrets (see `secrets`), in messages."""
    path, equals, _ = text.partition("=")
    return f"{path}=..." if equals and path.strip().startswith("environment") else text
