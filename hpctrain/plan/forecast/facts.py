"""Collects what a forecast has to know of a plan. Pure.

Belongs here: from spec, profile and plan to `RunFacts`. Does not belong here: the forecast.
"""

from __future__ import annotations

from hpctrain.plan.documents import Plan
from hpctrain.plan.forecast.documents import RunFacts
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.run import RunSpec


def run_facts(spec: RunSpec, profile: ClusterProfile, plan: Plan) -> RunFacts | None:
    """Collect the inputs of a forecast; None when no step time is known."""
    if plan.step_seconds is None:
        return None
    partition = profile.slurm.partition(spec.resources.partition)
    return RunFacts(
        step_seconds=plan.step_seconds,
        step_deviation=(plan.certainty.step_deviation or 0.0) if plan.certainty else 0.0,
        gpus=plan.layout.world_size,
        nodes=plan.nodes.nodes,
        parameters=plan.learned,
        tokens_per_step=plan.batch.tokens_per_step,
        train_steps=plan.batch.train_steps,
        walltime=spec.resources.walltime or (partition.max_walltime if partition else None),
    )
