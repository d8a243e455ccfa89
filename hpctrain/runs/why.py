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
from hpctrain.judge.causes import FAILURE_CAUSES, Cause, can_happen
from hpctrain.judge.documents import History, Situation, Verdict
from hpctrain.judge.launch_history import history
from hpctrain.judge.policy import budget_of, decide, limit_of_all
from hpctrain.page.text import Named, Whole, facts, paragraph
from hpctrain.page.words import words_of
from hpctrain.records.find import RunFiles
from hpctrain.records.jobs import site_answer
from hpctrain.records.ledger import Event, EventKind
from hpctrain.records.requests import is_requested, read_request
from hpctrain.records.supervise_config import SuperviseConfig, read_supervise_config
from hpctrain.runs.run_page import next_lines
from hpctrain.runs.state import RunState, hold_text, scattered_groups
from hpctrain.runs.status import observe
from hpctrain.slurm.client import SlurmClient
from hpctrain.slurm.reasons import WaitReason
from hpctrain.slurm.records import JobRecord

# -- Previews what the supervisor would do for each possible failure, if it happened now. Pure --
# It calls `policy.decide` with the same counts (`launch_history`) as in the job, for a hypothetical
# end of the launch.


# Each cause as a condition; the previews are in this order.
FAILURE_CONDITIONS: dict[Cause, str] = {
    Cause.PREEMPTED: "the job is preempted",
    Cause.TIME_LIMIT: "the time limit comes",
    Cause.NODE_FAILURE: "a node is lost",
    Cause.GPU_ERROR: "a GPU fails",
    Cause.FABRIC: "the network fails",
    Cause.STORAGE: "the file system fails",
    Cause.HANG: "the run hangs",
    Cause.CRASH: "a rank crashes",
    Cause.LAUNCH_FAILURE: "srun cannot start the step",
    Cause.NODE_COMMAND: "a command of the site fails on a node",
    Cause.PORT: "a port is taken",
    Cause.GPU_OOM: "a GPU runs out of memory",
    Cause.HOST_OOM: "a node runs out of memory",
    Cause.DATA_LOADER: "the data loader dies",
    Cause.WEIGHTS: "the weights of a service cannot be read",
    Cause.ENGINE_EXIT: "the engine of a service ends by itself",
    Cause.ENDED_EARLY: "a trainer ends before its target",
    Cause.UNKNOWN: "a launch ends and nothing says why",
    Cause.SUSPECT_NUMERICS: "a result cannot be reproduced",
    Cause.DIVERGED: "the loss is not finite or jumps",
    Cause.DISK_FULL: "the disk is full",
    Cause.LOAD_FAILED: "a checkpoint cannot be loaded",
    Cause.BAD_CHECKPOINT: "no checkpoint can be used",
    Cause.DATA_CHANGED: "the data have changed",
    Cause.STARTS_OVER: "a trainer does not resume where it was told to",
    Cause.CONFIG_ERROR: "the trainer refuses its settings",
    Cause.SITE_COMMAND: "a command of the site fails everywhere",
    Cause.USER_ERROR: "the code has an error",
}
_SUSPECT = "the suspected node"


class PolicyPreview(BaseModel):
    """One decision of the policy, and all conditions that lead to it.

    `action` is an `ActionKind`, `observed` what would be done if the spec allowed it.
    """

    model_config = ConfigDict(frozen=True)

    causes: tuple[str, ...]
    conditions: tuple[str, ...]
    action: str
    reason: str
    delay_seconds: float = 0.0
    observed: tuple[str, ...] = ()


class CauseBudget(BaseModel):
    """Failures of one cause since the last new checkpoint, and the retries allowed (None: any)."""

    model_config = ConfigDict(frozen=True)

    cause: str
    used: int
    allowed: int | None


def budgets(past: History, config: SuperviseConfig) -> list[CauseBudget]:
    """List the budgets of all causes that are counted."""
    counted = [
        cause
        for cause in Cause
        if cause in FAILURE_CAUSES or cause is Cause.TIME_LIMIT
        if can_happen(cause, serves=config.serves, foreign=config.launcher == "agent")
    ]
    return [
        CauseBudget(cause=cause, used=past.of(cause), allowed=budget_of(cause, config))
        for cause in counted
    ]


def preview_policy(
    events: Sequence[Event], config: SuperviseConfig, now: float, checkpoint_step: int, step: int
) -> list[PolicyPreview]:
    """Preview the decision for each cause; causes with the same decision are in one preview.

    `checkpoint_step` is the newest good checkpoint (0: none), `step` the last finished step.
    """
    # The launch that still runs, if there is one.
    ends = (EventKind.LAUNCH_ENDED, EventKind.ATTEMPT_LOST)
    marks = [event for event in events if event.event in (*ends, EventKind.LAUNCH_STARTED)]
    resume_step: int | None = checkpoint_step
    if marks and marks[-1].event is EventKind.LAUNCH_STARTED:
        resume_step = marks[-1].resume_step or 0
    needed = config.shapes[0].nodes if config.shapes else 1
    least = config.shapes[-1].nodes if config.shapes else needed
    allocated = needed + config.spare_nodes
    again = "the loss is not finite or jumps twice at the same step"
    conditions = [
        (cause, words)
        for cause, words in (*FAILURE_CONDITIONS.items(), (Cause.DIVERGED, again))
        if can_happen(cause, serves=config.serves, foreign=config.launcher == "agent")
    ]
    groups: dict[PolicyPreview, list[tuple[str, str]]] = {}
    for cause, condition in conditions:
        end = Event(
            event=EventKind.LAUNCH_ENDED,
            time=now,
            cause=cause,
            resume_step=resume_step,
            checkpoint_step=checkpoint_step or None,
            failed_step=step + 1,
        )
        assumed = [*events, end]
        if condition == again:  # the second launch makes no progress
            assumed.append(end.model_copy(update={"resume_step": checkpoint_step}))
        past = history(assumed, config.storm_window_seconds)
        # `hard` stays False, because the consequence of broken hardware depends on its node. The
        # verdict has no reason, so that the reason of the action is the decision alone.
        verdict = Verdict(cause, reason="", nodes=(_SUSPECT,), step=step + 1)
        # All nodes answer, but for a lost one. Without spare nodes and smaller sizes the job ends
        # with its node.
        lost = 1 if cause is Cause.NODE_FAILURE else 0
        situation = Situation(
            keeps_nodes=not lost or allocated - lost >= least,
            allocated_nodes=allocated,
            healthy_nodes=allocated - lost,
            needed_nodes=needed,
            least_nodes=least,
            good_checkpoints=(checkpoint_step,) if checkpoint_step else (),
        )
        action = decide(verdict, past, situation, config)
        decision = PolicyPreview(
            causes=(),
            conditions=(),
            action=action.kind,
            reason=action.reason,
            delay_seconds=action.delay_seconds,
            observed=action.observed,
        )
        groups.setdefault(decision, []).append((cause, condition))
    return [
        decision.model_copy(
            update={
                "causes": tuple(cause for cause, _ in group),
                "conditions": tuple(condition for _, condition in group),
            }
        )
        for decision, group in groups.items()
    ]


# -- the explanation ---------------------------------------------------------------------------


_ENDS = (EventKind.LAUNCH_ENDED, EventKind.ATTEMPT_LOST)
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
    recent = [event for event in events if event.event in _ENDS and event.time >= now - window]
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
    last = next((event for event in reversed(events) if event.event in _ENDS), None)
    if last is None:
        return None
    # What the time of its stop was computed from; none where Slurm's warning came.
    timed = (e for e in events if e.event is EventKind.STOP_TIMED and e.epoch == last.epoch)
    more = {
        "end_time": last.time,
        "cause": last.cause or "unknown",
        "reason": last.reason or "",
        "launches_alike": alike,
        "stop_time": next((event.reason for event in timed), None),
    }
    return LastEnd.model_validate({**vars(last), **more})


def _last_action(events: Sequence[Event]) -> LastAction | None:
    last = next((event for event in reversed(events) if event.event in _ENDS), None)
    if last is not None and last.event is EventKind.ATTEMPT_LOST:
        # What was done about earlier attempts explains nothing. The attempt that tells of the loss
        # may have begun before it did.
        begun = [
            number
            for number, event in enumerate(events[: events.index(last)])
            if event.event is EventKind.ATTEMPT_STARTED and event.attempt == last.attempt
        ]
        events = events[begun[-1] :] if begun else events
    numbers = [n for n, event in enumerate(events) if event.event is EventKind.ACTION]
    if not numbers:
        return None
    action, later = events[numbers[-1]], events[numbers[-1] + 1 :]
    results = (event.reason for event in later if event.event is EventKind.ACTION_RESULT)
    more = {
        "action_time": action.time,
        "action": action.action or "",
        "reason": action.reason or "",
        "result": next(results, None),
        "observed": [e.reason or "" for e in later if e.event is EventKind.OBSERVED],
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
    # Only replicas of a service have a budget for ends of their engine.
    if any(budget.cause == Cause.ENGINE_EXIT for budget in why.budgets):
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
