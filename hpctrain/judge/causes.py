"""Causes of the end of a launch, one name per cause everywhere, and groups of them. Pure.

Belongs here: names and groups. Does not belong here: how a cause is found (`classify`), what is
done about it (`policy`).
"""

from __future__ import annotations

from enum import StrEnum


class Cause(StrEnum):
    """Why a launch ended.

    NODE_COMMAND: a command of the site (`software.commands`) failed on some nodes; SITE_COMMAND: it
    failed on all of them, or once for the job. ENDED_EARLY: a trainer of its own ended with exit
    code 0 before its target; STARTS_OVER: one has not resumed from where it was told to.
    """

    DONE = "done"
    YIELDED = "yielded"
    PREEMPTED = "preempted"
    TIME_LIMIT = "time_limit"
    DEADLINE = "deadline"
    NODE_FAILURE = "node_failure"
    PROLOG_FAILURE = "prolog_failure"
    REQUEUED = "requeued"
    CANCELLED = "cancelled"
    EXTERNAL_SIGNAL = "external_signal"
    NODE_COMMAND = "node_command"
    SITE_COMMAND = "site_command"
    LAUNCH_FAILURE = "launch_failure"
    CRASH = "crash"
    HANG = "hang"
    GPU_OOM = "gpu_oom"
    HOST_OOM = "host_oom"
    GPU_ERROR = "gpu_error"
    FABRIC = "fabric"
    STORAGE = "storage"
    DISK_FULL = "disk_full"
    PORT = "port"
    DATA_LOADER = "data_loader"
    WEIGHTS = "weights"
    ENGINE_EXIT = "engine_exit"
    ENDED_EARLY = "ended_early"
    STARTS_OVER = "starts_over"
    DIVERGED = "diverged"
    SUSPECT_NUMERICS = "suspect_numerics"
    BAD_CHECKPOINT = "bad_checkpoint"
    LOAD_FAILED = "load_failed"
    DATA_CHANGED = "data_changed"
    CONFIG_ERROR = "config_error"
    USER_ERROR = "user_error"
    CONTROLLER_AWAY = "controller_away"
    SUPERSEDED = "superseded"
    SUPERVISOR_LOST = "supervisor_lost"
    UNKNOWN = "unknown"


# Caused by the scheduler or a person to a healthy run: no budget counts while it makes progress.
SCHEDULER_CAUSES = frozenset(
    {Cause.PREEMPTED, Cause.TIME_LIMIT, Cause.REQUEUED, Cause.CONTROLLER_AWAY}
)
# Caused by a machine: another machine helps.
MACHINE_CAUSES = frozenset(
    {
        Cause.NODE_FAILURE,
        Cause.PROLOG_FAILURE,
        Cause.NODE_COMMAND,
        Cause.LAUNCH_FAILURE,
        Cause.GPU_ERROR,
        Cause.FABRIC,
        Cause.STORAGE,
        Cause.PORT,
        Cause.HANG,
        Cause.SUSPECT_NUMERICS,
        Cause.SUPERVISOR_LOST,
    }
)
# Possibly caused by the run itself: a retry may help once or twice.
RUN_CAUSES = frozenset(
    {
        Cause.CRASH,
        Cause.GPU_OOM,
        Cause.HOST_OOM,
        Cause.DATA_LOADER,
        Cause.WEIGHTS,
        Cause.ENGINE_EXIT,
        Cause.ENDED_EARLY,
        Cause.DIVERGED,
        Cause.LOAD_FAILED,
        Cause.UNKNOWN,
    }
)
# A signal that neither a request nor a record of Slurm explains
# (a node that shuts down, a health checker, a controller that died with what it knew).
UNEXPLAINED_CAUSES = frozenset({Cause.EXTERNAL_SIGNAL})
# No retry helps.
FINAL_CAUSES = frozenset(
    {
        Cause.DEADLINE,
        Cause.DISK_FULL,
        Cause.BAD_CHECKPOINT,
        Cause.DATA_CHANGED,
        Cause.STARTS_OVER,
        Cause.CONFIG_ERROR,
        Cause.SITE_COMMAND,
        Cause.USER_ERROR,
        Cause.CANCELLED,
        Cause.YIELDED,
    }
)
# The checkpoints that there are cannot be used, or one of them.
CHECKPOINT_CAUSES = frozenset({Cause.BAD_CHECKPOINT, Cause.LOAD_FAILED})
# What happens to the replicas of a service only, and what to runs that train only.
_SERVING_CAUSES = frozenset({Cause.WEIGHTS, Cause.ENGINE_EXIT})
_TRAINING_CAUSES = frozenset(
    {
        Cause.DATA_LOADER,
        Cause.DIVERGED,
        Cause.SUSPECT_NUMERICS,
        Cause.BAD_CHECKPOINT,
        Cause.LOAD_FAILED,
        Cause.DATA_CHANGED,
    }
)
# What only a trainer of somebody's own does, and what only hpctrain's engines report.
_FOREIGN_CAUSES = frozenset({Cause.ENDED_EARLY, Cause.STARTS_OVER})
_ENGINE_CAUSES = frozenset({Cause.SUSPECT_NUMERICS, Cause.LOAD_FAILED, Cause.DATA_CHANGED})


def can_happen(cause: Cause, *, serves: bool, foreign: bool) -> bool:
    """Whether a launch can end so: that of a replica (`serves`), or one that trains.

    `foreign`: it trains by a program of somebody's own.
    """
    if serves:
        return cause not in _TRAINING_CAUSES | _FOREIGN_CAUSES
    return cause not in _SERVING_CAUSES | (_ENGINE_CAUSES if foreign else _FOREIGN_CAUSES)


FAILURE_CAUSES = MACHINE_CAUSES | RUN_CAUSES | UNEXPLAINED_CAUSES
