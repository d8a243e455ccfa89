"""Each way in which a launch can end, and the cause that must come out.

The lines are those of Slurm 22.05.8 and of src/slurmd/slurmstepd/req.c.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from supervise_facts import NOTHING, SILENT, exits, job

from hpctrain.judge.causes import Cause
from hpctrain.judge.classify import classify
from hpctrain.judge.documents import (
    LaunchEvidence,
    Stall,
)
from hpctrain.slurm.messages import read_notice, read_task_failure

PREEMPTION = (
    "slurmstepd: error: *** STEP 5.0 ON n0 CANCELLED AT 2026-03-01T10:00:00 DUE TO PREEMPTION ***"
)
TIME_LIMIT = (
    "slurmstepd: error: *** JOB 5 ON n0 CANCELLED AT 2026-03-01T10:00:00 DUE TO TIME LIMIT ***"
)
NODE_FAILURE = (
    "slurmstepd: error: *** JOB 5 ON n0 CANCELLED AT 2026-03-01T10:00:00 DUE TO NODE FAILURE, "
    "SEE SLURMCTLD LOG FOR DETAILS ***"
)
REQUEUE = (
    "slurmstepd: error: *** JOB 5 ON n0 CANCELLED AT 2026-03-01T10:00:00 DUE TO JOB REQUEUE ***"
)
FORCED = "srun: forcing job termination"
NO_REASON = "slurmstepd: error: *** STEP 5.0 ON n0 CANCELLED AT 2026-03-01T10:00:00 ***"
SRUN_NODE_FAILURE = "srun: error: Node failure on n1"
NO_STEP = "srun: error: Unable to create step for job 5: Requested nodes are busy"
NO_TASKS = "srun: error: Task launch for StepId=5.0 failed on node n1: Invalid job credential"
KILLED = "srun: error: n1: task 1: Killed"
RESET = "crash DistNetworkError: Connection closed by peer"
YIELDED = exits("yielded", "yielded")
STALL = Stall("training", 301.0, 300.0)


def seen(base: LaunchEvidence, *lines: str, **changes: object) -> LaunchEvidence:
    """`base` after srun printed `lines`, read as `Launch` reads them."""
    failures = tuple(f for line in lines if (f := read_task_failure(line)) is not None)
    unlike_tasks = (line for line in lines if not read_task_failure(line))
    notices = tuple(n for line in unlike_tasks if (n := read_notice(line)) is not None)
    return replace(base, task_failures=failures, notices=notices, **changes)  # type: ignore[arg-type]


ROWS: dict[str, tuple[LaunchEvidence, Cause]] = {
    # The run's own word.
    "done": (seen(NOTHING, done=True, srun_exit_code=0), Cause.DONE),
    "done, then the job is preempted": (seen(SILENT, PREEMPTION, done=True), Cause.DONE),
    "done, then cancelled": (seen(SILENT, done=True, cancel_requested=True), Cause.DONE),
    "done, then a rank crashes at the end": (
        seen(NOTHING, KILLED, done=True, rank_exits=exits("done", "crash x")),
        Cause.DONE,
    ),
    "done by a newer launch": (seen(NOTHING, done=True, superseded=True), Cause.DONE),
    "superseded": (seen(NOTHING, KILLED, superseded=True), Cause.SUPERSEDED),
    # Preemption.
    "left in the grace period": (
        seen(NOTHING, NO_REASON, job=job(preempt=True), rank_exits=YIELDED, srun_exit_code=75),
        Cause.PREEMPTED,
    ),
    "left in the grace period, warned by USR1": (
        seen(NOTHING, job=job(preempt=True), rank_exits=YIELDED, signals=("USR1",)),
        Cause.PREEMPTED,
    ),
    "SIGNALING is running": (
        seen(NOTHING, job=job("SIGNALING", preempt=True), rank_exits=YIELDED),
        Cause.PREEMPTED,
    ),
    "one rank fell over its peers in the grace period": (
        seen(NOTHING, job=job(preempt=True), rank_exits=exits("yielded", RESET)),
        Cause.PREEMPTED,
    ),
    "exit 143 in the grace period": (
        seen(
            NOTHING,
            NO_REASON,
            "srun: error: n0: tasks 0-1: Exited with exit code 143",
            job=job(preempt=True),
        ),
        Cause.PREEMPTED,
    ),
    "silent in the grace period": (
        seen(NOTHING, job=job(preempt=True), stall=STALL),
        Cause.PREEMPTED,
    ),
    "grace over, requeued by Slurm": (
        seen(NOTHING, PREEMPTION, KILLED, job=job("COMPLETING", restarts=1), signals=("TERM",)),
        Cause.PREEMPTED,
    ),
    "grace over, requeued, and only the preempt time says why": (
        seen(NOTHING, job=job("COMPLETING", restarts=1, preempt=True), signals=("TERM",)),
        Cause.PREEMPTED,
    ),
    "cancel mode, grace over": (
        seen(NOTHING, PREEMPTION, job=job("COMPLETING", preempt=True), signals=("TERM",)),
        Cause.PREEMPTED,
    ),
    "cancel mode, state PREEMPTED": (
        seen(NOTHING, job=job("PREEMPTED", preempt=True)),
        Cause.PREEMPTED,
    ),
    "grace over, Slurm silent": (
        seen(SILENT, PREEMPTION, "srun: error: n0: tasks 0-1: Terminated", signals=("TERM",)),
        Cause.PREEMPTED,
    ),
    # Time limit.
    "warned before the time limit": (
        seen(NOTHING, rank_exits=YIELDED, signals=("USR1",), srun_exit_code=75),
        Cause.TIME_LIMIT,
    ),
    "warned before the time limit, Slurm silent": (
        seen(SILENT, rank_exits=YIELDED, signals=("USR1",), srun_exit_code=75),
        Cause.TIME_LIMIT,
    ),
    "time limit reached": (
        seen(NOTHING, KILLED, job=job("COMPLETING", "TimeLimit"), signals=("USR1", "TERM")),
        Cause.TIME_LIMIT,
    ),
    "time limit reached, state TIMEOUT": (seen(NOTHING, job=job("TIMEOUT")), Cause.TIME_LIMIT),
    "time limit reached, Slurm silent": (
        seen(SILENT, TIME_LIMIT, KILLED, signals=("TERM",)),
        Cause.TIME_LIMIT,
    ),
    # Nodes.
    "node failure, requeued by Slurm": (
        seen(NOTHING, NODE_FAILURE, KILLED, job=job("COMPLETING", restarts=1), signals=("TERM",)),
        Cause.NODE_FAILURE,
    ),
    "node failure of a job that is not requeued": (
        seen(NOTHING, job=job("COMPLETING", "NodeDown"), signals=("TERM",)),
        Cause.NODE_FAILURE,
    ),
    "state NODE_FAIL": (seen(NOTHING, job=job("NODE_FAIL")), Cause.NODE_FAILURE),
    "srun saw it first": (
        seen(NOTHING, SRUN_NODE_FAILURE, KILLED, rank_exits=exits(RESET)),
        Cause.NODE_FAILURE,
    ),
    "srun saw it, Slurm silent": (seen(SILENT, SRUN_NODE_FAILURE, KILLED), Cause.NODE_FAILURE),
    # People.
    "requeued by somebody": (
        seen(NOTHING, REQUEUE, KILLED, job=job("COMPLETING", restarts=1), signals=("TERM",)),
        Cause.REQUEUED,
    ),
    "requeued by somebody, without a notice": (
        seen(NOTHING, job=job("PENDING", "BeginTime", restarts=1)),
        Cause.REQUEUED,
    ),
    "requeued by somebody, Slurm silent": (seen(SILENT, REQUEUE, KILLED), Cause.REQUEUED),
    "scancel": (
        seen(NOTHING, NO_REASON, KILLED, job=job("COMPLETING"), signals=("TERM",)),
        Cause.CANCELLED,
    ),
    "scancel, state CANCELLED": (seen(NOTHING, job=job("CANCELLED")), Cause.CANCELLED),
    "scancel in the grace period": (
        seen(NOTHING, NO_REASON, job=job("COMPLETING", preempt=True), rank_exits=YIELDED),
        Cause.CANCELLED,
    ),
    "scancel after the warning": (
        seen(NOTHING, job=job("COMPLETING"), rank_exits=YIELDED, signals=("USR1", "TERM")),
        Cause.CANCELLED,
    ),
    "hpctrain cancel": (
        seen(NOTHING, rank_exits=YIELDED, cancel_requested=True),
        Cause.CANCELLED,
    ),
    "hpctrain cancel in the last seconds of a preemption": (
        seen(NOTHING, PREEMPTION, job=job("COMPLETING", preempt=True), cancel_requested=True),
        Cause.CANCELLED,
    ),
    "hpctrain cancel of a job that is being requeued": (
        seen(NOTHING, REQUEUE, job=job("COMPLETING", restarts=1), cancel_requested=True),
        Cause.CANCELLED,
    ),
    "hpctrain cancel, Slurm silent": (seen(SILENT, KILLED, cancel_requested=True), Cause.CANCELLED),
    "asked to stop": (
        seen(NOTHING, rank_exits=YIELDED, stop_requested_by="ann"),
        Cause.YIELDED,
    ),
    "asked to stop, Slurm silent": (
        seen(SILENT, rank_exits=YIELDED, stop_requested_by="ann"),
        Cause.YIELDED,
    ),
    "left after a signal that Slurm knows nothing of": (
        seen(NOTHING, rank_exits=YIELDED, srun_exit_code=75),
        Cause.EXTERNAL_SIGNAL,
    ),
    "left, nobody says why": (seen(SILENT, rank_exits=YIELDED), Cause.EXTERNAL_SIGNAL),
    "left, and a node is lost": (
        seen(NOTHING, rank_exits=YIELDED, lost_nodes=("n1",), probed=True),
        Cause.NODE_FAILURE,
    ),
    "left, and a node is being rebooted": (
        seen(NOTHING, rank_exits=YIELDED, leaving_nodes=("n1",), probed=True),
        Cause.NODE_FAILURE,
    ),
    "the supervisor is told to end, and the ranks leave": (
        seen(NOTHING, rank_exits=YIELDED, signals=("TERM",)),
        Cause.EXTERNAL_SIGNAL,
    ),
    "the supervisor is told to end, and the ranks train on": (
        replace(NOTHING, srun_exit_code=None, signals=("TERM",)),
        Cause.EXTERNAL_SIGNAL,
    ),
    "all on the batch node are told to end, srun among them": (
        seen(NOTHING, FORCED, "srun: error: n0: tasks 0-1: Killed", signals=("TERM",)),
        Cause.EXTERNAL_SIGNAL,
    ),
    "srun is told to end": (
        seen(NOTHING, FORCED, "srun: error: n0: tasks 0-1: Killed"),
        Cause.EXTERNAL_SIGNAL,
    ),
    "srun is told to end by somebody who has asked before": (
        seen(NOTHING, FORCED, KILLED, stop_requested_by="ann"),
        Cause.YIELDED,
    ),
    "srun is told to end with the job": (
        seen(NOTHING, FORCED, KILLED, job=job("COMPLETING"), signals=("TERM",)),
        Cause.CANCELLED,
    ),
    "srun is told to end after a rank has failed": (
        seen(NOTHING, FORCED, KILLED, rank_exits=exits("crash ValueError: bad batch")),
        Cause.CRASH,
    ),
    "the deadline of the job comes": (
        seen(NOTHING, KILLED, job=job("COMPLETING", "DeadLine"), signals=("TERM",)),
        Cause.DEADLINE,
    ),
    "another cluster takes the job": (seen(NOTHING, job=job("REVOKED")), Cause.SUPERSEDED),
    # The run's own faults.
    "wrong setting": (
        seen(
            NOTHING,
            "srun: error: n0: task 0: Exited with exit code 78",
            rank_exits=exits("config_error no such file"),
        ),
        Cause.CONFIG_ERROR,
    ),
    "wrong setting in the grace period": (
        seen(NOTHING, job=job(preempt=True), rank_exits=exits("config_error x", RESET)),
        Cause.CONFIG_ERROR,
    ),
    "wrong setting, Slurm silent": (
        seen(SILENT, rank_exits=exits("config_error x")),
        Cause.CONFIG_ERROR,
    ),
    "one rank killed, its peers lose it": (
        seen(
            NOTHING,
            KILLED,
            "srun: error: n0: task 0: Exited with exit code 1",
            rank_exits=exits(RESET),
        ),
        Cause.CRASH,
    ),
    "segmentation fault": (
        seen(NOTHING, "srun: error: n1: task 3: Segmentation fault (core dumped)"),
        Cause.CRASH,
    ),
    "aborted": (seen(NOTHING, "srun: error: n1: task 3: Aborted (core dumped)"), Cause.CRASH),
    "bus error": (seen(NOTHING, "srun: error: n1: tasks 2-3: Bus error"), Cause.CRASH),
    "crash, Slurm silent": (seen(SILENT, KILLED, rank_exits=exits(RESET)), Cause.CRASH),
    "exit code masked by the kill that follows": (
        seen(
            NOTHING,
            "srun: error: n0: task 1: Exited with exit code 3",
            "srun: error: n0: task 0: Terminated",
            srun_exit_code=143,
        ),
        Cause.CRASH,
    ),
    "hang": (seen(NOTHING, stall=STALL, srun_exit_code=-9), Cause.HANG),
    "hang, Slurm silent": (seen(SILENT, stall=STALL, srun_exit_code=-9), Cause.HANG),
    # Launching.
    "no step": (seen(NOTHING, NO_STEP, started=False), Cause.LAUNCH_FAILURE),
    "no step, Slurm silent": (seen(SILENT, NO_STEP, started=False), Cause.LAUNCH_FAILURE),
    "one node does not launch, srun kills the tasks of the other": (
        seen(NOTHING, NO_TASKS, "srun: error: n0: task 0: Killed", started=False),
        Cause.LAUNCH_FAILURE,
    ),
    "srun fails without a word": (seen(NOTHING, started=False), Cause.LAUNCH_FAILURE),
    "srun killed": (seen(NOTHING, srun_exit_code=-9), Cause.CRASH),
    "srun killed, Slurm silent": (seen(SILENT, srun_exit_code=-9), Cause.CRASH),
    # Nothing at all.
    "code 1 and nothing else": (NOTHING, Cause.UNKNOWN),
    "code 0 without the done marker": (replace(NOTHING, srun_exit_code=0), Cause.UNKNOWN),
    "srun still alive, Slurm silent": (
        replace(SILENT, srun_exit_code=None, signals=("TERM",)),
        Cause.UNKNOWN,
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_the_cause(name: str) -> None:
    evidence, cause = ROWS[name]
    verdict = classify(evidence)
    assert verdict.cause is cause, verdict
    assert verdict.reason


def test_a_job_without_its_gpus_needs_another_allocation() -> None:
    """As Slurm 22.05.8 starts one that was requeued while one of its nodes was dead."""
    words = "Invalid generic resource (gres) specification"
    line = f"srun: error: Unable to create step for job 2: {words}"
    verdict = classify(seen(NOTHING, line, started=False))
    assert (verdict.cause, verdict.broken_allocation) == (Cause.LAUNCH_FAILURE, True)
    assert not classify(seen(NOTHING, NO_STEP, started=False)).broken_allocation


def test_a_requeue_by_slurm_is_not_repeated_and_only_that_one() -> None:
    requeued = {name for name, row in ROWS.items() if classify(row[0]).already_requeued}
    assert requeued == {
        "grace over, requeued by Slurm",
        "grace over, requeued, and only the preempt time says why",
        "node failure, requeued by Slurm",
        "requeued by somebody",
        "requeued by somebody, without a notice",
        "requeued by somebody, Slurm silent",
    }


def test_restarts_are_compared_with_those_of_this_attempt() -> None:
    third = replace(NOTHING, restart_count=2, job=job(restarts=2, preempt=True))
    verdict = classify(replace(third, rank_exits=YIELDED))
    assert verdict.cause is Cause.PREEMPTED
    assert not verdict.already_requeued


def test_the_first_death_is_the_root_and_not_those_that_follow() -> None:
    late = "srun: error: n0: task 0: Exited with exit code 1"
    verdict = classify(seen(NOTHING, KILLED, late, rank_exits=exits(RESET)))
    assert (verdict.rank, verdict.reason) == (1, "rank 1 on n1 was ended by a signal: Killed")
    own = exits("crash ValueError: rank 0 is wrong", RESET)
    verdict = classify(seen(NOTHING, late, KILLED, rank_exits=own))
    assert (verdict.rank, verdict.reason) == (0, "rank 0 failed: ValueError: rank 0 is wrong")


def test_the_masked_exit_code_is_named() -> None:
    verdict = classify(ROWS["exit code masked by the kill that follows"][0])
    assert verdict.reason == "task 1 on n0: Exited with exit code 3"
    assert "143" not in verdict.reason


def test_the_rank_of_a_wrong_setting_is_named_even_if_others_crashed_first() -> None:
    verdict = classify(replace(NOTHING, rank_exits=exits(RESET, "config_error no /data/x.bin")))
    assert (verdict.rank, verdict.reason) == (1, "no /data/x.bin")


@pytest.mark.parametrize(
    ("line", "node", "tasks", "what"),
    [
        ("srun: error: n1: task 1: Killed", "n1", "1", "Killed"),
        ("srun: error: n[0-1]: tasks 0-3,5: Terminated", "n[0-1]", "0-3,5", "Terminated"),
        (
            "srun: error: gpu-a.b-07: task 12: Segmentation fault (core dumped)\n",
            "gpu-a.b-07",
            "12",
            "Segmentation fault (core dumped)",
        ),
        (
            "srun: error: n0: task 3: Exited with exit code 143",
            "n0",
            "3",
            "Exited with exit code 143",
        ),
        ("srun: error: n0: task 3: Out Of Memory", "n0", "3", "Out Of Memory"),
    ],
)
def test_lines_about_tasks(line: str, node: str, tasks: str, what: str) -> None:
    failure = read_task_failure(line)
    assert failure is not None
    assert (failure.node, failure.tasks, failure.what) == (node, tasks, what)


@pytest.mark.parametrize("line", [PREEMPTION, NO_REASON, SRUN_NODE_FAILURE, NO_STEP, NO_TASKS])
def test_notices_are_no_task_failures(line: str) -> None:
    assert read_notice(line)
    assert read_task_failure(line) is None


@pytest.mark.parametrize(
    "line",
    [
        "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.",
        "srun: launch/slurm: _task_start: Node n0, 2 tasks started",
        "step 12 loss 3.4",
        "",
    ],
)
def test_other_lines_say_nothing(line: str) -> None:
    assert not read_notice(line)
    assert read_task_failure(line) is None
