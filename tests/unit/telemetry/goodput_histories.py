"""Histories of runs for the tests of the account: told by hand, or made up at random."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hpctrain.records.run_records import SaveRecord
from hpctrain.records.step_times import StepTime
from hpctrain.telemetry.timeline import Mark, MarkKind

BEGIN = 1_800_000_000.0


@dataclass
class History:
    """Collects what the ledger and the trainer would say; `clock` is in seconds after BEGIN."""

    clock: float = 0.0
    epoch: int = 0
    attempt: tuple[int, int] = (1, 0)
    marks: list[Mark] = field(default_factory=list)
    steps: list[StepTime] = field(default_factory=list)
    saves: list[SaveRecord] = field(default_factory=list)

    @property
    def now(self) -> float:
        return BEGIN + self.clock

    def after(self, seconds: float) -> History:
        self.clock += seconds
        return self

    def mark(self, kind: MarkKind, cause: str | None = None, *, failure: bool = False) -> History:
        about_launch = kind in (MarkKind.LAUNCH_STARTED, MarkKind.LAUNCH_ENDED)
        if kind is MarkKind.LAUNCH_STARTED:
            self.epoch += 1
        attempt = (None, None) if kind is MarkKind.SUBMITTED else self.attempt
        epoch = self.epoch if about_launch else None
        self.marks.append(Mark(kind, self.now, attempt, epoch, cause, failure))
        return self

    def train(self, first: int, last: int, step_seconds: float = 1.0) -> History:
        for step in range(first, last + 1):
            self.clock += step_seconds
            self.steps.append(StepTime(step, self.epoch, self.now, step_seconds, 7))
        return self

    def save(self, stall_seconds: float, at_once: bool = True) -> History:
        self.saves.append(
            SaveRecord(
                step=self.steps[-1].step,
                epoch=self.epoch,
                time=self.now,
                stall_seconds=stall_seconds,
                publish_seconds=stall_seconds,
                size_bytes=1,
            )
        )
        if at_once:
            self.clock += stall_seconds
        return self


def submitted() -> History:
    """Waits 100 s in the queue and starts in 10 s."""
    history = History().mark(MarkKind.SUBMITTED).after(100).mark(MarkKind.ATTEMPT_STARTED)
    return history.after(4).mark(MarkKind.LAUNCH_STARTED).after(6)


def made_up(seed: int) -> History:
    """A random history, in parts impossible: wrong clocks, torn lines, writers from the past."""
    dice = random.Random(seed)
    history, saved = submitted(), 0
    for _ in range(dice.randrange(1, 8)):
        last = saved + dice.randrange(0, 12)
        history.train(saved + 1, last, dice.choice([0.5, 1.0, 3.0]))
        if last > saved and dice.random() < 0.7:
            history.save(dice.choice([0.0, 2.0, 50.0]), dice.random() < 0.5)
            saved = last if dice.random() < 0.8 else saved
        history.after(dice.choice([0, 1, 700, 4000]))
        _interrupt(history, dice)
    return _damaged(history, dice)


def _interrupt(history: History, dice: random.Random) -> None:
    fate = dice.choice(["relaunch", "requeue", "lost", "stop", "open", "silent"])
    if fate in ("relaunch", "requeue", "stop"):
        history.mark(MarkKind.LAUNCH_ENDED, dice.choice(["crash", "hang"]), failure=True).after(1)
    if fate == "relaunch":
        history.mark(MarkKind.RELAUNCHING).after(5)
    elif fate != "open":
        kind = {"requeue": MarkKind.QUEUED, "stop": MarkKind.STOPPED}.get(fate)
        if kind is not None:
            history.mark(kind)
        history.after(dice.choice([0, 300]))
        if fate == "lost":
            history.mark(MarkKind.ATTEMPT_LOST, "node_failure", failure=True)
        history.attempt = (1, history.attempt[1] + 1)
        history.mark(MarkKind.ATTEMPT_STARTED).after(2)
    history.mark(MarkKind.LAUNCH_STARTED).after(dice.choice([0, 8, 60]))


def _damaged(history: History, dice: random.Random) -> History:
    """Tears lines, sets clocks wrong, and lets an old trainer go on."""
    history.marks = [mark for mark in history.marks if dice.random() > 0.05]
    history.steps = [step for step in history.steps if dice.random() > 0.05]
    wrong = [0.0] * 30 + [-5000.0, 1e5, float("nan"), float("inf"), -1e15]
    history.marks = [
        Mark(m.kind, m.time + dice.choice(wrong), m.attempt, m.epoch, m.cause, m.failure)
        for m in history.marks
    ]
    history.steps = [
        s._replace(
            time=s.time + dice.choice(wrong),
            step_seconds=dice.choice([s.step_seconds] * 20 + wrong),
        )
        for s in history.steps
    ]
    if history.steps and dice.random() < 0.3:
        old = dice.choice(history.steps)
        zombie = [StepTime(old.step + n, old.epoch, history.now + n, 1.0, 7) for n in range(1, 4)]
        place = dice.randrange(len(history.steps) + 1)
        history.steps[place:place] = zombie
    return history
