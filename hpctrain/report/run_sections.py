"""The sections of the page about a run: losses, time, speed, memory, messages, records. Pure.

Belongs here: what each section shows, and why a card is empty. Does not belong here: the page
(`run_page`), collecting (`collect`), parts of pages (`hpctrain.page`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from markupsafe import Markup, escape

from hpctrain.judge.causes import FAILURE_CAUSES
from hpctrain.page.charts import (
    Axis,
    Bar,
    Cells,
    Entry,
    Level,
    Line,
    Part,
    Row,
    Rule,
    Step,
    bar_chart,
    heat_map,
    legend,
    line_chart,
    nothing,
    stacked_bar,
    timeline,
    waterfall,
)
from hpctrain.page.elements import (
    Card,
    Section,
    Table,
    changed_lines,
    code,
    folded,
    key,
    paragraph,
    styled,
)
from hpctrain.page.scales import percent
from hpctrain.page.words import (
    UNKNOWN,
    count,
    counted,
    duration,
    hours,
    moment,
    number,
    ratio,
    size,
    words_of,
)
from hpctrain.report.collect import RunReport
from hpctrain.report.measures import NodeTimes, Span
from hpctrain.runs.describe import LaunchStory
from hpctrain.telemetry.goodput import Goodput, LossByCause
from hpctrain.telemetry.thinning import Point


def missing(title: str, report: RunReport, part: str, otherwise: str, wide: bool = False) -> Card:
    """Say in the place of a card why it is empty."""
    reason = report.why_not(part)
    words = f"Cannot be shown: {reason}" if reason else otherwise
    return Card(title, nothing(words), wide=wide)


# -- What ranks, nodes and pipeline stages have measured: computation, memory, messages ---------


_PART_COLOURS = {"passes": "c3", "data": "c4", "optimizer": "c7", "rest": "pale"}
_SLOW = 1.05
_MOST_BARS = 24
# Columns of stages that half a page has room for.
_STAGES_BESIDE = 4


def rank_cards(report: RunReport) -> list[Card]:
    """Show where the time of a step goes, and how long each node computes.

    Nodes are bars, or cells where there are many.
    """
    window = report.window
    if window is None and report.trainer is not None:
        return []
    if window is None:
        return [missing("Nodes", report, "ranks", "Ranks have not written their times yet.")]
    steps = f"{window.first_step:,} to {window.last_step:,}"
    parts = [(Entry(name, _PART_COLOURS[name]), value) for name, value in window.shares.items()]
    bar = stacked_bar(parts, label="Parts of a step", format=duration)
    cards = [Card("Parts of a step", bar, f"Steps {steps}, means of ranks.")]
    nodes = window.nodes
    if not nodes:
        return cards
    slow = [one for one in nodes if one.relative >= _SLOW]
    names = ", ".join(f"{one.node} ({one.relative - 1:+.1%})" for one in slow[:8])
    more = f" and {len(slow) - 8:,} more" if len(slow) > 8 else ""
    note = f"Time that ranks compute in a step, steps {steps}. "
    note += f"Slower than the middle node: {names}{more}." if slow else "All within 5 %."
    if len(nodes) <= _MOST_BARS:
        bars = [
            Bar(
                one.node, one.own_seconds, _node_words(one), "c8" if one.relative >= _SLOW else "c1"
            )
            for one in nodes
        ]
        per_step = Axis("time per step", duration, "seconds")
        chart = bar_chart(bars, label="Computation by node", x=per_step)
        if slow:
            chart += legend(
                (Entry("within 5 % of the middle node or faster", "c1"), Entry("slower", "c8"))
            )
        return [*cards, Card("Nodes", chart, note, wide=len(nodes) > 8)]
    width = 32
    blank: list[NodeTimes | None] = [None] * width
    rows = [
        [*nodes[start : start + width], *blank][:width] for start in range(0, len(nodes), width)
    ]
    fastest = min(one.own_seconds for one in nodes)
    slowest = max(one.own_seconds for one in nodes)
    cells = Cells(
        rows=[one.node for one in nodes[::width]],
        columns=[f"+{index}" for index in range(width)],
        values=[
            [None if one is None else one.own_seconds - fastest * 0.999 for one in row]
            for row in rows
        ],
        tooltips=[["" if one is None else _node_words(one) for one in row] for row in rows],
        row_word="first node of the row",
        column_word="nodes in the order of ranks",
        largest=f"{slowest / fastest - 1:+.1%} slower than the fastest" if fastest else "",
    )
    chart = heat_map(cells, label="Computation by node", row_pixels=16)
    return [*cards, Card("Nodes", chart, note, wide=True)]


def _node_words(one: NodeTimes) -> str:
    words = f"{one.node}, {counted(one.ranks, 'rank')}: computes {duration(one.own_seconds)} a step"
    return f"{words} ({one.relative - 1:+.1%}), waits {duration(one.data_seconds)} for data"


def memory(report: RunReport) -> Section | None:
    window, plan = report.window, report.plan
    stages = window.stages if window else ()
    if not stages and plan is None:
        return None
    if plan is not None and not stages:
        bars = [Bar(f"stage {n}", None, mark=one.total_bytes) for n, one in enumerate(plan.memory)]
    else:
        bars = [
            Bar(
                f"stage {one.stage}",
                one.allocated_bytes,
                f"stage {one.stage}: {size(one.allocated_bytes)} allocated, "
                f"{size(one.reserved_bytes)} taken, {size(one.predicted_bytes)} predicted",
                mark=one.predicted_bytes,
            )
            for one in stages
        ]
    on_gpu = plan is None or plan.accelerator == "cuda"
    note = "The fullest GPU of each pipeline stage." if on_gpu else "Trained on CPUs: the largest "
    note += "" if on_gpu else "resident set of a process, which says nothing of a GPU."
    limit = plan.gpu_memory_bytes if plan and on_gpu else 0
    axis = Axis("memory", size, "bytes", values=(limit,) if limit else ())
    chart = bar_chart(bars, label="Memory by stage", x=axis)
    chart += legend((Entry("measured", "c1"), Entry("predicted (line)", "dark")))
    wide = plan is not None and len(plan.memory) > _STAGES_BESIDE
    cards = [Card("Memory by pipeline stage", chart, note, wide=wide)]
    if plan is not None:
        shown = plan.memory[:8]
        rows = [
            [words_of(name.removesuffix("_bytes")), *(size(getattr(one, name)) for one in shown)]
            for name in type(plan.memory[0]).model_fields
            if any(getattr(one, name) for one in plan.memory)
        ]
        rows.append(["total", *(size(one.total_bytes) for one in shown)])
        columns = {"Predicted": "", **{f"Stage {n}": "number" for n in range(len(shown))}}
        left = len(plan.memory) > len(shown)
        note = f"The first {len(shown)} of {len(plan.memory)} stages." if left else ""
        cards.append(Card("What it is made of", Table(columns, rows), note, wide=wide))
    return Section("memory", "Memory", cards)


def messages(report: RunReport) -> Section | None:
    found = report.messages
    if found is None and report.trainer is not None:
        return None
    if found is None:
        words = "No step's messages have been measured (communication.json)."
        card = missing("Messages between ranks", report, "messages", words, wide=True)
        return Section("communication", "Communication", [card])
    note = f"Step {found.step:,}, {duration(found.step_seconds)} long"
    note += f", measured with {found.source}." if found.source else "."
    seconds = [
        Bar(
            one.axis,
            one.mean_seconds,
            f"{one.axis}: {duration(one.mean_seconds)} (most: {duration(one.most_seconds)})",
            mark=one.planned_seconds,
        )
        for one in found.axes
    ]
    chart = bar_chart(
        seconds, label="Time in messages by axis", x=Axis("time per step", duration, "seconds")
    )
    if any(one.planned_seconds is not None for one in found.axes):
        chart += legend(
            (Entry("measured, mean of ranks", "c1"), Entry("planned, not hidden (line)", "dark"))
        )
    amounts = [Bar(one.axis, one.mean_bytes, colour="c6") for one in found.axes]
    cards = [
        Card("Time in messages", chart, note),
        Card(
            "Bytes in messages",
            bar_chart(
                amounts, label="Bytes by axis", x=Axis("bytes per step and rank", size, "bytes")
            ),
            "What a rank hands to collectives and sends, mean of ranks.",
        ),
    ]
    table = Table.of(
        found.axes,
        {
            "Axis": ("name", lambda one: one.axis),
            "Groups": ("number", lambda one: count(one.groups)),
            "Ranks": ("number", lambda one: count(one.ranks_per_group)),
            "Calls": ("number", lambda one: number(one.calls)),
            "Bytes": ("number", lambda one: size(one.mean_bytes)),
            "Mean": ("number", lambda one: duration(one.mean_seconds)),
            "Most": ("number", lambda one: duration(one.most_seconds)),
            "Planned": ("number", lambda one: duration(one.planned_seconds)),
        },
    )
    cells = Cells(
        found.names, found.names, found.matrix, size, f"from {found.unit}", f"to {found.unit}"
    )
    matrix = heat_map(cells, label="Bytes between ranks")
    note = "Bytes in the step. Of a collective, what a ring would send."
    cards.append(Card(f"Who sends to whom, by {found.unit}", matrix, note))
    cards.append(Card("Messages by axis", table))
    return Section("communication", "Communication", cards)


# -- What changes from step to step: losses, speed, with the launches marked --------------------


def launches_of(report: RunReport) -> Iterator[tuple[int, LaunchStory, LaunchStory | None]]:
    """List the launches with the number of their attempt and the launch before."""
    before = None
    for attempt, story in enumerate(report.story.attempts if report.story else (), 1):
        for launch in story.launches:
            yield attempt, launch, before
            before = launch


def rules_of(report: RunReport) -> list[Rule]:
    """Mark where launches continue, with the cause that ended the one before."""
    rules = []
    for attempt, launch, before in launches_of(report):
        if before is None or launch.resume_step is None:
            continue
        cause = words_of(before.cause or "unknown")
        lost = lost_steps(before, launch)
        words = f"Launch {launch.epoch}, attempt {attempt}, continues from step "
        words += f"{launch.resume_step:,} after: {cause}"
        words += f". {before.reason}" if before.reason else ""
        words += f". {counted(lost, 'step')} lost" if lost else ""
        failed = before.cause in FAILURE_CAUSES
        rules.append(Rule(launch.resume_step, words, cause, "c8" if failed else "neutral"))
    return rules


def lost_steps(before: LaunchStory, launch: LaunchStory) -> int:
    """Count the steps that the launch has to train again."""
    if before.last_step is None or launch.resume_step is None:
        return 0
    return max(0, before.last_step - launch.resume_step)


def learning(report: RunReport) -> Section:
    """Draw the losses of steps that count and of those that do not, and what belongs to them."""
    curves, rules = report.curves, rules_of(report)
    if curves is None or not (curves.loss or curves.dropped):
        words = "No step has been trained yet."
        if report.trainer is not None:
            words = "Its trainer has not reported any loss."
        card = missing("Loss", report, "time", words, wide=True)
        return Section("learning", "Learning", [card])
    noisy = bool(curves.loss_mean)
    lines = [Line("every step" if noisy else "loss", curves.loss, faint=noisy)]
    lines += [Line("mean", curves.loss_mean, "c1")] if noisy else []
    lines += [Line("dropped, trained again", one.loss, "c2", dashed=True) for one in curves.dropped]
    if curves.evaluation_loss:
        lines.append(Line("evaluation", curves.evaluation_loss, "c3"))
    lost = sum(one.count for one in curves.dropped)
    note = "Vertical lines: a launch continues from a checkpoint, and why. " if rules else ""
    note += f"{counted(lost, 'step')} dropped and trained again." if lost else ""
    chart = line_chart(
        lines, label="Loss over steps", x=Axis("step"), y=Axis("loss"), rules=rules, height=280
    )
    curve = functools.partial(_curve_card, report)
    norm, rate = "norm before clipping", "learning rate"
    cards = [Card("Loss", chart, note, wide=True)]
    if report.trainer is None or _has_values(curves.gradient_norm):
        cards.append(curve("Gradient norm", curves.gradient_norm, "c7", Axis(norm, from_zero=True)))
    if report.trainer is None or _has_values(curves.learning_rate):
        cards.append(curve("Learning rate", curves.learning_rate, "c5", Axis(rate, from_zero=True)))
    return Section("learning", "Learning", cards)


def _has_values(points: Sequence[Point]) -> bool:
    return any(value is not None for _, value in points)


def _curve_card(
    report: RunReport,
    title: str,
    points: Sequence[Point],
    colour: str,
    y: Axis,
    planned: tuple[float | None, str] = (None, ""),
) -> Card:
    """Draw one curve over steps, what was planned as a level, launches as lines without words."""
    chart = line_chart(
        [Line("", points, colour)],
        label=f"{title} over steps",
        x=Axis("step"),
        y=y,
        rules=[replace(rule, label="") for rule in rules_of(report)],
        levels=[Level(planned[0], f"planned {planned[1]}")] if planned[0] else [],
        height=180,
    )
    return Card(title, chart)


def speed(report: RunReport) -> Section | None:
    """Draw how fast steps are, and where their time goes."""
    curves, plan = report.curves, report.plan
    if curves is None or not curves.step_seconds:
        return None
    planned = plan.step_seconds if plan else None
    expected = plan.prediction.mfu if plan and plan.prediction else None
    curve = functools.partial(_curve_card, report)
    seconds = Axis("seconds", from_zero=True)
    per_second = Axis(f"{plan.unit if plan else 'tokens'} per second", from_zero=True)
    cards = [
        curve("Step time", curves.step_seconds, "c1", seconds, (planned, duration(planned))),
    ]
    if report.trainer is None or _has_values(curves.tokens_per_second):
        cards.append(curve("Throughput", curves.tokens_per_second, "c3", per_second))
    if _has_values(curves.mfu):
        title, level = "Model FLOPs utilization", (expected, percent(expected or 0))
        cards.append(curve(title, curves.mfu, "c7", Axis("MFU", percent, from_zero=True), level))
    return Section("speed", "Speed", [*cards, *rank_cards(report)])


# -- Where the time of a run went: attempts, categories, causes, launches -----------------------


# Categories of time in the order in which a run goes through them: words, class of the colour.
CATEGORIES = {
    "productive": ("productive", "c3"),
    "redone": ("redone steps", "c2"),
    "saving": ("saving", "c6"),
    "between": ("between steps", "c7"),
    "unreported": ("not reported", "c1"),
    "starting": ("starting", "c4"),
    "queueing": ("in the queue", "pale"),
    "detecting": ("detecting", "c8"),
    "restarting": ("restarting", "c5"),
    "down": ("down", "dark"),
    "held": ("held", "neutral"),
}
_STEPS = {"productive", "redone"}
_PAUSES = {"saving", "between"}
# What is not productive, as it is taken from the wall time.
_TAKEN_AWAY = (
    *("held", "queueing", "starting", "down", "detecting", "restarting", "redone", "saving"),
    *("between", "unreported"),
)
_VISIBLE_SHARE = 0.002
_MOST_ROWS = 200


def time_spent(report: RunReport) -> Section:
    spent = report.goodput
    if spent is None or spent.wall_seconds <= 0:
        card = missing("Time", report, "time", "The run has not been submitted yet.", wide=True)
        return Section("time", "Time", [card])
    # From the wall time is taken what was not productive, category by category.
    steps = [Step("wall time", spent.wall_seconds, "neutral", is_total=True)]
    for name in _TAKEN_AWAY:
        value = spent.seconds.get(name, 0.0)
        if value > 0:
            words, colour = CATEGORIES[name]
            share = f"{words}: {duration(value)}, {value / spent.wall_seconds:.1%} of the wall time"
            steps.append(Step(words, value, colour, detail=share))
    if spent.kept_steps is not None:
        steps.append(Step("productive", spent.seconds.get("productive", 0.0), "c3", is_total=True))
    title = "From wall time to productive time"
    chart = waterfall(steps, label=title, x=Axis("time", duration, "seconds"))
    note = "Its trainer does not report steps: what was productive is not known."
    if spent.kept_steps is not None:
        note = f"{ratio(spent.ettr)} productive (ETTR), {ratio(spent.ettr_without_queue)} without "
        note += f"the queue. {counted(spent.kept_steps, 'step')} kept"
        note += f", {spent.lost_steps:,} lost and redone." if spent.lost_steps else "."
    cards = [_timeline_card(report), Card(title, chart, note), _causes_card(spent)]
    return Section("time", "Time", [*cards, _attempts_card(report)])


def _timeline_card(report: RunReport) -> Card:
    rows: dict[int, list[Span]] = {}
    for span in report.spans:
        rows.setdefault(span.attempt, []).append(span)
    attempts = report.story.attempts if report.story else ()
    end = max((span.end_seconds for span in report.spans), default=0.0)
    shown = []
    for attempt, spans in sorted(rows.items())[-_MOST_ROWS:]:
        detail = ""
        if attempt <= len(attempts):
            one = attempts[attempt - 1]
            detail = f"job {one.job_id}, nodes {one.nodes}"
        parts = []
        for span in _without_short_pauses(spans, end * _VISIBLE_SHARE):
            words, colour = CATEGORIES[span.category]
            length = span.end_seconds - span.start_seconds
            because = f", because of {words_of(span.cause)}" if span.cause else ""
            always = span.category not in _STEPS | _PAUSES
            tooltip = f"{words}: {duration(length)}{because}"
            parts.append(Part(span.start_seconds, length, colour, tooltip, always=always))
        shown.append(Row(f"attempt {attempt}", parts, detail))
    present = {span.category for span in report.spans}
    entries = [Entry(*CATEGORIES[name]) for name in CATEGORIES if name in present]
    chart = timeline(shown, label="Attempts over time", end=end, entries=entries)
    left = len(rows) - len(shown)
    note = f"The {left:,} oldest attempts are left out." if left else ""
    return Card("Attempts over time", chart, note, wide=True)


def _without_short_pauses(spans: Sequence[Span], seconds: float) -> list[Span]:
    """Leave out saves and pauses between steps that are too short to be seen."""
    kept: list[Span] = []
    for span in spans:
        before = kept[-1] if kept else None
        short = span.end_seconds - span.start_seconds < seconds
        if (
            before is not None
            and before.category in _STEPS
            and (span.category == before.category or (span.category in _PAUSES and short))
        ):
            kept[-1] = before.model_copy(update={"end_seconds": span.end_seconds})
        else:
            kept.append(span)
    return kept


def _causes_card(spent: Goodput) -> Card:
    if not spent.causes:
        return Card("Losses by cause", nothing("Nothing was lost."))

    def mostly(loss: LossByCause) -> str:
        if not loss.seconds:
            return UNKNOWN
        words, colour = CATEGORIES[max(loss.seconds, key=loss.seconds.__getitem__)]
        return key(colour, words)

    body = Table.of(
        spent.causes,
        {
            "Cause": ("name", lambda one: words_of(one.cause)),
            "Ends": ("number", lambda one: count(one.ends)),
            "Lost": ("number", lambda one: duration(one.lost_seconds)),
            "GPU-hours": ("number", lambda one: hours(one.lost_gpu_hours)),
            "Steps": ("number", lambda one: count(one.lost_steps)),
            "Mostly": ("name", mostly),
        },
    )
    note = ""
    if spent.recovery_median_seconds is not None:
        note = f"Recovery takes {duration(spent.recovery_median_seconds)} (median), from the last "
        note += "sign of life to a new step."
    return Card("Losses by cause", body, note)


def _attempts_card(report: RunReport) -> Card:
    story = report.story
    if story is None or not story.attempts:
        return missing("Launches", report, "story", "No attempt has begun yet.", wide=True)
    following = {before.epoch: launch for _, launch, before in launches_of(report) if before}
    rows = []
    for attempt, one in enumerate(story.attempts, 1):
        where = f"{one.job_id}.{one.restart_count}" if one.restart_count else str(one.job_id)
        first = [f"{attempt}", where, one.nodes or UNKNOWN, moment(one.start_time)]
        if not one.launches:
            rows.append([*first, UNKNOWN, UNKNOWN, UNKNOWN, one.reason or UNKNOWN, UNKNOWN])
        for launch in one.launches:
            next_one = following.get(launch.epoch)
            lost = lost_steps(launch, next_one) if next_one else 0
            last = report.status.step if launch.cause is None else launch.last_step
            steps = f"{count(launch.resume_step)} to {count(last)}"
            if last is None:
                steps = f"from {count(launch.resume_step)}"
            ended = words_of(launch.cause) if launch.cause else "runs"
            more = [ended, launch.reason or "", f"{lost:,}" if lost else ""]
            rows.append([*first, steps, duration(launch.seconds), *more])
            first = ["", "", "", ""]
    columns = {"Attempt": "number", "Job": "name", "Nodes": "name", "Began": "name"}
    columns |= {"Steps": "number", "Time": "number", "Ended": "name", "Reason": "words"}
    columns |= {"Lost": "number"}
    left = len(rows) - _MOST_ROWS
    note = f"The newest {_MOST_ROWS} of {len(rows):,} launches." if left > 0 else ""
    return Card("Launches", Table(columns, rows[-_MOST_ROWS:]), note, wide=True)


# -- What a run has kept and what has happened to it: checkpoints, events, software -------------


_MOST_EVIDENCE = 60
_CHECKED = {"sha256": "every byte"}


def saved(report: RunReport) -> Section:
    found = report.checkpoints
    if found is None:
        card = missing("Checkpoints", report, "checkpoints", "None.", wide=True)
        return Section("checkpoints", "Checkpoints", [card])
    body = Table.of(
        found.rows[:_MOST_ROWS],
        {
            "Step": ("number", lambda one: f"{one.step:,}"),
            "Size": ("number", lambda one: size(one.size_bytes)),
            "Files": ("number", lambda one: count(one.files)),
            "Stall": ("number", lambda one: duration(one.stall_seconds)),
            "Until published": ("number", lambda one: duration(one.publish_seconds)),
            "Checked": ("name", lambda one: _CHECKED.get(one.verified, "names and sizes")),
            "Condition": ("words", lambda one: styled("worse", one.problem) or "good"),
            "Kept because": ("words", lambda one: "; ".join(one.kept_because)),
        },
    ).or_nothing("None has been published.")
    interval = found.interval
    note = ""
    if interval:
        advice = interval.advice
        note = f"Saves {interval.configured}. {advice[:1].upper()}{advice[1:]}."
    cards = [Card("Checkpoints", body, note, wide=True)]
    if found.quarantined:
        aside = [[one.name, size(one.size_bytes), one.reason] for one in found.quarantined]
        columns = {"Name": "name", "Size": "number", "Reason": "words"}
        cards.append(Card("In quarantine", Table(columns, aside), wide=True))
    return Section("checkpoints", "Checkpoints", cards)


def events(report: RunReport) -> Section | None:
    cards = []
    if report.errors is not None and report.errors.errors:
        body = Table.of(
            report.errors.errors[:20],
            {
                "Cause": ("name", lambda one: words_of(one.cause)),
                "Line": ("words", lambda one: code(one.line)),
                "Ranks": (
                    "name",
                    lambda one: (
                        ", ".join(map(str, one.ranks[:6]))
                        + (f" and {len(one.ranks) - 6:,} more" if len(one.ranks) > 6 else "")
                    ),
                ),
                "Nodes": ("name", lambda one: ", ".join(one.nodes[:4])),
                "": ("name", lambda one: "follows from another" if one.follows else "root"),
            },
        )
        launch = report.errors.epoch
        note = "" if launch is None else f"Of launch {launch}, the newest of its attempt."
        cards.append(Card("Errors in the logs", body, note, wide=True))
    elif report.why_not("errors"):
        cards.append(missing("Errors in the logs", report, "errors", "", wide=True))
    evidence = [
        [f"{launch.epoch}", words_of(launch.cause or ""), code(line)]
        for _, launch, _ in launches_of(report)
        for line in launch.evidence
    ]
    if evidence:
        columns = {"Launch": "number", "Ended": "name", "Evidence": "words"}
        note = "What the supervisor has judged by."
        body = Table(columns, evidence[-_MOST_EVIDENCE:])
        cards.append(Card("Why launches ended", body, note, wide=True))
    happened = [*report.happenings]
    for asked in report.story.asked if report.story else ():
        by = f" by {asked.user}" if asked.user else ""
        because = f": {asked.reason}" if asked.reason else ""
        answer = f" → {asked.answer}" if asked.answer else " (pending)"
        happened.append((asked.asked_time, f"{asked.action}{by}", f"{because[2:]}{answer}"))
    for told in report.story.notices if report.story else ():
        words = f"{told.channel}: {told.state}" + (f", {told.problem}" if told.problem else "")
        happened.append((told.event_time, f"notice: {words_of(told.kind)}", words))
    if happened:
        lines = [[moment(time), *words] for time, *words in sorted(happened)[-_MOST_ROWS:]]
        columns = {"When": "name", "What": "name", "Details": "words"}
        cards.append(Card("Requests, alerts, notices", Table(columns, lines), wide=True))
    return Section("events", "Events", cards) if cards else None


def software(report: RunReport) -> Section:
    cards = []
    lock = report.software
    changes = report.story.software_changes if report.story else ()
    parts = Table({"What": "name", "Version": "words"}, [*(lock.parts.items() if lock else ())])
    body = escape(parts.or_nothing("No launch has recorded its software."))
    note = f"As launch {lock.epoch} has found it (software.lock)." if lock else ""
    if lock is not None and lock.packages:
        packages = "\n".join(f"{name}=={value}" for name, value in lock.packages.items())
        body += folded(counted(len(lock.packages), "package"), packages)
    if report.why_not("software"):
        cards.append(missing("Software", report, "software", ""))
    else:
        cards.append(Card("Software", body, note))
    changed = [[f"{one.epoch}", "; ".join(one.changes)] for one in changes]
    differences = Table({"Launch": "number", "Changed": "words"}, changed)
    same = "All launches have found the same."
    cards.append(Card("Changes of software", differences.or_nothing(same)))
    versions = report.scripts
    if not versions:
        cards.append(missing("Job script", report, "script", "It is not known.", wide=True))
        return Section("software", "Software and script", cards)
    # How the script has changed from one submission to the next.
    jobs = sum(len(one.job_ids) for one in versions)
    note = f"{len(versions)} versions in {counted(jobs, 'submission')}."
    if len(versions) == 1:
        note = "The same for all submissions." if jobs > 1 else ""
    script = Markup("")
    for before, one in itertools.pairwise(versions):
        used = ", ".join(map(str, one.job_ids))
        words = f"Job {used}: " if used else "Edited since the last submission: "
        words += f"`{before.sha256[:12]}` became `{one.sha256[:12]}`"
        known = bool(one.changes)
        script += paragraph(words if known else f"{words}, of which no copy was kept")
        script += changed_lines(one.changes) if known else Markup("")
    text = versions[-1].text
    if text is not None:
        lines = counted(len(text.splitlines()), "line")
        script += folded(f"Show job.sbatch, {lines}", text)
    cards.append(Card("Job script", script, note, wide=True))
    return Section("software", "Software and script", cards)
