"""Charts as inline SVG: lines, bars, waterfall, timeline, heat map, each with its legend. Pure.

A chart is as wide as its place. Places along x are percentages and texts have a size of their own,
so a chart can be read at 320 and at 1400 pixels; only curves are stretched, with lines that keep
their width. Colours are classes (`c1` to `c8`, `neutral`), which `charts.css` defines for light,
dark and print. Every text is escaped, and no chart contains a script or a reference.
Belongs here: marks, axes, legends. Does not belong here: ranges and ticks (`scales`), which figures
a chart has (`hpctrain.report`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from markupsafe import Markup, escape

from hpctrain.page.scales import (
    Format,
    Quantity,
    Scale,
    clock,
    compact_number,
    is_drawable,
    log_scale,
    scale_of,
    time_scale,
)
from hpctrain.telemetry.thinning import Point, thinned

# Units of a curve's own coordinates, which are stretched to its place.
_CURVE_WIDTH = 2000
_ROW_PIXELS = 26
_AXIS_PIXELS = 40
_ROOM_FOR_TEXT = 1.12
# Labels of events that are nearer to each other would overlap.
_LABEL_SHARE = 0.13


@dataclass(frozen=True)
class Line:
    """One curve; `colour` is a class: `c1` to `c8` or `neutral`. A missing value is a gap.

    `dots`: each value is a dot of its own.
    """

    name: str
    points: Sequence[Point]
    colour: str = "c1"
    dashed: bool = False
    faint: bool = False
    dots: bool = False

    @property
    def entry(self) -> Entry:
        """Its entry in a legend."""
        return Entry(self.name, self.colour, self.dashed, self.faint, self.dots)


@dataclass(frozen=True)
class Rule:
    """A vertical line at x with a tooltip, such as the beginning of a launch."""

    x: float
    tooltip: str
    label: str = ""
    colour: str = "neutral"


@dataclass(frozen=True)
class Level:
    """A horizontal line, such as a planned value."""

    y: float
    label: str


@dataclass(frozen=True)
class Bar:
    """One horizontal bar; `detail` is its tooltip, `mark` another value shown as a short line."""

    label: str
    value: float | None
    detail: str = ""
    colour: str = "c1"
    mark: float | None = None


@dataclass(frozen=True)
class Part:
    """One part of a timeline: from `start`, `length` long; `always`: seen however short it is."""

    start: float
    length: float
    colour: str
    tooltip: str
    always: bool = False


@dataclass(frozen=True)
class Stack:
    """One horizontal bar of several parts, with a text behind its end."""

    label: str
    parts: Sequence[tuple[Entry, float]]
    end: str = ""


@dataclass(frozen=True)
class Row:
    """One row of a timeline."""

    label: str
    parts: Sequence[Part]
    detail: str = ""


@dataclass(frozen=True)
class Step:
    """One step of a waterfall: a value that is taken away, or a total from zero."""

    label: str
    value: float
    colour: str = "c2"
    is_total: bool = False
    detail: str = ""


@dataclass(frozen=True)
class Cells:
    """A matrix with names of rows and columns; None and 0 stay empty.

    Without `tooltips` a cell is described by its row, its column and its value. `largest` replaces
    the words at the dark end of the scale.
    """

    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float | None]]
    format: Format = compact_number
    row_word: str = ""
    column_word: str = ""
    tooltips: Sequence[Sequence[str]] = ()
    largest: str = ""


@dataclass(frozen=True)
class Entry:
    """One entry of a legend."""

    label: str
    colour: str
    dashed: bool = False
    faint: bool = False
    dots: bool = False

    @property
    def style(self) -> str:
        more = (("dashed", self.dashed), ("faint", self.faint), ("dots", self.dots))
        return " ".join((self.colour, *(name for name, has in more if has)))


@dataclass(frozen=True)
class Axis:
    """The name of an axis with its unit, and how its numbers are written."""

    label: str
    format: Format = compact_number
    quantity: Quantity = "number"
    from_zero: bool = False
    logarithmic: bool = False
    values: Sequence[float] = field(default=())  # which the axis has to contain beside the data


def _tag(name: str, *content: str, **attributes: object) -> Markup:
    """Write an element; attributes and content that is not Markup are escaped."""
    words = Markup("").join(
        Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), value)
        for key, value in attributes.items()
        if value is not None
    )
    inside = Markup("").join(escape(part) for part in content)
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(name), words, inside)


def _title(text: str) -> Markup:
    return _tag("title", text) if text else Markup("")


def _share(fraction: float) -> str:
    return f"{fraction * 100:.2f}".rstrip("0").rstrip(".") + "%"


def legend(entries: Iterable[Entry]) -> Markup:
    """Write the legend of a chart, each label once; nothing without entries."""
    items = Markup("").join(
        _tag("li", _tag("i", class_=one.style), one.label)
        for one in {one.label: one for one in entries}.values()
    )
    return _tag("ul", items, class_="legend") if items else Markup("")


def nothing(reason: str) -> Markup:
    """Say in the place of a chart why there is none."""
    return _tag("p", reason, class_="nothing")


def _plot(
    *content: str, label: str, height: int, left: int, bottom: int = _AXIS_PIXELS, top: int = 10
) -> Markup:
    """Write the frame: an SVG of a fixed height, with room for axes around it."""
    svg = _tag(
        "svg",
        *content,
        class_="chart",
        width="100%",
        height=height,
        role="img",
        aria_label=label,
        focusable="false",
    )
    return _tag("div", svg, class_="plot", style=f"padding:{top}px 18px {bottom}px {left}px")


def _x_ticks(scale: Scale, axis: Axis, height: int, *, grid: bool) -> Markup:
    """Write ticks below; every second one is left out where the chart is narrow."""
    marks = []
    for number, value in enumerate(scale.ticks):
        place = _share(scale.place(value))
        name = "tick spare" if number % 2 else "tick"
        if grid:
            marks.append(_tag("line", x1=place, x2=place, y1=0, y2=height, class_="grid"))
        side = "end" if scale.place(value) > 0.97 and not grid else "mid"
        marks.append(
            _tag("text", axis.format(value), x=place, y=height + 17, class_=f"{name} {side}")
        )
    if axis.label:
        marks.append(_tag("text", axis.label, x="50%", y=height + 34, class_="axis mid"))
    return Markup("").join(marks)


def _y_ticks(scale: Scale, axis: Axis, height: int) -> Markup:
    marks = []
    for value in scale.ticks:
        y = round((1 - scale.place(value)) * height, 1)
        marks.append(_tag("line", x1="0", x2="100%", y1=y, y2=y, class_="grid"))
        marks.append(_tag("text", axis.format(value), x=-8, y=y + 4, class_="tick end"))
    return Markup("").join(marks)


def _text_pixels(texts: Iterable[str]) -> int:
    """Estimate the room that texts of 11 pixels need beside an axis."""
    return 14 + round(6.3 * max((len(text) for text in texts), default=0))


def _paths(line: Line, x: Scale, y: Scale, height: int) -> Markup:
    """Write a curve as a path with a gap at every missing value, and lone points as dots."""
    words: list[str] = []
    pen_down = False
    for place, value in line.points if line.dots else thinned(line.points):
        if value is None or not is_drawable(value) or not is_drawable(place):
            pen_down = False
            continue
        left = x.place(place) * _CURVE_WIDTH
        top = (1 - y.place(value)) * height
        # A line of no length with round ends is a dot: a single point can be seen.
        words.append(f"{'L' if pen_down else 'M'}{left:.1f} {top:.1f}" + ("" if pen_down else "h0"))
        pen_down = not line.dots
    name = f"line {line.entry.style}"
    return _tag("path", _title(line.name), d="".join(words), class_=name) if words else Markup("")


def line_chart(
    lines: Sequence[Line],
    *,
    label: str,
    x: Axis,
    y: Axis,
    rules: Sequence[Rule] = (),
    levels: Sequence[Level] = (),
    height: int = 220,
    left: int | None = None,
) -> Markup:
    """Draw curves over a common axis, with vertical lines at events and horizontal ones at levels.

    `left`: pixels beside the axis, for charts below each other. Without one finite value a sentence
    stands there instead.
    """
    values = [v for line in lines for _, v in line.points if v is not None and is_drawable(v)]
    if not values:
        return nothing(f"{label}: no values are known.")
    x_scale = scale_of(
        [*(place for line in lines for place, _ in line.points), *x.values],
        ticks=8,
        whole_ticks=False,
        quantity=x.quantity,
    )
    wanted = [*values, *(level.y for level in levels), *y.values]
    y_scale = (
        log_scale(wanted)
        if y.logarithmic
        else scale_of(wanted, from_zero=y.from_zero, quantity=y.quantity)
    )
    curves = _tag(
        "svg",
        *(_paths(line, x_scale, y_scale, height) for line in lines),
        viewBox=f"0 0 {_CURVE_WIDTH} {height}",
        preserveAspectRatio="none",
        width="100%",
        height=height,
        class_="curves",
    )
    events = []
    labelled = -1.0
    for rule in sorted(rules, key=lambda rule: rule.x):
        fraction = x_scale.place(rule.x)
        place = _share(fraction)
        name = f"rule {rule.colour}"
        events.append(
            _tag("line", _title(rule.tooltip), x1=place, x2=place, y1=0, y2=height, class_=name)
        )
        if rule.label and fraction - labelled > _LABEL_SHARE:
            labelled = fraction
            side = "end" if fraction > 1 - _LABEL_SHARE else "mid" if fraction > 0.05 else ""
            name = f"label spare {side}".rstrip()
            events.append(_tag("text", rule.label, x=place, y=-3, class_=name))
    planned = []
    for level in levels:
        top = round((1 - y_scale.place(level.y)) * height, 1)
        planned.append(
            _tag("line", _title(level.label), x1="0", x2="100%", y1=top, y2=top, class_="level")
        )
        # On the side of the line where the curves are not.
        beside = top + 14 if median(values) > level.y else top - 5
        planned.append(_tag("text", level.label, x="100%", y=beside, class_="label end"))
    return Markup("").join(
        (
            _tag("p", y.label, class_="y-label"),
            _plot(
                _y_ticks(y_scale, y, height),
                _x_ticks(x_scale, x, height, grid=False),
                *events,
                curves,
                *planned,
                label=label,
                height=height,
                left=left or _text_pixels(y.format(value) for value in y_scale.ticks),
                top=14 if any(rule.label for rule in rules) else 8,
            ),
            legend(line.entry for line in lines)
            if len({line.name for line in lines}) > 1
            else Markup(""),
        )
    )


def _row_label(text: str, y: float, detail: str = "", longest: int = 22) -> Markup:
    shown = text if len(text) <= longest else text[: longest - 1] + "…"
    whole = _title(detail or text) if detail or shown != text else Markup("")
    return _tag("text", shown, whole, x=-8, y=y, class_="row-label end")


def _label_pixels(labels: Iterable[str]) -> int:
    return min(150, max(40, 16 + round(6.2 * max((len(one) for one in labels), default=0))))


def _fill(
    tooltip: str, first: float, last: float, y: int, height: int, style: str, **more: object
) -> Markup:
    """Write a bar between two shares of the width."""
    return _tag(
        "rect",
        _title(tooltip),
        x=_share(first),
        y=y,
        width=_share(last - first),
        height=height,
        **more,
        class_=f"fill {style}",
    )


def _row_plot(
    labels: Sequence[str],
    drawn: Iterable[Markup],
    scale: Scale,
    axis: Axis,
    label: str,
    left: int | None = None,
) -> Markup:
    """Write rows below each other, with ticks below all, and room for labels beside them."""
    height = _ROW_PIXELS * len(labels)
    return _plot(
        _x_ticks(scale, axis, height, grid=True),
        *drawn,
        label=label,
        height=height,
        left=left or _label_pixels(labels),
        top=4,
    )


def bar_chart(bars: Sequence[Bar], *, label: str, x: Axis) -> Markup:
    """Draw one bar per row from zero, with its value at its end, and marks such as a prediction."""
    if not bars:
        return nothing(f"{label}: no values are known.")
    scale = scale_of(
        [*(bar.value for bar in bars), *(bar.mark for bar in bars), *x.values],
        from_zero=True,
        ticks=6,
        quantity=x.quantity,
    )
    zero = scale.place(0.0)
    drawn = []
    for number, bar in enumerate(bars):
        top = number * _ROW_PIXELS
        drawn.append(_row_label(bar.label, top + 17))
        if bar.value is None or not is_drawable(bar.value):
            drawn.append(_tag("text", "unknown", x=6, y=top + 17, class_="label"))
        else:
            low, high = sorted((zero, scale.place(bar.value)))
            tooltip = bar.detail or f"{bar.label}: {x.format(bar.value)}"
            drawn.append(_fill(tooltip, low, high, top + 5, _ROW_PIXELS - 10, bar.colour, rx=2))
        if bar.mark is not None and is_drawable(bar.mark):
            at, tooltip = _share(scale.place(bar.mark)), f"{bar.label}: {x.format(bar.mark)}"
            ends = {"y1": top + 2, "y2": top + _ROW_PIXELS - 2}
            drawn.append(_tag("line", _title(tooltip), x1=at, x2=at, **ends, class_="mark"))
    return _row_plot([bar.label for bar in bars], drawn, scale, x, label)


def stacked_bar(
    parts: Sequence[tuple[Entry, float]], *, label: str, format: Format = compact_number
) -> Markup:
    """Draw shares of one total as one bar with a legend that names the amounts."""
    shown = [(entry, value) for entry, value in parts if is_drawable(value) and value > 0]
    total = sum(value for _, value in shown)
    if not shown or not is_drawable(total):
        return nothing(f"{label}: no values are known.")
    drawn, start, entries = [], 0.0, []
    for entry, value in shown:
        first, last = start / total, (start + value) / total
        tooltip = f"{entry.label}: {format(value)}"
        drawn.append(_fill(tooltip, first, last, 0, 22, f"gap {entry.colour}"))
        entries.append(Entry(f"{entry.label} {format(value)}", entry.colour))
        start += value
    return _plot(*drawn, label=label, height=22, left=0, bottom=4, top=4) + legend(entries)


def stacked_rows(stacks: Sequence[Stack], *, label: str, x: Axis) -> Markup:
    """Draw one bar per row from zero, divided into parts, with a legend of the parts."""
    known = [
        [(entry, value) for entry, value in stack.parts if is_drawable(value) and value > 0]
        for stack in stacks
    ]
    longest = max((sum(value for _, value in parts) for parts in known), default=0.0)
    if longest <= 0 or not is_drawable(longest):
        return nothing(f"{label}: no values are known.")
    # Behind the longest bar is room for its text.
    scale = scale_of(
        [longest * _ROOM_FOR_TEXT, *x.values],
        from_zero=True,
        ticks=6,
        quantity=x.quantity,
        whole_ticks=False,
    )
    drawn = []
    for number, (stack, parts) in enumerate(zip(stacks, known, strict=True)):
        top, reached = number * _ROW_PIXELS, 0.0
        drawn.append(_row_label(stack.label, top + 17))
        for entry, value in parts:
            first, last = scale.place(reached), scale.place(reached + value)
            tooltip = f"{stack.label}: {entry.label} {x.format(value)}"
            drawn.append(_fill(tooltip, first, last, top + 5, _ROW_PIXELS - 10, entry.colour))
            reached += value
        if stack.end:
            at = _share(scale.place(reached))
            drawn.append(_tag("text", stack.end, x=at, dx=6, y=top + 17, class_="label"))
    frame = _row_plot([one.label for one in stacks], drawn, scale, x, label)
    return frame + legend(entry for parts in known for entry, _ in parts)


def timeline(
    rows: Sequence[Row],
    *,
    label: str,
    end: float,
    entries: Sequence[Entry] = (),
    unit: str = "",
    left: int | None = None,
) -> Markup:
    """Draw what happened when: one row per attempt, from 0 to `end` seconds.

    What has to be seen is at least about a pixel wide, and drawn over what is not.
    """
    if not rows:
        return nothing(f"{label}: nothing has happened yet.")
    scale = time_scale(end)
    axis = Axis(unit or "time since the first submission", clock)
    drawn = []
    for number, row in enumerate(rows):
        top = number * _ROW_PIXELS
        drawn.append(_row_label(row.label, top + 17, row.detail))
        for part in sorted(row.parts, key=lambda part: part.always):
            if is_drawable(part.start) and is_drawable(part.length):
                first, last = scale.place(part.start), scale.place(part.start + part.length)
                last = first + max(last - first, 0.0015 if part.always else 0.0)
                height = _ROW_PIXELS - 8
                drawn.append(_fill(part.tooltip, first, last, top + 4, height, part.colour))
    return _row_plot([row.label for row in rows], drawn, scale, axis, label, left) + legend(entries)


def waterfall(steps: Sequence[Step], *, label: str, x: Axis) -> Markup:
    """Draw how a total becomes what is left of it: each step begins where the one before ended."""
    if not steps or not all(is_drawable(step.value) for step in steps):
        return nothing(f"{label}: no values are known.")
    totals = [step.value for step in steps if step.is_total]
    scale = scale_of(totals, from_zero=True, ticks=6, quantity=x.quantity)
    drawn = []
    level = 0.0
    for number, step in enumerate(steps):
        top, shown = number * _ROW_PIXELS, x.format(step.value)
        before = level
        level = step.value if step.is_total else level - step.value
        low = scale.place(0.0 if step.is_total else min(before, level))
        high = scale.place(max(before, level) if not step.is_total else level)
        drawn.append(_row_label(step.label, top + 17))
        if number:
            at = _share(scale.place(before))
            drawn.append(_tag("line", x1=at, x2=at, y1=top - 5, y2=top + 5, class_="connector"))
        tooltip, height = step.detail or f"{step.label}: {shown}", _ROW_PIXELS - 10
        last = low + max(high - low, 0.002)
        drawn.append(_fill(tooltip, low, last, top + 5, height, step.colour, rx=2))
        # Beside the bar on the side with room, or inside a bar that leaves none.
        side, beside, dx = (" end", low, -6) if low > 0.5 else ("", high, 6)
        if low <= 0.5 and high > 0.75:
            side, beside, dx = " end inside", high, -6
        at = _share(beside)
        drawn.append(_tag("text", shown, x=at, y=top + 17, dx=dx, class_=f"label{side}"))
    return _row_plot([step.label for step in steps], drawn, scale, x, label)


def heat_map(cells: Cells, *, label: str, row_pixels: int | None = None) -> Markup:
    """Draw a matrix; the darker a cell, the larger its value. Its largest value stands below."""
    known = [v for row in cells.values for v in row if v is not None and is_drawable(v) and v > 0]
    if not known or not cells.rows or not cells.columns:
        return nothing(f"{label}: no values are known.")
    largest = max(known)
    size = row_pixels or max(5, min(24, 420 // len(cells.rows)))
    height, columns = size * len(cells.rows), len(cells.columns)
    drawn = [_tag("rect", x=0, y=0, width="100%", height=height, class_="heat-ground")]
    for number, (name, row) in enumerate(zip(cells.rows, cells.values, strict=True)):
        for index, value in enumerate(row):
            if value is None or not is_drawable(value) or value <= 0:
                continue
            words = (
                cells.tooltips[number][index]
                if cells.tooltips
                else f"{name} → {cells.columns[index]}: {cells.format(value)}"
            )
            drawn.append(
                _tag(
                    "rect",
                    _title(words),
                    x=_share(index / columns),
                    y=number * size,
                    width=_share(1 / columns),
                    height=size,
                    class_="heat",
                    fill_opacity=f"{0.12 + 0.88 * value / largest:.2f}",
                )
            )
    every_row = max(1, math.ceil(14 / size))
    every_column = max(1, math.ceil(columns / 12))
    for number in range(0, len(cells.rows), every_row):
        y = number * size + size / 2 + 4
        drawn.append(_row_label(cells.rows[number], y))
    for index in range(0, columns, every_column):
        place = _share((index + 0.5) / columns)
        name = "tick mid spare" if index // every_column % 2 else "tick mid"
        drawn.append(_tag("text", cells.columns[index], x=place, y=height + 16, class_=name))
    if cells.column_word:
        drawn.append(_tag("text", cells.column_word, x="50%", y=height + 33, class_="axis mid"))
    ramp = (
        _tag("span", "0"),
        _tag("i", class_="ramp"),
        _tag("span", cells.largest or cells.format(largest)),
    )
    head = _tag("p", cells.row_word, class_="y-label") if cells.row_word else Markup("")
    return (
        head
        + _plot(*drawn, label=label, height=height, left=_label_pixels(cells.rows), top=4)
        + _tag("p", *ramp, class_="legend scale")
    )
