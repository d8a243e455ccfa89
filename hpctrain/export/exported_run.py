"""Collects what every file about an exported run says, from the plan that `submit` would use.

Belongs here: facts that hold for pods and hosts alike, the comment at the top of their files, and
writing them. Does not belong here: what only one of them needs (see `kubernetes`, `host_files`),
metrics of runs (see `metrics`).
"""

from __future__ import annotations

import json
import math
import os
import textwrap
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base.durable import replace_text
from hpctrain.base.errors import UsageError
from hpctrain.export.lost_settings import Destination, LostSetting, lost_settings
from hpctrain.job.prepare import Prepared, input_paths
from hpctrain.job.render.environment import (
    RANK_INTERFACE,
    Variable,
    cache_directories,
    inherited_names,
    per_rank_variables,
    script_variables,
)
from hpctrain.spec.job_text import expanded_names, literal_text
from hpctrain.spec.profile import INTERFACE_VARIABLES
from hpctrain.version import __version__

# The program on each node. Its options have torchrun's names.
_PROGRAM = "hpctrain.train.unsupervised"
# Kubernetes' default (core/v1, PodSpec): the least time between SIGTERM and SIGKILL.
_LEAST_GRACE_SECONDS = 30
# So many standard deviations of a Poisson number above its mean: exceeded in one run of 700.
_DEVIATIONS = 3.0
_COMMENT_WIDTH = 96


@dataclass(frozen=True)
class ExportedFile:
    """One file of an export: its name, and its text."""

    name: str
    text: str


@dataclass(frozen=True)
class Export:
    """The files of an export, and what the run loses by it."""

    files: tuple[ExportedFile, ...]
    lost: tuple[LostSetting, ...]


@dataclass(frozen=True)
class ExportedRun:
    """A run as the files describe it.

    `origin` and `title` are lines of a comment. `train_json` is the text of the engine's document,
    `inputs` the paths that it reads. `own_names` are variables whose values no file has.
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

    def comment(self, lost: tuple[LostSetting, ...], how_to: tuple[str, ...]) -> str:
        """Write the top of a file: what it is, how to use it, what is lost.

        No value of a spec can end the comment early.
        """
        wrapped = textwrap.TextWrapper(_COMMENT_WIDTH, initial_indent="- ", subsequent_indent="  ")
        lines = [self.title, self.origin, "", *how_to, "", "Why variables are set:"]
        for one in self.variables:
            lines += wrapped.wrap(f"{one.name}: {one.reason}")
        lines += ["", "Lost, compared with `hpctrain submit` to Slurm:"]
        for setting in lost:
            lines += wrapped.wrap(setting.sentence)
        lines += [
            "",
            "Kept: layout, batch, engine and every setting of training, as `submit` has them;",
            "numbered launches, of which an older one publishes no checkpoint; resuming from the",
            "newest verified checkpoint; a save when the pod or the process is told to stop.",
        ]
        printable = ("".join(c if c.isprintable() else "?" for c in line) for line in lines)
        return "".join(f"# {line}".rstrip() + "\n" for line in printable)


def exported_run(
    prepared: Prepared, destination: Destination, *, host_network: bool = True
) -> ExportedRun:
    """Collect what the files say about a run.

    `host_network`: processes see the network interfaces of their host, which the profile names.
    """
    job, spec, profile, plan = prepared.job, prepared.job.spec, prepared.job.profile, prepared.plan
    in_pods, mttf_seconds = destination == "kubernetes", prepared.supervise.mttf_seconds
    lost = [*lost_settings(job, destination)]

    # The variables of the job script that make sense away from Slurm; values are JobText.
    variables: list[Variable] = []
    scratch = {name for name, _ in cache_directories(profile)}
    for one in script_variables(job, prepared.facts.gpu_variables):
        own = one.name in spec.environment.variables
        reason = None
        if one.name in scratch and not own:
            reason = "a directory below the scratch directory of the site's jobs"
        elif one.name in (*INTERFACE_VARIABLES, RANK_INTERFACE) and not own and not host_network:
            reason = "an interface of the site's nodes, and a pod has its own (`--host-network`)"
        elif one.name != RANK_INTERFACE and one.name.startswith(("SLURM_", "HPCTRAIN_")):
            reason = "a setting of the site for srun or the supervisor"
        elif in_pods and one.prepend:
            reason = "a path of the site's nodes, before what the image has"
        elif in_pods and literal_text(one.value) is None:
            reason = "its value comes from the shell of a job"
        elif not in_pods and any(name.startswith("SLURM") for name in expanded_names(one.value)):
            reason = "its value comes from a Slurm job"
        if reason is None:
            variables.append(one)
        else:
            lost.append(LostSetting(f"variable {one.name}", reason))
    lost += [
        LostSetting(f"variable {one.name}", "it differs between ranks, by Slurm's task prologue")
        for one in per_rank_variables(job)
    ]
    patterns = [name for name in inherited_names(job) if set(name) & set("*?")]
    if patterns:
        reason = "variables of a login by a pattern, which only `hpctrain submit` passes on"
        lost.append(LostSetting(f"inherit {', '.join(patterns)}", reason))
    site_names = [name for name in profile.slurm.inherit if name not in spec.environment.inherit]
    if in_pods and site_names:
        names = ", ".join(site_names)
        lost.append(LostSetting("slurm.inherit", f"variables of a login at the site: {names}"))
    if prepared.train.save_interval_auto and mttf_seconds is not None:
        reason = "mean time between failures of the run, for `checkpoint.every: auto`"
        variables.append(Variable("HPCTRAIN_MTTF_SECONDS", f"{mttf_seconds:.0f}", reason))

    shared = not job.has_whole_nodes
    memory = spec.resources.memory_per_node
    memory_bytes = None if memory is None else int(memory)
    if memory is None and shared:
        memory_bytes = int(profile.nodes.memory) * plan.nodes.gpus_per_node // profile.gpu.per_node

    # As many failures as the plan expects, plus three standard deviations of that (Poisson)
    # number, plus those that the spec allows without progress. JobSet never counts down.
    restarts = spec.supervise.failures_without_progress
    if plan.training_seconds is not None and mttf_seconds:
        expected = plan.training_seconds / mttf_seconds
        restarts += math.ceil(expected + _DEVIATIONS * math.sqrt(expected))

    # Copies of data lie below the scratch directory of a Slurm job.
    train = prepared.train.model_copy(update={"stage_data": False})
    weights = spec.model.pretrained
    read = (*input_paths(train), train.data_cache, os.path.abspath(weights) if weights else None)
    return ExportedRun(
        origin=f"hpctrain {__version__} · spec {prepared.spec.digest[:12]} · profile "
        f"{profile.name} {prepared.profile.digest[:12]}",
        title=f"{spec.name} on {profile.name}: {plan.nodes}, {plan.engine}, {plan.layout}, "
        f"{plan.batch.train_steps} steps",
        nodes=plan.nodes.nodes,
        ranks_per_node=plan.nodes.gpus_per_node,
        accelerator=plan.accelerator,
        # only ASCII, which every reader of YAML takes as it is
        train_json=json.dumps(json.loads(train.model_dump_json()), indent=1) + "\n",
        inputs=tuple(dict.fromkeys(path for path in read if path)),
        variables=tuple(variables),
        own_names=tuple(
            name
            for name in (spec.environment.inherit if in_pods else inherited_names(job))
            if name not in patterns
        ),
        cpus=job.cpus_per_gpu * plan.nodes.gpus_per_node
        if shared or spec.resources.cpus_per_gpu is not None
        else None,
        memory_bytes=memory_bytes,
        grace_seconds=max(_LEAST_GRACE_SECONDS, math.ceil(prepared.supervise.warning_seconds)),
        restarts=restarts,
        lost=tuple(lost),
    )


def write_files(export: Export, directory: Path) -> list[Path]:
    """Write all files into `directory`, which is made. Raises UsageError where that fails."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for file in export.files:
            replace_text(directory / file.name, file.text)
    except OSError as error:
        raise UsageError(f"{directory} cannot be written: {error.strerror}") from error
    return [directory / file.name for file in export.files]
