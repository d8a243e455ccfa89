"""Writes the commands that prepare the software of a job: modules, setup, limits, prologue. Pure.

Belongs here: these commands and the text of `prologue.sh`, which each task runs before the trainer.
Does not belong here: variables of the whole job (`job_environment`), the text around (`script`).

A command that fails ends the attempt with exit code 78 (sysexits.h, EX_CONFIG): training on with
other software, or without locked memory, would cost more than the attempt.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.base.printable_text import printable_line
from hpctrain.job.render.quoting import sh, sh_expanded
from hpctrain.plan.job import Job
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.profile.software import FabricVariable

PROLOGUE = "prologue.sh"
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
