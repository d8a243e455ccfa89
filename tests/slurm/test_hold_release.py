"""Holding, releasing and taking out of the queue, as the verbs of people rely on it."""

from __future__ import annotations

import pytest
from rehearsal import patient_client
from test_client import QUIET, SLEEP, eventually, job_of, running

from hpctrain.base.errors import SlurmRefusedError
from hpctrain.sandbox.sandbox import Sandbox
from hpctrain.slurm import JobState, RequeueResult, SlurmClient


@pytest.fixture
def slurm(sandbox: Sandbox) -> SlurmClient:
    return patient_client(sandbox.environment())


def test_a_job_that_waits_is_held_and_released_any_number_of_times(slurm: SlurmClient) -> None:
    job_id = slurm.submit(SLEEP, (*QUIET, "--begin=now+1hour")).job_id
    for _ in range(2):
        slurm.hold(job_id)
        held = job_of(slurm, job_id)
        assert (held.state, held.reason) == (JobState.PENDING, "JobHeldUser")
    for _ in range(2):
        slurm.release(job_id)
        assert "eld" not in (job_of(slurm, job_id).reason or "")
    assert job_of(slurm, job_id).state is JobState.PENDING
    slurm.cancel(job_id)
    for ask in (slurm.hold, slurm.release):
        with pytest.raises(SlurmRefusedError, match="already finished"):
            ask(job_id)


def test_slurm_holds_a_running_job_without_a_word(slurm: SlurmClient) -> None:
    """It goes on; it would be held once it is requeued. So whoever holds has to look again."""
    job_id = running(slurm)
    slurm.hold(job_id)
    assert (job_of(slurm, job_id).state, job_of(slurm, job_id).reason) == (
        JobState.RUNNING,
        "JobHeldUser",
    )
    slurm.release(job_id)
    assert (job_of(slurm, job_id).state, job_of(slurm, job_id).reason) == (JobState.RUNNING, None)


def test_a_job_that_is_requeued_and_held_says_so_while_it_completes_and_after(
    slurm: SlurmClient,
) -> None:
    job_id = running(slurm)
    assert slurm.requeue_hold(job_id).result is RequeueResult.DONE
    assert job_of(slurm, job_id).reason == "job requeued in held state"
    assert eventually(lambda: job_of(slurm, job_id).state is JobState.PENDING)
    assert job_of(slurm, job_id).reason == "job requeued in held state"
    slurm.release(job_id)
    assert eventually(lambda: job_of(slurm, job_id).state.is_running)


def test_only_a_job_that_waits_is_taken_out_of_the_queue(slurm: SlurmClient) -> None:
    runs, waits = running(slurm), slurm.submit(SLEEP, (*QUIET, "--hold")).job_id
    slurm.cancel_waiting(runs)
    slurm.cancel_waiting(waits)
    assert job_of(slurm, waits).state is JobState.CANCELLED
    assert job_of(slurm, runs).state is JobState.RUNNING
