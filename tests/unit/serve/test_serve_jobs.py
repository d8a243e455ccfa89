"""What run directories and Slurm show of a replica's job, as its controller sees it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.records.find import RunFiles
from hpctrain.records.ledger import EventKind
from hpctrain.records.requests import make_request
from hpctrain.records.run_jobs import RunJobs
from hpctrain.records.service_layout import ReplicaName, ServiceLayout
from hpctrain.serve.jobs import JobView, _view
from hpctrain.slurm.records import JobRecord
from hpctrain.slurm.states import JobState

NAME = ReplicaName(1, 1)
RUNNING = JobRecord(7, state=JobState.RUNNING, start_time=1000.0, time_limit_seconds=3600.0)
WAITING = JobRecord(7, state=JobState.PENDING)


class Replica:
    """One replica's run directory, and a look at it."""

    def __init__(self, directory: Path) -> None:
        service = ServiceLayout(directory / "s")
        service.create()
        self.run = RunFiles(service.replica(NAME))
        self.run.layout.create()

    def happened(self, *kinds: EventKind, **fields: object) -> None:
        for kind in kinds:
            self.run.ledger.append(kind, **fields)

    def look(self, *jobs: JobRecord, later_seconds: float = 1.0) -> JobView:
        events = self.run.ledger.events()
        now = events[-1].time + later_seconds if events else 0.0
        return _view(NAME, self.run, events, RunJobs(jobs=jobs), 100.0, now)


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
