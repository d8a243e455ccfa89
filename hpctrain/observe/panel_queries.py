"""Building blocks of the dashboards' queries: the chosen runs, their state, their nodes. Pure.

Each block takes the maximum by run: two exporters that read the same run give two series of
everything, and neither a sum nor a join may see both.
Belongs here: text of PromQL that several panels have. Does not belong here: panels (`panels`).
"""

from __future__ import annotations

from hpctrain.observe.panel_types import ShownValue, Threshold

CHOSEN_RUNS = 'run=~"$run"'
CHOSEN_SERVICE = 'service=~"$service"'
WITH_READY_REPLICAS = f"max by (service) (hpctrain_service_replicas_ready{{{CHOSEN_SERVICE}}}) > 0"
FIRING = 'ALERTS{alertname=~"Hpctrain.*", alertstate="firing"}'
# Values of the label of `hpctrain_run_state` (hpctrain.actions.state.RunState).
STATES = (
    ShownValue(1, "RUNNING", "green"),
    ShownValue(2, "PENDING", "blue"),
    ShownValue(3, "DONE", "gray"),
    ShownValue(4, "STOPPED", "yellow"),
    ShownValue(5, "CANCELLED", "purple"),
    ShownValue(6, "FAILED", "red"),
    ShownValue(7, "UNKNOWN", "orange"),
    ShownValue(8, "PREPARED", "gray"),
    ShownValue(9, "NOT SUBMITTED", "gray"),
)
NEUTRAL = (Threshold("blue"),)


def of(name: str, *labels: str, where: str = "", ago: str = "") -> str:
    """Select a family of the chosen runs, now or some time ago: one series for each run and value
    of the labels."""
    by = ", ".join(("run", *labels))
    selector = f"{CHOSEN_RUNS}, {where}" if where else CHOSEN_RUNS
    offset = f" offset {ago}" if ago else ""
    return f"max by ({by}) (hpctrain_run_{name}{{{selector}}}{offset})"


def in_state(state: str) -> str:
    """Select the chosen runs in a state, as ones."""
    return f"({of('state', where=_state(state))} == 1)"


def _state(state: str) -> str:
    return f'hpctrain_run_state="{state}"'


def of_running(expression: str) -> str:
    """Keep running runs: a gauge of a run that is over stays where it was."""
    return f"({expression} and on (run) {in_state('RUNNING')})"


def age(name: str) -> str:
    """Compute how long ago the time in a family was."""
    return f"(time() - {of(name)})"


def recent_goodput(window: str) -> str:
    """Select goodput of the last hour or day; of the whole run where it is younger."""
    recent, whole = (of("goodput_ratio", where=f'window="{one}"') for one in (window, "run"))
    return f"({recent} or {whole})"


def increase_of(name: str, *labels: str) -> str:
    """Compute by how much a counter rose in the chosen time."""
    by = ", ".join(("run", *labels))
    return f"max by ({by}) (increase(hpctrain_run_{name}{{{CHOSEN_RUNS}}}[$__range]))"


def ratio(above: str, below: str) -> str:
    """Divide families with the same labels; nothing where the lower one is zero."""
    return f"{above} / ({below} > 0)"


def with_user(expression: str) -> str:
    """Add the user of each run."""
    return f"{expression} * on (run) group_left (user) max by (run, user) (hpctrain_run_info)"


def state_number() -> str:
    """Number the state of each chosen run as `STATES` does."""
    numbered = (
        f"{shown.value} * (hpctrain_run_state{{{CHOSEN_RUNS}, {_state(shown.text)}}} == 1)"
        for shown in STATES
    )
    return f"max by (run) ({' or '.join(numbered)})"


def on_nodes(vector: str, host_label: str, summary: str = "avg") -> str:
    """Join another exporter's series with the nodes of the chosen runs, one value for each node.

    Its label with the host may have a port or a domain; Slurm's name of a node is what stands
    before them. Runs are the many side: a node that two runs share is joined with both.
    """
    named = f'label_replace({vector}, "node", "$1", "{host_label}", "([^.:]+).*")'
    return f"{of('node_info', 'node')} * on (node) group_left () {summary} by (node) ({named})"


def worse_from(*starts: float) -> tuple[Threshold, ...]:
    """Green, orange from the first and red from the last start on."""
    middle = (Threshold("orange", starts[0]),) if len(starts) > 1 else ()
    return (Threshold("green"), *middle, Threshold("red", starts[-1]))


def better_from(orange: float, green: float) -> tuple[Threshold, ...]:
    """Red, orange and green with rising values."""
    return (Threshold("red"), Threshold("orange", orange), Threshold("green", green))
