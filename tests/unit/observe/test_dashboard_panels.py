"""Panels of the dashboards: every metric, label, state and unit in them is one that exists."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from hpctrain.observe.dashboard_data import (
    ALIVE,
    DASHBOARD_NAMES,
    filled_in,
    legend_of,
    packaged_dashboards,
)
from hpctrain.observe.dashboard_page import shown
from hpctrain.observe.families import FAMILIES
from hpctrain.observe.grafana_dashboard import (
    DIRECTORY,
    PANEL_NEEDS,
    Dashboard,
    Panel,
    PanelKind,
    description_end,
    panel_needs,
    read_dashboard,
)
from hpctrain.runs.state import RunState

# Metrics that panels read and hpctrain does not export, by who does, with the labels that are used.
FOREIGN_METRICS = {
    "Prometheus": ("ALERTS", "ALERTS_FOR_STATE"),
    "DCGM exporter": (
        "DCGM_FI_DEV_GPU_UTIL",
        "DCGM_FI_DEV_FB_USED",
        "DCGM_FI_DEV_GPU_TEMP",
        "DCGM_FI_DEV_POWER_USAGE",
        "DCGM_FI_DEV_XID_ERRORS",
        "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
        "DCGM_FI_PROF_DRAM_ACTIVE",
        "DCGM_FI_PROF_NVLINK_TX_BYTES",
    ),
    "node_exporter": (
        "node_cpu_seconds_total",
        "node_memory_MemAvailable_bytes",
        "node_memory_MemTotal_bytes",
        "node_infiniband_port_data_transmitted_bytes_total",
    ),
}
FOREIGN_LABELS = {
    "Prometheus": {"alertname", "alertstate", "severity", "run", "node"},
    "DCGM exporter": {"Hostname"},
    "node_exporter": {"instance", "mode"},
}
OURS = {family.sample_name: {*family.all_labels} for family in FAMILIES}
FOREIGN = {name: FOREIGN_LABELS[who] for who, names in FOREIGN_METRICS.items() for name in names}
LABELS = OURS | FOREIGN
# Nothing on a panel needs them.
NOT_SHOWN = {
    "hpctrain_run_job_info",  # for joins with Slurm's own exporter
    "hpctrain_run_checkpoint_step",  # `Done` and `At risk` say it in figures that matter
    "hpctrain_exporter_info",
    "hpctrain_exporter_services",
    "hpctrain_exporter_unreadable_services",
    "hpctrain_service_controller_epoch",  # of interest where two controllers quarrel
}
_GROUPING = re.compile(r"\b(by|on|group_left|without|ignoring)\s*\(([^)]*)\)")
_AGGREGATED = re.compile(r"\bby \(([^)]+)\) \((?:(?:rate|increase)\()?(\w+)\b(?!\()")
_SELECTOR = re.compile(r"(\w+)\{([^}]*)\}")
_LEGEND = re.compile(r"\{\{\s*(\w+)\s*\}\}")
_NUMBERED_STATE = re.compile(
    r'(\d+) \* \(hpctrain_run_state\{[^}]*\bhpctrain_run_state="([^"]*)"\} == 1\)'
)
_WORDS = {"and", "or", "unless", "offset", "by", "on", "group_left"}

DASHBOARDS = packaged_dashboards()
PANELS = [(dashboard, panel) for dashboard in DASHBOARDS for panel in dashboard.panels()]
each_dashboard = pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda one: one.short_name)
each_panel = pytest.mark.parametrize(
    "panel", [panel for _, panel in PANELS], ids=[f"{p.short_name}-{q.title}" for p, q in PANELS]
)


def document(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((DIRECTORY / f"{name}.json").read_text())
    return content


def metrics_and_labels(query: str) -> tuple[set[str], set[str]]:
    """The metrics of a query, and the labels by which it groups or joins."""
    text = re.sub(r'"[^"]*"', '""', query)
    grouped = {one.strip() for _, names in _GROUPING.findall(text) for one in names.split(",")}
    text = _GROUPING.sub("", text)
    found = set()
    for names, name in _AGGREGATED.findall(query):
        labels = {one.strip() for one in names.split(",")}
        assert name not in LABELS or labels <= LABELS[name], f"{name} has not all of {labels}"
    for name, compared in _SELECTOR.findall(text):
        used = set(re.findall(r"(\w+)\s*[=!]", compared))
        assert used <= LABELS[name], f"{name} has no label {used - LABELS[name]}"
        found.add(name)
    text = re.sub(r"\[[^]]*\]|offset \w+", "", _SELECTOR.sub("", text))
    # What is left and not called is a metric without a selector.
    names = set(re.findall(r"\b([A-Za-z_]\w*)\b(?!\s*\()", text)) - _WORDS
    unknown = names - LABELS.keys()
    assert not unknown, f"no metrics: {unknown}"
    grouped -= {""}
    has = set().union(*(LABELS[name] for name in found | names))
    assert grouped <= has, f"no metric of the query has {grouped - has}"
    return found | names, grouped


def queries(dashboard: Dashboard) -> Iterator[str]:
    """Every query of a dashboard, those for choices included."""
    for panel in dashboard.panels():
        yield from panel.expressions
    yield from (one.expression for one in dashboard.annotations)
    yield from (one.selector for one in dashboard.variables)


@each_panel
def test_metrics_and_labels_exist(panel: Panel) -> None:
    for query in panel.queries:
        grouped = metrics_and_labels(query.expression)[1]
        in_legend = set(_LEGEND.findall(query.legend))
        assert in_legend <= grouped, f"the query sums over a label of its legend: {query}"
    # A column whose query has none of the labels would stand in a row of its own.
    in_columns = [metrics_and_labels(one.expression)[1] & {*panel.labels} for one in panel.columns]
    assert all(in_columns) and set().union(*in_columns) == {*panel.labels}


@pytest.mark.parametrize(
    "query",
    [
        "max by (run) (hpctrain_run_speed)",
        'max by (run) (hpctrain_run_loss{rank="0"})',
        "hpctrain_run_loss / hpctrain_run_lost",
        "max by (run, rank) (hpctrain_run_loss)",
        "max by (run, part) (hpctrain_run_loss) / hpctrain_run_step_part_seconds",
    ],
)
def test_a_query_with_a_wrong_name_is_found(query: str) -> None:
    with pytest.raises((AssertionError, KeyError)):
        metrics_and_labels(query)


@each_dashboard
def test_annotations_and_variables_exist(dashboard: Dashboard) -> None:
    for one in dashboard.annotations:
        assert set(_LEGEND.findall(one.text)) <= metrics_and_labels(one.expression)[1]
    for variable in dashboard.variables:
        (name,) = metrics_and_labels(variable.selector)[0]
        assert variable.label in LABELS[name]
        if not variable.several:
            assert variable.label in metrics_and_labels(ALIVE[variable.name])[1]


@pytest.mark.parametrize("name", DASHBOARD_NAMES)
def test_every_query_of_the_file_is_read(name: str) -> None:
    written = json.dumps(document(name))
    read = [*queries(read_dashboard(document(name)))]
    assert written.count('"expr": ') + written.count("label_values(") == len(read)
    assert all(json.dumps(one)[1:-1] in written for one in read)


def test_every_family_is_on_a_panel_and_other_exporters_are_listed() -> None:
    used = {
        name
        for dashboard in DASHBOARDS
        for query in queries(dashboard)
        for name in metrics_and_labels(query)[0]
    }
    assert OURS.keys() - used == NOT_SHOWN
    assert used - OURS.keys() == FOREIGN.keys()


@pytest.mark.parametrize("exporter", ["DCGM exporter", "node_exporter"])
def test_the_page_for_admins_lists_what_exporters_must_have(exporter: str) -> None:
    page = (Path(__file__).parents[3] / "docs" / "dashboards.md").read_text()
    (row,) = (line for line in page.splitlines() if line.startswith(f"| {exporter} |"))
    cells = [re.findall(r"`(\w+)`", cell) for cell in row.split("|")]
    assert {*cells[2]} <= FOREIGN_LABELS[exporter]
    assert {*cells[3]} == {*FOREIGN_METRICS[exporter]}


def test_every_state_has_its_number_text_and_colour() -> None:
    """What numbers the states names all of them, and the page and Grafana show their names."""
    written = [(one.expressions[0], one.mappings) for _, one in PANELS if one.queries]
    written += [(one.expression, one.mappings) for _, panel in PANELS for one in panel.columns]
    numbered = [
        ([(float(number), text) for number, text in _NUMBERED_STATE.findall(query)], mappings)
        for query, mappings in written
    ]
    numbered = [(states, mappings) for states, mappings in numbered if states]
    assert numbered
    for states, mappings in numbered:
        assert states == [(one.value, one.text) for one in mappings]
        assert sorted(text for _, text in states) == sorted(RunState)
    compared = [re.findall(r'hpctrain_run_state="([^"]*)"', query) for query, _ in written]
    assert {state for states in compared for state in states} == {*RunState}


@each_panel
def test_a_panel_is_complete(panel: Panel) -> None:
    assert panel.description.endswith(".") and panel.kind in get_args(PanelKind)
    assert bool(panel.columns) == (panel.kind == "table") != bool(panel.queries)
    for unit in (panel.unit, *(column.unit for column in panel.columns)):
        assert shown(12.5, unit)
    for thresholds in (panel.thresholds, *(column.thresholds for column in panel.columns)):
        first, *starts = [one.start for one in thresholds] or [None]
        assert first is None and starts == sorted(starts, key=float)
    names = [*panel.labels.values(), *(one.name for one in panel.columns if one.name)]
    assert len({*names}) == len(names)


@pytest.mark.parametrize("name", DASHBOARD_NAMES)
def test_a_description_ends_with_what_the_panel_needs(name: str) -> None:
    content = document(name)
    needs = panel_needs(content["uid"])
    panels = {one["title"]: one for one in content["panels"] if one["type"] != "row"}
    assert needs.keys() <= panels.keys()
    for title, panel in panels.items():
        text = panel["description"].removesuffix(description_end(needs.get(title, "")))
        assert text != panel["description"] or title not in needs, title
        assert "Needs " not in text and "empty without" not in text, title


def test_needs_are_those_of_packaged_dashboards() -> None:
    assert PANEL_NEEDS.keys() == {dashboard.uid for dashboard in DASHBOARDS}


@each_panel
def test_a_panel_of_another_exporter_needs_it(panel: Panel) -> None:
    for exporter in ("DCGM exporter", "node_exporter"):
        others = {*FOREIGN_METRICS[exporter]}
        if all(metrics_and_labels(query)[0] & others for query in panel.expressions):
            assert exporter in panel.needs


# -- the reader ----------------------------------------------------------------------------------


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_nulls(one) for key, one in value.items() if one is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", DASHBOARD_NAMES)
def test_what_grafana_exports_is_read_as_before(name: str) -> None:
    """Grafana leaves out nulls, and adds its own annotations to each dashboard that it saves."""
    exported = without_nulls(document(name))
    own = {
        "builtIn": 1,
        "datasource": {"uid": "-- Grafana --"},
        "iconColor": "rgba(0, 211, 255, 1)",
    }
    exported["annotations"]["list"].insert(0, own)
    assert read_dashboard(exported) == read_dashboard(document(name))


def test_a_dashboard_has_the_looks_and_times_of_grafana() -> None:
    run, fleet = (read_dashboard(document(name)) for name in ("run", "fleet"))
    panels = {panel.title: panel for panel in run.panels()}
    speed = panels["Model FLOPs utilization"]
    assert [(one.legend, one.dashed) for one in speed.queries] == [
        ("measured", False),
        ("planned", True),
    ]
    assert (speed.unit, speed.width, speed.height, speed.lowest) == ("percentunit", 6, 8, 0)
    step = panels["Step"]
    assert (step.queries[0].legend, step.unit, step.lowest) == ("", "short", None)
    assert [one.colour for one in panels["MFU of plan"].thresholds] == ["red", "orange", "green"]
    assert [(one.text, one.colour, one.step_seconds) for one in run.annotations] == [
        ("A launch began", "blue", 60),
        ("A launch ended: {{cause}}", "red", 60),
    ]
    assert (run.range_seconds, fleet.range_seconds) == (6 * 3600, 24 * 3600)
    assert [(one.name, one.several) for one in run.variables] == [("user", True), ("run", False)]


def test_a_table_has_the_names_the_order_and_the_limits_of_grafana() -> None:
    content = document("nodes")
    (written,) = (one for one in content["panels"] if one["title"] == "Memory by stage")
    options = written["transformations"][1]["options"]
    options["indexByName"] |= {"stage": -1, "Value #C": 0}
    options["excludeByName"]["Value #B"] = True
    options["renameByName"]["stage"] = "Part"
    dashboard = read_dashboard(content)
    (panel,) = (one for one in dashboard.panels() if one.title == "Memory by stage")
    assert [*panel.labels.items()] == [("stage", "Part"), ("run", "Run")]
    assert [column.name for column in panel.columns] == ["", "Peak over plan", "Peak"]
    assert [one.start for one in panel.columns[1].thresholds] == [None, 1.05, 1.2]


def test_a_variable_of_another_kind_is_refused() -> None:
    content = document("run")
    content["templating"]["list"][1]["query"]["query"] = "query_result(up)"
    with pytest.raises(ValueError, match="user has no label_values"):
        read_dashboard(content)


# -- what stands in queries and legends ------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["a", "b"], 'x{run=~"a|b"}'),
        ([], 'x{run=~"^$"}'),
        (["a.b"], r'x{run=~"a\\.b"}'),
        (['a"} or y{z="'], r'x{run=~"a\"\\}\\ or\\ y\\{z=\""}'),
    ],
)
def test_values_mean_themselves(values: list[str], expected: str) -> None:
    assert filled_in('x{run=~"$run"}', {"run": values}, 60.0) == expected


def test_the_range_is_put_in() -> None:
    assert filled_in("increase(x[$__range])", {}, 3600.0) == "increase(x[3600s])"


def test_a_legend_shows_labels() -> None:
    assert legend_of("{{run}} {{ axis }} planned", {"run": "a"}) == "a  planned"
