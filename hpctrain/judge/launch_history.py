"""Count the launches in the ledger for the policy. Pure.

Belongs here: counting. Does not belong here: what follows from a count (see `policy`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import takewhile

from hpctrain.judge.attempts import ends, launch_ends
from hpctrain.judge.causes import FAILURE_CAUSES, Cause
from hpctrain.judge.documents import History
from hpctrain.records.ledger import Event, EventKind

_NUMERICS = frozenset({Cause.DIVERGED, Cause.SUSPECT_NUMERICS})
_MOST_PINNED = 2
_ENDS = (EventKind.LAUNCH_ENDED, EventKind.ATTEMPT_LOST)


def history(events: Sequence[Event], window_seconds: float = 1800.0) -> History:
    """Count the launches that failed since the last one that brought a new checkpoint.

    A launch that brought a newer checkpoint ends the count, whatever became of it. What the
    scheduler did in between neither counts nor forgives. An attempt whose supervisor was lost
    counts, too; whether it had brought a checkpoint shows where the next one resumes. Going back
    on purpose is no progress. A person who resumes the run (`hpctrain resume`) ends the count. A
    replica of a service brings no checkpoints: its launch ends the count once it has served long.
    `window_seconds`: how far back `recent_failures` reaches.
    """
    best, by_cause, prints = 0, Counter[str](), list[str]()
    ever, served = False, False
    for event in events:
        if event.event is EventKind.SERVING:
            ever = True  # it has been loaded and has answered
            if event.served_seconds:
                served = True
                by_cause.clear()
                prints.clear()
            continue
        if event.event in _ENDS and served:
            served = False
            continue
        if event.event is EventKind.ROLLED_BACK:
            best = event.checkpoint_step or 0
            continue
        if event.event is EventKind.FRESH_START_ACCEPTED:
            best = 0
        if event.event is EventKind.CHECKPOINT_REJECTED and event.checkpoint_step:
            best = min(best, event.checkpoint_step - 1)  # saving it again is progress
        if event.event is EventKind.CONTROL and event.action == "resume":
            by_cause.clear()  # a person has looked at it
            prints.clear()
        # A checkpoint step that this event proves; that of a start was reached before it.
        reached = 0
        if event.event in (EventKind.LAUNCH_STARTED, EventKind.LAUNCH_ENDED):
            reached = event.resume_step or 0
        if event.event is EventKind.LAUNCH_ENDED:
            reached = max(reached, event.checkpoint_step or 0)
        if reached > best:
            ever, best = True, reached
            by_cause.clear()
            prints.clear()
            # A launch that brought nothing new itself began where an earlier one had arrived.
            only_resumed = (event.checkpoint_step or 0) <= (event.resume_step or 0)
            if event.event is not EventKind.LAUNCH_ENDED or not only_resumed:
                continue
        if event.event in _ENDS and event.cause:
            by_cause[event.cause] += 1
            prints.append(event.fingerprint or "")
    ended = ends(events)
    since = ended[-1].time - window_seconds if ended else 0.0
    recent = (event for event in ended if event.cause in FAILURE_CAUSES and event.time >= since)
    same = takewhile(lambda one: one and one == prints[-1], reversed(prints))
    # Earlier anomalies of numerics at the step of the last one, over the whole run.
    last_step = ended[-1].failed_step if ended and ended[-1].cause in _NUMERICS else None
    anomalies = [e for e in ended[:-1] if e.cause in _NUMERICS and e.failed_step == last_step]
    return History(
        failures_without_progress=sum(by_cause[cause] for cause in FAILURE_CAUSES),
        time_limits_without_progress=by_cause[Cause.TIME_LIMIT],
        by_cause=tuple(sorted(by_cause.items())),
        same_fingerprint=sum(1 for _ in same),
        recent_failures=sum(1 for _ in recent),
        anomalies_at_step=len(anomalies) if last_step is not None else 0,
        ever_progressed=ever,
        failed_loads=_failed_loads(events),
    )


def pending_rollback(events: Sequence[Event]) -> int | None:
    """Find the checkpoint step to go back to, if that was decided and no launch began since."""
    for event in reversed(events):
        if event.event is EventKind.LAUNCH_STARTED:
            return None
        if event.event is EventKind.ROLLED_BACK:
            return event.checkpoint_step or 0
    return None


def pending_rejections(events: Sequence[Event]) -> dict[int, str]:
    """List the checkpoints rejected since the last launch began, with the reasons."""
    found: dict[int, str] = {}
    for event in events:
        if event.event is EventKind.LAUNCH_STARTED:
            found.clear()
        if event.event is EventKind.CHECKPOINT_REJECTED and event.checkpoint_step:
            found[event.checkpoint_step] = event.reason or "rejected"
    return found


def pinned_steps(events: Sequence[Event]) -> tuple[int, ...]:
    """List the checkpoints that retention must keep besides the newest ones.

    Those from before the newest anomalies of numerics, for their analysis; and the one that was
    loaded after a newer one was rejected, because it is known to load.
    """
    steps = [
        event.checkpoint_step
        for event in launch_ends(events)
        if event.cause in _NUMERICS and event.checkpoint_step
    ]
    pinned = tuple(dict.fromkeys(steps))[-_MOST_PINNED:]
    loaded = loaded_instead(events)
    return pinned if loaded is None or loaded in pinned else (*pinned, loaded)


def loaded_instead(events: Sequence[Event]) -> int | None:
    """Find the step at which the launch after the newest rejection began.

    None without such a launch, or if a person has accepted a start at step 0 since.
    """
    rejected, found = False, None
    for event in events:
        if event.event is EventKind.CHECKPOINT_REJECTED:
            rejected = True
        if event.event is EventKind.FRESH_START_ACCEPTED:
            rejected, found = False, None
        if event.event is EventKind.LAUNCH_STARTED and rejected:
            rejected, found = False, event.resume_step or None
    return found


def mean_time_to_failure(events: Sequence[Event], prior_seconds: float | None) -> float | None:
    """Estimate the seconds of training between two failures; None without prior and failures.

    The posterior mean of an exponential law with a Gamma prior worth one failure (its conjugate;
    Gelman et al., Bayesian Data Analysis, section 2.6): (prior + time trained) / (1 + failures).
    """
    trained, failures, since = 0.0, 0, None
    for event in events:
        if event.event is EventKind.LAUNCH_STARTED:
            since = event.time
        elif event.event in _ENDS and since is not None:
            trained += max(0.0, event.time - since)
            failures += event.cause in FAILURE_CAUSES
            since = None
    if prior_seconds is None:
        return trained / failures if failures else None
    return (prior_seconds + trained) / (1 + failures)


def _failed_loads(events: Sequence[Event]) -> int:
    """Count the launches that could not load the checkpoint of the last one.

    Counted since that checkpoint was last rejected, or since a person resumed the run.
    """
    ended = ends(events)
    if not ended or ended[-1].cause != Cause.LOAD_FAILED:
        return 0
    step, count = ended[-1].resume_step, 0
    for event in events:
        rejected = event.event is EventKind.CHECKPOINT_REJECTED and event.checkpoint_step == step
        if rejected or (event.event is EventKind.CONTROL and event.action == "resume"):
            count = 0
        same = event.event is EventKind.LAUNCH_ENDED and event.resume_step == step
        count += same and event.cause == Cause.LOAD_FAILED
    return count
