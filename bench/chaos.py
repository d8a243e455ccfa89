"""Many faults at random in one long run: is it the same run in the end?

A small Megatron job trains twice on a real Slurm: once undisturbed, once under N faults (a seeded
Poisson process over its steps). Printed: every fault with what it cost, the account of the wall
time, and the verdict. Exit code 1 unless all losses and the final weights are equal bit by bit,
every launch resumed from the newest verified checkpoint, and the account adds up.

    python -m bench.chaos [--faults 100] [--seed 1]
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time

from bench.rehearsals import Rehearsal, Stage, own_stage

from chaos import PATIENT, Storm, choose, nothing_left_behind, rage, steps_needed  # isort: skip

from hpctrain.actions.bitwise import compare_runs
from hpctrain.actions.goodput import goodput
from hpctrain.actions.runs import RunFiles
from hpctrain.actions.state import RunState
from hpctrain.store.ledger import EventKind

# Between the supervisor's last word and the clock of the account.
_CLOCK_SECONDS = 2.0


def main() -> int:
    """Run the storm; 0 only if nothing was lost."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", action="append", default=[], help="this kind of fault only")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    dice = random.Random(options.seed)
    chosen = choose(options.faults, dice, tuple(options.only))
    steps = steps_needed(chosen, tail_steps=400)
    print(f"{options.faults} faults over {steps} steps, seed {options.seed}", flush=True)
    with own_stage() as stage:
        reference = undisturbed(stage, steps)
        began_at = time.monotonic()
        rehearsal = stage.start("name=chaos", f"budget.steps={steps}", *PATIENT)
        storm = rage(rehearsal, chosen, dice, tell=print_one)
        return conclude(rehearsal, reference, storm, steps, time.monotonic() - began_at)


def undisturbed(stage: Stage, steps: int) -> RunFiles:
    """The same run without any fault."""
    began_at = time.monotonic()
    rehearsal = stage.start("name=undisturbed", f"budget.steps={steps}")
    row = rehearsal.wait_until(lambda row: row.state.over, "over", patience_of(steps))
    assert row.state is RunState.DONE, row
    print(f"undisturbed: {time.monotonic() - began_at:.0f} s", flush=True)
    return rehearsal.run


def patience_of(steps: int) -> float:
    return 300.0 + steps


def print_one(number: int, struck: object) -> None:
    print(f"{number:4} {struck}", flush=True)


def conclude(
    rehearsal: Rehearsal, reference: RunFiles, storm: Storm, steps: int, seconds: float
) -> int:
    """The end of the run, the comparison, the account; prints all and returns the exit code."""
    rehearsal.wait_until(lambda row: row.state.over, "over", patience_of(steps))
    result = compare_runs(reference, rehearsal.run)
    wrong = list(storm.wrong) + nothing_left_behind(rehearsal)
    wrong += rehearsal.differences(reference)
    lost = sum(one.lost_steps for one in storm.struck)
    recoveries = sorted(one.seconds for one in storm.struck)
    print(f"faults survived: {len(storm.struck)}; launches ended by cause: {dict(storm.causes())}")
    print(f"steps compared: {result.steps_compared} of {steps}; trained again: {lost}")
    print(
        f"seconds from fault to first new step: median {statistics.median(recoveries):.1f}, "
        f"mean {statistics.mean(recoveries):.1f}, longest {recoveries[-1]:.1f}"
    )
    wrong += print_account(rehearsal, steps)
    print(f"wall time {seconds:.0f} s")
    for words in wrong:
        print(f"WRONG: {words}")
    print(f"losses and weights identical, nothing lost: {'no' if wrong else 'yes'}")
    return 1 if wrong else 0


def print_account(rehearsal: Rehearsal, steps: int) -> list[str]:
    """Where the wall time went; what is wrong with the sum, if anything."""
    told = goodput(rehearsal.run)
    for category, seconds in sorted(told.seconds.items(), key=lambda pair: -pair[1]):
        if seconds:
            print(f"  {category:12} {seconds:8.1f} s {seconds / told.wall_seconds:7.1%}")
    added = sum(told.seconds.values())
    events = rehearsal.run.ledger.events()
    submitted_at = next(e.time for e in events if e.event is EventKind.SUBMITTED)
    elapsed = events[-1].time - submitted_at
    print(f"  {'sum':12} {added:8.1f} s; first submission to last word {elapsed:.1f} s")
    wrong = []
    if max(abs(added - told.wall_seconds), abs(added - elapsed)) > _CLOCK_SECONDS:
        wrong.append(f"the account has {added:.1f} s, the ledger {elapsed:.1f} s")
    if told.kept_steps != steps:
        wrong.append(f"the account keeps {told.kept_steps} steps of {steps}")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
