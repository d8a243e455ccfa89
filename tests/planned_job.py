"""The job of a spec on a site, planned as `submit` does, for tests."""

from __future__ import annotations

from hpctrain.plan.job import TrainingJob
from hpctrain.plan.planner import make_plan
from hpctrain.plan.request import Knowledge
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.run import RunSpec


def planned_job(
    spec: RunSpec, profile: ClusterProfile, knowledge: Knowledge | None = None
) -> TrainingJob:
    return TrainingJob(spec, profile, make_plan(spec, profile, knowledge))
