"""Whole launches that hang, seem to hang, or cannot be looked at: who is named, what is done."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from supervise_facts import config
from supervise_stage import JOB_ID, Stage

from hpctrain.slurm.messages import waits_for_step
from hpctrain.slurm.states import JobState
from hpctrain.store.ledger import EventKind
from hpctrain.store.run_records import Progress, write_record
from hpctrain.supervise.evidence import launch_watch, run_dir_snapshot, stack_inquiry
from hpctrain.supervise.evidence.launch_watch import CrossLaunchState, LaunchWatch
from hpctrain.supervise.evidence.run_dir_snapshot import BackgroundReader, RunDirReader
from hpctrain.supervise.judge import silence_limits
from hpctrain.supervise.judge.odd_stacks import NO_STACK
from hpctrain.supervise.srun_process import SrunProcess
from hpctrain.supervise.timeouts import run_with_timeout


@pytest.fixture(autouse=True)
def _soon(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A stall after 0.3 s, in setup after 30; no process of a test outlives it."""
    changes = {"stall_seconds": 0.3, "setup_stall_seconds": 30.0, "kill_wait_seconds": 4.0}
    stage.configure(config().model_copy(update=changes))
    monkeypatch.setattr(stack_inquiry, "_DUMP_SECONDS", 2.0)
    yield
    stage.slurm.signal_ranks(signal.SIGKILL)


def watched(stage: Stage, *parts: str, tasks: int = 0) -> LaunchWatch:
    """The first launch, watched to its end."""
    supervisor = stage.supervisor(*parts)
    supervisor.context.signals.install()
    launch = SrunProcess(supervisor.launcher.argv, {**os.environ, "HPCTRAIN_EPOCH": "1"})
    ours = LaunchWatch(supervisor.context, launch, 1, tasks=tasks)
    ours.wait()
    assert launch.poll() is not None
    return ours


TRAINING = "progress:3 sleep:0.05 progress:4"


def test_the_rank_that_does_not_wait_is_named(stage: Stage) -> None:
    ours = watched(stage, f"ranks:all_reduce,recv,load_batch {TRAINING} sleep:20", tasks=3)
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


def test_a_rank_that_is_stopped_is_named(stage: Stage) -> None:
    ours = watched(stage, f"ranks:all_reduce,!all_reduce,recv {TRAINING} sleep:20", tasks=3)
    assert ours.stall is not None
    assert [(o.rank, o.node, o.where) for o in ours.stall.odd] == [(1, "n1", NO_STACK)]
    (saved,) = stage.events(EventKind.STACKS_SAVED)
    assert saved.reason is not None and saved.reason.startswith("2 of 3 ranks gave")


def test_a_rank_that_never_came_up_is_named_by_its_place(stage: Stage) -> None:
    stage.slurm.hostnames = lambda nodes: ("a", "b")  # type: ignore[method-assign]
    ours = watched(stage, f"ranks:all_reduce,recv,recv {TRAINING} sleep:20", tasks=4)
    assert ours.stall is not None
    assert [(odd.rank, odd.node) for odd in ours.stall.odd] == [(3, "b")]


def test_while_all_leave_a_rank_without_a_file_has_left(stage: Stage) -> None:
    stage.configure(config().model_copy(update={"setup_stall_seconds": 4.0}))
    ours = watched(stage, "ranks:all_reduce,recv,load_batch phase:leaving sleep:30", tasks=4)
    assert ours.stall is not None
    assert (ours.stall.phase, [odd.rank for odd in ours.stall.odd]) == ("leaving", [2])


def test_nobody_is_asked_who_might_end_of_it(stage: Stage) -> None:
    ours = watched(stage, f"{TRAINING} sleep:20", tasks=3)
    assert ours.stall is not None
    assert ours.stall.odd == ()
    assert {s[2] for s in stage.slurm.signals} == {"KILL"}
    assert stage.events(EventKind.STACKS_SAVED) == []


def test_the_whole_attempt_names_the_hang(stage: Stage) -> None:
    assert stage.play(f"ranks:recv,load_batch {TRAINING} sleep:20", "done") == 0
    assert stage.causes == ["hang", "done"]
    kinds = [event.event for event in stage.events(EventKind.STACKS_SAVED)]
    assert kinds == [EventKind.STACKS_SAVED]


def test_a_silence_that_ends_while_stacks_are_taken_is_no_hang(stage: Stage) -> None:
    asked = lambda: "QUIT" in [s[2] for s in stage.slurm.signals]  # noqa: E731
    stage.once(asked, (stage.layout.directory / "go").touch)
    parts = f"ranks:recv {TRAINING} await:go progress:5 sleep:0.1 progress:6 done"
    ours = watched(stage, parts)
    assert asked()
    assert ours.stall is None
    assert "KILL" not in [s[2] for s in stage.slurm.signals]
    assert stage.events(EventKind.STACKS_SAVED) == []


def test_a_hang_makes_the_next_launch_more_patient(stage: Stage) -> None:
    changes = {"stall_seconds": 60.0, "setup_stall_seconds": 0.3}
    stage.configure(config().model_copy(update=changes))
    context = stage.supervisor().context
    state = CrossLaunchState.of(context)
    launch = SrunProcess(stage.supervisor("phase:saving sleep:9").launcher.argv, environment())
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
    stage.play(f"ranks:recv,!recv {TRAINING} sleep:20")
    assert time.monotonic() - started < 19
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
    monkeypatch.setattr(silence_limits, "_SRUN_SILENT_SECONDS", 20.0)
    monkeypatch.setattr(silence_limits, "_SRUN_WAITS_SECONDS", 0.6)
    changes = {"setup_stall_seconds": 0.2, "kill_wait_seconds": 4.0}
    stage.configure(config().model_copy(update=changes))
    (stage.layout.directory / "busy").write_text(BUSY)
    stage.play("lines:busy sleep:20", "done")
    ended = stage.events(EventKind.LAUNCH_ENDED)[0]
    assert ended.cause == "launch_failure"
    assert str(ended.reason).startswith("srun could not create the step in ")


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


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
        with pipe.open("wb"):  # whoever reads it comes free
            pass


@pytest.fixture
def held(stage: Stage) -> Iterator[Held]:
    held = Held(stage)
    yield held
    if held.sign.exists():
        held.recover()


def test_a_hung_file_system_is_no_hang_of_the_ranks(
    stage: Stage, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_watch, "_BLOCKED_SECONDS", 0.1)
    go = stage.layout.directory / "go"

    def hang() -> None:
        held.hang()
        time.sleep(1.5)  # five times the limit
        held.recover()
        go.touch()

    stage.once(lambda: '"step": 4' in read(stage.layout.progress), hang)
    ours = watched(stage, f"{TRAINING} await:go progress:5 done")
    assert ours.stall is None
    assert ours.storage_stalled_seconds > 1.0


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_a_rank_that_hangs_behind_a_hung_file_system_is_found_after_it(
    stage: Stage, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_watch, "_BLOCKED_SECONDS", 0.1)

    def hang() -> None:
        held.hang()
        time.sleep(3.0)
        held.recover()

    stage.once(lambda: '"step": 4' in read(stage.layout.progress), hang)
    ours = watched(stage, f"{TRAINING} sleep:20")
    assert ours.stall is not None
    assert ours.stall.silent_seconds < 3.0, "what could not be seen does not count"
    assert ours.storage_stalled_seconds > 0.5


def test_a_hung_file_system_does_not_hold_signals(stage: Stage, held: Held) -> None:
    """USR1 reaches the ranks and TERM ends the watch while a read hangs."""
    stage.configure(config().model_copy(update={"stall_seconds": 60.0, "kill_wait_seconds": 4.0}))

    def hang() -> None:
        held.hang()
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.3)
        stage.slurm.change(state=JobState.COMPLETING)
        os.kill(os.getpid(), signal.SIGTERM)

    supervisor = stage.supervisor(f"{TRAINING} sleep:60")
    supervisor.context.signals.install()
    launch = SrunProcess(supervisor.launcher.argv, environment())
    ours = LaunchWatch(supervisor.context, launch, 1)
    stage.once(lambda: ours.started, hang)
    started = time.monotonic()
    ours.wait()
    assert time.monotonic() - started < 50
    assert (JOB_ID, "0", "USR2") in stage.slurm.signals
    assert [e.signal for e in stage.events(EventKind.SIGNAL)] == ["USR1", "TERM"]
    assert ours.stall is None
    launch.kill()


def test_a_ledger_that_cannot_be_written_does_not_hold_signals(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_watch, "_WRITE_SECONDS", 0.1)
    free = threading.Event()
    supervisor = stage.supervisor(f"{TRAINING} sleep:9")
    supervisor.context.signals.install()
    monkeypatch.setattr(type(supervisor.context), "note", lambda *_, **__: free.wait(20))
    monkeypatch.setattr(launch_watch, "ask_trainer_to_leave", lambda *_: free.wait(20))
    launch = SrunProcess(supervisor.launcher.argv, environment())
    ours = LaunchWatch(supervisor.context, launch, 1)
    stage.once_training(lambda: os.kill(os.getpid(), signal.SIGUSR1))
    started = time.monotonic()
    ours.wait()
    assert time.monotonic() - started < 8
    assert (JOB_ID, "0", "USR2") in stage.slurm.signals
    free.set()


def test_files_that_give_errors_are_no_silence(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stale handle for a second: nobody can say that the trainer was silent."""
    monkeypatch.setattr(launch_watch, "_BLOCKED_SECONDS", 0.1)
    ours_sign = stage.layout.progress.with_name("sign")

    def stale() -> None:
        stage.layout.progress.rename(ours_sign)
        stage.layout.progress.mkdir()
        time.sleep(1.2)
        stage.layout.progress.rmdir()
        ours_sign.rename(stage.layout.progress)
        (stage.layout.directory / "go").touch()

    stage.once(lambda: '"step": 4' in read(stage.layout.progress), stale)
    ours = watched(stage, f"{TRAINING} await:go progress:5 done")
    assert ours.stall is None
    assert ours.storage_stalled_seconds > 0.8


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
    assert background.result(5.0) is None
    assert not background.busy
    background.close()


def test_work_in_time_and_not_in_time() -> None:
    done: list[int] = []
    free = threading.Event()
    assert run_with_timeout(lambda: done.append(1), 5.0)
    assert done == [1]
    started = time.monotonic()
    assert not run_with_timeout(lambda: free.wait(20), 0.5)
    assert 0.4 < time.monotonic() - started < 19
    answers = iter([False, True])
    started = time.monotonic()
    assert not run_with_timeout(lambda: free.wait(20), 20.0, give_up=lambda: next(answers))
    assert time.monotonic() - started < 19
    free.set()


def test_an_error_of_a_file_is_not_passed_on() -> None:
    def full() -> None:
        raise OSError(28, "No space left on device")

    assert run_with_timeout(full, 5.0)
