"""Describes one run: its attempts, launches, verdicts, actions, checkpoints and requests.

Belongs here: reading the history from ledger and saves. Does not belong here: making requests
(`control`), explaining the present state (`why`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median

from pydantic import BaseModel, ConfigDict

from hpctrain.base.units import short_bytes, short_duration
from hpctrain.checkpoints.discover import checkpoints
from hpctrain.judge.attempts import ENDS_RUN, Attempt, attempts, signals
from hpctrain.page.text import Whole, facts, paragraph
from hpctrain.records.find import RunFiles
from hpctrain.records.jobs import SiteAnswer, site_answer
from hpctrain.records.ledger import Event, EventKind
from hpctrain.records.requests import TAKE_BACK
from hpctrain.records.run_records import SaveRecord, read_saves
from hpctrain.records.software import SoftwareFacts, SoftwareRecord, of_newest_launch, read_software
from hpctrain.records.speed_checks import SpeedCheck, read_speed_checks
from hpctrain.records.tracking import tracking_commands
from hpctrain.runs.evaluations import EvaluatedDocument, evaluation_lines, evaluation_rows
from hpctrain.runs.notify import NoticeState, notice_lines, notice_states
from hpctrain.runs.run_documents import known_any_plan, reports_steps
from hpctrain.runs.state import RunState, judge_without_slurm

# What a person has accepted or removed, as words of the command line.
_DONE_AT_ONCE = {
    EventKind.FRESH_START_ACCEPTED: "resume --from-scratch",
    EventKind.DATA_ACCEPTED: "resume --accept-data",
    EventKind.CLEANED: "clean",
    EventKind.UPGRADED: "upgrade",
}


class LaunchStory(BaseModel):
    """One srun of the trainer. `last_step`: None where the trainer does not report its steps."""

    model_config = ConfigDict(frozen=True)

    epoch: int
    resume_step: int | None
    last_step: int | None = None
    checkpoint_step: int | None = None
    cause: str | None = None
    reason: str | None = None
    evidence: tuple[str, ...] = ()
    seconds: float | None = None


class AttemptStory(BaseModel):
    """One start of the job by Slurm."""

    model_config = ConfigDict(frozen=True)

    job_id: int | None
    restart_count: int | None
    nodes: str | None
    start_time: float
    launches: tuple[LaunchStory, ...]
    signals: tuple[str, ...] = ()
    stop_time: str | None = None
    action: str | None = None
    reason: str | None = None
    placement: str | None = None
    placement_details: tuple[str, ...] = ()
    tracking_failure: str | None = None
    metrics_failure: str | None = None


class CheckpointStory(BaseModel):
    """One checkpoint on disk."""

    model_config = ConfigDict(frozen=True)

    step: int
    total_bytes: int | None
    problem: str | None


class RequestStory(BaseModel):
    """A person's request, at `asked_time` (seconds since the epoch); `answer` None: pending."""

    model_config = ConfigDict(frozen=True)

    asked_time: float
    user: str | None
    action: str
    reason: str | None = None
    answer: str | None = None
    answer_seconds: float | None = None


class SoftwareChange(BaseModel):
    """What a launch was the first to find otherwise than the one before, or than the run's lock."""

    model_config = ConfigDict(frozen=True)

    epoch: int
    changes: tuple[str, ...]


class RunStory(EvaluatedDocument):
    """A run from its ledger; `state` is None where only Slurm could tell (see `status`)."""

    model_config = ConfigDict(frozen=True)

    run_id: str
    directory: str
    script: str
    done: bool
    state: RunState | None
    reason: str | None
    answer: SiteAnswer = SiteAnswer()
    attempts: tuple[AttemptStory, ...]
    checkpoints: tuple[CheckpointStory, ...]
    asked: tuple[RequestStory, ...] = ()
    software: tuple[SoftwareRecord, ...] = ()
    software_changes: tuple[SoftwareChange, ...] = ()
    speed: SpeedCheck | None = None
    notices: tuple[NoticeState, ...] = ()
    tracking: tuple[str, ...] = ()


def describe(run: RunFiles, events: Sequence[Event] | None = None) -> RunStory:
    """Describe the run's history; reads the run directory only.

    `events`: its ledger, where it has been read already.
    """
    found = checkpoints(run.layout.checkpoints)
    events, done = run.ledger.events() if events is None else events, run.layout.done.exists()
    judged = judge_without_slurm(events, done=done)
    checks, software = read_speed_checks(run.layout), read_software(run.layout)
    reported = reports_steps(known_any_plan(run.layout))
    return RunStory(
        run_id=run.run_id,
        directory=str(run.layout.directory),
        script=str(run.layout.script),
        done=done,
        state=None if judged.state is RunState.UNKNOWN else judged.state,
        reason=judged.reason or None if judged.state is not RunState.UNKNOWN else None,
        answer=site_answer(events),
        attempts=tuple(_attempt(one, reported=reported) for one in attempts(events)),
        checkpoints=tuple(
            CheckpointStory(
                step=item.step,
                total_bytes=item.manifest.total_bytes if item.manifest else None,
                problem=item.problem,
            )
            for item in found
        ),
        asked=tuple(request_history(events, read_saves(run.layout))),
        software=tuple(of_newest_launch(software)),
        software_changes=tuple(software_changes(software)),
        speed=checks[-1] if checks else None,
        notices=tuple(notice_states(run)),
        tracking=tuple(tracking_commands(run.layout)),
        evaluations=evaluation_rows(run),
    )


def software_changes(records: Sequence[SoftwareRecord]) -> Iterator[SoftwareChange]:
    """List the launches that began with another hpctrain or other software than those before."""
    known: tuple[str, ...] = ()
    code: str | None = None
    launches = {record.epoch: record for record in reversed(records)}  # rank 0's is the first
    for epoch, record in sorted(launches.items()):
        found, facts = [], record.facts
        own = f"{facts.hpctrain} ({facts.code})" if facts.code else facts.hpctrain
        if code is not None and own != code:
            found.append(f"hpctrain {code} -> {own}")
        found += [change for change in record.changed if change not in (*known, *found)]
        code, known = own, record.changed
        if found:
            yield SoftwareChange(epoch=epoch, changes=tuple(found))


def _attempt(attempt: Attempt, *, reported: bool) -> AttemptStory:
    """Describe one attempt; `reported`: its trainer tells its steps."""
    start, events, newest, last = attempt.start, attempt.events, attempt.newest, attempt.last
    first = {event.event: event for event in reversed(events)}
    placed = newest.get(EventKind.PLACED)
    untracked = first.get(EventKind.TRACKING_FAILED)
    unexported = first.get(EventKind.METRICS_FAILED)
    timed = newest.get(EventKind.STOP_TIMED)
    launches = []
    for one in attempt.launches:
        begin, end = one.start, one.end
        launch: dict[str, object] = {"epoch": begin.epoch, "resume_step": begin.resume_step}
        if end is not None:
            launch = {**vars(end), **launch, "seconds": end.time - begin.time}
            if not reported:
                launch["last_step"] = None
        launches.append(LaunchStory.model_validate(launch))
    return AttemptStory(
        job_id=start.job_id,
        restart_count=start.restart_count,
        nodes=start.nodes,
        start_time=start.time,
        launches=tuple(launches),
        signals=tuple(one.signal or "" for one in signals(events)),
        stop_time=timed.reason if timed else None,
        action=(last.action or last.cause) if last else None,
        reason=last.reason if last else None,
        placement=placed.reason if placed else None,
        placement_details=placed.evidence if placed else (),
        tracking_failure=untracked.reason if untracked else None,
        metrics_failure=unexported.reason if unexported else None,
    )


def request_history(events: Sequence[Event], saves: Sequence[SaveRecord]) -> list[RequestStory]:
    """List all requests, and what was accepted or removed, in the order of the ledger."""
    stories = []
    for number, event in enumerate(events):
        if event.event is not EventKind.CONTROL and event.event not in _DONE_AT_ONCE:
            continue
        time, answer = _answer(event, events[number + 1 :], saves) or (None, None)
        stories.append(
            RequestStory(
                asked_time=event.time,
                user=event.user,
                action=_DONE_AT_ONCE.get(event.event, event.action or ""),
                reason=event.reason,
                answer=answer,
                answer_seconds=None if time is None else max(0.0, time - event.time),
            )
        )
    return stories


def _answer(
    event: Event, later: Sequence[Event], saves: Sequence[SaveRecord]
) -> tuple[float, str] | None:
    """Find when and how a request was answered; None if it has not been followed yet."""
    if event.event in _DONE_AT_ONCE:
        return event.time, "; ".join(event.evidence) or f"{event.last_step or 0:,} steps given up"
    if event.action == TAKE_BACK:
        return event.time, "withdrawn"
    if event.action == "save":
        after = [save for save in saves if save.time >= event.time]
        return (after[0].time, f"step {after[0].step:,} is saved") if after else None
    resumes = event.action == "resume"
    for one in later:
        if one.event is EventKind.CONTROL and one.action != "save":
            return one.time, f"asked to {one.action} instead"
        if resumes and one.event is EventKind.SUBMITTED:
            return one.time, f"submitted as job {one.job_id}"
        if resumes and one.event is EventKind.ATTEMPT_STARTED:
            return one.time, "started again"
        if not resumes and one.event is EventKind.ACTION and one.action in ENDS_RUN:
            return one.time, f"{one.action}: {one.reason}"
    return None


# -- Formats the history of a run ---------------------------------------------------------------


# Columns before the texts of an attempt.
_TEXT = 12


def story_lines(story: RunStory) -> list[str]:
    """Format attempts in order, each with its launches, then requests and checkpoints."""
    lines = facts(
        ("Run", story.run_id),
        ("State", story.state),
        ("Reason", story.reason),
        ("Directory", Whole(story.directory)),
        *(("Submitted", line) for line in story.answer.lines),
        margin=11,
    )
    for number, attempt in enumerate(story.attempts, 1):
        lines += ["", *_attempt_lines(number, attempt)]
    if story.asked:
        lines += ["", "Requests"]
    for asked in story.asked:
        why = f": {asked.reason}" if asked.reason else ""
        who = asked.user or "somebody"
        lines += paragraph(f"{asked.action} by {who}{why}", f"  {_clock(asked.asked_time)}  ")
        if asked.answer is None or asked.answer_seconds is None:
            lines.append("    not followed yet")
        else:
            later = f"    {short_duration(asked.answer_seconds)} later  "
            lines += paragraph(asked.answer, later)
    lines += ["", "Checkpoints"]
    for checkpoint in story.checkpoints:
        size = "-" if checkpoint.total_bytes is None else short_bytes(checkpoint.total_bytes)
        lines.append(f"  step {checkpoint.step:,}   {size}   {checkpoint.problem or 'good'}")
    if not story.checkpoints:
        lines.append("  none")
    if story.notices:
        lines += ["", *notice_lines(story.notices)]
    if story.evaluations:
        lines += ["", "Evaluations", *evaluation_lines(story.evaluations)]
    if story.software:
        lines += ["", *software_lines(story.software)]
    if story.software_changes:
        lines += ["", "Software has changed"]
    for change in story.software_changes:
        lines.append(f"  with launch {change.epoch}")
        lines += [f"    {text}" for text in change.changes]
    if story.speed is not None:
        lines += ["", *speed_lines(story.speed)]
    if story.tracking:
        lines += ["", "Curves", *(f"  {command}" for command in story.tracking)]
    return lines


def _attempt_lines(number: int, attempt: AttemptStory) -> list[str]:
    job = f"job {attempt.job_id}, restart {attempt.restart_count}"
    lines = [f"Attempt {number}  {_clock(attempt.start_time)}   {job}   nodes {attempt.nodes}"]
    lines += facts(("  placed", attempt.placement), margin=_TEXT)
    details = " " * _TEXT + "| "
    for line in attempt.placement_details:
        lines += paragraph(line, details)
    for launch in attempt.launches:
        steps = f"from step {launch.resume_step}"
        if launch.last_step is not None:
            steps += f" to {launch.last_step}"
        if launch.last_step is not None or launch.checkpoint_step is not None:
            steps += f", newest checkpoint {launch.checkpoint_step or 'none'}"
        seconds = "" if launch.seconds is None else f"   {short_duration(launch.seconds)}"
        lines.append(f"  launch {launch.epoch}  {steps}{seconds}")
        if launch.cause:
            lines += facts(("  ended", f"{launch.cause}: {launch.reason}"), margin=_TEXT)
        for line in launch.evidence:
            lines += paragraph(line, details)
    then = attempt.action and f"{attempt.action}: {attempt.reason}"
    return lines + facts(
        ("  signals", ", ".join(attempt.signals)),
        ("  stopped", attempt.stop_time),
        ("  tracking", attempt.tracking_failure),
        ("  metrics", attempt.metrics_failure),
        ("  then", then),
        margin=_TEXT,
    )


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


# -- Formats the software and the GPUs that a launch has found on its nodes ---------------------


_MOST_NODES = 4


def software_lines(records: Sequence[SoftwareRecord]) -> list[str]:
    """Format the facts of the newest launch, once for all nodes that have the same."""
    if not records:
        return []
    lines = [f"Software of launch {records[0].epoch}"]
    for record in records:
        if len(records) > 1:
            nodes = ", ".join(record.nodes[:_MOST_NODES])
            more = len(record.nodes) - _MOST_NODES
            lines.append(f"  on {nodes}" + (f" and {more} more" if more > 0 else ""))
        named = ((f"  {name}", Whole(value)) for name, value in _facts(record.facts))
        lines += facts(*named, margin=21)
    return lines


def _facts(facts: SoftwareFacts) -> Iterator[tuple[str, str]]:
    if facts.hpctrain is not None:
        code = f" ({facts.code}), kept with the run" if facts.code else ", as it is installed"
        yield "hpctrain", f"{facts.hpctrain}{code}"
    yield "python, torch", f"{facts.python}, {facts.torch}"
    if facts.cuda_build is not None:
        driver = f"driver {facts.driver or 'unknown'}"
        if facts.driver_cuda is not None:
            driver += f" (up to CUDA {facts.driver_cuda})"
        yield "CUDA", f"{facts.cuda_build}, {driver}, NCCL {facts.nccl}"
        gpus = [f"{count} x {name}" for name, count in Counter(facts.gpus).items()]
        yield "GPUs of a rank", ", ".join(gpus) or f"none: {facts.gpu_error}"
    if facts.megatron_core is not None:
        yield "megatron-core", facts.megatron_core
    if facts.cuda_build is not None:
        kernels = f", attention: {', '.join(facts.attention)}" if facts.attention else ""
        yield "TransformerEngine", f"{facts.transformer_engine}{kernels}"
        yield "Apex wgrad", str(facts.apex_wgrad)
        yield "triton, compiler", f"{facts.triton}, {facts.compiler or 'no compiler'}"
    yield "open files", f"{facts.open_files:,} at most"
    for remark in facts.remarks:
        yield "warning", remark


# -- Formats the check of GPUs and links before training, in lines of at most 80 columns --------


_COLUMN, _MOST_FAR = 20, 4


def speed_lines(check: SpeedCheck) -> list[str]:
    """Format the measurements of one launch: medians and extremes, then what is slow."""
    nodes = len(set(check.nodes))
    second = ", in two rounds" if check.rounds > 1 else ""
    lines = [
        f"Speed before launch {check.epoch}: {len(check.nodes)} ranks on {nodes} "
        f"node{'s' * (nodes != 1)}, measured in {check.seconds:.0f} s{second}"
    ]
    named = ((f"  {name}", value) for name, value in _measurements(check))
    return lines + facts(*named, margin=_COLUMN)


def _measurements(check: SpeedCheck) -> Iterator[tuple[str, str]]:
    if check.gpu is not None:
        yield "GPU", check.gpu
    size = "x".join(map(str, check.product_mnk))
    flops = _spread(check.product_flops_per_second, 1e12, "TFLOP/s")
    yield "matrix products", f"{flops}{_planned(check.expected_flops_per_second, 1e12, 'TFLOP/s')}"
    yield "", f"{check.precision}, {size}"
    if any(check.copy_bytes_per_second):
        yield "copies in memory", _spread(check.copy_bytes_per_second, 1e9, "GB/s")
    if any(check.clock_hz):
        highest = max((clock or 0.0 for clock in check.highest_clock_hz), default=0.0)
        most = f" of {highest / 1e6:,.0f} MHz" if highest else ""
        yield "SM clock", f"{_spread(check.clock_hz, 1e6, 'MHz')}{most}"
    slowdowns = Counter(words for words in check.slowdowns if words)
    if slowdowns:
        yield "held down by", _counts(slowdowns)
    free = [bytes_ for bytes_ in check.free_memory_bytes if bytes_ is not None]
    if free:
        yield "free memory", f"{short_bytes(min(free))} at least"
    networks = Counter(found for found in check.networks if found)
    if networks:
        yield "network of NCCL", _counts(networks)
    for axis in check.axes:
        rates = _spread(axis.bus_bytes_per_second, 1e9, "GB/s")
        yield (
            f"axis {axis.axis} {axis.ranks_per_group}",
            f"{rates}{_planned(axis.expected_bytes_per_second, 1e9, 'GB/s')}",
        )
        yield "", f"{axis.operation} of {short_bytes(axis.message_bytes)}"
    far = check.far_ranks
    for words in far[:_MOST_FAR]:
        yield "CPUs", words
    if len(far) > _MOST_FAR:
        yield "", f"and {len(far) - _MOST_FAR} more ranks"
    for words in [part.message for part in check.slow] or ["nothing"]:
        yield "slow", words
    for skipped in check.skipped:
        yield "not measured", skipped
    if check.leaves:
        yield "then", "the launch ended, so that these nodes are replaced"


def _counts(found: Counter[str]) -> str:
    return ", ".join(f"{words}: {n} rank{'s' * (n != 1)}" for words, n in found.items())


def _spread(values: Sequence[float | None], unit: float, name: str) -> str:
    known = [value / unit for value in values if value is not None]
    if not known:
        return "unknown"
    return f"{_number(median(known))} {name}, lowest {_number(min(known))} {name}"


def _planned(expected: float | None, unit: float, name: str) -> str:
    return "" if expected is None else f", the plan has {_number(expected / unit)} {name}"


def _number(value: float) -> str:
    """Format three digits, or all digits of a whole part that has more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
