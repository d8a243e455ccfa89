"""Put what a `config.json` says into the `model` section of a spec that names it.

Values keep their place: an error about one stands at its line of that file. Belongs here: that step
of loading a spec. Does not belong here: reading the values (`hpctrain.spec.families`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.spec.families import family_names, family_of, put, read_config, value_at
from hpctrain.spec.fields import did_you_mean
from hpctrain.spec.job_text import UnsetNameError, expanded_text
from hpctrain.spec.positions import Parsed, SourcePlace, parse_yaml

_MODEL, _CONFIG = "model", "config"
_NAME = "config.json"


def expand_config(parsed: Parsed, directory: Path) -> None:
    """Replace the path of `model.config` by its content, and complete `model` by what that says.

    Fields of the spec stay. A relative path begins in `directory`, that of the spec. Problems are
    added to those of the file.
    """
    model = parsed.data[_MODEL]
    value, place = model[_CONFIG], parsed.values[_MODEL, _CONFIG]
    places: Mapping[Any, SourcePlace] = parsed.values
    above: tuple[str, ...] = (_MODEL, _CONFIG)
    if isinstance(value, str):
        try:
            read = _read(value, directory, place)
        except InvalidInputError as error:
            parsed.problems += error.problems
            parsed.broken.add((_MODEL,))
            return
        value, places, above = read.data, read.values, ()
    if not isinstance(value, dict):
        parsed.problems.append(place.problem("`model.config`: this is no config.json"))
        parsed.broken.add((_MODEL,))
        return
    family = family_of(value)
    if family is None:
        kind = value.get("model_type")
        hint = did_you_mean(str(kind), family_names()) if kind else None
        message = f"`model.config`: hpctrain does not know models of type {kind}"
        if kind is None:
            message = "`model.config`: this is no config.json: it has no `model_type`"
        parsed.problems.append(places.get((*above, "model_type"), place).problem(message, hint))
        parsed.broken.add((_MODEL,))
        return
    reading = read_config(value, family)
    for name, why in reading.refused:
        where = places.get((*above, name), place)
        parsed.problems.append(where.problem(f"`model.config`: {name} {why}"))
    given = {name: one for name, one in model.items() if name != _CONFIG}
    completed: dict[str, Any] = {_CONFIG: value}
    for path, name in {**dict.fromkeys(("family",), "model_type"), **reading.names}.items():
        found = value_at(reading.fields, path)
        if found is None or value_at(given, path) is not None:
            continue
        put(completed, path, list(found) if isinstance(found, tuple) else found)
        key = (_MODEL, *path.split("."))
        parsed.values[key] = places.get((*above, name), place)
        parsed.keys.setdefault(key, parsed.values[key])
    parsed.data[_MODEL] = _joined(completed, given)


def _joined(base: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for name, value in own.items():
        before = result.get(name)
        both = isinstance(value, Mapping) and isinstance(before, dict)
        result[name] = _joined(before, value) if both else value  # type: ignore[arg-type]
    return result


def _read(text: str, directory: Path, place: SourcePlace) -> Parsed:
    """Parse the file of a config. Raises InvalidInputError at the place that names it."""
    try:
        path = directory / expanded_text(text, os.environ)
    except UnsetNameError as error:
        raise InvalidInputError([place.problem(f"`model.config`: {error}")]) from None
    file = path / _NAME if path.is_dir() else path
    try:
        content = file.read_text(encoding="utf-8")
    except OSError as error:
        reason = error.strerror or str(error)
        raise InvalidInputError([place.problem(f"`model.config`: {file}: {reason}")]) from None
    except UnicodeDecodeError:
        raise InvalidInputError([place.problem(f"`model.config`: {file} is no text")]) from None
    read = parse_yaml(content, str(file))  # JSON is YAML, and its reader knows places
    if read.problems:
        raise InvalidInputError([*read.problems])
    if not isinstance(read.data, dict):
        raise InvalidInputError(
            [Problem("this is no config.json: it is no object", str(file), 1, 1)]
        )
    return read
