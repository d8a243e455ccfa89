"""What the planner knows, for tests: the packaged calibration and a GPU of the catalogue."""

from __future__ import annotations

from hpctrain.plan.request import Knowledge
from hpctrain.spec.catalogue import cluster_gpu
from hpctrain.spec.loader import load_calibration, load_catalogue
from hpctrain.spec.profile import ClusterProfile


def knowledge_of(profile: ClusterProfile) -> Knowledge:
    """The GPU of a profile that names one of the catalogue's."""
    return Knowledge(cluster_gpu(load_catalogue(), profile), load_calibration())
