"""A short storm; `make chaos` runs long ones."""

from __future__ import annotations

import random

from chaos import PATIENT, choose, gates, nothing_left_behind, rage, steps_needed
from rehearsal import STEPS, Stage
from survival import Fault, Survival

from hpctrain.actions.runs import RunFiles

QUICK = ("rank killed", "srun killed", "killed in a save", "warned of the time limit", "requeued")


def test_a_short_storm_loses_nothing(stage: Stage, reference: RunFiles, survival: Survival) -> None:
    dice = random.Random(11)
    chosen = choose(5, dice, QUICK, mean_gap_steps=4)
    assert steps_needed(chosen) <= STEPS
    waiting = "supervise.stall=5min"
    rehearsal = stage.start("name=chaos", *PATIENT, waiting, planned=gates(chosen))
    storm = rage(rehearsal, chosen, dice)
    assert not storm.wrong, f"{storm.wrong}\n{rehearsal.logs()}"
    result = rehearsal.assert_done_exactly(reference)
    assert not nothing_left_behind(rehearsal)
    survival.shown(
        Fault(42, f"{len(chosen)} faults at random steps; `make chaos` has a hundred"),
        cause=", ".join(sorted(storm.causes())),
        action="all survived",
        lost_steps=result.steps_lost,
        identical=result.steps_compared,
        seconds=round(sum(one.seconds for one in storm.struck) / len(chosen), 1),
    )


def test_a_storm_is_the_same_for_the_same_seed() -> None:
    first, second = (choose(100, random.Random(1)) for _ in range(2))
    assert first == second != choose(100, random.Random(2))
    steps = [fault.step for fault in first]
    assert steps == sorted(steps) and steps_needed(first) > steps[-1]
