"""Read Grafana's JSON of a dashboard: what a page of the same panels asks and draws. Pure.

People edit dashboards in Grafana and export them into `dashboards/`; no code writes them. What only
Grafana's own drawing needs is not read: places, legends, stacks of lines.
Belongs here: the records of a dashboard, their one reader, and what panels need for any data.
Does not belong here: asking Prometheus (`dashboard_data`), drawing (`dashboard_page`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

_DCGM, _NODE = "DCGM exporter", "node_exporter"
_PLAN = "a plan that predicts speed: GPUs of a known type"
_EARLY_END = "a launch that ended early"

# Titles of panels by dashboard and by what they need.
PANEL_NEEDS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "hpctrain-fleet": {
        "`hpctrain watch --act` from cron": ("Last watch",),
        "an alert that fires": ("Alerts that fire",),
        _PLAN: ("Step time over plan",),
        _EARLY_END: ("Time lost, by cause", "Ends of launches, by cause"),
        "a service": ("Every service",),
    },
    "hpctrain-run": {
        _PLAN: ("MFU of plan", "Model FLOPs utilization"),
        _EARLY_END: (
            *("Ends of launches, by cause", "Time lost, by cause"),
            "Retries left, by cause",
        ),
        "a budget or a plan with a price": ("Money so far", "Budget used"),
    },
    "hpctrain-communication": {
        "a measured step": (
            *("Share, longest", "Bytes of a step, most", "Bandwidth, lowest"),
            *("Share of a step in messages", "Share of a step, by axis"),
            *("Seconds of a step in messages", "Bytes of a step", "Bandwidth"),
            *("Measured over planned", "Measured and planned"),
        ),
        _PLAN: ("Share as planned, longest",),
    },
    "hpctrain-nodes": {
        _DCGM: (
            *("GPU utilization", "Tensor cores active", "GPU memory used"),
            *("Memory bandwidth active", "NVLink sent", "Temperature", "Power"),
        ),
        f"{_DCGM}, and a GPU with an XID error": ("Last XID",),
        _NODE: ("CPUs busy", "Host memory used", "InfiniBand sent"),
        f"{_DCGM} and {_NODE}": ("Every node",),
    },
    "hpctrain-service": {
        "an engine that answers the exporter": (
            *("Worst of what is promised", "In queues", "Fullest KV cache"),
            *("Time to the first token", "Time per further token", "Time of a request"),
            *("Slow requests", "Requests in engines", "Time in the queue", "Tokens per second"),
            *("KV cache and prefix cache", "Requests put back"),
        ),
        "a replica that has ended": ("Ends of replicas, by cause",),
        "a profile with prices": ("Money so far", "Money per hour", "Planned per hour"),
    },
}


def panel_needs(uid: str) -> dict[str, str]:
    """Return what panels of a dashboard need, by their titles; others need nothing."""
    grouped = PANEL_NEEDS.get(uid, {})
    return {title: need for need, titles in grouped.items() for title in titles}


# -- Read Grafana's JSON of a dashboard: what a page of the same panels asks and draws ----------


DIRECTORY = Path(__file__).with_name("dashboards")
# Grafana's own names. "stat" and "bargauge" are about now; "table" has one row per run or node and
# one column per query; "state-timeline" has one row per run, coloured by its state over time.
PanelKind = Literal["timeseries", "stat", "bargauge", "table", "state-timeline"]
_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_CHOICES = re.compile(r"label_values\((.+), *(\w+)\)")


def description_end(need: str) -> str:
    """Write what follows a panel's description in Grafana; nothing for a panel without a need."""
    return f" Needs {need}; empty without." if need else ""


@dataclass(frozen=True)
class Threshold:
    """A colour of Grafana's from `start` on; None is below all numbers."""

    colour: str
    start: float | None = None


@dataclass(frozen=True)
class ValueMapping:
    """The text and the colour that stand for a number."""

    value: float
    text: str
    colour: str


@dataclass(frozen=True)
class Query:
    """One PromQL expression. `legend` names its series, a text with `{{label}}`.

    `dashed`: a planned or limiting value beside measured ones.
    """

    expression: str
    legend: str = ""
    dashed: bool = False


@dataclass(frozen=True)
class Column:
    """One column of a table, from a query of its own; without a name its values are not shown."""

    expression: str
    name: str = ""
    unit: str = "short"
    thresholds: tuple[Threshold, ...] = ()
    mappings: tuple[ValueMapping, ...] = ()


@dataclass(frozen=True)
class Panel:
    """One panel; `unit` is an id of Grafana's, width and height are cells of its grid.

    A table has `columns`, and before them a column for each of `labels` with its heading; rows are
    joined by all labels that the columns share. Other kinds have `queries`. `needs` is that of
    `panel_needs`, and not repeated in the description.
    """

    title: str
    description: str
    kind: PanelKind
    queries: tuple[Query, ...] = ()
    columns: tuple[Column, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    unit: str = "short"
    width: int = 8
    height: int = 8
    thresholds: tuple[Threshold, ...] = ()
    mappings: tuple[ValueMapping, ...] = ()
    lowest: float | None = None
    needs: str = ""

    @property
    def expressions(self) -> tuple[str, ...]:
        """Every query of the panel."""
        asked: tuple[Query | Column, ...] = (*self.queries, *self.columns)
        return tuple(one.expression for one in asked)


@dataclass(frozen=True)
class PanelRow:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class DashboardVariable:
    """A choice at the top: the values that a label has in the series of a selector."""

    name: str
    title: str
    selector: str
    label: str
    several: bool = True


@dataclass(frozen=True)
class Annotation:
    """Vertical lines at the times when an expression is not zero, looked for at each step."""

    expression: str
    text: str
    colour: str
    step_seconds: int


@dataclass(frozen=True)
class Dashboard:
    """One dashboard. `uid` is what links point to, and never changes."""

    uid: str
    title: str
    description: str
    variables: tuple[DashboardVariable, ...]
    rows: tuple[PanelRow, ...]
    annotations: tuple[Annotation, ...] = ()
    range_seconds: int = 6 * 3600

    @property
    def short_name(self) -> str:
        """Its name on a command line and of its file."""
        return self.uid.removeprefix("hpctrain-")

    def panels(self) -> Iterator[Panel]:
        """Yield all panels, row by row."""
        for row in self.rows:
            yield from row.panels


def read_dashboard(document: Mapping[str, Any]) -> Dashboard:
    """Read a dashboard. Raises KeyError or ValueError for what a page cannot have."""
    uid = document["uid"]
    needs = panel_needs(uid)
    rows: list[tuple[str, list[Panel]]] = []
    for panel in document["panels"]:
        if panel["type"] == "row":
            rows.append((panel["title"], []))
        else:
            rows[-1][1].append(_panel(panel, needs.get(panel["title"], "")))
    variables = []
    for one in document["templating"]["list"]:
        if one["type"] == "query":
            choices = _CHOICES.fullmatch(one["query"]["query"])
            if choices is None:
                raise ValueError(f"variable {one['name']} has no label_values(selector, label)")
            selector, label = choices.groups()
            variables.append(
                DashboardVariable(one["name"], one["label"], selector, label, one["multi"])
            )
    return Dashboard(
        uid,
        document["title"],
        document["description"],
        tuple(variables),
        tuple(PanelRow(title, tuple(panels)) for title, panels in rows),
        tuple(
            Annotation(one["expr"], one["textFormat"], one["iconColor"], _seconds(one["step"]))
            for one in document["annotations"]["list"]
            if not one.get("builtIn")  # Grafana's own, which it adds to all that it saves
        ),
        _seconds(document["time"]["from"].removeprefix("now-")),
    )


def _seconds(text: str) -> int:
    return int(text[:-1]) * _UNIT_SECONDS[text[-1]]


def _panel(written: Mapping[str, Any], need: str) -> Panel:
    kind: PanelKind = written["type"]
    defaults = written["fieldConfig"]["defaults"]
    columns, labels = _table(written) if kind == "table" else ((), {})
    queries = []
    if kind != "table":
        own = _overrides(written, "byFrameRefID")
        for target in written["targets"]:
            legend = "" if target["legendFormat"] == "__auto" else target["legendFormat"]
            style = own.get(target["refId"], {}).get("custom.lineStyle", {})
            queries.append(Query(target["expr"], legend, style.get("fill") == "dash"))
    return Panel(
        written["title"],
        written["description"].removesuffix(description_end(need)),
        kind,
        tuple(queries),
        columns,
        labels,
        defaults.get("unit", "short"),
        written["gridPos"]["w"],
        written["gridPos"]["h"],
        _thresholds(defaults),
        _mappings(defaults),
        defaults.get("min"),
        need,
    )


def _thresholds(properties: Mapping[str, Any]) -> tuple[Threshold, ...]:
    steps = properties.get("thresholds", {}).get("steps", ())
    return tuple(Threshold(step["color"], step.get("value")) for step in steps)


def _mappings(properties: Mapping[str, Any]) -> tuple[ValueMapping, ...]:
    """Read which numbers have a text, in the order of their index."""
    written = [
        (result["index"], ValueMapping(float(value), result["text"], result["color"]))
        for mapping in properties.get("mappings", ())
        for value, result in mapping["options"].items()
    ]
    return tuple(mapping for _, mapping in sorted(written, key=lambda one: one[0]))


def _overrides(written: Mapping[str, Any], matcher: str) -> dict[str, dict[str, Any]]:
    """Read the properties that differ from the panel's, by the query or column that has them."""
    found: dict[str, dict[str, Any]] = {}
    for override in written["fieldConfig"]["overrides"]:
        if override["matcher"]["id"] == matcher:
            properties = {one["id"]: one["value"] for one in override["properties"]}
            found.setdefault(override["matcher"]["options"], {}).update(properties)
    return found


def _table(written: Mapping[str, Any]) -> tuple[tuple[Column, ...], dict[str, str]]:
    """Read the columns of values, hidden ones first, and the labels with their headings.

    Grafana merges the answers into one table, and then names, hides and orders its fields.
    """
    own = _overrides(written, "byName")
    (organized,) = (one["options"] for one in written["transformations"] if one["id"] == "organize")
    hidden, places = organized["excludeByName"], organized["indexByName"]
    names = {key: name for key, name in organized["renameByName"].items() if not hidden.get(key)}
    columns = []
    for target in written["targets"]:
        # With a single query Grafana calls its values so.
        key = f"Value #{target['refId']}" if len(written["targets"]) > 1 else "Value"
        name = names.pop(key, "")
        properties = own.get(name, {})
        column = Column(
            target["expr"],
            name,
            properties.get("unit", "short"),
            _thresholds(properties),
            _mappings(properties),
        )
        columns.append((places[key] if name else -1, column))
    columns.sort(key=lambda one: one[0])
    labels = sorted(names, key=lambda label: places[label])
    return tuple(column for _, column in columns), {label: names[label] for label in labels}
