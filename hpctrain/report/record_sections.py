"""What a run has kept and what has happened to it: checkpoints, events, software. Pure.

Belongs here: tables of records. Does not belong here: figures (`rank_sections`, `time_sections`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from markupsafe import Markup, escape

from hpctrain.page.elements import (
    Card,
    Section,
    Table,
    changed_lines,
    code,
    folded,
    paragraph,
    styled,
)
from hpctrain.page.words import count, counted, duration, moment, size, words_of
from hpctrain.report.collect import RunReport
from hpctrain.report.curve_sections import launches_of
from hpctrain.report.missing import missing

_MOST_ROWS = 200
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
                "Ranks": ("name", lambda one: _ranks(one.ranks)),
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
    happened = [(one.event_time, one.kind, one.words) for one in report.happenings]
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


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:6]))
    return f"{shown} and {len(ranks) - 6:,} more" if len(ranks) > 6 else shown


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
    cards.append(_script_card(report))
    return Section("software", "Software and script", cards)


def _script_card(report: RunReport) -> Card:
    """Show the script and how it has changed from one submission to the next."""
    versions = report.scripts
    if not versions:
        return missing("Job script", report, "script", "It is not known.", wide=True)
    newest = versions[-1]
    jobs = sum(len(one.job_ids) for one in versions)
    if len(versions) == 1:
        note = "The same for all submissions." if jobs > 1 else ""
    else:
        note = f"{len(versions)} versions in {counted(jobs, 'submission')}."
    body = Markup("")
    for before, one in itertools.pairwise(versions):
        used = ", ".join(map(str, one.job_ids))
        words = f"Job {used}: " if used else "Edited since the last submission: "
        words += f"`{before.sha256[:12]}` became `{one.sha256[:12]}`"
        known = bool(one.changes)
        body += paragraph(words if known else f"{words}, of which no copy was kept")
        body += changed_lines(one.changes) if known else Markup("")
    if newest.text is not None:
        lines = counted(len(newest.text.splitlines()), "line")
        body += folded(f"Show job.sbatch, {lines}", newest.text)
    return Card("Job script", body, note, wide=True)
