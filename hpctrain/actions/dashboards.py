"""Ask Prometheus everything that the dashboards ask, for a page of the same panels.

Belongs here: which runs and which time are asked about. Does not belong here: queries
(`hpctrain.observe.panels`), drawing (`hpctrain.report.dashboard_page`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpctrain.errors import NoSuchRunError, UsageError
from hpctrain.observe.panel_data import Answer, DashboardData, MarksData, PanelData, filled_in
from hpctrain.observe.panel_queries import in_state
from hpctrain.observe.panel_types import DashboardPlan, Panel
from hpctrain.observe.panels import DASHBOARDS
from hpctrain.observe.prometheus_api import PrometheusServer, QueryRefusedError
from hpctrain.observe.run_panels import MARK_SECONDS

_POINTS = 240  # of a curve
_LEAST_STEP_SECONDS = 5.0
_MOST_MARK_POINTS = 10_000  # Prometheus allows 11,000


def named_dashboards(names: Sequence[str]) -> tuple[DashboardPlan, ...]:
    """Find dashboards by their short names; all of them without any name."""
    known = {plan.short_name: plan for plan in DASHBOARDS}
    for name in names:
        if name not in known:
            raise UsageError(f"no dashboard `{name}`", f"there are {', '.join(known)}")
    return tuple(known[name] for name in dict.fromkeys(names)) or DASHBOARDS


def collect_dashboards(
    server: PrometheusServer,
    plans: Sequence[DashboardPlan],
    now: float,
    runs: Sequence[str] = (),
    range_seconds: float | None = None,
) -> list[DashboardData]:
    """Ask for the data of dashboards, of some runs or of all, over their own time or another."""
    collected = []
    for plan in plans:
        seconds = range_seconds or plan.hours * 3600.0
        chosen = _chosen(server, plan, now - seconds, now, runs)
        collected.append(_Questions(server, chosen, now - seconds, now).dashboard(plan))
    return collected


def _chosen(
    server: PrometheusServer, plan: DashboardPlan, begin: float, end: float, runs: Sequence[str]
) -> dict[str, list[str]]:
    """Choose values for the variables: all that there are, and for a single run one that runs."""
    chosen: dict[str, list[str]] = {}
    for variable in plan.variables:
        selector = filled_in(variable.selector, chosen, end - begin)
        values = server.label_values(selector, variable.label, begin, end)
        if variable.name == "run" and runs:
            values = list(dict.fromkeys(_one_run(run, values) for run in runs))
        if not variable.several and len(values) > 1:
            running = filled_in(in_state("RUNNING"), {variable.name: values}, end - begin)
            runs_now = {one.labels[variable.label] for one in server.now(running, end)}
            values = [one for one in values if one in runs_now] or values
        chosen[variable.name] = values if variable.several else values[:1]
    return chosen


def _one_run(name: str, known: Sequence[str]) -> str:
    """Find the run whose id is `name`, or is the only one that starts so."""
    found = [name] if name in known else [one for one in known if one.startswith(name)]
    if len(found) != 1:
        reason = f"has several runs `{name}...`" if found else f"has no run `{name}`"
        raise NoSuchRunError(f"Prometheus {reason} in this time", ", ".join(found) or None)
    return found[0]


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

    def dashboard(self, plan: DashboardPlan) -> DashboardData:
        return DashboardData(
            plan,
            tuple(tuple(self._panel(panel) for panel in row.panels) for row in plan.rows),
            tuple(MarksData(one, self._marked(one.expression)) for one in plan.marks),
            self._chosen,
            self._begin,
            self._end,
            self._step_seconds,
        )

    def _panel(self, panel: Panel) -> PanelData:
        over_time = panel.kind in ("lines", "states")
        answers = (self._answer(one, over_time) for one in panel.expressions)
        return PanelData(panel, tuple(answers))

    def _answer(self, expression: str, over_time: bool) -> Answer:
        key = (expression, over_time)
        if key not in self._known:
            self._known[key] = self._asked(
                expression, self._begin if over_time else None, self._step_seconds
            )
        return self._known[key]

    def _marked(self, expression: str) -> Answer:
        """Look for marks minute by minute, in as much of the newest time as Prometheus allows."""
        begin = max(self._begin, self._end - _MOST_MARK_POINTS * MARK_SECONDS)
        return self._asked(expression, begin, MARK_SECONDS)

    def _asked(self, expression: str, begin: float | None, step_seconds: float) -> Answer:
        query = filled_in(expression, self._chosen, self._end - self._begin)
        try:
            if begin is None:
                return Answer(self._server.now(query, self._end))
            return Answer(self._server.over(query, begin, self._end, step_seconds))
        except QueryRefusedError as error:
            return Answer(refusal=str(error))
