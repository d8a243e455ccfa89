"""The packaged dashboards are what the tables of panels give, and records of Grafana's own models.

The models (grafana-foundation-sdk) are made from Grafana's schemas: what they do not know is lost
when they read a file, so a file that they give back unchanged has no other fields.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models import dashboard as models

from hpctrain.observe.grafana import PACKAGED, dashboard_json
from hpctrain.observe.panel_types import GRID_COLUMNS, DashboardPlan
from hpctrain.observe.panels import DASHBOARDS

# Of Grafana's Prometheus plugin, whose annotations have no schema.
OF_THE_PLUGIN = ("titleFormat", "textFormat", "step")

each = pytest.mark.parametrize("plan", DASHBOARDS, ids=lambda plan: plan.short_name)


def document(plan: DashboardPlan) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((PACKAGED / f"{plan.short_name}.json").read_text())
    return content


@each
def test_the_file_is_that_of_the_panels(
    plan: DashboardPlan, request: pytest.FixtureRequest
) -> None:
    file, text = PACKAGED / f"{plan.short_name}.json", dashboard_json(plan)
    if request.config.getoption("--write-golden"):
        file.write_text(text)
    assert file.exists() and file.read_text() == text, f"run `make golden` for {file.name}"


def test_no_other_file_is_packaged() -> None:
    names = {f"{plan.short_name}.json" for plan in DASHBOARDS}
    assert {path.name for path in PACKAGED.glob("*.json")} == names


@each
def test_grafanas_models_know_every_field(plan: DashboardPlan) -> None:
    register_default_plugins()
    written = document(plan)
    for marks in written["annotations"]["list"]:
        for field in OF_THE_PLUGIN:
            del marks[field]
    read = models.Dashboard.from_json(written)
    assert json.loads(json.dumps(read, cls=JSONEncoder)) == written


@each
def test_ids_are_unique_and_nothing_asks_at_import(plan: DashboardPlan) -> None:
    written = document(plan)
    ids = Counter(panel["id"] for panel in written["panels"])
    assert not [one for one, count in ids.items() if count > 1]
    assert not {"__inputs", "__requires", "id"} & written.keys()
    assert written["uid"] == plan.uid and len(plan.uid) <= 40
    sources = {panel["datasource"]["uid"] for panel in written["panels"] if "targets" in panel}
    assert sources == {"${datasource}"}


@each
def test_panels_fill_the_grid_without_overlap(plan: DashboardPlan) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in document(plan)["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= GRID_COLUMNS, panel["title"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
