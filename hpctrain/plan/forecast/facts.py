"""Collects what a forecast has to know of a plan. Pure.

Belongs here: from a job to `RunFacts`. Does not belong here: the forecast.
"""

from __future__ import annotations

from hpctrain.plan.forecast.documents import RunFacts
from hpctrain.plan.job import TrainingJob


def run_facts(job: TrainingJob) -> RunFacts | None:
    """Collect the inputs of a forecast; None when no step time is known."""
    plan = job.plan
    if plan.step_seconds is None:
        return None
    return RunFacts(
        step_seconds=plan.step_seconds,
        step_deviation=(plan.certainty.step_deviation or 0.0) if plan.certainty else 0.0,
        gpus=plan.layout.world_size,
        nodes=plan.nodes.nodes,
        parameters=plan.learned,
        tokens_per_step=plan.batch.tokens_per_step,
        train_steps=plan.batch.train_steps,
        walltime=job.spec.resources.walltime or job.partition.max_walltime,
    )
