"""Whole launches that hang, seem to hang, or cannot be looked at: who is named, what is done."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from launch_evidence import config
from supervise_stage import JOB_ID, PATIENCE_SECONDS, Stage
from virtual_clock import ShiftedClock
from waiting import wait_until

from hpctrain.judge import silence_limits
from hpctrain.judge.odd_stacks import NO_STACK
from hpctrain.judge.silence_limits import StallLimits
from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import EventKind
from hpctrain.records.run_records import Progress, write_record
from hpctrain.slurm.messages import waits_for_step
from hpctrain.slurm.states import JobState
from hpctrain.supervise.evidence import (
    launch_watch,
    run_dir_snapshot,
    stack_inquiry,
)
from hpctrain.supervise.evidence.launch_watch import CrossLaunchState, LaunchWatch
from hpctrain.supervise.evidence.run_dir_snapshot import (
    BackgroundReader,
    RunDirReader,
    RunDirSnapshot,
)
from hpctrain.supervise.srun_process import SrunProcess
from hpctrain.supervise.timeouts import run_with_timeout


@pytest.fixture(autouse=True)
def _soon(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stall after 0.3 s, in setup after 600."""
    changes = {"stall_seconds": 0.3, "setup_stall_seconds": 600.0, "kill_wait_seconds": 4.0}
    stage.configure(config().model_copy(update=changes))
    monkeypatch.setattr(stack_inquiry, "_DUMP_SECONDS", 600.0)
    monkeypatch.setattr(launch_watch, "_BLOCKED_SECONDS", 60.0)


def begun(stage: Stage, *parts: str, tasks: int = 0) -> LaunchWatch:
    """The first launch, which nobody watches yet."""
    supervisor = stage.supervisor(*parts)
    supervisor.context.signals.install()
    launch = SrunProcess(supervisor.launcher.argv, {**os.environ, "HPCTRAIN_EPOCH": "1"})
    return LaunchWatch(supervisor.context, launch, 1, tasks=tasks)


def watched(stage: Stage, *parts: str, tasks: int = 0) -> LaunchWatch:
    """The first launch, watched to its end."""
    ours = begun(stage, *parts, tasks=tasks)
    ours.wait()
    assert ours.launch.poll() is not None
    return ours


def later(clock: ShiftedClock, reached: Callable[[], object], step_seconds: float) -> None:
    """Let time go by until the watch has noticed: what is long for it is short here."""

    def noticed() -> object:
        clock.monotonic_ahead_seconds += step_seconds
        return reached()

    wait_until(noticed, "noticed")


# One sign only: between two of them a busy machine may pause for longer than a stall takes here.
TRAINING = "progress:4"


def test_the_rank_that_does_not_wait_is_named(stage: Stage) -> None:
    ours = watched(stage, f"ranks:all_reduce,recv,load_batch {TRAINING} sleep:600", tasks=3)
    assert ours.stall is not None
    assert ours.stall.phase == "training"
    assert [(odd.rank, odd.node) for odd in ours.stall.odd] == [(2, "n2")]
    assert ours.stall.odd[0].where.startswith("load_batch (")
    assert [s[2] for s in stage.slurm.signals][:2] == ["QUIT", "KILL"]
    (saved,) = stage.events(EventKind.STACKS_SAVED)
    assert (saved.epoch, saved.rank, saved.node, saved.nodes) == (1, 2, "n2", "n2")
    assert saved.reason == "3 of 3 ranks gave their stacks; unlike the others: rank 2 on n2"
    assert len(saved.evidence) == 3
    assert saved.evidence[0].startswith("1 rank (0): all_reduce (torch/distributed/")
    assert "load_batch" in stage.layout.stack_dump(1, 2).read_text()


def wait_without(monkeypatch: pytest.MonkeyPatch, stopped: int) -> None:
    """Time that is up for a rank that is stopped, and not before the others have written."""
    real = stack_inquiry.wait_for_dumps

    def wait(run: RunLayout, epoch: int, before: Mapping[int, int], seconds: float) -> None:
        real(run, epoch, before, 1.0)
        real(run, epoch, {rank: size for rank, size in before.items() if rank != stopped}, seconds)

    monkeypatch.setattr(stack_inquiry, "wait_for_dumps", wait)


def test_a_rank_that_is_stopped_is_named(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    wait_without(monkeypatch, stopped=1)
    ours = watched(stage, f"ranks:all_reduce,!all_reduce,recv {TRAINING} sleep:600", tasks=3)
    assert ours.stall is not None
    assert [(o.rank, o.node, o.where) for o in ours.stall.odd] == [(1, "n1", NO_STACK)]
    (saved,) = stage.events(EventKind.STACKS_SAVED)
    assert saved.reason is not None and saved.reason.startswith("2 of 3 ranks gave")


def test_a_rank_that_never_came_up_is_named_by_its_place(stage: Stage) -> None:
    stage.slurm.hostnames = lambda nodes: ("a", "b")  # type: ignore[method-assign]
    ours = watched(stage, f"ranks:all_reduce,recv,recv {TRAINING} sleep:600", tasks=4)
    assert ours.stall is not None
    assert [(odd.rank, odd.node) for odd in ours.stall.odd] == [(3, "b")]


def test_while_all_leave_a_rank_without_a_file_has_left(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = {"leaving": 0.3}
    monkeypatch.setattr(StallLimits, "cap", lambda self, phase: seconds.get(phase, 600.0))
    ours = watched(stage, "ranks:all_reduce,recv,load_batch phase:leaving sleep:600", tasks=4)
    assert ours.stall is not None
    assert (ours.stall.phase, [odd.rank for odd in ours.stall.odd]) == ("leaving", [2])


def test_nobody_is_asked_who_might_end_of_it(stage: Stage) -> None:
    ours = watched(stage, f"{TRAINING} sleep:600", tasks=3)
    assert ours.stall is not None
    assert ours.stall.odd == ()
    assert {s[2] for s in stage.slurm.signals} == {"KILL"}
    assert stage.events(EventKind.STACKS_SAVED) == []


def test_the_whole_attempt_names_the_hang(stage: Stage) -> None:
    assert stage.play(f"ranks:recv,load_batch {TRAINING} sleep:600", "done") == 0
    assert stage.causes == ["hang", "done"]
    kinds = [event.event for event in stage.events(EventKind.STACKS_SAVED)]
    assert kinds == [EventKind.STACKS_SAVED]


def test_a_silence_that_ends_while_stacks_are_taken_is_no_hang(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = lambda: "QUIT" in [s[2] for s in stage.slurm.signals]  # noqa: E731
    wait_for_dumps, confirm = stack_inquiry.wait_for_dumps, LaunchWatch._confirm_stall
    limits = {"training": 0.3}
    monkeypatch.setattr(StallLimits, "cap", lambda self, phase: limits.get(phase, 600.0))

    def wait(*words: Any) -> None:
        """Until the ranks have gone on."""
        wait_for_dumps(*words)
        (stage.layout.directory / "go").touch()
        wait_until(lambda: '"step": 5' in read(stage.layout.progress))

    def confirmed(*words: Any) -> bool:
        """What comes after the decision is of no interest."""
        hangs = confirm(*words)
        limits.clear()
        (stage.layout.directory / "end").touch()
        return hangs

    monkeypatch.setattr(stack_inquiry, "wait_for_dumps", wait)
    monkeypatch.setattr(LaunchWatch, "_confirm_stall", confirmed)
    ours = watched(stage, f"ranks:recv {TRAINING} await:go progress:5 await:end done")
    assert asked()
    assert ours.stall is None
    assert "KILL" not in [s[2] for s in stage.slurm.signals]
    assert stage.events(EventKind.STACKS_SAVED) == []


def test_a_hang_makes_the_next_launch_more_patient(stage: Stage) -> None:
    changes = {"stall_seconds": 60.0, "setup_stall_seconds": 0.3}
    stage.configure(config().model_copy(update=changes))
    context = stage.supervisor().context
    state = CrossLaunchState.of(context)
    launch = SrunProcess(stage.supervisor("phase:saving sleep:600").launcher.argv, environment())
    ours = LaunchWatch(context, launch, 1, state=state)
    ours.wait()
    assert ours.stall is not None
    assert len(state.limits._silences["saving"]) == 1


def environment() -> dict[str, str]:
    return {**os.environ, "HPCTRAIN_EPOCH": "1"}


def test_ended_by_slurm_while_stacks_are_taken(stage: Stage) -> None:
    """KillWait is 4 s here: the verdict must not wait for a rank that does not answer."""

    def cancelled() -> None:
        stage.slurm.change(state=JobState.COMPLETING)
        os.kill(os.getpid(), signal.SIGTERM)

    stage.once(lambda: "QUIT" in [s[2] for s in stage.slurm.signals], cancelled)
    started = time.monotonic()
    stage.play(f"ranks:recv,!recv {TRAINING} sleep:600")
    assert time.monotonic() - started < 300
    assert stage.causes == ["cancelled"]
    assert [e.signal for e in stage.events(EventKind.SIGNAL)] == ["TERM"]


# -- a step that cannot be created -----------------------------------------------------------

BUSY = "srun: Job 5 step creation temporarily disabled, retrying (Requested nodes are busy)\n"
STILL = "srun: Job 5 step creation still disabled, retrying (Requested nodes are busy)\n"


@pytest.mark.parametrize(
    ("lines", "waits"),
    [
        ([], False),
        ([BUSY], True),
        ([BUSY, STILL, "srun: error: something else\n"], True),
        (["srun: Job step creation temporarily disabled, retrying\n"], True),
        (["srun: Resources allocated for job 5 and being configured, please wait\n"], True),
        ([BUSY, "srun: Step created for StepId=5.1\n"], False),
        ([BUSY, "srun: Job step created\n"], False),
        (["srun: Step created for job 5\n"], False),
        ([BUSY, "srun: Step created for StepId=5.1\n", BUSY], True),
    ],
)
def test_what_srun_says_about_its_step(lines: list[str], waits: bool) -> None:
    said = False
    for line in lines:
        said = waits_for_step(line, said)
    assert said is waits


def test_srun_itself_is_heard(stage: Stage) -> None:
    (stage.layout.directory / "busy").write_text(BUSY)
    (stage.layout.directory / "created").write_text("srun: Step created for StepId=5.1\n")
    launch = SrunProcess(
        stage.supervisor("lines:busy await:go lines:created await:end").launcher.argv, environment()
    )
    try:
        wait_until(lambda: launch.waits_for_step)
        (stage.layout.directory / "go").touch()
        wait_until(lambda: not launch.waits_for_step)
    finally:
        launch.kill()


def test_a_step_that_is_never_created_is_no_hang_of_ranks(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(silence_limits, "_SRUN_SILENT_SECONDS", 600.0)
    monkeypatch.setattr(silence_limits, "_SRUN_WAITS_SECONDS", 0.6)
    changes = {"setup_stall_seconds": 0.2, "kill_wait_seconds": 4.0}
    stage.configure(config().model_copy(update=changes))
    (stage.layout.directory / "busy").write_text(BUSY)
    stage.play("lines:busy sleep:600", "done")
    ended = stage.events(EventKind.LAUNCH_ENDED)[0]
    assert ended.cause == "launch_failure"
    assert str(ended.reason).startswith("srun could not create the step in ")


# -- a file system that hangs ----------------------------------------------------------------


class Held:
    """A run directory of which `progress.json` holds whoever reads it, as a pipe does."""

    def __init__(self, stage: Stage) -> None:
        self.path = stage.layout.progress
        self.sign = self.path.with_name("sign")

    def hang(self) -> None:
        self.path.rename(self.sign)
        os.mkfifo(self.path)

    def recover(self) -> None:
        pipe = self.path.rename(self.path.with_name("pipe"))
        self.sign.rename(self.path)
        with contextlib.suppress(OSError):  # whoever reads it comes free; nobody may
            os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))


@pytest.fixture
def held(stage: Stage) -> Iterator[Held]:
    held = Held(stage)
    yield held
    if held.sign.exists():
        held.recover()


def test_a_hung_file_system_is_no_hang_of_the_ranks(
    stage: Stage, held: Held, shifted_clock: ShiftedClock
) -> None:
    stage.configure(config().model_copy(update={"stall_seconds": 300.0}))
    go = stage.layout.directory / "go"
    ours = begun(stage, f"{TRAINING} await:go progress:5 done")

    def hang() -> None:
        held.hang()
        # five times the limit
        later(shifted_clock, lambda: ours.storage_stalled_seconds > 1000.0, 1500.0)
        held.recover()
        go.touch()

    stage.once_training(hang)
    ours.wait()
    assert ours.stall is None
    assert ours.storage_stalled_seconds > 1000.0


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_a_rank_that_hangs_behind_a_hung_file_system_is_found_after_it(
    stage: Stage, held: Held, shifted_clock: ShiftedClock
) -> None:
    stage.configure(config().model_copy(update={"stall_seconds": 60.0}))
    ours = begun(stage, f"{TRAINING} sleep:600")

    def hang() -> None:
        held.hang()
        later(shifted_clock, lambda: ours.storage_stalled_seconds > 1000.0, 1500.0)
        held.recover()
        later(shifted_clock, lambda: ours.stall, 2.0)

    stage.once_training(hang)
    ours.wait()
    assert ours.stall is not None
    assert ours.stall.silent_seconds < 1000.0, "what could not be seen does not count"
    assert ours.storage_stalled_seconds > 1000.0


def test_a_hung_file_system_does_not_hold_signals(
    stage: Stage, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """USR1 reaches the ranks and TERM ends the watch while a read hangs."""
    stage.configure(config().model_copy(update={"stall_seconds": 60.0, "kill_wait_seconds": 4.0}))

    def hang() -> None:
        held.hang()
        before = len(begun)
        wait_until(lambda: len(begun) > before, "a read that hangs")
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_until(lambda: (JOB_ID, "0", "USR2") in stage.slurm.signals, "passed on")
        stage.slurm.change(state=JobState.COMPLETING)
        os.kill(os.getpid(), signal.SIGTERM)

    supervisor = stage.supervisor(f"{TRAINING} sleep:600")
    supervisor.context.signals.install()
    launch = SrunProcess(supervisor.launcher.argv, environment())
    ours = LaunchWatch(supervisor.context, launch, 1)
    begun, read = list[bool](), ours._reader.read

    def counted(find_saves: bool, rank_times: bool) -> RunDirSnapshot:
        begun.append(True)
        return read(find_saves, rank_times)

    monkeypatch.setattr(ours._reader, "read", counted)
    stage.once(lambda: ours.started, hang)
    started = time.monotonic()
    ours.wait()
    assert time.monotonic() - started < 300
    assert [e.signal for e in stage.events(EventKind.SIGNAL)] == ["USR1", "TERM"]
    assert ours.stall is None
    launch.kill()


def test_a_ledger_that_cannot_be_written_does_not_hold_signals(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_watch, "_WRITE_SECONDS", 0.1)
    free = threading.Event()
    stage.configure(config().model_copy(update={"stall_seconds": 600.0}))
    supervisor = stage.supervisor(f"{TRAINING} await:usr2")
    supervisor.context.signals.install()
    monkeypatch.setattr(type(supervisor.context), "note", lambda *_, **__: free.wait(600))
    monkeypatch.setattr(launch_watch, "ask_trainer_to_leave", lambda *_: free.wait(600))
    launch = SrunProcess(supervisor.launcher.argv, environment())
    ours = LaunchWatch(supervisor.context, launch, 1)
    stage.once_training(lambda: os.kill(os.getpid(), signal.SIGUSR1))
    started = time.monotonic()
    ours.wait()
    assert time.monotonic() - started < 300
    assert (JOB_ID, "0", "USR2") in stage.slurm.signals
    free.set()


def test_files_that_give_errors_are_no_silence(stage: Stage, shifted_clock: ShiftedClock) -> None:
    """A stale handle for long: nobody can say that the trainer was silent."""
    stage.configure(config().model_copy(update={"stall_seconds": 300.0}))
    ours_sign = stage.layout.progress.with_name("sign")
    ours = begun(stage, f"{TRAINING} await:go progress:5 done")

    def stale() -> None:
        stage.layout.progress.rename(ours_sign)
        stage.layout.progress.mkdir()
        later(shifted_clock, lambda: ours.storage_stalled_seconds > 1000.0, 1500.0)
        stage.layout.progress.rmdir()
        ours_sign.rename(stage.layout.progress)
        (stage.layout.directory / "go").touch()

    stage.once_training(stale)
    ours.wait()
    assert ours.stall is None
    assert ours.storage_stalled_seconds > 1000.0


# -- looking ---------------------------------------------------------------------------------


def test_a_look_takes_in_everything(stage: Stage) -> None:
    reader = RunDirReader(stage.layout, 3)
    seen = reader.read(True, True)
    assert seen == run_dir_snapshot.RunDirSnapshot(0, None, False, False, False, None)
    stage.layout.stack_dump(3, 0).parent.mkdir()
    stage.layout.stack_dump(3, 0).touch()
    assert reader.read(False, False).ranks_seen
    (stage.layout.checkpoints / "iter_0000001.partial-e000003").mkdir()
    assert reader.read(True, False).save_in_flight
    assert not reader.read(False, False).save_in_flight


def test_signs_of_other_launches_are_not_seen(stage: Stage) -> None:
    for epoch in (2, 4):
        sign = Progress(epoch=epoch, phase="training", step=1, target_step=9, time=1.0)
        write_record(stage.layout.progress, sign)
        seen = RunDirReader(stage.layout, 3).read(False, False)
        assert (seen.progress, seen.ranks_seen) == (None, False)


def test_one_look_at_a_time_and_an_error_is_an_answer() -> None:
    def broken(find_saves: bool, rank_times: bool) -> run_dir_snapshot.RunDirSnapshot:
        raise OSError(116, "Stale file handle")

    background = BackgroundReader(broken)
    assert background.result() is None
    background.request(find_saves=True, rank_times=False)
    assert background.busy
    assert background.result(PATIENCE_SECONDS) is None
    assert not background.busy
    background.close()


def test_work_in_time_and_not_in_time() -> None:
    done: list[int] = []
    free = threading.Event()
    assert run_with_timeout(lambda: done.append(1), 600.0)
    assert done == [1]
    started = time.monotonic()
    assert not run_with_timeout(lambda: free.wait(600), 0.5)
    assert 0.4 < time.monotonic() - started < 300
    answers = iter([False, True])
    started = time.monotonic()
    assert not run_with_timeout(lambda: free.wait(600), 600.0, give_up=lambda: next(answers))
    assert time.monotonic() - started < 300
    free.set()


def test_an_error_of_a_file_is_not_passed_on() -> None:
    def full() -> None:
        raise OSError(28, "No space left on device")

    assert run_with_timeout(full, 600.0)
