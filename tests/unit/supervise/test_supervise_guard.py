"""A file system that hangs while the job is being ended: the run goes back into the queue."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from supervise_facts import config
from supervise_stage import JOB_ID, PATIENCE_SECONDS, Stage
from virtual_clock import ShiftedClock, VirtualClock
from waiting import wait_until

from hpctrain.base import clock
from hpctrain.slurm.states import JobState
from hpctrain.supervise import loop as guard_module
from hpctrain.supervise.loop import FileSystemCheck, Guard


class Disk:
    """A file system that can be made to hang."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.answers.set()

    def touch(self, path: Path) -> None:
        self.answers.wait(600)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    monkeypatch.setattr(guard_module, "_LAST_CHANCE_SECONDS", 0.001)
    return Disk()


class Stuck:
    """The supervisor's own thread, which does not come back before that holds."""

    def __init__(self, is_back: Callable[[], object]) -> None:
        self.is_back = is_back

    def is_alive(self) -> bool:
        return not self.is_back()

    def join(self, timeout: float) -> None:
        clock.sleep(timeout)


def guarded(
    stage: Stage, disk: Disk, *, told: str | None = "TERM", seconds: float | None = 300.0
) -> tuple[int, float]:
    """A supervisor that is stuck for some time.

    Returns how often its job was put back into the queue, and after how many seconds all was over.
    Without `seconds` it is stuck until the job is back.
    """
    supervisor, virtual = stage.supervisor(), VirtualClock()
    if told:
        supervisor.context.signals._arrived.append(told)

    def restarts() -> int:
        return stage.slurm.records[JOB_ID].restart_count or 0

    stuck = Stuck(restarts if seconds is None else lambda: virtual.passed_seconds >= seconds)
    guard = Guard(supervisor.context, FileSystemCheck(stage.layout.ledger, disk.touch))
    with clock.replaced(virtual):
        guard.wait_for(cast(threading.Thread, stuck))
    disk.answers.set()
    return restarts(), virtual.passed_seconds


@pytest.mark.parametrize(("told", "seconds"), [("TERM", 10), ("USR1", 60)])
def test_a_job_that_is_being_ended_goes_back(
    told: str, seconds: int, stage: Stage, disk: Disk
) -> None:
    disk.answers.clear()
    restarts, after_seconds = guarded(stage, disk, told=told, seconds=None)
    assert restarts == 1 and seconds <= after_seconds < seconds + 1


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
    assert guarded(stage, disk)[0] == 0


def test_nothing_is_done_before_somebody_ends_the_job(stage: Stage, disk: Disk) -> None:
    disk.answers.clear()
    assert guarded(stage, disk, told=None)[0] == 0


def test_there_is_patience_after_a_warning(stage: Stage, disk: Disk) -> None:
    disk.answers.clear()
    assert guarded(stage, disk, told="USR1", seconds=59.0)[0] == 0


@pytest.mark.parametrize("state", [JobState.CANCELLED, JobState.COMPLETING])
def test_what_a_person_has_cancelled_stays_cancelled(
    state: JobState, stage: Stage, disk: Disk
) -> None:
    stage.slurm.change(state=state)
    disk.answers.clear()
    assert guarded(stage, disk)[0] == 0


def test_a_chain_has_its_successor_already(stage: Stage, disk: Disk) -> None:
    stage.configure(config().model_copy(update={"continuation": "chain"}))
    disk.answers.clear()
    assert guarded(stage, disk)[0] == 0


def test_a_whole_attempt_while_the_ledger_hangs(
    stage: Stage, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor's own thread never comes back; its main thread still hears and acts."""
    monkeypatch.setattr(guard_module, "_AFTER_TERM_SECONDS", 0.2)
    supervisor = stage.supervisor()
    supervisor.guard = Guard(supervisor.context, FileSystemCheck(stage.layout.ledger, disk.touch))
    events = supervisor.context.ledger.events

    def hang() -> object:
        supervisor.context.signals._arrived.append("TERM")
        disk.answers.clear()
        wait_until(lambda: stage.slurm.records[JOB_ID].restart_count == 1)
        disk.answers.set()
        return events()

    monkeypatch.setattr(supervisor.context.ledger, "events", hang)
    supervisor.run()
    assert stage.slurm.records[JOB_ID].restart_count == 1


def test_a_suspended_machine_is_no_hung_file_system(
    monkeypatch: pytest.MonkeyPatch, shifted_clock: ShiftedClock
) -> None:
    """The supervisor's node stands still between the start of the check and its end."""
    monkeypatch.setattr(guard_module, "_LAST_CHANCE_SECONDS", PATIENCE_SECONDS)
    disk = Disk()
    disk.answers.clear()
    check = FileSystemCheck(Path("ledger"), disk.touch)
    assert check.silent_seconds() == 0.0
    shifted_clock.monotonic_ahead_seconds = 60.0
    disk.answers.set()
    assert check.silent_seconds() == 0.0
