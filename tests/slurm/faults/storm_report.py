"""The sum of a storm: three questions, each with what was wrong.

Exact? Ended only as asked? Everything said true? Belongs here: comparing with an undisturbed run,
adding up, the words of the summary. Does not belong here: how the storm went (see `storm`).
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from storm import Fate, nobody_is_left
from storm_witness import Witness
from strikes import STRIKES
from targets import Field

from hpctrain.checkpoints.discover import checkpoints
from hpctrain.checkpoints.publish import published_steps
from hpctrain.records.find import RunFiles
from hpctrain.records.ledger import EventKind
from hpctrain.records.run_records import read_metrics
from hpctrain.runs.bitwise import compare_runs
from hpctrain.runs.goodput import goodput
from hpctrain.runs.state import RunState

# Between the supervisor's last word and the clock of the account.
_CLOCK_SECONDS = 2.0
_UNRECORDED = {strike.name for strike in STRIKES if strike.unrecorded}


@dataclass
class Report:
    """The answers; each list must be empty."""

    inexact: list[str] = field(default_factory=list)
    unasked: list[str] = field(default_factory=list)
    untrue: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    steps_compared: int = 0

    @property
    def wrong(self) -> list[str]:
        return [*self.inexact, *self.unasked, *self.untrue]


def conclude(
    shared: Field, fates: Sequence[Fate], reference: RunFiles, witness: Witness, steps: int
) -> Report:
    """Ask the three questions when all runs are over."""
    report = Report()
    targets = [fate.target for fate in fates if fate.target is not None]
    for fate in fates:
        report.unasked += fate.all_wrong
        _compare(report, fate, reference, steps)
    report.unasked += nobody_is_left(shared, targets)
    report.untrue += witness.words()
    report.untrue += [f"{words} ({count} times)" for words, count in witness.failures.items()]
    report.lines += _summary(fates, report, witness, steps)
    return report


def _compare(report: Report, fate: Fate, reference: RunFiles, steps: int) -> None:
    """A run that is done, bit by bit to the last shard; a cancelled one, as far as it got."""
    if fate.target is None:
        return
    rehearsal, name = fate.target.rehearsal, fate.ordeal.name
    row = rehearsal.status()
    wanted = RunState.CANCELLED if fate.ordeal.cancelled else RunState.DONE
    if row.state not in (wanted, RunState.DONE):
        report.unasked.append(f"{name}: is {row.state} ({row.reason}), not {wanted}")
    if row.state is RunState.DONE:
        result = compare_runs(reference, rehearsal.run)
        report.steps_compared += result.steps_compared
        report.inexact += [f"{name}: {words}" for words in rehearsal.differences(reference)]
        report.inexact += [f"{name}: {words}" for words in _bad_checkpoints(rehearsal.run)]
        report.inexact += _account(report, fate, steps)
    else:
        expected = {one.step: one.loss_hex for one in read_metrics(reference.layout)}
        rows = read_metrics(rehearsal.run.layout)
        report.steps_compared += len({one.step for one in rows})
        differ = [one.step for one in rows if one.loss_hex != expected[one.step]]
        report.inexact += [f"{name}: the loss of step {step} differs" for step in differ[:1]]


def _bad_checkpoints(run: RunFiles) -> list[str]:
    """What a run that is done must not have in its list."""
    found = checkpoints(run.layout.checkpoints, "sha256")
    bad = [f"{one.directory.name}: {one.problem}" for one in found if not one.good]
    return bad if published_steps(run.layout.checkpoints) else ["no checkpoint"]


def _account(report: Report, fate: Fate, steps: int) -> list[str]:
    """Where the wall time went; what is wrong with the sum, if anything."""
    assert fate.target is not None
    run, name = fate.target.rehearsal.run, fate.ordeal.name
    told = goodput(run)
    shares = sorted(told.seconds.items(), key=lambda pair: -pair[1])
    parts = ", ".join(f"{word} {seconds:.0f}" for word, seconds in shares if seconds >= 1)
    report.lines.append(f"  {name}: {told.wall_seconds:.0f} s of wall time: {parts}")
    added = sum(told.seconds.values())
    events = run.ledger.events()
    submitted_at = next(e.time for e in events if e.event is EventKind.SUBMITTED)
    elapsed = events[-1].time - submitted_at
    wrong = []
    if max(abs(added - told.wall_seconds), abs(added - elapsed)) > _CLOCK_SECONDS:
        wrong.append(f"{name}: the account has {added:.1f} s, the ledger {elapsed:.1f} s")
    if told.kept_steps != steps:
        wrong.append(f"{name}: the account keeps {told.kept_steps} steps of {steps}")
    return wrong


def _summary(fates: Sequence[Fate], report: Report, witness: Witness, steps: int) -> list[str]:
    struck = [one for fate in fates for one in fate.struck]
    missed = [f"{fate.ordeal.name}: {one.name}" for fate in fates for one in fate.missed]
    causes = Counter(cause for one in struck for cause in one.causes)
    unrecorded = sum(one.name in _UNRECORDED for one in struck)
    seconds = sorted(one.seconds for one in struck) or [0.0]
    cancelled = sum(fate.ordeal.cancelled for fate in fates)
    return [
        f"strikes: {len(struck)} on {len(fates)} runs of {steps} steps, {unrecorded} of the second "
        f"table; runs cancelled on purpose: {cancelled}",
        f"launches ended by cause: {dict(causes.most_common())}",
        f"seconds from strike to going on: median {statistics.median(seconds):.1f}, "
        f"mean {statistics.mean(seconds):.1f}, longest {seconds[-1]:.1f}",
        *([f"came too late, the run was done: {', '.join(missed)}"] if missed else []),
        f"steps compared: {report.steps_compared}; trained again: "
        f"{sum(one.lost_steps for one in struck)}",
        f"exact? {_verdict(report.inexact, 'differences')}",
        f"ended only as asked? {_verdict(report.unasked, 'objections')}",
        f"everything said true? {_verdict(report.untrue, 'false claims')} "
        f"({witness.statements} statements of status, {witness.false_statements} false)",
    ]


def _verdict(wrong: Sequence[str], what: str) -> str:
    return f"NO, {len(wrong)} {what}" if wrong else "yes"
