"""Explains the state of a run: the last verdict and action, remaining budgets, and what comes next.

Belongs here: querying the ledger, the policy and Slurm. Does not belong here: deciding
(`hpctrain.judge.policy`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from hpctrain.base import clock
from hpctrain.base.errors import SlurmError
from hpctrain.base.units import short_duration
from hpctrain.checkpoints.discover import good_steps
from hpctrain.job.job_queries import slurm_of
from hpctrain.judge.attempts import ends, last_action, timed_stops
from hpctrain.judge.launch_history import history
from hpctrain.judge.policy import limit_of_all
from hpctrain.judge.policy_preview import (
    CauseBudget,
    PolicyPreview,
    budgets,
    counts_serving,
    preview_policy,
)
from hpctrain.page.text import Named, Whole, facts, paragraph
from hpctrain.page.words import words_of
from hpctrain.records.find import RunFiles
from hpctrain.records.jobs import site_answer
from hpctrain.records.ledger import Event, EventKind
from hpctrain.records.requests import is_requested, read_request
from hpctrain.records.supervise_config import read_supervise_config
from hpctrain.runs.run_page import next_lines
from hpctrain.runs.state import RunState, hold_text, scattered_groups
from hpctrain.runs.status import observe
from hpctrain.slurm.client import SlurmClient
from hpctrain.slurm.reasons import WaitReason
from hpctrain.slurm.records import JobRecord

# -- the explanation ---------------------------------------------------------------------------


_CONTINUATION = {
    "requeue": "Slurm puts the same job back into the queue; it keeps its id and its age",
    "chain": "each job has a successor in the queue that starts when it ends",
    "singleton": "jobs of one name were submitted together and run one after the other",
    "array": "the elements of a job array run one after the other",
    "none": "nobody starts the run again after its job: `hpctrain resume` does",
}


class LastEnd(BaseModel):
    """The last launch that ended, or attempt that was lost; times in seconds since the epoch."""

    model_config = ConfigDict(frozen=True)

    end_time: float
    epoch: int | None
    cause: str
    reason: str
    evidence: tuple[str, ...] = ()
    rank: int | None = None
    node: str | None = None
    hard: bool = False
    failed_step: int | None = None
    launches_alike: int = 0
    stop_time: str | None = None


class LastAction(BaseModel):
    """The last action of the supervisor, Slurm's answer, and what was only observed."""

    model_config = ConfigDict(frozen=True)

    action_time: float
    action: str
    reason: str
    result: str | None = None
    excluded: tuple[str, ...] = ()
    delay_seconds: float | None = None
    observed: tuple[str, ...] = ()


class Storm(BaseModel):
    """Failures within the window; from `threshold` on the supervisor waits between launches."""

    model_config = ConfigDict(frozen=True)

    failures: int
    threshold: int
    window_seconds: float


class Why(BaseModel):
    """The output of `hpctrain why`."""

    model_config = ConfigDict(frozen=True)

    run_id: str
    directory: str
    state: RunState
    state_reason: str
    job_id: int | None
    attempts: int
    waiting: str | None
    placement: str | None
    site_answer: tuple[str, ...] = ()
    requests: tuple[str, ...]
    continuation: str
    continuation_words: str
    ended: LastEnd | None
    action: LastAction | None
    checkpoint_step: int | None
    budgets: tuple[CauseBudget, ...]
    failures_without_progress: int
    failures_allowed: int
    storm: Storm
    foresight: tuple[PolicyPreview, ...]


def why(run: RunFiles, slurm: SlurmClient, now: float | None = None) -> Why:
    """Explain a run. Raises InvalidInputError when its supervise.json cannot be read."""
    now = clock.now() if now is None else now
    config = read_supervise_config(run.layout.supervise_config)
    observed = observe([run], slurm)[0]
    row, events = observed.row, observed.events
    past = history(events, config.storm_window_seconds)
    checkpoint_step = next(iter(good_steps(run.layout.checkpoints)), None)
    waiting = None
    if row.state is RunState.PENDING and row.job_id is not None:
        try:
            job = slurm_of(run, slurm).show_job(row.job_id)
            waiting = waiting_words(job, now) if job is not None else None
        except SlurmError:
            waiting = "Slurm does not answer"
    standing = read_request(run.layout)
    requests = [f"{standing.kind}, by {standing.by}"] if standing else []
    if is_requested(run.layout, "save"):
        requests.append("save")
    ahead: list[PolicyPreview] = []
    if row.state not in (RunState.DONE, RunState.CANCELLED):
        # `hpctrain resume` would write this event, which restores all budgets.
        resumed = Event(event=EventKind.CONTROL, time=now, action="resume")
        assumed = [*events, resumed] if row.state.over else events
        step = max(row.step or 0, checkpoint_step or 0)
        ahead = preview_policy(assumed, config, now, checkpoint_step or 0, step)
    window = config.storm_window_seconds
    # Counted back from now: a storm that has passed is none.
    recent = [end for end in ends(events) if end.time >= now - window]
    return Why(
        run_id=run.run_id,
        directory=str(run.layout.directory),
        state=row.state,
        state_reason=row.reason,
        job_id=row.job_id,
        attempts=row.attempts,
        waiting=waiting,
        placement=scattered_groups(events),
        site_answer=site_answer(events).lines,
        requests=tuple(requests),
        continuation=config.continuation,
        continuation_words=_CONTINUATION[config.continuation],
        ended=_last_end(events, past.same_fingerprint),
        action=_last_action(events),
        checkpoint_step=checkpoint_step,
        budgets=tuple(budgets(past, config)),
        failures_without_progress=past.failures_without_progress,
        failures_allowed=limit_of_all(config) - 1,
        storm=Storm(
            failures=history(recent, window).recent_failures,
            threshold=config.storm_failures,
            window_seconds=window,
        ),
        foresight=tuple(ahead),
    )


def _last_end(events: Sequence[Event], alike: int) -> LastEnd | None:
    ended = ends(events)
    if not ended:
        return None
    last = ended[-1]
    # What the time of its stop was computed from; none where Slurm's warning came.
    timed = (one.reason for one in timed_stops(events) if one.epoch == last.epoch)
    more = {
        "end_time": last.time,
        "cause": last.cause or "unknown",
        "reason": last.reason or "",
        "launches_alike": alike,
        "stop_time": next(timed, None),
    }
    return LastEnd.model_validate({**vars(last), **more})


def _last_action(events: Sequence[Event]) -> LastAction | None:
    found = last_action(events)
    if found is None:
        return None
    action = found.action
    more = {
        "action_time": action.time,
        "action": action.action or "",
        "reason": action.reason or "",
        "result": found.answer,
        "observed": found.observed,
    }
    return LastAction.model_validate({**vars(action), **more})


# -- why a job waits ---------------------------------------------------------------------------

_WAITS = {
    WaitReason.BEGIN_TIME: (
        "Slurm lets a requeued job wait until the credentials of the last start expire"
    ),
    WaitReason.PRIORITY: "jobs of higher priority come first",
    WaitReason.RESOURCES: "it is its turn as soon as enough nodes are free",
    WaitReason.DEPENDENCY: "it starts when the job before it has ended",
    WaitReason.NODES_UNAVAILABLE: "nodes that it needs are down, drained or reserved",
    WaitReason.BAD_CONSTRAINTS: "no nodes fit what it asks for",
    WaitReason.PARTITION_DOWN: "the partition is down",
    WaitReason.PARTITION_INACTIVE: "the partition does not start jobs now",
    WaitReason.PARTITION_TIME_LIMIT: "its time limit is above that of the partition",
    WaitReason.PARTITION_NODE_LIMIT: "it asks for more nodes than the partition gives",
    WaitReason.RESERVATION: "its reservation has not begun",
    WaitReason.ARRAY_TASK_LIMIT: "the element of the array before it still runs",
    WaitReason.LIMIT: "a limit of the account or the QOS is reached",
}


def waiting_words(job: JobRecord, now: float) -> str:
    """Explain why a job waits, with Slurm's reason and what a user can do."""
    reason = job.reason or "None"
    if job.hold is not None:
        held = hold_text(job.hold)
        words = f"{held.cause}; {held.cure}"
    else:
        words = _WAITS.get(job.wait, "") if job.wait is not None else ""
    parts = [f"{words} ({reason})" if words else reason]
    if job.start_time is not None and job.start_time > now and job.hold is None:
        parts.append(f"not before {short_duration(job.start_time - now)} from now")
    if job.exclude_nodes:
        parts.append(f"it must not run on {job.exclude_nodes}")
    return "; ".join(parts)


# -- Formats the state of a run and its reasons, in lines of at most 80 columns -----------------
# Lines of evidence are not cut.


_MARGIN = 10
# The setting of the spec with which the supervisor does what it now only reports.
_SWITCHES = (
    ("would go back", "supervise.rollback.mode: act"),
    ("would avoid", "supervise.exclude_nodes: act"),
    ("would repeat them without", "supervise.exclude_nodes: act"),
)


def why_lines(why: Why, now: float) -> list[str]:
    """Format why a run is in its state and what to type, then what the policy allows and does.

    Lines of at most 80 columns, but for evidence, which is not cut.
    """
    job = "" if why.job_id is None else f", job {why.job_id}"
    number = f", attempt {why.attempts}" if why.attempts else ""
    lines = facts(
        ("Run", f"{why.run_id} {why.state}{job}{number}"),
        ("Reason", why.state_reason),
        ("Waits", why.waiting),
        ("Placed", why.placement),
        *(("Submitted", line) for line in why.site_answer),
        *(("Asked", f"{request}; not followed yet") for request in why.requests),
        *_end_facts(why.ended, now),
    )
    if why.state.over:
        lines += next_lines(Path(why.directory), why.state.value, _MARGIN, explained=True)
    if why.ended:
        lines += facts(("Evidence", (Whole(f"| {line}") for line in why.ended.evidence)))
    if action := why.action:
        reason = "" if action.reason == why.state_reason else f": {action.reason}"
        lines += facts(
            ("Done", f"{action.action}{reason}{_after(action.delay_seconds)}"),
            ("  answer", action.result),
            ("  avoids", ", ".join(action.excluded)),
            *(("Observed", _observed(observation)) for observation in action.observed),
        )
    if not why.state.over:
        lines += facts(("Goes on", f"{why.continuation}: {why.continuation_words}"))
    lines += ["", "Policy", *_budget_lines(why)]
    if why.foresight:
        when = "after `hpctrain resume`, when" if why.state.over else "when"
        lines += ["", f"Next, {when}"]
    for one in why.foresight:
        lines += paragraph(", ".join(one.conditions), "  ")
        text = f"{one.action}: {one.reason}{_after(one.delay_seconds)}"
        lines += paragraph(text, "    -> ")
        for observation in one.observed:
            lines += paragraph(f"observed: {_observed(observation)}", " " * 7)
    return lines


def _end_facts(ended: LastEnd | None, now: float) -> Iterator[tuple[str, str | None]]:
    if ended is None:
        yield "Ended", "no launch has ended yet"
        return
    launch = "the attempt was lost" if ended.epoch is None else f"launch {ended.epoch}"
    ago = short_duration(max(0.0, now - ended.end_time))
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(ended.end_time))
    yield "Ended", f"{launch}, {clock}, {ago} ago"
    yield "  cause", f"{words_of(ended.cause)}: {ended.reason}"
    suspect = [
        f"rank {ended.rank}" if ended.rank is not None else "",
        f"node {ended.node}" if ended.node else "",
        "hardware beyond doubt" if ended.hard else "",
        f"at step {ended.failed_step:,}" if ended.failed_step is not None else "",
    ]
    yield "  suspect", ", ".join(filter(None, suspect))
    yield "  stopped", ended.stop_time
    if ended.launches_alike > 1:
        yield "  alike", f"the last {ended.launches_alike} launches ended the same way"


def _observed(observation: str) -> str:
    """Add the setting that turns an observation into an action."""
    for start, switch in _SWITCHES:
        if observation.startswith(start):
            return f"{observation}; set `{switch}` to have it done"
    return observation


# -- budgets -----------------------------------------------------------------------------------


def _budget_lines(why: Why) -> list[str]:
    newest = "none yet" if why.checkpoint_step is None else f"step {why.checkpoint_step:,}"
    head = f"Budgets: retries without a new checkpoint (newest: {newest}), which fills them up"
    if counts_serving(why.budgets):
        head = "Budgets: retries without having served for a while, which fills them up"
    counts = [(words_of(one.cause), one.used, one.allowed) for one in why.budgets if one.used]
    counts.append(("all together", why.failures_without_progress, why.failures_allowed))
    named: list[Named] = []
    for name, used, allowed in counts:
        spent = "; the next one stops the run" if used == allowed else ""
        text = f"{used}, as often as it comes"
        if allowed is not None:
            text = f"{used} of {allowed} used{spent}" if used <= allowed else f"used up ({allowed})"
        named.append((f"  {name}", Whole(text)))
    unused = sorted((b for b in why.budgets if not b.used), key=_by_allowance)
    for allowed, group in groupby(unused, key=_by_allowance):
        count = "no limit" if allowed < 0 else "no retry" if allowed == 0 else f"{allowed} free"
        names = ", ".join(words_of(budget.cause) for budget in group)
        named.append((f"  {count}", names))
    storm = why.storm
    window = short_duration(storm.window_seconds)
    failures = f"{storm.failures} failure{'' if storm.failures == 1 else 's'}"
    text = f"{failures} in the last {window}; from {storm.threshold} on it waits"
    return paragraph(head) + facts(*named, ("  storm", Whole(text)), margin=20)


def _by_allowance(budget: CauseBudget) -> int:
    return -1 if budget.allowed is None else budget.allowed


def _after(delay_seconds: float | None) -> str:
    return f", after {short_duration(delay_seconds)}" if delay_seconds else ""
