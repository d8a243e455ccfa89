"""Submit commands as the elements of a job array, through submitit.

submitit writes the script and keeps the output of each element. `client` queries whether elements
have ended, because submitit uses sacct only, which many clusters do not have. Belongs here:
submitting. Does not belong here: which commands, waiting.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.base.errors import HpctrainError, SlurmRefusedError, SlurmUnreachableError
from hpctrain.slurm.process import with_only


@dataclass(frozen=True)
class ArrayOptions:
    """What each element requests: one task on one node. None: Slurm's default.

    `setup` are lines of shell before the command, `variables` those that the elements inherit
    (None: all).
    """

    name: str
    python: str
    cpus: int
    walltime_minutes: int
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    comment: str | None = None
    setup: tuple[str, ...] = ()
    variables: tuple[str, ...] | None = None

    def parameters(self) -> dict[str, Any]:
        """Build the parameters of submitit's SlurmExecutor."""
        same = ("partition", "account", "qos", "constraint", "comment")  # submitit's names as well
        given = dict(
            job_name=self.name,
            time=self.walltime_minutes,
            cpus_per_task=self.cpus,
            setup=list(self.setup) or None,
            **{name: getattr(self, name) for name in same},
        )
        return {name: value for name, value in given.items() if value is not None}


def submit_array(commands: Sequence[Sequence[str]], folder: Path, options: ArrayOptions) -> int:
    """Submit one element for each command; logs go to `folder`, which all nodes must see.

    Returns the id of the array. Raises SlurmRefusedError with Slurm's message, and
    SlurmUnreachableError if its programs are missing.
    """
    submitit = _submitit()
    # files named like Python modules may lie where the job starts
    clean = {**with_only(os.environ, options.variables), "PYTHONSAFEPATH": "1"}
    with _environment(clean):
        try:
            executor = submitit.SlurmExecutor(folder, python=shlex.quote(options.python))
        except RuntimeError as error:  # no srun
            raise SlurmUnreachableError(str(error)) from error
        executor.update_parameters(**options.parameters())
        try:
            with executor.batch():
                jobs = [
                    executor.submit(submitit.helpers.CommandFunction(list(command)))
                    for command in commands
                ]
        except submitit.core.utils.FailedJobError as error:
            raise SlurmRefusedError(str(error).strip()) from error
    return int(str(jobs[0].job_id).partition("_")[0])


@contextlib.contextmanager
def _environment(wanted: Mapping[str, str]) -> Iterator[None]:
    """Replace the environment of this process, which submitit passes to its commands."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(wanted)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _submitit() -> Any:
    try:
        import submitit
        import submitit.helpers
    except ImportError as error:
        raise HpctrainError(
            f"job arrays need a Python package that is not here: {error}",
            hint="pip install 'hpctrain[data]'",
        ) from error
    return submitit
