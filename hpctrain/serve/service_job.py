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
from typing import Generic, Literal, TypeVar

from pydantic import BaseModel

from hpctrain.base.units import Duration, short_duration
from hpctrain.job.prepare import JobDocuments, setup_file, site_templates, templates_digest
from hpctrain.job.render.environment import prologue_text
from hpctrain.job.render.script import (
    JobTask,
    ScriptFacts,
    ServiceWords,
    job_script,
    render_service_script,
)
from hpctrain.job.supervisor_settings import supervise_config
from hpctrain.judge.catalogue import load_signatures
from hpctrain.plan.job import Job
from hpctrain.records.jobs import run_comment
from hpctrain.records.layout import RunLayout
from hpctrain.records.service_layout import ServiceLayout
from hpctrain.records.supervise_config import LaunchShape
from hpctrain.serve.plan.documents import ServicePlan
from hpctrain.spec.loader import Loaded, profile_search_path
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.service import ServiceSpec
from hpctrain.spec.supervision import SuperviseSpec

# Signs of life come every second; a busy file system may hold some up.
_STALL = Duration(180)
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
class ServiceJobDocuments(JobDocuments, Generic[Own]):
    """The documents of a job of a service; `own` are the settings of the program that it runs."""

    own: Own

    def texts(self, run: RunLayout) -> Mapping[Path, str]:
        """The files of a run directory with these documents."""
        own_path = run.directory / self.supervise.shapes[0].train_config
        return {**super().texts(run), own_path: self.own.model_dump_json(indent=1)}


def service_job_documents(
    service: ServiceLayout,
    inputs: ServiceInputs,
    part: Literal["replica", "router"],
    run_id: str,
    job: Job,
    task: JobTask,
    own: Own,
    read: tuple[str, ...] = (),
    mttf_seconds: float | None = None,
) -> ServiceJobDocuments[Own]:
    """Make the documents of a job that runs `task` with the settings `own`.

    `read`: files and directories that its nodes must be able to read. Raises InvalidInputError for
    what sbatch cannot take.
    """
    nodes, runs = job.plan.nodes.nodes, service.directory.parent
    shapes = (LaunchShape(nodes=nodes, tasks=nodes, train_config=task.settings),)
    supervise = supervise_config(
        job,
        run_id,
        runs,
        shapes,
        target_step=1,
        warning_seconds=float(task.warning_seconds),
        verify="auto",
        mttf_seconds=mttf_seconds,
        inputs=read,
        serves=True,
        served_progress_seconds=PROGRESS_SECONDS,
    )
    words = ServiceWords(service.service_id, short_duration(PROGRESS_SECONDS))
    script = job_script(job, inputs.script_facts(run_id), task)
    return ServiceJobDocuments(
        script=render_service_script(part, script, words, site_templates(inputs.profile)),
        supervise=supervise,
        signatures=load_signatures(profile_search_path()).to_json(),
        prologue=prologue_text(job),
        own=own,
    )


def service_supervision(setup_stall_seconds: float) -> SuperviseSpec:
    """Choose when the supervisor of a service's job acts; `setup_stall_seconds`: for its start."""
    return SuperviseSpec(stall=_STALL, setup_stall=Duration(setup_stall_seconds))
