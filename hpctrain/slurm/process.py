"""Run one Slurm command with a timeout, and turn what it left behind into a value or an error.

Belongs here: environment, starting, shielding, waiting, killing, hints about refusals. Does not
belong here: which command serves a query (`client`).
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import NamedTuple, TypeVar

from hpctrain.base.errors import (
    AccessDeniedError,
    SlurmError,
    SlurmRefusedError,
    SlurmUnreachableError,
)
from hpctrain.slurm import parse

# At the end of a job Slurm sends TERM to every process of the batch step, our commands included.
_SHIELDED_FROM = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Command(NamedTuple):
    """One call; a `shielded` one ignores the signals with which Slurm ends a job."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    timeout_seconds: float
    stdin: str = ""
    shielded: bool = False


class CommandResult(NamedTuple):
    """Exit code and output of a command."""

    returncode: int
    stdout: str
    stderr: str


Runner = Callable[[Command], CommandResult]


def run_command(command: Command) -> CommandResult:
    """Run a command to its end.

    Raises SlurmUnreachableError if the program is missing, or after the timeout.
    """
    with _start(command) as process:
        try:
            stdout, stderr = process.communicate(command.stdin, command.timeout_seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            hint = (
                "the controller may be down or restarting; nothing is known about the jobs until "
                "then"
            )
            if command.argv[0] == "sbatch":
                hint = (
                    "the job may have been accepted all the same: look with squeue before you try "
                    "again"
                )
            message = (
                f"no answer from `{' '.join(command.argv[:2])}` within "
                f"{command.timeout_seconds:g} s"
            )
            raise SlurmUnreachableError(message, hint=hint) from None
        except BaseException:
            process.kill()
            raise
    return CommandResult(process.returncode, stdout, stderr)


def _start(command: Command) -> subprocess.Popen[str]:
    try:
        with _signals_blocked(command.shielded):
            return subprocess.Popen(
                command.argv,
                env=command.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                encoding="utf-8",
                errors="replace",
            )
    except OSError as error:
        raise SlurmUnreachableError(
            f"cannot run `{command.argv[0]}`: {error.strerror}",
            hint="is Slurm installed here and on PATH? Run this on a login node of the cluster, "
            "or load the site's slurm module first",
        ) from error


@contextmanager
def _signals_blocked(wanted: bool) -> Iterator[None]:
    """Start children with the signals blocked: the mask survives exec (signal(7)).

    Unlike a preexec_fn this is safe with threads; our own mask is back before the call waits.
    """
    if not wanted:
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SHIELDED_FROM)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# -- Build the environment of Slurm commands, without variables that change what they do --------
# squeue, sbatch and the others take options from SQUEUE_*, SBATCH_*, ... variables, so a line in a
# .bashrc changes the format that we parse or the partition of the plan. Inside a job, sbatch takes
# SLURM_* variables of that job as options of the new one (sbatch(1), INPUT ENVIRONMENT VARIABLES).


_OPTION_PREFIXES = (
    *("SALLOC_", "SBATCH_", "SRUN_", "SQUEUE_", "SINFO_", "SACCT_", "SCANCEL_", "SCONTROL_"),
    *("SLURM_", "SLURMD_"),
)
# Cluster and credentials: needed to reach Slurm at all.
_KEPT = frozenset({"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT"})


def without_options(environment: Mapping[str, str]) -> dict[str, str]:
    """Remove the variables that change what a Slurm command does."""
    return {
        name: value
        for name, value in environment.items()
        if name in _KEPT or not name.startswith(_OPTION_PREFIXES)
    }


def with_only(environment: Mapping[str, str], names: Collection[str] | None) -> dict[str, str]:
    """Return the environment of an sbatch whose job inherits only `names`; None: everything.

    A name may be a pattern of the shell, such as `*_proxy`.

    sbatch(1), --export: without that option the job gets the environment of sbatch as it is. With
    a list of names Slurm runs a login shell of the user on the node besides (`--get-user-env`),
    which takes up to two minutes and may hold the job. What sbatch needs to reach Slurm stays.
    """
    plain = without_options(environment)
    if names is None:
        return plain
    kept = _KEPT.union(names)
    patterns = [name for name in kept if set(name) & set("*?")]
    return {
        name: value
        for name, value in plain.items()
        if name in kept or any(fnmatchcase(name, pattern) for pattern in patterns)
    }


def for_queries(environment: Mapping[str, str]) -> dict[str, str]:
    """As `without_options`, with English messages and UTC times.

    Not for sbatch, which by default passes its own environment to the job.
    """
    return {**without_options(environment), "LC_ALL": "C", "TZ": "UTC0"}


# -- Turn what a Slurm command left behind into a value, or into the error that it means --------


_Parsed = TypeVar("_Parsed")


def accepted(argv: Sequence[str], answer: CommandResult) -> CommandResult:
    """Return the result of a command that has succeeded.

    Raises SlurmUnreachableError where its words say that nobody answered it, and else
    SlurmRefusedError with them.
    """
    if answer.returncode == 0:
        return answer
    # `scontrol show node` reports an unknown node on stdout.
    words = answer.stderr.strip() or answer.stdout.strip()
    words = words or f"`{argv[0]}` ended with exit code {answer.returncode}"
    if parse.is_unreachable(words):
        raise SlurmUnreachableError(words, hint_about(words))
    raise refusal(words)


def refusal(words: str) -> SlurmRefusedError:
    """Return the error of a refusal in these words."""
    kind = AccessDeniedError if parse.is_access_denied(words) else SlurmRefusedError
    return kind(words, hint_about(words))


def parsed(name: str, read: Callable[[], _Parsed]) -> _Parsed:
    """Return what `read` makes of an answer. Raises SlurmError where it can make nothing of it."""
    try:
        return read()
    except (ValueError, KeyError) as error:
        raise SlurmError(
            f"`{name}` gave an answer that hpctrain cannot read: {error}",
            hint="please report this together with the output of `sinfo --version`",
        ) from error


# -- What to do about a refusal of Slurm, by Slurm's own words ----------------------------------
# The words are those of slurm_strerror (src/common/slurm_errno.c of Slurm 22.05 to 26.05). A hint
# is all that follows from them: no decision does.


# Part of a message, in lower case -> what helps. The first that is found is taken.
_HINTS = (
    (
        "invalid account or account/partition",
        "`resources.account` in the spec or `slurm.account` in the profile: "
        "`sacctmgr show assoc user=$USER format=account,partition,qos` lists yours",
    ),
    (
        "invalid qos",
        "`resources.qos` in the spec or `slurm.qos` in the profile: "
        "`sacctmgr show assoc user=$USER format=account,qos` lists yours",
    ),
    ("invalid partition", "`sinfo -s` lists partitions; `hpctrain profile check` compares them"),
    (
        "requested node configuration is not available",
        "no node of the partition has these GPUs, CPUs or this memory: `hpctrain profile check`",
    ),
    (
        "requested partition configuration not available",
        "the partition is down, or does not allow this size: `sinfo -s`",
    ),
    (
        "requested time limit is invalid",
        "`resources.walltime` is above the partition's limit: `sinfo -o '%P %l'`",
    ),
    (
        "job violates accounting/qos policy",
        "a limit of your account or QOS (jobs, GPUs, size, walltime): `hpctrain doctor`",
    ),
    ("memory specification can not be satisfied", "`resources.memory_per_node`, `slurm.memory`"),
    (
        "invalid generic resource",
        "`slurm.gpu_request` and `gpu.type` of the profile: `sinfo -o '%N %G'` lists what nodes "
        "have",
    ),
    ("node count specification invalid", "the partition allows other numbers of nodes: `sinfo -s`"),
    ("invalid feature specification", "`slurm.constraint` of the profile: `sinfo -o '%N %f'`"),
    ("invalid license", "`slurm.options` of the profile: `scontrol show licenses`"),
    ("requested reservation is invalid", "`resources.reservation`: `scontrol show reservation`"),
    ("kill job error", "only the owner of a job, and administrators, may end it"),
    (
        "access/permission denied",
        "the partition is for other groups, accounts or QOS: `scontrol show partition`",
    ),
    (
        "could not establish a configuration source",
        "is this a login node of the cluster? Clients find Slurm by /etc/slurm, $SLURM_CONF or DNS",
    ),
    ("script contains dos line breaks", "a template with the line ends of Windows"),
)


def hint_about(words: str) -> str | None:
    """Return what helps against a refusal; None for words that are not known."""
    small = words.lower()
    return next((hint for part, hint in _HINTS if part in small), None)
