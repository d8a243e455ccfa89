"""Ask Prometheus everything that the dashboards ask, for a page of the same panels.

Belongs here: which runs, services and time are asked about. Does not belong here: queries
(`hpctrain/observe/dashboards`), drawing (`hpctrain.observe.dashboard_page`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from hpctrain.base.errors import NoSuchRunError
from hpctrain.observe.grafana_dashboard import (
    DIRECTORY,
    Annotation,
    Dashboard,
    Panel,
    read_dashboard,
)
from hpctrain.observe.panel_data import AnnotationData, Answer, DashboardData, PanelData, filled_in
from hpctrain.observe.prometheus_api import PrometheusServer, QueryRefusedError

# The packaged dashboards, in the order in which people open them.
DASHBOARD_NAMES = ("fleet", "run", "communication", "nodes", "service")

_POINTS = 240  # of a curve
_LEAST_STEP_SECONDS = 5.0
_MOST_ANNOTATION_POINTS = 10_000  # Prometheus allows 11,000


def packaged_dashboards() -> tuple[Dashboard, ...]:
    """Read the dashboards that are packaged for Grafana."""
    texts = ((DIRECTORY / f"{name}.json").read_text("utf-8") for name in DASHBOARD_NAMES)
    return tuple(read_dashboard(json.loads(text)) for text in texts)


def collect_dashboards(
    server: PrometheusServer,
    dashboards: Sequence[Dashboard],
    now: float,
    names: Sequence[str] = (),
    range_seconds: float | None = None,
) -> list[DashboardData]:
    """Ask for the data of dashboards, of some runs and services or of all, over some time.

    Where only runs are named, or there are no services, dashboards of services are left out; those
    of runs are where only services are named. Raises NoSuchRunError for a name that is neither.
    """
    collected, unknown = [], dict.fromkeys(names)
    for dashboard in dashboards:
        seconds = range_seconds or float(dashboard.range_seconds)
        chosen, meant = _chosen(server, dashboard, now - seconds, now, names)
        for name in meant:
            unknown.pop(name, None)
        if (names and not meant) or not chosen.get("service", True):
            continue
        collected.append(_Questions(server, chosen, now - seconds, now).dashboard(dashboard))
    for name in unknown:
        raise NoSuchRunError(f"Prometheus has no run `{name}` in this time")
    return collected


# Whether the subject of a dashboard is alive, for one that shows a single one.
ALIVE = {
    "run": '(max by (run) (hpctrain_run_state{run=~"$run", hpctrain_run_state="RUNNING"}) == 1)',
    "service": 'max by (service) (hpctrain_service_replicas_ready{service=~"$service"}) > 0',
}


def _chosen(
    server: PrometheusServer, dashboard: Dashboard, begin: float, end: float, names: Sequence[str]
) -> tuple[dict[str, list[str]], set[str]]:
    """Choose values for the variables, and return with them the names that have chosen some.

    Without names these are all that there are, and for a single run or service one that is alive.
    """
    chosen: dict[str, list[str]] = {}
    meant: dict[str, str] = {}
    for variable in dashboard.variables:
        selector = filled_in(variable.selector, chosen, end - begin)
        values = server.label_values(selector, variable.label, begin, end)
        if variable.name in ALIVE and names:
            found = {name: _one_named(name, values) for name in names}
            meant = {name: one for name, one in found.items() if one is not None}
            values = list(dict.fromkeys(meant.values()))
        if not variable.several and len(values) > 1:
            alive = filled_in(ALIVE[variable.name], {variable.name: values}, end - begin)
            alive_now = {one.labels[variable.label] for one in server.now(alive, end)}
            values = [one for one in values if one in alive_now] or values
        chosen[variable.name] = values if variable.several else values[:1]
    return chosen, set(meant)


def _one_named(name: str, known: Sequence[str]) -> str | None:
    """Find the run or service whose id is `name`, or is the only one that starts so."""
    found = [name] if name in known else [one for one in known if one.startswith(name)]
    if len(found) > 1:
        hint = ", ".join(found)
        raise NoSuchRunError(f"Prometheus has several runs `{name}...` in this time", hint)
    return found[0] if found else None


class _Questions:
    """Asks about chosen runs in a chosen time; an equal question is asked once."""

    def __init__(
        self,
        server: PrometheusServer,
        chosen: Mapping[str, Sequence[str]],
        begin: float,
        end: float,
    ) -> None:
        self._server, self._chosen, self._begin, self._end = server, chosen, begin, end
        self._step_seconds = max(_LEAST_STEP_SECONDS, round((end - begin) / _POINTS))
        self._known: dict[tuple[str, bool], Answer] = {}

    def dashboard(self, dashboard: Dashboard) -> DashboardData:
        return DashboardData(
            dashboard,
            tuple(tuple(self._panel(panel) for panel in row.panels) for row in dashboard.rows),
            tuple(AnnotationData(one, self._annotated(one)) for one in dashboard.annotations),
            self._chosen,
            self._begin,
            self._end,
            self._step_seconds,
        )

    def _panel(self, panel: Panel) -> PanelData:
        over_time = panel.kind in ("timeseries", "state-timeline")
        answers = (self._answer(one, over_time) for one in panel.expressions)
        return PanelData(panel, tuple(answers))

    def _answer(self, expression: str, over_time: bool) -> Answer:
        key = (expression, over_time)
        if key not in self._known:
            self._known[key] = self._asked(
                expression, self._begin if over_time else None, self._step_seconds
            )
        return self._known[key]

    def _annotated(self, annotation: Annotation) -> Answer:
        """Look for an annotation in as much of the newest time as Prometheus allows."""
        step_seconds = annotation.step_seconds
        begin = max(self._begin, self._end - _MOST_ANNOTATION_POINTS * step_seconds)
        return self._asked(annotation.expression, begin, step_seconds)

    def _asked(self, expression: str, begin: float | None, step_seconds: float) -> Answer:
        query = filled_in(expression, self._chosen, self._end - self._begin)
        try:
            if begin is None:
                return Answer(self._server.now(query, self._end))
            return Answer(self._server.over(query, begin, self._end, step_seconds))
        except QueryRefusedError as error:
            return Answer(refusal=str(error))
