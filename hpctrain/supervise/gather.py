"""From what was seen to `Evidence`: the one place where the supervisor's adapters meet.

Belongs here: collecting and converting. Does not belong here: judging.
"""

from __future__ import annotations

import time

from hpctrain.errors import SlurmError
from hpctrain.store.ledger import EventKind
from hpctrain.store.signs import read_exit_records
from hpctrain.supervise.context import AttemptContext
from hpctrain.supervise.documents import Evidence, JobFacts, RankExit
from hpctrain.supervise.process import Launch
from hpctrain.supervise.watch import LaunchWatch

# A controller that restarts is away for seconds to minutes; the job loses nothing by waiting,
# because without an answer it could not requeue either.
_PATIENCE_SECONDS = 600.0
_RETRY_SECONDS = 3.0


def gather(context: AttemptContext, launch: Launch, watch: LaunchWatch) -> Evidence:
    """Everything known about a launch that has ended."""
    records = read_exit_records(context.run_layout, watch.epoch)
    done = context.run_layout.done.exists()
    wrong = any(record.outcome == "config_error" for record in records)
    return Evidence(
        done=done,
        superseded=watch.superseded,
        cancel_requested=_cancel_requested(context),
        stop_requested_by=_who_asked_to_stop(context),
        signals=context.signals.names,
        srun_exit_code=launch.poll(),
        task_failures=launch.failures,
        notices=launch.notices,
        rank_exits=tuple(
            RankExit(record.rank, record.node, record.outcome, record.message or "")
            for record in sorted(records, key=lambda record: record.time)
        ),
        job=None if done or watch.superseded else job_facts(context, patient=not wrong),
        restart_count=context.attempt.restart_count,
        stall=watch.stall,
        started=watch.started or bool(records),
    )


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


def _cancel_requested(context: AttemptContext) -> bool:
    """A cancel since this attempt started; an older one was taken back by whoever restarted it."""
    requested = False
    for event in context.ledger.events():
        if event.job_id == context.job_id:
            requested = event.event is EventKind.CANCEL_REQUESTED or (
                requested and event.event is not EventKind.ATTEMPT_STARTED
            )
    return requested


def _who_asked_to_stop(context: AttemptContext) -> str | None:
    """A stop file that is not our own answer to Slurm's warning was written by a person."""
    path = context.run_layout.stop_request
    if "USR1" in context.signals.names or not path.exists():
        return None
    return f"the file control/{path.name}"
