"""Cases and knowledge of packaged examples, with the packaged prior."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hpctrain.plan.cost.case import Case
from hpctrain.plan.cost.from_spec import case_of
from hpctrain.plan.mesh.candidate import columns_of
from hpctrain.plan.planner import decide
from hpctrain.plan.request import Knowledge, PlanRequest
from hpctrain.spec.catalogue import cluster_gpu
from hpctrain.spec.loader import (
    find_profile,
    load_calibration,
    load_catalogue,
    load_profile,
    load_run_spec,
    load_uncertainty,
)
from hpctrain.spec.profile import ClusterProfile

EXAMPLES = Path(__file__).resolve().parents[4] / "examples"


def sure_knowledge(profile: str) -> tuple[ClusterProfile, Knowledge]:
    """A packaged profile, and what the planner knows of it."""
    document = load_profile(find_profile(profile)).document
    gpu = cluster_gpu(load_catalogue(), document)
    return document, Knowledge(gpu, load_calibration(), load_uncertainty())


def the_case(example: str, profile: str) -> Case:
    """The case of an example's own layout."""
    document, knowledge = sure_knowledge(profile)
    spec = load_run_spec(EXAMPLES / f"{example}.yaml").document
    decision = decide(PlanRequest(spec, document, replace(knowledge, uncertainty=None)))
    return case_of(decision.request, columns_of(decision.found.candidate(decision.row)))
