"""How long a replica may take to leave. Pure.

A replica is withdrawn, the router stops asking it, what it has begun is computed, its engine ends.
Belongs here: these times and their sum. Does not belong here: leaving
(`hpctrain.serve.replica.drain`), what a preemption breaks off (`availability`).
"""

from __future__ import annotations

from dataclasses import dataclass

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
    preempts = partition.preemption.mode != "off"
    grace = float(partition.preemption.grace) if preempts else 0.0
    return max(float(profile.slurm.kill_wait), grace)
