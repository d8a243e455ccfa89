"""Forecast a whole run from a spec, a profile and the facts of a plan.

Belongs here: expected work, losses and ends of one attempt, sums over all attempts, warnings. Does
not belong here: rates and costs of single events (`rates`), intervals between saves (`intervals`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hpctrain.base.errors import DoesNotFitError
from hpctrain.base.units import short_duration
from hpctrain.plan.forecast.documents import (
    Assumption,
    CheckpointCost,
    CheckpointInterval,
    Cost,
    Forecast,
    Interruptions,
    RunFacts,
    Tariff,
    TimeShares,
    TrainerSaves,
)
from hpctrain.plan.forecast.intervals import (
    best_steps,
    configured_steps,
    daly_seconds,
    young_seconds,
)
from hpctrain.plan.forecast.rates import (
    FORWARD_SHARE,
    STAGING_SOURCE,
    checkpoint_cost,
    interruptions,
    is_spot,
    preemption_wait_seconds,
    trainer_save_cost,
)
from hpctrain.plan.job import JobSpec, TrainingJob
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.run import RunSpec

# -- One attempt --------------------------------------------------------------------------------
# An attempt ends by a failure (work since the last durable checkpoint is lost), by a preemption
# (the same, or nothing is lost when there is time to save), or by its time limit (a last save, then
# the next attempt). Failures and preemptions are Poisson processes, so the end is the minimum of
# two exponential times and a constant; all expectations below are exact for that.
#
# Without a limit, preemptions, and delay of durability, the ratio of saved to elapsed time is
# Daly's: tau / (M e^(R/M) (e^((tau + delta)/M) - 1)) (Daly 2006, "A higher order estimate of the
# optimum checkpoint interval for restart dumps", FGCS 22, 303-312: the complete cost function). Its
# first order is that of Kokolis et al. (arXiv 2410.21680), with which tests compare it.


@dataclass(frozen=True)
class Attempt:
    """One attempt as planned. Seconds, and events per second.

    After `start_seconds` the cycle is `work_seconds` of training and `stall_seconds` of saving;
    the save is durable `delay_seconds` (at most one cycle) after its stall. Ending in good order
    takes `last_save_seconds`; `warned`: a preemption leaves time for that. Without
    `saves_at_limit` the time limit costs the work since the last save, as a failure does.
    """

    work_seconds: float
    stall_seconds: float
    delay_seconds: float
    start_seconds: float
    last_save_seconds: float
    limit_seconds: float
    failures_per_second: float
    preemptions_per_second: float
    warned: bool
    saves_at_limit: bool = True

    @property
    def ends_per_second(self) -> float:
        return self.failures_per_second + self.preemptions_per_second

    @property
    def period_seconds(self) -> float:
        return self.work_seconds + self.stall_seconds

    @property
    def usable_seconds(self) -> float:
        """Time for training and saving before the last save; at or below 0: the limit is too
        short."""
        return self.limit_seconds - self.start_seconds - self.last_save_seconds

    @property
    def full_work_seconds(self) -> float:
        """Durable work of an attempt that reaches its limit."""
        if math.isinf(self.limit_seconds):
            return math.inf
        cycles, rest = divmod(self.usable_seconds, self.period_seconds)
        last = min(rest, self.work_seconds) if self.saves_at_limit else 0.0
        return cycles * self.work_seconds + last


@dataclass(frozen=True)
class Expected:
    """Means over one attempt; seconds, and probabilities of its three ends."""

    saved_seconds: float
    redone_seconds: float
    stalled_seconds: float
    starting_seconds: float
    failed: float
    preempted: float
    limited: float

    @property
    def occupied_seconds(self) -> float:
        return (
            self.saved_seconds + self.redone_seconds + self.stalled_seconds + self.starting_seconds
        )


def expected(attempt: Attempt) -> Expected:
    """Compute exact means for an attempt with `usable_seconds` above 0 and a rate above 0."""
    rate = attempt.ends_per_second
    reaches = math.exp(-attempt.limit_seconds * rate)
    ended = -math.expm1(-attempt.limit_seconds * rate)
    failed = attempt.failures_per_second / rate * ended
    preempted = attempt.preemptions_per_second / rate * ended
    graceful = attempt.preemptions_per_second / rate if attempt.warned else 0.0
    done = _work_done(attempt)
    at_limit = reaches * attempt.full_work_seconds if reaches else 0.0
    saved = (
        at_limit + (1 - graceful) * _durable_work(attempt, reaches) + graceful * (done - at_limit)
    )
    starting = -math.expm1(-attempt.start_seconds * rate) / rate
    saving_after_warning = preempted * attempt.last_save_seconds if attempt.warned else 0.0
    occupied = ended / rate + saving_after_warning
    return Expected(
        saved_seconds=saved,
        redone_seconds=max(0.0, done - saved),
        stalled_seconds=max(0.0, occupied - starting - done),
        starting_seconds=starting,
        failed=failed,
        preempted=preempted,
        limited=reaches,
    )


def _work_done(attempt: Attempt) -> float:
    """Compute mean seconds of training of an attempt, saved or not.

    The integral of the probability that the attempt still runs over the time in which it trains.
    """
    rate, whole = attempt.ends_per_second, _whole_periods(attempt)
    alive = math.exp(-attempt.start_seconds * rate)
    cycle = -math.expm1(-attempt.work_seconds * rate) / rate
    done = alive * cycle * _powers(attempt, whole)
    if math.isinf(whole):
        return done
    rest = min(attempt.usable_seconds - whole * attempt.period_seconds, attempt.work_seconds)
    begin = attempt.start_seconds + whole * attempt.period_seconds
    return done - math.exp(-begin * rate) * math.expm1(-rest * rate) / rate


def _durable_work(attempt: Attempt, reaches: float) -> float:
    """Compute mean durable work of an attempt that ends before its limit.

    `work_seconds` for each checkpoint, times the probability of an end between the time when the
    checkpoint is durable and the limit.
    """
    first = attempt.start_seconds + attempt.period_seconds + attempt.delay_seconds
    count = _whole_periods(attempt)
    if not math.isinf(count):
        in_time = math.floor(
            (attempt.limit_seconds - attempt.start_seconds - attempt.delay_seconds)
            / attempt.period_seconds
        )
        count = max(0, min(count, in_time))
    survived = math.exp(-first * attempt.ends_per_second) * _powers(attempt, count)
    return attempt.work_seconds * (survived - (count * reaches if reaches else 0.0))


def _whole_periods(attempt: Attempt) -> float:
    return (
        math.inf
        if math.isinf(attempt.limit_seconds)
        else math.floor(attempt.usable_seconds / attempt.period_seconds)
    )


def _powers(attempt: Attempt, count: float) -> float:
    """Sum 1 + r + ... + r^(count - 1) with r = e^(-period x rate), also where r is nearly 1."""
    exponent = attempt.period_seconds * attempt.ends_per_second
    return math.expm1(-count * exponent) / math.expm1(-exponent)


# -- The whole run -------------------------------------------------------------------------------


# Below this share of productive time a forecast is a refusal: the run would take a hundred times
# as long as its training.
_HOPELESS_SHARE = 0.01


@dataclass(frozen=True)
class _Run:
    """What is known of a run before its checkpoint interval is chosen."""

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
        if self.facts.walltime is not None and not self.facts.saves_when_stopped:
            rate += 1 / float(self.facts.walltime)
        return 1 / rate


@dataclass(frozen=True)
class _Totals:
    """Expected sums over the run for one checkpoint interval."""

    times: TimeShares
    slices: int
    failures: float
    preemptions: float
    starts: float


def forecast(spec: JobSpec, profile: ClusterProfile, facts: RunFacts) -> Forecast:
    """Compute expected days, failures and money for one plan.

    Of a trainer of its own (`facts.saves`) what is not known is assumed, and said.

    Raises DoesNotFitError when the time limit leaves no time to train, or failures leave next to
    none; InvalidInputError for a file system that the profile does not have. Evaluation is a
    forward pass over `batches` global batches after every `every_steps`.
    """
    evaluated, saves = 0, facts.saves
    if saves is None:
        assert isinstance(spec, RunSpec), "what saves as the facts say is a trainer of its own"
        checkpoint, every = checkpoint_cost(spec, profile, facts), spec.evaluation.every_steps
        evaluated = facts.train_steps // every * spec.evaluation.batches if every else 0
    else:
        checkpoint = trainer_save_cost(saves)
    run = _Run(
        facts=facts,
        checkpoint=checkpoint,
        stops=interruptions(spec, profile, facts, checkpoint),
        training_seconds=facts.training_seconds,
        evaluation_seconds=evaluated * facts.step_seconds * FORWARD_SHARE,
        preemption_wait_seconds=preemption_wait_seconds(profile, facts),
    )
    stall, mtbf, step = checkpoint.stall_seconds, run.losing_mtbf_seconds, run.seconds_per_step
    # a save cannot begin before the previous one is written
    floor = checkpoint.write_seconds if checkpoint.asynchronous else 0.0
    daly = best_steps(stall, mtbf, floor, step)
    if isinstance(spec, RunSpec):
        steps = configured_steps(spec.checkpoint, step, daly)
    else:
        assert saves is not None, "the facts of a trainer of its own say how it saves"
        daly = daly if saves.resumes else facts.train_steps
        steps = saves.every_steps or daly
    steps = min(steps, facts.train_steps)
    best = min(daly, facts.train_steps)
    totals = _totals(run, steps)
    times = totals.times
    interval = CheckpointInterval(
        steps=steps,
        seconds=steps * step,
        young_seconds=young_seconds(stall, mtbf),
        daly_seconds=daly_seconds(stall, mtbf),
        best_steps=best,
        best_saves_seconds=max(
            0.0, times.occupied_seconds - _totals(run, best).times.occupied_seconds
        ),
    )
    gpu_hours = facts.gpus * times.occupied_seconds / 3600
    assumptions = [*run.stops.assumptions, *_save_assumptions(saves, checkpoint, steps)]
    if not facts.queue_seconds and totals.starts >= 1.5:
        text = f"none of the {totals.starts:,.0f} starts has to wait"
        assumptions.append(Assumption(kind="queue", text=text))
    tariff: Tariff = "spot" if is_spot(spec, profile, facts) else "on demand"
    cost, prices = None, profile.prices
    if prices is not None:
        price = prices.on_demand
        if tariff == "spot" and prices.spot:
            price = prices.spot
        elif tariff == "spot":
            text = "on demand, the profile has no `prices.spot`"
            assumptions.append(Assumption(kind="price", text=text))
        amount = gpu_hours * price
        cost = Cost(tariff=tariff, currency=prices.currency, per_gpu_hour=price, amount=amount)
    return Forecast(
        gpus=facts.gpus,
        nodes=facts.nodes,
        tariff=tariff,
        steps=facts.train_steps,
        tokens=facts.tokens,
        step_seconds=facts.step_seconds,
        checkpoint=checkpoint,
        interval=interval,
        interruptions=run.stops,
        **vars(totals),
        ettr=times.training_seconds / times.occupied_seconds,
        ettr_with_queue=times.training_seconds / times.total_seconds,
        gpu_hours=gpu_hours,
        cost=cost,
        assumptions=tuple(assumptions),
        warnings=_warnings(run, interval, times),
    )


def _save_assumptions(
    saves: TrainerSaves | None, checkpoint: CheckpointCost, steps: int
) -> list[Assumption]:
    """Say what is taken for granted of saves."""
    if saves is None:
        return [Assumption(kind="save", text=STAGING_SOURCE)]
    if not saves.resumes:
        return [Assumption(kind="save", text="none, each launch starts over")]
    assumptions = []
    if not saves.measured:
        seconds = short_duration(checkpoint.stall_seconds)
        source = "not measured, nor in `trainer.signal.seconds`"
        if saves.seconds is not None:
            source = "at most, by `trainer.signal.seconds`; not measured"
        text = f"it stops training for {seconds} ({source})"
        assumptions.append(Assumption(kind="save", text=text))
    if saves.every_steps is None:
        text = f"every {steps:,} steps, the best interval (the trainer decides; not measured)"
        assumptions.append(Assumption(kind="save", text=text))
    return assumptions


def _totals(run: _Run, steps: int) -> _Totals:
    """Sum over all attempts with a save every `steps` steps: as many as it takes to save all work.

    An asynchronous save stalls longer while the previous one is still being written. The first
    save of an attempt is assumed to wait as long as the others. The last attempt ends because the
    run is complete: its start and its last save are added. Raises DoesNotFitError where an attempt
    or the run makes no progress.
    """
    checkpoint, stops = run.checkpoint, run.stops
    work = steps * run.seconds_per_step
    stall, delay = checkpoint.stall_seconds, 0.0
    if checkpoint.asynchronous:
        stall += max(0.0, checkpoint.write_seconds - work)
        delay = checkpoint.write_seconds
    preemption = stops.preemption_mtbf_seconds
    attempt = Attempt(
        work_seconds=work,
        stall_seconds=stall,
        delay_seconds=delay,
        start_seconds=stops.restart_seconds,
        last_save_seconds=checkpoint.last_save_seconds,
        limit_seconds=math.inf if run.facts.walltime is None else float(run.facts.walltime),
        failures_per_second=1 / stops.failure_mtbf_seconds,
        preemptions_per_second=1 / preemption if preemption else 0.0,
        warned=stops.warned,
        saves_at_limit=run.facts.saves_when_stopped,
    )
    if attempt.usable_seconds <= run.facts.step_seconds:
        raise DoesNotFitError(
            f"walltime {short_duration(attempt.limit_seconds)} is too short for one attempt: "
            f"start-up {short_duration(attempt.start_seconds)}, one step "
            f"{short_duration(run.facts.step_seconds)}, last save "
            f"{short_duration(attempt.last_save_seconds)}",
            "raise `resources.walltime`",
        )
    if not attempt.full_work_seconds:
        saves = run.facts.saves
        if saves is not None and not saves.resumes:
            raise DoesNotFitError(
                f"the run needs {short_duration(run.work_seconds)} and starts over in each attempt "
                f"of {short_duration(attempt.limit_seconds)}: it would never end",
                "`trainer.checkpoint` lets it resume; or raise `resources.walltime`",
            )
        raise DoesNotFitError(
            f"walltime {short_duration(attempt.limit_seconds)} ends each attempt before its first "
            f"save, which comes after {short_duration(attempt.start_seconds + work)}",
            "raise `resources.walltime`, save more often, or let the trainer save when it has to "
            "stop: `trainer.signal`",
        )
    mean = expected(attempt)
    if mean.saved_seconds < _HOPELESS_SHARE * mean.occupied_seconds:
        raise DoesNotFitError(
            f"{run.facts.nodes} nodes are stopped every "
            f"{short_duration(1 / attempt.ends_per_second)} on average and take "
            f"{short_duration(attempt.start_seconds)} to restart: the run makes no progress",
            "use fewer nodes, save more often, or correct `reliability` in the profile",
        )
    count = run.work_seconds / mean.saved_seconds
    # the attempts of a run without failures, and the starts beyond the mean number: one for the
    # first attempt, less the ends by the limit that are not reached
    slices, last = 1, 1.0
    if not math.isinf(attempt.limit_seconds):
        exact = run.work_seconds / attempt.full_work_seconds
        slices = max(1, math.ceil(exact - 1e-9))
        last = 1 - count * mean.limited * (1 - (slices - 1) / exact)
    starts = count + last
    times = TimeShares(
        training_seconds=run.training_seconds,
        evaluation_seconds=run.evaluation_seconds,
        saving_seconds=count * mean.stalled_seconds + last * attempt.last_save_seconds,
        redone_seconds=count * mean.redone_seconds,
        starting_seconds=count * mean.starting_seconds + last * attempt.start_seconds,
        waiting_seconds=starts * run.facts.queue_seconds
        + count * mean.preempted * run.preemption_wait_seconds,
    )
    return _Totals(times, slices, count * mean.failed, count * mean.preempted, starts)


def _warnings(run: _Run, interval: CheckpointInterval, times: TimeShares) -> tuple[str, ...]:
    """Warn about what costs days and could be changed in the spec."""
    lines, checkpoint = [], run.checkpoint
    if checkpoint.asynchronous and checkpoint.write_seconds > interval.seconds:
        lines.append(
            f"A checkpoint takes {short_duration(checkpoint.write_seconds)} to write, more than "
            f"the {short_duration(interval.seconds)} between saves: each save waits for the last."
        )
    saves = run.facts.saves
    known = saves is None or (saves.measured and saves.resumes)
    if known and interval.best_saves_seconds > 0.01 * times.occupied_seconds:
        lines.append(
            f"Saving every {interval.best_steps} steps instead of {interval.steps} would save "
            f"{short_duration(interval.best_saves_seconds)}."
        )
    # Of a trainer that does not save then, its level says what a stop costs.
    if run.facts.saves_when_stopped and run.stops.preemption_mtbf_seconds and not run.stops.warned:
        lines.append(
            "The grace time of a preemption is too short for a step and a save "
            f"({short_duration(checkpoint.last_save_seconds + run.facts.step_seconds)}): "
            "work since the last checkpoint is lost."
        )
    return tuple(lines)


def run_facts(job: TrainingJob) -> RunFacts | None:
    """Collect the inputs of a forecast; None when no step time is known."""
    plan = job.plan
    if plan.step_seconds is None:
        return None
    return RunFacts(
        step_seconds=plan.step_seconds,
        step_deviation=(plan.certainty.step_deviation or 0.0) if plan.certainty else 0.0,
        gpus=plan.layout.world_size,
        nodes=plan.nodes.nodes,
        parameters=plan.learned,
        tokens_per_step=plan.batch.tokens_per_step,
        train_steps=plan.batch.train_steps,
        batch=plan.batch,
        walltime=job.spec.resources.walltime or job.partition.max_walltime,
    )
