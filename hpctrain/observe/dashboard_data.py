"""Ask Prometheus everything that the dashboards ask, for a page of the same panels.

Belongs here: which runs, services and time are asked about, values of variables in queries, the
HTTP API of Prometheus (prometheus.io, HTTP API) as records. Does not belong here: queries
(`hpctrain/observe/dashboards/`), drawing (`dashboard_page`).
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from hpctrain.base.errors import HpctrainError, NoSuchRunError, UsageError
from hpctrain.observe.grafana_dashboard import (
    DIRECTORY,
    Annotation,
    Dashboard,
    Panel,
    read_dashboard,
)


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


# -- Ask a Prometheus server: values of labels, values of now, values over a time ---------------


_TIMEOUT_SECONDS = 30.0
# More than four dashboards of a thousand runs; a server that sends without an end is stopped.
_MOST_BYTES = 64 << 20


class QueryRefusedError(HpctrainError):
    """Prometheus understood the request and refused the query."""


class PrometheusServer:
    """A Prometheus server, without a proxy in between."""

    def __init__(self, url: str) -> None:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
            raise UsageError(f"`{url}` is no URL of Prometheus", "such as http://127.0.0.1:9090")
        self._url = url.rstrip("/")
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def label_values(self, selector: str, label: str, begin: float, end: float) -> list[str]:
        """List the values of a label in the series of a selector, sorted."""
        asked = {"match[]": selector, "start": f"{begin:.3f}", "end": f"{end:.3f}"}
        found = self._ask(f"label/{quote(label)}/values?{urlencode(asked)}", None)
        return sorted(str(value) for value in found)

    def now(self, query: str, time: float) -> tuple[Series, ...]:
        """Evaluate a query at a time."""
        found = self._ask("query", {"query": query, "time": f"{time:.3f}"})
        if found["resultType"] == "scalar":
            return (Series({}, (_point(found["result"]),)),)
        return tuple(_series(one, [one["value"]]) for one in found["result"])

    def over(self, query: str, begin: float, end: float, step: float) -> tuple[Series, ...]:
        """Evaluate a query every `step` seconds from begin to end."""
        asked = {"query": query, "start": f"{begin:.3f}", "end": f"{end:.3f}", "step": f"{step:g}"}
        found = self._ask("query_range", asked)
        return tuple(_series(one, one["values"]) for one in found["result"])

    def _ask(self, path: str, form: dict[str, str] | None) -> Any:
        """Send one request; a form is sent as POST, because queries may be longer than URLs."""
        data = urlencode(form).encode() if form is not None else None
        request = urllib.request.Request(f"{self._url}/api/v1/{path}", data)
        try:
            with self._opener.open(request, timeout=_TIMEOUT_SECONDS) as answer:
                text = answer.read(_MOST_BYTES)
        except urllib.error.HTTPError as error:
            refusal = f"HTTP status {error.code}"
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                refusal = str(json.loads(error.read(1 << 16))["error"])
            raise QueryRefusedError(refusal) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            raise UsageError(f"Prometheus at {self._url} does not answer: {reason}") from None
        try:
            return json.loads(text)["data"]
        except (ValueError, KeyError, TypeError):
            raise UsageError(f"{self._url} does not answer as Prometheus does") from None


def _series(found: dict[str, Any], values: list[Any]) -> Series:
    labels = {str(key): str(value) for key, value in found["metric"].items() if key != "__name__"}
    return Series(labels, tuple(_point(value) for value in values))


def _point(pair: list[Any]) -> tuple[float, float]:
    return float(pair[0]), float(pair[1])  # values are texts, such as "NaN" and "+Inf"


# -- Ask Prometheus everything that the dashboards ask, for a page of the same panels -----------


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

    A name is an id, or the start of a single one. Without names these are all that there are, and
    for a single run or service one that is alive.
    """
    chosen: dict[str, list[str]] = {}
    meant: dict[str, str] = {}
    for variable in dashboard.variables:
        selector = filled_in(variable.selector, chosen, end - begin)
        values = server.label_values(selector, variable.label, begin, end)
        if variable.name in ALIVE and names:
            meant = {}
            for name in names:
                found = [name] if name in values else [v for v in values if v.startswith(name)]
                if len(found) > 1:
                    message = f"Prometheus has several runs `{name}...` in this time"
                    raise NoSuchRunError(message, ", ".join(found))
                if found:
                    meant[name] = found[0]
            values = list(dict.fromkeys(meant.values()))
        if not variable.several and len(values) > 1:
            alive = filled_in(ALIVE[variable.name], {variable.name: values}, end - begin)
            alive_now = {one.labels[variable.label] for one in server.now(alive, end)}
            values = [one for one in values if one in alive_now] or values
        chosen[variable.name] = values if variable.several else values[:1]
    return chosen, set(meant)


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
        annotations = []
        for one in dashboard.annotations:
            # in as much of the newest time as Prometheus allows
            begin = max(self._begin, self._end - _MOST_ANNOTATION_POINTS * one.step_seconds)
            answer = self._asked(one.expression, begin, one.step_seconds)
            annotations.append(AnnotationData(one, answer))
        return DashboardData(
            dashboard,
            tuple(tuple(self._panel(panel) for panel in row.panels) for row in dashboard.rows),
            tuple(annotations),
            self._chosen,
            self._begin,
            self._end,
            self._step_seconds,
        )

    def _panel(self, panel: Panel) -> PanelData:
        over_time = panel.kind in ("timeseries", "state-timeline")
        begin = self._begin if over_time else None
        for expression in panel.expressions:
            if (expression, over_time) not in self._known:
                asked = self._asked(expression, begin, self._step_seconds)
                self._known[expression, over_time] = asked
        return PanelData(panel, tuple(self._known[one, over_time] for one in panel.expressions))

    def _asked(self, expression: str, begin: float | None, step_seconds: float) -> Answer:
        query = filled_in(expression, self._chosen, self._end - self._begin)
        try:
            if begin is None:
                return Answer(self._server.now(query, self._end))
            return Answer(self._server.over(query, begin, self._end, step_seconds))
        except QueryRefusedError as error:
            return Answer(refusal=str(error))
