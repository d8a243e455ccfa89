"""Job states, and the one parser of their spellings. Pure.

Belongs here: whether a state means waiting, active or over. Does not belong here: why a job is in
that state (`reasons`). Source: squeue(1), JOB STATE CODES; slurm/slurm.h.
"""

from __future__ import annotations

import re
from enum import StrEnum


class JobState(StrEnum):
    """A job state; the value is Slurm's long spelling. UNKNOWN is no reason to do anything."""

    BOOT_FAIL = "BOOT_FAIL"
    CANCELLED = "CANCELLED"
    COMPLETED = "COMPLETED"
    COMPLETING = "COMPLETING"
    CONFIGURING = "CONFIGURING"
    DEADLINE = "DEADLINE"
    FAILED = "FAILED"
    NODE_FAIL = "NODE_FAIL"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    PENDING = "PENDING"
    PREEMPTED = "PREEMPTED"
    REQUEUED = "REQUEUED"
    REQUEUE_FED = "REQUEUE_FED"
    REQUEUE_HOLD = "REQUEUE_HOLD"
    RESIZING = "RESIZING"
    RESV_DEL_HOLD = "RESV_DEL_HOLD"
    REVOKED = "REVOKED"
    RUNNING = "RUNNING"
    SIGNALING = "SIGNALING"
    SPECIAL_EXIT = "SPECIAL_EXIT"
    STAGE_OUT = "STAGE_OUT"
    STOPPED = "STOPPED"
    SUSPENDED = "SUSPENDED"
    TIMEOUT = "TIMEOUT"
    UNKNOWN = "UNKNOWN"

    @classmethod
    def parse(cls, text: str) -> JobState:
        """Read any spelling: `CANCELLED by 1000`, `CANCELLED+`, `running`, `COMPLETED,COMPLETING`.

        In a list the transitional state wins, as in Slurm's own short output: a job that is
        COMPLETED,COMPLETING still has processes. An unknown spelling gives UNKNOWN.
        """
        known = [state for word in re.split(r"[,&]", text) if (state := _word(word))]
        transitional = [state for state in known if state in _TRANSITIONAL]
        return (transitional or known or [cls.UNKNOWN])[0]

    @property
    def is_pending(self) -> bool:
        """True if the job waits (or is held) and has no processes."""
        return self in _PENDING

    @property
    def is_active(self) -> bool:
        """True if the job has nodes, so that processes of it may exist."""
        return self in _ACTIVE

    @property
    def is_running(self) -> bool:
        """True for RUNNING, and for SIGNALING, its state while Slurm sends it a signal."""
        return self in (JobState.RUNNING, JobState.SIGNALING)

    @property
    def is_ending(self) -> bool:
        """True while Slurm ends the job's processes and cleans up its nodes."""
        return self is JobState.COMPLETING

    @property
    def is_ended(self) -> bool:
        """True if the job is over; only a requeue can bring it back."""
        return self in _ENDED


def _states(words: str) -> frozenset[JobState]:
    return frozenset(map(JobState, words.split()))


_TRANSITIONAL = _states(
    "COMPLETING CONFIGURING REQUEUED REQUEUE_FED REQUEUE_HOLD RESIZING RESV_DEL_HOLD REVOKED "
    "SIGNALING SPECIAL_EXIT STAGE_OUT STOPPED"
)
_PENDING = _states("PENDING REQUEUED REQUEUE_FED REQUEUE_HOLD RESV_DEL_HOLD SPECIAL_EXIT")
_ACTIVE = _states("COMPLETING CONFIGURING RESIZING RUNNING SIGNALING STAGE_OUT STOPPED SUSPENDED")
_ENDED = frozenset(JobState) - _PENDING - _ACTIVE - {JobState.UNKNOWN}


def _word(text: str) -> JobState | None:
    """Parse one spelling; without `-P` sacct cuts long ones to `OUT_OF_ME+`."""
    word = text.strip().upper().split(" ")[0]
    if word.endswith("+"):
        matches = [state for state in JobState if state.value.startswith(word[:-1])]
        return matches[0] if len(matches) == 1 else None
    return JobState.__members__.get(word)
