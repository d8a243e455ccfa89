"""Write the JSON Schema of spec and profile, for editors that complete and check YAML.

Belongs here: the text of the schema. Does not belong here: writing files, the rules themselves.
"""

from __future__ import annotations

import json
from typing import Any, Literal

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema(kind: Literal["spec", "profile"]) -> str:
    """Write indented JSON with sorted keys and a final newline, deterministically."""
    from hpctrain.spec.profile import ClusterProfile
    from hpctrain.spec.run import RunSpec

    model = RunSpec if kind == "spec" else ClusterProfile
    schema = model.model_json_schema(by_alias=True, mode="validation")
    title = "hpctrain run spec" if kind == "spec" else "hpctrain cluster profile"
    document = {**_tidy(schema), "$schema": _DIALECT, "title": title}
    return json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


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
