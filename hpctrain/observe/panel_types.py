"""What a dashboard consists of: variables, rows, panels, queries, thresholds. Pure.

Belongs here: the records that `panels` fills, `grafana` writes as JSON and
`hpctrain.report.dashboard_page` draws. Does not belong here: any dashboard.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

# "bars": one bar per series, now. "table": one row per run or node, one column per query.
# "states": one row per run, coloured by its state over time.
PanelKind = Literal["lines", "stat", "bars", "table", "states"]
Colour = Literal["green", "yellow", "orange", "red", "blue", "purple", "gray"]
GRID_COLUMNS = 24


@dataclass(frozen=True)
class Threshold:
    """A colour from `start` on; the first threshold has none and holds below all others."""

    colour: Colour
    start: float | None = None


@dataclass(frozen=True)
class ShownValue:
    """What a number stands for, and its colour."""

    value: int
    text: str
    colour: Colour


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
    """One column of a table, from a query of its own. Without a name only `labels` are shown."""

    expression: str
    name: str = ""
    unit: str = "short"
    labels: tuple[str, ...] = ()
    thresholds: tuple[Threshold, ...] = ()
    shown_values: tuple[ShownValue, ...] = ()


@dataclass(frozen=True)
class Panel:
    """One panel; `unit` is an id of Grafana's, width and height are cells of its grid.

    A table has `columns`, whose rows are joined by all labels that they share; other kinds have
    `queries`. `needs`: what has to be there for any data beside hpctrain's own metrics: another
    exporter, or an event that healthy runs do not have. An empty panel is then no fault.
    """

    title: str
    description: str
    kind: PanelKind
    queries: tuple[Query, ...] = ()
    columns: tuple[Column, ...] = ()
    unit: str = "short"
    width: int = 8
    height: int = 8
    thresholds: tuple[Threshold, ...] = ()
    shown_values: tuple[ShownValue, ...] = ()
    stacked: bool = False
    lowest: float | None = None
    needs: str = ""

    @property
    def expressions(self) -> tuple[str, ...]:
        """Every query of the panel."""
        queries = [one.expression for one in self.queries]
        return (*queries, *(one.expression for one in self.columns))


@dataclass(frozen=True)
class PanelRow:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Variable:
    """A choice at the top: the values that a label has in the series of a selector."""

    name: str
    title: str
    selector: str
    label: str
    several: bool = True


@dataclass(frozen=True)
class Marks:
    """Vertical lines at the times when an expression is not zero."""

    title: str
    expression: str
    text: str
    colour: Colour


@dataclass(frozen=True)
class DashboardPlan:
    """One dashboard. `uid` is what links point to, and never changes."""

    uid: str
    title: str
    description: str
    variables: tuple[Variable, ...]
    rows: tuple[PanelRow, ...]
    marks: tuple[Marks, ...] = ()
    hours: int = 6
    refresh: str = "30s"

    @property
    def short_name(self) -> str:
        """Its name on a command line and of its file."""
        return self.uid.removeprefix("hpctrain-")

    def panels(self) -> Iterator[Panel]:
        """Yield all panels, row by row."""
        for row in self.rows:
            yield from row.panels
