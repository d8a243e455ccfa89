"""From a spec, a profile and the facts of a plan to a forecast of the whole run.

Belongs here: putting the parts together, and what to warn about. Does not belong here: the parts
(`checkpoint`, `interruptions`, `intervals`, `attempts`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hpctrain.errors import DoesNotFitError
from hpctrain.plan.forecast.attempts import Attempt, expected
from hpctrain.plan.forecast.checkpoint import checkpoint_cost
from hpctrain.plan.forecast.documents import (
    CheckpointCost,
    CheckpointInterval,
    Cost,
    Forecast,
    Interruptions,
    RunFacts,
    Tariff,
    TimeShares,
)
from hpctrain.plan.forecast.interruptions import (
    interruptions,
    is_spot,
    preemption_wait_seconds,
)
from hpctrain.plan.forecast.intervals import (
    best_steps,
    configured_steps,
    daly_seconds,
    young_seconds,
)
from hpctrain.plan.forecast.published import FORWARD_SHARE, STAGING_SOURCE
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.run import RunSpec
from hpctrain.units import short_duration

# Below this share of productive time a forecast is a refusal: the run would take a hundred times
# as long as its training.
_HOPELESS_SHARE = 0.01


@dataclass(frozen=True)
class _Given:
    """Everything that does not depend on the checkpoint interval."""

    facts: RunFacts
    checkpoint: CheckpointCost
    stops: Interruptions
    training_seconds: float
    evaluation_seconds: float
    preemption_wait_seconds: float

    @property
    def work_seconds(self) -> float:
        return self.training_seconds + self.evaluation_seconds

    @property
    def seconds_per_step(self) -> float:
        """With the evaluations spread over all steps."""
        return self.work_seconds / self.facts.train_steps

    @property
    def losing_mtbf_seconds(self) -> float:
        """Mean time between events that cost unsaved work."""
        rate = 1 / self.stops.failure_mtbf_seconds
        if self.stops.preemption_mtbf_seconds and not self.stops.warned:
            rate += 1 / self.stops.preemption_mtbf_seconds
        return 1 / rate


@dataclass(frozen=True)
class _Totals:
    """Expected sums over the run for one checkpoint interval."""

    times: TimeShares
    slices: int
    failures: float
    preemptions: float
    starts: float


def forecast(spec: RunSpec, profile: ClusterProfile, facts: RunFacts) -> Forecast:
    """Expected days, failures, money for one plan.

    Raises DoesNotFitError when the time limit leaves no time to train, or failures leave next to
    none; InvalidInputError for a file system that the profile does not have.
    """
    checkpoint = checkpoint_cost(spec, profile, facts)
    given = _Given(
        facts=facts,
        checkpoint=checkpoint,
        stops=interruptions(spec, profile, facts, checkpoint),
        training_seconds=facts.step_seconds * facts.train_steps,
        evaluation_seconds=_evaluation_seconds(spec, facts),
        preemption_wait_seconds=preemption_wait_seconds(profile, facts),
    )
    configured = configured_steps(spec.checkpoint, given.seconds_per_step, _best_steps(given))
    steps = min(configured, facts.train_steps)
    totals = _totals(given, steps)
    interval = _interval(given, steps, totals)
    return _document(profile, given, totals, interval, _tariff(spec, profile, facts))


def _evaluation_seconds(spec: RunSpec, facts: RunFacts) -> float:
    """Forward passes over `batches` global batches after every `every_steps`."""
    every = spec.evaluation.every_steps
    if every is None:
        return 0.0
    batches = facts.train_steps // every * spec.evaluation.batches
    return batches * facts.step_seconds * FORWARD_SHARE


def _tariff(spec: RunSpec, profile: ClusterProfile, facts: RunFacts) -> Tariff:
    return "spot" if is_spot(spec, profile, facts) else "on demand"


def _attempt(given: _Given, steps: int) -> Attempt:
    """An asynchronous save stalls longer when the one before is still being written; the first
    save of an attempt is taken to wait as long as the others."""
    checkpoint, stops = given.checkpoint, given.stops
    work = steps * given.seconds_per_step
    stall, delay = checkpoint.stall_seconds, 0.0
    if checkpoint.asynchronous:
        stall += max(0.0, checkpoint.write_seconds - work)
        delay = checkpoint.write_seconds
    preemption = stops.preemption_mtbf_seconds
    return Attempt(
        work_seconds=work,
        stall_seconds=stall,
        delay_seconds=delay,
        start_seconds=stops.restart_seconds,
        last_save_seconds=checkpoint.last_save_seconds,
        limit_seconds=math.inf if given.facts.walltime is None else float(given.facts.walltime),
        failures_per_second=1 / stops.failure_mtbf_seconds,
        preemptions_per_second=1 / preemption if preemption else 0.0,
        warned=stops.warned,
    )


def _totals(given: _Given, steps: int) -> _Totals:
    """Sums over all attempts: as many as it takes to save the whole work, and the part of a start
    and of a last save that belongs to the last one, which ends by being done."""
    attempt = _attempt(given, steps)
    _refuse_short_limit(given, attempt)
    mean = expected(attempt)
    if mean.saved_seconds < _HOPELESS_SHARE * mean.occupied_seconds:
        raise _hopeless(given)
    count = given.work_seconds / mean.saved_seconds
    slices, last = _slices(given, attempt, count * mean.limited)
    starts = count + last
    times = TimeShares(
        training_seconds=given.training_seconds,
        evaluation_seconds=given.evaluation_seconds,
        saving_seconds=count * mean.stalled_seconds + last * attempt.last_save_seconds,
        redone_seconds=count * mean.redone_seconds,
        starting_seconds=count * mean.starting_seconds + last * attempt.start_seconds,
        waiting_seconds=starts * given.facts.queue_seconds
        + count * mean.preempted * given.preemption_wait_seconds,
    )
    return _Totals(times, slices, count * mean.failed, count * mean.preempted, starts)


def _slices(given: _Given, attempt: Attempt, limited: float) -> tuple[int, float]:
    """Attempts that the time limit makes of a run without failures, and how many starts there are
    beyond the mean number: one for the first, less the ends by the limit that are not reached."""
    if math.isinf(attempt.limit_seconds):
        return 1, 1.0
    exact = given.work_seconds / attempt.full_work_seconds
    slices = max(1, math.ceil(exact - 1e-9))
    return slices, 1 - limited * (1 - (slices - 1) / exact)


def _refuse_short_limit(given: _Given, attempt: Attempt) -> None:
    if attempt.usable_seconds > given.facts.step_seconds:
        return
    parts = (
        f"start-up {short_duration(attempt.start_seconds)}, one step "
        f"{short_duration(given.facts.step_seconds)}, last save "
        f"{short_duration(attempt.last_save_seconds)}"
    )
    limit = short_duration(attempt.limit_seconds)
    raise DoesNotFitError(
        f"walltime {limit} is too short for one attempt: {parts}",
        "raise `resources.walltime`",
    )


def _hopeless(given: _Given) -> DoesNotFitError:
    stops = given.stops
    rate = 1 / stops.failure_mtbf_seconds
    if stops.preemption_mtbf_seconds:
        rate += 1 / stops.preemption_mtbf_seconds
    return DoesNotFitError(
        f"{given.facts.nodes} nodes are stopped every {short_duration(1 / rate)} on average and "
        f"take {short_duration(stops.restart_seconds)} to restart: the run makes no progress",
        "use fewer nodes, save more often, or correct `reliability` in the profile",
    )


def _best_steps(given: _Given) -> int:
    """Daly's interval; the next save cannot begin before the last one is written."""
    checkpoint = given.checkpoint
    floor = checkpoint.write_seconds if checkpoint.asynchronous else 0.0
    stall, mtbf = checkpoint.stall_seconds, given.losing_mtbf_seconds
    return best_steps(stall, mtbf, floor, given.seconds_per_step)


def _interval(given: _Given, steps: int, totals: _Totals) -> CheckpointInterval:
    """The interval in use beside Young's, Daly's and what the latter would save."""
    stall, mtbf = given.checkpoint.stall_seconds, given.losing_mtbf_seconds
    best = min(_best_steps(given), given.facts.train_steps)
    saves = totals.times.occupied_seconds - _totals(given, best).times.occupied_seconds
    return CheckpointInterval(
        steps=steps,
        seconds=steps * given.seconds_per_step,
        young_seconds=young_seconds(stall, mtbf),
        daly_seconds=daly_seconds(stall, mtbf),
        best_steps=best,
        best_saves_seconds=max(0.0, saves),
    )


def _document(
    profile: ClusterProfile,
    given: _Given,
    totals: _Totals,
    interval: CheckpointInterval,
    tariff: Tariff,
) -> Forecast:
    facts, times = given.facts, totals.times
    gpu_hours = facts.gpus * times.occupied_seconds / 3600
    cost, price_notes = _cost(profile, tariff, gpu_hours)
    return Forecast(
        gpus=facts.gpus,
        nodes=facts.nodes,
        tariff=tariff,
        steps=facts.train_steps,
        tokens=facts.train_steps * facts.tokens_per_step,
        step_seconds=facts.step_seconds,
        checkpoint=given.checkpoint,
        interval=interval,
        interruptions=given.stops,
        times=times,
        slices=totals.slices,
        failures=totals.failures,
        preemptions=totals.preemptions,
        starts=totals.starts,
        ettr=times.training_seconds / times.occupied_seconds,
        ettr_with_queue=times.training_seconds / times.total_seconds,
        gpu_hours=gpu_hours,
        cost=cost,
        assumptions=(
            *given.stops.assumptions,
            f"save: {STAGING_SOURCE}",
            *_queue_notes(facts, totals),
            *price_notes,
        ),
        warnings=_warnings(given, interval, times),
    )


def _queue_notes(facts: RunFacts, totals: _Totals) -> tuple[str, ...]:
    if facts.queue_seconds or totals.starts < 1.5:
        return ()
    return (f"queue: none of the {totals.starts:,.0f} starts has to wait",)


def _cost(
    profile: ClusterProfile, tariff: Tariff, gpu_hours: float
) -> tuple[Cost | None, tuple[str, ...]]:
    prices = profile.prices
    if prices is None:
        return None, ()
    notes: tuple[str, ...] = ()
    price = prices.on_demand
    if tariff == "spot":
        notes = () if prices.spot else ("price: on demand, the profile has no `prices.spot`",)
        price = prices.spot or prices.on_demand
    amount = gpu_hours * price
    cost = Cost(tariff=tariff, currency=prices.currency, per_gpu_hour=price, amount=amount)
    return cost, notes


def _warnings(given: _Given, interval: CheckpointInterval, times: TimeShares) -> tuple[str, ...]:
    """What costs days and could be changed in the spec."""
    lines, checkpoint = [], given.checkpoint
    if checkpoint.asynchronous and checkpoint.write_seconds > interval.seconds:
        lines.append(
            f"A checkpoint takes {short_duration(checkpoint.write_seconds)} to write, more than "
            f"the {short_duration(interval.seconds)} between saves: each save waits for the last."
        )
    if interval.best_saves_seconds > 0.01 * times.occupied_seconds:
        lines.append(
            f"Saving every {interval.best_steps} steps instead of {interval.steps} would save "
            f"{short_duration(interval.best_saves_seconds)}."
        )
    if given.stops.preemption_mtbf_seconds and not given.stops.warned:
        lines.append(
            "The grace time of a preemption is too short for a step and a save "
            f"({short_duration(checkpoint.last_save_seconds + given.facts.step_seconds)}): "
            "work since the last checkpoint is lost."
        )
    return tuple(lines)
