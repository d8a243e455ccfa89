"""Typed meaning of a job's state and reason: who holds it, why it waits, how Slurm ended it. Pure.

One table per question, shared by every reader of a job: the supervisor inside it, the attempt after
it and the commands of users. Belongs here: all spellings of squeue, scontrol and sacct. Does not
belong here: what follows for a run (`judge.job_end`), texts for people.

Sources: squeue(1), JOB REASON CODES; src/common/slurm_protocol_defs.c, job_state_reason_string; for
reasons that are sentences src/slurmctld/job_mgr.c and src/slurmctld/node_scheduler.c, `state_desc`.
"""

from __future__ import annotations

from enum import StrEnum

from hpctrain.slurm.states import JobState


class JobHold(StrEnum):
    """Who or what keeps a job from starting until somebody releases it.

    USER and ADMIN: held by its owner or by an administrator, who alone can release it. REQUEUED:
    requeued and held in one step. SPECIAL_EXIT: the same, by an exit code of slurm.conf(5),
    RequeueExitHold. LAUNCH_FAILED: a prolog or the start of the batch script failed on a node.
    USER_ENVIRONMENT: the user's login shell failed there. REQUEUE_LIMIT: launched again too often
    (slurm.conf(5), MaxBatchRequeue). RESERVATION_DELETED: its reservation is gone.
    """

    USER = "user"
    ADMIN = "admin"
    REQUEUED = "requeued"
    SPECIAL_EXIT = "special_exit"
    LAUNCH_FAILED = "launch_failed"
    USER_ENVIRONMENT = "user_environment"
    REQUEUE_LIMIT = "requeue_limit"
    RESERVATION_DELETED = "reservation_deleted"


class WaitReason(StrEnum):
    """Why the scheduler does not start a job that nobody holds.

    NODES_UNAVAILABLE: nodes that it requires are down, drained or reserved. NODES_REQUIRED: the
    same for all nodes that it could use, as slurmctld's sentence. LIMIT: of the account or the QOS.
    """

    BEGIN_TIME = "begin_time"
    PRIORITY = "priority"
    RESOURCES = "resources"
    DEPENDENCY = "dependency"
    NODES_UNAVAILABLE = "nodes_unavailable"
    NODES_REQUIRED = "nodes_required"
    NODE_DOWN = "node_down"
    BAD_CONSTRAINTS = "bad_constraints"
    PARTITION_CONFIG = "partition_config"
    PARTITION_DOWN = "partition_down"
    PARTITION_INACTIVE = "partition_inactive"
    PARTITION_TIME_LIMIT = "partition_time_limit"
    PARTITION_NODE_LIMIT = "partition_node_limit"
    RESERVATION = "reservation"
    ARRAY_TASK_LIMIT = "array_task_limit"
    LIMIT = "limit"


class JobEnd(StrEnum):
    """Why Slurm, or a person through Slurm, ended a job or the step of one."""

    PREEMPTED = "preempted"
    TIME_LIMIT = "time_limit"
    DEADLINE = "deadline"
    NODE_FAILED = "node_failed"
    PROLOG_FAILED = "prolog_failed"
    OUT_OF_MEMORY = "out_of_memory"
    REQUEUED = "requeued"
    CANCELLED = "cancelled"
    REVOKED = "revoked"


# Parts of normalized reasons (see `_normalized`); the first that is found decides.
HOLD_OF_REASON = {
    "jobheldadmin": JobHold.ADMIN,
    "jobheld": JobHold.USER,
    "heldstate": JobHold.REQUEUED,  # job requeued in held state
    "specialexitstate": JobHold.SPECIAL_EXIT,  # job requeued in special exit state
    "userenvretrievalfailed": JobHold.USER_ENVIRONMENT,  # user env retrieval failed requeued held
    "launchfailurelimitexceeded": JobHold.REQUEUE_LIMIT,  # ... requeued held, from 24.11 on
    "requeuedheld": JobHold.LAUNCH_FAILED,  # launch failed requeued held
    "jobholdmaxrequeue": JobHold.REQUEUE_LIMIT,
}
_HOLD_OF_STATE = {
    JobState.REQUEUE_HOLD: JobHold.REQUEUED,
    JobState.SPECIAL_EXIT: JobHold.SPECIAL_EXIT,
    JobState.RESV_DEL_HOLD: JobHold.RESERVATION_DELETED,
}
_WAIT_OF_REASON = {
    "begintime": WaitReason.BEGIN_TIME,
    "priority": WaitReason.PRIORITY,
    "resources": WaitReason.RESOURCES,
    "dependency": WaitReason.DEPENDENCY,
    "reqnodenotavail": WaitReason.NODES_UNAVAILABLE,
    "nodedown": WaitReason.NODE_DOWN,
    "badconstraints": WaitReason.BAD_CONSTRAINTS,
    "partitionconfig": WaitReason.PARTITION_CONFIG,
    "partitiondown": WaitReason.PARTITION_DOWN,
    "partitioninactive": WaitReason.PARTITION_INACTIVE,
    "partitiontimelimit": WaitReason.PARTITION_TIME_LIMIT,
    "partitionnodelimit": WaitReason.PARTITION_NODE_LIMIT,
    "reservation": WaitReason.RESERVATION,
    "jobarraytasklimit": WaitReason.ARRAY_TASK_LIMIT,
}
# Families of reasons and sentences, by their beginning.
_WAIT_OF_BEGINNING = {
    "qos": WaitReason.LIMIT,
    "assoc": WaitReason.LIMIT,
    "nodesrequired": WaitReason.NODES_REQUIRED,
}
# Every state of `JobState`. COMPLETED and FAILED are ends of the script by itself, and COMPLETING
# means that the job ends, without the reason for it.
END_OF_STATE: dict[JobState, JobEnd | None] = {
    JobState.BOOT_FAIL: JobEnd.NODE_FAILED,
    JobState.CANCELLED: JobEnd.CANCELLED,
    JobState.COMPLETED: None,
    JobState.COMPLETING: None,
    JobState.CONFIGURING: None,
    JobState.DEADLINE: JobEnd.DEADLINE,
    JobState.FAILED: None,
    JobState.NODE_FAIL: JobEnd.NODE_FAILED,
    JobState.OUT_OF_MEMORY: JobEnd.OUT_OF_MEMORY,
    JobState.PENDING: None,
    JobState.PREEMPTED: JobEnd.PREEMPTED,
    JobState.REQUEUED: None,
    JobState.REQUEUE_FED: None,
    JobState.REQUEUE_HOLD: None,
    JobState.RESIZING: None,
    JobState.RESV_DEL_HOLD: None,
    JobState.REVOKED: JobEnd.REVOKED,
    JobState.RUNNING: None,
    JobState.SIGNALING: None,
    JobState.SPECIAL_EXIT: None,
    JobState.STAGE_OUT: None,
    JobState.STOPPED: None,
    JobState.SUSPENDED: None,
    JobState.TIMEOUT: JobEnd.TIME_LIMIT,
    JobState.UNKNOWN: None,
}
# Of a job that is COMPLETING: slurmctld sets the reason before the state.
_END_OF_REASON = {
    "timelimit": JobEnd.TIME_LIMIT,
    "deadline": JobEnd.DEADLINE,
    "nodedown": JobEnd.NODE_FAILED,
    "nodefail": JobEnd.NODE_FAILED,
    "prolog": JobEnd.PROLOG_FAILED,
}


def job_hold(state: JobState, reason: str | None) -> JobHold | None:
    """Find who holds a job; None for a job that nobody holds and for one that has ended.

    sacct keeps the last reason of a job after its end.
    """
    if state.is_ended:
        return None
    key = _normalized(reason)
    by_reason = (hold for part, hold in HOLD_OF_REASON.items() if part in key)
    return next(by_reason, _HOLD_OF_STATE.get(state))


def wait_reason(reason: str | None) -> WaitReason | None:
    """Classify why a job waits; None for reasons without a meaning of their own here."""
    key = _normalized(reason)
    by_beginning = (wait for start, wait in _WAIT_OF_BEGINNING.items() if key.startswith(start))
    return _WAIT_OF_REASON.get(key) or next(by_beginning, None)


def job_end(state: JobState, reason: str | None = None) -> JobEnd | None:
    """Find why Slurm ends a job; None if it names no end, as for a cancel while it completes.

    Only a job that is COMPLETING has its end as reason: before, `NodeDown` and `Prolog` are reasons
    to wait, and sacct keeps the last of these after the end.
    """
    if state is JobState.COMPLETING:
        return _END_OF_REASON.get(_normalized(reason))
    return END_OF_STATE[state]


def _normalized(reason: str | None) -> str:
    """Make all spellings of a reason equal and drop what follows it.

    Reasons are one word or a sentence, scontrol writes `_` for blanks, and details such as
    `ReqNodeNotAvail, UnavailableNodes:n3` or `ReqNodeNotAvail(Unavailable:n3)` follow.
    """
    word = (reason or "").partition(",")[0].partition("(")[0]
    return word.replace("_", "").replace(" ", "").lower()
