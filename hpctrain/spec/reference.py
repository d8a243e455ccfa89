"""Every field of run specs and cluster profiles, for people: type, default, meaning, engines.

Read from the JSON Schema, so that there is one description of a field. Belongs here:
what is known of a field without any document. Does not belong here: layout of text, values of a
file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hpctrain.base.errors import UsageError
from hpctrain.spec.engines.abilities import EngineAbilities
from hpctrain.spec.engines.registry import ENGINES
from hpctrain.spec.positions import parse_yaml

if TYPE_CHECKING:
    from pydantic import BaseModel


# -- Write the JSON Schema of specs and profiles, for editors that complete and check YAML ------


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
    if kind == "spec":
        _allow_trainers(document)
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


def _allow_trainers(document: dict[str, Any]) -> None:
    """Let a run spec have `trainer` in place of what describes a model and its training."""
    from hpctrain.spec.trainer import TrainerRunSpec

    other = _tidy(TrainerRunSpec.model_json_schema(by_alias=True, mode="validation"))
    document["$defs"] = {**other["$defs"], **document["$defs"]}
    document["properties"]["trainer"] = other["properties"]["trainer"]
    both = [name for name in document["required"] if name in other["required"]]
    document["if"] = {"required": ["trainer"]}
    document["then"] = {"propertyNames": {"enum": list(other["properties"])}}
    document["else"] = {"required": [one for one in document["required"] if one not in both]}
    document["required"] = both


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


# ----------------------------------------------------------------------------------------------


_PLURALS: dict[Kind, str] = {
    "spec": "run specs",
    "profile": "profiles",
    "service": "service specs",
}
# What stands for the name that a file gives to an entry, and for the number of an item.
ANY = "*"


@dataclass(frozen=True)
class Field:
    """One field or section. `path` has `*` for names that the file chooses, `[]` for items.

    `type` and `default` are words of YAML; `default` None: required, or a section. `engines`: those
    that read it, empty if all do. `fields` are those of a section, by their paths.
    """

    path: str
    type: str
    default: str | None
    required: bool
    description: str
    engines: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]


@cache
def fields_of(kind: Kind) -> Mapping[str, Field]:
    """Return all fields and sections by their dotted paths, in the order of the document."""
    schema = schema_document(kind)
    found = _section(kind, "", schema, schema)
    return {field.path: field for field in found}


def find_field(path: str, kind: Kind | None = None) -> tuple[Kind, Field]:
    """Look up a path as it is written in a file: `data.sources[0].path`, `model.layers`.

    Raises UsageError with the nearest names for one that does not exist. Without `kind` the spec
    comes before the profile, and both before the spec of a service.
    """
    kinds: tuple[Kind, ...] = tuple(TITLES) if kind is None else (kind,)
    for one in kinds:
        field = _matching(fields_of(one), _general(path))
        if field is not None:
            return one, field
    where = "specs and profiles" if kind is None else _PLURALS[kind]
    others = [one for one in TITLES if one not in kinds]
    owners = [one for one in others if _matching(fields_of(one), _general(path)) is not None]
    if owners:
        owner = _PLURALS[owners[0]]
        raise UsageError(
            f"{where} have no field `{path}`",
            hint=f"it is a field of {owner}: `hpctrain explain {path}`",
        )
    names = [name for one in kinds for name in fields_of(one)]
    ends = [name for name in names if name.rpartition(".")[2] == path.rpartition(".")[2]]
    close = ends[:4] or get_close_matches(path, names, n=4)
    hint = f"did you mean {' or '.join(f'`{name}`' for name in close)}?" if close else None
    raise UsageError(f"{where} have no field `{path}`", hint=hint)


def names_below(prefix: str) -> list[str]:
    """List fields of a spec that a prefix may be completed to: of values, and sections."""
    found = []
    for path, field in fields_of("spec").items():
        if path.startswith(prefix) and ANY not in path and "[]" not in path:
            found.append(f"{path}." if field.fields else path)
    return found


def _general(path: str) -> str:
    """Write an index as `[]`."""
    parts = path.replace("[", ".[").split(".")
    return ".".join("[]" if part.startswith("[") else part for part in parts).replace(".[]", "[]")


def _matching(fields: Mapping[str, Field], path: str) -> Field | None:
    if path in fields:
        return fields[path]
    words = path.split(".")
    for known, field in fields.items():
        # `environment.variables.PATH`: a name that the file chooses
        named = field.type.startswith("names with") and not field.fields
        other = [*known.split("."), *([ANY] if named and len(words) > known.count(".") + 1 else [])]
        if len(other) == len(words) and all(
            left in (ANY, right) for left, right in zip(other, words, strict=True)
        ):
            return field
    return None


def _section(
    kind: Kind, above: str, node: dict[str, Any], schema: dict[str, Any]
) -> Iterator[Field]:
    # of a model, whose fields a preset may give: those of the other way to write one
    several = [one for one in node.get("anyOf", ()) if "properties" not in one]
    without_trainer = node.get("else", {})
    required = {
        name for one in (node, *several[1:], without_trainer) for name in one.get("required", ())
    }
    for name, own in node.get("properties", {}).items():
        yield from _field(kind, f"{above}{name}", own, schema, required=name in required)


def _field(
    kind: Kind, path: str, node: dict[str, Any], schema: dict[str, Any], *, required: bool
) -> Iterator[Field]:
    inner = [*_inner(kind, path, node, schema)]
    direct = [one.path for one in inner if _is_direct(path, one.path)]
    default = None
    if "default" in node and not direct:
        default = _yaml(node["default"])
    yield Field(
        path=path,
        type=_type(node, schema),
        default=default,
        required=required,
        description=_description(node, schema),
        engines=_engines(path) if kind == "spec" else (),
        fields=tuple(direct),
    )
    yield from inner


def _inner(kind: Kind, path: str, node: dict[str, Any], schema: dict[str, Any]) -> Iterator[Field]:
    """Yield the fields of sections that `node` may be, of its items, and of its named entries."""
    for choice in _choices(node, schema):
        if "properties" in choice:
            yield from _section(kind, f"{path}.", choice, schema)
        elif isinstance(choice.get("items"), dict):
            yield from _inner(kind, f"{path}[]", choice["items"], schema)
        elif isinstance(choice.get("additionalProperties"), dict):
            yield from _inner(kind, f"{path}.{ANY}", choice["additionalProperties"], schema)


def _is_direct(path: str, other: str) -> bool:
    rest = other.removeprefix(path).removeprefix("[]").removeprefix(".").removeprefix(f"{ANY}.")
    return "." not in rest and "[" not in rest


def _choices(node: dict[str, Any], schema: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what a node may be, references followed, without null."""
    return [
        schema["$defs"][one["$ref"].rpartition("/")[2]] if "$ref" in one else one
        for one in node.get("anyOf", [node])
        if one.get("type") != "null"
    ]


def _description(node: dict[str, Any], schema: dict[str, Any]) -> str:
    own = node.get("description")
    if own:
        return str(own)
    return next((str(c["description"]) for c in _choices(node, schema) if "description" in c), "")


def _type(node: dict[str, Any], schema: dict[str, Any]) -> str:
    words = [_type_of(choice, schema) for choice in _choices(node, schema)]
    return " or ".join(dict.fromkeys(words))


def _type_of(node: dict[str, Any], schema: dict[str, Any]) -> str:
    if "enum" in node:
        return " | ".join(_yaml(value) for value in node["enum"])
    if "const" in node:
        return _yaml(node["const"])
    if "properties" in node:
        return "section"
    if isinstance(node.get("items"), dict):
        return f"list of {_type(node['items'], schema)}"
    if "prefixItems" in node:
        return f"list of {len(node['prefixItems'])}"
    if isinstance(node.get("additionalProperties"), dict):
        return f"names with {_type(node['additionalProperties'], schema)}"
    kinds = node.get("type", "any")
    if isinstance(kinds, list):  # a quantity: its comment says how it is written
        return str(node.get("$comment") or " or ".join(kinds))
    limits = [f" {word} {node[key]:.15g}" for key, word in _LIMITS if key in node]
    return f"{_PLAIN.get(kinds, kinds)}{','.join(limits)}"


_PLAIN = {
    "string": "text",
    "integer": "whole number",
    "number": "number",
    "boolean": "true | false",
    "object": "names with values",
    "array": "list",
}
_LIMITS = (
    ("minimum", "at least"),
    ("exclusiveMinimum", "above"),
    ("maximum", "at most"),
    ("exclusiveMaximum", "below"),
)


def _yaml(value: Any) -> str:
    """Write a value as it would stand in a file."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return value if value else '""'
    return json.dumps(value, ensure_ascii=False)


def _reads(field: str) -> Any:
    """Return the ability that an engine needs to read a field; None: all engines do."""
    axes = {f"parallel.{axis}": axis for axis in ("tp", "pp", "vpp", "cp", "ep")}
    if field in axes:
        return lambda engine: axes[field] in engine.axes
    abilities = {
        "parallel.etp": lambda engine: engine.splits_experts,
        "recompute_layers": lambda engine: engine.recomputes_some,
        "activation_offload_layers": lambda engine: engine.offloads_activations,
        "optimizer.shard_gpus": lambda engine: engine.shards_over_part,
        "optimizer.momentum": lambda engine: "muon" in engine.optimizers,
        "optimizer.zero": lambda engine: engine.shards,
        "optimizer.offload": lambda engine: len(engine.offloads) > 1,
    }
    return abilities.get(field)


def _engines(path: str) -> tuple[str, ...]:
    words = path.split(".")
    if words[0] == "engine" and len(words) > 1:
        return tuple(name for name, one in ENGINES.items() if words[1] in one.settings)
    reads = _reads(path)
    if reads is None:
        return ()
    able: list[EngineAbilities] = [engine for engine in ENGINES.values() if reads(engine)]
    return tuple(engine.name for engine in able)


# -- The examples that come with hpctrain: run specs to start from, and values of their fields --


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
            if isinstance(value, dict):
                value = next(iter(value.values()), None) if word == "*" else value.get(word)
            else:
                value = value[0] if isinstance(value, list) and word == "0" and value else None
        if value is not None:
            return name, value
    return None
