"""How long a replica may take to leave, and what a shorter time breaks off. Pure.

A replica is withdrawn, the router stops asking it, what it has begun is computed, its engine ends.
Belongs here: these times and their sum, and the requests that a preemption breaks off. Does not
belong here: leaving (`hpctrain.serve.replica.drain`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.base.units import short_duration
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.profile.slurm import PartitionProfile
from hpctrain.spec.service import DrainSpec

# How long an engine without requests takes to end, at most. vLLM 0.32 on a CPU: 3 to 5 s.
ENGINE_END_SECONDS = 15.0
# slurmctld checks time limits every 30 s, and sends its warning up to 60 s early (sbatch(1),
# --signal); a busy one is later.
_SLURM_SECONDS = 60.0
# sbatch(1), --signal: sig_time must be between 0 and 65535.
_LONGEST_SECONDS = 65535


@dataclass(frozen=True)
class LeaveTimes:
    """Seconds that a replica may take: until the router asks no more, and for what has begun."""

    notice_seconds: float
    drain_seconds: float

    @property
    def whole_seconds(self) -> float:
        return self.notice_seconds + self.drain_seconds + ENGINE_END_SECONDS

    def warning_seconds(self, limit_seconds: float) -> int:
        """How long before its time limit a job is warned; at most half of the limit."""
        wanted = round((_SLURM_SECONDS + self.whole_seconds) / 10) * 10
        return max(1, min(wanted, round(limit_seconds / 2), _LONGEST_SECONDS))

    def warning_sentence(self, limit_seconds: float) -> str:
        """Describe that time in one sentence, for a comment of the script."""
        seconds = self.warning_seconds(limit_seconds)
        cut = seconds < round((_SLURM_SECONDS + self.whole_seconds) / 10) * 10
        parts = (
            f"{_SLURM_SECONDS:.0f} s for Slurm, {self.notice_seconds:.0f} s until the router asks "
            f"no more, {self.drain_seconds:.0f} s for requests that have begun, "
            f"{ENGINE_END_SECONDS:.0f} s for the engine's end"
        )
        limited = "; cut to half of the limit" if cut else ""
        return f"USR1 comes {seconds} s before the time limit: {parts}{limited}"


def leave_times(drain: DrainSpec) -> LeaveTimes:
    """Read the times of a service's spec."""
    return LeaveTimes(float(drain.notice), float(drain.longest))


def term_seconds(profile: ClusterProfile, partition: PartitionProfile) -> float:
    """How long Slurm waits between SIGTERM and the end: a grace, or KillWait of scancel.

    A job cannot tell which of them has come, so the longer one counts: requests are not broken off
    while there may be time for them.
    """
    kill_wait = float(profile.slurm.kill_wait)
    return max(kill_wait, preemption_seconds(partition) or 0.0)


def preemption_seconds(partition: PartitionProfile) -> float | None:
    """How long a preempted job may still run; None where nothing is preempted."""
    if partition.preemption.mode == "off":
        return None
    return float(partition.preemption.grace)


def broken_off(rate: float, left_seconds: float, request_seconds: Sequence[float]) -> float:
    """The requests that are broken off on average when a replica has `left_seconds` to leave.

    `rate`: requests per second of the replica; `request_seconds`: a sample of how long requests
    take from the first to the last token. A request that needs S seconds in all is broken off if it
    began less than S - left before the withdrawal: rate x E[(S - left)+] of them, by Little's law
    for the part of their time that is too late (Little 1961, Operations Research 9(3)).
    """
    if not request_seconds:
        return 0.0
    late = sum(max(0.0, seconds - left_seconds) for seconds in request_seconds)
    return rate * late / len(request_seconds)


def short_grace(
    times: LeaveTimes,
    partition: PartitionProfile,
    rate: float,
    request_seconds: Sequence[float],
) -> str | None:
    """Describe what a preemption loses because the grace ends too early; None if it is enough.

    None, too, where nothing is preempted. Arguments as of `broken_off`.
    """
    grace_seconds = preemption_seconds(partition)
    if grace_seconds is None or grace_seconds >= times.whole_seconds:
        return None
    # What the router sends until it knows is begun that much later. Without any grace it finds a
    # port that is closed, and asks another replica.
    left_seconds = max(0.0, grace_seconds - times.notice_seconds)
    lost = broken_off(rate, left_seconds, request_seconds)
    grace = short_duration(grace_seconds) if grace_seconds else "no grace"
    reason = f"gives preempted jobs {grace}"
    needs = (
        f"to leave takes up to {short_duration(times.whole_seconds)} "
        f"({short_duration(times.notice_seconds)} until the router asks no more, "
        f"{short_duration(times.drain_seconds)} for requests that have begun)"
    )
    count = "less than one request" if lost < 1 else f"about {lost:.0f} requests"
    return (
        f"partition {partition.name} {reason}, and {needs}: a preemption breaks off {count} on "
        "average"
    )
