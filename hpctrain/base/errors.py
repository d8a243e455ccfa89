"""The exception tree of hpctrain; every class carries the exit code it leads to.

    HpctrainError                 1   unexpected: a bug of ours or of the environment
    |- UsageError                 2   the command line asks for something that makes no sense
    |- InvalidInputError          3   a spec, profile or data file is wrong (all problems at once)
    |- RefusedPlanError           4
    |  |- DoesNotFitError         4   the plan does not fit the GPUs, the batch or the cluster
    |  `- LimitError              4   the plan violates a limit of the site
    |- SlurmError                 5
    |  |- SlurmRefusedError       5   Slurm answered, and the answer was no
    |  |  `- AccessDeniedError    5   not for this user, or not from this host
    |  `- SlurmUnreachableError   5   no answer within the time limit, or no Slurm at all
    |- NoSuchRunError             6
    |- RunFailedError             7   the run that was waited for has failed
    |- ObjectiveMissedError       7   a service was measured, and does not keep its objectives
    |- CheckpointError            7   checkpoints exist, but none of them can be used
    |- StorageError               7   the run directory cannot be used at the moment (an OSError)
    `- NotConfirmedError          8   a person was asked, and said no

Belongs here: exceptions and the position of a problem in a file. Does not belong here: printing
or exiting (only commands do that). Imports nothing of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong in a file; `line` and `column` are 1-based, None when unknown.

    `node_dependent`: another node may not have it (a file that is missing, software that is not
    installed); False for what the settings themselves say, which are equal on all nodes.
    """

    message: str
    file: str | None = None
    line: int | None = None
    column: int | None = None
    hint: str | None = None
    node_dependent: bool = False

    def __str__(self) -> str:
        parts = [str(part) for part in (self.file, self.line, self.column) if part is not None]
        return f"{':'.join(parts)}: {self.message}" if parts else self.message


class HpctrainError(Exception):
    """Anything that a user of hpctrain should be told in one clear message."""

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint
        if hint:
            self.add_note(f"hint: {hint}")  # for tracebacks, where nobody asks for `hint`


class UsageError(HpctrainError):
    """The command line asks for something that makes no sense."""

    exit_code = 2


class InvalidInputError(HpctrainError):
    """A file of the user is wrong; `problems` lists everything that was found in it."""

    exit_code = 3

    def __init__(self, problems: list[Problem] | tuple[Problem, ...]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    @property
    def node_dependent(self) -> bool:
        """True if another node may have none of the problems."""
        return all(problem.node_dependent for problem in self.problems)


class Refusal(str):
    """One line of a refusal, and the dotted path of the field of the spec that it is about."""

    field: str

    def __new__(cls, message: str, field: str) -> Self:
        """Make a line about `field`, which may be absent from the file."""
        self = super().__new__(cls, message)
        self.field = field
        return self


class RefusedPlanError(HpctrainError):
    """A spec has no plan; one line for each reason."""

    exit_code = 4

    def __init__(self, reasons: str | Sequence[Refusal], hint: str | None = None) -> None:
        """Take a message, or lines that know their fields."""
        lines = () if isinstance(reasons, str) else tuple(reasons)
        super().__init__("\n".join(lines) if lines else str(reasons), hint)
        self.refusals = lines

    def at(self, place: Callable[[str, str], Problem]) -> Self:
        """Return the same with the place of each field before its line.

        `place` makes a problem of a dotted path and a message (`spec.loader.Loaded.problem`).
        """
        if not self.refusals:
            return self
        placed = type(self)(self.refusals, self.hint)
        placed.args = ("\n".join(str(place(one.field, one)) for one in self.refusals),)
        return placed


class DoesNotFitError(RefusedPlanError):
    """The plan does not fit the memory, the batch or the number of GPUs."""


class LimitError(RefusedPlanError):
    """The plan violates a limit that the site has set in its cluster profile."""


class SlurmError(HpctrainError):
    """A call of a Slurm command did not succeed."""

    exit_code = 5


class SlurmRefusedError(SlurmError):
    """Slurm answered no; the message holds Slurm's own words."""


class AccessDeniedError(SlurmRefusedError):
    """Slurm does not take this from this user, or not from this host: waiting does not help."""


class SlurmUnreachableError(SlurmError):
    """No answer from Slurm: not installed, controller away, or time limit of the call exceeded."""


class NoSuchRunError(HpctrainError):
    """No run directory matches the given name."""

    exit_code = 6


class RunFailedError(HpctrainError):
    """The run that was waited for has failed."""

    exit_code = 7


class ObjectiveMissedError(HpctrainError):
    """A service was measured and does not keep what it promises."""

    exit_code = 7


class CheckpointError(HpctrainError):
    """Checkpoints exist but none can be used, so starting from step 0 would lose work silently."""

    exit_code = 7


class NotConfirmedError(HpctrainError):
    """A person was asked whether to go on, and said no."""

    exit_code = 8


class StorageError(HpctrainError, OSError):
    """The run directory is away, or is not what it was: a fault of storage, which may pass.

    Also an OSError, so that whoever waits for storage handles both alike.
    """

    exit_code = 7
