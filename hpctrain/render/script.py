"""Builds the sbatch script from spec, profile and plan. Same input, same bytes.

Belongs here: which directives, variables and srun options a job needs. Does not belong here: the
text around them (`template`), the trainer's settings (see `hpctrain.engines`), files, clocks, or
any path of the submitting machine except the interpreter that is passed in.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpctrain.errors import InvalidInputError, Problem
from hpctrain.plan.documents import DEFAULT_ORDER, Plan
from hpctrain.printable_text import printable_line
from hpctrain.render.containers import container_words, run_container
from hpctrain.render.continuation import (
    continuation_clause,
    continuation_options,
    continuation_problems,
    requeue_flag,
)
from hpctrain.render.nodes import node_options, node_problems, survives_node_failure
from hpctrain.render.quoting import directive_value, sh
from hpctrain.render.srun_tasks import SrunTasks, choose_tasks
from hpctrain.render.topology import topology_options
from hpctrain.render.warning_lead import warning_lead
from hpctrain.spec.profile import INTERFACE_VARIABLES, ClusterProfile
from hpctrain.spec.profile.partition import PartitionProfile
from hpctrain.spec.run import RunSpec
from hpctrain.units import Duration
from hpctrain.version import __version__

if TYPE_CHECKING:
    from hpctrain.spec.catalogue import GpuVariable

_LOG = "logs/slurm-%j.out"
# The only variables that the job inherits from the submitting shell.
_INHERITED = ("HOME", "LANG", "PATH", "USER")
# bash(1), Shell Variables; `export UID=0` would end the job after its time in the queue.
_READ_ONLY = frozenset({"BASHOPTS", "BASH_VERSINFO", "EUID", "PPID", "SHELLOPTS", "UID"})
# Settings of a site for the supervisor (see `hpctrain.supervise.preflight`).
_SITE_HOOKS = frozenset({"HPCTRAIN_KERNEL_LOG"})
# sbatch(1), --export: [ALL,]<variables>, NIL or NONE. A variable of that name would be read as
# one of these words.
_EXPORT_WORDS = frozenset({"ALL", "NIL", "NONE"})
# Set by the supervisor; variables of the image would override them otherwise (pyxis README).
_TRAINER_VARIABLES = (
    "HPCTRAIN_EPOCH",
    "HPCTRAIN_RESUME",
    "HPCTRAIN_MTTF_SECONDS",
    "HPCTRAIN_PINNED_STEPS",
    "HPCTRAIN_VERSION",
    "HPCTRAIN_SPEED_CHECK",
    "MASTER_ADDR",
    "MASTER_PORT",
)


@dataclass(frozen=True)
class Variable:
    """One exported variable and the reason that is written above it."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True)
class ScriptFacts:
    """Inputs of rendering besides spec, profile and plan.

    `comment` is the job's comment; `gpu_variables` are those that the catalogue lists for the
    cluster's GPU, this engine and this layout.
    """

    run_id: str
    comment: str
    spec_digest: str
    profile_digest: str
    python: str
    gpu_variables: tuple[GpuVariable, ...] = ()


@dataclass(frozen=True)
class Script:
    """The values that the template fills in (docs/templates.md); commands are argument lists."""

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
    start_note: str
    task_kind: str
    log_number: str
    signal_note: str
    continuation_note: str
    failures_without_progress: int
    supervisor: tuple[str, ...]
    srun: tuple[str, ...]
    container_srun: tuple[str, ...]
    container_command: tuple[str, ...]
    container_import: tuple[str, ...] | None
    image_import: tuple[str, ...]
    trainer: tuple[str, ...]


def build_script(spec: RunSpec, profile: ClusterProfile, plan: Plan, facts: ScriptFacts) -> Script:
    """Build the job script. Raises InvalidInputError for what sbatch cannot take."""
    partition = profile.slurm.partition(spec.resources.partition)
    assert partition is not None, "the planner has checked the partition"
    python = profile.software.python or facts.python
    if python.startswith("-"):
        raise InvalidInputError([Problem(f"software.python: `{python}` reads as an option")])
    _check_variables((*spec.environment.variables, *spec.environment.inherit))
    _check_variables(variable.name for variable in profile.environment)
    topology = topology_options(profile, plan, spec.resources.spare_nodes)
    contradictions = [
        *continuation_problems(profile, partition),
        *node_problems(spec, plan, topology["constraint"]),
    ]
    if contradictions:  # Slurm would accept them, and never do what they ask for
        raise InvalidInputError([Problem(message) for message in contradictions])
    lead = warning_lead(spec, profile, plan, walltime(spec, profile, partition))
    start = choose_tasks(spec, plan)
    container = run_container(spec, profile)
    variables = _variables(spec, profile, plan, facts)
    names = (*(variable.name for variable in variables), *spec.environment.inherit)
    words = container_words(container, profile, (*names, *_TRAINER_VARIABLES))
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
        variables=variables,
        start_note=start.note,
        task_kind=start.task_kind,
        log_number=start.log_number,
        signal_note=_comment(f"{lead.sentence}."),
        continuation_note=_comment(
            f"Continuation {profile.continuation}, from profile {profile.name}: after preemption, "
            f"time limit and node failure {continuation_clause(profile)}."
        ),
        failures_without_progress=spec.supervise.failures_without_progress,
        supervisor=(python, "-m", "hpctrain.supervise", "--run-directory", "."),
        srun=_srun(spec, profile, plan, start),
        container_srun=words.srun,
        container_command=words.command,
        container_import=words.image_import,
        image_import=(python, "-m", "hpctrain.prepare.container_image"),
        trainer=(container.python if container else python, "-m", *start.module, "train.json"),
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


def walltime(spec: RunSpec, profile: ClusterProfile, partition: PartitionProfile) -> Duration:
    """Return the time limit of one attempt: the spec's, else the tightest of partition and site."""
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
    """List the options of the #SBATCH lines."""
    limit = walltime(spec, profile, partition)
    nodes = node_options(spec, plan, _cpus_per_gpu(spec, profile))
    one_gpu_per_task = "ntasks-per-node" in nodes and spec.launcher == "srun"
    memory = "0" if profile.slurm.all_memory else None
    if spec.resources.memory_per_node is not None:
        memory = f"{int(spec.resources.memory_per_node) // 2**20}M"
    options: dict[str, str | None] = {
        "job-name": facts.run_id,
        "comment": facts.comment,
        "account": spec.resources.account or profile.slurm.account,
        "partition": partition.name if partition.request else None,
        "qos": spec.resources.qos or profile.slurm.qos,
        "reservation": spec.resources.reservation,
        **topology_options(profile, plan, spec.resources.spare_nodes),
        **nodes,
        **_gpu_request(profile, plan, counts_tasks=one_gpu_per_task),
        "mem": memory,
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
    """Return the spec's number, else the share of a GPU in its node's CPUs.

    Slurm's default of 1 would bind all threads of a rank (NCCL's, the data loader's) to one core.
    """
    return spec.resources.cpus_per_gpu or max(1, profile.nodes.cpus // profile.gpu.per_node)


def _gpu_request(
    profile: ClusterProfile, plan: Plan, *, counts_tasks: bool
) -> dict[str, str | None]:
    """Choose the site's option that requests GPUs; `--gpus-per-task` needs a number of tasks."""
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


def _modules(profile: ClusterProfile) -> tuple[tuple[str, ...], ...]:
    """List the commands that load the site's environment modules, already quoted."""
    modules = profile.software.modules
    if modules is None:
        return ()
    commands: list[tuple[str, ...]] = [("source", sh(modules.init))] if modules.init else []
    if modules.purge:
        commands.append(("module", "--force", "purge"))
    if modules.load:
        commands.append(("module", "load", *map(sh, modules.load)))
    return (*commands, ("module", "list"))


def _variables(
    spec: RunSpec, profile: ClusterProfile, plan: Plan, facts: ScriptFacts
) -> tuple[Variable, ...]:
    """List the exported variables, the site's first.

    A variable of the spec replaces the site's, and one that the site lists replaces the GPU
    catalogue's and what follows from `network.interface`. Nodes have to reach each other only if
    there are several.
    """
    interface = profile.network.interface if plan.nodes.nodes > 1 else None
    site = {
        fabric.name: Variable(fabric.name, fabric.value, printable_line(fabric.reason))
        for fabric in profile.environment
        if fabric.concerns(spec.engine.name)
    }
    if interface is not None:
        reason = "network.interface of the profile: all nodes reach each other over it"
        for name in INTERFACE_VARIABLES:
            site.setdefault(name, Variable(name, interface, reason))
    for wanted in facts.gpu_variables:
        reason = printable_line(wanted.reason)
        site.setdefault(wanted.name, Variable(wanted.name, wanted.value, reason))
    own = spec.environment.variables
    return (
        *(variable for name, variable in site.items() if name not in own),
        *(Variable(name, value, "from the run spec") for name, value in sorted(own.items())),
        Variable("PYTHONUNBUFFERED", "1", "log lines appear when they are written"),
    )


def _srun(spec: RunSpec, profile: ClusterProfile, plan: Plan, start: SrunTasks) -> tuple[str, ...]:
    """List the arguments of srun, up to the options that the template adds."""
    arguments = [
        "srun",
        f"--nodes={plan.nodes.nodes}",
        f"--ntasks={start.tasks}",
        f"--ntasks-per-node={start.tasks_per_node}",
        # Ranks in order over nodes and, within a node, over sockets: srun(1) deals CPUs out to the
        # sockets in turn by default, which takes every other rank away from its GPU.
        "--distribution=block:block",
        "--export=ALL",
        "--mpi=none",
        # The supervisor ends the step itself after it has found out which rank failed first;
        # srun's own kill would mask the exit codes. --wait acts if the supervisor does not.
        "--kill-on-bad-exit=0",
        "--wait=120",
    ]
    if start.labelled:
        arguments.append("--label")
    # Not inherited from sbatch since 22.05 (srun(1)).
    arguments.append(f"--cpus-per-task={_cpus_per_gpu(spec, profile) * start.gpus_per_task}")
    if profile.slurm.gpu_request == "gpus-per-task":
        # Otherwise each task sees its own GPU only, and CUDA reaches no peer of the same node.
        arguments.append("--gpu-bind=none")
    return tuple(arguments)


def _check_variables(names: Iterable[str]) -> None:
    """Raise InvalidInputError for names that bash or Slurm would not take as a variable."""
    problems = []
    for name in names:
        if name in _READ_ONLY:
            reason = "it is read-only in bash"
        elif name.upper() in _EXPORT_WORDS:
            reason = "sbatch and srun read it as a word of `--export`"
        elif name.startswith(("SLURM_", "HPCTRAIN_")) and name not in _SITE_HOOKS:
            reason = "Slurm and hpctrain set these themselves"
        else:
            continue
        problems.append(Problem(f"environment: `{name}` cannot be set in a job script: {reason}"))
    if problems:
        raise InvalidInputError(problems)
