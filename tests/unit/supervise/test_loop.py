"""Whole attempts: what is launched, what the ledger says, and what Slurm is asked to do."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from signal import Signals
from typing import Any

import pytest
import yaml
from file_system_calls import FileSystemCalls
from launch_evidence import config
from supervise_stage import JOB_ID, Stage
from virtual_clock import VirtualClock

from hpctrain.base.durable import replace_text
from hpctrain.base.errors import InvalidInputError
from hpctrain.judge.probe_results import NodeResult, ProbeResult
from hpctrain.records.epochs import claim_epoch
from hpctrain.records.ledger import EventKind, Ledger
from hpctrain.records.requests import ask_trainer_to_leave
from hpctrain.slurm.client import SlurmClient
from hpctrain.slurm.records import RequeueAnswer, StepRecord
from hpctrain.slurm.states import JobState
from hpctrain.supervise import srun_launch
from hpctrain.supervise.act import successor as requeue_module
from hpctrain.supervise.evidence.launch_watch import LaunchWatch

PROBES = {
    "well": ProbeResult(results=(NodeResult("n0", ended=True),)),
    "lost": ProbeResult(
        results=(NodeResult("n1", ended=True),), lost=("n0",), why_lost=("no answer in 20 s",)
    ),
    "leaving": ProbeResult(results=(NodeResult("n0", ended=True),), leaving=("n0",)),
}
ATTEMPTS = {
    name: (given, due)
    for name, given, due in yaml.safe_load(Path(__file__).with_name("attempts.yaml").read_text())
}


def happens(
    stage: Stage,
    *,
    change: dict[str, Any] | None = None,
    signal: str = "",
    touch: str = "",
    cancel: str = "",
    newer_launch: str = "",
) -> None:
    """What is done to a run from outside."""
    if cancel:
        Ledger(stage.layout.ledger).append(EventKind.CANCEL_REQUESTED, job_id=JOB_ID, user=cancel)
    if newer_launch:
        claim_epoch(stage.layout.epochs, newer_launch)
    if change:
        state = {"state": JobState(change["state"])} if "state" in change else {}
        stage.slurm.change(**(change | state))
    if touch:
        (stage.layout.directory / touch).touch()
    if signal:
        os.kill(os.getpid(), Signals[f"SIG{signal}"])


@pytest.mark.parametrize("name", ATTEMPTS)
def test_an_attempt(stage: Stage, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given, due = ATTEMPTS[name]
    stage.configure(config().model_copy(update=given.get("settings", {})))
    stage.probe = PROBES.get(given.get("probe", ""), stage.probe)
    stage.slurm.away = given.get("away", False)
    restart_count = given.get("restart", 0)
    for file, text in given.get("files", {}).items():
        (stage.layout.directory / file).write_text(text)
    if "bad_checkpoint" in given:
        (stage.layout.checkpoints / given["bad_checkpoint"]).mkdir()
    for kind, fields in given.get("ledger", ()):
        known = {"job_id": JOB_ID, "restart_count": 0, **fields}
        Ledger(stage.layout.ledger).append(EventKind(kind), **known)
    if restart_count:
        stage.slurm.change(restart_count=restart_count)
    if given.get("unknown"):
        stage.slurm.records.clear()
    if "training" in given:
        stage.once_training(partial(happens, stage, **given["training"]))
    if "pause" in given:
        monkeypatch.setattr("hpctrain.judge.policy._FIRST_DELAY_SECONDS", 600.0)
        stage.once(lambda: stage.actions, partial(happens, stage, **given["pause"]))
    started = time.monotonic()
    code = stage.supervisor(*given["parts"], restart_count=restart_count).run()
    assert code == due.get("code", 0)
    assert time.monotonic() - started < 300
    assert (stage.causes, stage.actions) == (due["causes"], due["actions"])
    ended = stage.events(EventKind.LAUNCH_ENDED)
    assert due.get("ended", "") in "".join(str(one.reason) for one in ended[:1])
    last = stage.events(EventKind.ACTION)[-1]
    assert due.get("reason", "") in str(last.reason) and due.get("cause", last.cause) == last.cause
    assert due.get("lost") in (None, [e.cause for e in stage.events(EventKind.ATTEMPT_LOST)])
    launched = (stage.layout.directory / "srun.pid").exists()
    assert launched is due.get("launched", bool(due["causes"]))
    for file in given.get("files", ()):
        assert not (file.startswith("control/") and (stage.layout.directory / file).exists())
    if "signals" in due:
        assert [event.signal for event in stage.events(EventKind.SIGNAL)] == due["signals"]
    if "requeues" in due:
        assert stage.slurm.actions_at_requeue == due["requeues"]
    if "killed" in due:
        assert ((JOB_ID, "0", "KILL") in stage.slurm.signals) is due["killed"]


def test_a_crash_is_launched_again_in_place(stage: Stage) -> None:
    assert stage.play("save:20 crash", "done") == 0
    assert (stage.causes, stage.actions) == (["crash", "done"], ["relaunch", "finish"])
    assert [e.resume_step for e in stage.events(EventKind.LAUNCH_STARTED)] == [0, 20]
    assert [e.launch for e in stage.events(EventKind.LAUNCH_STARTED)] == [1, 2]
    first, second = (
        json.loads((stage.layout.directory / f"environment-{epoch}.json").read_text())
        for epoch in (1, 2)
    )
    assert first["HPCTRAIN_RESUME"] == ""
    assert second["HPCTRAIN_RESUME"] == "iter_0000020"
    assert first["MASTER_PORT"] != second["MASTER_PORT"]
    assert first["MASTER_ADDR"] == "n0"


def test_what_old_launches_have_left_is_packed(stage: Stage) -> None:
    """Beside the launch, which does not wait for it."""
    logs = stage.layout.attempt_logs(JOB_ID, 0)
    logs.mkdir()
    for step in range(3):
        (logs / f"step{step}-node0000.log").write_text("0: a line\n")
    stage.configure(config().model_copy(update={"keep_launches": 1}))
    words = f"await:{stage.layout.log_archive(1).relative_to(stage.layout.directory)}"
    assert stage.play(f"{words} done") == 0
    thread = next((one for one in threading.enumerate() if "pack" in one.name), None)
    if thread is not None:
        thread.join(60)
    assert [path.name for path in logs.iterdir()] == ["step2-node0000.log"]


def test_the_ledger_says_who_failed_and_how(stage: Stage) -> None:
    stage.play("progress:3 crash", "done")
    ended = stage.events(EventKind.LAUNCH_ENDED)[0]
    assert (ended.rank, ended.reason) == (0, "rank 0 failed: ValueError: bad batch")
    assert (ended.last_step, ended.exit_code, ended.epoch) == (3, 1, 1)
    assert ended.evidence[0] == "rank 0 on n0: ValueError: bad batch"


def test_warned_by_slurm(stage: Stage) -> None:
    stage.signal_once_training(signal.SIGUSR1)
    assert stage.play("progress:3 await:usr2 await-stop") == 0
    assert (stage.causes, stage.actions) == (["time_limit"], ["requeue"])
    assert (JOB_ID, "0", "USR2") in stage.slurm.signals
    assert [e.signal for e in stage.events(EventKind.SIGNAL)] == ["USR1"]
    # The announcement comes first: a requeue ends the process that asks for it.
    assert stage.slurm.actions_at_requeue == [["requeue"]]
    assert [e.reason for e in stage.events(EventKind.ACTION_RESULT)] == ["done"]
    assert stage.slurm.records[JOB_ID].restart_count == 1


def test_a_stop_request_of_an_earlier_launch_is_forgotten(stage: Stage) -> None:
    ask_trainer_to_leave(stage.layout, "the time limit is near")
    assert stage.play("progress:3 sleep:0.1 done") == 0
    assert stage.actions == ["finish"]
    assert not stage.layout.stop_request.exists()


@pytest.mark.parametrize(
    ("words", "cause", "action"),
    [
        (" DUE TO PREEMPTION ***", "preempted", "requeue"),
        (" ***", "cancelled", "stop"),
        (None, "cancelled", "stop"),
    ],
)
def test_a_preemption_that_cancels_is_told_from_a_cancel_by_the_log(
    stage: Stage, words: str | None, cause: str, action: str
) -> None:
    """For squeue they are alike; what was told to an earlier attempt does not count."""
    line = f"slurmstepd: error: *** JOB {JOB_ID} ON n0 CANCELLED AT 2026-11-23T03:17:27"
    log = stage.layout.job_log(JOB_ID)
    earlier = f"{line} DUE TO PREEMPTION ***\nhpctrain 03:20:00 attempt {JOB_ID}.0 of run r1\n"
    log.write_text(earlier)

    def ended() -> None:
        if words is not None:
            log.write_text(f"{earlier}{line}{words}\nsrun: got SIGCONT\n")
        stage.slurm.change(state=JobState.COMPLETING, preempt_time=1.0)
        os.kill(os.getpid(), signal.SIGTERM)

    stage.once_training(ended)
    stage.play("progress:3 sleep:600")
    assert (stage.causes, stage.actions) == ([cause], [action])


def test_a_signal_that_was_set_aside_shortens_no_later_pause(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What others have to repair is not tried at once, whatever came before."""
    monkeypatch.setattr("hpctrain.judge.policy._SLOW_FIRST_DELAY_SECONDS", 0.6)
    fault = [OSError(116, "Stale file handle")]
    real = srun_launch.fence_off

    def stale_once(root: Path, epoch: int) -> list[str]:
        if epoch == 2 and fault:
            raise fault.pop()
        return real(root, epoch)

    monkeypatch.setattr(srun_launch, "fence_off", stale_once)
    stage.probe = PROBES["well"]
    stage.configure(config().model_copy(update={"kill_wait_seconds": 600.0}))
    stage.signal_once_training(signal.SIGTERM)
    assert stage.play("progress:3 save:20 await-stop", "", "done") == 0
    assert stage.causes == ["external_signal", "storage", "done"]
    ends, starts = stage.events(EventKind.LAUNCH_ENDED), stage.events(EventKind.LAUNCH_STARTED)
    assert starts[-1].time - ends[1].time >= 0.6


def test_a_signal_between_two_launches(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpctrain.judge.policy._FIRST_DELAY_SECONDS", 600.0)
    stage.probe = PROBES["well"]

    def sent() -> None:
        monkeypatch.setattr("hpctrain.judge.policy._FIRST_DELAY_SECONDS", 0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    stage.once(lambda: stage.actions, sent)
    assert stage.play("crash", "done") == 0
    assert stage.actions == ["relaunch", "relaunch", "finish"]
    assert [e.cause for e in stage.events(EventKind.ACTION)][1] == "external_signal"


def test_a_signal_and_a_controller_that_is_away(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm may be ending the job: nothing is launched, and the queue is all that is left."""
    monkeypatch.setattr(requeue_module, "_PATIENCE_SECONDS", 600.0)
    stage.configure(config().model_copy(update={"kill_wait_seconds": 600.0}))

    def away() -> None:
        stage.slurm.away = True
        os.kill(os.getpid(), signal.SIGTERM)
        stage.once(lambda: stage.events(EventKind.SIGNAL), (stage.layout.directory / "go").touch)

    def back() -> None:
        stage.slurm.away = False

    stage.once_training(away)
    stage.once(lambda: len(stage.slurm.actions_at_requeue) >= 2, back)
    assert stage.play("progress:3 await:go leave", "done") == 0
    assert stage.actions == ["requeue"]
    assert [e.reason for e in stage.events(EventKind.ACTION_RESULT)] == ["done"]


def test_a_supervisor_that_outlived_its_attempt_takes_nothing_from_the_next(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its node was cut off: no Slurm, and the job runs elsewhere under the same id."""
    monkeypatch.setattr(LaunchWatch, "_poll_snapshot", lambda *_: False)  # looks at nothing

    def cut_off() -> None:
        stage.slurm.away = True
        claim_epoch(stage.layout.epochs, "5.1")
        (stage.layout.directory / "go").touch()

    stage.once(stage.layout.progress.exists, cut_off)
    assert stage.play("progress:3 await:go crash", "done", "done") == 0
    assert stage.actions == ["relaunch", "leave"]
    assert stage.slurm.signals == []


def test_a_bad_checkpoint_with_a_good_one_before_it(stage: Stage) -> None:
    stage.play("save:10 save:20 crash", "config")
    (stage.layout.checkpoints / "iter_0000020/shard").write_bytes(b"WEIGHTS")
    stage.slurm.change(submit_time=time.time() + 3600)
    assert stage.supervisor("", "", "done", restart_count=1).run() == 0
    assert [e.resume_step for e in stage.events(EventKind.RESUME)] == [0, 20, 10]
    rejected = stage.events(EventKind.CHECKPOINT_REJECTED)
    assert [e.checkpoint_step for e in rejected] == [20]
    assert "SHA-256" in str(rejected[0].reason)


def test_survivors_of_a_failed_rank_are_ended(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpctrain.supervise.evidence.launch_watch._LAST_WORDS_SECONDS", 0.1)
    (stage.layout.directory / "died").write_text("srun: error: n1: task 1: Killed\n")
    started = time.monotonic()
    assert stage.play("progress:3 lines:died sleep:600", "done") == 0
    assert time.monotonic() - started < 300
    assert stage.causes == ["crash", "done"]
    assert stage.events(EventKind.LAUNCH_ENDED)[0].rank == 1


def test_slurm_away_when_the_job_has_to_be_requeued(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requeue_module, "clock", VirtualClock(all_threads=True))
    stage.slurm.away = True
    stage.signal_once_training(signal.SIGUSR1)
    assert stage.play("progress:3 await-stop") == 1
    assert stage.actions == ["requeue"]
    assert [e.reason for e in stage.events(EventKind.ACTION_RESULT)] == ["unreachable"]
    assert len(stage.slurm.actions_at_requeue) > 2


def test_slurm_comes_back_before_the_requeue(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requeue_module, "_PATIENCE_SECONDS", 600.0)

    def away() -> None:
        stage.slurm.away = True
        os.kill(os.getpid(), signal.SIGUSR1)

    def back() -> None:
        stage.slurm.away = False

    stage.once_training(away)
    stage.once(lambda: len(stage.slurm.actions_at_requeue) >= 2, back)
    assert stage.play("progress:3 await-stop") == 0
    assert [e.reason for e in stage.events(EventKind.ACTION_RESULT)] == ["done"]


@pytest.mark.parametrize("state", [JobState.CANCELLED, JobState.COMPLETING])
def test_cancelled_while_slurm_was_away(
    stage: Stage, state: JobState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A requeue now would bring a cancelled job back."""
    monkeypatch.setattr(requeue_module, "_PATIENCE_SECONDS", 600.0)

    def away() -> None:
        stage.slurm.away = True
        os.kill(os.getpid(), signal.SIGUSR1)

    def back() -> None:
        stage.slurm.change(state=state)
        stage.slurm.away = False

    original = stage.slurm.requeue

    def requeue(job_id: int, *, shielded: bool = False) -> RequeueAnswer:
        answer = original(job_id)
        back()
        return answer

    stage.slurm.requeue = requeue  # type: ignore[method-assign]
    stage.once_training(away)
    assert stage.play("progress:3 await-stop") == 1
    assert "cancelled" in str(stage.events(EventKind.ACTION_RESULT)[0].reason)
    assert stage.slurm.records[JOB_ID].restart_count == 0


def test_slurm_commands_that_hang_do_not_hold_the_supervisor(stage: Stage, tmp_path: Path) -> None:
    for name in ("squeue", "scontrol", "scancel"):
        command = tmp_path / name
        command.write_text("#!/bin/sh\nexec sleep 600\n")
        command.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    slurm = SlurmClient(environment, timeout_seconds=0.2, shielded=True)
    started = time.monotonic()
    assert stage.supervisor("crash", "done", slurm=slurm).run() == 0
    assert stage.causes == ["crash", "done"]
    assert time.monotonic() - started < 300


def test_srun_that_cannot_be_run_uses_up_the_budget(stage: Stage) -> None:
    supervisor = stage.supervisor("done")
    supervisor.launcher.argv = ["/nonexistent/srun"]
    assert supervisor.run() == 1
    assert stage.causes == ["launch_failure"] * 3
    assert "No such file" in str(stage.events(EventKind.LAUNCH_ENDED)[0].reason)


def test_a_full_disk_stops_before_anything_is_launched(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hpctrain.supervise.srun_launch.fence_off", full)
    assert stage.play("done") == 1
    assert (stage.causes, stage.actions) == (["disk_full"], ["stop"])
    assert "No space left on device" in str(stage.events(EventKind.ACTION)[0].reason)


def test_a_mistake_of_the_supervisor_ends_no_run(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The next attempt may get past it; a budget keeps it from going on for ever."""

    def wrong(*_: object) -> None:
        raise ValueError("a bug of ours")

    monkeypatch.setattr("hpctrain.supervise.srun_launch.fence_off", wrong)
    assert stage.play("done") == 0
    assert (stage.causes, stage.actions) == (["supervisor_lost"], ["requeue"])
    assert "ValueError: a bug of ours" in str(stage.events(EventKind.ACTION)[0].reason)
    assert "Traceback" in capsys.readouterr().err
    for restart in (1, 2):
        stage.slurm.change(state=JobState.RUNNING)
        code = stage.supervisor("done", restart_count=restart).run()
    assert (code, stage.actions) == (1, ["requeue", "requeue", "stop"])


@pytest.mark.parametrize("text", ["", "{}", "[1]"])
def test_wrong_settings(stage: Stage, text: str) -> None:
    stage.layout.supervise_config.write_text(text)
    with pytest.raises(InvalidInputError, match=r"supervise\.json"):
        stage.supervisor("done")


def test_an_srun_that_somebody_kills(stage: Stage) -> None:
    def kill() -> None:
        pid = int((stage.layout.directory / "srun.pid").read_text())
        os.kill(pid, signal.SIGKILL)

    stage.once_training(kill)
    assert stage.play("progress:3 sleep:600", "done") == 0
    assert stage.causes == ["crash", "done"]
    assert stage.events(EventKind.LAUNCH_ENDED)[0].reason == "srun itself was killed by signal 9"


def test_ranks_that_outlive_their_srun_are_ended_before_the_next_launch(stage: Stage) -> None:
    """The ranks of one launch would hold the GPUs and the files of the next."""
    alive = [StepRecord("0", JobState.RUNNING)]

    def kill_step(job_id: int, step_id: str) -> None:
        assert len(stage.events(EventKind.LAUNCH_STARTED)) == 1
        alive.clear()

    stage.slurm.steps = lambda job_id: tuple(alive)  # type: ignore[method-assign]
    stage.slurm.kill_step = kill_step  # type: ignore[method-assign]
    assert stage.play("progress:3 crash", "done") == 0
    assert alive == []


@pytest.mark.parametrize("said", [False, True])
def test_a_request_by_a_file_alone_is_in_the_ledger_once(stage: Stage, *, said: bool) -> None:
    def ask() -> None:
        if said:
            ledger = Ledger(stage.layout.ledger)
            ledger.append(EventKind.CONTROL, action="stop", user="ada", reason="lunch")
        replace_text(stage.layout.stop_request, "lunch\n")

    stage.once_training(ask)
    assert stage.play("progress:3 await:usr2 await-stop") == 0
    (line,) = stage.events(EventKind.CONTROL)
    assert (line.action, line.reason) == ("stop", "lunch")
    assert line.user
    assert (stage.causes, stage.actions) == (["yielded"], ["stop"])


def test_slurm_is_asked_to_requeue_before_anything_is_recorded(
    stage: Stage, file_system_calls: FileSystemCalls
) -> None:
    """Within KillWait no file of a checkpoint is looked at, and the ledger has all afterwards."""

    def over() -> None:
        calls.clear()  # what the launch has looked at when it began
        stage.slurm.change(state=JobState.COMPLETING, reason="TimeLimit")
        os.kill(os.getpid(), signal.SIGTERM)

    stage.once_training(over)
    with file_system_calls.counted(stage.layout.checkpoints) as calls:
        assert stage.play("save:20 save:21 save:22 progress:23 sleep:600") == 0
        assert calls["open"] <= 2 and calls["stat"] <= 2, calls
    assert stage.slurm.actions_at_requeue == [[]]
    assert (stage.causes, stage.actions) == (["time_limit"], ["requeue"])
    assert stage.events(EventKind.LAUNCH_ENDED)[0].checkpoint_step == 22
    assert [one.reason for one in stage.events(EventKind.ACTION_RESULT)] == ["done"]


def test_a_controller_that_does_not_answer_gives_time_to_record(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job may be killed while the supervisor waits: the next one finds what was decided."""
    monkeypatch.setattr(requeue_module, "_PATIENCE_SECONDS", 600.0)
    real = stage.slurm.requeue

    def requeue(job_id: int, *, shielded: bool = False) -> RequeueAnswer:
        stage.slurm.away = not stage.slurm.actions_at_requeue
        return real(job_id, shielded=shielded)

    def over() -> None:
        stage.slurm.change(state=JobState.COMPLETING, reason="TimeLimit")
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(stage.slurm, "requeue", requeue)
    stage.once_training(over)
    assert stage.play("save:20 progress:21 sleep:600") == 0
    assert stage.slurm.actions_at_requeue == [[], ["requeue"]]
