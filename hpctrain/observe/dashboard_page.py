"""The dashboards as one HTML page: the same panels, from the answers of Prometheus. Pure.

Belongs here: how each kind of panel is drawn. Does not belong here: panels and queries
(`hpctrain/observe/dashboards`), asking (`dashboard_data`), marks and axes (`charts`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime

from markupsafe import Markup

from hpctrain.observe.dashboard_data import DashboardData, PanelData, Series, legend_of
from hpctrain.observe.grafana_dashboard import Threshold, ValueMapping
from hpctrain.page.charts import (
    Axis,
    Entry,
    Line,
    Part,
    Row,
    Rule,
    line_chart,
    timeline,
)
from hpctrain.page.elements import Table, figure, fill, paragraph, prose, styled
from hpctrain.page.scales import Quantity, clock, compact_number, percent
from hpctrain.version import __version__

# Classes of charts.css for Grafana's names of colours; any other colour is neutral.
_CLASSES = {
    "green": "c3",
    "yellow": "c4",
    "orange": "c2",
    "red": "c8",
    "blue": "c1",
    "purple": "c7",
}
_CURVES = tuple(f"c{number}" for number in range(1, 9))
# More curves cannot be told apart; Grafana draws all of them, and shows the nearest.
_MOST_CURVES = 12
_MOST_NAMED = 6
_GRID_PIXELS = 26  # of one cell of Grafana's grid, less the heading


def write_dashboards(dashboards: Sequence[DashboardData]) -> str:
    """Write the page of dashboards, one below the other."""
    boxes = []
    for data in dashboards:
        chosen = [f"{_moment(data.begin)} to {_moment(data.end)} UTC"]
        for variable in data.dashboard.variables:
            values = data.chosen[variable.name]
            more = f" and {len(values) - _MOST_NAMED} more" if len(values) > _MOST_NAMED else ""
            named = ", ".join(values[:_MOST_NAMED]) or "none"
            chosen.append(f"{variable.title}: {named}{more}")
        rows = [
            {"title": row.title, "panels": [_box(one, data) for one in panels]}
            for row, panels in zip(data.dashboard.rows, data.rows, strict=True)
        ]
        one = data.dashboard
        boxes.append(
            {
                "anchor": one.short_name,
                "title": one.title,
                "description": one.description,
                "chosen": chosen,
                "rows": rows,
            }
        )
    return str(fill("dashboards.html.j2", dashboards=boxes, version=__version__))


def _moment(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M")


def _box(data: PanelData, dashboard: DashboardData) -> dict[str, object]:
    """Draw a panel, `width` of 24 columns wide."""
    panel = data.panel
    if data.refusals:
        body = paragraph(f"Prometheus refuses the query: {data.refusals[0]}", "nothing")
    elif data.is_empty:
        needs = f" Needs {panel.needs}." if panel.needs else ""
        body = paragraph(f"No data.{needs}", "nothing")
    else:
        match panel.kind:
            case "stat":
                body = _figures(data)
            case "bargauge":
                body = _bars(data)
            case "timeseries":
                body = _lines(data, dashboard)
            case "table":
                body = _table(data)
            case "state-timeline":
                body = _states(data, dashboard)
    return {
        "title": panel.title,
        "note": prose(panel.description),
        "body": body,
        "width": panel.width,
        "is_figure": panel.kind == "stat",
    }


# -- numbers -------------------------------------------------------------------------------------


def _sized(value: float, words: Sequence[str], base: float) -> str:
    """Write a value with the largest unit that leaves at least one before the point."""
    number = 0
    while abs(value) >= base and number < len(words) - 1:
        value, number = value / base, number + 1
    return f"{value:.3g} {words[number]}"


def _seconds(value: float) -> str:
    """Write seconds as milliseconds, seconds, or the two largest units of a duration."""
    if 0 < abs(value) < 1:
        return f"{value * 1000:.3g} ms"
    if abs(value) < 60:
        return f"{value:.3g} s"
    rounded = next((unit for least, unit in ((86400, 3600), (600, 60)) if abs(value) >= least), 1)
    return clock(round(value / rounded) * rounded)


# Formats of Grafana's units.
_FORMATS: Mapping[str, Callable[[float], str]] = {
    "s": _seconds,
    "bytes": lambda value: _sized(value, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"), 1024),
    "Bps": lambda value: _sized(value, ("B/s", "kB/s", "MB/s", "GB/s", "TB/s"), 1000),
    "reqps": lambda value: f"{compact_number(value)} req/s",
    "percentunit": percent,
    "percent": lambda value: f"{value:.3g}%",
    "celsius": lambda value: f"{value:.3g} °C",
    "watt": lambda value: _sized(value, ("W", "kW", "MW"), 1000),
    "sci": lambda value: f"{value:.2e}",
    "none": lambda value: f"{value:g}",
    "short": compact_number,
}


_QUANTITIES: Mapping[str, Quantity] = {"s": "seconds", "bytes": "bytes"}


def shown(value: float, unit: str, values: Sequence[ValueMapping] = ()) -> str:
    """Write a value in a unit of Grafana's, or as the text that stands for it."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    text = next((one.text for one in values if one.value == value), None)
    return text or _FORMATS[unit](value)


def _class_of(
    value: float, thresholds: Sequence[Threshold], values: Sequence[ValueMapping] = ()
) -> str:
    """Find the class of a value's colour; none without thresholds."""
    for one in values:
        if one.value == value:
            return _colour_class(one.colour)
    reached = [one for one in thresholds if one.start is None or value >= one.start]
    return _colour_class(reached[-1].colour) if reached else ""


def _colour_class(colour: str) -> str:
    """Find the class of a colour; Grafana's shades of one, such as `dark-red`, share it."""
    return _CLASSES.get(colour.rpartition("-")[2], "neutral")


# -- kinds of panels -----------------------------------------------------------------------------


def _figures(data: PanelData) -> Markup:
    panel = data.panel
    return Markup("").join(
        figure(
            shown(series.last, panel.unit, panel.mappings),
            _class_of(series.last, panel.thresholds, panel.mappings),
            legend_of(panel.queries[0].legend, series.labels),
        )
        for series in data.answers[0].series[:4]
    )


def _bars(data: PanelData) -> Markup:
    """Draw a bar per series with its value beside it; the longest one is as wide as its place."""
    panel, query = data.panel, data.panel.queries[0]
    known = [one for one in data.answers[0].series if math.isfinite(one.last)]
    longest = max((abs(one.last) for one in known), default=0.0) or 1.0
    return fill(
        "dashboard_bars.html.j2",
        bars=[
            {
                "name": legend_of(query.legend, one.labels) or "all",
                "value": shown(one.last, panel.unit),
                "percent": f"{100 * abs(one.last) / longest:.1f}",
                "style": _class_of(one.last, panel.thresholds) or "c1",
            }
            for one in known
        ],
    )


def _ago(begin: float, end: float) -> tuple[float, Axis]:
    """Choose the unit of the axis of time, in seconds: it counts back from the end."""
    span = end - begin
    for seconds, word in ((60.0, "min"), (3600.0, "h"), (86400.0, "d")):
        if span <= 60 * seconds or word == "d":
            break

    def text(value: float) -> str:
        return "now" if abs(value) < 1e-9 else f"{value:g} {word}"

    return seconds, Axis("", text)


def _lines(data: PanelData, dashboard: DashboardData) -> Markup:
    panel = data.panel
    unit_seconds, x_axis = _ago(dashboard.begin, dashboard.end)
    curves = []  # those with the largest newest values, in the order of the answer
    for query, answer in zip(panel.queries, data.answers, strict=True):
        by_size = sorted(answer.series, key=lambda one: one.last, reverse=True)
        largest = by_size[:_MOST_CURVES]
        curves += [(query, one) for one in answer.series if one in largest]
    # What is planned or limits has the colour of what is measured, but where a single measured
    # curve leaves grey to the other one.
    solid = [series for query, series in curves if not query.dashed]
    colours = {id(one): _CURVES[number % len(_CURVES)] for number, one in enumerate(solid)}
    of_labels = {tuple(one.labels.items()): colours[id(one)] for one in solid if len(solid) > 1}
    begin = (dashboard.begin - dashboard.end) / unit_seconds
    drawn = []
    for query, series in curves:
        labels = tuple(series.labels.items())
        colour = "" if query.dashed else colours[id(series)]
        # The axis shows the whole of the chosen time.
        points = [(begin, None), *_with_gaps(series, dashboard, unit_seconds), (0.0, None)]
        drawn.append(
            Line(
                legend_of(query.legend, series.labels) or panel.title,
                points,
                colour or of_labels.get(labels, "neutral"),
                query.dashed,
            )
        )
    left_out = sum(len(one.series) for one in data.answers) - len(curves)
    rules = []
    for annotated in dashboard.annotations:
        colour = _colour_class(annotated.annotation.colour)
        for series in annotated.answer.series:
            text = legend_of(annotated.annotation.text, series.labels)
            for time, _ in series.points:
                place = (time - dashboard.end) / unit_seconds
                rules.append(Rule(place, f"{text}, {_moment(time)}", colour=colour))
    y_axis = Axis(
        "",
        _FORMATS[panel.unit],
        quantity=_QUANTITIES.get(panel.unit, "number"),
        from_zero=panel.lowest == 0,
    )
    height = _GRID_PIXELS * panel.height - 40
    chart = line_chart(drawn, label=panel.title, x=x_axis, y=y_axis, rules=rules, height=height)
    more = paragraph(f"{left_out} more are not drawn.", "nothing") if left_out else ""
    return chart + more


def _with_gaps(
    series: Series, dashboard: DashboardData, unit_seconds: float
) -> list[tuple[float, float | None]]:
    """List the points of a curve before now, with a gap where points are missing."""
    points: list[tuple[float, float | None]] = []
    before = None
    for time, value in series.points:
        place = (time - dashboard.end) / unit_seconds
        if before is not None and time - before > 1.5 * dashboard.step_seconds:
            points.append((place, None))
        points.append((place, value))
        before = time
    return points


def _states(data: PanelData, dashboard: DashboardData) -> Markup:
    panel = data.panel
    step = dashboard.step_seconds
    rows, seen = [], set()
    for series in sorted(data.answers[0].series, key=lambda one: sorted(one.labels.items())):
        parts: list[Part] = []
        for begin, end, value in _stretches(series, step):
            seen.add(value)
            text = shown(value, "none", panel.mappings)
            parts.append(
                Part(
                    begin - dashboard.begin,
                    min(end + step, dashboard.end) - begin,
                    _class_of(value, (), panel.mappings) or "neutral",
                    f"{text}, {_moment(begin)} to {_moment(end)}",
                )
            )
        rows.append(Row(legend_of(panel.queries[0].legend, series.labels), parts))
    entries = [
        Entry(one.text, _colour_class(one.colour)) for one in panel.mappings if one.value in seen
    ]
    return timeline(
        rows,
        label=panel.title,
        end=dashboard.end - dashboard.begin,
        entries=entries,
        unit=f"since {_moment(dashboard.begin)} UTC",
    )


def _stretches(series: Series, step_seconds: float) -> list[tuple[float, float, float]]:
    """Join equal neighbours: (begin, end, value)."""
    found: list[tuple[float, float, float]] = []
    for time, value in series.points:
        if found:
            begin, end, same = found[-1]
            if same == value and time - end <= 1.5 * step_seconds:
                found[-1] = (begin, time, value)
                continue
        found.append((time, time, value))
    return found


def _table(data: PanelData) -> Markup:
    """Write a table: series of all columns with equal labels are one row.

    A series without one of the labels belongs to all rows with its other ones.
    """
    panel = data.panel
    labels = list(panel.labels)
    named = [column for column in panel.columns if column.name]
    rows: dict[tuple[str, ...], dict[str, float]] = {}
    for column, answer in zip(panel.columns, data.answers, strict=True):
        for series in answer.series:
            has = [(n, series.labels[one]) for n, one in enumerate(labels) if one in series.labels]
            found = [row for row in rows if all(row[number] == value for number, value in has)]
            for row in found or [tuple(series.labels.get(label, "") for label in labels)]:
                rows.setdefault(row, {})[column.name] = series.last
    styles = dict.fromkeys(panel.labels.values(), "name")
    styles |= {column.name: "number" for column in named}
    cells = []
    for row, values in sorted(rows.items()):
        line = [*row]
        for column in named:
            text = style = ""
            if (value := values.get(column.name)) is not None:
                text = shown(value, column.unit, column.mappings)
                style = _class_of(value, column.thresholds, column.mappings)
            line.append(styled(f"tone {style}", text) if style else text)
        cells.append(line)
    return Table(styles, cells).__html__()
