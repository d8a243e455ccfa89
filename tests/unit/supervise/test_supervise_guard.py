"""A file system that hangs while the job is being ended: the run goes back into the queue."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from supervise_facts import config
from supervise_stage import JOB_ID, PATIENCE_SECONDS, Stage

from hpctrain.slurm.states import JobState
from hpctrain.supervise import termination_guard as guard_module
from hpctrain.supervise.termination_guard import FileSystemCheck, Guard


class Disk:
    """A file system that can be made to hang."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.answers.set()

    def touch(self, path: Path) -> None:
        self.answers.wait(600)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    monkeypatch.setattr(guard_module, "_CHECK_SECONDS", 0.01)
    monkeypatch.setattr(guard_module, "_AFTER_TERM_SECONDS", 0.2)
    monkeypatch.setattr(guard_module, "_AFTER_WARNING_SECONDS", 0.2)
    return Disk()


def guarded(
    stage: Stage, disk: Disk, *, told: str | None = "TERM", seconds: float | None = 0.8
) -> int:
    """A supervisor that is stuck for some time; how often its job was put back into the queue.

    Without `seconds` it is stuck until the job is back.
    """
    supervisor = stage.supervisor()
    if told:
        supervisor.context.signals._arrived.append(told)

    def stuck() -> None:
        deadline = time.monotonic() + (PATIENCE_SECONDS if seconds is None else seconds)
        while time.monotonic() < deadline:
            if seconds is None and stage.slurm.records[JOB_ID].restart_count:
                break
            time.sleep(0.01)

    worker = threading.Thread(target=stuck)
    worker.start()
    Guard(supervisor.context, FileSystemCheck(stage.layout.ledger, disk.touch)).wait_for(worker)
    disk.answers.set()
    return stage.slurm.records[JOB_ID].restart_count or 0


@pytest.mark.parametrize("told", ["TERM", "USR1"])
def test_a_job_that_is_being_ended_goes_back(told: str, stage: Stage, disk: Disk) -> None:
    disk.answers.clear()
    assert guarded(stage, disk, told=told, seconds=None) == 1


class AtOnce:
    """A thread that is through when it has been started, however busy the machine is."""

    def __init__(self, target: Callable[[], None], **_: object) -> None:
        self.start = target

    def is_alive(self) -> bool:
        return False

    def join(self, timeout: float) -> None:
        """It has ended."""


def test_a_disk_that_answers_is_left_to_the_supervisor(
    stage: Stage, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard_module, "threading", SimpleNamespace(Thread=AtOnce))
    assert guarded(stage, disk) == 0


def test_nothing_is_done_before_somebody_ends_the_job(stage: Stage, disk: Disk) -> None:
    disk.answers.clear()
    assert guarded(stage, disk, told=None) == 0


def test_there_is_patience_after_a_warning(
    stage: Stage, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard_module, "_AFTER_WARNING_SECONDS", 600.0)
    disk.answers.clear()
    assert guarded(stage, disk, told="USR1") == 0


@pytest.mark.parametrize("state", [JobState.CANCELLED, JobState.COMPLETING])
def test_what_a_person_has_cancelled_stays_cancelled(
    state: JobState, stage: Stage, disk: Disk
) -> None:
    stage.slurm.change(state=state)
    disk.answers.clear()
    assert guarded(stage, disk) == 0


def test_a_chain_has_its_successor_already(stage: Stage, disk: Disk) -> None:
    stage.configure(config().model_copy(update={"continuation": "chain"}))
    disk.answers.clear()
    assert guarded(stage, disk) == 0


def test_a_whole_attempt_while_the_ledger_hangs(
    stage: Stage, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor's own thread never comes back; its main thread still hears and acts."""
    supervisor = stage.supervisor()
    supervisor.guard = Guard(supervisor.context, FileSystemCheck(stage.layout.ledger, disk.touch))
    events = supervisor.context.ledger.events

    def hang() -> object:
        supervisor.context.signals._arrived.append("TERM")
        disk.answers.clear()
        while stage.slurm.records[JOB_ID].restart_count != 1:
            time.sleep(0.01)
        disk.answers.set()
        return events()

    monkeypatch.setattr(supervisor.context.ledger, "events", hang)
    supervisor.run()
    assert stage.slurm.records[JOB_ID].restart_count == 1


def test_a_suspended_machine_is_no_hung_file_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor's node stands still between the start of the check and its end."""
    monkeypatch.setattr(guard_module, "_LAST_CHANCE_SECONDS", PATIENCE_SECONDS)
    check = FileSystemCheck(Path("ledger"), lambda path: time.sleep(0.2))
    assert check.silent_seconds() == 0.0
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + 60)
    monkeypatch.setattr(guard_module, "time", later)
    assert check.silent_seconds() == 0.0
