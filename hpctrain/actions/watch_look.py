"""What an onlooker knows of a run, can see and can do, and what the run's policy says to it. Pure.

Belongs here: the words that the rules share, and asking the policy. Does not belong here: the rules
(`watch_rules`, `watch_gone`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from hpctrain.slurm.records import JobRecord
from hpctrain.store.ledger import Event, EventKind
from hpctrain.store.supervise_config import SuperviseConfig
from hpctrain.supervise.judge.causes import Cause
from hpctrain.supervise.judge.documents import ActionKind, History, Situation, Verdict
from hpctrain.supervise.judge.launch_history import history
from hpctrain.supervise.judge.policy import decide

# A storm is over this long after its last failure: what `policy` lets a relaunch wait at first.
_STORM_PAUSE_SECONDS = 300.0


class Symptom(StrEnum):
    """What is seen."""

    ORPHANED = "orphaned"
    CHAIN_EXHAUSTED = "chain exhausted"
    PREEMPTED = "preempted"
    VANISHED = "vanished"
    LAUNCH_HELD = "launch failed, held"
    DELAYED = "requeue delay"
    EXCLUDED = "no node left"
    TOO_FEW_NODES = "too few nodes"
    STALLED = "stalled"
    STORM = "storm"
    CANCELLED = "cancelled"
    FAILED = "failed"
    UNRECORDED = "unrecorded job"


class Remedy(StrEnum):
    """What is done about it. TELL is nothing but words for a person, NOTE a line in the ledger
    about what a person has done, because Slurm forgets it (MinJobAge), ADOPT a line about a job
    that the ledger does not know."""

    RESUBMIT = "resubmit"
    RELEASE = "release"
    START_NOW = "start now"
    CLEAR_EXCLUDED = "clear excluded nodes"
    TAKE_FEWER = "take fewer nodes"
    ADOPT = "record it"
    TELL = "tell"
    NOTE = "note"


@dataclass(frozen=True)
class Look:
    """Everything that is known of one run at one moment; times in seconds since the epoch.

    `events` reach back at least to the newest submission. `jobs` are those of that generation
    which Slurm knows, ended ones included; `unrecorded` those of them that the ledger does not
    know. `signs_time` is the newest sign of life of trainer or supervisor, `alive_until` when the
    next one of the trainer is due at the latest, `asked_by` a person's request that stands
    (`control/`).
    """

    run_id: str
    events: Sequence[Event]
    config: SuperviseConfig
    jobs: tuple[JobRecord, ...]
    now: float
    grace_seconds: float
    signs_time: float | None = None
    asked_by: str | None = None
    unrecorded: tuple[JobRecord, ...] = ()
    alive_until: float = 0.0


@dataclass(frozen=True)
class Sighting:
    """One symptom, its remedy, and the words for both.

    `lost` is the attempt that is to be closed in the ledger first, since nobody else will.
    """

    run_id: str
    symptom: Symptom
    remedy: Remedy
    words: str
    job_id: int | None = None
    lost: Event | None = None
    nodes: tuple[int, int] | None = None


def told_already(look: Look, sighting: Sighting) -> bool:
    """The ledger says that this was told, and nothing has happened in the run since."""
    for event in reversed(look.events):
        if event.event is not EventKind.WATCH:
            return False
        if (
            event.symptom == sighting.symptom
            and event.action == Remedy.TELL
            and event.job_id == sighting.job_id
        ):
            return True
    return False


def tell(look: Look, symptom: Symptom, words: str, job_id: int | None = None) -> Sighting:
    return Sighting(look.run_id, symptom, Remedy.TELL, words, job_id)


def storm(look: Look, past: History) -> str:
    minutes = look.config.storm_window_seconds / 60
    return f"{past.recent_failures} failures within {minutes:.0f} min"


def lost(look: Look, job: JobRecord, cause: Cause, reason: str) -> Event:
    """The event that closes an attempt in the name of its supervisor."""
    return Event(
        event=EventKind.ATTEMPT_LOST,
        time=look.now,
        job_id=job.job_id,
        restart_count=job.restart_count or 0,
        cause=cause,
        reason=reason,
    )


def as_policy_says(look: Look, symptom: Symptom, remedy: Remedy, lost: Event) -> Sighting:
    verdict = Verdict(Cause(lost.cause or Cause.UNKNOWN), lost.reason or "")
    return decided(look, symptom, remedy, verdict, lost.job_id, lost)


def decided(
    look: Look,
    symptom: Symptom,
    remedy: Remedy,
    verdict: Verdict,
    job_id: int | None,
    lost: Event | None = None,
) -> Sighting:
    """The remedy if the run's own policy would go on, else the reason why it would not.

    Policy is asked as on a site that requeues: whoever lets this act is the one who submits again.
    """
    known = [
        (event.job_id, event.restart_count)
        for event in look.events
        if event.event is EventKind.ATTEMPT_LOST
    ]
    new = [lost] if lost and (lost.job_id, lost.restart_count) not in known else []
    past = history([*look.events, *new], look.config.storm_window_seconds)
    config = look.config.model_copy(update={"continuation": "requeue"})
    action = decide(verdict, past, Situation(keeps_nodes=False), config)
    refused = _why_not(look, verdict, past)
    if action.kind is not ActionKind.REQUEUE or refused:
        words = f"{verdict.reason}; left alone: {refused or action.reason}"
        return tell(look, symptom, words, job_id)
    closes = new[0] if new else None
    return Sighting(look.run_id, symptom, remedy, verdict.reason, job_id, closes)


def _why_not(look: Look, verdict: Verdict, past: History) -> str:
    """Reasons not to go on that the policy leaves to the queue: storms, and lost supervisors."""
    limit = look.config.failures_without_progress
    if verdict.cause is Cause.SUPERVISOR_LOST and past.of(verdict.cause) >= limit:
        return f"{past.of(verdict.cause)} supervisors lost in a row without a new checkpoint"
    ended_time = max((event.time for event in look.events if event.cause), default=0.0)
    calm = look.now - ended_time >= _STORM_PAUSE_SECONDS
    if past.recent_failures >= look.config.storm_failures and not calm:
        return f"{storm(look, past)}, so it waits"
    return ""
