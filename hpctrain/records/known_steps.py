"""Find out how far a run has trained from its ledger, saves and metrics, without checkpoints.

Checkpoints may be gone: scratch that was purged, a directory that somebody emptied. The other
records decide whether a start at step 0 would lose work. A person may accept that loss; what
was known by then does not count any more. Belongs here: reading these records. Does not belong
here: looking for checkpoints (`hpctrain.checkpoints`), what follows (`hpctrain.supervise`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import Event, EventKind
from hpctrain.records.run_records import Progress, read_record, read_saves, tail_metrics

# Events whose `checkpoint_step` and `resume_step` name a checkpoint that existed.
_NAMING_CHECKPOINTS = frozenset(
    {
        EventKind.RESUME,
        EventKind.LAUNCH_STARTED,
        EventKind.LAUNCH_ENDED,
        EventKind.CHECKPOINT_REJECTED,
        EventKind.ROLLED_BACK,
    }
)


@dataclass(frozen=True)
class KnownSteps:
    """What a run's records contain about its past.

    `saved` maps each source that names a published checkpoint to the newest step that it names;
    `trained` is the last step of the metrics, 0 if there is none.
    """

    saved: dict[str, int]
    trained: int

    @property
    def saved_step(self) -> int:
        """The newest step that was ever published, 0 if no source names one."""
        return max(self.saved.values(), default=0)

    @property
    def sources(self) -> str:
        """`step 40 (saves.jsonl), step 35 (ledger.jsonl)`."""
        return ", ".join(f"step {step} ({source})" for source, step in self.saved.items())


def known_steps(run: RunLayout, events: Sequence[Event]) -> KnownSteps:
    """Collect what is known since a person last accepted a start at step 0, if ever.

    Raises OSError when a record is there and cannot be read.
    """
    accepted = accepted_fresh_start(events)
    since = 0 if accepted is None else accepted.epoch or 0
    later = events
    if accepted is not None:
        later = events[max(i for i, event in enumerate(events) if event is accepted) + 1 :]
    saves = [save.step for save in read_saves(run) if save.epoch > since or accepted is None]
    progress = read_record(run.progress, Progress)
    if progress is not None and accepted is not None and progress.epoch <= since:
        progress = None
    found = {
        run.saves.name: max(saves, default=0),
        run.ledger.name: max(
            (
                max(event.checkpoint_step or 0, event.resume_step or 0)
                for event in later
                if event.event in _NAMING_CHECKPOINTS
            ),
            default=0,
        ),
        run.progress.name: (progress.checkpoint_step or 0) if progress is not None else 0,
    }
    rows = [row for row in tail_metrics(run, 1) if row.epoch > since or accepted is None]
    return KnownSteps(
        saved={source: step for source, step in found.items() if step},
        trained=rows[-1].step if rows else 0,
    )


def accepted_fresh_start(events: Sequence[Event]) -> Event | None:
    """The newest event by which a person accepted that the run starts at step 0 again."""
    for event in reversed(events):
        if event.event is EventKind.FRESH_START_ACCEPTED:
            return event
    return None


def fresh_start_pending(events: Sequence[Event]) -> bool:
    """True if it was accepted and no launch has begun since."""
    for event in reversed(events):
        if event.event is EventKind.LAUNCH_STARTED:
            return False
        if event.event is EventKind.FRESH_START_ACCEPTED:
            return True
    return False
