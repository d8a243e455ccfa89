"""RunOutcome runs beside published ones: what is known, what is assumed, and what range results.

    python -m bench.simulate_published [--trials 100]

Every number of a case has a source or the word "assumed". Where an input is not published, the
case is played at both ends of a plausible range. Belongs here: cases and the comparison. Does not
belong here: playing (`hpctrain.simulate`).
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from typing import Any

from hpctrain.records.supervise_config import SuperviseConfig
from hpctrain.simulate.monte_carlo import simulate
from hpctrain.simulate.scenario import Scenario

DAY, HOUR = 86400.0, 3600.0


@dataclass(frozen=True)
class Case:
    """A published run; `low` and `high` are the ends of what is not published."""

    name: str
    published: str
    known: dict[str, Any]
    low: dict[str, Any]
    high: dict[str, Any]
    sources: tuple[str, ...]
    assumed: tuple[str, ...]
    measure: str = "ettr"
    extra: dict[str, Any] = field(default_factory=dict)


CASES = (
    Case(
        name="Llama 3 405B, 16,384 H100, 54 days",
        published="419 unexpected interruptions, > 90 % effective training time",
        known=dict(nodes=2048, failures_per_node_day=419 / (54 * 2048), work_seconds=50 * DAY),
        low=dict(
            restart_seconds=900.0,
            interval_seconds=1800.0,
            save_stall_seconds=10.0,
            save_write_seconds=60.0,
            stall_seconds=600.0,
            detect_seconds=60.0,
        ),
        high=dict(
            restart_seconds=180.0,
            interval_seconds=600.0,
            save_stall_seconds=1.0,
            save_write_seconds=30.0,
            stall_seconds=60.0,
        ),
        sources=("arXiv 2407.21783, section 3.3.4 and table 5: nodes, days, counts and causes",),
        assumed=(
            "restart 3 to 15 min, interval 10 to 30 min, stall 1 to 10 s, 32 spare nodes, hangs "
            "seen after 1 to 10 min: none of them is published",
        ),
        extra=dict(spare_nodes=32, mix="llama3", step_seconds=10.0),
    ),
    Case(
        name="Meta RSC-1, job runs of 1024 GPUs",
        published="MTTF 7.9 h; ETTR about 0.9",
        known=dict(nodes=128, failures_per_node_day=24 / (7.9 * 128), work_seconds=14 * DAY),
        low=dict(restart_seconds=1200.0, queue_wait_seconds=600.0, interval_seconds=3600.0),
        high=dict(restart_seconds=300.0, queue_wait_seconds=0.0, interval_seconds=3600.0),
        sources=(
            "arXiv 2410.21680: MTTF of 1024 GPUs measured; u0 of 5 to 20 min and a checkpoint "
            "an hour as in its own estimate",
        ),
        assumed=(
            "a save stops training for 60 s; 14 days; 0 to 10 min in the queue (their jobs have "
            "the highest priority); every failure is one of a node",
        ),
        extra=dict(mix="nodes", save_stall_seconds=60.0, step_seconds=10.0),
    ),
    Case(
        name="OPT-175B, 992 A100 (124 nodes)",
        published="7.5 h between interruptions, up 59 % of the time",
        known=dict(nodes=124, failures_per_node_day=24 / (7.5 * 124), work_seconds=33 * DAY),
        low=dict(restart_seconds=2 * HOUR, detect_seconds=1 * HOUR),
        high=dict(restart_seconds=1 * HOUR, detect_seconds=0.25 * HOUR),
        sources=(
            "glennklockwood.com/garden/job-reliability, from the project's log book: both figures",
        ),
        assumed=(
            "1 to 2 h for a restart and 15 min to 1 h until somebody saw a failure (much of it by "
            "hand), a checkpoint every 3 h with a stall of 2 min, 12 spare nodes, 33 d",
        ),
        extra=dict(
            mix="nodes",
            spare_nodes=12,
            interval_seconds=3 * HOUR,
            save_stall_seconds=120.0,
            step_seconds=30.0,
        ),
    ),
    Case(
        name="BLOOM-176B, 384 A100 (48 nodes), 3.5 months",
        published="about one GPU failure a week; 1 to 3 h lost in each",
        known=dict(nodes=48, failures_per_node_day=1 / (7 * 48), work_seconds=100 * DAY),
        low=dict(detect_seconds=3 * HOUR, restart_seconds=0.75 * HOUR),
        high=dict(detect_seconds=0.25 * HOUR, restart_seconds=0.5 * HOUR),
        sources=("bigscience chronicles of tr11-176B-ml: a GPU a week, a save takes 40 s",),
        assumed=(
            "a save every 3 h (100 steps of 105 s), nobody looking for 15 min to 3 h, half an "
            "hour to start, all four spare nodes free",
        ),
        measure="hours per failure",
        extra=dict(
            mix="nodes",
            spare_nodes=4,
            interval_seconds=3 * HOUR,
            save_stall_seconds=40.0,
            step_seconds=105.0,
        ),
    ),
)


def settings() -> SuperviseConfig:
    """Budgets that do not end a run: people went on in all of these."""
    return SuperviseConfig(
        run_id="published",
        target_step=1,
        continuation="requeue",
        failures_without_progress=1000,
        stall_seconds=600.0,
        setup_stall_seconds=1800.0,
        kill_wait_seconds=30.0,
        verify="auto",
        budgets={"node_failure": 1000, "storage": 1000, "suspect_numerics": 1000},
        exclude_nodes="act",
    )


def played(case: Case, end: dict[str, Any], trials: int) -> tuple[float, float, float]:
    """(what is measured, failures, MTTF in hours without queue)."""
    # A failure of a node is seen by people here, not by a supervisor.
    seen = {"lost_node_seconds": end.get("detect_seconds", 300.0)}
    given = {**case.known, **case.extra, **seen, **end, "supervise": settings()}
    scenario = Scenario.model_validate(given)
    told = simulate(scenario, trials, seed=1)
    lost = sum(told.seconds.values()) - told.seconds["productive"] - told.seconds["saving"]
    measures = {
        "ettr": told.ettr.mean,
        "hours per failure": lost / told.failures / HOUR,
    }
    return measures[case.measure], told.failures, scenario.mttf_seconds / HOUR


def report(trials: int) -> list[str]:
    """Lines of the comparison, with each source and each assumption."""
    lines = []
    for case in CASES:
        worst, failures, mttf = played(case, case.low, trials)
        best, few, _ = played(case, case.high, trials)
        lines += [
            case.name,
            f"  published  {case.published}",
            f"  played     {case.measure} {worst:.3g} to {best:.3g}; {few:.0f} to {failures:.0f} "
            f"failures, one per {mttf:.1f} h",
            *(f"  source     {one}" for one in case.sources),
            *(f"  assumed    {one}" for one in case.assumed),
            "",
        ]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=100)
    for line in report(parser.parse_args().trials):
        print(line)


if __name__ == "__main__":
    main()
