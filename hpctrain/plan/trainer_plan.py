"""The plan of a run with a trainer of its own: how many nodes it has, and what is not known of it.

Nothing is predicted of a program that hpctrain does not know: neither memory nor speed. Belongs
here: the document and the decision. Does not belong here: plans of hpctrain's engines (see
`documents`), forecasts.
"""

from __future__ import annotations

from typing import Literal

from hpctrain.base.errors import LimitError
from hpctrain.plan.documents import RunPlan
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.trainer import TrainerRunSpec


class TrainerPlan(RunPlan):
    """What was decided for a run with a trainer of its own; the `plan.json` of such a run.

    `level`: how far it is supervised, 0 to 4. `target_step`: None where a file ends the run.
    """

    kind: Literal["trainer"] = "trainer"
    engine: Literal["trainer"] = "trainer"
    framework: str | None = None
    level: int
    target_step: int | None

    @property
    def world_size(self) -> int:
        return self.nodes.nodes * self.nodes.gpus_per_node

    @property
    def reports_steps(self) -> bool:
        """Whether the trainer tells its steps; else only checkpoints show how far it is."""
        return self.level >= 3

    @property
    def title(self) -> str:
        """What trains, and how far it is supervised."""
        return f"trainer {self.framework or 'of its own'} (level {self.level} of 4)"


def plan_trainer(spec: TrainerRunSpec, profile: ClusterProfile) -> TrainerPlan:
    """Spread the GPUs of a run over nodes. Raises LimitError for what the site does not allow."""
    # With NumPy, which readers of the document do without.
    from hpctrain.plan.limits import node_request, resource_problems, size_problems

    gpus, trainer = spec.resources.gpus, spec.trainer
    problems = [*size_problems(gpus, profile), *resource_problems(spec.resources, profile)]
    if problems:
        raise LimitError(problems)
    return TrainerPlan(
        run_name=spec.name,
        profile_name=profile.name,
        framework=trainer.framework,
        accelerator="cpu" if profile.gpu.emulated else "cuda",
        nodes=node_request(gpus, profile.gpu.per_node),
        level=trainer.level,
        target_step=trainer.done.step,
        gpu_memory_bytes=int(profile.gpu.memory),
        reasons=tuple(trainer.needs),
    )
