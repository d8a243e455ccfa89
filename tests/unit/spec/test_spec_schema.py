"""The JSON Schema for editors: complete, described, and the same each time."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from hpctrain.spec.fields import known_paths
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.reference import TITLES, json_schema
from hpctrain.spec.run import RunSpec
from hpctrain.spec.service import ServiceSpec


def schema_paths(schema: dict[str, Any], node: dict[str, Any], above: str = "") -> set[str]:
    """All keys that the schema describes, as dotted paths."""
    found = set()
    for part in [node, *node.get("anyOf", ())]:
        if "$ref" in part:
            found |= schema_paths(schema, schema["$defs"][part["$ref"].split("/")[-1]], above)
        if "items" in part:
            found |= schema_paths(schema, part["items"], f"{above}[]")
        for key, value in part.get("properties", {}).items():
            path = f"{above}.{key}" if above else key
            found |= {path} | schema_paths(schema, value, path)
    return found


@pytest.mark.parametrize(
    ("kind", "model"), [("spec", RunSpec), ("profile", ClusterProfile), ("service", ServiceSpec)]
)
def test_schema_has_every_key_and_forbids_others(kind: Any, model: Any) -> None:
    schema = json.loads(json_schema(kind))
    # The name of a published model is replaced by its fields before the document is made.
    presets = set() if kind == "profile" else {"model.preset"}
    assert schema_paths(schema, schema) == set(known_paths(model)) | presets
    for definition in [schema, *schema["$defs"].values()]:
        assert definition["additionalProperties"] is False
        assert set(definition.get("required", ())) <= set(definition["properties"])


@pytest.mark.parametrize("kind", TITLES)
def test_every_key_is_described(kind: Any) -> None:
    schema = json.loads(json_schema(kind))
    for name, definition in {"document": schema, **schema["$defs"]}.items():
        assert definition["description"], name
        for key, value in definition["properties"].items():
            assert value.get("description") or "$ref" in value, f"{name}.{key}"


def test_schema_states_types_and_choices() -> None:
    schema = json.loads(json_schema("spec"))
    model = schema["$defs"]["ModelSpec"]["properties"]
    assert model["layers"] == {
        "description": "Number of transformer layers; resnet: 18, 34, 50, 101 or 152",
        "maximum": 10_000,
        "minimum": 1,
        "type": "integer",
    }
    assert model["family"]["enum"] == ["gpt", "llama", "bert", "distilbert", "vit", "resnet"]
    assert '"gt":' not in json_schema("spec")
    assert {"model", "batch", "budget"} <= set(schema["required"])


def test_schema_is_the_same_in_another_process() -> None:
    code = "from hpctrain.spec.reference import json_schema; print(json_schema('profile'), end='')"
    command = [sys.executable, "-c", code]
    again = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True)
    assert again.stdout == json_schema("profile")
