"""Describes one run: its attempts, launches, verdicts, actions, checkpoints and requests.

Belongs here: reading the history from ledger and saves. Does not belong here: making requests
(`control`), explaining the present state (`why`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pydantic import BaseModel, ConfigDict

from hpctrain.checkpoints.discover import checkpoints
from hpctrain.records.find import RunFiles
from hpctrain.records.ledger import Event, EventKind
from hpctrain.records.run_records import SaveRecord, read_saves
from hpctrain.records.software import SoftwareRecord, of_newest_launch, read_software
from hpctrain.records.speed_checks import SpeedCheck, read_speed_checks
from hpctrain.records.tracking import tracking_commands
from hpctrain.runs.evaluations import EvaluatedDocument, evaluation_rows
from hpctrain.runs.notify import NoticeState, notice_states
from hpctrain.runs.state import ENDS_RUN, RunState, judge_without_slurm

# What the ledger calls the withdrawal of pending requests.
TAKE_BACK = "take back"
# What a person has accepted or removed, as words of the command line.
_DONE_AT_ONCE = {
    EventKind.FRESH_START_ACCEPTED: "resume --from-scratch",
    EventKind.DATA_ACCEPTED: "resume --accept-data",
    EventKind.CLEANED: "clean",
    EventKind.UPGRADED: "upgrade",
}


class LaunchStory(BaseModel):
    """One srun of the trainer."""

    model_config = ConfigDict(frozen=True)

    epoch: int
    resume_step: int | None
    last_step: int | None = None
    checkpoint_step: int | None = None
    cause: str | None = None
    reason: str | None = None
    evidence: tuple[str, ...] = ()
    seconds: float | None = None


class AttemptStory(BaseModel):
    """One start of the job by Slurm."""

    model_config = ConfigDict(frozen=True)

    job_id: int | None
    restart_count: int | None
    nodes: str | None
    start_time: float
    launches: tuple[LaunchStory, ...]
    signals: tuple[str, ...] = ()
    stop_time: str | None = None
    action: str | None = None
    reason: str | None = None
    placement: str | None = None
    placement_details: tuple[str, ...] = ()
    tracking_failure: str | None = None
    metrics_failure: str | None = None


class CheckpointStory(BaseModel):
    """One checkpoint on disk."""

    model_config = ConfigDict(frozen=True)

    step: int
    total_bytes: int | None
    problem: str | None


class RequestStory(BaseModel):
    """A person's request, at `asked_time` (seconds since the epoch); `answer` None: pending."""

    model_config = ConfigDict(frozen=True)

    asked_time: float
    user: str | None
    action: str
    reason: str | None = None
    answer: str | None = None
    answer_seconds: float | None = None


class SoftwareChange(BaseModel):
    """What a launch was the first to find otherwise than the one before, or than the run's lock."""

    model_config = ConfigDict(frozen=True)

    epoch: int
    changes: tuple[str, ...]


class RunStory(EvaluatedDocument):
    """A run from its ledger; `state` is None where only Slurm could tell (see `status`)."""

    model_config = ConfigDict(frozen=True)

    run_id: str
    directory: str
    script: str
    done: bool
    state: RunState | None
    reason: str | None
    attempts: tuple[AttemptStory, ...]
    checkpoints: tuple[CheckpointStory, ...]
    asked: tuple[RequestStory, ...] = ()
    software: tuple[SoftwareRecord, ...] = ()
    software_changes: tuple[SoftwareChange, ...] = ()
    speed: SpeedCheck | None = None
    notices: tuple[NoticeState, ...] = ()
    tracking: tuple[str, ...] = ()


def describe(run: RunFiles) -> RunStory:
    """Describe the run's history; reads the run directory only."""
    found = checkpoints(run.layout.checkpoints)
    events, done = run.ledger.events(), run.layout.done.exists()
    judged = judge_without_slurm(events, done=done)
    starts = [i for i, event in enumerate(events) if event.event is EventKind.ATTEMPT_STARTED]
    checks, software = read_speed_checks(run.layout), read_software(run.layout)
    ends = [*starts[1:], len(events)]  # one too many if nothing has started yet
    return RunStory(
        run_id=run.run_id,
        directory=str(run.layout.directory),
        script=str(run.layout.script),
        done=done,
        state=None if judged.state is RunState.UNKNOWN else judged.state,
        reason=judged.reason or None if judged.state is not RunState.UNKNOWN else None,
        attempts=tuple(
            _attempt(events[start:end], events[end:])
            for start, end in zip(starts, ends, strict=False)
        ),
        checkpoints=tuple(
            CheckpointStory(
                step=item.step,
                total_bytes=item.manifest.total_bytes if item.manifest else None,
                problem=item.problem,
            )
            for item in found
        ),
        asked=tuple(request_history(events, read_saves(run.layout))),
        software=tuple(of_newest_launch(software)),
        software_changes=tuple(software_changes(software)),
        speed=checks[-1] if checks else None,
        notices=tuple(notice_states(run)),
        tracking=tuple(tracking_commands(run.layout)),
        evaluations=evaluation_rows(run),
    )


def software_changes(records: Sequence[SoftwareRecord]) -> Iterator[SoftwareChange]:
    """List the launches that began with another hpctrain or other software than those before."""
    known: tuple[str, ...] = ()
    code: str | None = None
    launches = {record.epoch: record for record in reversed(records)}  # rank 0's is the first
    for epoch, record in sorted(launches.items()):
        found, facts = [], record.facts
        own = f"{facts.hpctrain} ({facts.code})" if facts.code else facts.hpctrain
        if code is not None and own != code:
            found.append(f"hpctrain {code} -> {own}")
        found += [change for change in record.changed if change not in (*known, *found)]
        code, known = own, record.changed
        if found:
            yield SoftwareChange(epoch=epoch, changes=tuple(found))


def _attempt(events: list[Event], later: list[Event]) -> AttemptStory:
    """Describe one attempt; the end of a lost one is recorded when a later attempt starts.

    A supervisor that outlives its attempt still writes after the next one has begun.
    """
    start = events[0]

    def is_same(event: Event) -> bool:
        return (event.job_id, event.restart_count) == (start.job_id, start.restart_count)

    about_no_attempt = (EventKind.SUBMITTED, EventKind.ADOPTED)
    events = [
        event
        for event in events
        if event.job_id is None or event.event in about_no_attempt or is_same(event)
    ]
    lost = [e for e in (*events, *later) if e.event is EventKind.ATTEMPT_LOST and is_same(e)]
    actions = [event for event in events if event.event is EventKind.ACTION]
    last = actions[-1] if actions else next(iter(lost), None)
    placed = next((e for e in reversed(events) if e.event is EventKind.PLACED), None)
    untracked = next((e for e in events if e.event is EventKind.TRACKING_FAILED), None)
    unexported = next((e for e in events if e.event is EventKind.METRICS_FAILED), None)
    ends = {event.epoch: event for event in events if event.event is EventKind.LAUNCH_ENDED}
    launches = []
    for begin in events:
        if begin.event is not EventKind.LAUNCH_STARTED or begin.epoch is None:
            continue
        launch = LaunchStory(epoch=begin.epoch, resume_step=begin.resume_step)
        if (end := ends.get(begin.epoch)) is not None:
            update = {
                "last_step": end.last_step,
                "checkpoint_step": end.checkpoint_step,
                "cause": end.cause,
                "reason": end.reason,
                "evidence": end.evidence,
                "seconds": end.time - begin.time,
            }
            launch = launch.model_copy(update=update)
        launches.append(launch)
    timed = [event for event in events if event.event is EventKind.STOP_TIMED]
    return AttemptStory(
        job_id=start.job_id,
        restart_count=start.restart_count,
        nodes=start.nodes,
        start_time=start.time,
        launches=tuple(launches),
        signals=tuple(e.signal or "" for e in events if e.event is EventKind.SIGNAL),
        stop_time=timed[-1].reason if timed else None,
        action=(last.action or last.cause) if last else None,
        reason=last.reason if last else None,
        placement=placed.reason if placed else None,
        placement_details=placed.evidence if placed else (),
        tracking_failure=untracked.reason if untracked else None,
        metrics_failure=unexported.reason if unexported else None,
    )


def request_history(events: Sequence[Event], saves: Sequence[SaveRecord]) -> list[RequestStory]:
    """List all requests, and what was accepted or removed, in the order of the ledger."""
    stories = []
    for number, event in enumerate(events):
        if event.event is not EventKind.CONTROL and event.event not in _DONE_AT_ONCE:
            continue
        time, answer = _answer(event, events[number + 1 :], saves) or (None, None)
        stories.append(
            RequestStory(
                asked_time=event.time,
                user=event.user,
                action=_DONE_AT_ONCE.get(event.event, event.action or ""),
                reason=event.reason,
                answer=answer,
                answer_seconds=None if time is None else max(0.0, time - event.time),
            )
        )
    return stories


def _answer(
    event: Event, later: Sequence[Event], saves: Sequence[SaveRecord]
) -> tuple[float, str] | None:
    """Find when and how a request was answered; None if it has not been followed yet."""
    if event.event in _DONE_AT_ONCE:
        return event.time, "; ".join(event.evidence) or f"{event.last_step or 0:,} steps given up"
    if event.action == TAKE_BACK:
        return event.time, "withdrawn"
    if event.action == "save":
        after = [save for save in saves if save.time >= event.time]
        return (after[0].time, f"step {after[0].step:,} is saved") if after else None
    resumes = event.action == "resume"
    for one in later:
        if one.event is EventKind.CONTROL and one.action != "save":
            return one.time, f"asked to {one.action} instead"
        if resumes and one.event is EventKind.SUBMITTED:
            return one.time, f"submitted as job {one.job_id}"
        if resumes and one.event is EventKind.ATTEMPT_STARTED:
            return one.time, "started again"
        if not resumes and one.event is EventKind.ACTION and one.action in ENDS_RUN:
            return one.time, f"{one.action}: {one.reason}"
    return None
