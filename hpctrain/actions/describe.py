"""Describes one run: its attempts, launches, verdicts, actions and checkpoints."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from hpctrain.actions.audit import AskedStory, asked
from hpctrain.actions.runs import RunFiles
from hpctrain.checkpoints.discover import checkpoints
from hpctrain.store.ledger import Event, EventKind
from hpctrain.store.run_records import read_saves


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
    action: str | None = None
    reason: str | None = None


class CheckpointStory(BaseModel):
    """One checkpoint on disk."""

    model_config = ConfigDict(frozen=True)

    step: int
    total_bytes: int | None
    problem: str | None


class RunStory(BaseModel):
    """A run from its ledger."""

    model_config = ConfigDict(frozen=True)

    run_id: str
    directory: str
    script: str
    done: bool
    attempts: tuple[AttemptStory, ...]
    checkpoints: tuple[CheckpointStory, ...]
    asked: tuple[AskedStory, ...] = ()


def describe(run: RunFiles) -> RunStory:
    """Describe the run's history; reads the run directory only."""
    found = checkpoints(run.layout.checkpoints)
    events = run.ledger.events()
    starts = [i for i, event in enumerate(events) if event.event is EventKind.ATTEMPT_STARTED]
    ends = [*starts[1:], len(events)]  # one too many if nothing has started yet
    return RunStory(
        run_id=run.run_id,
        directory=str(run.layout.directory),
        script=str(run.layout.script),
        done=run.layout.done.exists(),
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
        asked=tuple(asked(events, read_saves(run.layout))),
    )


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
    return AttemptStory(
        job_id=start.job_id,
        restart_count=start.restart_count,
        nodes=start.nodes,
        start_time=start.time,
        launches=tuple(_launches(events)),
        signals=tuple(e.signal or "" for e in events if e.event is EventKind.SIGNAL),
        action=(last.action or last.cause) if last else None,
        reason=last.reason if last else None,
    )


def _launches(events: list[Event]) -> list[LaunchStory]:
    ends = {event.epoch: event for event in events if event.event is EventKind.LAUNCH_ENDED}
    stories = []
    for begin in events:
        if begin.event is not EventKind.LAUNCH_STARTED or begin.epoch is None:
            continue
        end = ends.get(begin.epoch)
        story = LaunchStory(epoch=begin.epoch, resume_step=begin.resume_step)
        if end is not None:
            story = LaunchStory(
                epoch=begin.epoch,
                resume_step=begin.resume_step,
                last_step=end.last_step,
                checkpoint_step=end.checkpoint_step,
                cause=end.cause,
                reason=end.reason,
                evidence=end.evidence,
                seconds=end.time - begin.time,
            )
        stories.append(story)
    return stories
