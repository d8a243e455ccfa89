"""Judge what a rehearsal has seen: launches from the ledger, their steps, and one sentence each.

Pure. Belongs here: what counts as a proof, and its words. Does not belong here: bringing about what
is judged, and waiting for it (`rehearsal`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from hpctrain.base.units import short_bytes, short_duration
from hpctrain.judge.attempts import Launch, launches, rejections
from hpctrain.records.ledger import Event
from hpctrain.records.rehearsals import Proof
from hpctrain.records.run_records import Progress, SaveRecord, StepMetrics
from hpctrain.spec.trainer import ProgressSource, TrainerSpec

START, CHECKPOINT, TARGET = "start", "first checkpoint", "end at its target"
SAVE, RESUME, KILLED = "save on the signal", "resume", "killed rank"
DAMAGED, LOSSES = "truncated checkpoint", "losses after resume"
# In the order in which they are proved, with the level that each belongs to.
TOPICS = {
    START: 0,
    CHECKPOINT: 1,
    TARGET: 0,
    SAVE: 2,
    RESUME: 1,
    KILLED: 0,
    DAMAGED: 1,
    LOSSES: 3,
}


@dataclass(frozen=True)
class TriedLaunch(Launch):
    """One srun of the trainer: its start, what it has reported, and its end.

    `progress` is its newest sign of life, None once another launch has left one.
    """

    rows: tuple[StepMetrics, ...] = ()
    progress: Progress | None = None

    @property
    def epoch(self) -> int:
        assert self.start.epoch is not None, "each launch has one"
        return self.start.epoch

    @property
    def resume_step(self) -> int:
        return self.start.resume_step or 0

    @property
    def first_step(self) -> int | None:
        return self.rows[0].step if self.rows else None

    @property
    def last_step(self) -> int:
        """The newest step that it is known to have trained; 0 if none is."""
        known = [self.rows[-1].step] if self.rows else []
        known += [self.end.last_step] if self.end is not None and self.end.last_step else []
        known += [self.progress.step] if self.progress is not None else []
        return max(known, default=0)

    @property
    def seen_seconds(self) -> float:
        """How long after its start it has shown a sign of life."""
        return self.progress.time - self.start.time if self.progress is not None else 0.0

    @property
    def end_words(self) -> str:
        """Format how it has ended."""
        assert self.end is not None
        cause, reason = (self.end.cause or "").replace("_", " "), self.end.reason or ""
        return reason if cause in reason else f"{cause}: {reason}"


def launches_of(
    events: Sequence[Event], rows: Sequence[StepMetrics], progress: Progress | None
) -> list[TriedLaunch]:
    """Collect the launches of a run in their order."""
    return [
        TriedLaunch(
            one.start,
            one.end,
            rows=tuple(row for row in rows if row.epoch == one.start.epoch),
            progress=progress if progress and progress.epoch == one.start.epoch else None,
        )
        for one in launches(events)
    ]


def save_seconds(save: SaveRecord) -> float:
    """Return the seconds from the begin of a save, as far as it is known, until it counts."""
    return (save.stall_seconds or 0.0) + save.publish_seconds


def unpromised(trainer: TrainerSpec) -> Iterator[tuple[str, str]]:
    """Yield what a trainer does not promise, with the field that would promise it."""
    if trainer.checkpoint is None:
        for topic in (CHECKPOINT, RESUME, DAMAGED):
            yield topic, "not promised: the spec has no `trainer.checkpoint`"
    if trainer.checkpoint is None or not (trainer.signal or trainer.talks):
        yield SAVE, "not promised: the spec has no `trainer.signal`"
    has_loss = trainer.talks or any("loss" in _values(one) for one in trainer.metrics)
    if trainer.checkpoint is None or not has_loss:
        yield LOSSES, "not promised: `trainer.metrics` reports no loss"


def reports_values(source: ProgressSource) -> bool:
    """Whether a source reports more than steps."""
    return len(_values(source)) > 1


def _values(source: ProgressSource) -> Collection[str]:
    """Name the values of a step that a source reports."""
    return source.names if source.output is None else re.compile(source.output).groupindex


def proved(topic: str, verdict: bool | None, fact: str, *, promised: bool = True) -> Proof:
    """Make one proof; `verdict` None: it was not tried."""
    word = {True: "yes", False: "no", None: "not tried"}[verdict]
    values = {"topic": topic, "level": TOPICS[topic], "verdict": word, "fact": fact}
    return Proof.model_validate({**values, "promised": promised})


def _steps(count: int) -> str:
    return f"{count} {'step' if count == 1 else 'steps'}"


def started(launch: TriedLaunch, began_time: float, asked_time: float) -> Proof:
    """Judge the first launch: it trains."""
    seen_time = launch.rows[0].time if launch.rows else launch.start.time
    what = "first step" if launch.rows else "the trainer runs"
    took = short_duration(max(0.0, seen_time - began_time))
    queued = short_duration(max(0.0, began_time - asked_time))
    return proved(START, True, f"{what} {took} after the job began ({queued} in the queue)")


def complete(step: int, problem: str | None, sizes: Sequence[int], *, deep: bool) -> Proof:
    """Judge the first checkpoint by its `problem`, None if it is good, and the sizes of its files.

    `deep`: every byte was read.
    """
    if problem is not None:
        return proved(CHECKPOINT, False, f"step {step}: {problem}")
    how = "every byte" if deep else "names and sizes"
    files = f"{len(sizes)} {'file' if len(sizes) == 1 else 'files'}"
    fact = f"step {step}, {short_bytes(sum(sizes))} in {files}, verified ({how})"
    return proved(CHECKPOINT, True, fact)


def saved_on_signal(
    launch: TriedLaunch,
    before: int,
    newest: int,
    *,
    save_seconds: float | None,
    leave_seconds: float,
    exit_codes: Sequence[int],
) -> Proof:
    """Judge what a launch left that was asked to leave: is its last step saved?

    `before` and `newest` are the newest checkpoints before and after the signal, `exit_codes` those
    of its ranks.
    """
    code = f"exit {', '.join(map(str, exit_codes))}" if exit_codes else "no exit record"
    left = f"left {short_duration(leave_seconds)} after the signal"
    lost = launch.last_step - newest
    if lost > 0:
        fact = f"{code}, no checkpoint of its last step: the {lost} since {newest} would be lost"
        return proved(SAVE, False, f"{fact}; {left}")
    if newest <= before:
        return proved(SAVE, False, f"{code}, no new checkpoint after step {newest}; {left}")
    took = "" if save_seconds is None else f" in {short_duration(save_seconds)}"
    return proved(SAVE, True, f"step {newest} saved{took}; {left}, {code}")


def resumed(launch: TriedLaunch, expected: int, how: str) -> Proof:
    """Judge where a launch has begun: at the checkpoint that it was given, the newest good one.

    `expected` is the newest when the launch before it ended. What that one has left complete is
    published later, and may be newer.
    """
    first, given = launch.first_step, launch.resume_step
    if given < expected:
        fact = f"from step {given}, and the newest good checkpoint is step {expected}"
        return proved(RESUME, False, fact)
    if first is not None and first <= given:
        fact = f"given the checkpoint of step {given}, and its first step was {first}"
        return proved(RESUME, False, fact)
    if not given:
        return proved(RESUME, False, "there was no checkpoint to resume from")
    seen = "its steps are not reported" if first is None else f"first step {first}"
    return proved(RESUME, True, f"from step {given}, {seen}; {how}")


def restarted(
    killed: TriedLaunch, after: TriedLaunch, expected: int, victim: str, seconds: float
) -> Proof:
    """Judge the launch that follows a killed rank; `expected` as in `resumed`."""
    cause = killed.end.cause if killed.end is not None else "unknown"
    lost = max(0, killed.last_step - after.resume_step)
    fact = (
        f"{victim} killed by -9 ({cause}): started again after {short_duration(seconds)} from "
        f"step {after.resume_step}, {_steps(lost)} lost"
    )
    if after.resume_step < expected:
        fact += f", and the newest good checkpoint is step {expected}"
    return proved(KILLED, after.resume_step >= expected, fact)


def passed_over(after: TriedLaunch, events: Sequence[Event], damaged: int, expected: int) -> Proof:
    """Judge whether a damaged newest checkpoint was rejected, and the one before it used."""
    of_damaged = [one for one in rejections(events) if one.checkpoint_step == damaged]
    rejection = of_damaged[-1] if of_damaged else None
    if rejection is None and after.resume_step > damaged:
        fact = "each time there was a newer checkpoint than the truncated one: it saves too often"
        return proved(DAMAGED, None, fact)
    if rejection is None:
        fact = f"step {damaged} was truncated and not rejected; step {after.resume_step} was used"
        return proved(DAMAGED, False, fact)
    fact = f"step {damaged} rejected ({rejection.reason}), step {after.resume_step} used"
    return proved(DAMAGED, after.resume_step == expected, fact)


# -- The same steps, trained by a launch that resumed and by one that passed through -------------


@dataclass(frozen=True)
class _Overlap:
    """Steps behind a checkpoint: `pairs` of rows, of the resumed launch and the continued one."""

    resume_step: int
    pairs: tuple[tuple[StepMetrics, StepMetrics], ...]

    @property
    def identical(self) -> bool:
        return all(one.loss_hex == other.loss_hex for one, other in self.pairs)

    @property
    def largest(self) -> float:
        """The largest difference of two losses, relative to the continued one."""
        return max(_difference(one, other) for one, other in self.pairs)


def _difference(one: StepMetrics, other: StepMetrics) -> float:
    if one.loss is None or other.loss is None:
        return float("inf")
    return abs(one.loss - other.loss) / max(abs(other.loss), 1e-12)


def same_losses(runs: Sequence[Sequence[TriedLaunch]], bound: float, *, exact: bool) -> Proof:
    """Compare the losses after each resume with those of a launch that went through that step.

    `runs` has the launches of each run, `bound` is the largest relative difference that rounding
    explains. `exact`: all bits of the losses are known, and not the digits that were printed.
    """
    overlaps = [one for launches in runs for one in _overlaps(launches)]
    if not overlaps:
        return proved(LOSSES, None, "no step was trained by a resumed and by a continued launch")
    compared = sum(len(one.pairs) for one in overlaps)
    places = ", ".join(dict.fromkeys(str(one.resume_step) for one in overlaps))
    what = f"{_steps(compared)} behind step {places}"
    if all(one.identical for one in overlaps):
        first = overlaps[0].pairs[0][0]
        how = "bit for bit" if exact else "in all digits that it reports"
        fact = f"step {first.step}: {first.loss:.6g}, equal {how} to the continued run"
        return proved(LOSSES, True, f"{fact} ({what})")
    worst = max(overlaps, key=lambda one: one.largest)
    resumed_row, continued = max(worst.pairs, key=lambda pair: _difference(*pair))
    within = worst.largest <= bound
    fact = (
        f"step {continued.step}: {resumed_row.loss} resumed, {continued.loss} continued, "
        f"{worst.largest:.2g} apart, {'as rounding explains' if within else 'more than rounding'} "
        f"(up to {bound:g}; {what})"
    )
    return proved(LOSSES, within, fact)


def trained_twice(launches: Sequence[TriedLaunch]) -> bool:
    """Whether a launch that resumed has losses of steps that one has which went through."""
    return any(_overlaps(launches))


def _overlaps(launches: Sequence[TriedLaunch]) -> Iterator[_Overlap]:
    """Yield, for each checkpoint that was resumed from, the steps that were trained twice."""
    seen: set[tuple[int, int]] = set()
    for one in launches:
        if not one.resume_step:
            continue
        for other in launches:
            passed = [row.step for row in other.rows]
            through = other.resume_step < one.resume_step and one.resume_step in passed
            if not through:
                continue
            known = {row.step: row for row in other.rows}
            pairs = tuple(
                (row, known[row.step])
                for row in one.rows
                if row.step > one.resume_step
                and row.step in known
                and row.loss is not None
                and (one.epoch, row.step) not in seen
            )
            if pairs:
                seen |= {(one.epoch, row.step) for row, _ in pairs}
                yield _Overlap(one.resume_step, pairs)
