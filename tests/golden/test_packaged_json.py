"""The JSON beside each packaged YAML document holds the same values: `make golden` writes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.job.footprint import PACKAGED_FOOTPRINT
from hpctrain.judge.catalogue import PACKAGED
from hpctrain.observe.families import PACKAGED_FAMILIES
from hpctrain.spec.calibration import Calibration
from hpctrain.spec.catalogue import CATALOGUE as PACKAGED_PRESETS
from hpctrain.spec.loader import (
    PACKAGED_CALIBRATION,
    PACKAGED_CATALOGUE,
    PACKAGED_SERVING,
    PACKAGED_UNCERTAINTY,
    load_document,
    load_packaged,
    packaged_json,
)
from hpctrain.spec.other_tools import DIRECTORY as OTHER_TOOLS

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
