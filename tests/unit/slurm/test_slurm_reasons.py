"""One table per question about a job's state and reason: hold, wait, end."""

from __future__ import annotations

import pytest

from hpctrain.judge.causes import Cause
from hpctrain.judge.job_end import CAUSES_OF_ENDS, text_of
from hpctrain.slurm import JobEnd, JobHold, JobRecord, JobState, WaitReason
from hpctrain.slurm.reasons import END_OF_STATE, job_end, job_hold, wait_reason


@pytest.mark.parametrize(
    ("reason", "hold"),
    [
        ("JobHeldUser", JobHold.USER),
        ("JobHeldAdmin", JobHold.ADMIN),
        ("job requeued in held state", JobHold.REQUEUED),
        ("job_requeued_in_held_state", JobHold.REQUEUED),
        ("job requeued in special exit state", JobHold.SPECIAL_EXIT),
        ("launch failed requeued held", JobHold.LAUNCH_FAILED),
        ("launch_failed_requeued_held", JobHold.LAUNCH_FAILED),
        ("user_env_retrieval_failed_requeued_held", JobHold.USER_ENVIRONMENT),
        ("user env retrieval failed requeued held", JobHold.USER_ENVIRONMENT),
        ("launch_failure_limit_exceeded_requeued_held", JobHold.REQUEUE_LIMIT),
        ("launch failure limit exceeded requeued held", JobHold.REQUEUE_LIMIT),
        ("JobHoldMaxRequeue", JobHold.REQUEUE_LIMIT),
        ("BeginTime", None),
        ("Priority", None),
        ("Dependency", None),
        ("ReqNodeNotAvail, UnavailableNodes:held-state", None),
        ("None", None),
        (None, None),
    ],
)
def test_a_hold_is_known_by_its_reason(reason: str | None, hold: JobHold | None) -> None:
    for state in (JobState.PENDING, JobState.COMPLETING):
        assert job_hold(state, reason) is hold
        assert JobRecord(1, state=state, reason=reason).hold is hold


def test_a_job_that_has_ended_is_held_by_nobody() -> None:
    """sacct keeps the last reason for which a job waited."""
    for state in JobState:
        if state.is_ended:
            assert job_hold(state, "JobHeldUser") is None


@pytest.mark.parametrize(
    ("state", "hold"),
    [
        (JobState.REQUEUE_HOLD, JobHold.REQUEUED),
        (JobState.SPECIAL_EXIT, JobHold.SPECIAL_EXIT),
        (JobState.RESV_DEL_HOLD, JobHold.RESERVATION_DELETED),
        (JobState.PENDING, None),
        (JobState.RUNNING, None),
    ],
)
def test_a_hold_without_a_reason_is_known_by_its_state(
    state: JobState, hold: JobHold | None
) -> None:
    assert job_hold(state, None) is hold


@pytest.mark.parametrize(
    ("reason", "wait"),
    [
        ("BeginTime", WaitReason.BEGIN_TIME),
        ("Priority", WaitReason.PRIORITY),
        ("Resources", WaitReason.RESOURCES),
        ("Dependency", WaitReason.DEPENDENCY),
        ("ReqNodeNotAvail, UnavailableNodes:n[1-2]", WaitReason.NODES_UNAVAILABLE),
        ("ReqNodeNotAvail(Unavailable:n1)", WaitReason.NODES_UNAVAILABLE),
        ("ReqNodeNotAvail,_Reserved_for_maintenance", WaitReason.NODES_UNAVAILABLE),
        (
            "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority "
            "partitions",
            WaitReason.NODES_REQUIRED,
        ),
        ("NodeDown", WaitReason.NODE_DOWN),
        ("BadConstraints", WaitReason.BAD_CONSTRAINTS),
        ("PartitionConfig", WaitReason.PARTITION_CONFIG),
        ("PartitionDown", WaitReason.PARTITION_DOWN),
        ("PartitionInactive", WaitReason.PARTITION_INACTIVE),
        ("PartitionTimeLimit", WaitReason.PARTITION_TIME_LIMIT),
        ("PartitionNodeLimit", WaitReason.PARTITION_NODE_LIMIT),
        ("Reservation", WaitReason.RESERVATION),
        ("JobArrayTaskLimit", WaitReason.ARRAY_TASK_LIMIT),
        ("QOSMaxGRESPerUser", WaitReason.LIMIT),
        ("AssocGrpNodeLimit", WaitReason.LIMIT),
        ("AssociationJobLimit", WaitReason.LIMIT),
        ("SomethingNew", None),
        ("None", None),
        (None, None),
    ],
)
def test_reasons_to_wait(reason: str | None, wait: WaitReason | None) -> None:
    assert wait_reason(reason) is wait
    assert JobRecord(1, reason=reason).wait is wait


def test_every_reason_to_wait_has_a_spelling() -> None:
    rows = next(mark for mark in test_reasons_to_wait.pytestmark if mark.name == "parametrize")
    assert {wait for _, wait in rows.args[1]} == {*WaitReason, None}


def test_every_state_says_whether_it_is_an_end_by_slurm() -> None:
    assert set(END_OF_STATE) == set(JobState)
    by_itself = {JobState.COMPLETED, JobState.FAILED}
    for state, end in END_OF_STATE.items():
        assert (end is not None) == (state.is_ended and state not in by_itself), state


@pytest.mark.parametrize(
    ("reason", "end"),
    [
        ("TimeLimit", JobEnd.TIME_LIMIT),
        ("DeadLine", JobEnd.DEADLINE),
        ("NodeDown", JobEnd.NODE_FAILED),
        ("NodeFail", JobEnd.NODE_FAILED),
        ("Prolog", JobEnd.PROLOG_FAILED),
        ("None", None),
        (None, None),
    ],
)
def test_a_job_that_completes_has_its_end_as_reason(reason: str | None, end: JobEnd | None) -> None:
    assert job_end(JobState.COMPLETING, reason) is end
    assert JobRecord(1, state=JobState.COMPLETING, reason=reason).end is end
    for other in (JobState.PENDING, JobState.CONFIGURING, JobState.RUNNING, JobState.FAILED):
        assert job_end(other, reason) is None, "a reason to wait, or one that is long past"


def test_every_end_has_one_cause_and_a_text() -> None:
    assert set(CAUSES_OF_ENDS) == set(JobEnd)
    assert len(set(CAUSES_OF_ENDS.values())) == len(JobEnd)
    for cause in CAUSES_OF_ENDS.values():
        assert (
            isinstance(cause, Cause) and text_of(cause) != str(cause)
        ) or cause is Cause.CANCELLED


# -- Spellings of job states, and what they mean for us -----------------------------------------


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("RUNNING", JobState.RUNNING),
        ("running", JobState.RUNNING),
        (" PENDING ", JobState.PENDING),
        ("CANCELLED by 1000", JobState.CANCELLED),
        ("CANCELLED+", JobState.CANCELLED),
        ("OUT_OF_ME+", JobState.OUT_OF_MEMORY),
        ("COMPLETED,COMPLETING", JobState.COMPLETING),
        ("PENDING,REQUEUED,SOMETHING_NEW", JobState.REQUEUED),
        ("RUNNING,SOMETHING_NEW", JobState.RUNNING),
        ("RE+", JobState.UNKNOWN),
        ("SOMETHING_NEW", JobState.UNKNOWN),
        ("", JobState.UNKNOWN),
    ],
)
def test_every_spelling_is_read(text: str, state: JobState) -> None:
    assert JobState.parse(text) is state


def test_every_known_state_is_read_and_belongs_to_one_class() -> None:
    for state in JobState:
        classes = [state.is_pending, state.is_active, state.is_ended]
        assert JobState.parse(state.value) is state
        assert sum(classes) == (0 if state is JobState.UNKNOWN else 1), state


def test_a_job_that_is_being_signalled_is_running_and_a_completing_one_is_not() -> None:
    assert JobState.SIGNALING.is_running
    assert JobState.COMPLETING.is_active
    assert not JobState.COMPLETING.is_running


@pytest.mark.parametrize("word", ["PREEMPTED", "TIMEOUT", "NODE_FAIL", "CANCELLED", "COMPLETED"])
def test_ends(word: str) -> None:
    assert JobState.parse(word).is_ended
