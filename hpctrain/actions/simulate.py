"""Builds the scenario that `simulate` plays, from a spec and a profile, or from bare numbers.

Belongs here: the sources of a scenario's numbers. Does not belong here: playing it
(`hpctrain.simulate`), text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from hpctrain.errors import UsageError
from hpctrain.plan.forecast.published import RESTART_SECONDS
from hpctrain.simulate.interval_choice import Choice, Goal, auto_interval_seconds, choose
from hpctrain.simulate.scenario import MixName, Scenario
from hpctrain.spec.profile.limits import PriceProfile
from hpctrain.spec.run import SuperviseSpec
from hpctrain.store.supervise_config import SuperviseConfig
from hpctrain.units import short_duration

# A simulation should take seconds.
_MOST_PLAYED = 200_000_000


class Simulation(BaseModel):
    """A scenario, the result of playing it, and the sources of its numbers."""

    model_config = ConfigDict(frozen=True)

    scenario: Scenario
    choice: Choice
    currency: str | None
    price_per_gpu_hour: float | None
    assumptions: tuple[str, ...]


class BareNumbers(BaseModel):
    """A run without a spec, as options of `simulate`."""

    model_config = ConfigDict(frozen=True)

    gpus: int
    gpus_per_node: int = 8
    failures_per_node_day: float = 6.5e-3
    step_seconds: float = 10.0
    save_stall_seconds: float = 5.0
    save_write_seconds: float = 60.0
    restart_seconds: float = RESTART_SECONDS
    queue_wait_seconds: float = 0.0
    walltime_seconds: float = math.inf
    days: float = 30.0
    mix: MixName = "llama3"
    cluster_nodes: int | None = None


def scenario_of_numbers(given: BareNumbers) -> tuple[Scenario, tuple[str, ...]]:
    """Build a scenario of bare numbers, and its notes.

    Raises UsageError where the GPUs do not fill their nodes.
    """
    if given.gpus % given.gpus_per_node:
        raise UsageError(
            f"--gpus {given.gpus} does not fill nodes of {given.gpus_per_node} GPUs",
            "give a multiple, or another --gpus-per-node",
        )
    scenario = Scenario(
        nodes=given.gpus // given.gpus_per_node,
        gpus_per_node=given.gpus_per_node,
        cluster_nodes=given.cluster_nodes,
        work_seconds=given.days * 86400,
        step_seconds=given.step_seconds,
        interval_seconds=given.step_seconds,
        save_stall_seconds=given.save_stall_seconds,
        save_write_seconds=given.save_write_seconds,
        failures_per_node_day=given.failures_per_node_day,
        mix=given.mix,
        restart_seconds=given.restart_seconds,
        queue_wait_seconds=given.queue_wait_seconds,
        walltime_seconds=given.walltime_seconds,
        supervise=_settings(SuperviseSpec(exclude_nodes="act"), "requeue"),
    )
    return scenario, (f"causes: {scenario.failure_mix.source}",)


def scenario_of_spec(
    spec: Path,
    profile: str,
    overrides: Sequence[str] = (),
    mix: MixName = "llama3",
    queue_wait_seconds: float = 0.0,
) -> tuple[Scenario, PriceProfile | None, tuple[str, ...]]:
    """Build the scenario of a planned run with its forecast; returns also prices and notes.

    Raises what `hpctrain plan` raises, and UsageError where no step time is predicted.
    """
    from hpctrain.actions import plan as planning

    inputs = planning.load(spec, profile, overrides)
    option = planning.plan_option(inputs, "time")
    if option.refusal is not None:
        raise option.refusal
    forecast, plan = option.forecast, option.plan
    if forecast is None or plan is None:
        reason = option.remark or "the profile does not contain the speed of its GPUs"
        raise UsageError(f"there is no forecast to start from: {reason}")
    run, site = inputs.spec, inputs.profile
    stops, saving = forecast.interruptions, forecast.checkpoint
    preemption = stops.preemption_mtbf_seconds
    partition = site.slurm.partition(run.resources.partition)
    walltime = run.resources.walltime or (partition.max_walltime if partition else None)
    scenario = Scenario(
        nodes=forecast.nodes,
        gpus_per_node=max(1, forecast.gpus // forecast.nodes),
        spare_nodes=run.resources.spare_nodes,
        cluster_nodes=max(site.nodes.count, forecast.nodes + run.resources.spare_nodes),
        work_seconds=forecast.times.training_seconds + forecast.times.evaluation_seconds,
        step_seconds=forecast.step_seconds,
        interval_seconds=forecast.interval.seconds,
        save_stall_seconds=saving.stall_seconds,
        save_write_seconds=saving.write_seconds if saving.asynchronous else 0.0,
        failures_per_node_day=86400 / (stops.failure_mtbf_seconds * forecast.nodes),
        mix=mix,
        stall_seconds=float(run.supervise.stall),
        restart_seconds=stops.restart_seconds,
        queue_wait_seconds=queue_wait_seconds,
        walltime_seconds=math.inf if walltime is None else float(walltime),
        preemptions_per_day=86400 / preemption if preemption else 0.0,
        warned=stops.warned,
        supervise=_settings(run.supervise, site.continuation),
    )
    # The simulation does not use the forecast's queue time.
    kept = [str(note) for note in forecast.assumptions if note.kind != "queue"]
    return scenario, site.prices, (*kept, f"causes: {scenario.failure_mix.source}")


def _settings(spec: SuperviseSpec, continuation: str) -> SuperviseConfig:
    """Collect the settings of the policy that matter to simulated runs."""
    return SuperviseConfig.model_validate(
        dict(
            run_id="simulated",
            target_step=1,
            continuation=continuation,
            failures_without_progress=spec.failures_without_progress,
            stall_seconds=float(spec.stall),
            setup_stall_seconds=float(spec.setup_stall),
            kill_wait_seconds=30.0,
            verify="auto",
            budgets={str(cause): count for cause, count in spec.budgets.items()},
            storm_failures=spec.storm_failures,
            storm_window_seconds=float(spec.storm_window),
            exclude_nodes=spec.exclude_nodes,
        )
    )


def simulate(
    scenario: Scenario,
    spares: Sequence[int],
    intervals: Sequence[float | None],
    trials: int,
    seed: int,
    goal: Goal = "gpu-hours",
    prices: PriceProfile | None = None,
    assumptions: Sequence[str] = (),
) -> Simulation:
    """Play all combinations; an interval of None is Daly's.

    Raises UsageError for too many runs, and where the cluster has too few nodes.
    """
    spares, notes = _possible_spares(scenario, tuple(dict.fromkeys(spares)))
    seconds = list(
        dict.fromkeys(auto_interval_seconds(scenario) if s is None else s for s in intervals)
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
