"""What the supervisor is told (`supervise.json`) and the facts it reasons about. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from hpctrain.spec.document import Document


class SuperviseConfig(Document):
    """Written once at submit time; durations in seconds."""

    schema_version: Literal[1] = 1
    run_id: str
    target_step: int
    continuation: Literal["requeue", "none"]
    failures_without_progress: int
    stall_seconds: float
    setup_stall_seconds: float
    kill_wait_seconds: float
    verify: Literal["auto", "size", "sha256"]


class Cause(StrEnum):
    """Why a launch ended. One name per cause, everywhere."""

    DONE = "done"
    YIELDED = "yielded"
    PREEMPTED = "preempted"
    TIME_LIMIT = "time_limit"
    NODE_FAILURE = "node_failure"
    REQUEUED = "requeued"
    CANCELLED = "cancelled"
    CONFIG_ERROR = "config_error"
    CRASH = "crash"
    HANG = "hang"
    LAUNCH_FAILURE = "launch_failure"
    BAD_CHECKPOINT = "bad_checkpoint"
    SUPERSEDED = "superseded"
    SUPERVISOR_LOST = "supervisor_lost"
    UNKNOWN = "unknown"


class ActionKind(StrEnum):
    """What the supervisor does about it."""

    FINISH = "finish"
    STOP = "stop"
    REQUEUE = "requeue"
    RELAUNCH = "relaunch"
    LEAVE = "leave"


@dataclass(frozen=True)
class RankExit:
    """How one rank says that it ended."""

    rank: int
    node: str
    outcome: str
    message: str


@dataclass(frozen=True)
class TaskFailure:
    """One `srun: error: NODE: task N: ...` line; srun prints them in the order of death."""

    node: str
    tasks: str
    what: str


@dataclass(frozen=True)
class JobFacts:
    """What Slurm says about the job at the end of a launch."""

    state: str
    reason: str
    restart_count: int
    preempt_time: bool


@dataclass(frozen=True)
class Stall:
    """No sign of life for longer than the phase allows."""

    phase: str
    silent_seconds: float
    limit_seconds: float


@dataclass(frozen=True)
class Evidence:
    """Everything known when a launch has ended. `job` is None when Slurm did not answer."""

    done: bool
    superseded: bool
    cancel_requested: bool
    stop_requested_by: str | None
    signals: tuple[str, ...]
    srun_exit_code: int | None
    task_failures: tuple[TaskFailure, ...]
    notices: tuple[str, ...]
    rank_exits: tuple[RankExit, ...]
    job: JobFacts | None
    restart_count: int
    stall: Stall | None
    started: bool


@dataclass(frozen=True)
class Verdict:
    """Why a launch ended, in one word, one sentence and the lines that say so."""

    cause: Cause
    reason: str
    evidence: tuple[str, ...] = ()
    rank: int | None = None
    already_requeued: bool = False


@dataclass(frozen=True)
class Action:
    """What is done about a verdict and why."""

    kind: ActionKind
    reason: str
    exit_code: int = 0
    delay_seconds: float = 0.0


@dataclass(frozen=True)
class History:
    """Failed launches in a row that brought no new checkpoint, the present one included."""

    failures_without_progress: int
    time_limits_without_progress: int
