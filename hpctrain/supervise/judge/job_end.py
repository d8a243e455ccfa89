"""What an end of a job by Slurm means: one table from its state and reason to a cause. Pure.

The same for a supervisor that lives while its job ends, for the next attempt that finds the end of
the one before, and for an onlooker. Belongs here: states and reasons as Slurm spells them. Does not
belong here: ends that Slurm had no part in (`rank_verdict`), asking Slurm.
"""

from __future__ import annotations

from hpctrain.supervise.judge.causes import Cause

# squeue(1), JOB STATE CODES. What is running, starting or waiting is not among them; COMPLETED and
# FAILED are ends of the script by itself, and COMPLETING says that it ends but not why.
CAUSES_OF_STATES = {
    "PREEMPTED": Cause.PREEMPTED,
    "NODE_FAIL": Cause.NODE_FAILURE,
    "BOOT_FAIL": Cause.NODE_FAILURE,
    "TIMEOUT": Cause.TIME_LIMIT,
    "OUT_OF_MEMORY": Cause.HOST_OOM,
    "CANCELLED": Cause.CANCELLED,
    "DEADLINE": Cause.DEADLINE,
    "REVOKED": Cause.SUPERSEDED,
}
# src/common/slurm_protocol_defs.c, job_state_reason_string; told before the state is.
_CAUSES_OF_REASONS = {
    "TimeLimit": Cause.TIME_LIMIT,
    "DeadLine": Cause.DEADLINE,
    "NodeDown": Cause.NODE_FAILURE,
    "NodeFail": Cause.NODE_FAILURE,
    "Prolog": Cause.PROLOG_FAILURE,
}
_WORDS = {
    Cause.PREEMPTED: "preempted by a job of higher priority",
    Cause.TIME_LIMIT: "it reached its time limit",
    Cause.DEADLINE: (
        "it reached the deadline given to sbatch, after which Slurm runs it no more: `hpctrain "
        "resume` submits it again once the deadline is later or gone"
    ),
    Cause.NODE_FAILURE: "one of its nodes failed",
    Cause.PROLOG_FAILURE: "the prolog failed on a node",
    Cause.HOST_OOM: "it was out of memory",
    Cause.REQUEUED: "requeued by its owner or an administrator",
    Cause.CANCELLED: "cancelled",
    Cause.SUPERSEDED: "another cluster of the federation has taken it",
}


def cause_of_end(state: str, reason: str | None = None) -> Cause | None:
    """The cause that Slurm names; None if it names none, as for a cancel while it completes."""
    return _CAUSES_OF_REASONS.get(reason or "") or CAUSES_OF_STATES.get(state)


def words_of(cause: Cause) -> str:
    """A cause of the scheduler as part of a sentence."""
    return _WORDS.get(cause, str(cause))
