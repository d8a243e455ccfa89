"""Makes a dataset by a job array: plans here, makes shards in jobs, and merges them here.

The shards are in the dataset's work directory, so the same command continues after an interrupted
one, or after a failed part of its array. Belongs here: the order of the stages, and waiting with
few queries. Does not belong here: the program (see `data`), Slurm commands (see `hpctrain.slurm`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from hpctrain.base import clock
from hpctrain.base.durable import replace_text
from hpctrain.base.errors import HpctrainError, SlurmUnreachableError, UsageError
from hpctrain.base.units import Duration
from hpctrain.job.datasets import dataset_command, program, run_program
from hpctrain.job.render.environment import job_environment, passed_variables
from hpctrain.records.datasets import DatasetReport, DatasetRequest, ShardsReport
from hpctrain.slurm.arrays import ArrayOptions, submit_array
from hpctrain.slurm.client import SlurmClient
from hpctrain.spec.job_text import expanded_text
from hpctrain.spec.profile import ClusterProfile

_ANSWER: TypeAdapter[DatasetReport | ShardsReport] = TypeAdapter(DatasetReport | ShardsReport)
_ARRAY_NAME = "array"
_FOLDER_NAME = "slurm"
_HERE_SECONDS = 86400.0
_LONGEST = Duration(4 * 3600)
# between two questions to the controller
_FIRST_PAUSE_SECONDS, _LAST_PAUSE_SECONDS = 1.0, 30.0
_PATIENCE_SECONDS = 1800.0  # without any answer

Say = Callable[[str], None]


@dataclass(frozen=True)
class ArrayRequest:
    """How the shards are made: `jobs` elements, each with the processes of the dataset's request.

    `walltime` None: that of the partition, 4 hours at most.
    """

    profile: ClusterProfile
    jobs: int
    partition: str | None = None
    walltime: Duration | None = None


def prepare_on_slurm(
    request: DatasetRequest, array: ArrayRequest, slurm: SlurmClient, say: Say
) -> DatasetReport:
    """Make a dataset; waits until the array has ended.

    Raises what `prepare_dataset` raises, and SlurmRefusedError, SlurmUnreachableError.
    """
    options = _options(request, array)
    slurm = slurm.at(cluster=array.profile.slurm.cluster)
    plan = _ANSWER.validate_json(_run(request, "plan"))
    if isinstance(plan, DatasetReport):
        return plan
    directory = Path(plan.directory)
    if plan.missing:
        job_id = _array(array, options, plan, slurm)
        elements = min(array.jobs, plan.missing)
        say(f"job array {job_id}: shards {plan.missing}, elements {elements}")
        wait_for(job_id, slurm)
    try:
        return DatasetReport.model_validate_json(_run(request, "merge"))
    except HpctrainError as error:
        if type(error) is HpctrainError:
            logs = f"logs of the array are in {directory / _FOLDER_NAME}"
            raise HpctrainError(str(error), hint=f"{error.hint or ''}; {logs}") from error
        raise


def _run(request: DatasetRequest, stage: str) -> bytes:
    return run_program(dataset_command(request, stage), request.output, _HERE_SECONDS)


def _array(
    array: ArrayRequest, options: ArrayOptions, plan: ShardsReport, slurm: SlurmClient
) -> int:
    """Return the array that makes the shards: one of an earlier command, or a new one."""
    directory = Path(plan.directory)
    note = directory / _ARRAY_NAME
    earlier = int(note.read_text()) if note.exists() else None
    if earlier is not None and _is_live(earlier, slurm):
        return earlier
    elements = min(array.jobs, plan.missing)
    commands = [
        [
            *program(options.python),
            f"--shards={directory}",
            f"--share={number}/{elements}",
            f"--workers={options.cpus}",
        ]
        for number in range(elements)
    ]
    job_id = submit_array(commands, directory / _FOLDER_NAME, options)
    replace_text(note, f"{job_id}\n")
    return job_id


def _options(request: DatasetRequest, array: ArrayRequest) -> ArrayOptions:
    """Choose options from the profile. Raises UsageError for what it does not allow."""
    name = array.partition or array.profile.slurm.data_partition
    profile = array.profile.for_partition(name)
    software, comment = profile.software, profile.slurm.comment
    if array.jobs < 1:
        raise UsageError("--jobs must be at least 1")
    if software.container is not None:
        raise UsageError(
            f"profile {profile.name} runs everything in a container, data are prepared outside",
            hint="run the command in a job of your own, with --workers and without --slurm",
        )
    partition = profile.slurm.partition(name)
    if partition is None and name != profile.slurm.data_partition:
        known = ", ".join(one.name for one in profile.slurm.partitions)
        raise UsageError(f"profile {profile.name} has no partition {name}: {known}")
    limit = partition.max_walltime if partition is not None else None
    walltime = array.walltime or min(limit or _LONGEST, _LONGEST)
    if limit is not None and walltime > limit:
        raise UsageError(f"partition {name} allows {limit} at most")
    try:  # elements start it without a shell
        python = expanded_text(software.interpreter(sys.executable), os.environ)
    except ValueError as error:
        raise UsageError(f"software.python: {error}") from None
    return ArrayOptions(
        name=f"data-{request.output.name}",
        python=python,
        cpus=request.workers,
        walltime_minutes=max(1, -(-int(walltime) // 60)),
        partition=name if partition is None else partition.name if partition.request else None,
        account=profile.slurm.account,
        qos=profile.slurm.qos,
        constraint=profile.slurm.constraint,
        comment=comment if isinstance(comment, str) else None,
        setup=job_environment(profile, variables=()).software_lines,
        variables=passed_variables(profile),
        sbatch=profile.slurm.submit_words,
    )


def wait_for(job_id: int, slurm: SlurmClient) -> None:
    """Wait until no element of the array waits or runs. Raises SlurmUnreachableError at last."""
    pause, answered_at = _FIRST_PAUSE_SECONDS, clock.monotonic()
    while True:
        try:
            if not _is_live(job_id, slurm):
                return
            answered_at = clock.monotonic()
        except SlurmUnreachableError:
            if clock.monotonic() - answered_at > _PATIENCE_SECONDS:
                raise
        clock.sleep(pause)
        pause = min(pause * 1.5, _LAST_PAUSE_SECONDS)


def _is_live(job_id: int, slurm: SlurmClient) -> bool:
    """Return True if an element waits or runs; Slurm forgets ended jobs after some minutes."""
    return any(not record.state.is_ended for record in slurm.jobs([job_id]).values())
