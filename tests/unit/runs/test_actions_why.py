"""Why a run does what it does: the policy asked in advance, and the ledger told in words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fabricated_runs import (
    LAUNCHED,
    NOW,
    STARTED,
    SUBMITTED,
    Said,
    fabricate,
    published,
    said,
)

from hpctrain.judge.causes import Cause
from hpctrain.judge.documents import ActionKind, History
from hpctrain.judge.policy_preview import PolicyPreview, budgets, preview_policy
from hpctrain.records.find import RunFiles
from hpctrain.records.ledger import Event, EventKind
from hpctrain.records.supervise_config import LaunchShape, RollbackSettings, SuperviseConfig
from hpctrain.runs.describe import describe, story_lines
from hpctrain.runs.status import statuses
from hpctrain.runs.why import Why, waiting_words, why, why_lines
from hpctrain.slurm.fake import FakeSlurm
from hpctrain.slurm.records import JobRecord
from hpctrain.slurm.states import JobState

CONFIG = SuperviseConfig(
    run_id="gpt-tiny-7f3a",
    target_step=60,
    continuation="requeue",
    failures_without_progress=3,
    stall_seconds=600.0,
    setup_stall_seconds=1800.0,
    kill_wait_seconds=5.0,
    verify="auto",
)


def events_of(*entries: Said) -> list[Event]:
    return [
        Event.model_validate({"event": kind, "time": NOW - 100 + number, **fields})
        for number, (kind, fields) in enumerate(entries)
    ]


def launch(resume_step: int = 0, epoch: int = 1) -> Said:
    return said(
        EventKind.LAUNCH_STARTED, job_id=1, restart_count=0, epoch=epoch, resume_step=resume_step
    )


def crash(
    resume_step: int = 0, checkpoint_step: int | None = None, cause: str = "crash", epoch: int = 1
) -> Said:
    return said(
        EventKind.LAUNCH_ENDED,
        epoch=epoch,
        cause=cause,
        reason="rank 3 failed: boom",
        resume_step=resume_step,
        checkpoint_step=checkpoint_step,
        evidence=("rank 3 on n1: boom",),
        rank=3,
        node="n1",
        fingerprint="boom",
    )


def answer(
    cause: Cause,
    *entries: Said,
    config: SuperviseConfig = CONFIG,
    checkpoint_step: int = 0,
    **more: object,
) -> PolicyPreview:
    """What would be done about `cause`; the last answer that names it."""
    found = preview_policy(events_of(*entries), config, NOW, checkpoint_step, checkpoint_step + 5)
    return [one for one in found if cause in one.causes][-1 if more.get("repeated") else 0]


# -- what would happen -------------------------------------------------------------------------


def test_every_eventuality_has_one_answer_and_equal_ones_are_together() -> None:
    found = preview_policy(events_of(launch()), CONFIG, NOW, 0, 0)
    conditions = [condition for one in found for condition in one.conditions]
    assert len(conditions) == len(set(conditions)) == 25
    answers = [(one.action, one.reason, one.delay_seconds, one.observed) for one in found]
    assert len(answers) == len(set(answers))
    assert all(one.reason for one in found)
    for one in found:
        assert not any(condition in one.reason for condition in one.conditions)


def test_the_budget_is_what_decides() -> None:
    """Three launches without a new checkpoint, as the spec says."""
    history: list[Said] = []
    for failures, action in ((0, "relaunch"), (1, "relaunch"), (2, "stop")):
        told = answer(Cause.CRASH, *history, launch())
        assert told.action == action, told
        if action == "relaunch":
            assert f"failure {failures + 1} of 3" in told.reason
        history += [launch(), crash()]


def test_a_checkpoint_of_the_running_launch_counts_as_progress() -> None:
    spent = [launch(), crash(), launch(), crash()]
    assert answer(Cause.CRASH, *spent, launch()).action == ActionKind.STOP
    told = answer(Cause.CRASH, *spent, launch(), checkpoint_step=10)
    assert told.action == ActionKind.RELAUNCH and "it had made progress" in told.reason


def test_between_launches_an_old_checkpoint_is_no_progress() -> None:
    entries = [launch(), crash(0, 10), launch(10), crash(10, 10), launch(10), crash(10, 10)]
    assert answer(Cause.CRASH, *entries, checkpoint_step=10).action == ActionKind.STOP


@pytest.mark.parametrize(
    ("continuation", "action"),
    [("requeue", "requeue"), ("chain", "leave"), ("none", "stop")],
)
def test_how_the_run_goes_on_after_the_time_limit(continuation: str, action: str) -> None:
    config = CONFIG.model_copy(update={"continuation": continuation})
    told = answer(Cause.TIME_LIMIT, launch(), config=config)
    assert told.action == action


def test_a_spare_node_or_a_smaller_shape_keeps_the_job() -> None:
    told = answer(Cause.NODE_FAILURE, launch())
    assert (told.action, told.reason) == (ActionKind.REQUEUE, "the next attempt resumes")
    sizes = tuple(LaunchShape(nodes=n, tasks=n, train_config="x") for n in (4, 2))
    spare = CONFIG.model_copy(update={"shapes": sizes[:1], "spare_nodes": 1})
    assert "with a spare node" in answer(Cause.NODE_FAILURE, launch(), config=spare).reason
    elastic = CONFIG.model_copy(update={"shapes": sizes})
    assert "on 3 of 4 nodes" in answer(Cause.NODE_FAILURE, launch(), config=elastic).reason


def test_going_back_is_foreseen_and_said_to_be_only_said() -> None:
    told = answer(Cause.DIVERGED, launch(), checkpoint_step=20, repeated=True)
    assert told.action == ActionKind.STOP
    assert told.observed[0].startswith("would go back to step 20")
    config = CONFIG.model_copy(update={"rollback": RollbackSettings(act=True)})
    told = answer(Cause.DIVERGED, launch(), config=config, checkpoint_step=20, repeated=True)
    assert told.action == ActionKind.RELAUNCH and "go back to step 20" in told.reason


def test_budgets_of_every_counted_cause() -> None:
    past = History(2, 0, by_cause=(("crash", 2),))
    found = {budget.cause: budget for budget in budgets(past, CONFIG)}
    assert (found["crash"].used, found["crash"].allowed) == (2, 2)
    assert (found["node_failure"].used, found["node_failure"].allowed) == (0, 5)
    assert "time_limit" in found and "preempted" not in found and "disk_full" not in found


# -- the report --------------------------------------------------------------------------------

OBSERVED = said(EventKind.OBSERVED, action="relaunch", reason="would avoid n3 (score 130)")
ACTED = said(
    EventKind.ACTION, action="requeue", reason="start again", excluded=("n7",), delay_seconds=2.0
)
ANSWERED = said(EventKind.ACTION_RESULT, action="requeue", reason="done; without n7")


def explain(
    tmp_path: Path, *entries: Said, state: JobState = JobState.RUNNING, steps: int = 25
) -> tuple[RunFiles, FakeSlurm, Why]:
    slurm = FakeSlurm()
    slurm.submit("#!/bin/sh\n")
    slurm.records[1] = replace(slurm.records[1], state=state, reason="BeginTime")
    run = fabricate(tmp_path, entries=[*SUBMITTED, *entries], steps=steps)
    published(run, 20)
    return run, slurm, why(run, slurm, NOW)  # type: ignore[arg-type]


def test_the_last_verdict_and_what_was_done(tmp_path: Path) -> None:
    old = said(EventKind.OBSERVED, action="relaunch", reason="would avoid n1")
    entries = [STARTED, LAUNCHED, crash(), said(EventKind.ACTION, action="relaunch"), old]
    entries += [launch(0, 2), crash(0, 20, epoch=2), ACTED, OBSERVED, ANSWERED]
    _, _, told = explain(tmp_path, *entries)
    assert told.ended is not None and told.action is not None
    assert (told.ended.epoch, told.ended.cause, told.ended.rank) == (2, "crash", 3)
    assert told.ended.evidence == ("rank 3 on n1: boom",)
    assert (told.action.action, told.action.result) == ("requeue", "done; without n7")
    assert told.action.excluded == ("n7",)
    assert told.action.observed == ("would avoid n3 (score 130)",), "of the last action only"
    assert told.checkpoint_step == 20
    assert (told.failures_without_progress, told.failures_allowed) == (0, 11)
    assert told.storm.failures == 2 and told.storm.threshold == 5


def test_groups_that_leave_their_rack(tmp_path: Path) -> None:
    words = "4 nodes in 2 blocks; 1 of 4 groups of tp 8 leave their block"
    found = dict(reason=words, evidence=("tp 8: 1 of 4 groups",))
    cut, whole = (said(EventKind.PLACED, groups_outside=count, **found) for count in (1, 0))
    run, slurm, told = explain(tmp_path / "cut", STARTED, cut, LAUNCHED)
    assert told.placement == words
    assert any(line.split() == ["Placed", *words.split()] for line in _joined(told))
    (row,) = statuses([run], slurm)  # type: ignore[arg-type]
    assert row.reason.endswith("spread too far, see why")
    (attempt,) = describe(run).attempts
    assert (attempt.placement, attempt.placement_details) == (words, ("tp 8: 1 of 4 groups",))
    assert f"  placed    {words}" in story_lines(describe(run))
    _, _, told = explain(tmp_path / "whole", STARTED, whole, LAUNCHED)
    assert told.placement is None
    again = explain(tmp_path / "again", STARTED, cut, LAUNCHED, crash(), STARTED)[2]
    assert again.placement is None, "where the next attempt is has not been said yet"


def _joined(told: Why) -> list[str]:
    """The lines of `hpctrain why`, each with those that continue it."""
    lines: list[str] = []
    for line in why_lines(told, NOW):
        if line.startswith(" " * 10) and lines:
            lines[-1] += line
        else:
            lines.append(line)
    return lines


def test_a_failed_run_tells_cause_rank_and_what_to_type_first(tmp_path: Path) -> None:
    """Before all that is general, and nothing of how it would go on: it does not."""
    reason = "rank 3 failed: boom; failure 3 of 3"
    stop = said(EventKind.ACTION, action="stop", reason=reason)
    run = fabricate(tmp_path, entries=[*SUBMITTED, STARTED, LAUNCHED, crash(), stop])
    lines = why_lines(why(run, FakeSlurm(), NOW), NOW)  # type: ignore[arg-type]
    first = lines[: lines.index("")]
    assert [line[:10].strip() for line in first] == [
        *("Run", "Reason", "Ended", "cause", "suspect", "Next", "", "Evidence", "Done"),
    ]
    assert first[0].endswith(" FAILED, job 1, attempt 1") and first[1].endswith(reason)
    assert first[4] == "  suspect rank 3, node n1"
    for line, command in zip(first[5:7], ("logs --errors", "resume"), strict=True):
        assert line[10:].startswith(f"hpctrain {command} {run.run_id} --runs {tmp_path}")
    assert lines[lines.index("") + 1] == "Policy"


@pytest.mark.parametrize("exit_code", [0, 1])
def test_a_run_that_is_over_does_not_go_on(tmp_path: Path, exit_code: int) -> None:
    stop = said(EventKind.ACTION, action="stop", reason="asked to stop", exit_code=exit_code)
    over = explain(tmp_path, STARTED, LAUNCHED, crash(), stop, state=JobState.FAILED)[2]
    assert over.state in ("STOPPED", "FAILED")
    assert not [line for line in why_lines(over, NOW) if line.startswith("Goes on")]


def test_a_storm_that_has_passed_is_none(tmp_path: Path) -> None:
    run, slurm, told = explain(tmp_path, STARTED, LAUNCHED, crash())
    assert told.storm.failures == 1
    assert why(run, slurm, NOW + 3600).storm.failures == 0  # type: ignore[arg-type]


def test_a_run_that_has_not_begun(tmp_path: Path) -> None:
    _, _, told = explain(tmp_path, state=JobState.PENDING, steps=0)
    assert told.ended is None and told.action is None and told.foresight
    assert told.waiting is not None and "BeginTime" in told.waiting


def test_nothing_comes_after_the_end(tmp_path: Path) -> None:
    cancelled = said(EventKind.CANCEL_REQUESTED, job_id=1, user="somebody")
    _, _, told = explain(tmp_path, STARTED, LAUNCHED, cancelled, state=JobState.CANCELLED)
    assert told.foresight == ()


def test_requests_that_stand(tmp_path: Path) -> None:
    run, slurm, told = explain(tmp_path, STARTED, LAUNCHED)
    assert told.requests == ()
    run.layout.hold_request.write_text("alice (lunch)\n")
    run.layout.save_request.touch()
    told = why(run, slurm, NOW)  # type: ignore[arg-type]
    assert told.requests == ("hold, by alice (lunch)", "save")


def test_without_slurm_the_ledger_still_speaks(tmp_path: Path) -> None:
    run, slurm, _ = explain(tmp_path, STARTED, LAUNCHED, crash())
    slurm.away = True
    told = why(run, slurm, NOW)  # type: ignore[arg-type]
    assert told.state == "UNKNOWN" and told.ended is not None and told.foresight


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("BeginTime", "requeued job wait"),
        ("Priority", "higher priority"),
        ("Resources", "enough nodes"),
        ("JobHeldUser", "`hpctrain resume` releases it"),
        ("JobHeldAdmin", "an administrator"),
        ("launch failed requeued held", "launch of the script failed"),
        ("user_env_retrieval_failed_requeued_held", "requeue_setup_env_fail"),
        ("launch_failure_limit_exceeded_requeued_held", "MaxBatchRequeue"),
        ("QOSMaxGRESPerUser", "QOS"),
        ("AssocGrpNodeLimit", "account"),
        ("ReqNodeNotAvail, UnavailableNodes:n3", "down, drained or reserved (ReqNodeNotAvail,"),
        ("SomethingNew", "SomethingNew"),
        (None, "None"),
    ],
)
def test_why_a_job_waits(reason: str | None, words: str) -> None:
    told = waiting_words(JobRecord(1, state=JobState.PENDING, reason=reason), NOW)
    assert words in told and (reason or "None") in told


def test_when_and_where_a_waiting_job_may_start() -> None:
    job = JobRecord(1, reason="BeginTime", start_time=NOW + 90, exclude_nodes="n[3-4]")
    told = waiting_words(job, NOW)
    assert "90 s from now" in told and "must not run on n[3-4]" in told
    held = waiting_words(replace(job, reason="JobHeldUser"), NOW)
    assert "from now" not in held


def test_a_stopped_run_is_foreseen_as_it_will_be_resumed(tmp_path: Path) -> None:
    """A person who resumes it has looked at it, so the budget is full again."""
    spent = [launch(20), *(crash(20, 20) for _ in range(3))]
    stop = said(EventKind.ACTION, action="stop", reason="3 failed launches", exit_code=1)
    _, _, told = explain(tmp_path, STARTED, *spent, stop, state=JobState.FAILED)
    assert told.state == "FAILED"
    (crashes,) = [one for one in told.foresight if Cause.CRASH in one.causes]
    assert crashes.action == "relaunch", crashes
    _, _, running = explain(tmp_path / "2", STARTED, *spent, launch(20, 2))
    (crashes,) = [one for one in running.foresight if Cause.CRASH in one.causes]
    assert crashes.action == "stop", crashes


def test_a_lost_attempt_is_not_explained_by_what_was_done_about_an_earlier_one(
    tmp_path: Path,
) -> None:
    """A node died under the second attempt; the requeue in the ledger is that of the first."""
    attempt = dict(job_id=1, nodes="n0")
    run = fabricate(
        tmp_path,
        entries=[
            *SUBMITTED,
            said(EventKind.ATTEMPT_STARTED, restart_count=0, **attempt),
            launch(),
            crash(cause="preempted"),
            said(EventKind.ACTION, job_id=1, restart_count=0, action="requeue", reason="preempted"),
            said(EventKind.ATTEMPT_STARTED, restart_count=1, **attempt),
            launch(epoch=2),
            said(EventKind.ATTEMPT_STARTED, restart_count=2, **attempt),
            said(
                EventKind.ATTEMPT_LOST,
                job_id=1,
                restart_count=1,
                cause="node_failure",
                reason="n0 went down",
            ),
        ],
    )
    told = why(run, FakeSlurm(), now=NOW)  # type: ignore[arg-type]
    assert told.ended is not None and told.ended.cause == "node_failure"
    assert told.action is None
    assert not [line for line in why_lines(told, NOW) if line.startswith("Done")]
