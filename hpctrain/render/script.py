"""From spec, profile and plan to the text of the sbatch script. Pure: same input, same bytes.

Belongs here: which directives, variables and srun options a job needs. Does not belong here: the
trainer's settings (see `hpctrain.engines`), files, clocks, or any path of the submitting machine
beyond the interpreter that is passed in.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hpctrain.errors import InvalidInputError, Problem
from hpctrain.plan.documents import DEFAULT_ORDER, Plan
from hpctrain.printable_text import printable_line
from hpctrain.render.continuation import (
    continuation_options,
    continuation_problems,
    continuation_words,
    requeue_flag,
)
from hpctrain.render.nodes import node_options, node_problems, survives_node_failure
from hpctrain.render.quoting import directive_value, sh
from hpctrain.render.starting import Starting, starting
from hpctrain.render.topology import topology_options
from hpctrain.render.warning_lead import warning_lead
from hpctrain.spec.profile import ClusterProfile, PartitionProfile
from hpctrain.spec.run import RunSpec
from hpctrain.units import Duration
from hpctrain.version import __version__

_LOG = "logs/slurm-%j.out"
# Passed on from the submitting shell, so that nothing else of it reaches the job.
_INHERITED = ("HOME", "LANG", "PATH", "USER")
# bash(1), Shell Variables; `export UID=0` would end the job after its time in the queue.
_READ_ONLY = frozenset({"BASHOPTS", "BASH_VERSINFO", "EUID", "PPID", "SHELLOPTS", "UID"})
# What a site may tell the supervisor (see `hpctrain.supervise.preflight`).
_SITE_HOOKS = frozenset({"HPCTRAIN_KERNEL_LOG"})
# sbatch(1), --export: [ALL,]<variables>, NIL or NONE. A variable of that name would open the gate.
_EXPORT_WORDS = frozenset({"ALL", "NIL", "NONE"})


@dataclass(frozen=True)
class Variable:
    """One exported variable and the reason that stands beside it."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True)
class ScriptFacts:
    """What rendering needs beyond spec, profile and plan; `comment` is that of the job."""

    run_id: str
    comment: str
    spec_digest: str
    profile_digest: str
    python: str


@dataclass(frozen=True)
class Script:
    """Everything the template shows; commands are lists of words."""

    title: str
    version: str
    run_id: str
    spec_digest: str
    profile_name: str
    profile_digest: str
    layout: str
    directives: tuple[str, ...]
    modules: tuple[tuple[str, ...], ...]
    variables: tuple[Variable, ...]
    starting: Starting
    warning: str
    continuation: str
    failures_without_progress: int
    supervisor: tuple[str, ...]
    srun: tuple[str, ...]
    container_mounts: tuple[str, ...] | None
    trainer: tuple[str, ...]


def build_script(spec: RunSpec, profile: ClusterProfile, plan: Plan, facts: ScriptFacts) -> Script:
    """Decide every word of the job script. Raises InvalidInputError for what sbatch cannot take."""
    partition = profile.slurm.partition(spec.resources.partition)
    assert partition is not None, "the planner has checked the partition"
    python = profile.software.python or facts.python
    if python.startswith("-"):
        raise InvalidInputError([Problem(f"software.python: `{python}` reads as an option")])
    _checked_variables((*spec.environment.variables, *spec.environment.inherit))
    _checked_variables(variable.name for variable in profile.environment)
    _refuse_contradictions(spec, profile, plan, partition)
    limit = walltime(spec, profile, partition)
    return Script(
        # Comments end at a line break, so none may come in with a value.
        title=f"{printable_line(spec.name)} on {profile.name}: {plan.nodes}, "
        f"{plan.engine}, {plan.batch.train_steps} steps",
        version=__version__,
        run_id=facts.run_id,
        spec_digest=facts.spec_digest[:12],
        profile_name=profile.name,
        profile_digest=facts.profile_digest[:12],
        layout=_layout(plan),
        directives=_directives(spec, profile, plan, partition, facts),
        modules=_modules(profile),
        variables=_variables(spec, profile),
        starting=starting(spec, plan),
        warning=_comment(warning_lead(spec, profile, plan, limit).words + "."),
        continuation=_continuation(profile),
        failures_without_progress=spec.supervise.failures_without_progress,
        supervisor=(python, "-m", "hpctrain.supervise", "--run-directory", "."),
        srun=_srun(spec, profile, plan),
        container_mounts=_container_mounts(profile),
        trainer=_trainer(profile, python, starting(spec, plan)),
    )


def _refuse_contradictions(
    spec: RunSpec, profile: ClusterProfile, plan: Plan, partition: PartitionProfile
) -> None:
    """Raises InvalidInputError for what Slurm would take and never do."""
    topology = topology_options(profile, plan, spec.resources.spare_nodes)
    problems = [
        *continuation_problems(profile, partition),
        *node_problems(spec, plan, topology["constraint"], topology["segment"]),
    ]
    if problems:
        raise InvalidInputError([Problem(words) for words in problems])


def _continuation(profile: ClusterProfile) -> str:
    """The sentence about it in the script."""
    return _comment(
        f"Continuation {profile.continuation}, from profile {profile.name}: after preemption, "
        f"time limit and node failure {continuation_words(profile)}."
    )


def _comment(sentence: str) -> str:
    """In lines no longer than 100 characters, as the template continues comments."""
    return "\n# ".join(textwrap.wrap(sentence, 98))


def _layout(plan: Plan) -> str:
    """Sizes of the axes, the batch, and the mapping where it is not the usual one."""
    batch = f"micro-batch {plan.batch.micro_batch} x {plan.batch.accumulation} accumulation"
    parts = [str(plan.layout), batch]
    if plan.layout.order != DEFAULT_ORDER:
        parts.append(f"order {plan.layout.order}")
    if sum(nodes > 0 for nodes in plan.nodes.island_nodes) > 1:
        islands = " + ".join(map(str, plan.nodes.island_nodes))
        parts.append(f"nodes of islands {islands}")
    return " · ".join(parts)


def render_script(script: Script, template_directory: Path | None = None) -> str:
    """The script's text. A site's `template_directory` wins over the packaged templates.

    Raises InvalidInputError for a template of the site that jinja2 cannot use.
    """
    from jinja2 import (
        ChoiceLoader,
        Environment,
        FileSystemLoader,
        PackageLoader,
        StrictUndefined,
        TemplateError,
    )

    loaders = [PackageLoader("hpctrain", "templates")]
    site = [FileSystemLoader(template_directory)] if template_directory else []
    environment = Environment(
        loader=ChoiceLoader([*site, *loaders]),
        undefined=StrictUndefined,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["sh"] = sh
    try:
        return environment.get_template("sbatch/megatron.sbatch.j2").render(script=script)
    except TemplateError as error:
        place = getattr(error, "name", None), getattr(error, "lineno", None)
        raise InvalidInputError([Problem(f"job template: {error.message}", *place)]) from error


def walltime(spec: RunSpec, profile: ClusterProfile, partition: PartitionProfile) -> Duration:
    """The time limit of one attempt: the spec's, else the tightest limit of partition and site."""
    if spec.resources.walltime is not None:
        return spec.resources.walltime
    limits = [limit for limit in (partition.max_walltime, profile.limits.max_walltime) if limit]
    return min(limits, default=Duration(86400))


def _directives(
    spec: RunSpec,
    profile: ClusterProfile,
    plan: Plan,
    partition: PartitionProfile,
    facts: ScriptFacts,
) -> tuple[str, ...]:
    limit = walltime(spec, profile, partition)
    nodes = node_options(spec, plan, _cpus_per_gpu(spec, profile))
    one_gpu_each = "ntasks-per-node" in nodes and spec.launcher == "srun"
    options: dict[str, str | None] = {
        "job-name": facts.run_id,
        "comment": facts.comment,
        "account": spec.resources.account or profile.slurm.account,
        "partition": partition.name,
        "qos": spec.resources.qos or profile.slurm.qos,
        "reservation": spec.resources.reservation,
        **topology_options(profile, plan, spec.resources.spare_nodes),
        **nodes,
        **_gpu_request(profile, plan, counts_tasks=one_gpu_each),
        "mem": _memory(spec, profile),
        "time": limit.slurm(),
        "signal": f"B:USR1@{warning_lead(spec, profile, plan, limit).seconds}",
        "open-mode": "append",
        "output": "logs/slurm-%A_%a.out" if profile.continuation == "array" else _LOG,
        **continuation_options(profile),
        "export": ",".join((*_INHERITED, *spec.environment.inherit)),
    }
    lines = [f"--{name}={directive_value(name, value)}" for name, value in options.items() if value]
    if profile.slurm.exclusive and plan.nodes.gpus_per_node == profile.gpu.per_node:
        lines.append("--exclusive")
    if survives_node_failure(spec, plan):
        lines.append("--no-kill")
    lines.append(requeue_flag(profile))
    return tuple(lines)


def _cpus_per_gpu(spec: RunSpec, profile: ClusterProfile) -> int:
    """The spec's number, else a GPU's share of its node: Slurm's default of 1 would bind all
    threads of a rank (NCCL's, the data loader's) to one core."""
    return spec.resources.cpus_per_gpu or max(1, profile.nodes.cpus // profile.gpu.per_node)


def _gpu_request(
    profile: ClusterProfile, plan: Plan, *, counts_tasks: bool
) -> dict[str, str | None]:
    """The site's way to ask for GPUs; those of a task cannot be had without a number of tasks."""
    count, kind = plan.nodes.gpus_per_node, profile.gpu.type
    per_task = profile.slurm.gpu_request == "gpus-per-task"
    per_node = profile.slurm.gpu_request == "gpus-per-node" or (per_task and not counts_tasks)
    return {
        "gres": {"gres": f"gpu:{count}", "gres-typed": f"gpu:{kind}:{count}"}.get(
            profile.slurm.gpu_request
        ),
        "gpus-per-node": str(count) if per_node else None,
        "gpus-per-task": "1" if per_task and counts_tasks else None,
    }


def _memory(spec: RunSpec, profile: ClusterProfile) -> str | None:
    if spec.resources.memory_per_node is not None:
        return f"{int(spec.resources.memory_per_node) // 2**20}M"
    return "0" if profile.slurm.all_memory else None


def _modules(profile: ClusterProfile) -> tuple[tuple[str, ...], ...]:
    modules = profile.software.modules
    if modules is None:
        return ()
    commands: list[tuple[str, ...]] = [("source", sh(modules.init))] if modules.init else []
    if modules.purge:
        commands.append(("module", "--force", "purge"))
    if modules.load:
        commands.append(("module", "load", *map(sh, modules.load)))
    return (*commands, ("module", "list"))


def _variables(spec: RunSpec, profile: ClusterProfile) -> tuple[Variable, ...]:
    """The site's variables first; a spec may add, and override what is not locked."""
    own = spec.environment.variables
    site = [
        Variable(fabric.name, fabric.value, printable_line(fabric.reason))
        for fabric in profile.environment
        if fabric.name not in own and fabric.concerns(spec.engine.name)
    ]
    return (
        *site,
        *(Variable(name, value, "from the run spec") for name, value in sorted(own.items())),
        Variable("PYTHONUNBUFFERED", "1", "log lines appear when they are written"),
    )


def _srun(spec: RunSpec, profile: ClusterProfile, plan: Plan) -> tuple[str, ...]:
    start = starting(spec, plan)
    words = [
        "srun",
        f"--nodes={plan.nodes.nodes}",
        f"--ntasks={start.tasks}",
        f"--ntasks-per-node={start.tasks_per_node}",
        "--distribution=block",
        "--export=ALL",
        "--mpi=none",
        # The supervisor ends the step itself once it has heard which rank failed first; srun's
        # own kill would mask the exit codes. --wait is the net below it.
        "--kill-on-bad-exit=0",
        "--wait=120",
    ]
    # Not inherited from sbatch since 22.05 (srun(1)).
    words.append(f"--cpus-per-task={_cpus_per_gpu(spec, profile) * start.gpus_per_task}")
    container = profile.software.container
    if container is not None and container.launcher == "pyxis":
        words.append(f"--container-image={container.image}")
        names = [variable.name for variable in _variables(spec, profile)]
        names.extend(spec.environment.inherit)
        words.append(f"--container-env={','.join((*names, *_TRAINER_VARIABLES))}")
        words.append("--no-container-mount-home")
    return tuple(words)


def _container_mounts(profile: ClusterProfile) -> tuple[str, ...] | None:
    """Mounts of a pyxis container beside the run directory; None without such a container."""
    container = profile.software.container
    return container.mounts if container and container.launcher == "pyxis" else None


# Set by the supervisor; image variables would win over them otherwise (pyxis README).
_TRAINER_VARIABLES = (
    "HPCTRAIN_EPOCH",
    "HPCTRAIN_RESUME",
    "HPCTRAIN_MTTF_SECONDS",
    "HPCTRAIN_PINNED_STEPS",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def _trainer(profile: ClusterProfile, python: str, start: Starting) -> tuple[str, ...]:
    container = profile.software.container
    command = ("-m", *start.module, "train.json")
    if container is None:
        return (python, *command)
    if container.launcher == "pyxis":
        return (container.python, *command)
    binds = [word for mount in container.mounts for word in ("--bind", mount)]
    return ("apptainer", "exec", "--nv", *binds, container.image, container.python, *command)


def _checked_variables(names: Iterable[str]) -> None:
    """Refuse what bash or Slurm would not take as a variable. Raises InvalidInputError."""
    problems = [
        Problem(f"environment: `{name}` cannot be set in a job script: {why}")
        for name in names
        if (why := _why_not(name))
    ]
    if problems:
        raise InvalidInputError(problems)


def _why_not(name: str) -> str | None:
    if name in _READ_ONLY:
        return "it is read-only in bash"
    if name.upper() in _EXPORT_WORDS:
        return "sbatch and srun read it as a word of `--export`"
    if name.startswith(("SLURM_", "HPCTRAIN_")) and name not in _SITE_HOOKS:
        return "Slurm and hpctrain set these themselves"
    return None
