"""Why did this launch end? One pure function over evidence.

Order of trust: what the run itself has made durable (done marker, a newer epoch, a cancel), then
what Slurm says about the job, then what the ranks say, then what `srun` printed, then its exit
code. `srun`'s
code comes last because it is the highest code of all tasks and is masked by the kill that follows
(a rank that exits 3 reads as 143 there). Belongs here: reading evidence. Does not belong here:
what to do about it (see `policy`), and any I/O.
"""

from __future__ import annotations

import re

from hpctrain.supervise.causes import Cause
from hpctrain.supervise.documents import (
    Evidence,
    JobFacts,
    TaskFailure,
    Verdict,
)

# slurmstepd prints the reason of a kill to the stderr of the step and of the batch script:
# src/slurmd/slurmstepd/req.c, _handle_terminate and _handle_notify_job.
_NOTICES = (
    ("DUE TO PREEMPTION", Cause.PREEMPTED),
    ("DUE TO TIME LIMIT", Cause.TIME_LIMIT),
    ("DUE TO NODE FAILURE", Cause.NODE_FAILURE),
    ("DUE TO JOB REQUEUE", Cause.REQUEUED),
    ("Node failure on", Cause.NODE_FAILURE),
)
_LAUNCH_FAILURES = re.compile(r"Unable to create step|Task launch for .* failed|launch failed")
_NOTICE = re.compile(
    rf"\*\*\* (?:STEP|JOB) |Node failure on |error: .*(?:{_LAUNCH_FAILURES.pattern})|oom.kill"
)
_TASK = re.compile(
    r"srun: error: (?P<node>\S+): tasks? (?P<tasks>[\d,\-]+): "
    r"(?P<what>Exited with exit code \d+|[A-Z][A-Za-z ()]+)"
)
_ENDING_STATES = frozenset({"COMPLETING", "CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL"})


def read_task_failure(line: str) -> TaskFailure | None:
    """The task failure that a line of srun's stderr reports, if it reports one."""
    match = _TASK.search(line)
    return TaskFailure(match["node"], match["tasks"], match["what"].strip()) if match else None


def is_notice(line: str) -> bool:
    """True if Slurm says in this line why it ended something."""
    return _NOTICE.search(line) is not None


def classify(evidence: Evidence) -> Verdict:
    """The verdict on one launch."""
    for judge in (_by_the_run, _by_slurm, _by_requests, _by_ranks, _by_srun):
        verdict = judge(evidence)
        if verdict is not None:
            return verdict
    return Verdict(
        Cause.UNKNOWN,
        f"srun ended with code {evidence.srun_exit_code} and nothing says why",
        evidence.notices[-3:],
    )


def _by_the_run(evidence: Evidence) -> Verdict | None:
    if evidence.done:
        return Verdict(Cause.DONE, "the target step is reached and its checkpoint is verified")
    if evidence.superseded:
        return Verdict(Cause.SUPERSEDED, "a newer launch of this run has taken over")
    if evidence.cancel_requested:
        return Verdict(Cause.CANCELLED, "cancelled with `hpctrain cancel`")
    return None


def _by_slurm(evidence: Evidence) -> Verdict | None:
    job = evidence.job
    if job is None:
        return _by_last_words(evidence)
    if job.restart_count > evidence.restart_count:
        cause = _noticed(evidence) or (Cause.PREEMPTED if job.preempt_time else Cause.REQUEUED)
        reason = f"Slurm has requeued the job (restart {job.restart_count}): {_words(cause)}"
        return Verdict(cause, reason, _job_lines(evidence, job), already_requeued=True)
    if job.state in _ENDING_STATES:
        return _ended_by_slurm(evidence, job)
    return None


def _by_last_words(evidence: Evidence) -> Verdict | None:
    """slurmstepd has said why it ends the step, and the controller says nothing any more."""
    cause = _noticed(evidence)
    if cause is None:
        return None
    # A requeue of a job that its user has cancelled in the queue would bring it back.
    queued = cause is Cause.REQUEUED
    reason = f"Slurm ended the step: {_words(cause)}"
    return Verdict(cause, reason, evidence.notices[-3:], already_requeued=queued)


def _ended_by_slurm(evidence: Evidence, job: JobFacts) -> Verdict:
    cause = _noticed(evidence)
    if job.reason == "TimeLimit" or job.state == "TIMEOUT":
        cause = Cause.TIME_LIMIT
    elif job.reason in ("NodeDown", "NodeFail") or job.state == "NODE_FAIL":
        cause = Cause.NODE_FAILURE
    elif job.state == "PREEMPTED":
        cause = Cause.PREEMPTED
    cause = cause or Cause.CANCELLED
    return Verdict(cause, f"Slurm ends the job: {_words(cause)}", _job_lines(evidence, job))


def _by_requests(evidence: Evidence) -> Verdict | None:
    if evidence.job is not None and evidence.job.preempt_time:
        return _in_grace(evidence, evidence.job)
    if not _asked_to_leave(evidence):
        return None
    if "USR1" in evidence.signals:
        reason = "the time limit is near: the trainer saved and left"
        return Verdict(Cause.TIME_LIMIT, reason, ("signal USR1 from Slurm",))
    if evidence.stop_requested_by is not None:
        return Verdict(Cause.YIELDED, f"asked to stop by {evidence.stop_requested_by}")
    if evidence.job is None:
        return None
    return Verdict(
        Cause.YIELDED,
        "a signal asked the trainer to stop, and Slurm records no preemption",
        _job_lines(evidence, evidence.job),
    )


def _in_grace(evidence: Evidence, job: JobFacts) -> Verdict | None:
    """How the ranks end in a grace period is no failure: TERM and the loss of peers end them.

    A wrong setting is wrong in the next attempt too.
    """
    if any(exit_.outcome == "config_error" for exit_ in evidence.rank_exits):
        return None
    reason = "the trainer saved and left within the grace period"
    if not _asked_to_leave(evidence):
        reason = "the ranks ended within the grace period, without a last save"
    return Verdict(Cause.PREEMPTED, reason, _job_lines(evidence, job))


def _asked_to_leave(evidence: Evidence) -> bool:
    if any(exit_.outcome in ("crash", "config_error") for exit_ in evidence.rank_exits):
        return False
    return any(exit_.outcome == "yielded" for exit_ in evidence.rank_exits)


def _by_ranks(evidence: Evidence) -> Verdict | None:
    for exit_ in evidence.rank_exits:
        if exit_.outcome == "config_error":
            lines = (f"rank {exit_.rank} on {exit_.node}: {exit_.message}",)
            return Verdict(Cause.CONFIG_ERROR, exit_.message, lines, exit_.rank)
    if evidence.stall is not None:
        stall = evidence.stall
        reason = (
            f"no sign of life for {stall.silent_seconds:.0f} s while {stall.phase} "
            f"(limit {stall.limit_seconds:.0f} s)"
        )
        return Verdict(Cause.HANG, reason)
    if _noticed(evidence) is Cause.NODE_FAILURE:
        return Verdict(Cause.NODE_FAILURE, "a node of the job failed", evidence.notices[-3:])
    return _never_launched(evidence) or _crash(evidence)


def _never_launched(evidence: Evidence) -> Verdict | None:
    """srun could not start some tasks and ends the others, which is no crash of theirs."""
    lines = tuple(line for line in evidence.notices if _LAUNCH_FAILURES.search(line))
    if evidence.started or not lines:
        return None
    return Verdict(Cause.LAUNCH_FAILURE, f"srun could not start the step: {lines[0]}", lines[:3])


def _crash(evidence: Evidence) -> Verdict | None:
    """A rank that was killed leaves no record, so srun's first line about a death comes first."""
    killed = [f for f in evidence.task_failures if not f.what.startswith("Exited")]
    crashes = [exit_ for exit_ in evidence.rank_exits if exit_.outcome == "crash"]
    lines = tuple(f"{f.node}: task {f.tasks}: {f.what}" for f in evidence.task_failures[:3])
    if evidence.task_failures and killed and killed[0] is evidence.task_failures[0]:
        first = killed[0]
        rank = int(first.tasks) if first.tasks.isdigit() else None
        reason = f"rank {first.tasks} on {first.node} was ended by a signal: {first.what}"
        return Verdict(Cause.CRASH, reason, lines, rank)
    if crashes:
        root = crashes[0]
        lines = (*(f"rank {c.rank} on {c.node}: {c.message}" for c in crashes[:3]), *lines)
        return Verdict(Cause.CRASH, f"rank {root.rank} failed: {root.message}", lines, root.rank)
    if evidence.task_failures:
        first = evidence.task_failures[0]
        return Verdict(Cause.CRASH, f"task {first.tasks} on {first.node}: {first.what}", lines)
    return None


def _by_srun(evidence: Evidence) -> Verdict | None:
    code = evidence.srun_exit_code
    if code is not None and code < 0:
        return Verdict(Cause.CRASH, f"srun itself was killed by signal {-code}", evidence.notices)
    if not evidence.started and code not in (0, None):
        reason = f"srun could not start the step (code {code})"
        return Verdict(Cause.LAUNCH_FAILURE, reason, evidence.notices[-3:])
    return None


def _noticed(evidence: Evidence) -> Cause | None:
    for line in evidence.notices:
        for text, cause in _NOTICES:
            if text in line:
                return cause
    return None


def _words(cause: Cause) -> str:
    return {
        Cause.PREEMPTED: "preempted by a job of higher priority",
        Cause.TIME_LIMIT: "the time limit is reached",
        Cause.NODE_FAILURE: "a node failed",
        Cause.REQUEUED: "requeued by its owner or an administrator",
        Cause.CANCELLED: "cancelled",
    }.get(cause, str(cause))


def _job_lines(evidence: Evidence, job: JobFacts) -> tuple[str, ...]:
    line = (
        f"Slurm: state {job.state}, reason {job.reason}, restarts {job.restart_count}, "
        f"preempt time {'set' if job.preempt_time else 'not set'}"
    )
    return (line, *evidence.notices[-2:])
