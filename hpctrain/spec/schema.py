"""Write the JSON Schema of specs and profiles, for editors that complete and check YAML.

Belongs here: the text of the schema. Does not belong here: writing files, the rules themselves.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from pydantic import BaseModel

Kind = Literal["spec", "profile", "service"]
# What each document is called.
TITLES: dict[Kind, str] = {
    "spec": "run spec",
    "profile": "cluster profile",
    "service": "service spec",
}
_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema(kind: Kind) -> str:
    """Write indented JSON with sorted keys and a final newline, deterministically."""
    document = schema_document(kind)
    return json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def schema_document(kind: Kind) -> dict[str, Any]:
    """Return the schema with the fields in the order of the document."""
    schema = _document_class(kind).model_json_schema(by_alias=True, mode="validation")
    document = {**_tidy(schema), "$schema": _DIALECT, "title": f"hpctrain {TITLES[kind]}"}
    if kind != "profile":
        _allow_presets(document)
    return document


def _document_class(kind: Kind) -> type[BaseModel]:
    if kind == "spec":
        from hpctrain.spec.run import RunSpec

        return RunSpec
    if kind == "service":
        from hpctrain.spec.service import ServiceSpec

        return ServiceSpec
    from hpctrain.spec.profile import ClusterProfile

    return ClusterProfile


def _allow_presets(document: dict[str, Any]) -> None:
    """Let `model` be the name of a published model, or have one as its `preset`."""
    from hpctrain.spec.loader import load_presets

    names = [one.name for one in load_presets().presets]
    field, preset = document["properties"]["model"], {"enum": names}
    shapes = field.pop("anyOf", [field])
    meaning = "Published model whose fields are the defaults of the others (`hpctrain init --list`)"
    document["properties"]["model"] = {
        "anyOf": [*shapes, {"type": "string", **preset}],
        "description": "Shape of the model: its fields, or the name of a published one",
    }
    section = document["$defs"]["ModelSpec"]
    section["properties"] = {
        "preset": {**preset, "description": meaning},
        **section["properties"],
    }
    whole = {name: section.pop(name) for name in ("required", "allOf")}
    section["anyOf"] = [{"required": ["preset"]}, whole]


def _tidy(node: Any, *, names: bool = False) -> Any:
    """Drop pydantic's generated titles, and `gt`, which JSON Schema does not have for text.

    Inside `properties` and `$defs` the keys are names and never dropped.
    """
    if isinstance(node, list):
        return [_tidy(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {
        key: _tidy(value, names=key in ("properties", "$defs") and not names)
        for key, value in node.items()
        if names or key not in ("title", "gt")
    }
