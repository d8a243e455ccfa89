"""Turn what a Slurm command left behind into a value, or into the error that it means.

Belongs here: exit codes, words of refusal, and answers that cannot be read. Does not belong here:
which command is run (`client`, `cluster_queries`), the texts themselves (`parse`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from hpctrain.base.errors import (
    AccessDeniedError,
    SlurmError,
    SlurmRefusedError,
    SlurmUnreachableError,
)
from hpctrain.slurm import parse
from hpctrain.slurm.process import CommandResult

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
