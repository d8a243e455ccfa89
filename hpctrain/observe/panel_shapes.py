"""Makers of the usual panels, and of the choices above them. Pure.

Belongs here: sizes and defaults that panels of one kind share. Does not belong here: any query
(`panel_queries` and the tables of each dashboard).
"""

from __future__ import annotations

from hpctrain.observe.panel_queries import NEUTRAL
from hpctrain.observe.panel_types import Panel, Query, ShownValue, Threshold, Variable

USER = Variable("user", "User", "hpctrain_run_info", "user")
RUNS = Variable("run", "Run", 'hpctrain_run_info{user=~"$user"}', "run")
ONE_RUN = Variable("run", "Run", 'hpctrain_run_info{user=~"$user"}', "run", several=False)

# What panels need beside hpctrain's own metrics of a run that trains.
NEEDS_ALERT = "an alert that fires"
NEEDS_LOSS_OF_TIME = "a launch that ended early"
NEEDS_BUDGET = "a budget or a plan with a price"
NEEDS_PLAN = "a plan that predicts speed: GPUs of a known type"
NEEDS_MEASURED = "a measured step"
NEEDS_DCGM = "DCGM exporter"
NEEDS_NODE = "node_exporter"


def stat(
    title: str,
    description: str,
    expression: str,
    unit: str = "short",
    thresholds: tuple[Threshold, ...] = NEUTRAL,
    *,
    width: int = 3,
    legend: str = "",
    shown: tuple[ShownValue, ...] = (),
    needs: str = "",
) -> Panel:
    """Make the panel of one number of now."""
    return Panel(
        title,
        description,
        "stat",
        (Query(expression, legend),),
        unit=unit,
        width=width,
        height=4,
        thresholds=thresholds,
        shown_values=shown,
        needs=needs,
    )


def bars(
    title: str,
    description: str,
    expression: str,
    legend: str,
    unit: str = "short",
    thresholds: tuple[Threshold, ...] = NEUTRAL,
    *,
    width: int = 8,
    needs: str = "",
) -> Panel:
    """Make bars of now, the longest first: at most twelve, which fit."""
    return Panel(
        title,
        description,
        "bars",
        (Query(f"sort_desc(topk(12, {expression}))", legend),),
        unit=unit,
        width=width,
        thresholds=thresholds,
        lowest=0,
        needs=needs,
    )


def lines(
    title: str,
    description: str,
    *queries: Query,
    unit: str = "short",
    width: int = 8,
    stacked: bool = False,
    from_zero: bool = False,
    needs: str = "",
) -> Panel:
    """Make curves over the chosen time."""
    return Panel(
        title,
        description,
        "lines",
        queries,
        unit=unit,
        width=width,
        stacked=stacked,
        lowest=0 if from_zero else None,
        needs=needs,
    )
