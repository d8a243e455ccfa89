"""Builds the script of an evaluation job: the site's job script around another command.

Software, limits, environment and container are those of the training job, from the same template.
Belongs here: the directives of one node, and the command with its placeholders. Does not belong
here: when it is submitted (`hpctrain.supervise.evaluation_jobs`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from hpctrain.base.errors import Refusal
from hpctrain.job.render.job_options import (
    exclusive_option,
    gpu_request,
    job_comment,
    job_constraint,
    memory_options,
)
from hpctrain.job.render.quoting import sh
from hpctrain.job.render.script import PACKAGED, Script, directive_lines, render_template
from hpctrain.plan.job import Job, TrainingJob
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.run import PLACEHOLDERS, EvaluationJobSpec

TEMPLATE = "evaluation.sbatch.j2"
_PLACEHOLDER = re.compile(r"\{(" + "|".join(PLACEHOLDERS) + r")\}")


@dataclass(frozen=True)
class EvaluationCommand:
    """What the template puts in place of the training: words of bash, quoted already."""

    name: str
    python: str
    srun: tuple[str, ...]
    words: tuple[str, ...]


def evaluation_problems(
    wanted: EvaluationJobSpec, training: TrainingJob, other: ClusterProfile, field: str
) -> list[Refusal]:
    """List what the site cannot give to an evaluation; `other` is the profile in its partition."""
    partition = other.slurm.partition(wanted.partition or training.spec.resources.partition)
    found, site = [], training.profile.name
    if partition is None:
        names = ", ".join(one.name for one in other.slurm.partitions)
        text = f"profile {site} has no partition `{wanted.partition}`: it has {names}"
        found.append(Refusal(text, f"{field}.partition"))
    elif partition.max_walltime is not None and wanted.walltime > partition.max_walltime:
        text = (
            f"walltime {wanted.walltime.slurm()} exceeds the limit of partition {partition.name}, "
            f"{partition.max_walltime.slurm()}"
        )
        found.append(Refusal(text, f"{field}.walltime"))
    if wanted.gpus > other.gpu.per_node:
        text = f"an evaluation job has one node, of {other.gpu.per_node} GPUs at {site}"
        found.append(Refusal(text, f"{field}.gpus"))
    return found


def evaluation_script(
    script: Script,
    training: TrainingJob,
    wanted: EvaluationJobSpec,
    template_directory: Path | None = None,
) -> str:
    """Render the script of one evaluation; `script` is that of the training.

    `training` has the profile as it is in the partition of the evaluation.
    """
    python = script.supervisor[0]
    cpus = wanted.cpus or max(1, wanted.gpus * training.cpus_per_gpu)
    srun = ("srun", "--nodes=1", "--ntasks=1", f"--cpus-per-task={cpus}", "--export=ALL")
    command = EvaluationCommand(wanted.name, python, srun, tuple(map(placed_word, wanted.command)))
    own = replace(
        script,
        title=f"evaluation {wanted.name} of {script.title}",
        directives=_directives(
            _on_one_node(training, wanted), training, wanted, training.profile.allocated_cpus(cpus)
        ),
    )
    return render_template(f"{PACKAGED}/{TEMPLATE}", template_directory, own, evaluation=command)


def placed_word(word: str) -> str:
    """Quote a word of the command; placeholders become variables of the script, in quotes."""
    parts = _PLACEHOLDER.split(word)
    quoted = [
        f'"$HPCTRAIN_{part.upper()}"' if number % 2 else sh(part)
        for number, part in enumerate(parts)
        if part
    ]
    return "".join(quoted) or "''"


def _on_one_node(training: TrainingJob, wanted: EvaluationJobSpec) -> Job:
    """Describe the job of an evaluation: what the training has, on some GPUs of one node."""
    own = {"partition": wanted.partition} if wanted.partition is not None else {}
    resources = training.spec.resources.model_copy(update={**own, "memory_per_node": None})
    nodes = training.plan.nodes.model_copy(update={"nodes": 1, "gpus_per_node": wanted.gpus})
    return Job(
        training.spec.model_copy(update={"resources": resources}),
        training.profile,
        training.plan.model_copy(update={"nodes": nodes}),
    )


def _directives(
    job: Job, training: TrainingJob, wanted: EvaluationJobSpec, cpus: int
) -> tuple[str, ...]:
    """List the options of the #SBATCH lines; the nodes have the features of the training's."""
    resources, slurm, same = job.spec.resources, job.profile.slurm, wanted.partition is None
    memory = memory_options(job) if wanted.gpus else {}
    if wanted.memory_per_node is not None:
        memory = {"mem": f"{int(wanted.memory_per_node) // 2**20}M"}
    options: dict[str, str | None] = {
        "comment": job_comment(job),
        "account": wanted.account or resources.account or slurm.account,
        "partition": job.partition.name if job.partition.request else None,
        "qos": wanted.qos or (resources.qos if same else None) or slurm.qos,
        "reservation": (resources.reservation or slurm.reservation) if same else None,
        "constraint": job_constraint(training) if wanted.gpus else None,
        "nodes": "1",
        "ntasks": "1",
        "cpus-per-task": str(cpus),
        **(gpu_request(job, counts_tasks=False) if wanted.gpus else {}),
        **memory,
        "time": wanted.walltime.slurm(),
        "open-mode": "append",
        "export": "NONE" if slurm.export == "none" else None,
    }
    lines = directive_lines(job, options)
    lines += exclusive_option(job) if wanted.gpus else ()
    return tuple(slurm.directives.applied_to((*lines, "--requeue")))
