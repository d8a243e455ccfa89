"""What is asserted about every fault: cause, action, resumed step, and how long it took.

Belongs here: the judgement and the row that it gives in docs/reliability.md. Does not belong here:
bringing the fault about (see `rehearsal` and `faulty_trainer`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rehearsal import Rehearsal

from hpctrain.checkpoints.discover import checkpoints
from hpctrain.records.ledger import Event, EventKind
from hpctrain.records.run_records import read_metrics

Entry = dict[str, object]


@dataclass(frozen=True)
class Fault:
    """One row of the report: `row` of the fault table, and what was done to the run."""

    row: int
    words: str


@dataclass(frozen=True)
class Recovery:
    """What became of one launch that a fault ended, and of the launch after it."""

    cause: str
    action: str
    resumed_step: int
    lost_steps: int
    seconds: float
    end: Event
    start: Event


# What Slurm does when it ends the job: the supervisor may have a moment to say so, or none.
BY_SLURM = ("leave", "requeue", "restarted by Slurm")


class Survival:
    """Collects what a test has shown; `report` takes the entries when the test is over."""

    def __init__(self, report: Callable[[str, Entry], None], test: str) -> None:
        self._report = report
        self._test = test
        self._entries: list[Entry] = []

    def recovered(
        self,
        rehearsal: Rehearsal,
        fault: Fault,
        *,
        cause: str | tuple[str, ...],
        action: str | tuple[str, ...],
        epoch: int | None = None,
        resumed_step: int | None = None,
    ) -> Recovery:
        """The launch `epoch` (default: the newest) ended by `cause`, the next one resumed from the
        newest checkpoint that had been verified by then, and has trained a step.

        Where Slurm and the supervisor may both be first to act, `action` has both endings, and
        `cause` where the evidence may come in either order.
        `resumed_step`: the next launch began there, where what was wrong with that checkpoint
        shows only when it is loaded.
        """
        epoch = rehearsal.epoch if epoch is None else epoch
        rehearsal.wait(
            lambda: any(row.epoch > epoch for row in read_metrics(rehearsal.run.layout)),
            f"training again after {fault.words}",
        )
        found = recovery(rehearsal, epoch)
        actions = (action,) if isinstance(action, str) else action
        causes = (cause,) if isinstance(cause, str) else cause
        assert found.cause in causes and found.action in actions, f"{found}\n{rehearsal.logs()}"
        expected = newest_verified(rehearsal, epoch) if resumed_step is None else resumed_step
        assert found.resumed_step == expected, rehearsal.logs()
        self._note(rehearsal, fault, found)
        return found

    def ended(
        self, rehearsal: Rehearsal, fault: Fault, *, cause: str, action: str, why: str
    ) -> Event:
        """The run is over because of the fault, and says why in words that contain `why`."""
        row = rehearsal.wait_till_over()
        assert row.state.over and row.state.name != "DONE", rehearsal.logs()
        assert why in row.reason, f"{row.reason}\n{rehearsal.logs()}"
        end = rehearsal.events(EventKind.LAUNCH_ENDED)[-1]
        acted = rehearsal.events(EventKind.ACTION)[-1]
        assert (end.cause, acted.action) == (cause, action), rehearsal.logs()
        entry = self._entry(fault, cause=cause, action=action)
        rehearsal.judged.append(entry)
        return end

    def shown(self, fault: Fault, *, cause: str = "", action: str = "", **facts: object) -> None:
        """Something that ends no launch was asserted by the test itself."""
        self._entry(fault, cause=cause, action=action, **facts)

    def hand_in(self) -> None:
        for entry in self._entries:
            self._report("reliability", entry)

    def _note(self, rehearsal: Rehearsal, fault: Fault, found: Recovery) -> None:
        entry = self._entry(
            fault,
            cause=found.cause,
            action=found.action,
            resumed_step=found.resumed_step,
            lost_steps=found.lost_steps,
            seconds=round(found.seconds, 1),
        )
        rehearsal.judged.append(entry)

    def _entry(self, fault: Fault, **facts: object) -> Entry:
        entry: Entry = {"row": fault.row, "fault": fault.words, "test": self._test, **facts}
        self._entries.append(entry)
        return entry


def recovery(rehearsal: Rehearsal, epoch: int) -> Recovery:
    """Put together from the ledger and the metrics, after the next launch has trained a step."""
    events = rehearsal.run.ledger.events()
    started = next(index for index, event in _launches(events) if event.epoch == epoch)
    index, start = next((i, e) for i, e in _launches(events) if (e.epoch or 0) > epoch)
    between = events[started:index]
    ends = [e for e in between if e.event in (EventKind.LAUNCH_ENDED, EventKind.ATTEMPT_LOST)]
    actions = [e.action for e in between if e.event is EventKind.ACTION]
    assert ends, f"nobody says how launch {epoch} ended\n{rehearsal.logs()}"
    rows = read_metrics(rehearsal.run.layout)
    before = [row for row in rows if row.epoch <= epoch]
    first_after = next(row for row in rows if row.epoch > epoch)
    resumed_step = start.resume_step or 0
    return Recovery(
        cause=str(ends[0].cause),
        action=str(actions[0]) if actions else "restarted by Slurm",
        resumed_step=resumed_step,
        lost_steps=max(before[-1].step - resumed_step, 0) if before else 0,
        seconds=first_after.time - before[-1].time if before else 0.0,
        end=ends[0],
        start=start,
    )


def _launches(events: list[Event]) -> Iterator[tuple[int, Event]]:
    for index, event in enumerate(events):
        if event.event is EventKind.LAUNCH_STARTED:
            yield index, event


def newest_verified(rehearsal: Rehearsal, epoch: int, before: float = 0.0) -> int:
    """Read byte by byte, not from what the supervisor says: the newest good checkpoint that a
    launch up to `epoch` has published; 0 if there is none. `before`: when the next launch began,
    for which the supervisor may have published what that one has left complete."""
    found = checkpoints(rehearsal.run.layout.checkpoints, "sha256")
    return max(
        (
            one.step
            for one in found
            if one.good
            and one.manifest
            and (one.manifest.epoch <= epoch or one.manifest.time <= before)
        ),
        default=0,
    )


def flip_a_byte(path: Path) -> None:
    """Silent corruption: the size stays."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
