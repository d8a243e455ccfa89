"""A run of which no job is left: over, or orphaned? Pure.

Belongs here: telling one from the other by the ledger's last word and what Slurm still knows. Does
not belong here: jobs that are in the queue (`watch_rules`).
"""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.actions.state import counted
from hpctrain.actions.watch_look import (
    Look,
    Remedy,
    Sighting,
    Symptom,
    as_policy_says,
    decided,
    lost,
    tell,
)
from hpctrain.slurm.records import JobRecord
from hpctrain.slurm.states import JobState
from hpctrain.store.jobs import generation, started_ids, submitted_ids
from hpctrain.store.ledger import Event, EventKind
from hpctrain.supervise.judge.causes import Cause
from hpctrain.supervise.judge.documents import ActionKind, Verdict
from hpctrain.supervise.judge.lost_attempts import why_ended

_OVER = (ActionKind.FINISH, ActionKind.STOP, ActionKind.HOLD)
# A run that failed is told for so long, unless somebody was told before.
_FAILED_SECONDS = 7 * 86400.0
_CHAINS = ("chain", "singleton", "array")


def of_gone(look: Look) -> list[Sighting]:
    """Nothing of the run is in the queue: over, or orphaned?"""
    recent = generation(look.events)
    last = _last_word(recent)
    if last is not None and last.action in _OVER:
        return _failed(look, recent, last)
    for job in look.jobs:
        if job.state is JobState.CANCELLED:
            words = f"job {job.job_id} ended as CANCELLED: cancelled runs stay cancelled"
            return [Sighting(look.run_id, Symptom.CANCELLED, Remedy.NOTE, words, job.job_id)]
    if look.now < look.alive_until:
        return []  # it trains, whatever this Slurm knows
    newest = counted(look.jobs)
    gone_time = (newest.end_time if newest else None) or recent[-1].time
    if look.now - gone_time < look.grace_seconds:
        return []
    if newest is not None and not _has_begun(recent, newest):
        return [_orphan(look, newest, why_ended(newest, begun=False))]
    if last is not None:
        return [_unfollowed(look, last) if _all_known(look, last) else _orphan(look, None, None)]
    ended = why_ended(newest, begun=True) or _killed_in_silence(recent)
    return [_orphan(look, newest, ended)]


def _failed(look: Look, recent: Sequence[Event], last: Event) -> list[Sighting]:
    """A run that is over without being done, though nobody has asked for that."""
    if last.action != ActionKind.STOP or not last.exit_code:
        return []
    ends = [event for event in recent if event.event is EventKind.LAUNCH_ENDED]
    if ends and ends[-1].cause in (Cause.CANCELLED, Cause.YIELDED):
        return []
    if look.now - last.time > _FAILED_SECONDS:
        return []
    words = f"it has stopped and is not done: {last.reason}"
    return [tell(look, Symptom.FAILED, words, last.job_id)]


def _last_word(recent: Sequence[Event]) -> Event | None:
    """What the supervisor of the newest attempt has said last about what comes next."""
    for event in reversed(recent):
        if event.event is EventKind.ACTION and event.action != ActionKind.RELAUNCH:
            return event
        if event.event is EventKind.ATTEMPT_STARTED:
            return None
    return None


def _all_known(look: Look, last: Event) -> bool:
    """Slurm still says how the jobs ended that were to follow: one of them may be cancelled."""
    recent = generation(look.events)
    begun, known = set(started_ids(recent)), {job.submitted_id for job in look.jobs}
    if look.config.continuation not in _CHAINS:
        return last.job_id in known
    if look.config.continuation == "array" and len(begun) < look.config.continuation_jobs:
        return bool(known)
    return all(job_id in begun or job_id in known for job_id in submitted_ids(recent))


def _has_begun(recent: Sequence[Event], job: JobRecord) -> bool:
    """The supervisor of the last start of this job has written into the ledger."""
    words = (EventKind.ATTEMPT_STARTED, EventKind.ACTION)
    begun = [
        event.restart_count or 0
        for event in recent
        if event.event in words and event.job_id == job.job_id
    ]
    return bool(begun) and (job.restart_count is None or job.restart_count in begun)


def _killed_in_silence(recent: Sequence[Event]) -> tuple[Cause, str] | None:
    """Slurm has forgotten the job. One that it ended itself would have got a signal first, which
    the ledger would show; a cancelled one, too."""
    starts = [event for event in recent if event.event is EventKind.ATTEMPT_STARTED]
    if not starts:
        return None
    later = recent[recent.index(starts[-1]) :]
    if any(event.event is EventKind.SIGNAL for event in later):
        return None
    job_id = starts[-1].job_id
    return Cause.SUPERVISOR_LOST, f"job {job_id} is gone, and its supervisor left no word"


def _orphan(look: Look, job: JobRecord | None, ended: tuple[Cause, str] | None) -> Sighting:
    """An attempt that nobody has closed."""
    recent = generation(look.events)
    newest_id = next(reversed(started_ids(recent) or submitted_ids(recent)))
    if ended is None:
        words = f"job {newest_id} is gone, and nobody knows how it ended"
        hint = f"`hpctrain resubmit {look.run_id}` goes on"
        return tell(look, Symptom.VANISHED, f"{words}: {hint}", newest_id)
    cause, reason = ended
    closing = lost(look, job or _forgotten(recent, newest_id), cause, reason)
    symptom = Symptom.PREEMPTED if cause is Cause.PREEMPTED else Symptom.ORPHANED
    return as_policy_says(look, symptom, Remedy.RESUBMIT, closing)


def _forgotten(recent: Sequence[Event], job_id: int) -> JobRecord:
    """A job that only the ledger remembers."""
    counts = [event.restart_count or 0 for event in recent if event.job_id == job_id]
    return JobRecord(job_id, restart_count=max(counts, default=0))


def _unfollowed(look: Look, last: Event) -> Sighting:
    """The supervisor said that the run goes on, but no job is there to do it."""
    ends = [event for event in look.events if event.event is EventKind.LAUNCH_ENDED]
    cause = Cause(ends[-1].cause) if ends and ends[-1].cause else Cause.UNKNOWN
    symptom = Symptom.ORPHANED
    words = f"its last attempt ended ({last.reason}) and nothing followed"
    if last.action == ActionKind.LEAVE and look.config.continuation in _CHAINS:
        symptom = Symptom.CHAIN_EXHAUSTED
        words = f"no job of the {look.config.continuation} is left ({last.reason})"
    elif cause is Cause.PREEMPTED:
        symptom = Symptom.PREEMPTED
    return decided(look, symptom, Remedy.RESUBMIT, Verdict(cause, words), last.job_id)
