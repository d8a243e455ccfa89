"""Lines of srun and slurmstepd as typed values."""

from __future__ import annotations

import signal

import pytest

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


@pytest.mark.parametrize(
    ("line", "notice"),
    [
        (f"slurmstepd: error: *** STEP 5.0 ON n0 {AT} ***", dict()),
        (
            f"slurmstepd: error: *** STEP 5.0 ON n0 {AT} DUE TO PREEMPTION ***",
            dict(end=JobEnd.PREEMPTED),
        ),
        (
            f"slurmstepd: error: *** JOB 5 ON n0 {AT} DUE TO TIME LIMIT ***",
            dict(end=JobEnd.TIME_LIMIT),
        ),
        (
            f"slurmstepd: error: *** JOB 5 ON n0 {AT} DUE TO JOB REQUEUE ***",
            dict(end=JobEnd.REQUEUED),
        ),
        (
            f"slurmstepd: error: *** JOB 5 ON n0 {AT} DUE TO NODE FAILURE ***",
            dict(end=JobEnd.NODE_FAILED),
        ),
        ("srun: error: Node failure on n1", dict(end=JobEnd.NODE_FAILED, node="n1")),
        ("srun: error: Node failure on n[1-2]", dict(end=JobEnd.NODE_FAILED)),
        (
            "srun: error: Unable to create step for job 5: Requested nodes are busy",
            dict(launch_problem=LaunchProblem.OTHER),
        ),
        (
            "srun: error: Unable to create step for job 5: Invalid generic resource (gres) "
            "specification",
            dict(launch_problem=LaunchProblem.BROKEN_ALLOCATION),
        ),
        (
            "srun: error: Unable to create step for job 5: Unable to contact slurm controller "
            "(connect failure)",
            dict(launch_problem=LaunchProblem.CONTROLLER_AWAY),
        ),
        (
            "srun: error: Task launch for StepId=5.0 failed on node n1: Job prolog failed",
            dict(launch_problem=LaunchProblem.PROLOG, node="n1"),
        ),
        (
            "srun: error: Task launch for StepId=5.0 failed on node n1: Invalid job credential",
            dict(launch_problem=LaunchProblem.OTHER, node="n1"),
        ),
        (
            "srun: error: Aborting, step missing step on node 1",
            dict(lost_step=1),
        ),
        ("srun: error: Cannot communicate with node 3.", dict(lost_step=3)),
        ("srun: forcing job termination", dict(forced_end=True)),
        (
            "slurmstepd: error: Detected 1 oom_kill event in StepId=5.0.",
            dict(out_of_memory=True),
        ),
    ],
)
def test_notices(line: str, notice: dict[str, object]) -> None:
    assert read_notice(f"{line}\n") == StepNotice(line, **notice)  # type: ignore[arg-type]
    assert read_task_failure(line) is None
