"""The examples that come with hpctrain: run specs to start from, and values of their fields.

Belongs here: finding and reading them. Does not belong here: writing a spec for somebody (`init`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from hpctrain.base.errors import UsageError
from hpctrain.spec.positions import parse_yaml

PACKAGED = Path(__file__).resolve().parent.parent / "examples"


@cache
def examples() -> Mapping[str, Path]:
    """Return the specs by name: `gpt175b` for the one in a file, `digits/full` for a directory."""
    single = {path.stem: path for path in sorted(PACKAGED.glob("*.yaml"))}
    inside = sorted(PACKAGED.glob("*/*.yaml"))
    return single | {f"{path.parent.name}/{path.stem}": path for path in inside}


def find_example(name: str) -> Path:
    """Look up one. Raises UsageError with the names of all."""
    found = examples().get(name)
    if found is None:
        raise UsageError(f"there is no example `{name}`", hint=f"there are {', '.join(examples())}")
    return found


def example_value(path: str) -> tuple[str, Any] | None:
    """Return the first example with a value at a dotted path, and the value; None if none has."""
    words = path.replace("[]", ".0").split(".")
    for name, file in examples().items():
        value: Any = parse_yaml(file.read_text(encoding="utf-8"), file.name).data
        for word in words:
            value = _inside(value, word)
        if value is not None:
            return name, value
    return None


def _inside(value: Any, word: str) -> Any:
    if isinstance(value, dict):
        return next(iter(value.values()), None) if word == "*" else value.get(word)
    if isinstance(value, list) and word == "0" and value:
        return value[0]
    return None
