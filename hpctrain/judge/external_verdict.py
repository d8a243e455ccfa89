"""Judge the end of a launch by what the scheduler and people did to it. Pure.

Belongs here: state and reason of the job, notices of slurmstepd, requests. Does not belong here:
reports of ranks and machines (`rank_verdict`).
"""

from __future__ import annotations

import signal

from hpctrain.judge.causes import Cause
from hpctrain.judge.documents import JobFacts, LaunchEvidence, Verdict
from hpctrain.judge.job_end import cause_of_end, text_of
from hpctrain.judge.launch_nodes import nodes_of_ranks
from hpctrain.records.run_records import TrainerExit
from hpctrain.slurm.reasons import JobHold
from hpctrain.slurm.states import JobState

_HOLDERS = {
    JobHold.ADMIN: "held by an administrator, who alone can release it",
    JobHold.USER: "held by its owner: `hpctrain resume` releases it",
}
_HELD_AT_LAUNCH = {
    JobHold.LAUNCH_FAILED: "the prolog failed on a node",
    JobHold.USER_ENVIRONMENT: "the login environment could not be read on a node",
    JobHold.REQUEUE_LIMIT: "the job was launched too often (MaxBatchRequeue)",
}
# How a rank ends that did not fail by itself: by SIGKILL or SIGTERM, with srun's exit code for one
# of these signals, or with the trainer's code for a requested stop.
_SIGNALS_OF_OTHERS = frozenset({signal.SIGKILL, signal.SIGTERM})
_CODES_OF_OTHERS = frozenset(
    {TrainerExit.YIELDED, *(128 + number for number in _SIGNALS_OF_OTHERS)}
)
_FINAL_SIGNALS = frozenset({"TERM", "INT", "HUP"})
_SIGNED_BY_SLURM = frozenset(
    {Cause.PREEMPTED, Cause.TIME_LIMIT, Cause.NODE_FAILURE, Cause.REQUEUED}
)


def by_slurm(evidence: LaunchEvidence) -> Verdict | None:
    """Judge by the controller's record of the job, or by slurmstepd without one."""
    job = evidence.job
    if job is None:
        cause = noticed(evidence)
        if cause is None:
            return None
        return Verdict(
            cause,
            f"Slurm ended the step: {text_of(cause)}",
            evidence.notice_lines[-3:],
            # A requeue of a job that its user has cancelled in the queue would bring it back.
            already_requeued=cause is Cause.REQUEUED,
            nodes=failed_nodes(evidence) if cause is Cause.NODE_FAILURE else (),
        )
    if job.hold in _HELD_AT_LAUNCH:
        return Verdict(
            Cause.PROLOG_FAILURE,
            f"{_HELD_AT_LAUNCH[job.hold]}, and Slurm has requeued the job and holds it",
            _job_lines(evidence, job),
            already_requeued=True,
            nodes=failed_nodes(evidence),
        )
    if job.restart_count > evidence.restart_count or job.state is JobState.PENDING:
        cause = noticed(evidence) or (Cause.PREEMPTED if job.preempt_time else Cause.REQUEUED)
        held = f", and {_HOLDERS[job.hold]}" if job.hold in _HOLDERS else ""
        return Verdict(
            cause,
            f"Slurm has requeued the job (restart {job.restart_count}): {text_of(cause)}{held}",
            _job_lines(evidence, job),
            already_requeued=True,
            nodes=failed_nodes(evidence) if cause is Cause.NODE_FAILURE else (),
        )
    if job.state is JobState.COMPLETING or job.end is not None:
        cause = cause_of_end(job.end) or noticed(evidence) or Cause.CANCELLED
        return Verdict(
            cause,
            f"Slurm ends the job: {text_of(cause)}",
            _job_lines(evidence, job),
            nodes=failed_nodes(evidence) if cause is Cause.NODE_FAILURE else (),
        )
    return None


def by_requests(evidence: LaunchEvidence) -> Verdict | None:
    """Judge a trainer that stopped because of a request: a signal of Slurm, or a person's.

    A signal without an explanation is no request: see `left_unexplained`.
    """
    if evidence.job is not None and evidence.job.preempt_time:
        # TERM and lost peers end ranks in a grace period, which is no failure. A wrong setting is
        # wrong in the next attempt, too.
        if any(exit_.outcome == "config_error" for exit_ in evidence.rank_exits):
            return None
        reason = f"the job is being preempted: {_what_was_saved(evidence)}"
        if not (_stopped_while_starting(evidence) or _stopped_by_request(evidence)):
            reason = "the ranks ended within the grace period, without a last save"
        return Verdict(Cause.PREEMPTED, reason, _job_lines(evidence, evidence.job))
    requested = _request(evidence)
    warned = "USR1" in evidence.signals or evidence.limit_near
    explained = warned or requested is not None
    if not (_stopped_by_request(evidence) or (explained and _stopped_while_starting(evidence))):
        if not _only_ended_by_others(evidence):
            return None
        if requested is not None or evidence.job is None:
            return requested  # `stop --now` ends the step without any record of the ranks
        # Ended from outside while Slurm lists the job as running: the ranks were killed with their
        # srun, or only the supervisor got a signal to end.
        forced = any(notice.forced_end for notice in evidence.notices)
        ended = forced or not _FINAL_SIGNALS.isdisjoint(evidence.signals)
        if evidence.job.state is not JobState.RUNNING or not ended:
            return None
        return _signalled(evidence, "the step ended without a last save")
    if warned:
        reason = f"the time limit is near: {_what_was_saved(evidence)}"
        lines = ("signal USR1 from Slurm",) if "USR1" in evidence.signals else ()
        return Verdict(Cause.TIME_LIMIT, reason, lines)
    return requested or _signalled(evidence, _what_was_saved(evidence))


def left_unexplained(evidence: LaunchEvidence) -> bool:
    """True if ranks stopped because of a signal that neither a request nor Slurm explains.

    Nodes that shut down in good order send such a signal before Slurm learns of it. A controller
    that dies before it has saved its state has sent one, too.
    """
    explained = evidence.job is not None and (
        evidence.job.preempt_time or by_slurm(evidence) is not None
    )
    return (
        _stopped_by_request(evidence)
        and "USR1" not in evidence.signals
        and not evidence.limit_near
        and _request(evidence) is None
        and not explained
    )


def noticed(evidence: LaunchEvidence) -> Cause | None:
    """Find why Slurm ended the step, in srun's stderr or in the logs of ranks."""
    ends = (notice.end for notice in evidence.notices if notice.end is not None)
    cause = cause_of_end(next(ends, None))
    if cause is not None:
        return cause
    lines = (f for f in evidence.findings if f.is_of_slurm and f.role == "root")
    return next((f.cause for f in lines if f.cause in _SIGNED_BY_SLURM), None)


def _signalled(evidence: LaunchEvidence, what_followed: str) -> Verdict | None:
    """Judge a signal without an explanation, unless lost or leaving nodes explain it after all."""
    lines = _job_lines(evidence, evidence.job) if evidence.job is not None else ()
    if evidence.lost_nodes:
        return None
    # Who got a signal; `evidence.signals` are those to the supervisor itself.
    receivers = [f"the supervisor got {name}" for name in dict.fromkeys(evidence.signals)]
    ranks = sorted({rank for exit_ in evidence.rank_exits for rank in exit_.signalled_ranks})
    if ranks:
        known = nodes_of_ranks(evidence.nodes, evidence.world_size)
        nodes = [known[rank] for rank in ranks if rank in known]
        numbers = ", ".join(map(str, ranks[:8])) + (" and more" if len(ranks) > 8 else "")
        where = f" on {', '.join(dict.fromkeys(nodes))}" if nodes else ""
        receivers.append(f"{'rank' if len(ranks) == 1 else 'ranks'} {numbers}{where} got a signal")
    if evidence.leaving_nodes:
        reason = f"{', '.join(evidence.leaving_nodes[:8])} is being shut down: {what_followed}"
        evidence_lines = (*receivers, *lines)
        return Verdict(Cause.NODE_FAILURE, reason, evidence_lines, nodes=evidence.leaving_nodes)
    who = receivers[0] if receivers else "a rank got a signal"
    reason = f"{who}, which neither a request nor Slurm explains: {what_followed}"
    return Verdict(Cause.EXTERNAL_SIGNAL, reason, (*receivers[1:], *lines))


def _request(evidence: LaunchEvidence) -> Verdict | None:
    if evidence.hold_requested_by is not None:
        reason = f"asked to hold by {evidence.hold_requested_by}"
        return Verdict(Cause.YIELDED, reason, hold=True)
    if evidence.stop_requested_by is not None:
        return Verdict(Cause.YIELDED, f"asked to stop by {evidence.stop_requested_by}")
    return None


def _stopped_by_request(evidence: LaunchEvidence) -> bool:
    if any(exit_.outcome in ("crash", "config_error") for exit_ in evidence.rank_exits):
        return False
    return any(exit_.outcome == "yielded" for exit_ in evidence.rank_exits)


def _stopped_while_starting(evidence: LaunchEvidence) -> bool:
    """True if a request stopped the launch while it was starting.

    The first rank to exit breaks the connections of ranks that get the request a moment later. So
    before the first trained step, a crash without a cause of its own is put down to the request.
    """
    if evidence.stopped_in_startup:
        return True
    if _has_trained(evidence):
        return False
    outcomes = {one.outcome for one in evidence.rank_exits if one.cause is not None}
    outcomes |= {one.outcome for one in evidence.rank_exits if one.outcome != "crash"}
    return outcomes == {"yielded"}


def _has_trained(evidence: LaunchEvidence) -> bool:
    return evidence.last_step is not None and evidence.last_step > evidence.resume_step


def _what_was_saved(evidence: LaunchEvidence) -> str:
    """Describe what was kept of the launch, in the words of its first rank if it has any."""
    own = (one.words for one in evidence.rank_exits if one.rank == 0 and one.words)
    if _has_trained(evidence) and (words := next(own, None)) is not None:
        return words
    if evidence.stopped_in_startup or (evidence.rank_exits and not _has_trained(evidence)):
        return "stopped before its first step, so there was nothing to save"
    return "the trainer saved and left"


def _only_ended_by_others(evidence: LaunchEvidence) -> bool:
    """True if no rank is known to have failed by itself, and the launch has not hung."""
    if evidence.rank_exits or evidence.stall is not None or evidence.lost_nodes:
        return False
    if not evidence.started:
        return False
    return all(
        failure.signal in _SIGNALS_OF_OTHERS or failure.code in _CODES_OF_OTHERS
        for failure in evidence.task_failures
    )


def failed_nodes(evidence: LaunchEvidence) -> tuple[str, ...]:
    """Collect the nodes that did not answer or that Slurm names as failed, each once."""
    named = (notice.node for notice in evidence.notices if notice.node)
    found = (f.node for f in evidence.findings if f.signature == "slurm_node_failure" and f.node)
    return tuple(dict.fromkeys((*evidence.lost_nodes, *named, *found)))


def _job_lines(evidence: LaunchEvidence, job: JobFacts) -> tuple[str, ...]:
    line = (
        f"Slurm: state {job.state}, reason {job.reason}, restarts {job.restart_count}, "
        f"preempt time {'set' if job.preempt_time else 'not set'}"
    )
    return (line, *evidence.notice_lines[-2:])
