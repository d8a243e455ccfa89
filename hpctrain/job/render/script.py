"""Builds the sbatch script from spec, profile and plan. Same input, same bytes.

Belongs here: which directives, variables and srun options a job needs. Does not belong here: the
text around them (`template`), the trainer's settings (see `hpctrain.engines`), files, clocks, or
any path of the submitting machine except the interpreter that is passed in.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.base.printable_text import printable_line
from hpctrain.job.render.containers import container_words, run_container
from hpctrain.job.render.continuation import (
    continuation_options,
    continuation_problems,
    continuation_sentence,
    requeue_flag,
)
from hpctrain.job.render.job_environment import (
    Variable,
    check_variables,
    inheritance_note,
    inheritance_problems,
    inherited_names,
    script_variables,
)
from hpctrain.job.render.quoting import directive_value
from hpctrain.job.render.resource_options import (
    exclusive_option,
    gpu_request,
    memory_options,
    memory_problems,
    node_options,
    node_problems,
    survives_node_failure,
)
from hpctrain.job.render.site_options import job_constraint, sbatch_options, srun_options
from hpctrain.job.render.software import (
    MUST,
    SetupFile,
    module_commands,
    prologue_text,
    prologue_words,
    ulimit_commands,
)
from hpctrain.job.render.srun_tasks import SrunTasks, choose_tasks
from hpctrain.job.render.topology import topology_options
from hpctrain.job.render.warning_lead import warning_lead
from hpctrain.plan.documents import Plan
from hpctrain.plan.job import Job, TrainingJob
from hpctrain.plan.layout_words import DEFAULT_ORDER
from hpctrain.spec.slurm_options import written_options
from hpctrain.version import __version__

if TYPE_CHECKING:
    from hpctrain.spec.catalogue import GpuVariable

_LOG = "logs/slurm-%j.out"
# Set by the supervisor; variables of the image would override them otherwise (pyxis README).
_TRAINER_VARIABLES = (
    "HPCTRAIN_EPOCH",
    "HPCTRAIN_RESUME",
    "HPCTRAIN_MTTF_SECONDS",
    "HPCTRAIN_PINNED_STEPS",
    "HPCTRAIN_VERSION",
    "HPCTRAIN_SPEED_CHECK",
    "HPCTRAIN_IMAGE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


@dataclass(frozen=True)
class ScriptFacts:
    """Inputs of rendering besides spec, profile and plan.

    `comment` is the job's comment; `gpu_variables` are those that the catalogue lists for the
    cluster's GPU, this engine and this layout. `setup` is the file of `software.setup`,
    `template_sha256` (hex) that of the site's templates; None: the packaged one.
    """

    run_id: str
    comment: str
    spec_digest: str
    profile_digest: str
    python: str
    gpu_variables: tuple[GpuVariable, ...] = ()
    setup: SetupFile | None = None
    template_sha256: str | None = None


@dataclass(frozen=True)
class Script:
    """The values that the template fills in (docs/templates.md); commands are argument lists."""

    title: str
    version: str
    run_id: str
    spec_digest: str
    profile_name: str
    profile_digest: str
    template_digest: str | None
    layout: str
    inheritance_note: str
    directives: tuple[str, ...]
    modules: tuple[tuple[str, ...], ...]
    must: str
    setup: SetupFile | None
    unset: tuple[str, ...]
    ulimits: tuple[tuple[str, ...], ...]
    scratch: str | None
    prologue_digest: str | None
    variables: tuple[Variable, ...]
    start_note: str
    task_kind: str
    log_number: str
    signal_note: str
    continuation_note: str
    failures_without_progress: int
    supervisor: tuple[str, ...]
    srun: tuple[str, ...]
    srun_options: tuple[str, ...]
    container_srun: tuple[str, ...]
    container_command: tuple[str, ...]
    container_in_shell: bool
    container_import: tuple[str, ...] | None
    image_import: tuple[str, ...]
    trainer: tuple[str, ...]


@dataclass(frozen=True)
class JobTask:
    """What a job starts below the supervisor, and what its script says about that.

    `settings`: the file that the module of `tasks` reads. Slurm warns `warning_seconds` before the
    time limit. The notes are sentences, not wrapped, without a full stop.
    """

    title: str
    layout: str
    settings: str
    tasks: SrunTasks
    warning_seconds: int
    warning_note: str
    continuation_note: str


def build_script(job: TrainingJob, facts: ScriptFacts) -> Script:
    """Build the job script of a run. Raises InvalidInputError for what sbatch cannot take."""
    lead, tasks, plan = warning_lead(job), choose_tasks(job), job.plan
    task = JobTask(
        title=f"{printable_line(job.spec.name)} on {job.profile.name}: {plan.nodes}, "
        f"{plan.engine}, {plan.batch.train_steps} steps",
        layout=_layout(plan),
        settings="train.json",
        tasks=tasks,
        warning_seconds=lead.seconds,
        warning_note=lead.sentence,
        continuation_note=continuation_sentence(job.profile),
    )
    return job_script(job, facts, task)


def job_script(job: Job, facts: ScriptFacts, task: JobTask) -> Script:
    """Build the script of a job that runs `task`. Raises InvalidInputError as `build_script`."""
    spec, profile = job.spec, job.profile
    python = profile.software.python or facts.python
    if python.startswith("-"):
        raise InvalidInputError([Problem(f"software.python: `{python}` reads as an option")])
    check_variables((*spec.environment.variables, *inherited_names(job)))
    check_variables((variable.name for variable in profile.environment), site=True)
    contradictions = [
        *continuation_problems(profile, job.partition),
        *inheritance_problems(job),
        *memory_problems(job),
        *node_problems(job, job_constraint(job)),
    ]
    if contradictions:  # Slurm would accept them, and never do what they ask for
        raise InvalidInputError([Problem(message) for message in contradictions])
    prologue = prologue_text(job)
    container = run_container(spec.container, profile.software.container)
    variables = script_variables(job, facts.gpu_variables)
    names = (*(variable.name for variable in variables), *inherited_names(job))
    passed = dict.fromkeys((*names, "PYTHONPATH", *_TRAINER_VARIABLES))
    words = container_words(container, profile, tuple(passed))
    return Script(
        # Comments end at a line break, so none may come in with a value.
        title=task.title,
        version=__version__,
        run_id=facts.run_id,
        spec_digest=facts.spec_digest[:12],
        profile_name=profile.name,
        profile_digest=facts.profile_digest[:12],
        template_digest=facts.template_sha256 and facts.template_sha256[:12],
        layout=task.layout,
        inheritance_note=_comment(f"{inheritance_note(job)}."),
        directives=_directives(job, facts, task.warning_seconds),
        modules=module_commands(profile),
        must=MUST,
        setup=facts.setup,
        unset=profile.software.unset,
        ulimits=ulimit_commands(profile),
        scratch=profile.software.scratch,
        prologue_digest=None if prologue is None else sha256(prologue.encode()).hexdigest()[:12],
        variables=variables,
        start_note=task.tasks.note,
        task_kind=task.tasks.task_kind,
        log_number=task.tasks.log_number,
        signal_note=_comment(f"{task.warning_note}."),
        continuation_note=_comment(f"{task.continuation_note}."),
        failures_without_progress=spec.supervise.failures_without_progress,
        supervisor=(python, "-m", "hpctrain.supervise", "--run-directory", "."),
        srun=_srun(job, task.tasks),
        srun_options=tuple(
            f"--{name}" if value is None else f"--{name}={value}"
            for name, value in written_options(srun_options(job))
        ),
        container_srun=words.srun,
        container_command=words.command,
        container_in_shell=words.in_shell,
        container_import=words.image_import,
        image_import=(python, "-m", "hpctrain.data.making.container_image"),
        trainer=(
            *prologue_words(prologue),
            container.python if container else python,
            "-m",
            *task.tasks.module,
            task.settings,
        ),
    )


def _comment(sentence: str) -> str:
    """Wrap a sentence into comment lines of at most 100 characters."""
    return "\n# ".join(textwrap.wrap(sentence, 98))


def _layout(plan: Plan) -> str:
    """Describe the axes, the batch, and the rank order and islands if they are unusual."""
    batch = f"micro-batch {plan.batch.micro_batch} x {plan.batch.accumulation} accumulation"
    parts = [str(plan.layout), batch]
    if plan.layout.order != DEFAULT_ORDER:
        parts.append(f"order {plan.layout.order}")
    if sum(nodes > 0 for nodes in plan.nodes.island_nodes) > 1:
        islands = " + ".join(map(str, plan.nodes.island_nodes))
        parts.append(f"nodes of islands {islands}")
    return " · ".join(parts)


def _directives(job: Job, facts: ScriptFacts, warning_seconds: int) -> tuple[str, ...]:
    """List the options of the #SBATCH lines."""
    spec, profile, nodes = job.spec, job.profile, node_options(job)
    one_gpu_per_task = "ntasks-per-node" in nodes and spec.launcher == "srun"
    options: dict[str, str | None] = {
        "job-name": facts.run_id,
        "comment": facts.comment if profile.slurm.comment else None,
        "account": spec.resources.account or profile.slurm.account,
        "partition": job.partition.name if job.partition.request else None,
        "qos": spec.resources.qos or profile.slurm.qos,
        "reservation": spec.resources.reservation or profile.slurm.reservation,
        **topology_options(job),
        "constraint": job_constraint(job),
        **nodes,
        **gpu_request(job, counts_tasks=one_gpu_per_task),
        **memory_options(job),
        "time": job.walltime.slurm(),
        "signal": f"B:USR1@{warning_seconds}",
        "open-mode": "append",
        "output": "logs/slurm-%A_%a.out" if profile.continuation == "array" else _LOG,
        **continuation_options(profile),
        "export": "NONE" if profile.slurm.export == "none" else None,
    }
    lines = [*directive_lines(job, options), *exclusive_option(job)]
    if survives_node_failure(job):
        lines.append("--no-kill")
    lines.append(requeue_flag(profile))
    return tuple(lines)


def directive_lines(job: Job, options: Mapping[str, str | None]) -> list[str]:
    """List the chosen options that have a value, then those that the site adds."""
    lines = [f"--{name}={directive_value(name, value)}" for name, value in options.items() if value]
    return lines + [
        f"--{name}" if value is None else f"--{name}={directive_value(name, value)}"
        for name, value in written_options(sbatch_options(job))
    ]


def _srun(job: Job, start: SrunTasks) -> tuple[str, ...]:
    """List the arguments of srun, up to the options that the template adds."""
    arguments = [
        "srun",
        f"--nodes={job.plan.nodes.nodes}",
        f"--ntasks={start.tasks}",
        f"--ntasks-per-node={start.tasks_per_node}",
        # Ranks in order over nodes and, within a node, over sockets: srun(1) deals CPUs out to the
        # sockets in turn by default, which takes every other rank away from its GPU.
        "--distribution=block:block",
        "--export=ALL",
        # The supervisor ends the step itself after it has found out which rank failed first;
        # srun's own kill would mask the exit codes. --wait acts if the supervisor does not.
        "--kill-on-bad-exit=0",
        "--wait=120",
    ]
    if start.labelled:
        arguments.append("--label")
    # Not inherited from sbatch since 22.05 (srun(1)).
    arguments.append(f"--cpus-per-task={job.cpus_per_gpu * start.gpus_per_task}")
    return tuple(arguments)
