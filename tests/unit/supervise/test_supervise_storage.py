"""A run directory that is away, read-only or broken for a while, and one that never comes back."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from supervise_facts import config
from supervise_stage import JOB_ID, Stage
from virtual_clock import ShiftedClock
from waiting import wait_until

from hpctrain.base.errors import StorageError
from hpctrain.records.epochs import current_epoch
from hpctrain.records.ledger import EventKind, Ledger
from hpctrain.records.requests import read_request
from hpctrain.records.supervise_config import read_supervise_config
from hpctrain.slurm.client import SlurmClient
from hpctrain.slurm.fake import FakeSlurm
from hpctrain.slurm.states import JobState
from hpctrain.supervise import loop, srun_launch
from hpctrain.supervise.loop import Supervisor, end_without_settings, wait_for_settings


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
