"""From what was seen to `Evidence`: the one place where the supervisor's adapters meet.

Belongs here: collecting and converting. Does not belong here: judging.
"""

from __future__ import annotations

import time

from hpctrain.checkpoints.discover import checkpoints
from hpctrain.errors import SlurmError
from hpctrain.store.ledger import EventKind
from hpctrain.store.signs import (
    ExitRecord,
    Progress,
    read_agent_records,
    read_exit_records,
    read_record,
)
from hpctrain.supervise.agents import failures_below_agents
from hpctrain.supervise.causes import Cause
from hpctrain.supervise.context import AttemptContext
from hpctrain.supervise.control import Request, requested
from hpctrain.supervise.documents import Evidence, Finding, JobFacts, RankExit, TaskFailure
from hpctrain.supervise.process import Launch
from hpctrain.supervise.slurm_words import exit_code
from hpctrain.supervise.watch import LaunchWatch

# A controller that restarts is away for seconds to minutes; the job loses nothing by waiting,
# because without an answer it could not requeue either.
_PATIENCE_SECONDS = 600.0
_RETRY_SECONDS = 3.0
_STALLED_SECONDS = 30.0
_GOOD_OUTCOMES = frozenset({"done", "yielded"})


def gather(context: AttemptContext, launch: Launch, watch: LaunchWatch) -> Evidence:
    """Everything known about a launch that has ended."""
    run = context.run_layout
    records = read_exit_records(run, watch.epoch)
    done = run.done.exists()
    wrong = any(record.outcome == "config_error" for record in records)
    wish = requested(run)
    progress = read_record(run.progress, Progress)
    good = (checkpoint.step for checkpoint in checkpoints(run.checkpoints) if checkpoint.good)
    return Evidence(
        done=done,
        superseded=watch.superseded,
        cancel_requested=_cancel_requested(context),
        stop_requested_by=_who(wish, "stop", "stop-now"),
        hold_requested_by=_who(wish, "hold"),
        signals=context.signals.names,
        srun_exit_code=launch.poll(),
        task_failures=_task_failures(context, launch, watch),
        notices=launch.notices,
        rank_exits=tuple(_rank_exit(record) for record in sorted(records, key=_ended_at)),
        job=None if done or watch.superseded else job_facts(context, patient=not wrong),
        restart_count=context.attempt.restart_count,
        stall=watch.stall,
        started=watch.started or bool(records),
        step_remains=watch.step_remains,
        findings=_storage(watch.storage_stalled_seconds),
        world_size=watch.tasks,
        nodes=watch.nodes,
        resume_step=watch.resume_step,
        last_step=progress.step if progress and progress.epoch == watch.epoch else None,
        checkpoint_step=next(good, None),
        left_startup=watch.left_startup,
        limit_near=watch.limit_near,
    )


def _task_failures(
    context: AttemptContext, launch: Launch, watch: LaunchWatch
) -> tuple[TaskFailure, ...]:
    """Of ranks, by their numbers. Where srun's tasks are agents, these know about the ranks.

    What was killed after we began to end the step was killed by us.
    """
    by_others = [
        one for one in launch.failures if one.at < watch.killed_at or exit_code(one) is not None
    ]
    if context.config.launcher == "srun":
        return tuple(by_others)
    return failures_below_agents(read_agent_records(context.run_layout, watch.epoch), by_others)


def needs_a_look(evidence: Evidence) -> bool:
    """True if something has failed, so that logs, kernels and nodes have to be asked why."""
    if evidence.done or evidence.superseded or evidence.cancel_requested:
        return False
    if evidence.stop_requested_by or evidence.hold_requested_by or evidence.left_startup:
        return False
    left_well = bool(evidence.rank_exits) and all(
        rank.outcome in _GOOD_OUTCOMES for rank in evidence.rank_exits
    )
    preempted = evidence.job is not None and evidence.job.preempt_time
    return not left_well and not preempted


def keeps_nodes(evidence: Evidence) -> bool:
    """True unless Slurm ends the job; without an answer the nodes are taken to be ours."""
    running = evidence.job is None or evidence.job.state == "RUNNING"
    # A step that cannot be ended on nodes that all answer: only the end of the job clears it.
    return running and not (evidence.step_remains and evidence.probed and not evidence.lost_nodes)


def job_facts(context: AttemptContext, *, patient: bool) -> JobFacts | None:
    """What Slurm says about this job; None when it does not answer.

    With `patient` (the answer decides what is done) the controller is asked until it answers:
    only it can tell a preemption, a cancel or a lost node from a crash.
    """
    deadline = time.monotonic() + (_PATIENCE_SECONDS if patient else 0.0)
    while True:
        try:
            record = context.slurm.show_job(context.job_id)
        except SlurmError:
            record = None
        if record is not None:
            return JobFacts(
                state=record.state.name,
                reason=record.reason or "None",
                restart_count=record.restart_count or 0,
                preempt_time=record.preempt_time is not None,
            )
        if time.monotonic() >= deadline or context.signals.final:
            return None
        time.sleep(_RETRY_SECONDS)


def _storage(stalled_seconds: float) -> tuple[Finding, ...]:
    """The run directory did not answer us: ranks that were silent then may have waited for it."""
    if stalled_seconds < _STALLED_SECONDS:
        return ()
    line = f"the run directory did not answer for {stalled_seconds:.0f} s"
    return (Finding("run_directory_silent", Cause.STORAGE, "cascade", line),)


def _rank_exit(record: ExitRecord) -> RankExit:
    return RankExit(
        record.rank,
        record.node,
        record.outcome,
        record.message or "",
        cause=record.cause,
        step=record.step,
        ended_at=record.time,
    )


def _ended_at(record: ExitRecord) -> float:
    return record.time


def _who(wish: Request | None, *kinds: str) -> str | None:
    return wish.by if wish is not None and wish.kind in kinds else None


def _cancel_requested(context: AttemptContext) -> bool:
    """A cancel since this attempt started; an older one was taken back by whoever restarted it."""
    requested_here = False
    for event in context.ledger.events():
        if event.job_id == context.job_id:
            requested_here = event.event is EventKind.CANCEL_REQUESTED or (
                requested_here and event.event is not EventKind.ATTEMPT_STARTED
            )
    return requested_here
