"""From what was seen to `Evidence`: the one place where the supervisor's adapters meet.

Belongs here: collecting and converting. Does not belong here: judging.
"""

from __future__ import annotations

from hpctrain.checkpoints.discover import checkpoints
from hpctrain.slurm.messages import TaskFailure
from hpctrain.slurm.states import JobState
from hpctrain.store.ledger import EventKind
from hpctrain.store.requests import Request, read_request
from hpctrain.store.run_records import (
    ExitRecord,
    Progress,
    read_agent_records,
    read_exit_records,
    read_record,
)
from hpctrain.supervise.context import AttemptContext
from hpctrain.supervise.evidence.job_facts import job_facts
from hpctrain.supervise.evidence.launch_watch import LaunchWatch
from hpctrain.supervise.judge.agent_failures import failures_below_agents
from hpctrain.supervise.judge.causes import Cause
from hpctrain.supervise.judge.documents import Evidence, Finding, JobFacts, RankExit
from hpctrain.supervise.judge.scheduler_verdict import left_unexplained
from hpctrain.supervise.srun_process import Launch
from hpctrain.supervise.storage_retry import outlast

_STALLED_SECONDS = 30.0
_GOOD_OUTCOMES = frozenset({"done", "yielded"})


def gather(context: AttemptContext, launch: Launch, watch: LaunchWatch) -> Evidence:
    """Everything known about a launch that has ended.

    The run directory is waited for, unless the job is being ended: then, or when it does not come
    back, what Slurm says has to do.
    """
    try:
        return outlast(context, lambda: _gather(context, launch, watch))
    except OSError as error:
        return _without_directory(context, launch, watch, error)


def _gather(context: AttemptContext, launch: Launch, watch: LaunchWatch) -> Evidence:
    run = context.run_layout
    run.require()
    records = read_exit_records(run, watch.epoch)
    done = run.done.exists()
    wrong = any(record.outcome == "config_error" for record in records)
    wish = read_request(run)
    job = None if done or watch.superseded else job_facts(context, patient=not wrong)
    progress = read_record(run.progress, Progress)
    good = (checkpoint.step for checkpoint in checkpoints(run.checkpoints) if checkpoint.good)
    return Evidence(
        done=done,
        superseded=watch.superseded,
        cancel_requested=_cancel_confirmed(context, job),
        stop_requested_by=_who(wish, "stop", "stop-now"),
        hold_requested_by=_who(wish, "hold"),
        signals=watch.signals,
        srun_exit_code=launch.poll(),
        task_failures=_task_failures(context, launch, watch),
        notices=launch.notices,
        rank_exits=tuple(_rank_exit(record) for record in sorted(records, key=_ended_at)),
        job=job,
        restart_count=context.attempt.restart_count,
        stall=watch.stall,
        started=watch.started or bool(records),
        step_remains=watch.step_remains,
        findings=_storage(watch),
        world_size=watch.tasks,
        nodes=watch.nodes,
        resume_step=watch.resume_step,
        last_step=progress.step if progress and progress.epoch == watch.epoch else None,
        checkpoint_step=next(good, None),
        left_startup=watch.left_startup,
        limit_near=watch.limit_near,
    )


def _without_directory(
    context: AttemptContext, launch: Launch, watch: LaunchWatch, error: OSError
) -> Evidence:
    """Without a word of the ranks: what the run itself has made durable is not to be seen."""
    line = f"the run directory cannot be read: {error}"
    job = job_facts(context, patient=True)
    return Evidence(
        done=False,
        superseded=watch.superseded,
        cancel_requested=_cancel_confirmed(context, job),
        stop_requested_by=None,
        signals=watch.signals,
        srun_exit_code=launch.poll(),
        task_failures=tuple(launch.failures),
        notices=launch.notices,
        rank_exits=(),
        job=job,
        restart_count=context.attempt.restart_count,
        stall=watch.stall,
        started=watch.started,
        step_remains=watch.step_remains,
        findings=(Finding("run_directory_away", Cause.STORAGE, "root", line),),
        world_size=watch.tasks,
        nodes=watch.nodes,
        resume_step=watch.resume_step,
    )


def between_launches(context: AttemptContext, signals: tuple[str, ...]) -> Evidence:
    """What is known when something has come between two launches."""
    job = job_facts(context, patient=False)
    return Evidence(
        done=False,
        superseded=False,
        cancel_requested=_cancel_confirmed(context, job),
        stop_requested_by=None,
        signals=signals,
        srun_exit_code=None,
        task_failures=(),
        notices=(),
        rank_exits=(),
        job=job,
        restart_count=context.attempt.restart_count,
        stall=None,
        started=True,
    )


def _task_failures(
    context: AttemptContext, launch: Launch, watch: LaunchWatch
) -> tuple[TaskFailure, ...]:
    """Of ranks, by their numbers. Where srun's tasks are agents, these know about the ranks.

    What was killed after we began to end the step was killed by us.
    """
    by_others = [one for one in launch.failures if one.at < watch.killed_at or one.code is not None]
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
    return (not left_well and not preempted) or left_unexplained(evidence)


def keeps_nodes(evidence: Evidence) -> bool:
    """True unless Slurm ends the job; without an answer the nodes are taken to be ours."""
    running = evidence.job is None or evidence.job.state is JobState.RUNNING
    # A step that cannot be ended on nodes that all answer: only the end of the job clears it.
    return running and not (evidence.step_remains and evidence.probed and not evidence.lost_nodes)


def _storage(watch: LaunchWatch) -> tuple[Finding, ...]:
    """The run directory did not answer us: ranks that were silent then may have waited for it, and
    those that failed then may have failed for it."""
    if watch.storage_fault is not None:
        line = f"the run directory could not be read: {watch.storage_fault}"
        return (Finding("run_directory_away", Cause.STORAGE, "cascade", line),)
    if watch.storage_stalled_seconds < _STALLED_SECONDS:
        return ()
    line = f"the run directory did not answer for {watch.storage_stalled_seconds:.0f} s"
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
        node_dependent=record.node_dependent,
        signal=record.signal,
        signalled_ranks=record.signalled_ranks,
        loading_step=record.loading_step,
    )


def _ended_at(record: ExitRecord) -> float:
    return record.time


def _who(wish: Request | None, *kinds: str) -> str | None:
    return wish.by if wish is not None and wish.kind in kinds else None


def _cancel_confirmed(context: AttemptContext, job: JobFacts | None) -> bool:
    """A cancel since this attempt started that Slurm has carried out, as far as it tells.

    An older one was taken back by whoever restarted the job, and one that never reached Slurm,
    which runs the job as ever, is no end of it. A silent Slurm confirms nothing; the signal with
    which it ends jobs does.
    """
    if job is not None and job.state is JobState.RUNNING:
        return False
    if job is None and not context.signals.final:
        return False
    requested_here = False
    for event in context.ledger.events():
        if event.job_id == context.job_id:
            asked = event.event in (EventKind.CANCEL_REQUESTED, EventKind.CANCELLED)
            taken_back = event.event in (EventKind.ATTEMPT_STARTED, EventKind.CANCEL_FAILED)
            requested_here = asked or (requested_here and not taken_back)
    return requested_here
