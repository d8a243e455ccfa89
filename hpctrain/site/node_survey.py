"""Let one job look at a node: submit the survey, wait for it, read what it printed.

Inside an allocation the survey runs there as a job step. Belongs here: starting, waiting with
growing pauses, cancelling. Does not belong here: what is read (`hpctrain.site.survey`), what it
means (`hpctrain.site.survey_texts`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from hpctrain.base import clock
from hpctrain.base.errors import HpctrainError, SlurmError
from hpctrain.site import survey as survey_program
from hpctrain.site.survey_texts import NodeSurvey, node_survey, survey_line
from hpctrain.slurm.client import SlurmClient
from hpctrain.slurm.cluster_queries import step_output
from hpctrain.slurm.records import JobRecord

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 30.0
JOB_MINUTES = 5
# How long the output may take to appear on a shared file system after the job has ended.
_OUTPUT_SECONDS = 30.0


def survey_node(
    slurm: SlurmClient,
    *,
    partition: str,
    gpus: str,
    account: str | None,
    patience_seconds: float,
    directory: Path,
    say: Callable[[str], None],
) -> NodeSurvey:
    """Run the survey on one node of a partition, and return what it saw.

    `gpus` is what `--gres` asks for. `directory` receives the output of the job, so it must be on a
    file system that nodes share; the file is removed. Raises SlurmError when the job is refused,
    HpctrainError when it does not start within `patience_seconds` (it is cancelled) or leaves no
    survey.
    """
    if job := os.environ.get("SLURM_JOB_ID"):
        say(f"looking at a node of job {job}, in which this command runs")
        return _read(step_output(job, _program()), f"a step of job {job}")
    options = [
        *("--job-name=hpctrain-survey", f"--partition={partition}", "--nodes=1", "--ntasks=1"),
        *(f"--time={JOB_MINUTES}", "--no-requeue", f"--gres={gpus}"),
        *([f"--account={account}"] if account else []),
    ]
    output = directory / f"hpctrain-survey-{os.getpid()}-%j.out"
    options.append(f"--output={output}")
    submitted = slurm.submit(_program(), options)
    file = Path(str(output).replace("%j", str(submitted.job_id)))
    say(f"job {submitted.job_id} of partition {partition} looks at a node")
    try:
        record = _wait_for(slurm, submitted.job_id, patience_seconds)
        text = _output(file)
    finally:
        with contextlib.suppress(SlurmError):
            slurm.cancel(submitted.job_id)
        with contextlib.suppress(OSError):
            file.unlink()
    state = f" ({record.state.value})" if record is not None else ""
    return _read(text, f"job {submitted.job_id}{state}")


def _program() -> str:
    """Return the text of the survey as a batch script that any python3 runs."""
    return "#!/usr/bin/env python3\n" + Path(survey_program.__file__).read_text(encoding="utf-8")


def _wait_for(slurm: SlurmClient, job_id: int, patience_seconds: float) -> JobRecord | None:
    """Wait until the job has ended; None when the controller has forgotten it."""
    deadline, pause = clock.monotonic() + patience_seconds, FIRST_PAUSE_SECONDS
    while True:
        clock.sleep(pause)
        pause = min(pause * 1.5, LONGEST_PAUSE_SECONDS)
        record = slurm.jobs([job_id]).get(job_id)
        if record is None or record.state.is_ended:
            return record
        if clock.monotonic() > deadline:
            waits = f": {record.reason}" if record.reason else ""
            raise HpctrainError(
                f"job {job_id} is {record.state.value} after {patience_seconds:.0f} s{waits}; it "
                "was cancelled",
                hint="--wait gives it more time; without --in-job nothing has to start",
            )


def _output(file: Path) -> str:
    deadline = clock.monotonic() + _OUTPUT_SECONDS
    while True:
        with contextlib.suppress(OSError):
            text = file.read_text(encoding="utf-8", errors="replace")
            if survey_line(text) is not None or clock.monotonic() > deadline:
                return text
        if clock.monotonic() > deadline:
            return ""
        clock.sleep(0.2)


def _read(output: str, what: str) -> NodeSurvey:
    line = survey_line(output)
    if line is None:
        said: Sequence[str] = output.strip().splitlines()[-3:]
        raise HpctrainError(
            f"{what} has left no survey of its node" + (f": {' '.join(said)}" if said else ""),
            hint="python3 must be on PATH there, and this directory on a file system that the "
            "nodes share",
        )
    try:
        return node_survey(line)
    except ValueError as error:
        raise HpctrainError(f"{what} printed {error}") from error
