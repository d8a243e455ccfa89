"""The JSON beside each packaged YAML document holds the same values: `make golden` writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpctrain.job.footprint import PACKAGED_FOOTPRINT
from hpctrain.judge.catalogue import PACKAGED
from hpctrain.observe.families import PACKAGED_FAMILIES
from hpctrain.spec.calibration import Calibration
from hpctrain.spec.catalogue import CATALOGUE as PACKAGED_PRESETS
from hpctrain.spec.families import COMPILED, DIRECTORY, Family
from hpctrain.spec.files import load_packaged, packaged_json
from hpctrain.spec.loader import (
    PACKAGED_CALIBRATION,
    PACKAGED_CATALOGUE,
    PACKAGED_SERVING,
    PACKAGED_UNCERTAINTY,
    load_document,
)
from hpctrain.spec.other_tools import DIRECTORY as OTHER_TOOLS
from hpctrain.spec.positions import parse_yaml

DOCUMENTS = (
    PACKAGED_CALIBRATION,
    PACKAGED_CATALOGUE,
    PACKAGED_SERVING,
    PACKAGED_UNCERTAINTY,
    PACKAGED_PRESETS,
    PACKAGED_FOOTPRINT,
    PACKAGED_FAMILIES,
    PACKAGED / "signatures.yaml",
    PACKAGED / "xids.yaml",
    *sorted(OTHER_TOOLS.glob("*.yaml")),
)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_the_json_is_that_of_the_yaml(path: Path, request: pytest.FixtureRequest) -> None:
    beside, text = path.with_suffix(".json"), packaged_json(path)
    if request.config.getoption("--write-golden"):
        beside.write_text(text)
    assert beside.exists() and beside.read_text() == text, f"run `make golden` for {beside.name}"


@pytest.mark.parametrize("damage", ["", "{", '{"yaml_sha256": "0", "values": {}}', "older"])
def test_a_json_of_another_text_is_ignored(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "calibration.yaml"
    path.write_bytes(PACKAGED_CALIBRATION.read_bytes())
    if damage == "older":
        path.with_suffix(".json").write_text(packaged_json(path))
        path.write_text(path.read_text().replace("gpus:", "gpus: # changed", 1))
    elif damage:
        path.with_suffix(".json").write_text(damage)
    expected = load_document(Calibration, path).document
    assert load_packaged(Calibration, path) == expected


# -- Families of models: one JSON for all files --------------------------------------------------

OF_NO_FAMILY = {name: DIRECTORY / f"{name}_types.yaml" for name in ("refused", "counted")}


def test_families_are_those_of_their_files(request: pytest.FixtureRequest) -> None:
    types = {name: parse_yaml(one.read_text(), one.name).data for name, one in OF_NO_FAMILY.items()}
    text = json.dumps({"families": families(), **types}, separators=(",", ":")) + "\n"
    if request.config.getoption("--write-golden"):
        COMPILED.write_text(text)
    assert COMPILED.read_text() == text, f"run `make golden` for {COMPILED.name}"


def families() -> dict[str, dict[str, Any]]:
    """The values of all files, each completed by those that it is like."""
    files = {
        path.stem: {"name": path.stem, **parse_yaml(path.read_text(), path.name).data}
        for path in sorted(DIRECTORY.glob("*.yaml"))
        if path not in OF_NO_FAMILY.values()
    }

    def complete(values: dict[str, Any]) -> dict[str, Any]:
        base = values.get("like")
        return values if base is None else joined(complete(files[base]), values)

    whole = {name: complete(values) for name, values in files.items()}
    for name, values in whole.items():
        Family.model_validate(values)
        own = files[name]
        values["model_types"] = own.get("model_types", [])  # nobody else's
        values["whole_heads"] = own.get("whole_heads", False)
    return {name: values for name, values in whole.items() if not name.startswith("_")}


def joined(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Complete `base` by `own`: mappings key by key, what is ignored added, others replaced.

    A key without a value is removed.
    """
    result = dict(base)
    for key, value in own.items():
        before = result.get(key)
        if value is None:
            result.pop(key, None)
        elif key in ("ignored", "unused_weights"):
            result[key] = [*(before or ()), *value]
        elif isinstance(value, dict) and isinstance(before, dict):
            result[key] = joined(before, value)
        else:
            result[key] = value
    return result
