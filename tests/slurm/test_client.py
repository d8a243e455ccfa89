"""The client against a real Slurm: what its commands really answer."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from rehearsal import patient_client, wait_till_remembered
from sleeping_jobs import QUIET, SLEEP, eventually, job_of, running
from slurm_settings import grace, nothing_starts

from hpctrain.base.errors import SlurmRefusedError, SlurmUnreachableError
from hpctrain.sandbox.faults import crash_node, kill_controller, restart_controller, restart_node
from hpctrain.sandbox.sandbox import Sandbox
from hpctrain.slurm import JobState, RequeueResult, SlurmClient

UNKNOWN_JOB = 99999999


@pytest.fixture
def slurm(sandbox: Sandbox) -> SlurmClient:
    return patient_client(sandbox.environment())


def test_a_job_is_submitted_seen_and_cancelled(slurm: SlurmClient, tmp_path: Path) -> None:
    script = tmp_path / "with space.sh"
    script.write_text(SLEEP)
    before = time.time()
    job_id = slurm.submit(script, (*QUIET, "--nodes=2", "--time=10", "--no-requeue")).job_id
    assert eventually(lambda: job_of(slurm, job_id).state.is_running)
    job = job_of(slurm, job_id)
    assert (job.name, job.restart_count, job.requeue) == ("with space.sh", 0, False)
    assert (job.partition, job.time_limit_seconds) == ("train", 600.0)
    assert job.node_list is not None and len(slurm.hostnames(job.node_list)) == 2
    assert job.start_time is not None and before - 2 < job.start_time < time.time() + 2
    assert job.preempt_time is None and job.exit_code is None
    slurm.cancel(job_id)
    assert eventually(lambda: job_of(slurm, job_id).state is JobState.CANCELLED)
    assert job_of(slurm, job_id).exit_signal == 15


def test_hostile_names_and_comments_arrive_as_they_were(slurm: SlurmClient) -> None:
    texts = ["a b|c 'q' \"d\" $(id) JobState=FAILED", "two\nlines|x", "ünïcode", "-v"]
    ids = [
        slurm.submit(SLEEP, ("--hold", f"--job-name={text}", f"--comment={text}\n{text}")).job_id
        for text in texts
    ]
    jobs = slurm.jobs(ids)
    assert [jobs[job_id].name for job_id in ids] == texts
    assert [jobs[job_id].comment for job_id in ids] == [f"{text}\n{text}" for text in texts]


def test_unknown_jobs_are_absent_and_never_an_error(slurm: SlurmClient) -> None:
    job_id = slurm.submit(SLEEP, (*QUIET, "--hold")).job_id
    assert slurm.jobs([UNKNOWN_JOB]) == slurm.jobs([UNKNOWN_JOB, UNKNOWN_JOB + 1]) == {}
    assert list(slurm.jobs([job_id, UNKNOWN_JOB])) == [job_id]
    assert slurm.show_job(UNKNOWN_JOB) is None
    assert slurm.steps(UNKNOWN_JOB) == ()
    slurm.cancel(UNKNOWN_JOB)
    with pytest.raises(SlurmRefusedError, match="Invalid job id"):
        slurm.hold(UNKNOWN_JOB)


def test_exit_codes_of_ended_jobs(slurm: SlurmClient) -> None:
    scripts = {"exit 7": (7, 0), "exit 0": (0, 0), "kill -9 $$": (0, 9)}
    ids = {slurm.submit(f"#!/bin/sh\n{body}\n", QUIET).job_id: body for body in scripts}
    assert eventually(lambda: all(job.state.is_ended for job in slurm.history(ids).values()))
    for job_id, job in slurm.history(ids).items():
        assert (job.exit_code, job.exit_signal) == scripts[ids[job_id]]
        assert job.end_time is not None


def test_requeue_tells_its_results_apart_and_start_now_ends_the_wait(
    slurm: SlurmClient, sandbox: Sandbox
) -> None:
    job_id = running(slurm)
    slurm.update_job(job_id, requeue=False)
    assert slurm.requeue(job_id).result is RequeueResult.DISABLED
    slurm.update_job(job_id, requeue=True)
    with pytest.raises(SlurmRefusedError, match="no longer pending"):
        slurm.update_job(job_id, exclude_nodes=["n0"])
    with nothing_starts(sandbox):  # it would begin again in 6 s
        assert slurm.requeue(job_id, shielded=True).result is RequeueResult.DONE
        assert slurm.requeue(job_id).result is RequeueResult.ALREADY_PENDING
        assert slurm.requeue(UNKNOWN_JOB).result is RequeueResult.UNKNOWN_JOB
        assert eventually(lambda: job_of(slurm, job_id).state is JobState.PENDING)
        # an hour, so that it does not pass while this machine holds us up
        sandbox.command("scontrol", "update", f"JobId={job_id}", "StartTime=now+1hour")
    delayed_until = job_of(slurm, job_id).start_time
    assert delayed_until is not None and delayed_until > time.time() + 600
    slurm.update_job(job_id, start_now=True, exclude_nodes=["n0", "n1"])
    assert eventually(lambda: job_of(slurm, job_id).state.is_running)
    record = slurm.show_job(job_id)
    assert record is not None and record.exclude_nodes == "n[0-1]"
    assert record.restart_count == 1
    assert job_of(slurm, job_id).node_list in ("n2", "n3")


def test_start_now_has_no_effect_while_the_job_is_completing(slurm: SlurmClient) -> None:
    job_id = running(slurm, "#!/bin/sh\ntrap '' TERM\nsleep 300\nsleep 3600\n")

    updated_at: list[float] = []

    def updated_while_it_completes() -> bool:
        """KILL ends the job after 10 s: if we were held up for so long, once more."""
        assert eventually(lambda: job_of(slurm, job_id).state.is_running)
        assert slurm.requeue(job_id).result is RequeueResult.DONE
        slurm.update_job(job_id, start_now=True)
        updated_at.append(time.time())
        return job_of(slurm, job_id).state is JobState.COMPLETING

    assert eventually(updated_while_it_completes)
    assert eventually(lambda: job_of(slurm, job_id).state is not JobState.COMPLETING)
    job = job_of(slurm, job_id)  # waiting, or begun again if we were held up
    assert job.start_time is not None and job.start_time > updated_at[-1] + 2, job


def test_a_requeued_job_can_be_held(slurm: SlurmClient) -> None:
    job_id = running(slurm)
    assert slurm.requeue_hold(job_id).result is RequeueResult.DONE
    assert eventually(lambda: job_of(slurm, job_id).state is JobState.PENDING)
    slurm.update_job(job_id, exclude_nodes=[])


def test_held_jobs_wait_until_they_are_released(slurm: SlurmClient) -> None:
    job_id = slurm.submit("#!/bin/sh\nsleep 3600\n", (*QUIET, "--hold")).job_id
    assert job_of(slurm, job_id).state is JobState.PENDING
    assert "JobHeld" in (job_of(slurm, job_id).reason or "")
    slurm.release(job_id)
    assert eventually(lambda: job_of(slurm, job_id).state.is_running)


def test_steps_are_listed_signalled_and_killed(slurm: SlurmClient, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    trap = f"trap 'echo got >> {mark}' USR1; touch {mark}; while :; do sleep 0.1; done"
    job_id = running(slurm, f'#!/bin/sh\nsrun sh -c "{trap}"\nexec sleep 3600\n')

    def live() -> set[str]:
        return {step.step_id for step in slurm.steps(job_id) if step.state.is_running}

    assert eventually(lambda: live() == {"0", "batch"} and mark.exists())
    slurm.signal_step(job_id, "0", "USR1")
    assert eventually(lambda: "got" in mark.read_text())
    slurm.signal_step(job_id, "7", "USR1")
    slurm.kill_step(job_id, "0")
    assert eventually(lambda: live() == {"batch"})
    with pytest.raises(SlurmRefusedError, match="Unknown job signal"):
        slurm.signal_step(job_id, "0", "NONSENSE")


def test_preemption_shows_in_the_record(slurm: SlurmClient, sandbox: Sandbox) -> None:
    job_id = running(slurm, SLEEP, "--nodes=4", "--exclusive", "--requeue")
    with grace(sandbox, seconds=600):
        before = time.time()
        slurm.submit(SLEEP, (*QUIET, "--partition=urgent", "--nodes=4", "--exclusive"))
        assert eventually(lambda: job_of(slurm, job_id).preempt_time is not None)
    preempt_time = job_of(slurm, job_id).preempt_time
    assert preempt_time is not None and before - 2 < preempt_time < time.time() + 2
    assert job_of(slurm, job_id).restart_count == 0


def test_a_script_can_be_checked_without_submitting_it(slurm: SlurmClient) -> None:
    answer = slurm.test_only(SLEEP, ["--nodes=2"])
    assert (answer.partition, answer.nodes) == ("train", "n[0-1]")
    assert "to start at" in answer.text and answer.start_time_text is not None
    with pytest.raises(SlurmRefusedError, match="node configuration is not available"):
        slurm.test_only(SLEEP, ["--nodes=5"])


def test_refused_submissions_have_the_words_of_slurm(slurm: SlurmClient) -> None:
    with pytest.raises(SlurmRefusedError, match="invalid partition specified: nonsense"):
        slurm.submit(SLEEP, ["--partition=nonsense"])
    with pytest.raises(SlurmRefusedError, match="does not look like a batch script"):
        slurm.submit("echo no interpreter\n")
    with pytest.raises(SlurmRefusedError, match="Unable to open file"):
        slurm.submit(Path("/nonexistent.sh"))


def test_options_in_the_environment_are_ignored(sandbox: Sandbox, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    dirty = {
        **sandbox.environment(),
        "SBATCH_PARTITION": "nonsense",
        "SQUEUE_FORMAT": "%i",
        "SQUEUE_STATES": "FAILED",
        "SLURM_TIME_FORMAT": "%s",
        "SLURM_NTASKS": "900",
        "SLURM_JOB_NAME": "parent",
        "TZ": "Asia/Tokyo",
        "SCANCEL_STATE": "PENDING",
        "SLURM_EXPORT_ENV": "NONE",
    }
    slurm = patient_client(dirty)
    before = time.time()
    script = f"#!/bin/sh\nenv > {seen}.new; mv {seen}.new {seen}; exec sleep 3600\n"
    job_id = running(slurm, script)
    job = job_of(slurm, job_id)
    assert (job.partition, job.name) == ("train", "sbatch")
    assert job.submit_time is not None and before - 2 < job.submit_time < time.time() + 2
    assert eventually(seen.exists)
    assert "TZ=Asia/Tokyo" in seen.read_text().splitlines()
    slurm.cancel(job_id)
    assert eventually(lambda: job_of(slurm, job_id).state is JobState.CANCELLED)


def test_host_lists_need_no_controller(slurm: SlurmClient) -> None:
    assert slurm.hostnames("n[0-1,5],gpu-a[08-09]") == ("n0", "n1", "n5", "gpu-a08", "gpu-a09")
    with pytest.raises(SlurmRefusedError, match="Invalid hostlist"):
        slurm.hostnames("n[2-x]")


def test_a_node_has_an_address(slurm: SlurmClient) -> None:
    assert slurm.node_address("n1") == "127.0.0.1"
    with pytest.raises(SlurmRefusedError, match="not found"):
        slurm.node_address("n77")


def test_a_node_tells_when_it_booted(slurm: SlurmClient, sandbox: Sandbox) -> None:
    before = slurm.boot_times(["n0", "n1"])
    assert set(before) == {"n0", "n1"} and max(before.values()) < time.time()
    assert slurm.boot_times([]) == {}
    began_at = int(time.time())
    crash_node(sandbox, "n1")
    restart_node(sandbox, "n1", rebooted=True)
    assert eventually(lambda: slurm.boot_times(["n1"])["n1"] >= began_at)
    # a node that registers again while it is held up may tell some seconds more
    assert slurm.boot_times(["n0"]) == {"n0": pytest.approx(before["n0"], rel=0, abs=60)}
    with pytest.raises(SlurmRefusedError, match="not found"):
        slurm.boot_times(["n77"])


def test_configuration(slurm: SlurmClient, sandbox: Sandbox) -> None:
    config = slurm.config()
    assert config.version[:2] == sandbox.state.version
    assert (config.get("JobRequeue"), config.get("PreemptMode")) == ("1", "REQUEUE")
    assert slurm.accounting_enabled() is False


def test_without_a_controller_nothing_is_known(slurm: SlurmClient, sandbox: Sandbox) -> None:
    job_id = running(slurm)
    wait_till_remembered(sandbox)
    kill_controller(sandbox)
    for ask in (slurm.jobs, slurm.history):
        with pytest.raises(SlurmUnreachableError, match="Unable to contact"):
            ask([job_id])
    assert slurm.requeue(job_id).result is RequeueResult.UNREACHABLE
    with pytest.raises(SlurmUnreachableError):
        slurm.submit(SLEEP)
    restart_controller(sandbox)
    assert eventually(lambda: job_of(slurm, job_id).state.is_running)
    assert slurm.requeue(job_id).result is RequeueResult.DONE
