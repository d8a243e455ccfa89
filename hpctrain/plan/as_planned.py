"""Write a spec as it was planned, so that nothing else can be planned for it again.

Belongs here: which fields of a spec its plan has decided. Does not belong here: planning
(`planner`), writing a layout into a user's file (`hpctrain.job.plan`).
"""

from __future__ import annotations

from hpctrain.plan.documents import Plan
from hpctrain.spec.run import ParallelSpec, RunSpec


def spec_as_planned(spec: RunSpec, plan: Plan) -> RunSpec:
    """Fix layout, micro-batch, recomputation, offload and sharding of a spec to its plan."""
    optimizer = {
        "zero": plan.zero,
        "distributed": plan.zero > 0,  # its default contradicts stage 0 once it is written
        "shard_gpus": plan.shard_gpus,
        "offload": plan.offload,
    }
    return spec.model_copy(
        update={
            "parallel": parallel_as_planned(spec, plan),
            "batch": spec.batch.model_copy(update={"micro": plan.batch.micro_batch}),
            "recompute": plan.recompute,
            "recompute_modules": plan.recompute_modules or spec.recompute_modules,
            "recompute_layers": plan.recompute_layers or spec.recompute_layers,
            "activation_offload_layers": plan.activation_offload_layers or spec.offloaded_layers,
            "optimizer": spec.optimizer.model_copy(update=optimizer),
            "resources": spec.resources.model_copy(update={"gpus": plan.layout.world_size}),
        }
    )


def parallel_as_planned(spec: RunSpec, plan: Plan) -> ParallelSpec:
    """Write the layout of a plan as a spec would, with its stages where they are uneven."""
    layout, given = plan.layout, spec.parallel
    if given == "auto":
        given = ParallelSpec(pp=layout.pp, vpp=layout.vpp, stages=_listed_stages(plan))
    sizes = layout.model_dump(exclude={"dp"})
    if layout.tp == 1:
        sizes["sequence_parallel"] = None
    return given.model_copy(update=sizes)


def _listed_stages(plan: Plan) -> tuple[int, ...] | None:
    """List the layers of uneven chunks in the order of the model; None where all are alike."""
    chunks = [
        plan.stages[stage].chunk_layers[chunk]
        for chunk in range(plan.layout.vpp)
        for stage in range(plan.layout.pp)
    ]
    return tuple(chunks) if len(set(chunks)) > 1 else None
