"""Builds the scenario that `simulate` plays, from a spec and a profile, or from bare numbers.

Belongs here: the sources of a scenario's numbers. Does not belong here: playing it
(`hpctrain.simulate`), text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

from hpctrain.base.errors import UsageError
from hpctrain.base.frozen import Frozen
from hpctrain.base.units import short_duration
from hpctrain.job.prepare import load_any_inputs, load_knowledge
from hpctrain.plan.forecast.rates import RESTART_SECONDS
from hpctrain.plan.job import TrainerJob, TrainingJob
from hpctrain.simulate.forecasts import (
    LEAST_TRIALS,
    policy_settings,
    scenario_notes,
    scenario_of,
    trials_of,
)
from hpctrain.simulate.monte_carlo import Choice, Goal, auto_interval_seconds, choose
from hpctrain.simulate.scenario import MixName, Scenario
from hpctrain.spec.profile.hardware import PriceProfile
from hpctrain.spec.run import SuperviseSpec
from hpctrain.spec.trainer import TrainerRunSpec

# A simulation should take seconds.
_MOST_PLAYED = 200_000_000


# Seconds, Daly's interval, or that of the spec.
Interval = float | Literal["auto", "spec"]


class Written(Frozen):
    """The combination that a spec has: the one that `plan` forecasts."""

    spare_nodes: int
    interval_seconds: float

    @classmethod
    def of(cls, scenario: Scenario) -> Self:
        return cls(spare_nodes=scenario.spare_nodes, interval_seconds=scenario.work_between_saves)


class Simulation(Frozen):
    """A scenario, the result of playing it, and the sources of its numbers."""

    scenario: Scenario
    choice: Choice
    currency: str | None
    price_per_gpu_hour: float | None
    assumptions: tuple[str, ...]
    written: Written | None = None


def scenario_of_numbers(
    gpus: int,
    gpus_per_node: int = 8,
    days: float = 30.0,
    step_seconds: float = 10.0,
    **others: Any,
) -> tuple[Scenario, tuple[str, ...]]:
    """Build the scenario of a run without a spec, and its notes.

    `days`: of undisturbed training. `others`: other fields of `Scenario`, as options of `simulate`.
    Raises UsageError where the GPUs do not fill their nodes.
    """
    if gpus % gpus_per_node:
        raise UsageError(
            f"--gpus {gpus} does not fill nodes of {gpus_per_node} GPUs",
            "give a multiple, or another --gpus-per-node",
        )
    usual = dict(failures_per_node_day=6.5e-3, save_stall_seconds=5.0, save_write_seconds=60.0)
    scenario = Scenario(
        nodes=gpus // gpus_per_node,
        gpus_per_node=gpus_per_node,
        work_seconds=days * 86400,
        step_seconds=step_seconds,
        interval_seconds=step_seconds,
        supervise=policy_settings(SuperviseSpec(exclude_nodes="act"), "requeue"),
        **{**usual, "restart_seconds": RESTART_SECONDS, **others},
    )
    return scenario, (f"causes: {scenario.failure_mix.source}",)


def scenario_of_spec(
    spec: Path,
    profile: str,
    overrides: Sequence[str] = (),
    mix: MixName = "llama3",
    queue_wait_seconds: float = 0.0,
    step_time: float | None = None,
    like: str | None = None,
    runs: Path = Path("runs"),
) -> tuple[Scenario, PriceProfile | None, tuple[str, ...]]:
    """Build the scenario of a planned run, the one of its forecast; returns also prices and notes.

    `step_time`, `like`, `runs`: how fast a trainer of its own is (`trainer_forecast`). Raises what
    `hpctrain plan` raises, and UsageError where no step time is predicted.
    """
    from hpctrain.job.trainer_forecast import known_pace, refuse_pace, trainer_facts, unknown_time
    from hpctrain.plan.forecast.predict import forecast, run_facts
    from hpctrain.plan.planner import decide
    from hpctrain.plan.request import PlanRequest
    from hpctrain.plan.trainer_plan import plan_trainer

    loaded, profile_found = load_any_inputs(spec, profile, overrides)
    site = profile_found.document
    job: TrainingJob | TrainerJob
    if isinstance(loaded.document, TrainerRunSpec):
        with loaded.placing():
            planned = plan_trainer(loaded.document, site)
        job = TrainerJob(loaded.document, site, planned)
        pace = known_pace(job, runs, step_time, like)
        facts, unknown = trainer_facts(job, pace), unknown_time(job)
    else:
        refuse_pace(step_time, like)
        knowledge = load_knowledge(profile_found)
        with loaded.placing():
            decision = decide(PlanRequest(loaded.document, site, knowledge, "time"))
        job, facts = decision.job, run_facts(decision.job)
        unknown = "unknown: the profile does not contain the speed of its GPUs"
    if facts is None:
        raise UsageError(f"there is no forecast to start from: the time of a step is {unknown}")
    expected = forecast(job.spec, site, facts)
    scenario = scenario_of(job, facts, expected, mix, queue_wait_seconds)
    # The simulation does not use the queue time of the closed form.
    kept = [str(note) for note in expected.assumptions if note.kind != "queue"]
    notes = [str(note) for note in scenario_notes(site)]
    return scenario, site.prices, (*kept, f"causes: {scenario.failure_mix.source}", *notes)


def simulate(
    scenario: Scenario,
    spares: Sequence[int],
    intervals: Sequence[Interval] | None,
    trials: int | None,
    seed: int,
    goal: Goal = "gpu-hours",
    prices: PriceProfile | None = None,
    assumptions: Sequence[str] = (),
    written: Written | None = None,
) -> Simulation:
    """Play all combinations.

    By default Daly's interval and that of `written`, the combination of a spec, which is played in
    any case unless the cluster has too few nodes; and as many trials as for a forecast. Raises
    UsageError for an interval of a spec that is not there, for too many runs, and where the
    cluster has too few nodes.
    """
    if not scenario.resumes and intervals:
        message = "--interval: this trainer saves nothing that it resumes from"
        raise UsageError(message, hint="`trainer.checkpoint` in the spec")
    if not scenario.resumes:
        intervals = ("spec",)
    compared: Sequence[Interval] = intervals or (("auto",) if written is None else ("spec", "auto"))
    if "spec" in compared and written is None:
        raise UsageError("--interval spec: there is no spec, only numbers")
    if written is not None:
        spares = sorted({*spares, written.spare_nodes})
    trials = trials or trials_of(scenario) or LEAST_TRIALS
    spares, notes = _possible_spares(scenario, tuple(dict.fromkeys(spares)))
    seconds = list(
        dict.fromkeys(
            auto_interval_seconds(scenario)
            if one == "auto"
            else scenario.work_between_saves
            if one == "spec"
            else one
            for one in compared
        )
    )
    runs = len(seconds) * len(spares) * trials
    failures = scenario.work_seconds / scenario.mttf_seconds
    if runs * (failures + 1) > _MOST_PLAYED:
        raise UsageError(
            f"about {failures:,.0f} failures in each of {runs:,} runs are too many to play",
            "use fewer --trials, or fewer --spares and --interval",
        )
    return Simulation(
        scenario=scenario,
        choice=choose(scenario, spares, seconds, trials, seed, goal),
        currency=prices.currency if prices else None,
        price_per_gpu_hour=prices.on_demand if prices else None,
        assumptions=(*assumptions, *notes),
        written=written,
    )


def _possible_spares(
    scenario: Scenario, spares: Sequence[int]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Choose the numbers of spare nodes that the cluster has; returns also notes."""
    limit = scenario.cluster_nodes
    most = math.inf if limit is None else limit - scenario.nodes
    fit = tuple(count for count in spares if count <= most)
    if not fit:
        raise UsageError(
            f"the cluster has {limit:,} nodes: {scenario.nodes:,} that train and {min(spares):,} "
            "spare nodes are more",
            "use fewer GPUs, or fewer --spares",
        )
    notes = [  # no option and no profile contains these
        f"a failure is seen after {short_duration(scenario.detect_seconds)}, silence after "
        f"{short_duration(scenario.stall_seconds)}, a dead node after "
        f"{short_duration(scenario.lost_node_seconds)}; a lost node is back after "
        f"{short_duration(scenario.repair_seconds)}"
    ]
    notes += [] if scenario.queue_wait_seconds else ["queue: no wait beyond Slurm's own 2 min"]
    if len(fit) < len(spares):
        notes.append(f"spare nodes: at most {most:,}, because the cluster has {limit:,} nodes")
    return fit, tuple(notes)
