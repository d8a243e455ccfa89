"""Where the time of a run went: attempts, categories, causes, launches. Pure.

Belongs here: wall time. Does not belong here: time per step (`curve_sections`).
"""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.page.charts import Axis, Entry, Part, Row, Step, nothing, timeline, waterfall
from hpctrain.page.elements import Card, Section, Table, key
from hpctrain.page.words import UNKNOWN, count, counted, duration, hours, moment, ratio, words_of
from hpctrain.report.collect import RunReport
from hpctrain.report.curve_sections import launches_of, lost_steps
from hpctrain.report.measures import Span
from hpctrain.report.missing import missing
from hpctrain.telemetry.goodput import LossByCause

# Categories of time in the order in which a run goes through them: words, class of the colour.
CATEGORIES = {
    "productive": ("productive", "c3"),
    "redone": ("redone steps", "c2"),
    "saving": ("saving", "c6"),
    "between": ("between steps", "c7"),
    "starting": ("starting", "c4"),
    "queueing": ("in the queue", "pale"),
    "detecting": ("detecting", "c8"),
    "restarting": ("restarting", "c5"),
    "down": ("down", "dark"),
    "held": ("held", "neutral"),
}
_STEPS = {"productive", "redone"}
_PAUSES = {"saving", "between"}
_VISIBLE_SHARE = 0.002
_MOST_ROWS = 200


def time_spent(report: RunReport) -> Section:
    spent = report.goodput
    if spent is None or spent.wall_seconds <= 0:
        card = missing("Time", report, "time", "The run has not been submitted yet.", wide=True)
        return Section("time", "Time", [card])
    cards = [_timeline_card(report), _waterfall_card(report), _causes_card(report)]
    cards.append(_attempts_card(report))
    return Section("time", "Time", cards)


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
        parts = [_part(span) for span in _without_short_pauses(spans, end * _VISIBLE_SHARE)]
        shown.append(Row(f"attempt {attempt}", parts, detail))
    present = {span.category for span in report.spans}
    entries = [Entry(*CATEGORIES[name]) for name in CATEGORIES if name in present]
    chart = timeline(shown, label="Attempts over time", end=end, entries=entries)
    left = len(rows) - len(shown)
    note = f"The {left:,} oldest attempts are left out." if left else ""
    return Card("Attempts over time", chart, note, wide=True)


def _part(span: Span) -> Part:
    words, colour = CATEGORIES[span.category]
    length = span.end_seconds - span.start_seconds
    because = f", because of {words_of(span.cause)}" if span.cause else ""
    return Part(
        span.start_seconds,
        length,
        colour,
        f"{words}: {duration(length)}{because}",
        always=span.category not in _STEPS | _PAUSES,
    )


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


def waterfall_steps(report: RunReport) -> list[Step]:
    """Take from the wall time what was not productive, category by category."""
    spent = report.goodput
    assert spent is not None
    steps = [Step("wall time", spent.wall_seconds, "neutral", is_total=True)]
    for name in (
        "held",
        "queueing",
        "starting",
        "down",
        "detecting",
        "restarting",
        "redone",
        "saving",
        "between",
    ):
        value = spent.seconds.get(name, 0.0)
        if value > 0:
            words, colour = CATEGORIES[name]
            share = f"{words}: {duration(value)}, {value / spent.wall_seconds:.1%} of the wall time"
            steps.append(Step(words, value, colour, detail=share))
    steps.append(Step("productive", spent.seconds.get("productive", 0.0), "c3", is_total=True))
    return steps


def _waterfall_card(report: RunReport) -> Card:
    spent = report.goodput
    assert spent is not None
    chart = waterfall(
        waterfall_steps(report),
        label="From wall time to productive time",
        x=Axis("time", duration, "seconds"),
    )
    note = f"{ratio(spent.ettr)} productive (ETTR), {ratio(spent.ettr_without_queue)} without "
    note += f"the queue. {counted(spent.kept_steps, 'step')} kept"
    note += f", {spent.lost_steps:,} lost and redone." if spent.lost_steps else "."
    return Card("From wall time to productive time", chart, note)


def _causes_card(report: RunReport) -> Card:
    spent = report.goodput
    assert spent is not None
    if not spent.causes:
        return Card("Losses by cause", nothing("Nothing was lost."))
    body = Table.of(
        spent.causes,
        {
            "Cause": ("name", lambda one: words_of(one.cause)),
            "Ends": ("number", lambda one: count(one.ends)),
            "Lost": ("number", lambda one: duration(one.lost_seconds)),
            "GPU-hours": ("number", lambda one: hours(one.lost_gpu_hours)),
            "Steps": ("number", lambda one: count(one.lost_steps)),
            "Mostly": ("name", _mostly),
        },
    )
    note = ""
    if spent.recovery_median_seconds is not None:
        note = f"Recovery takes {duration(spent.recovery_median_seconds)} (median), from the last "
        note += "sign of life to a new step."
    return Card("Losses by cause", body, note)


def _mostly(loss: LossByCause) -> str:
    if not loss.seconds:
        return UNKNOWN
    words, colour = CATEGORIES[max(loss.seconds, key=loss.seconds.__getitem__)]
    return key(colour, words)


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
