"""Formats what is known of a field, for `explain` and for the pages of the reference.

Does not belong here: finding it (`hpctrain.spec.reference`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.page.text import facts, paragraph
from hpctrain.spec.reference import TITLES, Field, Kind, example_value, fields_of

if TYPE_CHECKING:
    from hpctrain.spec.loader import Loaded

_LONG = 60


def field_lines(kind: Kind, field: Field) -> Iterator[str]:
    """Format one field: type, default, meaning, engines, example."""
    yield from facts(
        ("Field", f"{field.path} ({TITLES[kind]})"),
        ("Meaning", field.description),
        ("Type", field.type),
        ("Default", default_text(field)),
        ("Engines", ", ".join(field.engines or ())),
    )
    example = example_value(field.path) if kind == "spec" and not field.fields else None
    if example is not None:
        name, value = example
        yield from facts(("Example", f"{_yaml(value)} (`hpctrain examples {name}`)"))


def value_lines(path: str, spec: Path | None, profile: str | None) -> Iterator[str]:
    """Format the value that a document has, and the file and line, or option, that gives it."""
    if spec is not None:
        from hpctrain.spec.loader import load_spec

        yield from _value(load_spec(spec), path)
    elif profile is not None:
        from hpctrain.spec.loader import load_named_profile

        yield from _value(load_named_profile(profile), path)


def default_text(field: Field) -> str:
    """Say what holds where a file does not have the field."""
    if field.required:
        return "none: required"
    if field.fields:
        return "see its fields"
    return "absent" if field.default in (None, "null") else str(field.default)


def inner_lines(kind: Kind, field: Field) -> Iterator[str]:
    """Format the fields of a section: name and type, below it the meaning."""
    for path in field.fields:
        one = fields_of(kind)[path]
        kind_of = one.type if len(one.type) <= _LONG else f"{one.type[:_LONG].rstrip()} ..."
        default = f" · {default_text(one)}" if not one.fields else ""
        yield from paragraph(f"{one.name}: {kind_of}{default}", "  ", hang=6)
        yield from paragraph(one.description, "      ", hang=6)


def section_rows(kind: Kind) -> tuple[list[str], list[list[str]]]:
    """Tabulate the first level of a document."""
    rows = [
        [path, "yes" if one.required else "", one.description.rstrip(".")]
        for path, one in fields_of(kind).items()
        if "." not in path and "[" not in path
    ]
    return ["FIELD", "REQUIRED", "MEANING"], rows


def reference_page(kind: Kind) -> str:
    """Write a page of the reference in Markdown: one section for each section of the document."""
    lines = [f"# {TITLES[kind].capitalize()}s: every field", ""]
    lines += [
        "Made from the descriptions that `hpctrain explain` and editors show (`make golden`).",
        "`required` stands where a file must have the field, `absent` where it has no default.",
        "",
    ]
    fields = fields_of(kind)
    alone = [one for path, one in fields.items() if "." not in path and not one.fields]
    lines += [*_table(kind, alone), ""]
    for path, one in fields.items():
        if one.fields:
            lines += [f"## `{path}`", "", one.description, ""]
            lines += [*_table(kind, [fields[name] for name in one.fields]), ""]
    return "\n".join(lines)


def _table(kind: Kind, fields: list[Field]) -> Iterator[str]:
    yield "| field | type | default | meaning |"
    yield "|---|---|---|---|"
    for one in fields:
        default = "required" if one.required else default_text(one)
        meaning = one.description
        if one.engines:
            meaning += f" (engines {', '.join(one.engines)})"
        words = (f"`{one.name}`", one.type, default, meaning)
        yield "| " + " | ".join(word.replace("|", "\\|") for word in words) + " |"


def _value(loaded: Loaded[Any], path: str) -> Iterator[str]:
    value: Any = loaded.document.model_dump(mode="json", by_alias=True)
    for word in path.replace("[", ".[").split("."):
        if isinstance(value, list) and word.startswith("["):
            number = int(word.strip("[]") or 0)
            value = value[number] if number < len(value) else None
        elif isinstance(value, dict):
            value = value.get(word)
    origin = loaded.origin.get(path, "default")
    yield from facts(("Value", f"{_yaml(value)} ({origin})"))


def _yaml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
