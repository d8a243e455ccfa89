"""Panels of the dashboards: every metric, label, state and unit in them is one that exists."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from hpctrain.actions.state import RunState
from hpctrain.observe.families import FAMILIES
from hpctrain.observe.panel_data import filled_in, legend_of
from hpctrain.observe.panel_queries import STATES
from hpctrain.observe.panel_types import GRID_COLUMNS, DashboardPlan, Panel
from hpctrain.observe.panels import DASHBOARDS, FOREIGN_METRICS
from hpctrain.report.dashboard_page import shown

LABELS = {family.sample_name: {*family.all_labels} for family in FAMILIES}
# Prometheus' own and other exporters', as far as panels use them.
ALERT_LABELS = {"alertname", "alertstate", "severity", "run", "node"}
FOREIGN_LABELS = {
    "Prometheus": ALERT_LABELS,
    "DCGM exporter": {"Hostname"},
    "node_exporter": {"instance", "mode"},
}
LABELS |= {name: FOREIGN_LABELS[who] for who, names in FOREIGN_METRICS.items() for name in names}
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
_SELECTOR = re.compile(r"(\w+)\{([^}]*)\}")
_WORDS = {"and", "or", "unless", "offset", "by", "on", "group_left"}

PANELS = [(plan, panel) for plan in DASHBOARDS for panel in plan.panels()]
each_panel = pytest.mark.parametrize(
    "panel", [panel for _, panel in PANELS], ids=[f"{p.short_name}-{q.title}" for p, q in PANELS]
)


def metrics_and_labels(query: str) -> tuple[set[str], set[str]]:
    """The metrics of a query, and the labels by which it groups or joins."""
    text = re.sub(r'"[^"]*"', '""', query)
    grouped = {one.strip() for _, names in _GROUPING.findall(text) for one in names.split(",")}
    text = _GROUPING.sub("", text)
    found = set()
    for name, compared in _SELECTOR.findall(text):
        used = set(re.findall(r"(\w+)\s*[=!]", compared))
        assert used <= LABELS[name], f"{name} has no label {used - LABELS[name]}"
        found.add(name)
    text = re.sub(r"\[[^]]*\]|offset \w+", "", _SELECTOR.sub("", text))
    # What is left and not called is a metric without a selector.
    names = set(re.findall(r"\b([A-Za-z_]\w*)\b(?!\s*\()", text)) - _WORDS
    unknown = names - LABELS.keys()
    assert not unknown, f"no metrics: {unknown}"
    return found | names, grouped - {""}


def queries(panel: Panel) -> list[tuple[str, set[str]]]:
    """Each query with the labels that its legend or its columns show."""
    legends = [
        (one.expression, set(re.findall(r"\{\{(\w+)\}\}", one.legend))) for one in panel.queries
    ]
    return [*legends, *((one.expression, set(one.labels)) for one in panel.columns)]


@each_panel
def test_metrics_and_labels_exist(panel: Panel) -> None:
    for query, in_legend in queries(panel):
        metrics, grouped = metrics_and_labels(query)
        has = set().union(*(LABELS[name] for name in metrics))
        assert grouped | in_legend <= has, query
        assert in_legend <= grouped, f"the query sums over a label of its legend: {query}"


@pytest.mark.parametrize(
    "query",
    [
        "max by (run) (hpctrain_run_speed)",
        'max by (run) (hpctrain_run_loss{rank="0"})',
        "hpctrain_run_loss / hpctrain_run_lost",
    ],
)
def test_a_query_with_a_wrong_name_is_found(query: str) -> None:
    with pytest.raises((AssertionError, KeyError)):
        metrics_and_labels(query)


@pytest.mark.parametrize("plan", DASHBOARDS, ids=lambda plan: plan.short_name)
def test_marks_and_variables_exist(plan: DashboardPlan) -> None:
    for marks in plan.marks:
        metrics_and_labels(marks.expression)
    for variable in plan.variables:
        (name,) = metrics_and_labels(variable.selector)[0]
        assert variable.label in LABELS[name]
    known = {variable.name for variable in plan.variables} | {"__range"}
    for panel in plan.panels():
        for query in panel.expressions:
            assert set(re.findall(r"\$([A-Za-z_]\w*)", query)) <= known


def test_every_family_is_on_a_panel() -> None:
    on_panels = {
        name
        for plan in DASHBOARDS
        for query in (
            *(query for panel in plan.panels() for query in panel.expressions),
            *(marks.expression for marks in plan.marks),
        )
        for name in metrics_and_labels(query)[0]
    }
    ours = {family.sample_name for family in FAMILIES}
    assert ours - on_panels == NOT_SHOWN


def test_every_state_has_a_colour() -> None:
    assert Counter(one.text for one in STATES) == Counter(str(state) for state in RunState)
    assert len({one.value for one in STATES}) == len(STATES)


@each_panel
def test_a_panel_is_complete(panel: Panel) -> None:
    assert panel.description.endswith(".") and 0 < panel.width <= GRID_COLUMNS
    assert bool(panel.columns) == (panel.kind == "table") != bool(panel.queries)
    for unit in (panel.unit, *(column.unit for column in panel.columns)):
        assert shown(12.5, unit)
    starts = [one.start for one in panel.thresholds]
    assert not starts or (starts[0] is None and starts[1:] == sorted(starts[1:]))


@pytest.mark.parametrize("plan", DASHBOARDS, ids=lambda plan: plan.short_name)
def test_titles_are_unique(plan: DashboardPlan) -> None:
    titles = Counter([panel.title for panel in plan.panels()] + [row.title for row in plan.rows])
    # Ids are made of titles, of rows as well.
    assert not [title for title, count in titles.items() if count > 1]


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
