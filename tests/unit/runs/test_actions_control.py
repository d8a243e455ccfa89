"""What the verbs of a team do: which file, which word to Slurm, which line in the ledger."""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from fabricated_runs import LAUNCHED, STARTED, SUBMITTED, ended, fabricate, published
from virtual_clock import VirtualClock

from hpctrain.base.errors import (
    RunFailedError,
    SlurmRefusedError,
    SlurmUnreachableError,
    UsageError,
)
from hpctrain.job.job_submission import resubmit
from hpctrain.plan.planner import make_plan
from hpctrain.records.find import RunFiles
from hpctrain.records.ledger import Event, EventKind
from hpctrain.records.requests import KINDS, read_request, request_path, take_back
from hpctrain.runs import control
from hpctrain.runs.control import ControlResult
from hpctrain.runs.describe import request_history
from hpctrain.runs.state import RunState
from hpctrain.runs.status import statuses
from hpctrain.slurm.fake import FakeSlurm
from hpctrain.slurm.states import JobState
from hpctrain.spec.loader import find_profile, load_profile, load_run_spec

ME = pwd.getpwuid(os.getuid()).pw_name
Verb = Callable[..., ControlResult]


@pytest.fixture
def slurm() -> FakeSlurm:
    fake = FakeSlurm()
    fake.submit("#!/bin/sh\n")
    return fake


@pytest.fixture
def running(tmp_path: Path, slurm: FakeSlurm) -> RunFiles:
    change(slurm, state=JobState.RUNNING)
    return fabricate(tmp_path, entries=[*SUBMITTED, STARTED, LAUNCHED], steps=23)


@pytest.fixture
def waiting(tmp_path: Path, slurm: FakeSlurm) -> RunFiles:
    change(slurm, reason="Priority")
    return fabricate(tmp_path)


def change(slurm: FakeSlurm, job_id: int = 1, **fields: object) -> None:
    slurm.records[job_id] = replace(slurm.records[job_id], **fields)  # type: ignore[arg-type]


def files(run: RunFiles) -> list[str]:
    return sorted(path.name for path in run.layout.control.iterdir())


def audit(run: RunFiles) -> list[Event]:
    return [event for event in run.ledger.events() if event.event is EventKind.CONTROL]


# -- a run that trains -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verb", "options", "file"),
    [
        (control.stop, {}, "stop"),
        (control.stop, {"now": True}, "stop-now"),
        (control.hold, {}, "hold"),
        (control.save, {}, "save"),
    ],
)
def test_a_verb_leaves_one_file_and_one_line(
    running: RunFiles, slurm: FakeSlurm, verb: Verb, options: dict[str, bool], file: str
) -> None:
    before = slurm.records[1]
    answer = verb(running, slurm, reason="lunch", **options)
    assert answer.changed and answer.job_id == 1 and f"`{running.run_id}`" in answer.message
    assert files(running) == [file]
    assert (running.layout.control / file).read_text() == f"{ME} (lunch)\n"
    (line,) = audit(running)
    assert (line.user, line.action, line.reason, line.job_id) == (ME, file, "lunch", 1)
    assert slurm.records[1] == before, "the run is asked, not Slurm"


@pytest.mark.parametrize("verb", [control.stop, control.hold, control.save])
def test_asking_twice_is_no_error_and_changes_nothing(
    running: RunFiles, slurm: FakeSlurm, verb: Verb
) -> None:
    verb(running, slurm, reason="first")
    again = verb(running, slurm, reason="second")
    assert not again.changed and "already" in again.message
    assert len(audit(running)) == 1
    (path,) = running.layout.control.iterdir()
    assert "first" in path.read_text()


def test_an_engine_that_saves_by_steps_only(running: RunFiles, slurm: FakeSlurm) -> None:
    """An external Megatron-LM can be asked to save and leave, not to save and go on."""
    example = Path(__file__).resolve().parents[3] / "examples" / "gpt-tiny.yaml"
    engine = ("engine.name=megatron-lm", "engine.checkout=/opt/Megatron-LM")
    spec = load_run_spec(example, engine).document
    plan = make_plan(spec, load_profile(find_profile("sandbox")).document)
    running.layout.plan.write_text(plan.model_dump_json())
    with pytest.raises(UsageError, match="saves by steps") as refused:
        control.save(running, slurm)
    assert "hpctrain stop" in str(refused.value.hint)
    assert files(running) == []
    assert control.stop(running, slurm).changed


def test_a_file_made_by_hand_counts_as_asked(running: RunFiles, slurm: FakeSlurm) -> None:
    running.layout.save_request.touch()
    assert not control.save(running, slurm).changed
    running.layout.stop_request.touch()
    answer = control.stop(running, slurm)
    assert not answer.changed and "control/stop" in answer.message


def test_the_newest_way_to_leave_counts_but_nothing_outranks_now(
    running: RunFiles, slurm: FakeSlurm
) -> None:
    control.stop(running, slurm)
    control.hold(running, slurm)
    assert files(running) == ["hold"]
    control.stop(running, slurm)
    assert files(running) == ["stop"]
    control.stop(running, slurm, now=True)
    request = read_request(running.layout)
    assert request is not None and request.kind == "stop-now"
    assert not control.stop(running, slurm).changed
    with pytest.raises(UsageError, match="asked to stop at once"):
        control.hold(running, slurm)


def test_a_request_takes_the_place_of_the_supervisors_own(
    running: RunFiles, slurm: FakeSlurm
) -> None:
    """Near the time limit the supervisor asks, too; that must not hide what a person wants."""
    running.layout.stop_request.write_text("supervisor: Slurm's warning signal USR1\n")
    assert read_request(running.layout) is None
    assert control.stop(running, slurm).changed
    request = read_request(running.layout)
    assert request is not None and request.by == ME


def test_hold_says_when_the_run_will_stop_instead(running: RunFiles, slurm: FakeSlurm) -> None:
    text = running.layout.supervise_config.read_text()
    running.layout.supervise_config.write_text(text.replace('"requeue"', '"chain"'))
    answer = control.hold(running, slurm)
    assert "not requeued on this site" in answer.message
    assert files(running) == ["hold"]


def test_without_an_answer_of_slurm_the_request_is_made_all_the_same(
    running: RunFiles, slurm: FakeSlurm
) -> None:
    slurm.away = True
    answer = control.stop(running, slurm)
    assert "Slurm does not answer" in answer.message
    assert files(running) == ["stop"]
    with pytest.raises(SlurmUnreachableError):
        control.resume(running, slurm)
    assert files(running) == ["stop"]


def test_resume_takes_back_what_nobody_has_followed(running: RunFiles, slurm: FakeSlurm) -> None:
    assert not control.resume(running, slurm).changed
    control.stop(running, slurm, reason="lunch")
    control.save(running, slurm)
    answer = control.resume(running, slurm)
    assert answer.changed and "lunch" in answer.message
    assert files(running) == ["save"], "a checkpoint is still wanted"
    assert audit(running)[-1].action == control.TAKE_BACK
    stopped, saved, taken = request_history(running.ledger.events(), [])
    assert (stopped.answer, saved.answer) == ("asked to take back instead", None)
    assert taken.answer == "withdrawn"


# -- a job that waits --------------------------------------------------------------------------


def test_stop_takes_a_waiting_job_out_of_the_queue(waiting: RunFiles, slurm: FakeSlurm) -> None:
    answer = control.stop(waiting, slurm, reason="wrong data")
    assert "out of the queue" in answer.message
    assert slurm.records[1].state is JobState.CANCELLED
    assert files(waiting) == [], "or it would stop the run when it is resumed"
    row = statuses([waiting], slurm)[0]  # type: ignore[arg-type]
    assert row.state is RunState.STOPPED
    assert not control.stop(waiting, slurm).changed


def test_a_request_that_waits_with_its_job_can_be_followed_at_once(
    waiting: RunFiles, slurm: FakeSlurm
) -> None:
    """By hand, or while the job was being requeued: else it would wait for its turn to stop."""
    waiting.layout.stop_request.touch()
    assert control.stop(waiting, slurm).changed
    assert slurm.records[1].state is JobState.CANCELLED and files(waiting) == []


def test_a_job_that_starts_while_it_is_taken_out_finds_the_request(
    waiting: RunFiles, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "cancel_waiting", lambda _: change(slurm, state=JobState.RUNNING))
    answer = control.stop(waiting, slurm)
    assert answer.message.startswith("Asked") and files(waiting) == ["stop"]
    assert all(event.event is not EventKind.ACTION for event in waiting.ledger.events())


def test_hold_and_resume_in_the_queue(waiting: RunFiles, slurm: FakeSlurm) -> None:
    assert control.hold(waiting, slurm, reason="budget").changed
    assert slurm.records[1].reason == "JobHeldUser"
    assert not control.hold(waiting, slurm).changed
    assert files(waiting) == [], "the queue holds it; a file would hold it once more"
    assert control.resume(waiting, slurm).changed
    assert slurm.records[1].reason == "None"
    assert [line.action for line in audit(waiting)] == ["hold", "resume"]
    assert not control.resume(waiting, slurm).changed


def test_a_request_that_waited_with_the_job_is_followed_by_the_hold(
    waiting: RunFiles, slurm: FakeSlurm
) -> None:
    """A hold that was asked for while the job was being requeued must not hold it twice."""
    waiting.layout.hold_request.touch()
    waiting.layout.stop_request.touch()
    control.hold(waiting, slurm)
    assert files(waiting) == []


def test_a_job_that_starts_while_it_is_held_is_asked_instead(
    waiting: RunFiles, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm 22.05 accepts a hold of a running job and would keep it out of the queue later."""

    def hold(_: int) -> None:
        change(slurm, state=JobState.RUNNING, reason="JobHeldUser")

    monkeypatch.setattr(slurm, "hold", hold)
    control.hold(waiting, slurm)
    assert files(waiting) == ["hold"]
    assert slurm.records[1].reason == "None", "the hold of the running job is undone"


@pytest.mark.parametrize(
    ("reason", "held"),
    [
        ("JobHeldUser", True),
        ("JobHeldAdmin", True),
        ("job requeued in held state", True),
        ("launch failed requeued held", True),
        ("launch_failed_requeued_held", True),
        ("BeginTime", False),
        ("Priority", False),
        (None, False),
    ],
)
def test_held_jobs_are_known_by_their_reason(
    slurm: FakeSlurm, reason: str | None, held: bool
) -> None:
    change(slurm, reason=reason)
    assert (slurm.records[1].hold is not None) is held


def test_a_job_that_is_still_leaving_its_nodes_is_released_too(
    running: RunFiles, slurm: FakeSlurm
) -> None:
    change(slurm, state=JobState.COMPLETING, reason="job requeued in held state")
    control.resume(running, slurm)
    assert slurm.records[1].reason == "None"


def leaving(tmp_path: Path, slurm: FakeSlurm, action: str = "hold") -> RunFiles:
    """The supervisor has followed a request, and Slurm has not heard of it."""
    change(slurm, state=JobState.RUNNING)
    entries = [*SUBMITTED, STARTED, LAUNCHED, *ended("yielded", "asked to leave", action)]
    return fabricate(tmp_path, entries=entries)


def test_a_run_that_is_just_being_held_is_released_when_it_is(
    tmp_path: Path, slurm: FakeSlurm, virtual_clock: VirtualClock
) -> None:
    """Else the answer is that it runs already, and it stays held."""
    run, held = leaving(tmp_path, slurm), "job requeued in held state"
    virtual_clock.at(2.0, lambda: change(slurm, state=JobState.PENDING, reason=held))
    assert control.resume(run, slurm).message.startswith("Released")
    assert virtual_clock.passed_seconds == 2.0 and slurm.records[1].reason == "None"


@pytest.mark.parametrize("action", ["stop", "hold"])
def test_a_run_that_is_just_stopping_is_submitted_again(
    tmp_path: Path, slurm: FakeSlurm, action: str, virtual_clock: VirtualClock
) -> None:
    """Also when Slurm refuses to hold it."""
    run = leaving(tmp_path, slurm, action)
    virtual_clock.at(3.0, lambda: change(slurm, state=JobState.FAILED))
    assert control.resume(run, slurm).job_id == 2


def test_a_run_that_does_not_leave_is_not_waited_for_forever(
    tmp_path: Path, slurm: FakeSlurm, virtual_clock: VirtualClock
) -> None:
    with pytest.raises(UsageError, match="has not left") as caught:
        control.resume(leaving(tmp_path, slurm), slurm)
    assert caught.value.hint and virtual_clock.passed_seconds == 60.0


def test_a_run_that_was_released_already_is_not_waited_for(
    tmp_path: Path, slurm: FakeSlurm, virtual_clock: VirtualClock
) -> None:
    """Its job waits in the queue, and the hold is still the supervisor's newest decision."""
    run = leaving(tmp_path, slurm)
    change(slurm, state=JobState.PENDING, reason="Priority")
    answer = control.resume(run, slurm)
    assert not answer.changed and "waiting in the queue already" in answer.message
    assert not virtual_clock.pauses


def test_an_attempt_after_a_hold_is_not_waited_for(
    tmp_path: Path, slurm: FakeSlurm, virtual_clock: VirtualClock
) -> None:
    run = leaving(tmp_path, slurm)
    run.ledger.append(EventKind.ATTEMPT_STARTED, job_id=1, restart_count=1)
    assert not control.resume(run, slurm).changed and not virtual_clock.pauses


def test_an_administrators_hold_is_told_in_slurms_words(
    waiting: RunFiles, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: int) -> None:
        raise SlurmRefusedError("Access/permission denied")

    change(slurm, reason="JobHeldAdmin")
    monkeypatch.setattr(slurm, "release", refuse)
    with pytest.raises(SlurmRefusedError, match="denied"):
        control.resume(waiting, slurm)


# -- a run that is over ------------------------------------------------------------------------


def over(tmp_path: Path, slurm: FakeSlurm, cause: str = "crash") -> RunFiles:
    change(slurm, state=JobState.FAILED)
    return fabricate(
        tmp_path, entries=[*SUBMITTED, STARTED, LAUNCHED, *ended(cause, "boom", "stop")]
    )


@pytest.mark.parametrize("verb", [control.stop, control.hold, control.save])
def test_nothing_is_asked_of_a_run_that_is_over(
    tmp_path: Path, slurm: FakeSlurm, verb: Verb
) -> None:
    run = over(tmp_path, slurm)
    with pytest.raises(UsageError) as caught:
        verb(run, slurm)
    assert caught.value.hint
    assert files(run) == [] and audit(run) == []


def test_a_second_stop_says_that_it_has_stopped(tmp_path: Path, slurm: FakeSlurm) -> None:
    answer = control.stop(over(tmp_path, slurm, "yielded"), slurm)
    assert not answer.changed and "stopped already: boom" in answer.message


def test_resume_submits_it_again_and_old_requests_do_not_stop_it(
    tmp_path: Path, slurm: FakeSlurm
) -> None:
    run = over(tmp_path, slurm)
    for kind in KINDS:
        request_path(run.layout, kind).touch()
    answer = control.resume(run, slurm, reason="fixed")
    assert answer.job_id == 2 and slurm.records[2].state is JobState.PENDING
    assert files(run) == []
    assert (audit(run)[-1].action, audit(run)[-1].reason) == ("resume", "fixed")


def test_resubmit_forgets_old_requests_too(tmp_path: Path, slurm: FakeSlurm) -> None:
    run = over(tmp_path, slurm)
    control.ask(run, "stop-now")
    resubmit(run, slurm)  # type: ignore[arg-type]
    assert files(run) == []


@pytest.mark.parametrize("verb", [control.stop, control.hold, control.save, control.resume])
def test_a_run_that_is_done_is_left_alone(tmp_path: Path, slurm: FakeSlurm, verb: Verb) -> None:
    run = fabricate(tmp_path, done=True)
    with pytest.raises(UsageError, match="is done"):
        verb(run, slurm)
    assert files(run) == [] and audit(run) == []


# -- waiting for a save ------------------------------------------------------------------------


def test_waiting_for_a_save_wants_one_of_after_the_request(
    running: RunFiles, slurm: FakeSlurm, virtual_clock: VirtualClock
) -> None:
    """Step 20 is being published when the save is asked for at step 23, and then that of a step
    that was saved before the request was seen."""
    after_step = control.step_now(running.layout)
    assert after_step == 23
    control.save(running, slurm)
    virtual_clock.at(1.0, lambda: published(running, 20))
    virtual_clock.at(2.0, lambda: published(running, 24))
    virtual_clock.at(3.0, running.layout.save_request.unlink)
    assert control.wait_for_save(running, slurm, after_step, 60.0) == 24
    assert virtual_clock.passed_seconds == 3.0


def test_waiting_ends_with_the_time_or_the_run(
    running: RunFiles, slurm: FakeSlurm, virtual_clock: VirtualClock
) -> None:
    with pytest.raises(TimeoutError):
        control.wait_for_save(running, slurm, 23, 100.0)
    assert virtual_clock.passed_seconds == 100.0
    change(slurm, state=JobState.FAILED)
    with pytest.raises(RunFailedError, match="does not run any more"):
        control.wait_for_save(running, slurm, 23, 60.0)


# -- files and words ---------------------------------------------------------------------------


def test_words_of_people_are_one_short_printable_line(running: RunFiles, slurm: FakeSlurm) -> None:
    control.stop(running, slurm, reason="a\nb\x1b[31m" + "x" * 500)
    (line,) = audit(running)
    assert line.reason is not None and line.reason.startswith("a b?[31mx")
    assert len(line.reason) == 160 and line.reason.isprintable()
    request = read_request(running.layout)
    assert request is not None and line.reason[:100] in request.by


def test_the_user_is_not_taken_from_the_environment(
    running: RunFiles, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.setenv(variable, "mallory")
    control.save(running, slurm)
    assert audit(running)[0].user == ME


def test_links_in_the_control_directory_are_not_followed(
    running: RunFiles, slurm: FakeSlurm, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    running.layout.stop_now_request.symlink_to(victim)
    control.ask(running, "stop-now")
    assert victim.read_text() == "precious" and not running.layout.stop_now_request.is_symlink()
    running.layout.hold_request.symlink_to(victim)
    assert take_back(running.layout) == ("stop-now", "hold")
    assert victim.exists()


def test_a_member_who_does_not_own_the_ledger_can_still_ask(
    running: RunFiles, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deny(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("hpctrain.records.ledger.append_line", deny)
    control.stop(running, slurm, reason="on call")
    assert running.layout.stop_request.read_text() == f"{ME} (on call)\n"


def test_what_cannot_be_removed_is_told(running: RunFiles) -> None:
    running.layout.hold_request.mkdir()
    with pytest.raises(UsageError, match="cannot be removed"):
        take_back(running.layout)
