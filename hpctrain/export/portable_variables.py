"""Chooses the variables of a job that make sense away from Slurm. Pure.

Belongs here: which variables of the job script are carried, and why others are not. Does not belong
here: how a file writes them (see `pod`, `host_files`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpctrain.export.lost_settings import Destination, LostSetting
from hpctrain.job.render.job_environment import Variable, script_variables
from hpctrain.job.render.software import cache_directories, per_rank_variables
from hpctrain.plan.job import TrainingJob
from hpctrain.spec.job_text import expanded_names, literal_text
from hpctrain.spec.profile import INTERFACE_VARIABLES

if TYPE_CHECKING:
    from hpctrain.spec.catalogue import GpuVariable


@dataclass(frozen=True)
class PortableVariables:
    """What is set, and what is not, each with its reason; values are JobText."""

    carried: tuple[Variable, ...]
    lost: tuple[LostSetting, ...]


def portable_variables(
    job: TrainingJob,
    gpu_variables: tuple[GpuVariable, ...],
    destination: Destination,
    *,
    host_network: bool = True,
) -> PortableVariables:
    """Choose among the variables that the job script would export.

    `host_network`: processes see the network interfaces of their host, which the profile names.
    """
    per_rank = per_rank_variables(job)
    scratch = {name for name, _ in cache_directories(job.profile)}
    carried, lost = [], []
    for one in script_variables(job, gpu_variables):
        own = one.name in job.spec.environment.variables
        reason = None
        if one.name in scratch and not own:
            reason = "a directory below the scratch directory of the site's jobs"
        elif one.name.startswith(("SLURM_", "HPCTRAIN_")):
            reason = "a setting of the site for srun or the supervisor"
        elif one.name in INTERFACE_VARIABLES and not own and not host_network:
            reason = "an interface of the site's nodes, and a pod has its own (`--host-network`)"
        elif destination == "kubernetes":
            reason = _reason_against_pods(one)
        elif any(name.startswith("SLURM") for name in expanded_names(one.value)):
            reason = "its value comes from a Slurm job"
        if reason is None:
            carried.append(one)
        else:
            lost.append(LostSetting(f"variable {one.name}", reason))
    lost += [
        LostSetting(f"variable {one.name}", "it differs between ranks, by Slurm's task prologue")
        for one in per_rank
    ]
    return PortableVariables(tuple(carried), tuple(lost))


def _reason_against_pods(variable: Variable) -> str | None:
    if variable.prepend:
        return "a path of the site's nodes, before what the image has"
    if literal_text(variable.value) is None:
        return "its value comes from the shell of a job"
    return None
