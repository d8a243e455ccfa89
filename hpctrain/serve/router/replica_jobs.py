"""What the controller needs of the jobs of replicas: one small interface.

Belongs here: the interface and what it reports. Does not belong here: Slurm and run directories
(`hpctrain.serve.jobs` has them), what is done about a job (`decide`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from hpctrain.records.service_layout import ReplicaName

JobState = Literal["submitting", "pending", "running", "over"]


@dataclass(frozen=True)
class JobView:
    """The newest job of one generation; times in seconds since the epoch.

    `state`: `submitting` has no job yet, `over` has none any more. `ends_at`: when its walltime
    makes it leave, of a running one. `drain_asked`: the replica was asked to leave. `well`: its job
    has ended because somebody wanted that. `problem`: why it has failed, as its supervisor says.
    """

    name: ReplicaName
    state: JobState
    submitted_at: float
    job_id: int | None = None
    node: str | None = None
    started_at: float | None = None
    ends_at: float | None = None
    drain_asked: bool = False
    well: bool = False
    problem: str = ""


class ReplicaJobs(Protocol):
    """Starts replicas, asks them to leave, and says how their jobs are."""

    def look(self) -> tuple[JobView, ...] | None:
        """All generations, oldest first; None if Slurm does not answer. Raises OSError."""

    def start(self, name: ReplicaName) -> int:
        """Submit a generation and return its job id.

        One that was begun and not submitted is submitted now. Raises HpctrainError, OSError.
        """

    def drain(self, name: ReplicaName) -> None:
        """Ask a generation to leave: a waiting job ends at once. Raises HpctrainError, OSError."""
