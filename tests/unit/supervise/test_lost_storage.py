"""A run directory that is away, read-only or broken for a while, and one that never comes back."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from launch_evidence import config
from supervise_stage import JOB_ID, PATIENCE_SECONDS, Stage
from virtual_clock import ShiftedClock, VirtualClock
from waiting import wait_until

from hpctrain.base import clock
from hpctrain.base.errors import StorageError
from hpctrain.base.formats import NewerFormatError
from hpctrain.checkpoints.publish import published_steps
from hpctrain.records.epochs import current_epoch
from hpctrain.records.ledger import EventKind, Ledger
from hpctrain.records.manifest import MANIFEST_NAME, checkpoint_name
from hpctrain.records.requests import read_request
from hpctrain.records.supervise_config import read_supervise_config
from hpctrain.slurm.client import SlurmClient
from hpctrain.slurm.fake import FakeSlurm
from hpctrain.slurm.states import JobState
from hpctrain.supervise import loop, srun_launch
from hpctrain.supervise import loop as guard_module
from hpctrain.supervise.evidence.run_dir_snapshot import BackgroundReader, RunDirSnapshot
from hpctrain.supervise.loop import (
    FileSystemCheck,
    Guard,
    Supervisor,
    end_without_settings,
    wait_for_settings,
)


def away(stage: Stage) -> Path:
    """Move the run directory away; what was started in it goes on."""
    place = stage.layout.directory.with_name("away")
    stage.layout.directory.rename(place)
    return place


def kinds(stage: Stage) -> list[str]:
    return [str(event.event) for event in Ledger(stage.layout.ledger).events()]


def failing(times: int, error: OSError) -> Callable[..., None]:
    """Fails so many times, then does nothing."""
    left = [error] * times

    def work(*_: object) -> None:
        if left:
            raise left.pop()

    return work


def flushed(supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """Whether the supervisor has tried to write its ledger a few times after this was asked."""
    tries, flush = list[bool](), supervisor.context.ledger.flush

    def counted() -> OSError | None:
        tries.append(True)
        return flush()

    monkeypatch.setattr(supervisor.context.ledger, "flush", counted)
    return lambda: len(tries) >= 5


def test_away_for_a_moment_while_the_ranks_train(
    stage: Stage, shifted_clock: ShiftedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a newer launch nor an end: what is told meanwhile is written afterwards."""

    supervisor = stage.supervisor("progress:3 await:back done")
    ghosts: list[bool] = []

    def back() -> None:
        shifted_clock.ahead_seconds = 100.0
        wait_until(flushed(supervisor, monkeypatch), "tried again")
        ghosts.append(stage.layout.directory.exists())
        stage.layout.directory.with_name("away").rename(stage.layout.directory)
        (stage.layout.directory / "back").touch()

    def hiccup() -> None:
        away(stage)
        os.kill(os.getpid(), signal.SIGUSR1)
        stage.once(lambda: '"signal"' in "".join(supervisor.context.ledger.waiting), back)

    stage.once_training(hiccup)
    assert supervisor.run() == 0
    assert ghosts == [False]
    assert (stage.causes, stage.actions) == (["done"], ["finish"])
    signals = stage.events(EventKind.SIGNAL)
    ended = stage.events(EventKind.LAUNCH_ENDED)
    assert [event.signal for event in signals] == ["USR1"]
    assert signals[0].time < ended[0].time - 90, "with the time at which it came"


def test_a_ledger_that_cannot_be_written_for_a_while_loses_no_line(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = stage.supervisor("progress:3 await:go crash", "progress:4 await:mended done")
    kept = stage.layout.directory / "kept"

    def broken() -> None:
        stage.layout.ledger.rename(kept)
        stage.layout.ledger.mkdir()
        (stage.layout.directory / "go").touch()

    def mend() -> None:
        wait_until(flushed(supervisor, monkeypatch), "tried again")
        stage.layout.ledger.rmdir()
        kept.rename(stage.layout.ledger)
        (stage.layout.directory / "mended").touch()

    stage.once_training(broken)
    stage.once(lambda: (stage.layout.epochs / "000002.json").exists(), mend)
    assert supervisor.run() == 0
    assert stage.causes == ["crash", "done"]
    times = [event.time for event in Ledger(stage.layout.ledger).events()]
    assert times == sorted(times)
    once = [kind for kind in kinds(stage) if kind in ("launch_started", "launch_ended", "action")]
    assert once == ["launch_started", "launch_ended", "action"] * 2


@pytest.mark.parametrize("number", [5, 30, 116, 13])
def test_a_fault_between_launches_is_tried_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    fault = failing(2, OSError(number, os.strerror(number)))
    monkeypatch.setattr(srun_launch, "fence_off", fault)
    assert stage.play("", "", "progress:3 done") == 0
    assert stage.causes == ["storage", "storage", "done"]
    assert stage.actions == ["relaunch", "relaunch", "finish"]
    assert os.strerror(number) in str(stage.events(EventKind.LAUNCH_ENDED)[0].reason)


def test_a_claim_that_failed_and_went_through_supersedes_nobody(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The epoch is taken, and its taker was told that it is not."""
    real = srun_launch.claim_epoch
    fault = failing(1, OSError(5, "Input/output error"))

    def claim(epochs: Path, claimant: str) -> int:
        epoch = real(epochs, claimant)
        fault()
        return epoch

    monkeypatch.setattr(srun_launch, "claim_epoch", claim)
    assert stage.play("", "progress:3 done") == 0
    assert stage.causes == ["storage", "done"]
    assert current_epoch(stage.layout.epochs) == 2


def back_before_call(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, number: int, stage: Stage
) -> None:
    """Move the run directory back before the third call, say: no sooner and no later."""
    real, calls = getattr(owner, name), list[int]()

    def call(*words: Any) -> Any:
        calls.append(1)
        if len(calls) == number:
            stage.layout.directory.with_name("away").rename(stage.layout.directory)
        return real(*words)

    monkeypatch.setattr(owner, name, call)


def test_gone_while_the_ranks_fail_for_it(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """They could not say why; that the directory was away is why."""
    back_before_call(monkeypatch, srun_launch.TrainerLauncher, "launch", 3, stage)
    stage.once_training(lambda: away(stage))
    assert stage.play("progress:3 await-away exit:1", "progress:3 done") == 0
    assert stage.causes == ["storage", "storage", "done"]
    assert stage.actions == ["relaunch", "relaunch", "finish"]


@pytest.mark.parametrize(
    ("restarts", "code", "action"), [(0, 0, "requeue"), (5, 1, "stop")], ids=["first", "last"]
)
def test_one_that_never_comes_back(
    stage: Stage,
    capsys: pytest.CaptureFixture[str],
    restarts: int,
    code: int,
    action: str,
) -> None:
    """Other nodes may reach it. Nothing is in the ledger, so Slurm's count of starts is the budget,
    and all that was not written is in the job's log."""
    stage.slurm.change(restart_count=restarts)
    stage.once_training(lambda: away(stage))
    supervisor = stage.supervisor("progress:3 await-away exit:1", restart_count=restarts)
    assert supervisor.run() == code
    assert not stage.layout.directory.exists()
    said = capsys.readouterr().err.splitlines()
    assert any(f" {action}: " in line for line in said)
    unwritten = [line for line in said if "not in the ledger: " in line]
    assert len([line for line in unwritten if '"event":"launch_ended"' in line]) == 5, "a storm"
    assert unwritten and f'"action":"{action}"' in "".join(unwritten)
    assert stage.slurm.records[JOB_ID].restart_count == restarts + (action == "requeue")


def test_preempted_while_it_is_away(stage: Stage) -> None:
    """What Slurm says needs no directory."""

    def preempted() -> None:
        stage.slurm.change(preempt_time=1.0)
        away(stage)

    stage.once_training(preempted)
    assert stage.play("progress:3 await-away exit:1") == 0
    assert stage.slurm.records[JOB_ID].restart_count == 1
    stage.layout.directory.with_name("away").rename(stage.layout.directory)


def test_away_when_the_attempt_begins(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a run without a past: nothing is decided before it can be read."""
    Ledger(stage.layout.ledger).append(EventKind.RENDERED)
    supervisor = stage.supervisor("progress:3 done")
    away(stage)
    back_before_call(monkeypatch, Supervisor, "_begin", 3, stage)
    assert supervisor.run() == 0
    assert kinds(stage)[0] == "rendered"
    assert stage.causes == ["storage", "storage", "done"]
    assert len(stage.events(EventKind.ATTEMPT_STARTED)) == 1


def test_a_file_system_that_is_away_has_no_requests_in_it(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    (stage.layout.control / "stop").mkdir()  # whatever it is, it is there
    assert read_request(stage.layout) is not None

    def stale(*_: object, **__: object) -> int:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(os, "open", stale)
    monkeypatch.setattr(os, "lstat", stale)
    with pytest.raises(OSError, match="Stale"):
        read_request(stage.layout)


# -- settings ----------------------------------------------------------------------------------

ENVIRONMENT = {"SLURM_JOB_ID": str(JOB_ID), "SLURM_JOB_NODELIST": "n0"}


def test_settings_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, waited = tmp_path / "supervise.json", list[float]()

    def wait(signals: object, seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            path.write_text(config().model_dump_json())

    monkeypatch.setattr(loop.signal, "sigtimedwait", wait)
    with pytest.raises(StorageError, match="No such file"):
        read_supervise_config(path)
    assert wait_for_settings(path, (signal.SIGTERM,))
    assert waited == [30.0] * 3
    path.unlink()
    waited[:] = [0.0] * 3
    assert not wait_for_settings(path, (signal.SIGTERM,))
    assert waited[3:] == [30.0] * 5 + [0], "six tries, 30 s apart"


@pytest.mark.parametrize(
    ("state", "restarts", "code"),
    [
        (JobState.RUNNING, 0, 0),
        (JobState.RUNNING, 5, 1),
        (JobState.COMPLETING, 0, 1),
        (None, 0, 1),
    ],
)
def test_a_job_without_settings(
    stage: Stage, state: JobState | None, restarts: int, code: int
) -> None:
    """Requeued while Slurm runs it, so often and no more; one that was cancelled stays so."""
    if state is not None:
        stage.slurm.change(state=state)
    else:
        stage.slurm.away = True
    environment = {**ENVIRONMENT, "SLURM_RESTART_COUNT": str(restarts)}
    slurm = cast(SlurmClient, stage.slurm)
    assert end_without_settings(environment, slurm) == code
    requeued = isinstance(stage.slurm, FakeSlurm) and stage.slurm.records[JOB_ID].restart_count
    assert bool(requeued) is (code == 0)


# -- A supervisor that meets files of a newer hpctrain stops or makes way, and moves nothing ----


def test_a_newer_checkpoint_is_not_put_aside(stage: Stage) -> None:
    assert stage.play("save:20 progress:25 crash", "exit:0", "exit:0", "exit:0") == 1
    newest = published_steps(stage.layout.checkpoints)[-1]
    path = stage.layout.checkpoints / checkpoint_name(newest) / MANIFEST_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema_version": 2}))
    Ledger(stage.layout.ledger).append(EventKind.CONTROL, action="resume")
    assert stage.play("done") == 1
    stop = stage.events(EventKind.ACTION)[-1]
    assert (stage.causes[-1], stop.action) == ("bad_checkpoint", "stop")
    assert f"{path}: has format version 2" in str(stop.reason)
    assert published_steps(stage.layout.checkpoints)[-1] == newest


def test_a_newer_sign_of_life_is_a_fault_of_the_directory() -> None:
    """Whoever reads in a thread is not left without an answer."""

    def read(*_: bool) -> RunDirSnapshot:
        raise NewerFormatError(Path("progress.json"), 2, 1)

    background = BackgroundReader(read)
    background.request(find_saves=False, rank_times=False)
    assert background.result(wait_seconds=60) is None
    assert isinstance(background.fault, StorageError) and "format version 2" in str(
        background.fault
    )
    background.close()


def test_newer_settings_end_the_job_with_the_reason(stage: Stage) -> None:
    text = stage.layout.supervise_config.read_text()
    document = {**json.loads(text), "schema_version": 2}
    stage.layout.supervise_config.write_text(json.dumps(document))
    with pytest.raises(NewerFormatError, match=r"supervise\.json: has format version 2"):
        stage.supervisor()


# -- A file system that hangs while the job is being ended: the run goes back into the queue ----


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
    threads = SimpleNamespace(Thread=AtOnce, Event=threading.Event)
    monkeypatch.setattr(guard_module, "threading", threads)
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
