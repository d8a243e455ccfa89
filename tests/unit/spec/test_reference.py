"""What `explain`, completion and the pages of the reference know of every field."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from hpctrain.base.errors import UsageError
from hpctrain.spec.families import Family, family_named, family_names, read_config
from hpctrain.spec.fields import known_paths
from hpctrain.spec.loader import load_any_run_spec, load_profile, load_service_spec
from hpctrain.spec.positions import parse_yaml
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.reference import TITLES, Kind, fields_of, find_field, json_schema, names_below
from hpctrain.spec.run import RunSpec
from hpctrain.spec.service import ServiceSpec
from hpctrain.spec.trainer import TrainerRunSpec

ROOT = Path(__file__).resolve().parents[3]
DOCUMENTS: dict[Kind, type[BaseModel]] = {
    "spec": RunSpec,
    "profile": ClusterProfile,
    "service": ServiceSpec,
}


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_every_field_is_there_in_order_and_says_what_it_means(kind: Kind) -> None:
    fields = fields_of(kind)
    first = [path for path in fields if "." not in path and "[" not in path]
    model = DOCUMENTS[kind]
    own = [field.alias or name for name, field in model.model_fields.items()]
    assert first == [*own, *(["trainer"] if kind == "spec" else [])]
    for path, field in fields.items():
        assert field.description and field.type, path
        assert all(inner in fields for inner in field.fields)
        assert not (field.required and field.default), path


def paths(value: Any, above: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for name, inner in value.items():
            path = f"{above}.{name}" if above else str(name)
            yield path
            yield from paths(inner, path)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            if isinstance(inner, dict):
                yield from paths(inner, f"{above}[{number}]")


@pytest.mark.parametrize(
    ("kind", "file"),
    [
        ("service" if "serve" in f"{path.parent.name}/{path.name}" else "spec", path)
        for path in sorted((ROOT / "examples").rglob("*.yaml"))
        if "profile" not in path.name
    ]
    + [("profile", path) for path in sorted((ROOT / "cluster_profiles").rglob("*.yaml"))],
    ids=lambda value: value.parent.name + "/" + value.name if isinstance(value, Path) else value,
)
def test_every_field_of_a_file_is_found(kind: Kind, file: Path) -> None:
    for path in paths(parse_yaml(file.read_text(), file.name).data):
        assert find_field(path, kind)[0] == kind, path


SNIPPETS = [
    snippet
    for page in (ROOT / "docs").glob("*.md")
    for snippet in re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
]
# `hpctrain calibrate` writes it. A limit that does not say of which latency starts nothing.
# The loader writes the name of an adapter.
SET_BY_NOBODY = ("calibration.learned", "objectives.p99", "trainer.framework")


def set_in(texts: list[Path] | list[str]) -> set[str]:
    """The paths of all values in these files or texts, without numbers of items."""
    read = [text.read_text() if isinstance(text, Path) else text for text in texts]
    return {
        re.sub(r"\[\d+\]", "[]", path) for text in read for path in paths(parse_yaml(text, "").data)
    }


def set_by_families() -> set[str]:
    """Parts of models that a family's file chooses, or finds in its config.json."""
    families = [one for one in map(family_named, family_names()) if one is not None]
    chosen = {path for one in families for path in paths(dict(one.choices))}
    return (
        chosen
        | {path for one in families for path in one.fields}
        | {
            path
            for file in (ROOT / "tests" / "families").glob("*.json")
            for path in paths(read_config(json.loads(file.read_text()), of_file(file)).fields)
        }
    )


def of_file(file: Path) -> Family:
    family = family_named(file.stem)
    assert family is not None
    return family


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_every_field_is_set_somewhere_for_people_to_see(kind: Kind) -> None:
    """In an example, a profile, a site or a guide: a field that nobody sets ought to go."""
    examples = list((ROOT / "examples").rglob("*.yaml"))
    profiles = [path for path in examples if "profile" in path.name]
    services = [path for path in examples if "serve" in f"{path.parent.name}/{path.name}"]
    specs = [path for path in examples if path not in (*profiles, *services)]
    files: dict[Kind, list[Path]] = {
        "spec": specs,
        "profile": [
            *profiles,
            *(ROOT / "cluster_profiles").rglob("*.yaml"),
            *(ROOT / "tests" / "sites").rglob("*.yaml"),
        ],
        "service": services,
    }
    seen = set_in(files[kind]) | set_in(SNIPPETS)
    # a calibration is a file of its own; partitions and services share sections
    seen |= {path.removeprefix("slurm.partitions[].") for path in seen}
    seen |= {f"{above}.{path}" for path in seen for above in ("calibration", "slurm.partitions[]")}
    seen |= {
        path for path in set_in(specs) if path.startswith(("model.", "environment.", "notify"))
    }
    seen |= {f"model.{path}" for path in set_by_families()}
    unset = [path for path in fields_of(kind) if path not in seen and "*" not in path]
    assert [path for path in unset if not path.startswith(SET_BY_NOBODY)] == []


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "settings").glob("*.yaml")))
def test_settings_fit_together(path: Path) -> None:
    load = {"serve": load_service_spec, "profile": load_profile}.get(
        path.stem.partition("_")[0], load_any_run_spec
    )
    if path.stem != "profile.calibration":  # the profile reads it
        assert load(path).document


@pytest.mark.parametrize(
    ("path", "kind", "type", "default", "engines"),
    [
        ("parallel.vpp", "spec", "whole number at least 1", "1", ("megatron", "megatron-lm")),
        ("data.sources[3].weight", "spec", "number above 0", "1.0", ()),
        ("checkpoint.keep", "spec", "whole number at least 1", "2", ()),
        ("parallel", "spec", "section or auto", None, ()),
        ("engine.deepspeed.adam", "spec", "auto | torch | deepspeed", "auto", ("deepspeed",)),
        ("slurm.partitions[0].name", "profile", "text", None, ()),
        (
            "network.nic_bandwidth",
            "profile",
            "a bandwidth such as `300GB/s` or `200Gb/s`",
            None,
            (),
        ),
    ],
)
def test_known_fields(
    path: str, kind: Kind, type: str, default: str | None, engines: tuple[str, ...]
) -> None:
    found_kind, field = find_field(path)
    assert (found_kind, field.type, field.default) == (kind, type, default)
    assert field.engines == engines


def test_an_unknown_field_is_answered_with_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"run specs have no field `batch\.mikro`") as refused:
        find_field("batch.mikro", "spec")
    assert str(refused.value.hint).startswith("did you mean `batch.micro`")
    with pytest.raises(UsageError) as refused:
        find_field("optimizer.layers")
    assert "`model.layers`" in str(refused.value.hint), "the same name in another section"


@pytest.mark.parametrize(
    ("path", "kind", "owner"),
    [
        ("resources.walltime", "profile", "run specs"),
        ("nodes.count", "spec", "profiles"),
        ("traffic.rate", "spec", "service specs"),
    ],
)
def test_a_field_of_the_other_kind_is_answered_with_its_kind(
    path: str, kind: Kind, owner: str
) -> None:
    with pytest.raises(UsageError) as refused:
        find_field(path, kind)
    assert refused.value.hint == f"it is a field of {owner}: `hpctrain explain {path}`"


def test_names_complete_to_values_and_sections() -> None:
    assert names_below("checkpoint.ev") == ["checkpoint.every_steps", "checkpoint.every"]
    assert "checkpoint." in names_below("") and "seed" in names_below("")
    assert not any("*" in name or "[]" in name for name in names_below(""))


# -- The JSON Schema for editors: complete, described, and the same each time -------------------


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
    trainer = {path for path in known_paths(TrainerRunSpec) if path.startswith("trainer")}
    known = {*known_paths(model), *presets, *(trainer if kind == "spec" else ())}
    assert schema_paths(schema, schema) == known
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
    assert model["norm_place"]["enum"] == ["before", "after", "both"]
    assert '"gt":' not in json_schema("spec")
    assert schema["required"] == ["name", "resources"]
    assert {"model", "batch", "budget"} <= set(schema["else"]["required"])


ENGINE = {"model": "llama-3-8b", "batch": {"global": 8}, "budget": {"steps": 10}}
ENGINE |= {"optimizer": {"lr": 0.1}, "checkpoint": {"every_steps": 5}}
TRAINER = {"trainer": {"command": ["python", "train.py"], "done": {"step": 10}}}
RUN = {"name": "one", "resources": {"gpus": 8}}


@pytest.mark.parametrize(
    ("spec", "is_valid"),
    [
        (RUN | ENGINE, True),
        (RUN | TRAINER, True),
        (RUN | TRAINER | {"notify": {}, "supervise": {}, "after": "other"}, True),
        (RUN, False),
        (RUN | TRAINER | {"model": "llama-3-8b"}, False),
        (RUN | TRAINER | {"seed": 1}, False),
        (RUN | {"trainer": {"command": ["python"]}}, False),
        (TRAINER | {"name": "one"}, False),
        (RUN | ENGINE | {"zzz": 1}, False),
    ],
    ids=str,
)
def test_schema_takes_a_model_or_a_trainer(spec: dict[str, Any], is_valid: bool) -> None:
    """Editors refuse what the loader refuses."""
    import jsonschema

    schema = json.loads(json_schema("spec"))
    assert jsonschema.Draft202012Validator(schema).is_valid(spec) is is_valid


def test_fields_that_both_kinds_of_runs_have_are_the_same() -> None:
    own = {name: field.annotation for name, field in TrainerRunSpec.model_fields.items()}
    run = {name: field.annotation for name, field in RunSpec.model_fields.items()}
    assert own.keys() - run.keys() == {"trainer"}
    assert {name: run[name] for name in own if name in run} == {
        name: kind for name, kind in own.items() if name in run
    }


def test_schema_is_the_same_in_another_process() -> None:
    code = "from hpctrain.spec.reference import json_schema; print(json_schema('profile'), end='')"
    command = [sys.executable, "-c", code]
    again = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True)
    assert again.stdout == json_schema("profile")
