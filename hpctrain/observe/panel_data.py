"""What Prometheus answered to the queries of a dashboard, and what stands in a query. Pure.

Belongs here: answers beside their panels, values of variables in queries. Does not belong here:
asking (`hpctrain.observe.dashboards`), drawing (`hpctrain.observe.dashboard_page`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpctrain.observe.grafana_dashboard import Annotation, Dashboard, Panel


@dataclass(frozen=True)
class Series:
    """One series: its labels without the name of the metric, and (Unix time, value) pairs."""

    labels: dict[str, str]
    points: tuple[tuple[float, float], ...]

    @property
    def last(self) -> float:
        """The newest value."""
        return self.points[-1][1]


@dataclass(frozen=True)
class Answer:
    """The series of one query, or why it was refused."""

    series: tuple[Series, ...] = ()
    refusal: str = ""


@dataclass(frozen=True)
class PanelData:
    """A panel with the answers to its queries, in their order."""

    panel: Panel
    answers: tuple[Answer, ...]

    @property
    def refusals(self) -> list[str]:
        """Why queries were refused."""
        return [one.refusal for one in self.answers if one.refusal]

    @property
    def is_empty(self) -> bool:
        """True without any series."""
        return not any(one.series for one in self.answers)

    @property
    def lacks_data(self) -> bool:
        """True without any series although the panel needs nothing beside hpctrain.

        Some of several queries may be empty: not every run has a plan, a budget or evaluations.
        """
        return not self.panel.needs and self.is_empty


@dataclass(frozen=True)
class AnnotationData:
    """An annotation with the series of its expression."""

    annotation: Annotation
    answer: Answer


@dataclass(frozen=True)
class DashboardData:
    """A dashboard with all answers. `rows` has the panels of each row of the dashboard."""

    dashboard: Dashboard
    rows: tuple[tuple[PanelData, ...], ...]
    annotations: tuple[AnnotationData, ...]
    chosen: Mapping[str, Sequence[str]]
    begin: float
    end: float
    step_seconds: float

    def panels(self) -> list[PanelData]:
        """List the panels of all rows."""
        return [panel for row in self.rows for panel in row]


def filled_in(query: str, chosen: Mapping[str, Sequence[str]], range_seconds: float) -> str:
    """Put the values of variables and the length of the chosen time into a query, as Grafana does.

    Values become alternatives of a regular expression, in which they mean themselves. A variable
    without any value selects nothing.
    """
    query = query.replace("$__range", f"{round(range_seconds)}s")
    for name, values in chosen.items():
        pattern = "|".join(re.escape(value) for value in values) or "^$"
        # Inside a quoted text of PromQL a backslash and a quote are escaped once more.
        written = pattern.replace("\\", "\\\\").replace('"', '\\"')
        query = query.replace(f"${name}", written)
    return query


_FIELD = re.compile(r"\{\{\s*(\w+)\s*\}\}")


def legend_of(text: str, labels: Mapping[str, str]) -> str:
    """Write the name of a series: `{{label}}` stands for the value of a label."""
    return _FIELD.sub(lambda found: labels.get(found[1], ""), text).strip()
