"""Checkpoints that are gone, or verify and cannot be loaded: what a launch does and never does."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from supervise_facts import NOTHING, config, exit_record
from supervise_stage import Stage

from hpctrain.checkpoints.publish import Retention, published_steps
from hpctrain.judge import policy
from hpctrain.judge.causes import Cause
from hpctrain.judge.classify import classify
from hpctrain.judge.documents import (
    Action,
    ActionKind,
    LaunchEvidence,
    LogFinding,
    Situation,
    Verdict,
)
from hpctrain.judge.launch_history import (
    history,
    loaded_instead,
    pending_rejections,
    pinned_steps,
)
from hpctrain.judge.policy import decide
from hpctrain.records.ledger import Event, EventKind, Ledger
from hpctrain.records.run_records import ExitRecord, SaveRecord, append_save
from hpctrain.slurm.messages import TaskFailure
from hpctrain.supervise.srun_launch import Ended, TrainerLauncher

# -- gone --------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Storage is asked again every half minute, which is not what is tested here."""
    monkeypatch.setattr(policy, "_SLOW_FIRST_DELAY_SECONDS", 0.01)
    yield


def resumed(stage: Stage) -> None:
    """A person wants the run to go on."""
    Ledger(stage.layout.ledger).append(EventKind.CONTROL, action="resume")


def test_emptied_checkpoints_stop_the_run(stage: Stage) -> None:
    """Scratch was purged between two attempts."""
    assert stage.play("save:20 progress:25 crash", "exit:0", "exit:0", "exit:0") == 1
    shutil.rmtree(stage.layout.checkpoints)
    stage.layout.checkpoints.mkdir()
    resumed(stage)
    assert stage.play("done", "done", "done", "done", "done") == 1
    stop = stage.events(EventKind.ACTION)[-1]
    assert (stage.causes[-1], stop.action) == ("bad_checkpoint", "stop")
    assert "holds no checkpoint" in str(stop.reason) and "step 20 (ledger.jsonl)" in str(
        stop.reason
    )
    assert "hpctrain resume --from-scratch" in str(stop.reason)
    assert not stage.layout.done.exists()


def test_the_saves_alone_are_enough(stage: Stage) -> None:
    save = SaveRecord(step=10, epoch=1, time=1.0, stall_seconds=0, publish_seconds=0, size_bytes=1)
    append_save(stage.layout, save)
    assert stage.play("done") == 1
    assert "step 10 (saves.jsonl)" in str(stage.events(EventKind.ACTION)[-1].reason)


def test_checkpoints_that_are_not_there_are_storage(stage: Stage) -> None:
    """Asked for again, within the budget of storage, and never taken for an empty directory."""
    stage.configure(config().model_copy(update={"budgets": {"storage": 2}}))
    stage.layout.checkpoints.rmdir()
    stage.layout.checkpoints.symlink_to("/not-mounted/checkpoints")
    assert stage.play("done") == 1
    assert stage.causes == ["storage"] * 3
    assert stage.actions == ["relaunch", "relaunch", "stop"]
    assert "the directory of checkpoints is not there" in str(
        stage.events(EventKind.ACTION)[-1].reason
    )


def test_checkpoints_that_come_back_are_resumed_from(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.configure(config().model_copy(update={"storm_failures": 100}))
    assert stage.play("save:20 progress:25 crash", "exit:0", "exit:0", "exit:0") == 1
    resumed(stage)
    away = stage.layout.directory / "away"
    stage.layout.checkpoints.rename(away)
    again = stage.supervisor("", "", "", "", "", "", "", "done", *["done"] * 3)
    real = TrainerLauncher._not_begun

    def not_begun(*words: Any) -> Ended:
        """Back as soon as the first launch has failed without them."""
        ended = real(*words)
        if away.exists():
            away.rename(stage.layout.checkpoints)
        return ended

    monkeypatch.setattr(TrainerLauncher, "_not_begun", not_begun)
    assert again.run() == 0
    assert "storage" in stage.causes
    assert stage.events(EventKind.LAUNCH_STARTED)[-1].resume_step == 20


def test_steps_that_no_checkpoint_holds_are_said_to_be_lost(stage: Stage) -> None:
    row = {"step": 7, "epoch": 1, "time": 1.0, "loss": 1.0, "loss_hex": "0x1p+0",
           "grad_norm": None, "learning_rate": 1.0, "step_seconds": 1.0, "tokens_per_second": 1.0,
           "mfu": None, "memory_bytes": 0, "consumed_samples": 7}  # fmt: skip
    stage.layout.metrics.write_text(json.dumps(row) + "\n")
    assert stage.play("done") == 0
    assert [event.reason for event in stage.events(EventKind.RESUME)] == [
        "fresh start: 7 steps that no checkpoint holds are trained again"
    ]


def test_an_accepted_loss_starts_at_step_0_once(stage: Stage) -> None:
    stage.configure(config().model_copy(update={"storm_failures": 99}))
    assert stage.play("save:20 progress:25 crash", "exit:0", "exit:0", "exit:0") == 1
    epoch = stage.events(EventKind.LAUNCH_ENDED)[-1].epoch
    ledger = Ledger(stage.layout.ledger)
    ledger.append(EventKind.FRESH_START_ACCEPTED, epoch=epoch, user="ada")
    ledger.append(EventKind.CONTROL, action="resume")
    assert stage.play(*[""] * 4, "save:5 crash", "save:10 done") == 0
    assert [e.resume_step for e in stage.events(EventKind.LAUNCH_STARTED)][-2:] == [0, 5]
    resume = stage.events(EventKind.RESUME)[-2]
    assert resume.reason == "fresh start, accepted by ada"
    kept = stage.layout.checkpoints / "quarantine/iter_0000020.reason"
    assert kept.read_text() == "ada had the run start at step 0\n"


# -- cannot be loaded --------------------------------------------------------------------------


def ended(cause: str, resume_step: int, **fields: object) -> Event:
    return Event.model_validate(
        {"event": "launch_ended", "time": 1.0, "cause": cause, "resume_step": resume_step, **fields}
    )


def started(resume_step: int) -> Event:
    return Event(event=EventKind.LAUNCH_STARTED, time=1.0, resume_step=resume_step)


def rejected(step: int, reason: str = "cannot be loaded") -> Event:
    return Event(event=EventKind.CHECKPOINT_REJECTED, time=1.0, checkpoint_step=step, reason=reason)


def answer(events: list[Event], cause: Cause, step: int | None, *good: int) -> Action:
    verdict = Verdict(cause, "rank 0 on n0: load failed: KeyError", checkpoint_step=step)
    return decide(verdict, history(events), Situation(good_checkpoints=good), config())


def test_the_first_failure_to_load_is_tried_again() -> None:
    action = answer([started(20), ended("load_failed", 20)], Cause.LOAD_FAILED, 20, 20, 10)
    assert (action.kind, action.rejected_step) == (ActionKind.RELAUNCH, None)


def test_after_the_second_one_the_checkpoint_before_is_used() -> None:
    events = [started(20), ended("load_failed", 20)] * 2
    action = answer(events, Cause.LOAD_FAILED, 20, 20, 10)
    assert (action.kind, action.rejected_step) == (ActionKind.RELAUNCH, 20)
    assert "verifies and cannot be loaded; go back to step 10" in action.reason


def test_other_failures_between_do_not_count_against_it() -> None:
    """A storage fault of one node, a crash after loading: none of them is about the checkpoint."""
    events = [ended("storage", 20), ended("crash", 20), ended("load_failed", 20)]
    assert history(events).failed_loads == 1
    assert answer(events, Cause.LOAD_FAILED, 20, 20, 10).rejected_step is None


def test_nor_do_failures_to_load_another_one_or_before_a_person_looked() -> None:
    elsewhere = [ended("load_failed", 30), rejected(30), ended("load_failed", 20)]
    assert history(elsewhere).failed_loads == 1
    resumed = Event(event=EventKind.CONTROL, time=1.0, action="resume")
    assert history([ended("load_failed", 20), resumed, ended("load_failed", 20)]).failed_loads == 1
    put_back = [*[ended("load_failed", 20)] * 2, rejected(20), ended("load_failed", 20)]
    assert history(put_back).failed_loads == 1


def test_without_an_older_one_the_run_stops_and_moves_nothing() -> None:
    events = [ended("load_failed", 20)] * 2
    action = answer(events, Cause.LOAD_FAILED, 20, 20)
    assert (action.kind, action.rejected_step) == (ActionKind.STOP, None)
    assert "no checkpoint before step 20" in action.reason and "--from-scratch" in action.reason


def test_a_second_checkpoint_that_cannot_be_loaded_is_not_the_checkpoints_fault() -> None:
    """A library or a setting has changed: going back further would only lose more."""
    events = [*[ended("load_failed", 30)] * 2, rejected(30), *[ended("load_failed", 20)] * 2]
    action = answer(events, Cause.LOAD_FAILED, 20, 20, 10)
    assert (action.kind, action.rejected_step) == (ActionKind.STOP, None)
    assert "4 failed launches in a row (load failed)" in action.reason


def test_what_is_proven_to_have_changed_is_given_up_at_once() -> None:
    action = answer([ended("bad_checkpoint", 20)], Cause.BAD_CHECKPOINT, 20, 20, 10)
    assert (action.kind, action.rejected_step) == (ActionKind.RELAUNCH, 20)
    last = answer([ended("bad_checkpoint", 20)], Cause.BAD_CHECKPOINT, 20, 20)
    assert (last.kind, last.rejected_step) == (ActionKind.STOP, 20)
    none = answer([ended("bad_checkpoint", 0)], Cause.BAD_CHECKPOINT, None)
    assert (none.kind, none.rejected_step) == (ActionKind.STOP, None)


def test_saving_again_what_was_given_up_is_progress() -> None:
    events = [started(20), ended("load_failed", 20, checkpoint_step=20), rejected(20), started(10)]
    past = history([*events, ended("crash", 10, checkpoint_step=20)])
    assert past.failures_without_progress == 0


def test_the_one_that_was_loaded_instead_is_not_retired(tmp_path: Path) -> None:
    events = [started(20), ended("load_failed", 20), rejected(20), started(10)]
    assert pending_rejections(events[:3]) == {20: "cannot be loaded"}
    assert pending_rejections(events) == {}
    assert (loaded_instead(events), pinned_steps(events)) == (10, (10,))
    accepted = Event(event=EventKind.FRESH_START_ACCEPTED, time=1.0)
    assert pinned_steps([*events, accepted]) == ()


# -- whose fault it is -------------------------------------------------------------------------


def exit_of(
    rank: int, message: str, at: float, cause: str | None = None, loading: int | None = 20
) -> ExitRecord:
    return exit_record(rank, "crash", message, cause=cause, step=20, time=at, loading_step=loading)


def left(*exits: ExitRecord, **more: object) -> LaunchEvidence:
    fields = {"rank_exits": exits, "world_size": 4, "resume_step": 20, **more}
    return LaunchEvidence(**{**vars(NOTHING), **fields})  # type: ignore[arg-type]


def test_a_rank_that_fails_while_loading_names_the_checkpoint() -> None:
    verdict = classify(left(exit_of(1, "KeyError: 'optimizer.state'", 5)))
    assert (verdict.cause, verdict.checkpoint_step, verdict.nodes) == (
        Cause.LOAD_FAILED, 20, ("n1",),
    )  # fmt: skip


def test_the_same_failure_after_loading_is_a_crash() -> None:
    verdict = classify(left(exit_of(1, "KeyError: 'optimizer.state'", 5, loading=None)))
    assert (verdict.cause, verdict.checkpoint_step) == (Cause.CRASH, None)


def test_a_mistake_met_by_all_ranks_while_loading_is_no_mistake_of_the_users() -> None:
    exits = [exit_of(rank, "TypeError: x", 5 + rank / 10) for rank in range(4)]
    lines = [
        LogFinding("python_error", Cause.USER_ERROR, "root", "TypeError: x", rank, f"n{rank}", 5)
        for rank in range(4)
    ]
    assert classify(left(*exits, findings=tuple(lines))).cause is Cause.LOAD_FAILED


def test_a_line_of_a_rank_that_was_not_loading_is_a_crash() -> None:
    line = "RuntimeError: Error(s) in loading state_dict for GPT2LMHeadModel:"
    finding = LogFinding("checkpoint_mismatch", Cause.LOAD_FAILED, "root", line, 1, "n1", 5)
    exits = exit_of(1, line, 5, loading=None)
    assert classify(left(exits, findings=(finding,))).cause is Cause.CRASH
    while_loading = classify(left(exit_of(1, line, 5), findings=(finding,)))
    assert (while_loading.cause, while_loading.checkpoint_step) == (Cause.LOAD_FAILED, 20)


def test_a_storage_fault_of_one_node_does_not_name_the_checkpoint() -> None:
    """Neither by the line in its log, nor by the rank's own word."""
    line = "OSError: [Errno 116] Stale file handle: '__1_0.distcp'"
    finding = LogFinding("storage_error", Cause.STORAGE, "root", line, 1, "n1", 5)
    verdict = classify(left(exit_of(1, line, 5, loading=None), findings=(finding,)))
    assert (verdict.cause, verdict.checkpoint_step) == (Cause.STORAGE, None)
    told = exit_of(1, "rank 1 on n1 cannot read a shard", 5, cause="storage", loading=None)
    assert classify(left(told)).cause is Cause.STORAGE


def test_a_rank_that_was_killed_may_be_why_others_could_not_load() -> None:
    killed = TaskFailure("n0", "0", signal=signal.SIGKILL, at=4.0)
    verdict = classify(left(exit_of(1, "RuntimeError: timed out", 5), task_failures=(killed,)))
    assert verdict.cause is Cause.CRASH and verdict.rank == 0


def test_proof_comes_before_what_other_ranks_say() -> None:
    proof = exit_of(3, "__3_0.distcp has other content than was written", 9, "bad_checkpoint")
    verdict = classify(left(exit_of(1, "KeyError: 'x'", 5), proof))
    assert (verdict.cause, verdict.checkpoint_step, verdict.rank) == (Cause.BAD_CHECKPOINT, 20, 3)


def test_a_given_up_checkpoint_is_neither_counted_nor_deleted(tmp_path: Path) -> None:
    """Retention sees published directories only; quarantine is none of them."""
    (tmp_path / "quarantine/iter_0000020").mkdir(parents=True)
    assert published_steps(tmp_path) == [] and Retention(tmp_path).retire(1, None) == []
    assert (tmp_path / "quarantine/iter_0000020").is_dir()


# -- the whole way -----------------------------------------------------------------------------


def test_stepping_back_from_launch_to_launch(stage: Stage) -> None:
    stage.configure(config().model_copy(update={"storm_failures": 9}))
    parts = ["save:10 save:20 progress:25 crash", "unloadable:20", "unloadable:20", "done"]
    assert stage.play(*parts) == 0
    assert stage.causes == ["crash", "load_failed", "load_failed", "done"]
    starts = [event.resume_step for event in stage.events(EventKind.LAUNCH_STARTED)]
    assert starts == [0, 20, 20, 10]
    (event,) = stage.events(EventKind.CHECKPOINT_REJECTED)
    assert (event.checkpoint_step, event.cause) == (20, "load_failed")
    kept = stage.layout.checkpoints / "quarantine/iter_0000020"
    assert (kept / "shard").read_bytes() == b"weights"
    environment = json.loads((stage.layout.directory / "environment-4.json").read_text())
    assert environment["HPCTRAIN_PINNED_STEPS"] == "10"


def test_proof_of_a_rank_costs_one_launch(stage: Stage) -> None:
    parts = ["save:10 save:20 progress:25 crash", "changed:20", "done"]
    assert stage.play(*parts) == 0
    assert stage.causes == ["crash", "bad_checkpoint", "done"]
    starts = [event.resume_step for event in stage.events(EventKind.LAUNCH_STARTED)]
    assert starts == [0, 20, 10]
    reason = (stage.layout.checkpoints / "quarantine/iter_0000020.reason").read_text()
    assert "shard has other content than was written" in reason


def test_no_node_is_blamed_when_nothing_was_launched(stage: Stage, tmp_path: Path) -> None:
    book = tmp_path / "nodes.jsonl"
    changes = {"budgets": {"storage": 1}, "node_ledger": str(book), "cluster": "c"}
    stage.configure(config().model_copy(update=changes))
    stage.layout.checkpoints.rmdir()
    assert stage.play("done") == 1
    assert stage.causes == ["storage"] * 2
    assert not book.exists()
