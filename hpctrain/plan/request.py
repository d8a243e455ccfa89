"""The input of the planner: a spec, a cluster, and the data sheet of its GPU.

Belongs here: the record that every step of planning takes. Does not belong here: decisions, or
anything that needs NumPy.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from hpctrain.plan.documents import Goal
from hpctrain.plan.model.counts import ModelCounts, count_model
from hpctrain.spec.calibration import Calibration
from hpctrain.spec.catalogue import Gpu
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.run import RunSpec


@dataclass(frozen=True)
class Knowledge:
    """Constants of the cost model. `gpu`: the GPU with its links, None if it is not listed."""

    gpu: Gpu | None
    calibration: Calibration


@dataclass(frozen=True)
class PlanRequest:
    """What to plan, on which cluster, and by which goal plans are compared.

    Without `knowledge` of a GPU no time is predicted.
    """

    spec: RunSpec
    profile: ClusterProfile
    knowledge: Knowledge | None = None
    goal: Goal = "time"

    @cached_property
    def counts(self) -> ModelCounts:
        """Parameters and operations of the spec, counted at the first use."""
        return count_model(self.spec)
