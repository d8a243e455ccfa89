"""The facts that the supervisor judges and decides by. Pure data.

Does not belong here: its settings (see `hpctrain.records.supervise_config`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

from hpctrain.judge.causes import Cause
from hpctrain.slurm.reasons import JobEnd, JobHold, job_end, job_hold
from hpctrain.slurm.states import JobState

if TYPE_CHECKING:  # its patterns are compiled on import, which `hpctrain status` does not need
    from hpctrain.records.run_records import ExitRecord
    from hpctrain.slurm.messages import StepNotice, TaskFailure


class ActionKind(StrEnum):
    """What the supervisor does about a verdict."""

    FINISH = "finish"
    STOP = "stop"
    REQUEUE = "requeue"
    RELAUNCH = "relaunch"
    HOLD = "hold"
    LEAVE = "leave"


@dataclass(frozen=True)
class UnfitNode:
    """A node that answers and on which no launch can run as it is; `problem` is what it lacks."""

    node: str
    problem: str


@dataclass(frozen=True)
class JobFacts:
    """Slurm's record of the job at the end of a launch; a job that Slurm just signals is RUNNING.

    `reason` is Slurm's text, for display.
    """

    state: JobState
    reason: str
    restart_count: int
    preempt_time: bool

    @property
    def hold(self) -> JobHold | None:
        """Who holds the job in the queue; None if nobody does."""
        return job_hold(self.state, self.reason)

    @property
    def end(self) -> JobEnd | None:
        """Why Slurm ends the job; None if neither state nor reason names that."""
        return job_end(self.state, self.reason)


Role = Literal["root", "cascade", "advice"]


@dataclass(frozen=True)
class LogFinding:
    """A line that matched a signature, from a rank's log, srun, a kernel or the probe of a node.

    `cascade`: follows from another failure; `advice`: no evidence of a cause. `order` sorts
    findings by time as far as it is known (seconds since the epoch). `hard` marks broken
    hardware. `teardown`: later lines of the rank follow from its own end.
    """

    signature: str
    cause: Cause
    role: Role
    line: str
    rank: int | None = None
    node: str | None = None
    order: float = 0.0
    hard: bool = False
    teardown: bool = False

    @property
    def is_of_slurm(self) -> bool:
        """A line of Slurm itself: its signatures are those of the catalogue named `slurm_...`."""
        return self.signature.startswith("slurm_")


@dataclass(frozen=True)
class OddRank:
    """A rank whose stack differs from those of the others, or that gave none."""

    rank: int
    node: str
    where: str


@dataclass(frozen=True)
class Stall:
    """No progress for longer than the phase allows; `odd`: ranks whose stacks stand out."""

    phase: str
    silent_seconds: float
    limit_seconds: float
    odd: tuple[OddRank, ...] = ()


@dataclass(frozen=True)
class LaunchEvidence:
    """Everything known when a launch has ended. `job` is None when Slurm did not respond.

    `signals` are those that the supervisor got while the launch ran. `lost_nodes` did not answer a
    probe after the launch (`probed`), or Slurm lists them as down; `leaving_nodes` answer and are
    being shut down or rebooted. `unfit_nodes` failed a check of the probe that most others passed,
    without which no launch can run; `common_problems` are failures of such checks on most nodes
    alike.
    `step_remains`: Slurm has not ended the step, so something of it may still run somewhere.
    `nodes` are those of the launch in the order of its ranks, if that is known.
    `resume_step` is where the launch began, `last_step` the last finished step it reported,
    `checkpoint_step` the newest verified checkpoint. `stopped_in_startup`: the supervisor has ended
    the step, because a stop was requested before any step was trained. `limit_near`: the time limit
    is near, and Slurm's own warning has not come. `slow_nodes`: the ranks ended the launch before
    training because these were slow.
    """

    done: bool = False
    superseded: bool = False
    cancel_requested: bool = False
    stop_requested_by: str | None = None
    signals: tuple[str, ...] = ()
    srun_exit_code: int | None = None
    task_failures: tuple[TaskFailure, ...] = ()
    notices: tuple[StepNotice, ...] = ()
    rank_exits: tuple[ExitRecord, ...] = ()
    job: JobFacts | None = None
    restart_count: int = 0
    stall: Stall | None = None
    started: bool = False
    hold_requested_by: str | None = None
    findings: tuple[LogFinding, ...] = ()
    probed: bool = False
    lost_nodes: tuple[str, ...] = ()
    unfit_nodes: tuple[UnfitNode, ...] = ()
    common_problems: tuple[str, ...] = ()
    leaving_nodes: tuple[str, ...] = ()
    step_remains: bool = False
    world_size: int = 0
    nodes: tuple[str, ...] = ()
    resume_step: int = 0
    last_step: int | None = None
    checkpoint_step: int | None = None
    stopped_in_startup: bool = False
    limit_near: bool = False
    slow_nodes: tuple[UnfitNode, ...] = ()

    @property
    def notice_lines(self) -> tuple[str, ...]:
        """The lines of srun and slurmstepd about the step, for display and for signatures."""
        return tuple(notice.text for notice in self.notices)


class Suspicion(StrEnum):
    """How far a verdict counts as evidence against the nodes that it names.

    CAUSE: as far as its cause does. OUTSIDE: a rank was killed by a signal that no kernel explains,
    which is what people do. NONE: the program itself failed, wherever it ran. UNFIT: the nodes lack
    what other nodes of the launch have. SLOW: they were measured to be slow before training.
    """

    CAUSE = "cause"
    OUTSIDE = "outside"
    NONE = "none"
    UNFIT = "unfit"
    SLOW = "slow"


@dataclass(frozen=True)
class Verdict:
    """Why a launch ended: the cause, the reason as one sentence and the lines that show it.

    `nodes` are where it happened, `suspicion` is how far that counts against them, and `hard`
    means that their hardware is certainly at fault.
    `fingerprint` is equal for failures that are the same (class and place of the error, without
    addresses and numbers that change). `step` is the step at which it happened, if known.
    `checkpoint_step` is the checkpoint that is at fault, for the causes about one.
    `broken_allocation`: nothing can be launched with what Slurm has given this job.
    """

    cause: Cause
    reason: str
    evidence: tuple[str, ...] = ()
    rank: int | None = None
    already_requeued: bool = False
    nodes: tuple[str, ...] = ()
    hard: bool = False
    fingerprint: str = ""
    step: int | None = None
    hold: bool = False
    suspicion: Suspicion = Suspicion.CAUSE
    checkpoint_step: int | None = None
    broken_allocation: bool = False

    def followed_by(self, decision: str, separator: str = ": ") -> str:
        """Join the reason and what is decided because of it; the decision alone without a reason.

        `hpctrain why` runs the policy on hypothetical ends, which have no reason.
        """
        return f"{self.reason}{separator}{decision}" if self.reason else decision

    def preceded_by(self, decision: str) -> str:
        """As `followed_by`, with the decision first."""
        return f"{decision}: {self.reason}" if self.reason else decision

    @property
    def unfit_nodes(self) -> tuple[str, ...]:
        """The nodes that no launch is to use as they are."""
        return self.nodes if self.suspicion in (Suspicion.UNFIT, Suspicion.SLOW) else ()


@dataclass(frozen=True)
class Situation:
    """The inputs of the policy besides verdict and history.

    `keeps_nodes` is False once Slurm ends the job. `healthy_nodes` are those of the allocation
    that can be used; `needed_nodes` what the next launch takes at full size, `least_nodes` at the
    smallest. `exclude` are nodes of the cluster that the node ledger blames, `exclude_here`
    those of them that are healthy ones of the allocation, `why_exclude` the reasons.
    `unfit` are nodes of the cluster on which this run cannot work as they are.
    `good_checkpoints` are steps, newest first. `followed`: where Slurm does not requeue, another
    job of the run continues. `storage_away`: the ledger cannot be written at the moment.
    `skip_list_problem`: why `skips.json` cannot be extended; empty if it can.
    `restarts` is how often Slurm has started this job before.
    """

    keeps_nodes: bool = True
    allocated_nodes: int = 1
    healthy_nodes: int = 1
    needed_nodes: int = 1
    least_nodes: int = 1
    exclude: tuple[str, ...] = ()
    exclude_here: tuple[str, ...] = ()
    why_exclude: str = ""
    unfit: tuple[str, ...] = ()
    good_checkpoints: tuple[int, ...] = ()
    followed: bool = True
    storage_away: bool = False
    skip_list_problem: str = ""
    restarts: int = 0


@dataclass(frozen=True)
class Action:
    """What the supervisor does about a verdict, and why.

    `exclude` are nodes that the next launch avoids; `rollback_to` is the checkpoint step to go
    back to, with `skip_steps` batches left out. `rejected_step` is a checkpoint that no launch uses
    any more; it is kept in quarantine. `observed` lists what would have been done had the spec
    allowed it.
    """

    kind: ActionKind
    reason: str
    exit_code: int = 0
    delay_seconds: float = 0.0
    exclude: tuple[str, ...] = ()
    rollback_to: int | None = None
    skip_steps: int = 0
    rejected_step: int | None = None
    observed: tuple[str, ...] = ()


@dataclass(frozen=True)
class History:
    """Counts over the launches in the ledger, the present one included.

    Counted since the last launch that brought a new checkpoint: `failures_without_progress` all
    failures, `time_limits_without_progress`, `by_cause` each cause, `same_fingerprint` those in a
    row like the present one. `recent_failures` are all within the storm window, with or without
    progress. `anomalies_at_step` are earlier ones of numerics at the present step,
    `failed_loads` those in which the checkpoint of the present launch could not be loaded, the
    present one included.
    """

    failures_without_progress: int
    time_limits_without_progress: int
    by_cause: tuple[tuple[str, int], ...] = ()
    same_fingerprint: int = 0
    recent_failures: int = 0
    anomalies_at_step: int = 0
    ever_progressed: bool = False
    failed_loads: int = 0

    def of(self, cause: Cause) -> int:
        """Return how many launches without progress ended by this cause."""
        return dict(self.by_cause).get(str(cause), 0)
