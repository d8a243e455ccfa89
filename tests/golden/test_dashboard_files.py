"""The packaged dashboards are what Grafana can load and people can review after an export.

`make golden` sorts the keys of an exported file, so that a review shows what was edited and nothing
else. Types of fields are checked by `test_dashboard_types`, queries by
`tests/unit/observe/test_dashboard_panels.py`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from hpctrain.observe.dashboard_data import DASHBOARD_NAMES
from hpctrain.observe.grafana_dashboard import DIRECTORY

GRID_COLUMNS = 24
# What Grafana replaces beside variables of the dashboard.
OF_GRAFANA = {"__range", "__all", "__value", "__url_time_range"}
# Fields of one Grafana server, and of exports that ask at import.
OF_A_SERVER = {"id", "version", "iteration", "__inputs", "__requires", "__elements"}
_LINK = re.compile(r"/d/([\w-]+)\?var-(\w+)=")

each = pytest.mark.parametrize("name", DASHBOARD_NAMES)


def document(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((DIRECTORY / f"{name}.json").read_text())
    return content


def texts(value: object) -> Iterator[str]:
    """Every text in a document."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from texts(one)


def declared(content: dict[str, Any]) -> set[str]:
    return {variable["name"] for variable in content["templating"]["list"]}


@each
def test_the_file_has_the_format_for_reviews(name: str, request: pytest.FixtureRequest) -> None:
    file = DIRECTORY / f"{name}.json"
    text = json.dumps(document(name), indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    if request.config.getoption("--write-golden"):
        file.write_text(text)
    assert file.read_text() == text, f"run `make golden` for {file.name}"


def test_no_other_file_is_packaged() -> None:
    assert {path.name for path in DIRECTORY.iterdir()} == {f"{one}.json" for one in DASHBOARD_NAMES}


@each
def test_any_grafana_can_load_it(name: str) -> None:
    content = document(name)
    assert content["uid"] == f"hpctrain-{name}" and len(content["uid"]) <= 40
    assert not OF_A_SERVER & content.keys()
    assert not content["editable"] and "hpctrain" in content["tags"]
    asked = [panel for panel in content["panels"] if panel["type"] != "row"]
    asked += [target for panel in asked for target in panel["targets"]]
    asked += [one for one in content["annotations"]["list"] if not one.get("builtIn")]
    asked += [one for one in content["templating"]["list"] if one["type"] == "query"]
    assert {one["datasource"]["uid"] for one in asked} == {"${datasource}"}


@each
def test_ids_and_titles_are_unique(name: str) -> None:
    panels = document(name)["panels"]
    for key in ("id", "title"):
        counted = Counter(panel[key] for panel in panels)
        assert not [one for one, count in counted.items() if count > 1]
    for panel in panels:
        letters = [target["refId"] for target in panel.get("targets", ())]
        assert len({*letters}) == len(letters), panel["title"]


@each
def test_panels_stand_on_the_grid_in_their_order_without_overlap(name: str) -> None:
    panels = document(name)["panels"]
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= GRID_COLUMNS, panel["title"]
        if panel["type"] == "row":
            assert place["w"] == GRID_COLUMNS and place["h"] == 1
            assert not panel["collapsed"] and not panel["panels"], "open it before an export"
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert cells and not cells & taken, panel["title"]
        taken |= cells
    places = [(panel["gridPos"]["y"], panel["gridPos"]["x"]) for panel in panels]
    assert places == sorted(places) and panels[0]["type"] == "row"


@each
def test_overrides_meet_what_they_name(name: str) -> None:
    for panel in document(name)["panels"]:
        queries = {target["refId"] for target in panel.get("targets", ())}
        organized = [one["options"] for one in panel.get("transformations", ())]
        columns = {one for each in organized for one in each.get("renameByName", {}).values()}
        for override in panel.get("fieldConfig", {}).get("overrides", ()):
            matcher = override["matcher"]
            known = {"byFrameRefID": queries, "byName": columns}[matcher["id"]]
            # Links to a run are on all tables, also on those without a column of runs.
            only_links = {one["id"] for one in override["properties"]} == {"links"}
            assert only_links or matcher["options"] in known, panel["title"]


@each
def test_texts_are_printable_and_their_variables_declared(name: str) -> None:
    content = document(name)
    known = declared(content) | OF_GRAFANA
    for text in texts(content):
        assert text.isprintable(), text
        assert set(re.findall(r"\$\{?([A-Za-z_]\w*)", text)) <= known, text


def test_links_lead_to_dashboards_and_their_variables() -> None:
    documents = {one["uid"]: one for one in map(document, DASHBOARD_NAMES)}
    links = {
        link
        for one in documents.values()
        for text in texts(one)
        if "/d/" in text
        for link in _LINK.findall(text) or [(text, "")]
    }
    assert {uid for uid, _ in links} == {"hpctrain-run", "hpctrain-service"}
    for uid, variable in links:
        assert variable in declared(documents[uid])
