"""The input of the planner: a spec, a cluster, and what is known about its GPU.

Belongs here: the record that every step of planning takes. Does not belong here: decisions, or
anything that needs NumPy.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.plan.documents import Goal
from hpctrain.spec.calibration import Calibration
from hpctrain.spec.catalogue import Gpu
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.run import RunSpec


@dataclass(frozen=True)
class Knowledge:
    """What the planner knows besides spec and profile.

    `gpu`: the GPU with its links, None when nobody knows it: then time is not predicted.
    """

    gpu: Gpu | None
    calibration: Calibration


@dataclass(frozen=True)
class PlanRequest:
    """What is to be planned, where, and what is the best plan.

    Without `knowledge` of a GPU no time is predicted.
    """

    spec: RunSpec
    profile: ClusterProfile
    knowledge: Knowledge | None = None
    goal: Goal = "time"
