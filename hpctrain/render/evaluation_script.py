"""Builds the script of an evaluation job: the site's job script around another command.

Software, limits, environment and container are those of the training job, from the same template.
Belongs here: the directives of one node, and the command with its placeholders. Does not belong
here: when it is submitted (`hpctrain.supervise.evaluation_jobs`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from hpctrain.errors import Refusal
from hpctrain.plan.documents import Plan
from hpctrain.render.job_environment import notify_names
from hpctrain.render.memory import memory_options
from hpctrain.render.quoting import directive_value, sh
from hpctrain.render.script import Script, cpus_per_gpu, exclusive_option, gpu_request
from hpctrain.render.site_options import job_constraint, sbatch_options
from hpctrain.render.template import PACKAGED, render_template
from hpctrain.spec.evaluation import PLACEHOLDERS, EvaluationJobSpec
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.run import RunSpec
from hpctrain.spec.slurm_options import written_options

TEMPLATE = "evaluation.sbatch.j2"
_PLACEHOLDER = re.compile(r"\{(" + "|".join(PLACEHOLDERS) + r")\}")


@dataclass(frozen=True)
class EvaluationCommand:
    """What the template puts in place of the training: words of bash, quoted already."""

    name: str
    python: str
    secrets: tuple[str, ...]
    srun: tuple[str, ...]
    words: tuple[str, ...]


def evaluation_problems(
    spec: RunSpec, profile: ClusterProfile, other: ClusterProfile, index: int
) -> list[Refusal]:
    """List what the site cannot give to a job; `other` is the profile in the job's partition."""
    job, field = spec.evaluation.jobs[index], f"evaluation.jobs[{index}]"
    partition = other.slurm.partition(job.partition or spec.resources.partition)
    found = []
    if partition is None:
        names = ", ".join(one.name for one in other.slurm.partitions)
        text = f"profile {profile.name} has no partition `{job.partition}`: it has {names}"
        found.append(Refusal(text, f"{field}.partition"))
    elif partition.max_walltime is not None and job.walltime > partition.max_walltime:
        text = (
            f"walltime {job.walltime.slurm()} exceeds the limit of partition {partition.name}, "
            f"{partition.max_walltime.slurm()}"
        )
        found.append(Refusal(text, f"{field}.walltime"))
    if job.gpus > other.gpu.per_node:
        text = f"an evaluation job has one node, of {other.gpu.per_node} GPUs at {profile.name}"
        found.append(Refusal(text, f"{field}.gpus"))
    return found


def evaluation_script(
    script: Script,
    spec: RunSpec,
    other: ClusterProfile,
    plan: Plan,
    job: EvaluationJobSpec,
    template_directory: Path | None = None,
) -> str:
    """Render the script of one job; `script` is that of the training, `other` the profile in the
    job's partition."""
    python = script.supervisor[0]
    cpus = job.cpus or max(1, job.gpus * cpus_per_gpu(spec, other))
    srun = ("srun", "--nodes=1", "--ntasks=1", f"--cpus-per-task={cpus}", "--export=ALL")
    secrets, words = notify_names(spec, other), tuple(map(placed_word, job.command))
    command = EvaluationCommand(job.name, python, secrets, srun, words)
    own = replace(
        script,
        title=f"evaluation {job.name} of {script.title}",
        directives=_directives(spec, other, plan, job, cpus),
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


def _directives(
    spec: RunSpec, other: ClusterProfile, plan: Plan, job: EvaluationJobSpec, cpus: int
) -> tuple[str, ...]:
    partition = other.slurm.partition(job.partition or spec.resources.partition)
    assert partition is not None, "`evaluation_problems` has checked it"
    same = job.partition is None
    nodes = plan.nodes.model_copy(update={"nodes": 1, "gpus_per_node": job.gpus})
    small = plan.model_copy(update={"nodes": nodes})
    options: dict[str, str | None] = {
        "account": job.account or spec.resources.account or other.slurm.account,
        "partition": partition.name if partition.request else None,
        "qos": job.qos or (spec.resources.qos if same else None) or other.slurm.qos,
        "reservation": (spec.resources.reservation or other.slurm.reservation) if same else None,
        "constraint": job_constraint(spec, other, plan) if job.gpus else None,
        "nodes": "1",
        "ntasks": "1",
        "cpus-per-task": str(cpus),
        **(gpu_request(other, small, counts_tasks=False) if job.gpus else {}),
        **_memory(spec, other, small, job),
        "time": job.walltime.slurm(),
        "open-mode": "append",
        "export": "NONE" if other.slurm.export == "none" else None,
    }
    lines = [f"--{name}={directive_value(name, value)}" for name, value in options.items() if value]
    lines += [
        f"--{name}" if value is None else f"--{name}={directive_value(name, value)}"
        for name, value in written_options(sbatch_options(spec, other))
    ]
    lines += exclusive_option(other, small) if job.gpus else ()
    return (*lines, "--requeue")


def _memory(
    spec: RunSpec, other: ClusterProfile, small: Plan, job: EvaluationJobSpec
) -> dict[str, str | None]:
    if job.memory_per_node is not None:
        return {"mem": f"{int(job.memory_per_node) // 2**20}M"}
    if not job.gpus:
        return {}
    resources = spec.resources.model_copy(update={"memory_per_node": None})
    return memory_options(spec.model_copy(update={"resources": resources}), other, small)
