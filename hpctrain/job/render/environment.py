"""Chooses software and variables of a job: modules, limits, prologue, what is exported. Pure.

Belongs here: commands, the text of `prologue.sh`, which each task runs before the trainer, what a
job inherits, and the variables that its script sets. Does not belong here: the text around
(`script`).

A command that fails ends the attempt with exit code 78 (sysexits.h, EX_CONFIG): training on with
other software, or without locked memory, would cost more than the attempt.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.base.printable_text import printable_line
from hpctrain.job.render.quoting import sh, sh_expanded
from hpctrain.plan.job import Job
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.profile.software import FabricVariable

if TYPE_CHECKING:
    from hpctrain.spec.catalogue import GpuVariable


PROLOGUE = "prologue.sh"
# Read by `hpctrain.train.network_interface`.
RANK_INTERFACE = "HPCTRAIN_INTERFACE"
# Directories of caches below `software.scratch`: of Triton, torch.compile, CUDA's and ROCm's JIT.
_CACHES = (
    ("TRITON_CACHE_DIR", "triton"),
    ("TORCHINDUCTOR_CACHE_DIR", "inductor"),
    ("CUDA_CACHE_PATH", "cuda"),
    ("MIOPEN_USER_DB_PATH", "miopen"),
    ("MIOPEN_CUSTOM_CACHE_DIR", "miopen"),
)


@dataclass(frozen=True)
class SetupFile:
    """A shell file of the site, and its SHA-256 (hex) when the script was rendered."""

    path: str
    sha256: str

    @property
    def checksum_line(self) -> str:
        """The line that `sha256sum --check` reads."""
        return f"{self.sha256}  {self.path}"


# Ends the job where a command fails, and says which.
MUST = 'must() { "$@" || { echo "hpctrain: \\`$*\\` failed on $HOSTNAME" >&2; exit 78; }; }'


def module_commands(profile: ClusterProfile) -> tuple[tuple[str, ...], ...]:
    """List the commands that load the site's environment modules, already quoted."""
    modules = profile.software.modules
    if modules is None:
        return ()
    commands: list[tuple[str, ...]] = []
    if modules.init:
        commands += [("# shellcheck source=/dev/null",), ("source", sh(modules.init))]
    if modules.purge:
        commands.append(("module", "--force", "purge"))
    commands += [("must", "module", "use", sh_expanded(directory)) for directory in modules.use]
    commands += [("must", "module", "load", sh(name)) for name in modules.load]
    return (*commands, ("module", "list"))


def ulimit_commands(profile: ClusterProfile) -> tuple[tuple[str, ...], ...]:
    """List the commands that set limits of processes; srun takes them along to all tasks."""
    return tuple(("ulimit", *words) for words in profile.software.ulimits.options())


def cache_directories(profile: ClusterProfile) -> tuple[tuple[str, str], ...]:
    """List the variables that name directories below `software.scratch`, TMPDIR first."""
    scratch = profile.software.scratch
    if scratch is None:
        return ()
    return (("TMPDIR", scratch), *((name, f"$TMPDIR/{leaf}") for name, leaf in _CACHES))


def per_rank_variables(job: Job) -> tuple[FabricVariable, ...]:
    """List the site's variables that differ between the tasks of a node, of which one is none."""
    spec = job.spec
    if spec.launcher == "node":
        return ()
    return tuple(
        fabric
        for fabric in job.profile.environment
        if fabric.per_local_rank
        and fabric.concerns(spec.engine.name)
        and fabric.name not in spec.environment.variables
    )


def prologue_text(job: Job) -> str | None:
    """Write what each task does before the trainer starts; None if there is nothing to do.

    Raises InvalidInputError for variables per rank that do not fit the tasks of a node.
    """
    variables, profile = per_rank_variables(job), job.profile
    lines = [line for fabric in variables for line in _case(fabric, _tasks(job, fabric))]
    if profile.software.scratch is not None:
        directories = dict.fromkeys(f'"${name}"' for name, _ in cache_directories(profile))
        lines.append(f"mkdir -p {' '.join(directories)} || exit 78")
    if profile.software.prologue:
        lines.append(MUST)
        for command in profile.software.prologue:
            lines.append(" ".join(("must", *map(sh_expanded, command))))
    if not lines:
        return None
    head = ("#!/bin/bash", "# Each task begins with this; the trainer then replaces the shell.")
    return "\n".join((*head, *lines, 'exec "$@"')) + "\n"


def prologue_words(text: str | None) -> tuple[str, ...]:
    """Return the words before the command of the trainer that run the prologue first."""
    return () if text is None else ("bash", PROLOGUE)


def _tasks(job: Job, fabric: FabricVariable) -> int:
    """Count the tasks of a node. Raises InvalidInputError if they are not ranks, or too many."""
    message, tasks = None, job.plan.nodes.gpus_per_node
    if job.spec.launcher == "torchrun":
        message = "launcher torchrun has one task per node: use launcher srun"
    elif len(fabric.per_local_rank) < tasks:
        message = f"{len(fabric.per_local_rank)} values for the {tasks} tasks of a node"
    if message is not None:
        problem = Problem(f"environment: `{fabric.name}` differs between ranks: {message}")
        raise InvalidInputError([problem])
    return tasks


def _case(fabric: FabricVariable, tasks: int) -> Iterable[str]:
    yield f"# {printable_line(fabric.reason)}"
    yield 'case "$SLURM_LOCALID" in'
    for rank, value in enumerate(fabric.per_local_rank[:tasks]):
        yield f"    {rank}) export {fabric.name}={sh_expanded(value)} ;;"
    yield "    *) exit 78 ;;"
    yield "esac"


# ----------------------------------------------------------------------------------------------
# Chooses the environment of a job: what it inherits, and the variables that its script sets. Pure.


# What a clean job inherits besides the names of `environment.inherit`.
INHERITED = ("HOME", "LANG", "PATH", "USER")
# bash(1), Shell Variables; `export UID=0` would end the job after its time in the queue.
_READ_ONLY = frozenset({"BASHOPTS", "BASH_VERSINFO", "EUID", "PPID", "SHELLOPTS", "UID"})
# Settings of a site for the supervisor (see `hpctrain.supervise.preflight`).
_SITE_HOOKS = frozenset({"HPCTRAIN_KERNEL_LOG"})
# srun(1), INPUT ENVIRONMENT VARIABLES: what a site may choose for all of its jobs.
_SRUN_SETTINGS = frozenset(
    {"SLURM_ACCEL_BIND", "SLURM_CPU_BIND", "SLURM_CPU_FREQ_REQ", "SLURM_GPU_BIND"}
    | {"SLURM_HINT", "SLURM_MEM_BIND", "SLURM_NETWORK", "SLURM_THREADS_PER_CORE"}
)
# srun(1), --export: [ALL,]<variables>, NIL or NONE. A variable of that name would be read as one of
# these words.
_EXPORT_WORDS = frozenset({"ALL", "NIL", "NONE"})


@dataclass(frozen=True)
class Variable:
    """One exported variable and the reason that is written above it."""

    name: str
    value: str
    reason: str
    prepend: bool = False


def submit_variables(job: Job) -> tuple[str, ...] | None:
    """List the variables that sbatch inherits, and so the job does; None: all of them."""
    if job.profile.slurm.export == "all":
        return None
    return tuple(dict.fromkeys((*INHERITED, *inherited_names(job))))


def inherited_names(job: Job) -> tuple[str, ...]:
    """List the variables that site and spec name to be passed on, each once."""
    return tuple(dict.fromkeys((*job.profile.slurm.inherit, *job.spec.environment.inherit)))


def inheritance_note(job: Job) -> str:
    """Describe what the job inherits, for a person who calls sbatch by hand."""
    if job.profile.slurm.export == "none":
        return "It inherits no variable of that shell, but those of a login"
    if job.profile.slurm.export == "all":
        return "It then inherits all variables of that shell, as it does from hpctrain"
    names = ", ".join(submit_variables(job) or ())
    return f"It then inherits all variables of that shell; from hpctrain only {names}"


def inheritance_problems(job: Job) -> list[str]:
    """List names that the spec wants the job to inherit, and that it cannot inherit here."""
    names, profile = inherited_names(job), job.profile
    if profile.slurm.export != "none" or not names:
        return []
    return [
        f"environment.inherit: jobs inherit nothing at {profile.name} (slurm.export none), so "
        f"{', '.join(names)} would be missing: read it from a file in the job"
    ]


def script_variables(job: Job, gpu_variables: tuple[GpuVariable, ...] = ()) -> tuple[Variable, ...]:
    """List the exported variables, the site's first.

    A variable of the spec replaces the site's, and one that the site lists replaces the GPU
    catalogue's and what follows from `network.interface`. Nodes have to reach each other only if
    there are several.
    """
    spec, profile = job.spec, job.profile
    interface = profile.network.interface if job.plan.nodes.nodes > 1 else None
    site = {
        fabric.name: Variable(
            fabric.name, fabric.value, printable_line(fabric.reason), fabric.prepend
        )
        for fabric in profile.environment
        if fabric.value is not None and fabric.concerns(spec.engine.name)
    }
    if interface is not None:
        reason = "network.interface of the profile: all nodes reach each other over it"
        site.setdefault("NCCL_SOCKET_IFNAME", Variable("NCCL_SOCKET_IFNAME", interface, reason))
        if "GLOO_SOCKET_IFNAME" not in {*site, *spec.environment.variables}:
            # gloo wants a whole name: each rank chooses that of its node
            reason = "network.interface for gloo: each rank sets GLOO_SOCKET_IFNAME, a whole name"
            site[RANK_INTERFACE] = Variable(RANK_INTERFACE, interface, reason)
    for wanted in gpu_variables:
        reason = printable_line(wanted.reason)
        site.setdefault(wanted.name, Variable(wanted.name, wanted.value, reason))
    per_rank = {fabric.name for fabric in per_rank_variables(job)}
    for name, directory in cache_directories(profile):
        reason = "software.scratch of the profile: caches on each node, not on a shared disk"
        site.setdefault(name, Variable(name, directory, reason))
    site = {name: variable for name, variable in site.items() if name not in per_rank}
    own = spec.environment.variables
    return (
        *(variable for name, variable in site.items() if name not in own),
        *(Variable(name, value, "from the run spec") for name, value in sorted(own.items())),
        Variable("PYTHONUNBUFFERED", "1", "log lines appear when they are written"),
    )


def check_variables(names: Iterable[str], *, site: bool = False) -> None:
    """Raise InvalidInputError for names that bash or Slurm would not take as a variable."""
    problems = []
    for name in names:
        if name in _READ_ONLY:
            reason = "it is read-only in bash"
        elif name.upper() in _EXPORT_WORDS:
            reason = "sbatch and srun read it as a word of `--export`"
        elif site and name in _SRUN_SETTINGS:
            continue
        elif name.startswith(("SLURM_", "HPCTRAIN_")) and name not in _SITE_HOOKS:
            reason = "Slurm and hpctrain set these themselves"
        else:
            continue
        problems.append(Problem(f"environment: `{name}` cannot be set in a job script: {reason}"))
    if problems:
        raise InvalidInputError(problems)
