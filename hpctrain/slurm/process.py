"""Run one Slurm command with a timeout.

Belongs here: starting, shielding, waiting, killing. Does not belong here: what a command means.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from hpctrain.base.errors import SlurmUnreachableError

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
            raise _no_answer(command) from None
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


def _no_answer(command: Command) -> SlurmUnreachableError:
    name = " ".join(command.argv[:2])
    hint = "the controller may be down or restarting; nothing is known about the jobs until then"
    if command.argv[0] == "sbatch":
        hint = "the job may have been accepted all the same: look with squeue before you try again"
    return SlurmUnreachableError(
        f"no answer from `{name}` within {command.timeout_seconds:g} s", hint=hint
    )
