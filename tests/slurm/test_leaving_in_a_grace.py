"""What becomes of a job that leaves by itself in its grace period: not the same on every Slurm.

Until 24.05 it has ended as its exit code says. Since then it is requeued whatever it says, and as
if its launch had failed: the fifth such exit is held.
"""

from __future__ import annotations

import signal

import pytest
from rehearsal import patient_client
from sleeping_jobs import ended, eventually, job_of, running, take_all_nodes
from slurm_settings import grace

from hpctrain.sandbox.sandbox import Sandbox
from hpctrain.slurm import JobHold, JobState, SlurmClient
from hpctrain.slurm.settings import capabilities

pytestmark = pytest.mark.nightly("newer releases of Slurm, which are fetched, with accounting")

# Tasks get SIGTERM when the grace begins, and the batch script nothing; it ends with its step.
LEAVES = "#!/bin/sh\nsrun sleep 3600\nexit 7\n"
ASKS_AND_LEAVES = "#!/bin/sh\nsrun sleep 3600\nscontrol requeue $SLURM_JOB_ID\nexit 7\n"
WHOLE = ("--nodes=4", "--exclusive", "--requeue")
# slurm.conf(5), MaxBatchRequeue.
LIMIT = 5


@pytest.fixture
def slurm(accounting: Sandbox) -> SlurmClient:
    return patient_client(accounting.environment())


def stepping(slurm: SlurmClient, script: str, *options: str) -> int:
    """A job whose step has begun, so that there are tasks that Slurm can tell."""
    job_id = running(slurm, script, *WHOLE, *options)
    assert eventually(lambda: has_step(slurm, job_id))
    return job_id


def has_step(slurm: SlurmClient, job_id: int) -> bool:
    return any(step.step_id.isdigit() and step.state.is_running for step in slurm.steps(job_id))


def preempt(slurm: SlurmClient, job_id: int) -> None:
    """Take the nodes of a job whose step runs, until it has left them and the other is over."""
    before = job_of(slurm, job_id).restart_count
    urgent = take_all_nodes(slurm)
    assert eventually(lambda: ended(slurm, urgent))
    assert eventually(lambda: job_of(slurm, job_id).restart_count != before or ended(slurm, job_id))


def await_restart(slurm: SlurmClient, job_id: int) -> None:
    """Wait for the step of a requeued job.

    Not shortened by StartTime=now: a node that has just ended the job may take it for the old one
    ("Job credential revoked", 24.11.5), and then it is over.
    """
    assert eventually(lambda: job_of(slurm, job_id).state.is_running and has_step(slurm, job_id))


def test_whoever_leaves_comes_back_where_slurm_is_said_to_do_that(
    slurm: SlurmClient, accounting: Sandbox
) -> None:
    comes_back = capabilities(slurm.config()).requeues_who_leaves_in_a_grace
    with grace(accounting):
        job_id = stepping(slurm, LEAVES)
        preempt(slurm, job_id)
        job = job_of(slurm, job_id)
        assert (job.restart_count == 1) is comes_back, job
        assert comes_back or (job.state, job.exit_code) == (JobState.FAILED, 7)


@pytest.mark.variant("test_whoever_leaves_comes_back_where_slurm_is_said_to_do_that")
def test_who_may_not_be_requeued_stays_away_and_its_exit_code_is_lost(
    slurm: SlurmClient, accounting: Sandbox
) -> None:
    """PREEMPTED 0:0 is no proof that nothing ended: the ledger of a run is."""
    with grace(accounting):
        job_id = stepping(slurm, LEAVES)
        slurm.update_job(job_id, requeue=False)
        preempt(slurm, job_id)
    job = job_of(slurm, job_id)
    if capabilities(slurm.config()).requeues_who_leaves_in_a_grace:
        # 0:15 if the shell was still in its trap when Slurm's next TERM came
        assert (job.state, job.exit_code) == (JobState.PREEMPTED, 0)
        assert job.exit_signal in (0, signal.SIGTERM)
    else:
        assert (job.state, job.exit_code) == (JobState.FAILED, 7)


@pytest.mark.variant("test_whoever_leaves_comes_back_where_slurm_is_said_to_do_that")
def test_the_fifth_who_leaves_is_held_until_it_is_released(
    slurm: SlurmClient, accounting: Sandbox
) -> None:
    if not capabilities(slurm.config()).requeues_who_leaves_in_a_grace:
        return  # the tests above show that this Slurm has nothing to hold
    with grace(accounting):
        job_id = stepping(slurm, LEAVES)
        for count in range(1, LIMIT + 1):
            preempt(slurm, job_id)
            if count < LIMIT:
                await_restart(slurm, job_id)
    assert eventually(lambda: job_of(slurm, job_id).hold is JobHold.REQUEUE_LIMIT)
    slurm.release(job_id)  # it may start at once
    assert eventually(lambda: job_of(slurm, job_id).state.is_running)


@pytest.mark.variant("test_whoever_leaves_comes_back_where_slurm_is_said_to_do_that")
def test_who_asks_before_it_leaves_is_never_held(slurm: SlurmClient, accounting: Sandbox) -> None:
    """As hpctrain's supervisor does; otherwise the fifth preemption would end a run."""
    with grace(accounting):
        job_id = stepping(slurm, ASKS_AND_LEAVES)
        for count in range(1, LIMIT + 2):
            preempt(slurm, job_id)
            assert job_of(slurm, job_id).restart_count == count
            await_restart(slurm, job_id)
    assert job_of(slurm, job_id).hold is None
