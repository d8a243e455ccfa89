"""Forecasts a run once, for everything that names its days and its cost.

The closed forms (`hpctrain.plan.forecast`) give rates and costs of single events; the run is then
played (`hpctrain.simulate`) with the interval, the spare nodes and the policy of its spec on the
nodes of its cluster, and the means and quantiles of the played runs are the forecast. `plan`,
`--budget`, `--deadline` and `simulate` show the same figures.

Belongs here: from a plan to a scenario, from played runs to a forecast. Does not belong here:
playing, closed forms, comparing intervals and spare nodes (`simulate`).
"""

from __future__ import annotations

import math

from hpctrain.base.units import short_duration
from hpctrain.plan.forecast.documents import (
    Assumption,
    Forecast,
    RunFacts,
    Spread,
    TimeShares,
)
from hpctrain.plan.forecast.predict import forecast
from hpctrain.plan.forecast.rates import is_spot, preemption_wait_seconds
from hpctrain.plan.job import TrainerJob, TrainingJob
from hpctrain.records.supervise_config import SuperviseConfig
from hpctrain.simulate.monte_carlo import Outcome, simulate
from hpctrain.simulate.scenario import MixName, Scenario
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.run import SuperviseSpec
from hpctrain.telemetry.timeline import Category

SEED = 1
MOST_TRIALS, LEAST_TRIALS = 200, 25
# Together, of all trials: about three seconds.
_MOST_LAUNCHES = 100_000
# Slurm's delay of a requeued job: cred_expire (120 s) and a second more. Another job of a chain,
# of singletons or of an array has none.
_REQUEUE_DELAY_SECONDS = 121.0


def forecast_run(job: TrainingJob | TrainerJob, facts: RunFacts) -> Forecast:
    """Play the run and return means and quantiles, or only the closed forms if it is too long.

    Raises what `hpctrain.plan.forecast.predict.forecast` raises.
    """
    expected = forecast(job.spec, job.profile, facts)
    scenario = scenario_of(job, facts, expected)
    trials = trials_of(scenario)
    if not trials:
        return expected
    return _played(
        expected, scenario, simulate(scenario, trials, SEED), scenario_notes(job.profile)
    )


def scenario_of(
    job: TrainingJob | TrainerJob,
    facts: RunFacts,
    expected: Forecast,
    mix: MixName = "llama3",
    queue_wait_seconds: float = 0.0,
) -> Scenario:
    """Build the scenario of a planned run with the rates and costs of `expected`."""
    spec, profile = job.spec, job.profile
    stops, saving = expected.interruptions, expected.checkpoint
    preemption, reliability = stops.preemption_mtbf_seconds, profile.reliability
    repair = reliability.repair if reliability is not None else None
    spares = spec.resources.spare_nodes
    scenario = Scenario(
        nodes=facts.nodes,
        gpus_per_node=max(1, facts.gpus // facts.nodes),
        spare_nodes=spares,
        cluster_nodes=max(profile.nodes.count, facts.nodes + spares),
        work_seconds=expected.times.training_seconds + expected.times.evaluation_seconds,
        step_seconds=facts.step_seconds,
        step_deviation=facts.step_deviation,
        interval_seconds=expected.interval.seconds,
        save_stall_seconds=saving.stall_seconds,
        save_write_seconds=saving.write_seconds if saving.asynchronous else 0.0,
        failures_per_node_day=86400 / (stops.failure_mtbf_seconds * facts.nodes),
        mix=mix,
        stall_seconds=_hang_seconds(job, facts),
        restart_seconds=stops.restart_seconds,
        requeue_delay_seconds=_REQUEUE_DELAY_SECONDS if profile.continuation == "requeue" else 0.0,
        queue_wait_seconds=queue_wait_seconds or facts.queue_seconds,
        walltime_seconds=math.inf if facts.walltime is None else float(facts.walltime),
        preemptions_per_day=86400 / preemption if preemption else 0.0,
        preemption_wait_seconds=preemption_wait_seconds(profile, facts)
        if is_spot(spec, profile, facts)
        else 0.0,
        warned=stops.warned,
        saves_at_limit=facts.saves_when_stopped,
        resumes=facts.saves is None or facts.saves.resumes,
        # by hand at once where the site does not requeue
        supervise=policy_settings(
            spec.supervise,
            "requeue" if profile.continuation == "none" else str(profile.continuation),
        ),
    )
    return scenario if repair is None else scenario.model_copy(update={"repair_seconds": repair})


def _hang_seconds(job: TrainingJob | TrainerJob, facts: RunFacts) -> float:
    """Return how long a launch that hangs holds its nodes: until that is seen, or time is up."""
    if isinstance(job, TrainerJob) and not job.spec.trainer.tells_steps:
        if job.spec.trainer.silence is not None:
            return float(job.spec.trainer.silence)
        if facts.walltime is not None:
            return float(facts.walltime) / 2  # the mean of what is left of it
    return float(job.spec.supervise.stall)


def trials_of(scenario: Scenario) -> int:
    """Return how many runs to play, fewer of long ones; 0 where even few would take too long."""
    ends = scenario.work_seconds / scenario.mttf_seconds
    ends += scenario.work_seconds / scenario.walltime_seconds
    ends += scenario.work_seconds * scenario.preemptions_per_day / 86400
    trials = int(_MOST_LAUNCHES / (1 + ends))
    return min(trials, MOST_TRIALS) if trials >= LEAST_TRIALS else 0


def policy_settings(spec: SuperviseSpec, continuation: str) -> SuperviseConfig:
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
            exclude_nodes=spec.exclude_nodes,
        )
    )


def scenario_notes(profile: ClusterProfile) -> tuple[Assumption, ...]:
    """List what a scenario takes for granted that neither spec nor profile says."""
    reliability = profile.reliability
    notes = []
    if reliability is None or reliability.repair is None:
        seconds = Scenario.model_fields["repair_seconds"].default
        text = f"a lost node is back after {short_duration(seconds)} (no `reliability.repair`)"
        notes.append(Assumption(kind="repair", text=text))
    if profile.continuation == "none":
        text = "somebody types `hpctrain resume` as soon as an attempt has ended"
        notes.append(Assumption(kind="continuation", text=text))
    return tuple(notes)


def _played(
    expected: Forecast, scenario: Scenario, outcome: Outcome, notes: tuple[Assumption, ...]
) -> Forecast:
    """Replace the means of the closed forms by those of the played runs."""
    seconds = {Category(name): value for name, value in outcome.seconds.items()}

    def of(*categories: Category) -> float:
        return math.fsum(seconds.get(category, 0.0) for category in categories)

    work = of(Category.PRODUCTIVE)
    share = expected.times.training_seconds / scenario.work_seconds
    times = TimeShares(
        training_seconds=work * share,
        evaluation_seconds=work * (1 - share),
        saving_seconds=of(Category.SAVING),
        redone_seconds=of(Category.REDONE),
        starting_seconds=of(Category.STARTING, Category.RESTARTING),
        detecting_seconds=of(Category.DETECTING, Category.DOWN),
        waiting_seconds=of(Category.QUEUEING),
        repair_seconds=outcome.repair_seconds,
    )
    hours, cost = outcome.gpu_hours, expected.cost
    if cost is not None:
        ends = {"amount": hours.mean, "least_amount": hours.p5, "most_amount": hours.p95}
        cost = cost.model_copy(update={name: end * cost.per_gpu_hour for name, end in ends.items()})
    kept = [one for one in expected.assumptions if one.kind != "queue"]
    if not scenario.queue_wait_seconds:
        text = "no wait beyond Slurm's own 2 min" if scenario.requeue_delay_seconds else "no wait"
        kept.append(Assumption(kind="queue", text=text))
    kept += [Assumption(kind="causes", text=scenario.failure_mix.source), *notes]
    return expected.model_copy(
        update={
            "times": times,
            "failures": outcome.failures,
            "preemptions": outcome.preemptions,
            "starts": outcome.launches,
            "ettr": times.training_seconds / times.occupied_seconds,
            "ettr_with_queue": times.training_seconds / times.total_seconds,
            "gpu_hours": hours.mean,
            "cost": cost,
            "assumptions": tuple(kept),
            "spread": Spread(
                trials=outcome.trials,
                seed=SEED,
                least_seconds=outcome.days.p5 * 86400,
                most_seconds=outcome.days.p95 * 86400,
                least_gpu_hours=hours.p5,
                most_gpu_hours=hours.p95,
                stopped=outcome.stopped,
                stop_reason=outcome.stop_reasons[0] if outcome.stop_reasons else None,
                step_deviation=scenario.step_deviation,
            ),
        }
    )
