"""pydantic's findings in our words, each with its place in the file.

Belongs here: one message per kind of error, with what was expected, what was found and a hint.
Does not belong here: rules (they are in `run` and `profile`) or printing. No text of pydantic
reaches a user.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ValidationError

from hpctrain.errors import Problem
from hpctrain.spec.contradiction import Contradiction
from hpctrain.spec.fields import (
    annotation_at,
    description,
    did_you_mean,
    is_model,
    literal_values,
    members,
    parent_model,
    split_branches,
    suggest_key,
)
from hpctrain.spec.positions import Parsed, Path, dotted, shown_value
from hpctrain.spec.syntax import Place
from hpctrain.units import Duration

_BOOLEAN_WORDS = {"on": "true", "yes": "true", "y": "true", "off": "false", "no": "false",
                  "n": "false"}  # fmt: skip

# pydantic error type -> what was expected
_EXPECTED = {
    "int_type": "an integer",
    "int_parsing": "an integer",
    "int_from_float": "an integer",
    "int_parsing_size": "a smaller integer",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "`true` or `false`",
    "bool_parsing": "`true` or `false`",
    "string_type": "text",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}

# pydantic error type -> (words, key of the limit in the error's context)
_LIMITS = {
    "greater_than": ("must be above", "gt"),
    "greater_than_equal": ("must be at least", "ge"),
    "less_than": ("must be below", "lt"),
    "less_than_equal": ("must be at most", "le"),
    "multiple_of": ("must be a multiple of", "multiple_of"),
    "too_short": ("needs this many items at least:", "min_length"),
    "too_long": ("may have this many items at most:", "max_length"),
    "string_too_short": ("needs this many characters at least:", "min_length"),
    "string_too_long": ("may have this many characters at most:", "max_length"),
}

_PATTERNS = {
    r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$": (
        "expected a name of letters, digits, `.`, `_` and `-`, 63 characters at most, "
        "beginning with a letter or digit"
    ),
    r"^[A-Za-z_][A-Za-z0-9_]*$": "expected the name of a variable such as `NCCL_DEBUG`",
    r"^[a-z][A-Za-z0-9_-]*$": "expected an argument without dashes such as `attention-backend`",
    r"^\d+(\.\d+)?,\d+(\.\d+)?,\d+(\.\d+)?$": "expected three shares such as `98,2,0`",
}


def explain(error: ValidationError, model: type[BaseModel], parsed: Parsed) -> list[Problem]:
    """All problems of a document, one for each place, without those already reported."""
    problems: dict[tuple[Path, str], Problem] = {}
    for raw in error.errors(include_url=False):
        path, branch = split_branches(model, raw["loc"])
        if any(path[: len(broken)] == broken for broken in parsed.broken):
            continue
        union = _union_at(model, raw["loc"]) if branch else None
        if union is None or _takes(branch, union, model, parsed):
            problems[(path, raw["type"])] = _one(dict(raw), path, model, parsed)
        elif not _takes(None, union, model, parsed):
            message = f"expected {_alternatives(model, union)}, got {_shown(parsed.data, union)}"
            hint = _value_hint("union", model, union, _value_at(parsed.data, union))
            problems[(union, "union")] = _at(parsed, union, message, hint)
    return list(problems.values())


def _union_at(model: type[BaseModel], loc: tuple[str | int, ...]) -> Path | None:
    """Path of the union whose member complains: the first part of `loc` that is no level."""
    for end in range(len(loc) + 1):
        path, branch = split_branches(model, loc[:end])
        if branch is not None:
            return path
    return None


def _takes(branch: str | None, union: Path, model: type[BaseModel], parsed: Parsed) -> bool:
    """True when the value is a mapping that this branch (None: any branch) is there for."""
    names = [one.__name__ for one in members(annotation_at(model, union)) if is_model(one)]
    is_mapping = isinstance(_value_at(parsed.data, union), dict)
    return is_mapping and bool(names) and (branch is None or branch in names)


def _alternatives(model: type[BaseModel], path: Path) -> str:
    annotation = annotation_at(model, path)
    words = [f"`{value}`" for value in literal_values(annotation)]
    for member in members(annotation):
        if is_model(member) or member in (int, float, str):
            name = "a mapping" if is_model(member) else _EXPECTED[f"{_kind(member)}_type"]
            words.insert(0, name)
    return " or ".join(words)


def _kind(member: Any) -> str:
    return "string" if member is str else str(member.__name__)


def _one(raw: dict[str, Any], path: Path, model: type[BaseModel], parsed: Parsed) -> Problem:
    kind, context = raw["type"], raw.get("ctx", {})
    value = _value_at(parsed.data, path)
    if kind == "missing":
        section = parent_model(model, path)
        purpose = description(section, str(path[-1])) if section else None
        hint = f"{path[-1]}: {purpose}" if purpose else None
        return _at(parsed, path, "required, but missing", hint)
    if kind == "extra_forbidden":
        return _at(parsed, path, "unknown key", suggest_key(model, path), key=True)
    if raw["loc"] and raw["loc"][-1] == "[key]":
        return _at(parsed, path, _PATTERNS.get(context.get("pattern", ""), "not a valid key"),
                   key=True)  # fmt: skip
    hint = _value_hint(kind, model, path, value)
    if kind == "value_error":
        if isinstance(wrong := context["error"], Contradiction):
            return _at(parsed, wrong.path, str(wrong), wrong.hint)
        return _at(parsed, path, str(context["error"]), hint, key=isinstance(value, dict))
    return _at(parsed, path, _value_message(kind, context, model, path, value), hint)


def _value_message(
    kind: str, context: dict[str, Any], model: type[BaseModel], path: Path, value: object
) -> str:
    got = _describe(value)
    if kind in _LIMITS:
        words, limit = _LIMITS[kind]
        if limit == "min_length" and context[limit] == 1:
            return "must not be empty"
        return f"{words} {context[limit]}, got {got}"
    if kind == "string_pattern_mismatch":
        return f"{_PATTERNS.get(context['pattern'], 'not in the expected form')}, got {got}"
    if kind == "literal_error":
        choices = " or ".join(f"`{one}`" for one in literal_values(annotation_at(model, path)))
        return f"expected {choices or 'another word'}, got {got}"
    if not path and kind in _EXPECTED:
        return f"expected a mapping of `key: value` lines, got {got}"
    return f"expected {_EXPECTED.get(kind, 'another value')}, got {got}"


def _value_hint(kind: str, model: type[BaseModel], path: Path, value: object) -> str | None:
    annotation = annotation_at(model, path)
    if value is None and kind in _EXPECTED:
        return "give a value, or remove the key to get the default"
    if kind in ("bool_type", "bool_parsing") and str(value).lower() in _BOOLEAN_WORDS:
        return f"write `{_BOOLEAN_WORDS[str(value).lower()]}`: YAML 1.2 has only true and false"
    if kind in ("string_type", "string_pattern_mismatch") and isinstance(value, int | float):
        return f'put it in quotes: "{shown_value(value)}"'
    if Duration in members(annotation) and isinstance(value, int) and not isinstance(value, bool):
        return (
            f"a bare number is refused because Slurm reads minutes and most others seconds: "
            f"write `{value}s`, `{value}min` or `{value}h`"
        )
    choices = literal_values(annotation)
    if choices and isinstance(value, str):
        return did_you_mean(value, choices)
    return _number_hint(kind, value)


def _number_hint(kind: str, value: object) -> str | None:
    if kind not in ("int_type", "int_parsing", "float_type", "float_parsing", "union"):
        return None
    if not isinstance(value, str):
        return None
    bare = value.replace("_", "").replace(",", "")
    if not bare.replace(".", "", 1).isdecimal():
        return None
    return "remove the quotes" if bare == value else f"write `{bare}`"


def _value_at(data: Any, path: Path) -> Any:
    for part in path:
        if isinstance(data, dict):
            data = data.get(str(part))
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        else:
            return None
    return data


def _shown(data: Any, path: Path) -> str:
    return _describe(_value_at(data, path))


def _describe(value: object) -> str:
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if value is None:
        return "nothing"
    return f"`{shown_value(value)}`"  # type: ignore[arg-type]


def _at(
    parsed: Parsed, path: Path, message: str, hint: str | None = None, *, key: bool = False
) -> Problem:
    place = parsed.nearest_place(path, key=key) or Place("")
    return place.problem(f"`{dotted(path)}`: {message}" if path else message, hint)
