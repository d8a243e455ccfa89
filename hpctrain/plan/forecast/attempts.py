"""Compute expected work, losses and ends of one attempt.

An attempt ends by a failure (work since the last durable checkpoint is lost), by a preemption
(the same, or nothing is lost when there is time to save), or by its time limit (a last save, then
the next attempt). Failures and preemptions are Poisson processes, so the end is the minimum of
two exponential times and a constant; all expectations below are exact for that.

Without a limit, preemptions, and delay of durability, the ratio of saved to elapsed time is
Daly's: tau / (M e^(R/M) (e^((tau + delta)/M) - 1)) (Daly 2006, "A higher order estimate of the
optimum checkpoint interval for restart dumps", FGCS 22, 303-312: the complete cost function). Its
first order is that of Kokolis et al. (arXiv 2410.21680), with which tests compare it.

Belongs here: this arithmetic. Does not belong here: where the rates come from.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Attempt:
    """One attempt as planned. Seconds, and events per second.

    After `start_seconds` the cycle is `work_seconds` of training and `stall_seconds` of saving;
    the save is durable `delay_seconds` (at most one cycle) after its stall. Ending in good order
    takes `last_save_seconds`; `warned`: a preemption leaves time for that.
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
        """Work of an attempt that reaches its limit."""
        if math.isinf(self.limit_seconds):
            return math.inf
        cycles, rest = divmod(self.usable_seconds, self.period_seconds)
        return cycles * self.work_seconds + min(rest, self.work_seconds)


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
