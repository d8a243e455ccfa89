"""Collects what the jobs of a service have in common: those of its replicas, and the router's.

Belongs here: what a service is made of, the files of a job's run directory, and the settings of its
supervisor. Does not belong here: what a replica (`replica_prototype`) or the router
(`serve_router`) has of its own, Slurm.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import BaseModel

from hpctrain.actions.site_files import setup_file, site_templates, templates_digest
from hpctrain.actions.supervisor_settings import NODE_LEDGER_NAME
from hpctrain.plan.serving.documents import ServicePlan
from hpctrain.render.job_environment import submit_variables
from hpctrain.render.job_request import ServicePart
from hpctrain.render.script import ScriptFacts
from hpctrain.spec.loader import Loaded
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.profile.network import port_range
from hpctrain.spec.service import ServiceSpec
from hpctrain.spec.supervision import SuperviseSpec
from hpctrain.store.jobs import run_comment
from hpctrain.store.layout import RunLayout
from hpctrain.store.supervise_config import LaunchShape, SuperviseConfig

# Signs of life come every second; a busy file system may hold some up.
_STALL_SECONDS = 180.0
# A launch that has answered requests for so long counts as progress: budgets begin anew.
PROGRESS_SECONDS = 600.0
Own = TypeVar("Own", bound=BaseModel)


@dataclass(frozen=True)
class ServiceInputs:
    """What a service is made of. `weights`: the Hugging Face directory that is served.

    The profile is the one for jobs in the spec's partition.
    """

    spec: Loaded[ServiceSpec]
    profile: Loaded[ClusterProfile]
    plan: ServicePlan
    weights: Path
    python: str = sys.executable

    @property
    def silent_profile(self) -> ClusterProfile:
        """The profile without its channels: the controller tells people about its jobs."""
        return self.profile.document.model_copy(update={"notify": None})

    def script_facts(self, run_id: str) -> ScriptFacts:
        """Collect what the script of a job says of where it comes from."""
        templates = site_templates(self.profile)
        return ScriptFacts(
            run_id=run_id,
            comment=run_comment(run_id),
            spec_digest=self.spec.digest,
            profile_digest=self.profile.digest,
            python=self.python,
            setup=setup_file(self.profile),
            template_sha256=None if templates is None else templates_digest(templates),
        )


@dataclass(frozen=True)
class ServiceJobDocuments(Generic[Own]):
    """The texts of the files of a job; `own` are the settings of the program that it runs."""

    script: str
    supervise: SuperviseConfig
    own: Own
    signatures: str
    prologue: str | None

    def texts(self, run: RunLayout) -> Mapping[Path, str]:
        """The files of a run directory with these documents."""
        own_path = run.directory / self.supervise.shapes[0].train_config
        found = {
            run.script: self.script,
            run.supervise_config: self.supervise.model_dump_json(indent=1),
            own_path: self.own.model_dump_json(indent=1),
            run.signatures: self.signatures,
        }
        return found if self.prologue is None else {**found, run.prologue: self.prologue}


def service_supervision(
    run_id: str,
    part: ServicePart,
    profile: ClusterProfile,
    runs: Path,
    *,
    settings_file: str,
    setup_stall_seconds: float,
    warning_seconds: float,
    read: tuple[str, ...] = (),
    mttf_seconds: float | None = None,
) -> SuperviseConfig:
    """Collect the supervisor's settings of one job, whose tasks have theirs in `settings_file`.

    `read`: files and directories that its nodes must be able to read.
    """
    defaults, nodes = SuperviseSpec(), part.nodes.nodes
    return SuperviseConfig(
        run_id=run_id,
        target_step=1,
        continuation=profile.continuation,
        continuation_jobs=profile.continuation_jobs,
        failures_without_progress=defaults.failures_without_progress,
        stall_seconds=_STALL_SECONDS,
        setup_stall_seconds=setup_stall_seconds,
        kill_wait_seconds=float(profile.slurm.kill_wait),
        warning_seconds=warning_seconds,
        poll_seconds=float(profile.limits.poll),
        verify="auto",
        cluster=profile.name,
        storm_failures=defaults.storm_failures,
        storm_window_seconds=float(defaults.storm_window),
        exclude_nodes=defaults.exclude_nodes,
        shapes=(LaunchShape(nodes=nodes, tasks=nodes, train_config=settings_file),),
        cluster_nodes=profile.nodes.count,
        node_ledger=str(runs / NODE_LEDGER_NAME),
        mttf_seconds=mttf_seconds,
        inputs=read,
        submit_variables=submit_variables(part, profile),
        master_address=profile.network.master_address,
        master_ports=port_range(profile.network.ports) if profile.network.ports else None,
        serves=True,
        served_progress_seconds=PROGRESS_SECONDS,
    )
