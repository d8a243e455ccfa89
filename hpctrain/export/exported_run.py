"""Collects what every file about a run says, from the plan that `submit` would use. Pure.

Belongs here: facts that hold for pods and hosts alike. Does not belong here: what only one of them
needs (see `pod_settings`, `host_files`), reading specs (`hpctrain.export.of_spec`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpctrain.export.lost_settings import Destination, LostSetting, lost_settings
from hpctrain.job.render.environment import Variable, inherited_names
from hpctrain.plan.job import TrainingJob

if TYPE_CHECKING:
    from hpctrain.spec.catalogue import GpuVariable
from typing import TYPE_CHECKING

from hpctrain.job.render.environment import cache_directories, per_rank_variables, script_variables
from hpctrain.spec.job_text import expanded_names, literal_text
from hpctrain.spec.profile import INTERFACE_VARIABLES

if TYPE_CHECKING:
    from hpctrain.spec.catalogue import GpuVariable


# The program on each node. Its options have torchrun's names.
_PROGRAM = "hpctrain.train.unsupervised"
# Kubernetes' default (core/v1, PodSpec): the least time between SIGTERM and SIGKILL.
_LEAST_GRACE_SECONDS = 30
# So many standard deviations of a Poisson number above its mean: exceeded in one run of 700.
_DEVIATIONS = 3.0


@dataclass(frozen=True)
class ExportedFile:
    """One file of an export: its name, and its text."""

    name: str
    text: str


@dataclass(frozen=True)
class ExportInputs:
    """What `submit` would use: the job, settings of trainer and supervisor.

    `train_json` is the text of the engine's document. `mttf_seconds`: mean time between failures of
    the whole run. `stop_seconds`: how long a stop may take, with its last save.
    """

    job: TrainingJob
    gpu_variables: tuple[GpuVariable, ...]
    train_json: str
    inputs: tuple[str, ...]
    measures_interval: bool
    mttf_seconds: float | None
    stop_seconds: float
    origin: str


@dataclass(frozen=True)
class ExportedRun:
    """A run as the files describe it.

    `origin` and `title` are lines of a comment. `own_names` are variables whose values no file has.
    A node that is shared asks for `cpus` and `memory_bytes`; None where it has the whole node.
    """

    origin: str
    title: str
    nodes: int
    ranks_per_node: int
    accelerator: str
    train_json: str
    inputs: tuple[str, ...]
    variables: tuple[Variable, ...]
    own_names: tuple[str, ...]
    cpus: int | None
    memory_bytes: int | None
    grace_seconds: int
    restarts: int
    lost: tuple[LostSetting, ...]

    def program(self, run_directory: str, train_config: str) -> tuple[str, ...]:
        """Return the words after the interpreter that start the ranks of a node."""
        return (
            "-m",
            _PROGRAM,
            f"--nnodes={self.nodes}",
            f"--nproc-per-node={self.ranks_per_node}",
            f"--run-directory={run_directory}",
            train_config,
        )


def exported_run(
    inputs: ExportInputs, destination: Destination, *, host_network: bool = True
) -> ExportedRun:
    """Collect what the files say about a run."""
    job, spec, profile, plan = inputs.job, inputs.job.spec, inputs.job.profile, inputs.job.plan
    chosen = portable_variables(job, inputs.gpu_variables, destination, host_network=host_network)
    lost = [*lost_settings(job, destination), *chosen.lost]
    site_names = [name for name in profile.slurm.inherit if name not in spec.environment.inherit]
    if destination == "kubernetes" and site_names:
        names = ", ".join(site_names)
        lost.append(LostSetting("slurm.inherit", f"variables of a login at the site: {names}"))
    variables = chosen.carried
    if inputs.measures_interval and inputs.mttf_seconds is not None:
        reason = "mean time between failures of the run, for `checkpoint.every: auto`"
        seconds = f"{inputs.mttf_seconds:.0f}"
        variables = (*variables, Variable("HPCTRAIN_MTTF_SECONDS", seconds, reason))
    shared = not job.has_whole_nodes
    cpus = job.cpus_per_gpu * plan.nodes.gpus_per_node
    memory, wanted = spec.resources.memory_per_node, spec.resources.cpus_per_gpu
    if memory is None and shared:
        share = int(profile.nodes.memory) * plan.nodes.gpus_per_node // profile.gpu.per_node
        memory_bytes: int | None = share
    else:
        memory_bytes = None if memory is None else int(memory)
    return ExportedRun(
        origin=inputs.origin,
        title=f"{spec.name} on {profile.name}: {plan.nodes}, {plan.engine}, {plan.layout}, "
        f"{plan.batch.train_steps} steps",
        nodes=plan.nodes.nodes,
        ranks_per_node=plan.nodes.gpus_per_node,
        accelerator=plan.accelerator,
        train_json=inputs.train_json,
        inputs=inputs.inputs,
        variables=variables,
        own_names=spec.environment.inherit if destination == "kubernetes" else inherited_names(job),
        cpus=cpus if shared or wanted is not None else None,
        memory_bytes=memory_bytes,
        grace_seconds=max(_LEAST_GRACE_SECONDS, math.ceil(inputs.stop_seconds)),
        restarts=restarts(inputs),
        lost=tuple(lost),
    )


def restarts(inputs: ExportInputs) -> int:
    """Choose how often all pods may be started again, in the whole life of the run.

    As many failures as the plan expects, plus three standard deviations of that (Poisson) number,
    plus the failures that `supervise.failures_without_progress` allows. JobSet never counts down.
    """
    least, plan = inputs.job.spec.supervise.failures_without_progress, inputs.job.plan
    if plan.step_seconds is None or not inputs.mttf_seconds:
        return least
    expected = plan.step_seconds * plan.batch.train_steps / inputs.mttf_seconds
    return least + math.ceil(expected + _DEVIATIONS * math.sqrt(expected))


# -- Chooses the variables of a job that make sense away from Slurm. Pure -----------------------


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
