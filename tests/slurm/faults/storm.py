"""A storm: faults of both tables at random steps of several runs at a time.

Each run has dice of its own, so the same seed throws the same strikes at the same steps of a run,
whatever the others do. The steps are uniform over the run, as those of a Poisson process of so
many events, so that a strike may fall into a save, a start, or right after the one before. Belongs
here: drawing, throwing, waiting for what must come after, and noticing what must not. Does not
belong here: the strikes (see `strikes`), what is said meanwhile (see `storm_witness`), the sum at
the end (see `storm_report`).
"""

from __future__ import annotations

import random
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import get_args

from oracle import EVALUATE_EVERY_STEPS
from rehearsal import MADE_UP, SAVE_EVERY_STEPS, PlannedFault
from strikes import BY_NAME, CANCELS, STRIKES, After, Strike
from survival import newest_verified
from targets import DeedKind, Field, Row, Target

from hpctrain.records.ledger import Event, EventKind
from hpctrain.records.run_records import read_metrics
from hpctrain.sandbox import faults
from hpctrain.sandbox.processes import await_condition
from hpctrain.spec.supervision import BudgetName

MEAN_GAP_STEPS = 25
_HEAD_STEPS = SAVE_EVERY_STEPS + 2
_TAIL_STEPS = 60
_PATIENCE_SECONDS = 400.0
# Slurm shows no job for a moment between two; nobody else takes this long to submit a run again.
_GONE_SECONDS = 6.0
_CANCELLED_SHARE = 0.25
_LEAST_STRIKES_OF_CANCELLED = 3

# A storm would be over after a few faults if the run might not fail so often.
PATIENT = (
    "supervise.failures_without_progress=100000",
    "supervise.storm_failures=100000",
    "supervise.stall=15s",
    "supervise.setup_stall=45s",
    *(f"supervise.budgets.{cause}=100000" for cause in get_args(BudgetName)),
)
EVALUATIONS = (f"evaluation.every_steps={EVALUATE_EVERY_STEPS}", "evaluation.batches=2")


@dataclass(frozen=True)
class Chosen:
    """One strike of a run: which, and the step that must have been trained before it."""

    name: str
    step: int

    @property
    def strike(self) -> Strike:
        return BY_NAME[self.name]


@dataclass(frozen=True)
class Ordeal:
    """What one run goes through. `seed` makes its dice."""

    name: str
    seed: str
    chosen: tuple[Chosen, ...]

    @property
    def cancelled(self) -> bool:
        return bool(self.chosen) and self.chosen[-1].strike.after is After.OVER


@dataclass(frozen=True)
class Struck:
    """One strike that was survived. `causes` are those of all launches that it ended."""

    run_id: str
    name: str
    step: int
    causes: tuple[str, ...]
    resumed_step: int | None
    lost_steps: int
    seconds: float


@dataclass
class Fate:
    """What became of one run; `wrong` must be empty."""

    ordeal: Ordeal
    target: Target | None = None
    struck: list[Struck] = field(default_factory=list)
    missed: list[Chosen] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def all_wrong(self) -> list[str]:
        told = self.wrong + (self.target.wrong if self.target else [])
        return [f"{self.ordeal.name}: {words}" for words in told]


# -- drawing -------------------------------------------------------------------------------------


def draw(
    count: int,
    seed: int,
    *,
    runs: int = 1,
    names: Sequence[str] = (),
    gap_steps: float = MEAN_GAP_STEPS,
    cancels: bool = True,
) -> list[Ordeal]:
    """`count` strikes (of `names` only, if given), shared out to so many runs."""
    known = [BY_NAME[name] for name in names] if names else list(STRIKES)
    shares = [count // runs + (number < count % runs) for number in range(runs)]
    steps = steps_for(max(shares, default=0), gap_steps)
    return [
        _ordeal(f"storm-{number}", f"{seed}-{number}", share, known, steps, cancels=cancels)
        for number, share in enumerate(shares)
    ]


def steps_for(strikes: int, gap_steps: float = MEAN_GAP_STEPS) -> int:
    """The length of every run: whole save intervals, and some steps after the last strike."""
    needed = _HEAD_STEPS + round(strikes * gap_steps) + _TAIL_STEPS
    return -(-needed // SAVE_EVERY_STEPS) * SAVE_EVERY_STEPS


def _ordeal(
    name: str, seed: str, count: int, known: list[Strike], steps: int, *, cancels: bool
) -> Ordeal:
    dice = random.Random(f"draw-{seed}")
    drawn = dice.choices(known, [strike.weight for strike in known], k=count)
    last = max(_HEAD_STEPS, steps - _TAIL_STEPS)
    at = sorted(dice.randint(_HEAD_STEPS, last) for _ in drawn)
    if cancels and count >= _LEAST_STRIKES_OF_CANCELLED and dice.random() < _CANCELLED_SHARE:
        drawn[-1] = dice.choice(CANCELS)
    chosen = tuple(Chosen(one.name, step) for one, step in zip(drawn, at, strict=True))
    return Ordeal(name, seed, chosen)


# -- throwing ------------------------------------------------------------------------------------


def rage(
    field: Field,
    ordeals: Iterable[Ordeal],
    steps: int,
    *,
    at_a_time: int = 1,
    pace_seconds: float = 0.0,
    gates: bool = False,
    overrides: Sequence[str] = (),
    joined: Callable[[Target], None] = lambda target: None,
    tell: Callable[[Struck], None] = lambda struck: None,
) -> list[Fate]:
    """Send so many runs at a time through their ordeals; returns when all are over.

    `pace_seconds` makes each step last longer. With `gates` a rank waits near the step of each
    strike until that has been thrown: for runs that are too short to be met otherwise.
    """
    fates = [Fate(ordeal) for ordeal in ordeals]
    waiting = iter(fates)
    turn = threading.Lock()

    def lane() -> None:
        while True:
            with turn:
                fate = next(waiting, None)
            if fate is None:
                return
            _Passage(field, fate, steps, pace_seconds, gates, tuple(overrides), joined, tell).go()

    lanes = [threading.Thread(target=lane, name=f"lane-{n}", daemon=True) for n in range(at_a_time)]
    for one in lanes:
        one.start()
    for one in lanes:
        one.join()
    return fates


@dataclass
class _Passage:
    """One run on its way through its ordeal."""

    field: Field
    fate: Fate
    steps: int
    pace_seconds: float
    gates: bool
    overrides: tuple[str, ...]
    joined: Callable[[Target], None]
    tell: Callable[[Struck], None]
    _gone_since: float | None = None
    _held_since: float | None = None
    _looked_at: float = 0.0

    def go(self) -> None:
        try:
            target = self._start()
            for number, chosen in enumerate(self.fate.ordeal.chosen):
                if not self._come_to(chosen):
                    self.fate.missed.append(chosen)
                    continue
                self._throw(chosen, number)
            target.rehearsal.say("over")
            self._finish()
        except Exception:
            self.fate.wrong.append(f"the storm itself failed: {traceback.format_exc()}")

    @property
    def target(self) -> Target:
        assert self.fate.target is not None
        return self.fate.target

    def _start(self) -> Target:
        ordeal = self.fate.ordeal
        planned = [PlannedFault(epoch=0, rank=1, step=1, do="pace", seconds=self.pace_seconds)]
        if self.gates:
            planned += [
                PlannedFault(epoch=0, rank=1, step=one.step + 2, do="await_word", text=str(number))
                for number, one in enumerate(ordeal.chosen)
            ]
        words = (
            f"name={ordeal.name}",
            f"budget.steps={self.steps}",
            MADE_UP,
            *(*EVALUATIONS, *PATIENT),
        )
        with self.field.with_controller():
            rehearsal = self.field.stage.start(*words, *self.overrides, planned=planned)
        self.fate.target = Target(self.field, rehearsal, random.Random(ordeal.seed), planned)
        self.field.collide(rehearsal.job_id)
        self.joined(self.target)
        return self.target

    # -- one strike --------------------------------------------------------------------------------

    def _come_to(self, chosen: Chosen) -> bool:
        """The step is trained, and the newest launch has begun to train: a fault before that
        strikes the one before, too. False when the run is over."""
        target = self.target

        def there() -> bool:
            row = target.newest_row()
            come = row is not None and row.step >= chosen.step
            return come and target.trained_epoch == target.rehearsal.epoch

        return self._until(there, f"at step {chosen.step}") and not target.done

    def _throw(self, chosen: Chosen, number: int) -> None:
        target, strike = self.target, chosen.strike
        if not strike.possible(target):
            self.fate.missed.append(chosen)
            return
        target.follow()
        time.sleep(target.dice.uniform(0, 0.3))
        before, began_at = target.rehearsal.epoch, time.monotonic()
        try:
            strike.bring_about(target)
        except AssertionError as error:
            if not target.done:
                first = (str(error).splitlines() or ["no reason"])[0]
                self.fate.wrong.append(f"{chosen}: could not be brought about: {first}")
        struck_at = target.newest_row()  # before the gate opens: the next one ends all progress
        target.rehearsal.say(str(number))
        if strike.after is not After.OVER:
            self._until(lambda: self._recovered(strike, before, struck_at), f"after {chosen}")
            self._care()
        self._take_down(chosen, before, time.monotonic() - began_at)

    def _recovered(self, strike: Strike, before: int, struck_at: Row | None) -> bool:
        if self.target.trained_epoch > before:
            return True
        row = self.target.newest_row()
        went_on = row is not None and (struck_at is None or row.step > struck_at.step)
        return strike.after is After.PROGRESS and went_on

    def _care(self) -> None:
        """What the administrators do in the end."""
        while self.target.aftercare:
            self.target.aftercare.pop()()
        self.field.resume_nodes()

    # -- waiting -----------------------------------------------------------------------------------

    def _until(self, reached: Callable[[], bool], what: str) -> bool:
        """Wait; True when it is reached, or the run done. Sees to a run that stands still."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not reached():
            if self.target.done:
                return True
            if time.monotonic() > deadline:
                self.fate.wrong.append(f"never {what}: {self.target.rehearsal.status()}")
                return False
            self._look_after_it()
            time.sleep(0.15)
        return True

    def _look_after_it(self) -> None:
        """A run that has left the queue without being done, or is held in it, by nobody's wish."""
        now = time.monotonic()
        if now - self._looked_at < 1.0:
            return
        self._looked_at = now
        jobs = self.target.jobs()
        if jobs is None or any(job.state == "COMPLETING" for job in jobs):
            self._gone_since = self._held_since = None
            return
        live = [job for job in jobs if job.is_live]
        self._gone_since = None if live else self._gone_since or now
        held = bool(live) and all(job.is_held for job in live)
        self._held_since = (self._held_since or now) if held else None
        if self._gone_since is not None and now - self._gone_since > _GONE_SECONDS:
            self._ended_unasked(jobs)
        if self._held_since is not None and now - self._held_since > _GONE_SECONDS:
            self._held_unasked()

    def _ended_unasked(self, jobs: Sequence[object]) -> None:
        """Question two: only what was asked for, or proven, may end a run."""
        self._gone_since = None
        if self.target.done:
            return
        row = self.target.rehearsal.status()
        since = self._last_sign()
        forgotten = not jobs and self._slurmctld_was_away(since)
        if not forgotten and not self.target.has(DeedKind.SUPERVISOR_KILLED, since=since):
            self.fate.wrong.append(
                f"ended without being asked: {row.state}, {row.reason}; {self._last_words()}"
            )
        answer = self.target.hpctrain("resume")
        self.target.did(DeedKind.RESUMED)
        if answer.exit_code != 0:
            self.fate.wrong.append(f"and could not be resumed: {answer.stderr.strip()}")
            self.target.hpctrain("watch", "--act", "--grace", "0s", run=False)

    def _held_unasked(self) -> None:
        self._held_since = None
        reason = "; ".join(job.reason for job in self.target.live_jobs())
        if "launch failed" not in reason:  # what Slurm itself holds is released by `watch --act`
            self.fate.wrong.append(f"held without being asked: {reason}; {self._last_words()}")
        self.target.did(DeedKind.RESUMED)
        self.target.hpctrain("watch", "--act", "--grace", "0s", run=False)
        self.target.hpctrain("resume")

    def _last_sign(self) -> float:
        row = self.target.newest_row()
        return 0.0 if row is None else row.time

    def _slurmctld_was_away(self, since: float) -> bool:
        return any(deed.until >= since - _GONE_SECONDS for deed in self.field.away)

    def _last_words(self) -> str:
        events = self.target.rehearsal.run.ledger.events()
        told = [e for e in events if e.event in (EventKind.LAUNCH_ENDED, EventKind.ACTION)]
        return "; ".join(f"{e.cause or e.action}: {e.reason}" for e in told[-2:])

    # -- the end -----------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Done, or cancelled as it was asked to be, and out of the queue."""
        target = self.target
        if not self.fate.ordeal.cancelled:
            self._until(lambda: target.done, "done")
        if not await_condition(target.has_left, _PATIENCE_SECONDS):
            self.fate.wrong.append(f"is over and still in the queue: {target.live_jobs()}")
        self._care()

    # -- taking down -------------------------------------------------------------------------------

    def _take_down(self, chosen: Chosen, before: int, seconds: float) -> None:
        """By the ledger and the metrics; and question one: it went on from what was verified."""
        target = self.target
        events = target.rehearsal.run.ledger.events()
        starts = [
            event
            for event in events
            if event.event is EventKind.LAUNCH_STARTED and (event.epoch or 0) > before
        ]
        rows = [
            row.step for row in read_metrics(target.rehearsal.run.layout) if row.epoch <= before
        ]
        resumed_step = (starts[-1].resume_step or 0) if starts else None
        if starts and not target.done:
            newest = starts[-1]
            verified = newest_verified(target.rehearsal, (newest.epoch or 1) - 1, newest.time)
            if resumed_step != verified:
                self.fate.wrong.append(f"{chosen}: resumed at {resumed_step}, not at {verified}")
        self.fate.struck.append(
            Struck(
                run_id=target.run_id,
                name=chosen.name,
                step=chosen.step,
                causes=_causes(events, before),
                resumed_step=resumed_step,
                lost_steps=max(rows[-1] - resumed_step, 0)
                if rows and resumed_step is not None
                else 0,
                seconds=seconds,
            )
        )
        self.tell(self.fate.struck[-1])


def _causes(events: list[Event], before: int) -> tuple[str, ...]:
    """Of the launches that ended since, `before` being the newest of then."""
    ends = (EventKind.LAUNCH_ENDED, EventKind.ATTEMPT_LOST)
    begun = next(
        (
            number
            for number, event in enumerate(events)
            if event.event is EventKind.LAUNCH_STARTED and event.epoch == before
        ),
        len(events),
    )
    return tuple(str(event.cause) for event in events[begun:] if event.event in ends)


def nobody_is_left(field: Field, targets: Sequence[Target]) -> list[str]:
    """Question two, at the end: no job and no process of a run, and strangers as they were."""
    ids = {target.run_id for target in targets}
    left = [
        f"job {job.job_id} of {target.run_id} is {job.state}"
        for target in targets
        for job in target.live_jobs()
    ]
    for target in targets:
        found = faults.job_processes(field.sandbox, str(target.rehearsal.job_id))
        left += [f"process {one.pid} of {target.run_id}" for one in found if one.rank is not None]
    made = [path.name for path in field.stage.runs.iterdir() if path.is_dir()]
    left += [f"a directory nobody has made: {name}" for name in made if _is_strange(name, ids)]
    return left + field.harmed_strangers()


def _is_strange(name: str, ids: set[str]) -> bool:
    return name.startswith("storm-") and name not in ids
