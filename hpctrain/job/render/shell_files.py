"""Writes the shell files of a run directory, which surround the trainer. Pure.

`prologue.sh` begins each task, `container.sh` passes the variables of a task into a container, and
`commands.sh` has the site's commands for the job and its nodes, which the supervisor runs
(`hpctrain.supervise.site_commands`). Does not belong here: the job script (`script`), the words
that start a container (`containers`).
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.base.printable_text import printable_line
from hpctrain.job.render.containers import ENVIRONMENT_SHELL, TaskEnvironment
from hpctrain.job.render.environment import (
    NEEDS,
    cache_directories,
    needed_names,
    per_rank_variables,
)
from hpctrain.job.render.quoting import sh_expanded
from hpctrain.judge.command_results import BEGUN, ENDED, TIMED_OUT
from hpctrain.plan.job import Job
from hpctrain.spec.profile.software import CommandsProfile, FabricVariable

PROLOGUE, COMMANDS = "prologue.sh", "commands.sh"
# What a command may take before it is killed, after it was asked to end (timeout(1)).
_KILL_SECONDS = 10


@dataclass(frozen=True)
class ShellFile:
    """A shell file of the run directory; `use` is a clause about it, for the script's header."""

    name: str
    use: str
    text: str

    @property
    def digest(self) -> str:
        """The first 12 digits of its SHA-256."""
        return sha256(self.text.encode()).hexdigest()[:12]


def shell_files(job: Job, container: TaskEnvironment | None) -> tuple[ShellFile, ...]:
    """Write the shell files that the job needs; `container`: what its container has to be given.

    Raises InvalidInputError for what the tasks of a node cannot have.
    """
    named = (
        (PROLOGUE, "begins each task", prologue_text(job)),
        (ENVIRONMENT_SHELL, "begins its container", container and container_text(container)),
        (COMMANDS, "has the site's commands for job and nodes", commands_text(job)),
    )
    return tuple(ShellFile(name, use, text) for name, use, text in named if text)


# -- what begins a task ------------------------------------------------------------------------


def prologue_text(job: Job) -> str | None:
    """Write what each task does before the trainer starts; None if there is nothing to do.

    Raises InvalidInputError for variables per rank, or a wrapper, that do not fit the tasks.
    """
    variables, profile = per_rank_variables(job), job.profile
    commands, wrapper = profile.software.commands, wrapper_words(job)
    lines = [line for fabric in variables for line in _case(fabric, _tasks(job, fabric))]
    if profile.software.scratch is not None:
        directories = dict.fromkeys(f'"${name}"' for name, _ in cache_directories(profile))
        lines += [f"mkdir -p {' '.join(directories)} || exit 78"]
    lines += [_FAILED] if commands.task or wrapper else []
    if commands.task:
        lines += [_TASK_COMMAND.replace("SECONDS", str(round(commands.time_limit)))]
        for command in commands.task:
            lines += [" ".join(words) for words in needed_names("software.commands.task", *command)]
            lines += [" ".join(("must", *map(sh_expanded, command)))]
    if wrapper:
        word = sh_expanded(wrapper[0])
        lines += [" ".join(words) for words in needed_names("software.commands.wrapper", *wrapper)]
        lines += [
            f'command -v {word} >/dev/null || {{ failed wrapper "not found" {word}; exit 78; }}'
        ]
    if not lines:
        return None
    head = ["#!/bin/bash", "# Each task begins with this; the trainer then replaces the shell."]
    if any(line.startswith("needs ") for line in lines):
        head.append(NEEDS)
    last = " ".join(("exec", *map(sh_expanded, wrapper), '"$@"'))
    return "\n".join((*head, *lines, last)) + "\n"


# The watch is one process that waits without a child, so that one process is all that is ever
# signalled, by its own number. `wait` reaps it, which the trainer would inherit.
_FAILED = """\
failed() {
    local field=$1 how=$2 node=${SLURMD_NODENAME:-$HOSTNAME} && shift 2
    echo "hpctrain: software.commands.$field: \\`$*\\` on $node: $how" >&2
}"""
_TASK_COMMAND = """\
# Runs a command of the site in this shell, for at most SECONDS s; the task ends where it fails
must() {
    {
        read -rt SECONDS <> <(:)
        (($? > 128)) && failed task "not done after SECONDS s" "$@" && kill -KILL $$
    } &
    local hpctrain_watch=$!
    "$@" || { failed task "exit code $?" "$@"; kill "$hpctrain_watch"; exit 78; }
    kill "$hpctrain_watch"
    wait "$hpctrain_watch" 2>/dev/null
}"""


def prologue_words(files: Sequence[ShellFile]) -> tuple[str, ...]:
    """Return the words before the command of the trainer that run the prologue first."""
    return ("bash", PROLOGUE) if any(file.name == PROLOGUE for file in files) else ()


def wrapper_words(job: Job) -> tuple[str, ...]:
    """Return the site's words before each rank. Raises InvalidInputError below an agent."""
    wrapper = job.profile.software.commands.wrapper
    if wrapper and job.spec.launcher == "torchrun":
        message = "software.commands.wrapper: launcher torchrun has one task per node, and no rank "
        raise InvalidInputError([Problem(f"{message}begins with it: use launcher srun")])
    return wrapper if job.spec.launcher == "srun" else ()


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
    for words in needed_names(f"environment.{fabric.name}", *fabric.per_local_rank[:tasks]):
        yield " ".join(words)
    yield f"# {printable_line(fabric.reason)}"
    yield 'case "$SLURM_LOCALID" in'
    for rank, value in enumerate(fabric.per_local_rank[:tasks]):
        yield f"    {rank}) export {fabric.name}={sh_expanded(value)} ;;"
    yield "    *) exit 78 ;;"
    yield "esac"


# -- what begins a container -------------------------------------------------------------------


def container_text(wanted: TaskEnvironment) -> str:
    """Write what passes the variables of a task on to a container of apptainer or singularity.

    apptainer.org, user guide, Environment and Metadata: APPTAINERENV_NAME sets NAME inside,
    whatever the image and apptainer themselves set, after a shell has evaluated the value. NO_EVAL
    prevents that, and versions that do not know it ignore it. bash(1), `compgen -e`.
    """
    rows = textwrap.wrap(" ".join(wanted.patterns), _WIDTH, break_on_hyphens=False)
    patterns = " | \\\n        ".join(" | ".join(row.split()) for row in rows)
    return f"""\
#!/bin/bash
# What profile, spec and launch have set wins over the image's own variables, as it is written
export {wanted.prefix}_NO_EVAL=1
while read -r name; do
    case $name in
        {patterns})
            export "{wanted.prefix}ENV_$name=${{!name}}" ;;
    esac
done < <(compgen -e)
exec "$@"
"""


_WIDTH = 80


# -- what the supervisor runs ------------------------------------------------------------------


def site_commands(job: Job) -> CommandsProfile:
    """Return the site's commands that concern this job: its nodes' only where it has GPUs."""
    commands = job.profile.software.commands
    if job.plan.nodes.gpus_per_node:
        return commands
    return commands.model_copy(update={"node": (), "node_after": ()})


def commands_text(job: Job) -> str | None:
    """Write the commands that the supervisor runs once per job and node; None without any.

    Each node prints two lines for the supervisor, when it begins and how it ended
    (`hpctrain.judge.command_results`).
    """
    commands = site_commands(job)
    parts = {"job": commands.job, "node": commands.node, "node_after": commands.node_after}
    if not any(parts.values()):
        return None
    seconds = round(commands.time_limit)
    cases = [
        line
        for part, listed in parts.items()
        if listed
        for line in (f"    {part})", *_part_lines(part, listed), "        ;;")
    ]
    head = _COMMANDS.replace("LIMIT", str(seconds))
    if any(line.lstrip().startswith("needs ") for line in cases):
        head = head.replace("\nrun() {", f"\n{NEEDS}\nrun() {{", 1)
    return "\n".join((head, *cases, "esac", ""))


def _part_lines(part: str, commands: Iterable[Sequence[str]]) -> Iterable[str]:
    for command in commands:
        for words in needed_names(f"software.commands.{part}", *command):
            yield " ".join(("       ", *words))
        yield " ".join(("        run", *map(sh_expanded, command)))


_COMMANDS = f"""\
#!/bin/bash
# commands.sh PART: commands of the site (software.commands) around the trainer. Each may take LIMIT
# s, and the first that fails is the last. The supervisor reads what they print, and keeps it.
exec 2>&1 </dev/null
run() {{
    current=$* SECONDS=0
    timeout --kill-after={_KILL_SECONDS} LIMIT "$@" && return
    code=$?
    exit $((SECONDS < LIMIT ? code : {TIMED_OUT}))
}}
current=''
trap 'echo "{ENDED} $? ${{current//[[:cntrl:]]/ }}"' EXIT
echo "{BEGUN} ${{SLURMD_NODENAME:-$HOSTNAME}}"
case $1 in"""
