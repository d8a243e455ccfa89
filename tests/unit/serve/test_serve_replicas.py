"""Replicas are made of one prototype, started once, asked to leave, and seen by their jobs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from serving_documents import service_plan, service_spec_text, write_service

from hpctrain.base.errors import SlurmRefusedError, SlurmUnreachableError, UsageError
from hpctrain.records.find import RunFiles
from hpctrain.records.ledger import EventKind
from hpctrain.records.requests import make_request, read_request
from hpctrain.records.run_jobs import RunJobs
from hpctrain.records.service_layout import ReplicaName, ServiceLayout
from hpctrain.records.supervise_config import read_supervise_config
from hpctrain.serve.jobs import JobView, _view
from hpctrain.serve.replica.config import ReplicaConfig, read_program_settings
from hpctrain.serve.replicas import drain_replica, start_replica
from hpctrain.slurm.fake import FakeSlurm
from hpctrain.slurm.records import JobRecord
from hpctrain.slurm.states import JobState

NAME = ReplicaName(3, 2)
PROFILE = """
name: small
nodes: {count: 4, cpus: 8, memory: 15GiB}
gpu: {type: a100, per_node: 2, memory: 16GiB, reserved: 0B, peak: {}, emulated: true}
nvlink: {domain: 2, bandwidth: 10GB/s}
network: {fabric: ethernet, nics_per_node: 1, nic_bandwidth: 10Gb/s, interface: lo}
filesystems:
  - {name: disk, path: /local, kind: local, write_bandwidth: 1GB/s, read_bandwidth: 1GB/s}
slurm:
  kill_wait: 30s
  partitions:
    - {name: train, default: true, preemption: {mode: requeue, grace: 60s}}
metrics: {ports: 9400-9409, address: 127.0.0.1}
"""


@pytest.fixture
def service(tmp_path: Path) -> ServiceLayout:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").write_text('{"quantization_config": {}}')
    (tmp_path / "profile.yaml").write_text(PROFILE)
    (tmp_path / "service.yaml").write_text(service_spec_text(tmp_path))
    directory = tmp_path / "runs" / "chat-7f3a"
    documents = (tmp_path / "service.yaml", tmp_path / "profile.yaml")
    return write_service(directory, *documents, service_plan(), sys.executable)


def test_a_replica_is_a_complete_run_directory_of_its_name(service: ServiceLayout) -> None:
    slurm = FakeSlurm()
    job_id = start_replica(service, NAME, slurm)
    run = service.replica(NAME)
    assert run.run_id == "chat-7f3a-r003-g002"
    assert "--job-name=chat-7f3a-r003-g002" in slurm.scripts[job_id]
    settings, config = (
        read_supervise_config(run.supervise_config),
        read_program_settings(run.replica_config, ReplicaConfig),
    )
    assert (settings.run_id, settings.serves, settings.target_step) == (run.run_id, True, 1)
    assert (config.name, config.service) == ("r003-g002", str(service.directory))
    assert (config.ports, config.stage_directory, config.term_seconds) == (
        (9400, 9409),
        "/local",
        60,
    )
    assert config.start.cpu is not None and not config.start.quantized_checkpoint
    assert "r000-g000" not in run.script.read_text() + run.replica_config.read_text()
    assert run.current_code.resolve(strict=True).suffix == ".zip"
    kinds = [event.event for event in RunFiles(run).ledger.events()]
    assert kinds == [EventKind.RENDERED, EventKind.SUBMITTING, EventKind.SUBMITTED]


def test_it_is_submitted_once(service: ServiceLayout) -> None:
    slurm = FakeSlurm()
    first = start_replica(service, NAME, slurm)
    assert start_replica(service, NAME, slurm) == first
    slurm.records[first] = replace(slurm.records[first], state=JobState.COMPLETED)
    assert start_replica(service, NAME, slurm) == first, "what has left is not started again"
    assert len(slurm.records) == 1
    assert start_replica(service, NAME.next_generation, slurm) != first


def test_a_start_that_was_interrupted_goes_on(service: ServiceLayout) -> None:
    run = service.replica(NAME)
    run.directory.mkdir(parents=True)
    (run.directory / "half").touch()  # its ledger is missing, so it was not complete
    slurm = FakeSlurm()
    slurm.refusal = "sbatch: error: QOSMaxSubmitJobPerUserLimit"
    with pytest.raises(SlurmRefusedError):
        start_replica(service, NAME, slurm)
    slurm.refusal = ""
    assert start_replica(service, NAME, slurm) in slurm.records
    assert not (run.directory / "half").exists()
    other = ReplicaName(4, 1)
    slurm.away = True
    with pytest.raises(SlurmUnreachableError):
        start_replica(service, other, slurm)


def test_a_service_without_a_prototype_has_no_replicas(service: ServiceLayout) -> None:
    shutil.rmtree(service.prototype.directory)
    with pytest.raises(UsageError, match="no prototype"):
        start_replica(service, NAME, FakeSlurm())


def test_one_that_runs_is_asked_and_one_that_waits_is_cancelled(service: ServiceLayout) -> None:
    slurm = FakeSlurm()
    waiting, running = ReplicaName(1, 1), ReplicaName(2, 1)
    ids = {name: start_replica(service, name, slurm) for name in (waiting, running)}
    slurm.records[ids[running]] = replace(slurm.records[ids[running]], state=JobState.RUNNING)
    for name in ids:
        drain_replica(service, name, slurm, "a test")
        request = read_request(service.replica(name))
        assert request is not None and request.reason == "a test"
    assert slurm.records[ids[waiting]].state is JobState.CANCELLED
    assert slurm.records[ids[running]].state is JobState.RUNNING
    with pytest.raises(UsageError, match="no replica r009-g001"):
        drain_replica(service, ReplicaName(9, 1), slurm)


def test_its_script_reads_well_to_a_shell(service: ServiceLayout) -> None:
    script = service.prototype.script
    beside = Path(sys.executable).with_name("shellcheck")
    program = str(beside) if beside.exists() else shutil.which("shellcheck")
    assert program
    found = subprocess.run([program, script], capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stdout
    text = script.read_text()
    assert "-m hpctrain.serve.replica replica.json" in text
    assert "#SBATCH --signal=B:USR1@100" in text  # 60 for Slurm, 3 + 20 to drain, 15 for its end
    assert "trainer" not in text and "checkpoint" not in text, text
    assert max(map(len, text.splitlines())) < 160


FIRST = ReplicaName(1, 1)
RUNNING = JobRecord(7, state=JobState.RUNNING, start_time=1000.0, time_limit_seconds=3600.0)
WAITING = JobRecord(7, state=JobState.PENDING)


class Replica:
    """One replica's run directory, and a look at it."""

    def __init__(self, directory: Path) -> None:
        service = ServiceLayout(directory / "s")
        service.create()
        self.run = RunFiles(service.replica(FIRST))
        self.run.layout.create()

    def happened(self, *kinds: EventKind, **fields: object) -> None:
        for kind in kinds:
            self.run.ledger.append(kind, **fields)

    def look(self, *jobs: JobRecord, later_seconds: float = 1.0) -> JobView:
        events = self.run.ledger.events()
        now = events[-1].time + later_seconds if events else 0.0
        return _view(FIRST, self.run, events, RunJobs(jobs=jobs), 100.0, now)


@pytest.fixture
def replica(tmp_path: Path) -> Replica:
    return Replica(tmp_path)


def submitted(replica: Replica) -> None:
    replica.happened(EventKind.RENDERED, EventKind.SUBMITTING)
    replica.happened(EventKind.SUBMITTED, job_id=7)


def test_from_submission_to_its_time_limit(replica: Replica) -> None:
    replica.happened(EventKind.RENDERED, EventKind.SUBMITTING)
    assert replica.look().state == "submitting"
    replica.happened(EventKind.SUBMITTED, job_id=7)
    assert replica.look(WAITING).state == "pending"
    replica.happened(EventKind.ATTEMPT_STARTED, job_id=7)
    running = replica.look(RUNNING)
    assert (running.state, running.job_id, running.drain_asked) == ("running", 7, False)
    assert running.ends_at == 1000 + 3600 - 100 - 60, "at Slurm's warning, a minute early"


def test_a_job_that_is_gone_has_failed_with_its_cause(replica: Replica) -> None:
    submitted(replica)
    replica.happened(EventKind.ATTEMPT_STARTED, job_id=7)
    assert replica.look().problem == "its job is gone"
    replica.happened(EventKind.LAUNCH_ENDED, cause="gpu_oom", reason="out of memory")
    gone = replica.look()
    assert (gone.state, gone.drain_asked, gone.problem) == ("over", False, "gpu_oom: out of memory")


def test_an_interrupted_submission_counts_as_failed_in_the_end(replica: Replica) -> None:
    replica.happened(EventKind.RENDERED, EventKind.SUBMITTING)
    assert replica.look(later_seconds=119.0).state == "submitting"
    assert replica.look(later_seconds=121.0).state == "over"


def test_a_refused_submission_has_failed_at_once(replica: Replica) -> None:
    replica.happened(EventKind.RENDERED, EventKind.SUBMITTING)
    replica.happened(EventKind.SUBMIT_FAILED, reason="QOSMaxSubmitJobPerUserLimit")
    refused = replica.look()
    assert refused.state == "over"
    assert refused.problem == "not submitted: QOSMaxSubmitJobPerUserLimit"


def test_without_an_answer_slurm_may_have_it(replica: Replica) -> None:
    replica.happened(EventKind.RENDERED, EventKind.SUBMITTING)
    replica.happened(EventKind.SUBMIT_FAILED, reason="timed out", answered=False)
    assert replica.look().state == "submitting"


def test_asked_to_leave_and_gone_is_well(replica: Replica) -> None:
    submitted(replica)
    replica.happened(EventKind.ATTEMPT_STARTED, job_id=7)
    replica.happened(EventKind.CONTROL, action="stop")
    assert not replica.look(RUNNING).drain_asked, "announced, and not yet asked"
    make_request(replica.run.layout, "stop")
    assert replica.look(RUNNING).drain_asked
    replica.run.layout.stop_request.unlink()  # the supervisor has followed it
    replica.happened(EventKind.ACTION, action="stop", cause="yielded")
    assert replica.look(RUNNING).drain_asked
    assert replica.look().drain_asked


def test_a_job_that_was_cancelled_in_the_queue_is_well(replica: Replica) -> None:
    submitted(replica)
    replica.happened(EventKind.CONTROL, action="stop")
    assert replica.look().drain_asked
