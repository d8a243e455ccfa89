"""Plans the sizes at which a run can be launched: the planned one, and smaller ones if allowed.

On fewer nodes only the data-parallel size shrinks and accumulation grows, so the global batch and
the order of samples stay. Planned when the run is submitted, because nothing that plans is on the
compute nodes. Belongs here: planning those sizes. Does not belong here: choosing one (see
`hpctrain.judge.launch_nodes`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpctrain.base.errors import DoesNotFitError, LimitError
from hpctrain.engines.train_json import train_config
from hpctrain.engines.training import TrainConfig
from hpctrain.plan.as_planned import parallel_as_planned
from hpctrain.plan.documents import Plan
from hpctrain.plan.job import TrainingJob
from hpctrain.records.supervise_config import LaunchShape
from hpctrain.spec.run import RunSpec

if TYPE_CHECKING:
    from hpctrain.plan.request import Knowledge

PLANNED_FILE = "train.json"


@dataclass(frozen=True)
class SizedConfig:
    """One size and the trainer's settings for it."""

    shape: LaunchShape
    train: TrainConfig


def smaller_sizes(job: TrainingJob, knowledge: Knowledge) -> tuple[SizedConfig, ...]:
    """Plan each node count from one less down to `resources.min_nodes`, if it has a valid plan.

    All sizes keep the model-parallel layout of the job's plan.
    """
    least, plan = job.spec.resources.min_nodes, job.plan
    if least is None:
        return ()
    from hpctrain.plan.planner import make_plan  # with NumPy, which only planning needs

    sizes = []
    for nodes in range(plan.nodes.nodes - 1, least - 1, -1):
        for micro in (plan.batch.micro_batch, "auto"):
            try:
                fewer = _on_fewer_nodes(job, nodes, micro)
                small = make_plan(fewer, job.profile, knowledge)
            except (DoesNotFitError, LimitError):
                continue
            file, tasks = f"train-n{nodes:06d}.json", small.layout.world_size
            shape = LaunchShape(nodes=nodes, tasks=tasks, train_config=file)
            sizes.append(SizedConfig(shape, train_config(TrainingJob(fewer, job.profile, small))))
            break
    return tuple(sizes)


def shapes_of(plan: Plan, smaller: tuple[SizedConfig, ...]) -> tuple[LaunchShape, ...]:
    """List the shapes of all sizes, the planned one first."""
    planned = LaunchShape(
        nodes=plan.nodes.nodes, tasks=plan.layout.world_size, train_config=PLANNED_FILE
    )
    return (planned, *(size.shape for size in smaller))


def _on_fewer_nodes(job: TrainingJob, nodes: int, micro: int | str) -> RunSpec:
    """Change the spec to `nodes` nodes, with the plan's model-parallel layout."""
    spec, plan = job.spec, job.plan
    resources = spec.resources.model_copy(
        update={
            "gpus": nodes * plan.nodes.gpus_per_node,
            "spare_nodes": 0,
            "segment": None,  # of the job, which stays as it is
        }
    )
    batch = spec.batch.model_copy(update={"micro": micro})
    # a checkpoint of DeepSpeed belongs to a ZeRO stage
    stage = {} if spec.engine.abilities.resumes_other_stage else {"zero": plan.zero}
    changed = dict(
        parallel=parallel_as_planned(spec, plan),
        resources=resources,
        batch=batch,
        optimizer=spec.optimizer.model_copy(update=stage),
    )
    return spec.model_copy(update=changed)
