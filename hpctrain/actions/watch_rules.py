"""What is wrong with a run, seen from outside, and what may be done about it. Pure.

A supervisor answers for its run while it lives. What is left for an onlooker: a supervisor that
is gone without a word, and a job that waits for something that will not come by itself. Principles:
what a user has cancelled, held or asked to stop is never touched, nor what an administrator holds;
a job of which nobody knows how it ended may have been cancelled, so it is only reported; budgets
are those of the supervisor, counted in the run's own ledger. Belongs here: one rule per symptom of
a job that runs or waits. Does not belong here: runs without a job (`watch_gone`), asking Slurm,
reading files, doing anything (see `watch`).
"""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.actions.watch_gone import of_gone
from hpctrain.actions.watch_look import (
    Look,
    Remedy,
    Sighting,
    Symptom,
    as_policy_says,
    lost,
    storm,
    tell,
)
from hpctrain.slurm.reasons import JobHold, WaitReason
from hpctrain.slurm.records import JobRecord
from hpctrain.slurm.states import JobState
from hpctrain.store.jobs import cancel_requested, generation
from hpctrain.store.ledger import Event, EventKind
from hpctrain.supervise.judge.causes import Cause
from hpctrain.supervise.judge.documents import ActionKind
from hpctrain.supervise.judge.launch_history import history

# slurmctld(8) sets the start of a requeued job to cred_expire + 1 s, 121 s by default; a longer
# wait was asked for by somebody (job_mgr.c, batch_requeue_fini).
_LONGEST_REQUEUE_DELAY_SECONDS = 300.0
_SHORTEST_DELAY_SECONDS = 10.0
_TOO_FEW_SECONDS = 1800.0
_NO_NODE = (
    WaitReason.NODES_UNAVAILABLE,
    WaitReason.BAD_CONSTRAINTS,
    WaitReason.NODE_DOWN,
    WaitReason.PARTITION_CONFIG,
)
_MISSING = (
    WaitReason.RESOURCES,
    WaitReason.PRIORITY,
    WaitReason.NODES_UNAVAILABLE,
    WaitReason.NODES_REQUIRED,
    WaitReason.PARTITION_NODE_LIMIT,
)


def sightings(look: Look) -> list[Sighting]:
    """What is wrong with the run; empty when all is well, or when a person wants it so."""
    if look.unrecorded:
        return [_unrecorded(look, look.unrecorded[0])]
    if not generation(look.events) or cancel_requested(look.events) or look.asked_by:
        return []
    live = [job for job in look.jobs if not job.state.is_ended]
    active = [job for job in live if job.state.is_active]
    if any(job.state is JobState.UNKNOWN for job in look.jobs):
        return []
    if active:
        return _of_running(look, active[0])
    if live:
        return [found for job in live for rule in _PENDING if (found := rule(look, job))][:1]
    return of_gone(look)


def _unrecorded(look: Look, job: JobRecord) -> Sighting:
    words = f"job {job.job_id} has the comment of this run, and its ledger does not know the job"
    return Sighting(look.run_id, Symptom.UNRECORDED, Remedy.ADOPT, words, job.job_id)


# -- a job runs --------------------------------------------------------------------------------


def _of_running(look: Look, job: JobRecord) -> list[Sighting]:
    """Its supervisor answers for it, unless that is dead or frozen, too.

    Nothing is done about it: whether the nodes hang or only this host's view of the file system
    cannot be told from here, and in the second case all runs would be killed at once.
    """
    silent_seconds = look.now - max(look.signs_time or 0.0, job.start_time or look.now)
    limit_seconds = max(look.config.stall_seconds, look.config.setup_stall_seconds)
    if job.state.is_running and silent_seconds > limit_seconds + look.grace_seconds:
        words = (
            f"no sign of life of trainer and supervisor for {silent_seconds / 60:.0f} min: look at "
            f"{job.node_list or 'its nodes'}; `scontrol requeue {job.job_id}` restarts it"
        )
        return [tell(look, Symptom.STALLED, words, job.job_id)]
    past = history(look.events, look.config.storm_window_seconds)
    ended_time = max((event.time for event in look.events if event.cause), default=0.0)
    recently = look.now - ended_time < look.config.storm_window_seconds
    if recently and past.recent_failures >= look.config.storm_failures:
        return [tell(look, Symptom.STORM, storm(look, past), job.job_id)]
    return []


# -- a job waits -------------------------------------------------------------------------------


def _launch_held(look: Look, job: JobRecord) -> Sighting | None:
    """Release a job that Slurm holds because a prolog failed.

    Slurm drains the node itself, so the job gets another one.
    """
    if job.hold is not JobHold.LAUNCH_FAILED:
        return None
    words = "a prolog or the launch of the script failed, and Slurm holds the job"
    closing = lost(look, job, Cause.PROLOG_FAILURE, words)
    return as_policy_says(look, Symptom.LAUNCH_HELD, Remedy.RELEASE, closing)


def _delayed(look: Look, job: JobRecord) -> Sighting | None:
    """A requeued job waits for old credentials to expire; its owner may end that."""
    if job.wait is not WaitReason.BEGIN_TIME or not job.restart_count or job.start_time is None:
        return None
    wait_seconds = job.start_time - (job.submit_time or 0.0)
    left_seconds = job.start_time - look.now
    past = history(look.events, look.config.storm_window_seconds)
    if wait_seconds > _LONGEST_REQUEUE_DELAY_SECONDS or left_seconds < _SHORTEST_DELAY_SECONDS:
        return None
    if past.recent_failures >= look.config.storm_failures:
        return None  # the wait does it good
    words = f"it would wait {left_seconds:.0f} s more after its requeue"
    return Sighting(look.run_id, Symptom.DELAYED, Remedy.START_NOW, words, job.job_id)


def _no_node_left(look: Look, job: JobRecord) -> Sighting | None:
    """The nodes that we keep the job away from may be those that it needs."""
    if job.wait not in _NO_NODE or not _excluded(look.events):
        return None
    nodes = ", ".join(_excluded(look.events))
    words = f"it cannot be scheduled ({job.reason}) while it avoids {nodes}"
    return Sighting(look.run_id, Symptom.EXCLUDED, Remedy.CLEAR_EXCLUDED, words, job.job_id)


def _excluded(events: Sequence[Event]) -> tuple[str, ...]:
    """The nodes that the newest requeue has excluded, unless they were cleared since."""
    for event in reversed(generation(events)):
        if event.event is EventKind.WATCH and event.action == Remedy.CLEAR_EXCLUDED:
            return ()
        if event.event is EventKind.ACTION and event.action == ActionKind.REQUEUE:
            return event.excluded
    return ()


def _too_few_nodes(look: Look, job: JobRecord) -> Sighting | None:
    """Nodes are missing for long, and the spec allows fewer (`resources.min_nodes`)."""
    shapes = look.config.shapes
    if len(shapes) < 2 or job.wait not in _MISSING:
        return None
    least, most = shapes[-1].nodes, shapes[0].nodes + look.config.spare_nodes
    waited_seconds = look.now - (job.submit_time or look.now)
    if job.node_count is None or job.node_count <= least or waited_seconds < _TOO_FEW_SECONDS:
        return None
    words = f"it has waited {waited_seconds / 60:.0f} min for {job.node_count} nodes"
    words = f"{words} and may begin with {least}"
    remedy = Remedy.TAKE_FEWER
    return Sighting(
        look.run_id, Symptom.TOO_FEW_NODES, remedy, words, job.job_id, nodes=(least, most)
    )


# None of these applies to a job that its user or an administrator holds.
_PENDING = (_launch_held, _no_node_left, _delayed, _too_few_nodes)
