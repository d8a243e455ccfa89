"""A short storm of both tables; `make chaos` runs long ones."""

from __future__ import annotations

from collections import Counter

import pytest
from another_user import another_user_attending
from other_cluster import OtherCluster
from rehearsal import MADE_UP, Stage
from storm import EVALUATIONS, draw, rage, steps_for
from storm_report import conclude
from storm_witness import Witness
from strikes import BY_NAME, CANCELS, STRIKES
from survival import Fault, Survival
from targets import Field, Target
from trainer_stage import TRAINER_STRIKES, TrainerStage

from hpctrain.records.find import RunFiles
from hpctrain.runs.state import RunState

QUICK = tuple(strike.name for strike in STRIKES if strike.quick)
_COUNT, _RUNS, _GAP_STEPS = 10, 2, 9


@pytest.fixture(scope="module")
def evaluated(real_stage: Stage) -> RunFiles:
    """The undisturbed run of a storm; it evaluates, which changes nothing of what is trained."""
    rehearsal = real_stage.start(
        "name=evaluated", f"budget.steps={_steps()}", MADE_UP, *EVALUATIONS
    )
    row = rehearsal.wait_till_over()
    assert row.state is RunState.DONE, rehearsal.logs()
    return rehearsal.run


def _steps() -> int:
    return steps_for(_COUNT // _RUNS, _GAP_STEPS)


@pytest.mark.variant("test_preemptions_of_all_kinds_cost_no_budget")
def test_a_short_storm_is_exact_ends_as_asked_and_is_told_truly(
    public_stage: Stage, other_cluster: OtherCluster, evaluated: RunFiles, survival: Survival
) -> None:
    ordeals = draw(_COUNT, 4, runs=_RUNS, names=QUICK, gap_steps=_GAP_STEPS)
    both = {one.strike.unrecorded for ordeal in ordeals for one in ordeal.chosen}
    assert both == {True, False}
    targets: list[Target] = []
    with another_user_attending(public_stage.sandbox) as bystander:
        field = Field(public_stage, other_cluster, bystander)
        with Witness(field, lambda: list(targets)) as witness:
            fates = rage(
                field,
                ordeals,
                _steps(),
                at_a_time=_RUNS,
                gates=True,
                # Ranks that wait at a gate, or for a core of this machine, do not hang.
                overrides=("supervise.stall=5min", "supervise.setup_stall=5min"),
                joined=targets.append,
            )
        report = conclude(field, fates, evaluated, witness, _steps())
    logs = "\n".join(target.rehearsal.logs() for target in targets)
    assert not report.wrong, "\n".join([*report.wrong, *report.lines, logs])
    assert witness.statements > _COUNT
    struck = [one for fate in fates for one in fate.struck]
    assert len(struck) + sum(len(fate.missed) for fate in fates) == _COUNT
    for row, words in (
        (42, f"{_COUNT} faults at random steps; `make chaos` has a hundred"),
        (78, f"{_COUNT} strikes of both tables on two runs at a time; `make chaos` has a hundred"),
    ):
        survival.shown(
            Fault(row, words),
            cause=", ".join(sorted({cause for one in struck for cause in one.causes})),
            action=f"all survived; {witness.statements} statements of status, none false",
            lost_steps=sum(one.lost_steps for one in struck),
            identical=report.steps_compared,
            seconds=round(sum(one.seconds for one in struck) / len(struck), 1),
        )


@pytest.mark.nightly("a minute: a run and what it is compared with")
def test_a_trainer_of_ones_own_survives_a_storm(
    public_stage: Stage, other_cluster: OtherCluster
) -> None:
    strikes, steps = 4, steps_for(4)
    stage = TrainerStage(public_stage.sandbox, public_stage.directory)
    reference = stage.start("name=undisturbed", f"budget.steps={steps}")
    assert reference.wait_till_over().state is RunState.DONE, reference.logs()
    field, targets = Field(stage, other_cluster, None), list[Target]()
    ordeals = draw(strikes, 1, names=TRAINER_STRIKES, cancels=False)
    with Witness(field, lambda: list(targets)) as witness:
        fates = rage(field, ordeals, steps, pace_seconds=0.1, joined=targets.append)
    report = conclude(field, fates, reference.run, witness, steps)
    logs = "\n".join(target.rehearsal.logs() for target in targets)
    assert not report.wrong, "\n".join([*report.wrong, *report.lines, logs])


def test_a_storm_is_the_same_for_the_same_seed() -> None:
    first, second = (draw(100, 1, runs=6) for _ in range(2))
    assert first == second != draw(100, 2, runs=6)
    assert sum(len(ordeal.chosen) for ordeal in first) == 100
    for ordeal in first:
        steps = [one.step for one in ordeal.chosen]
        assert steps == sorted(steps) and steps_for(len(steps)) > steps[-1]
    assert first[0].chosen != first[1].chosen, "each run has dice of its own"


def test_a_run_is_drawn_alike_whatever_the_others_do() -> None:
    alone, among = draw(17, 5, runs=1), draw(51, 5, runs=3)
    assert alone[0] == among[0]


def test_all_strikes_come_up_in_a_long_storm() -> None:
    drawn = Counter(one.name for ordeal in draw(2000, 1, runs=100) for one in ordeal.chosen)
    assert set(drawn) == set(BY_NAME), set(BY_NAME) - set(drawn)
    ends = {one.name for one in CANCELS}
    ordeals = draw(2000, 1, runs=100)
    assert any(ordeal.cancelled for ordeal in ordeals)
    assert all(one.name not in ends for ordeal in ordeals for one in ordeal.chosen[:-1])


def test_strikes_name_rows_of_both_tables() -> None:
    from fault_table import ROWS, UNRECORDED

    known = ROWS.keys() | UNRECORDED.keys()
    assert {strike.row for strike in (*STRIKES, *CANCELS)} <= known
