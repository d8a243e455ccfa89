"""`after` of a spec: what is waited for, what is refused at its place, what a new job changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from command_line import hpctrain as command
from trained_trials import SPEC
from virtual_clock import VirtualClock

from hpctrain.base.errors import SlurmRefusedError
from hpctrain.job.job_submission import resubmit
from hpctrain.records.find import RunFiles, find_run
from hpctrain.records.jobs import awaited_run
from hpctrain.records.ledger import EventKind
from hpctrain.slurm.fake import FakeSlurm
from hpctrain.slurm.states import JobState

RUNS = Path("runs")
SUBMIT = ("submit", "tiny.yaml", "-p", "sandbox", "-y", "--set")


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(SPEC + "data: {made_up: true}\n")
    fake = FakeSlurm()
    monkeypatch.setattr("hpctrain.slurm.client.SlurmClient", lambda: fake)
    return fake


def submitted(*more: str) -> RunFiles:
    outcome = command(*SUBMIT, *more)
    assert outcome.exit_code == 0, outcome.stderr
    return find_run(RUNS, outcome.stdout.strip())


def waits_for(slurm: FakeSlurm, job_id: int) -> list[str]:
    return [one for one in slurm.options[job_id] if one.startswith("--dependency")]


def test_the_field_is_followed_and_the_option_wins(slurm: FakeSlurm) -> None:
    first, other = submitted("name=first"), submitted("name=other")
    submitted("name=second", "--set", f"after={first.run_id}")
    assert waits_for(slurm, 3) == ["--dependency=afterok:1"]
    submitted("name=third", "--set", f"after={first.run_id[:6]}", "--after", other.run_id)
    assert waits_for(slurm, 4) == ["--dependency=afterok:2"]
    first.layout.done.write_text("{}")
    submitted("name=fourth", "--set", f"after={first.run_id}")
    assert waits_for(slurm, 5) == [], "it is done: there is nothing to wait for"


def test_what_cannot_be_waited_for_is_refused_at_the_field(slurm: FakeSlurm) -> None:
    first = submitted("name=first")
    Path("with.yaml").write_text(Path("tiny.yaml").read_text() + "after: nothing\n")
    line = len(Path("with.yaml").read_text().splitlines())
    outcome = command("submit", "with.yaml", "-p", "sandbox", "-y")
    assert outcome.exit_code == 3
    assert f"with.yaml:{line}:8: `after`: no run `nothing` in runs" in outcome.stderr
    slurm.records[1] = replace(slurm.records[1], state=JobState.FAILED)
    outcome = command(*SUBMIT, f"after={first.run_id}")
    assert "is not done and has no job to wait for" in outcome.stderr and outcome.exit_code == 3
    assert f"hint: `hpctrain resume {first.run_id}` first" in outcome.stderr
    config = first.layout.supervise_config
    text = config.read_text().replace('"continuation": "requeue"', '"continuation": "array"')
    config.write_text(text)
    outcome = command(*SUBMIT, f"after={first.run_id}")
    assert "goes on in other jobs (continuation array)" in outcome.stderr
    assert len(list(RUNS.glob("*/ledger.jsonl"))) == 1, "nothing was written"


def test_a_prepared_run_waits_when_it_is_submitted(slurm: FakeSlurm) -> None:
    first = submitted("name=first")
    told = command(*SUBMIT, f"after={first.run_id}", "--prepare")
    assert "`resume` sees to that" in told.stderr
    resubmit(find_run(RUNS, told.stdout.strip()), slurm)  # type: ignore[arg-type]
    assert waits_for(slurm, 2) == ["--dependency=afterok:1"]


def test_followers_wait_for_the_new_job_of_a_run(slurm: FakeSlurm) -> None:
    first = submitted("name=first")
    follower = submitted("name=second", "--set", f"after={first.run_id}")
    begun = submitted("name=third", "--set", f"after={first.run_id}")
    begun.ledger.append(EventKind.LAUNCH_STARTED, job_id=3, restart_count=0)
    assert slurm.dependencies == {}
    slurm.records[1] = replace(slurm.records[1], state=JobState.FAILED)
    assert resubmit(first, slurm).job_id == 4  # type: ignore[arg-type]
    assert slurm.dependencies == {2: "afterok:4"}, "not of one that has begun"
    (noted,) = [e for e in follower.ledger.events() if e.event is EventKind.OBSERVED]
    assert noted.reason == f"waits for job 4 of run {first.run_id} now"


def test_a_follower_goes_on_waiting_for_what_else_it_waits_for(slurm: FakeSlurm) -> None:
    """A point of a sweep also waits for the point before it in its lane."""
    first = submitted("name=first")
    submitted("name=second", "--set", f"after={first.run_id}")
    slurm.dependencies[2] = "afterok:1,afterany:11"  # that of job 1 is replaced, not of job 11
    slurm.records[1] = replace(slurm.records[1], state=JobState.FAILED)
    assert resubmit(first, slurm).job_id == 3  # type: ignore[arg-type]
    assert slurm.dependencies == {2: "afterok:3,afterany:11"}


def put_back(follower: RunFiles, first: RunFiles, slurm: FakeSlurm, job_id: int) -> None:
    """What the supervisor of a follower does that finds the other run not done."""
    follower.ledger.append(EventKind.ATTEMPT_STARTED, job_id=job_id, restart_count=0)
    follower.ledger.append(EventKind.OBSERVED, job_id=job_id, after_run=first.run_id, reason="x")
    slurm.records[job_id] = replace(
        slurm.records[job_id], state=JobState.PENDING, reason="JobHeldUser"
    )


def test_a_follower_that_was_put_back_is_released_to_wait_again(slurm: FakeSlurm) -> None:
    first = submitted("name=first")
    follower = submitted("name=second", "--set", f"after={first.run_id}")
    alone = submitted("name=third", "--set", f"after={first.run_id}")
    for number, run in ((2, follower), (3, alone)):
        put_back(run, first, slurm, number)
    assert f"run `{first.run_id}` has to be done first; JobHeldUser" in command("status").stdout
    told = command("resume", alone.run_id)
    assert told.exit_code == 0 and slurm.records[3].hold is None, told.stderr
    slurm.records[1] = replace(slurm.records[1], state=JobState.COMPLETED)
    assert resubmit(first, slurm).job_id == 4  # type: ignore[arg-type]
    assert slurm.dependencies == {2: "afterok:4"}, "a person has begun the third without the first"
    assert slurm.records[2].hold is None


def test_a_follower_that_has_just_begun_is_put_back_first(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, virtual_clock: VirtualClock
) -> None:
    first = submitted("name=first")
    follower = submitted("name=second", "--set", f"after={first.run_id}")
    slurm.records[1] = replace(slurm.records[1], state=JobState.COMPLETED)
    slurm.records[2] = replace(slurm.records[2], state=JobState.RUNNING)
    real = slurm.update_job

    def while_pending(job_id: int, **changes: object) -> None:
        if slurm.records[job_id].state is JobState.RUNNING:
            raise SlurmRefusedError("Job is no longer pending execution")
        real(job_id, **changes)  # type: ignore[arg-type]

    monkeypatch.setattr(slurm, "update_job", while_pending)
    virtual_clock.at(2.0, lambda: put_back(follower, first, slurm, 2))
    resubmit(first, slurm)  # type: ignore[arg-type]
    assert slurm.dependencies == {2: "afterok:3"} and slurm.records[2].hold is None
    assert virtual_clock.pauses == [1.0, 1.0]


def test_a_follower_whose_job_nobody_recorded_waits_all_the_same(slurm: FakeSlurm) -> None:
    first = submitted("name=first")
    follower = submitted("name=second", "--set", f"after={first.run_id}")
    lines = follower.layout.ledger.read_text().splitlines()
    assert '"submitted"' in lines[-1]
    follower.layout.ledger.write_text("\n".join(lines[:-1]) + "\n")  # its client has died
    follower.ledger.append(EventKind.ADOPTED, job_id=2)
    assert awaited_run(follower.ledger.events()) == first.run_id
    slurm.records[1] = replace(slurm.records[1], state=JobState.FAILED)
    resubmit(first, slurm)  # type: ignore[arg-type]
    assert slurm.dependencies == {2: "afterok:3"}


def test_a_follower_that_cannot_be_changed_keeps_no_run_from_its_job(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = submitted("name=first")
    follower = submitted("name=second", "--set", f"after={first.run_id}")
    slurm.records[1] = replace(slurm.records[1], state=JobState.FAILED)

    def refuse(job_id: int, **changes: object) -> None:
        raise SlurmRefusedError("Job is no longer pending execution")

    monkeypatch.setattr(slurm, "update_job", refuse)
    assert resubmit(first, slurm).job_id == 3  # type: ignore[arg-type]
    (noted,) = [e for e in follower.ledger.events() if e.event is EventKind.OBSERVED]
    assert noted.reason is not None and "could not be made to wait for job 3" in noted.reason
