"""Put what a `config.json` says into the `model` section of a spec that names it.

Values keep their place: an error about one stands at its line of that file. Belongs here: that step
of loading a spec. Does not belong here: reading the values (`hpctrain.spec.families`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.spec.families import (
    COUNT_IT,
    OTHER,
    config_digest,
    countable,
    family_of,
    missing_part,
    put,
    read_config,
    unknown_type,
    value_at,
)
from hpctrain.spec.families.remote_code import own_code_problem
from hpctrain.spec.files import read_text
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
    counted, family = model.get("counted"), family_of(value)
    if counted is not None and countable(value):
        if isinstance(counted, dict) and counted.get("config") != config_digest(value):
            where = parsed.values.get((_MODEL, "counted", "config"), place)
            message = "`model.counted`: this is the count of another config.json, or it has changed"
            parsed.problems.append(where.problem(message, COUNT_IT))
            parsed.broken.add((_MODEL,))
        parsed.data[_MODEL] = {"family": OTHER, **model, _CONFIG: value}
        return
    if family is None:
        where = places.get((*above, "model_type"), place)
        own = None
        if missing_part(value) is None and places is not parsed.values:
            try:
                own = own_code_problem(value, Path(where.file).parent)
            except InvalidInputError as error:
                parsed.problems += error.problems
        parsed.problems.append(where.problem(*(own or unknown_type(value))))
        parsed.broken.add((_MODEL,))
        return

    def place_of(name: str) -> SourcePlace:
        """Find a value: in the section of the text model, or beside it."""
        inside = places.get((*above, str(family.section), name))
        return inside or places.get((*above, name)) or places.get(above, place)

    reading = read_config(value, family)
    parsed.problems += [place_of(name).problem(f"`{name}` {why}") for name, why in reading.refused]
    given = {name: one for name, one in model.items() if name != _CONFIG}
    completed: dict[str, Any] = {_CONFIG: value}
    for path, name in {**dict.fromkeys(("family",), "model_type"), **reading.names}.items():
        if value_at(given, path) is not None:
            continue
        found, key = value_at(reading.fields, path), (_MODEL, *path.split("."))
        put(completed, path, list(found) if isinstance(found, tuple) else found)
        parsed.values[key], parsed.names[key] = place_of(name), name
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
    try:
        file = path / _NAME if path.is_dir() else path
        content = read_text(file)
    except (ValueError, OSError) as error:  # a NUL in it, or too long a name
        raise InvalidInputError([place.problem(f"`model.config`: {error}")]) from None
    except InvalidInputError as error:
        (found,) = error.problems
        message = f"`model.config`: {found}"
        raise InvalidInputError([place.problem(message, found.hint)]) from None
    read = parse_yaml(content, str(file))  # JSON is YAML, and its reader knows places
    if read.problems:
        try:
            json.loads(content)
        except ValueError as error:  # where JSON ends to be JSON says more than where YAML does
            if isinstance(error, json.JSONDecodeError):
                at = SourcePlace(str(file), error.lineno, error.colno)
                raise InvalidInputError([at.problem(f"this is no JSON: {error.msg}")]) from None
        except RecursionError:
            pass
        raise InvalidInputError([*read.problems])
    if not isinstance(read.data, dict):
        raise InvalidInputError(
            [Problem("this is no config.json: it is no object", str(file), 1, 1)]
        )
    return read
