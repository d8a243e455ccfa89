"""Specs, profiles and facts for the tests of the forecast."""

from __future__ import annotations

from typing import Any

from specimens import GPT_TINY, cluster, run_spec

from hpctrain.plan.forecast.documents import RunFacts
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.run import RunSpec


def facts(**changes: Any) -> RunFacts:
    """100 nodes, a step of 10 s, 50,000 steps (5.8 days), 100 billion parameters."""
    given: dict[str, Any] = dict(
        step_seconds=10.0,
        gpus=800,
        nodes=100,
        parameters=100_000_000_000,
        tokens_per_step=4_000_000,
        train_steps=50_000,
    )
    return RunFacts.model_validate({**given, **changes})


def spec(every_steps: int = 60, asynchronous: bool = True, **others: Any) -> RunSpec:
    checkpoint = {"every_steps": every_steps, "asynchronous": asynchronous}
    return run_spec(GPT_TINY, checkpoint=checkpoint, **others)


def profile(
    node_mtbf: str | None = "100d",
    preemption_mtbf: str | None = None,
    restart: str = "10min",
    prices: dict[str, Any] | None = None,
    grace: str | None = None,
    **others: Any,
) -> ClusterProfile:
    """`grace` makes the only partition preemptible; no `node_mtbf`: no section `reliability`."""
    if node_mtbf is not None:
        reliability = {"node_mtbf": node_mtbf, "restart": restart}
        if preemption_mtbf is not None:
            reliability["preemption_mtbf"] = preemption_mtbf
        others["reliability"] = reliability
    if prices is not None:
        others["prices"] = prices
    if grace is not None:
        others["partition"] = {"preemption": {"mode": "requeue", "grace": grace}}
    return cluster(nodes=2048, **others)
