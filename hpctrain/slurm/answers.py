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
from hpctrain.slurm.refusals import hint_about

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
