"""Everything that is known about a site: its Slurm, one of its nodes, and the login node.

Belongs here: these records. Does not belong here: reading them, or what follows from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hpctrain.base.disk_usage import Directory
from hpctrain.site.survey_texts import Mount, NodeSurvey, RdmaPort
from hpctrain.slurm.cluster_records import ClusterFacts


@dataclass(frozen=True)
class LoginFacts:
    """The machine on which the command runs. `variables` are those that sites set for paths."""

    host: str
    user: str
    python: tuple[int, ...]
    groups: tuple[str, ...] = ()
    runs: Directory = field(default_factory=lambda: Directory(""))
    mounts: tuple[Mount, ...] = ()
    ports: tuple[RdmaPort, ...] = ()
    default_interface: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SiteFacts:
    """All facts; `survey` is None unless a node was looked at."""

    cluster: ClusterFacts
    login: LoginFacts
    survey: NodeSurvey | None = None
