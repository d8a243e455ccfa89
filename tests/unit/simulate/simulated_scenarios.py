"""Scenarios for the tests of the simulation."""

from __future__ import annotations

from typing import Any

from hpctrain.records.supervise_config import SuperviseConfig
from hpctrain.simulate.scenario import Scenario


def settings(**changes: Any) -> SuperviseConfig:
    given: dict[str, Any] = dict(
        run_id="simulated",
        target_step=1,
        continuation="requeue",
        failures_without_progress=3,
        stall_seconds=600.0,
        setup_stall_seconds=1800.0,
        kill_wait_seconds=30.0,
        verify="auto",
        exclude_nodes="act",
    )
    return SuperviseConfig.model_validate({**given, **changes})


def scenario(**changes: Any) -> Scenario:
    """128 nodes, 20 days, a crash in 28.8 h that costs nothing but time; saves of 60 s."""
    given: dict[str, Any] = dict(
        nodes=128,
        work_seconds=20 * 86400.0,
        step_seconds=10.0,
        interval_seconds=3600.0,
        save_stall_seconds=60.0,
        failures_per_node_day=6.5e-3,
        mix="crashes",
        detect_seconds=0.0,
        relaunch_seconds=0.0,
        restart_seconds=420.0,
        supervise=settings(failures_without_progress=1000),
    )
    return Scenario.model_validate({**given, **changes})
