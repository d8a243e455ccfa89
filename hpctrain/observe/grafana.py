"""Write dashboards as Grafana's JSON, by Grafana's own builders (grafana-foundation-sdk).

The JSON in `dashboards/` is packaged and written by `make golden`, so the builders are needed for
development only and nothing else imports this module. Ids of panels are made of their titles: a
link to a panel stays valid when others are added before it.
Belongs here: Grafana's records. Does not belong here: panels and queries (`panels`), files of
provisioning (`hpctrain.actions.monitoring`).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from string import ascii_uppercase
from typing import Any, TypeVar

from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    prometheus,
    stat,
    statetimeline,
    timeseries,
)
from grafana_foundation_sdk.builders import dashboard as board
from grafana_foundation_sdk.builders import table as table_panel
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from hpctrain.observe.panel_types import (
    GRID_COLUMNS,
    Column,
    DashboardPlan,
    Marks,
    Panel,
    PanelRow,
    Query,
    ShownValue,
    Threshold,
    Variable,
)
from hpctrain.observe.run_panels import MARK_SECONDS

PACKAGED = Path(__file__).parent / "dashboards"
_SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
_TAG = "hpctrain"
_RUN_LINK = "/d/hpctrain-run?var-run=${__value.raw}&${datasource:queryparam}&${__url_time_range}"
_SERVICE_LINK = _RUN_LINK.replace("hpctrain-run?var-run", "hpctrain-service?var-service")
_GRAY = "#8e8e8e"  # Grafana has no name for it

_Builder = TypeVar(
    "_Builder",
    timeseries.Panel,
    stat.Panel,
    bargauge.Panel,
    table_panel.Panel,
    statetimeline.Panel,
)
AnyPanel = timeseries.Panel | stat.Panel | bargauge.Panel | table_panel.Panel | statetimeline.Panel


def dashboard_json(plan: DashboardPlan) -> str:
    """Write one dashboard as the text of its file."""
    built = _dashboard(plan).build()
    document: dict[str, Any] = json.loads(json.dumps(built, cls=JSONEncoder))
    for written, marks in zip(document["annotations"]["list"], plan.marks, strict=True):
        # Fields of the Prometheus plugin, which Grafana's common schema leaves open.
        written |= {
            "titleFormat": marks.title,
            "textFormat": marks.text,
            "step": f"{MARK_SECONDS}s",
        }
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _dashboard(plan: DashboardPlan) -> board.Dashboard:
    to_others = board.DashboardLink("Other dashboards").type(models.DashboardLinkType.DASHBOARDS)
    written = (
        board.Dashboard(plan.title)
        .uid(plan.uid)
        .description(plan.description)
        .tags([_TAG])
        .timezone("browser")
        .readonly()
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .time(f"now-{plan.hours}h", "now")
        .refresh(plan.refresh)
        .with_variable(
            board.DatasourceVariable("datasource").label("Prometheus").type("prometheus")
        )
        .link(to_others.tags([_TAG]).as_dropdown(True).keep_time(True).include_vars(True))
        .annotations([_marks(one) for one in plan.marks])
    )
    for variable in plan.variables:
        written.with_variable(_variable(variable))
    top = 0
    for row in plan.rows:
        heading = models.GridPos(h=1, w=GRID_COLUMNS, x=0, y=top)
        written.with_row(board.Row(row.title).id(_id(row.title)).grid_pos(heading))
        for panel, place in places(row, top + 1):
            written.with_panel(_panel(panel).grid_pos(place))
            top = max(top, place.y + place.h)
    return written


def places(row: PanelRow, top: int) -> Iterator[tuple[Panel, models.GridPos]]:
    """Place the panels of a row from left to right, in as many lines as they need."""
    left, tallest = 0, 0
    for panel in row.panels:
        if left + panel.width > GRID_COLUMNS:
            left, top, tallest = 0, top + tallest, 0
        yield panel, models.GridPos(h=panel.height, w=panel.width, x=left, y=top)
        left, tallest = left + panel.width, max(tallest, panel.height)


def _id(title: str) -> int:
    return zlib.crc32(title.encode()) % 1_000_000 + 1


def _variable(variable: Variable) -> board.QueryVariable:
    """Write a choice; the first value is chosen where only one can be, else all of them."""
    query = f"label_values({variable.selector}, {variable.label})"
    written = (
        board.QueryVariable(variable.name)
        .label(variable.title)
        .datasource(_SOURCE)
        .query({"query": query, "refId": f"{variable.name}-choices"})
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .multi(variable.several)
        .include_all(variable.several)
    )
    if variable.several:
        written.current(models.VariableOption(selected=True, text=["All"], value=["$__all"]))
    return written


def _marks(marks: Marks) -> board.AnnotationQuery:
    return (
        board.AnnotationQuery()
        .name(marks.title)
        .datasource(_SOURCE)
        .enable(True)
        .hide(False)
        .icon_color(marks.colour)
        .expr(marks.expression)
    )


# -- panels --------------------------------------------------------------------------------------


def _panel(panel: Panel) -> AnyPanel:
    match panel.kind:
        case "lines":
            return _lines(panel)
        case "stat":
            return _stat(panel)
        case "bars":
            return _bars(panel)
        case "table":
            return _table(panel)
        case "states":
            return _states(panel)


def _shared(builder: _Builder, panel: Panel) -> _Builder:
    """Fill what panels of all kinds have."""
    needs = f" Needs {panel.needs}; empty without." if panel.needs else ""
    builder.id(_id(panel.title)).title(panel.title).description(panel.description + needs)
    builder.datasource(_SOURCE).unit(panel.unit).thresholds(_thresholds(panel.thresholds))
    if panel.lowest is not None:
        builder.min(panel.lowest)
    if panel.shown_values:
        builder.mappings([_mapping(panel.shown_values)])
    for letter, query in zip(ascii_uppercase, panel.queries, strict=False):
        builder.with_target(_target(letter, query, now=panel.kind in ("stat", "bars")))
    return builder


def _target(letter: str, query: Query, *, now: bool) -> prometheus.Dataquery:
    written = prometheus.Dataquery().ref_id(letter).datasource(_SOURCE).expr(query.expression)
    written.legend_format(query.legend or "__auto")
    return written.instant() if now else written.range()


def _colour(name: str) -> str:
    return _GRAY if name == "gray" else name


def _steps(thresholds: tuple[Threshold, ...]) -> list[models.Threshold]:
    return [models.Threshold(value=one.start, color=_colour(one.colour)) for one in thresholds]


def _thresholds(thresholds: tuple[Threshold, ...]) -> board.ThresholdsConfig:
    steps = _steps(thresholds or (Threshold("gray"),))
    return board.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps)


def _mapping(values: tuple[ShownValue, ...]) -> models.ValueMap:
    return models.ValueMap(
        {
            str(one.value): models.ValueMappingResult(
                text=one.text, color=_colour(one.colour), index=number
            )
            for number, one in enumerate(values)
        }
    )


def _last_value() -> common.ReduceDataOptions:
    return common.ReduceDataOptions().calcs(["lastNotNull"]).values(False)


def _lines(panel: Panel) -> timeseries.Panel:
    written = _shared(timeseries.Panel(), panel)
    written.color_scheme(board.FieldColor().mode(models.FieldColorModeId.PALETTE_CLASSIC))
    written.line_width(1).fill_opacity(30 if panel.stacked else 0)
    written.show_points(common_models.VisibilityMode.AUTO)
    written.tooltip(
        common.VizTooltipOptions()
        .mode(common_models.TooltipDisplayMode.MULTI)
        .sort(common_models.SortOrder.DESCENDING)
    )
    written.legend(
        common.VizLegendOptions()
        .show_legend(True)
        .display_mode(common_models.LegendDisplayMode.LIST)
        .placement(common_models.LegendPlacement.BOTTOM)
        .calcs([])
    )
    if panel.stacked:
        written.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL))
    for letter, query in zip(ascii_uppercase, panel.queries, strict=False):
        if query.dashed:
            style = {"fill": "dash", "dash": [6, 6]}
            written.override_by_query(
                letter, [models.DynamicConfigValue("custom.lineStyle", style)]
            )
    return written


def _stat(panel: Panel) -> stat.Panel:
    by_threshold = board.FieldColor().mode(models.FieldColorModeId.THRESHOLDS)
    return (
        _shared(stat.Panel(), panel)
        .color_scheme(by_threshold)
        .reduce_options(_last_value())
        .graph_mode(common_models.BigValueGraphMode.NONE)
        .color_mode(common_models.BigValueColorMode.VALUE)
        .text_mode(
            common_models.BigValueTextMode.VALUE_AND_NAME
            if panel.queries[0].legend
            else common_models.BigValueTextMode.VALUE
        )
    )


def _bars(panel: Panel) -> bargauge.Panel:
    return (
        _shared(bargauge.Panel(), panel)
        .color_scheme(board.FieldColor().mode(models.FieldColorModeId.THRESHOLDS))
        .reduce_options(_last_value())
        .orientation(common_models.VizOrientation.HORIZONTAL)
        .display_mode(common_models.BarGaugeDisplayMode.BASIC)
        .show_unfilled(False)
    )


def _states(panel: Panel) -> statetimeline.Panel:
    return (
        _shared(statetimeline.Panel(), panel)
        .color_scheme(board.FieldColor().mode(models.FieldColorModeId.THRESHOLDS))
        .merge_values(True)
        .show_value(common_models.VisibilityMode.NEVER)
        .row_height(0.8)
        .line_width(0)
        .fill_opacity(80)
    )


def _table(panel: Panel) -> table_panel.Panel:
    """Write a table: a query per column, merged by the labels that they share."""
    written = _shared(table_panel.Panel(), panel).show_header(True)
    written.cell_height(common_models.TableCellHeight.SM)
    hidden, names = {"Time": True}, {}
    order: dict[str, int] = {}
    for letter, column in zip(ascii_uppercase, panel.columns, strict=False):
        query = prometheus.Dataquery().ref_id(letter).datasource(_SOURCE).expr(column.expression)
        written.with_target(query.instant().format(PromQueryFormat.TABLE))
        for label in column.labels:
            names[label] = label.capitalize()
            order.setdefault(label, len(order))
        # With a single query Grafana calls its values so.
        value = f"Value #{letter}" if len(panel.columns) > 1 else "Value"
        if not column.name:
            hidden[value] = True
            continue
        names[value] = column.name
        order[value] = len(order)
        written.override_by_name(column.name, _column_properties(column))
    written.override_by_name(
        "Run", [models.DynamicConfigValue("links", [{"title": "One run", "url": _RUN_LINK}])]
    )
    if "service" in names:
        to_service = [{"title": "One service", "url": _SERVICE_LINK}]
        links = models.DynamicConfigValue("links", to_service)
        written.override_by_name("Service", [links])
    written.with_transformation(models.DataTransformerConfig("merge", options={}))
    options = {"excludeByName": hidden, "renameByName": names, "indexByName": order}
    written.with_transformation(models.DataTransformerConfig("organize", options=options))
    return written


def _column_properties(column: Column) -> list[models.DynamicConfigValue]:
    properties = [models.DynamicConfigValue("unit", column.unit)]
    if column.thresholds:
        steps = [step.to_json() for step in _steps(column.thresholds)]
        properties.append(
            models.DynamicConfigValue("thresholds", {"mode": "absolute", "steps": steps})
        )
    if column.shown_values:
        mapping = _mapping(column.shown_values)
        properties.append(models.DynamicConfigValue("mappings", [mapping]))
    if column.thresholds or column.shown_values:
        properties.append(models.DynamicConfigValue("custom.cellOptions", {"type": "color-text"}))
    return properties
