"""Lines of srun and slurmstepd as typed values."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpctrain.slurm.messages import (
    LaunchProblem,
    StepNotice,
    TaskFailure,
    read_notice,
    read_task_failure,
)
from hpctrain.slurm.reasons import JobEnd

AT = "CANCELLED AT 2026-03-01T10:00:00"


@pytest.mark.parametrize(
    ("what", "failure"),
    [
        ("Exited with exit code 3", dict(code=3)),
        ("Exited with exit code 143", dict(code=143)),
        ("Killed", dict(signal=signal.SIGKILL)),
        ("Terminated", dict(signal=signal.SIGTERM)),
        ("User defined signal 1", dict(signal=signal.SIGUSR1)),
        ("Trace/breakpoint trap", dict(signal=signal.SIGTRAP)),
        ("Segmentation fault", dict(signal=signal.SIGSEGV)),
        ("Segmentation fault (core dumped)", dict(signal=signal.SIGSEGV, core_dumped=True)),
        ("Aborted (core dumped)", dict(signal=signal.SIGABRT, core_dumped=True)),
        ("Out Of Memory", dict(out_of_memory=True)),
        ("Something new", dict(other="Something new")),
    ],
)
def test_ends_of_tasks(what: str, failure: dict[str, object]) -> None:
    read = read_task_failure(f"srun: error: n1: task 4: {what}\n")
    assert read == TaskFailure("n1", "4", **failure)  # type: ignore[arg-type]
    assert read is not None and read.what == what, "shown as srun has printed it"
    assert (read.rank, read.single_node) == (4, "n1")


def test_several_tasks_on_several_nodes() -> None:
    read = read_task_failure("srun: error: n[0-1]: tasks 0-3,5: Terminated")
    assert read is not None and (read.rank, read.single_node) == (None, None)


NOTICES = yaml.safe_load(Path(__file__).with_name("notices.yaml").read_text())


@pytest.mark.parametrize(("line", "given"), NOTICES, ids=[row[0] for row in NOTICES])
def test_notices(line: str, given: dict[str, Any]) -> None:
    line = line.replace(" AT ", f" {AT} ")
    notice = {**given}
    if "end" in given:
        notice["end"] = JobEnd[given["end"]]
    if "launch_problem" in given:
        notice["launch_problem"] = LaunchProblem[given["launch_problem"]]
    assert read_notice(f"{line}\n") == StepNotice(line, **notice)
    assert read_task_failure(line) is None
